"""What the compiled forward + backward of each operator launches and moves on a GPU that need not be here.

    pip install -e ".[cuda13]" && python benchmarks/program_bytes.py --chip h200

bfloat16, y returned, float32 scale and offset; the norms with M * H = 2^25; megabytes are 10^6 bytes, counted in the
compiled program by `jln.program`: facts of the program, not measurements. Then what LayerNorm and a Linear hold between
forward and backward, as `jax.vjp` has it: what is held where the two are compiled apart, or a scan is between them.
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


def norm_and_linear(x, scale, offset, kernel, bias):
    """The norm alone from here."""
    return jln.layer_norm(x, scale, offset) @ kernel + bias


def linear_arguments(m: int, h: int, n: int):
    """-> (x, scale, offset, kernel, bias), dy"""
    x, kernel, bias, dy = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((m, h), (h, n), (n,), (m, n)))
    p = jax.ShapeDtypeStruct((h,), "float32")
    return (x, p, p, kernel, bias), dy


def linear_rows(chip: str):
    for m, h, n in LINEARS:
        arguments, dy = linear_arguments(m, h, n)
        once = 2 * (3 * m * h + 2 * m * n + 3 * h * n)  # x twice, dx; y, dy; kernel twice, dkernel
        for implementation, operator in (("jln", jln.layer_norm_linear), ("plain jnp", norm_then_linear)):
            report = program.compile_for(layer_norm_linear_step(operator), *arguments, dy, chip=chip)
            name = f"linear {m}x{h}x{n}"
            yield name, h, implementation, report.launches, report.bytes_total, once, report.temp_bytes


def held(operator, *arguments) -> list[jax.ShapeDtypeStruct]:
    """What `jax.vjp` keeps for the backward pass."""
    return jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(operator, *a)[1], *arguments))


def print_held():
    print(f"\n{'held, MB':22}{'all':>8}{'of x or its size':>18}")
    for m, h, n in LINEARS:
        for name, operator in (
            ("layer_norm_linear", jln.layer_norm_linear),
            ("layer_norm, @", norm_and_linear),
            ("plain jnp", norm_then_linear),
        ):
            arrays = held(operator, *linear_arguments(m, h, n)[0])
            total = sum(a.size * a.dtype.itemsize for a in arrays) / 1e6
            large = " + ".join(f"{a.size * a.dtype.itemsize / 1e6:.0f}" for a in arrays if a.shape == (m, h))
            print(f"{name:22}{total:>8.0f}{large:>18}   {m}x{h}x{n}")


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
    print_held()


if __name__ == "__main__":
    main()
