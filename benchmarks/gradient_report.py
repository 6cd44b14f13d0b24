"""How far the fused operator's result and gradients are from float64 autodiff of the reference, line by line.

    python benchmarks/gradient_report.py                                # the CPU, and a GPU if there is one
    python benchmarks/gradient_report.py --size 8x128x512:64 --dtype bfloat16

The upstream cotangent is random: a rule that ignores its cotangent is right under one of ones. Exits with 1 if a line
fails. Where there is no GPU, the Triton kernels run in Triton's interpreter, if triton is installed.
"""

import argparse
import importlib.util
import math
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

if not pathlib.Path("/dev/nvidia0").exists() and importlib.util.find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import jax
import jax.numpy as jnp
import numpy as np

import jln
from jln._triton import launch

RESULTS = ("y", "dx", "dscale", "doffset", "dkernel", "dbias")


class Case(NamedTuple):
    """x [*rows, H], kernel [H, N]; limits are of the absolute error, or None: of the relative one, by dtype."""

    rows: tuple[int, ...]
    h: int
    n: int
    dtype: str
    limits: dict[str, float] | None = None


# Largest error over largest value. float32: sums of a thousand terms, seen 1e-6. bfloat16: rounds to 2^-8 = 4e-3.
RELATIVE_LIMITS = {"float64": 1e-13, "float32": 4e-6, "float16": 2e-3, "bfloat16": 1e-2}
# Absolute, so they hold for data of one size: for a cotangent ten times larger, dkernel reaches 22, where neighbours in
# float32 are 1.9e-6 apart, and plain autodiff is outside of them for three seeds in four.
TINY = {"y": 1e-6, "dx": 1e-6, "dscale": 1e-6, "doffset": 1e-6, "dkernel": 2e-6, "dbias": 1e-6}
CASES = [
    Case((4, 4), 8, 16, "float32", TINY),
    # A narrow output and a wide one: the two strategies of the kernels. H is ragged for every tile.
    *(Case((4, 64), 776, n, dtype) for n in (64, 1000) for dtype in ("float32", "bfloat16")),
]
EPSILON = 1e-5


def operands(case: Case, seed: int) -> tuple[list[jax.Array], jax.Array]:
    """-> ((x, scale, offset, kernel, bias), dy): all normal but the kernel, uniform as a Linear's first one."""
    random = np.random.default_rng(seed)
    shapes = ((*case.rows, case.h), (case.h,), (case.h,), (case.h, case.n), (case.n,), (*case.rows, case.n))
    x, scale, offset, kernel, bias, dy = (random.standard_normal(shape) for shape in shapes)
    kernel = random.uniform(-1, 1, kernel.shape) / math.sqrt(case.h)
    arrays = (x, 1 + scale, offset, kernel, bias)
    return [jnp.asarray(a, case.dtype) for a in arrays], jnp.asarray(0.1 * dy, case.dtype)


def gradients(operator, arrays, dy, device, **options) -> list[np.ndarray]:
    @jax.jit
    def run(arrays, dy):
        # "highest": a GPU's own default multiplies float32 with ten bits.
        y, pullback = jax.vjp(lambda *a: operator(*a, epsilon=EPSILON, precision="highest", **options), *arrays)
        return y, *pullback(dy)

    return [np.asarray(a, "float64") for a in run(*jax.device_put((arrays, dy), device))]


def implementations() -> Iterator[tuple[jax.Device, str]]:
    """What can run here."""
    cpu, default = jax.devices("cpu")[0], jax.devices()[0]
    yield cpu, "xla"
    if launch.interpreting():
        yield cpu, "triton"
    if default.platform == "gpu":
        yield default, "xla"
        if launch.missing() is None:
            yield default, "triton"


def report(case: Case, seed: int) -> bool:
    """Print a line for each result of each implementation; whether all are good."""
    arrays, dy = operands(case, seed)
    exact = [a.astype("float64") for a in arrays]
    true = gradients(jln.reference.layer_norm_linear, exact, dy.astype("float64"), jax.devices("cpu")[0])
    shape = "x".join(map(str, case.rows))
    good = True
    for device, implementation in implementations():
        print(f"{shape}x{case.h} -> {shape}x{case.n}, {case.dtype}, {implementation} on {device.device_kind}")
        got = gradients(jln.layer_norm_linear, arrays, dy, device, implementation=implementation)
        for name, a, t in zip(RESULTS, got, true, strict=True):
            largest = np.max(np.abs(t), initial=0.0)
            absolute = np.max(np.abs(a - t), initial=0.0)
            relative = absolute / largest if largest else absolute
            if case.limits is None:
                error, limit, kind = relative, RELATIVE_LIMITS[case.dtype], "relative"
            else:
                error, limit, kind = absolute, case.limits[name], "absolute"
            passed = bool(error <= limit)  # a NaN fails
            good &= passed
            verdict = "PASS" if passed else "FAIL"
            print(f"  {name:8} {largest:10.3e} {absolute:10.2e} {relative:10.2e}   {kind} <= {limit:.0e}  {verdict}")
    return good


def parsed(size: str, dtype: str) -> Case:
    x, n = size.split(":")
    *rows, h = map(int, x.split("x"))
    return Case(tuple(rows), h, int(n), dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", metavar="BxTxH:N", help="one size instead of the built-in ones, limits relative")
    parser.add_argument("--dtype", default="float32", choices=sorted(RELATIVE_LIMITS), help="with --size")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    cases = CASES if arguments.size is None else [parsed(arguments.size, arguments.dtype)]
    print(f"jax {jax.__version__}, jln {jln.__version__}, layer_norm_linear, epsilon {EPSILON}, seed {arguments.seed}")
    print("  result      largest   absolute   relative   limit of the error")
    good = [report(case, arguments.seed) for case in cases]
    print("all within their limits" if all(good) else "some are NOT within their limits")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
