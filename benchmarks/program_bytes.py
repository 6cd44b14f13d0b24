"""What the compiled forward + backward of each norm launches and moves on a GPU that need not be here.

    pip install -e ".[cuda13]" && python benchmarks/program_bytes.py --chip h200

bfloat16, y returned, float32 scale and offset; the norms with M * H = 2^25; megabytes
are 10^6 bytes, counted in the compiled program by `jln.program`: facts of the program, not measurements.
"""

import argparse
import itertools
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import jln
from jln import program

ELEMENTS = 2**25
WIDTHS = (1024, 4096, 8192, 16384, 32768)
LINEARS = ((8192, 4096, 12288), (8192, 4096, 256), (16384, 1024, 3072))  # M, H, N


def layer_norm_step(layer_norm):
    def step(x, scale, offset, dy):
        y, pullback = jax.vjp(layer_norm, x, scale, offset)
        return y, pullback(dy)

    return step


def add_layer_norm_step(add_layer_norm):
    def step(x, residual, scale, offset, dy, dtotal):
        results, pullback = jax.vjp(add_layer_norm, x, residual, scale, offset)
        dx, _, *dparameters = pullback((dy, dtotal))  # dresidual is dx; returning both would copy it
        return results, dx, dparameters

    return step


def layer_norm_linear_step(layer_norm_linear):
    def step(x, scale, offset, kernel, bias, dy):
        y, pullback = jax.vjp(layer_norm_linear, x, scale, offset, kernel, bias)
        return y, pullback(dy)

    return step


def norm_then_linear(x, scale, offset, kernel, bias):
    """What a user writes without the fused operator."""
    return jln.reference.layer_norm(x, scale, offset) @ kernel + bias


def linear_rows(chip: str):
    for m, h, n in LINEARS:
        x, kernel, bias, y = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((m, h), (h, n), (n,), (m, n)))
        p = jax.ShapeDtypeStruct((h,), "float32")
        once = 2 * (3 * m * h + 2 * m * n + 3 * h * n)  # x twice, dx; y, dy; kernel twice, dkernel
        for implementation, operator in (("jln", jln.layer_norm_linear), ("plain jnp", norm_then_linear)):
            step = layer_norm_linear_step(operator)
            report = program.compile_for(step, x, p, p, kernel, bias, y, chip=chip)
            name = f"linear {m}x{h}x{n}"
            yield name, h, implementation, report.launches, report.bytes_total, once, report.temp_bytes


def rows(chip: str):
    for h in WIDTHS:
        x = jax.ShapeDtypeStruct((ELEMENTS // h, h), "bfloat16")
        p = jax.ShapeDtypeStruct((h,), "float32")
        for name, step, arguments, tensors in (
            ("layer_norm", layer_norm_step, (x, p, p, x), 5),
            ("add_layer_norm", add_layer_norm_step, (x, x, p, p, x, x), 8),
        ):
            once = tensors * 2 * ELEMENTS
            for implementation, module in (("jln", jln), ("plain jnp", jln.reference)):
                report = program.compile_for(step(getattr(module, name)), *arguments, chip=chip)
                yield name, h, implementation, report.launches, report.bytes_total, once, report.temp_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="h200", choices=sorted(program.CHIPS))
    chip = parser.parse_args().chip
    print(f"{chip}, jax {jax.__version__}, jln {jln.__version__}")
    print(f"{'':22}{'H':>6}  {'':12}{'kernels':>8}{'MB':>8}{'once MB':>9}{'ratio':>7}{'temporary MB':>14}")
    for name, h, implementation, launches, total, once, temporary in itertools.chain(rows(chip), linear_rows(chip)):
        print(
            f"{name:22}{h:>6}  {implementation:12}{launches:>8}{total / 1e6:>8.0f}{once / 1e6:>9.0f}"
            f"{total / once:>7.2f}{temporary / 1e6:>14.1f}"
        )


if __name__ == "__main__":
    main()
