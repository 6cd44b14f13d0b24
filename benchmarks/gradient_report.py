"""Print the errors of the fused operators' results and gradients against float64 autodiff of the reference.

    python benchmarks/gradient_report.py                                # the CPU, and a GPU if there is one
    python benchmarks/gradient_report.py --size 8x128x512:64 --dtype bfloat16
    python benchmarks/gradient_report.py --dtype float16                # the built-in sizes in another dtype

The upstream cotangent is random: a rule that ignores its cotangent is right under one of ones. Exits with 1 if a line
fails. Where there is no GPU, the Triton kernels run in Triton's interpreter, if triton is installed; the last line says
when they did not run.
"""

import argparse
import functools
import importlib.util
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jln
from jln._tools import catalogue
from jln._tools.catalogue import OPERATORS, Operator
from jln._tools.machine import interpret_without_a_gpu
from jln._triton import target


class Size(NamedTuple):
    """The size of a case: x [*rows, H] and kernel [H, N]. limits: of the absolute error; None: of the relative one."""

    rows: tuple[int, ...]
    h: int
    n: int
    dtype: str
    limits: dict[str, float] | None = None


# Largest error over largest value. float32: sums of a thousand terms, seen 1e-6. bfloat16: rounds to 2^-8 = 4e-3.
RELATIVE_LIMITS = {"float64": 1e-13, "float32": 4e-6, "float16": 2e-3, "bfloat16": 1e-2}
# Absolute, so they hold for data of one size: for a cotangent ten times larger, dkernel reaches 22, where neighbours in
# float32 are 1.9e-6 apart, and plain autodiff is outside of them for three seeds in four.
TINY = defaultdict(lambda: 1e-6, dkernel=2e-6)
# The tiny one; a narrow output and a wide one, for the two strategies of the kernels. 776 is ragged for every tile.
SIZES = [((4, 4), 8, 16), ((4, 64), 776, 64), ((4, 64), 776, 1000)]
EPSILON = 1e-5


def operands(size: Size, operator: Operator, seed: int) -> tuple[dict[str, jax.Array], tuple[jax.Array, ...]]:
    """Return the arguments by name and the results' cotangents: all normal but the kernel, uniform as a Linear's."""
    random = np.random.default_rng(seed)
    sizes = catalogue.sizes((*size.rows, size.h), -1, (size.n,))
    arrays = {a.name: random.standard_normal(a.of(sizes, size.dtype, size.dtype).shape) for a in operator.arguments}
    for array in operator.arguments:
        if array.role == "kernel":
            arrays[array.name] = random.uniform(-1, 1, arrays[array.name].shape) / math.sqrt(size.h)
        elif array.role == "scale":
            arrays[array.name] += 1
    cotangents = [0.1 * random.standard_normal(a.of(sizes, size.dtype, size.dtype).shape) for a in operator.results]
    return jax.tree.map(lambda a: jnp.asarray(a, size.dtype), (arrays, tuple(cotangents)))


def gradients(function, operator: Operator, arrays, cotangents, device, **options) -> dict[str, np.ndarray]:
    """The results and the gradients, by name."""
    # "highest": a GPU's own default multiplies float32 with ten bits.
    f = functools.partial(function, epsilon=EPSILON, precision="highest", **options)

    @jax.jit
    def run(arrays, cotangents):
        results, pullback = jax.vjp(lambda arrays: f(**arrays), arrays)
        (of_arguments,) = pullback(operator.packed(cotangents))
        return [*jax.tree.leaves(results), *(of_arguments[name] for name in operator.names)]

    names = (*(a.name for a in operator.results), *(f"d{name}" for name in operator.names))
    found = run(*jax.device_put((arrays, cotangents), device))
    return {name: np.asarray(a, "float64") for name, a in zip(names, found, strict=True)}


def implementations() -> Iterator[tuple[Any, str]]:
    """The pairs of a device and an implementation that can run here."""
    cpu, default = jax.devices("cpu")[0], jax.devices()[0]
    yield cpu, "xla"
    if target.interpreting() and importlib.util.find_spec("triton"):
        yield cpu, "triton"
    if default.platform == "gpu":
        yield default, "xla"
        if target.missing() is None:
            yield default, "triton"


def report(size: Size, operator: Operator, seed: int) -> bool:
    """Print a line for each result of each implementation. Returns whether all are good."""
    arrays, cotangents = operands(size, operator, seed)
    exact = jax.tree.map(lambda a: a.astype("float64"), (arrays, cotangents))
    true = gradients(operator.reference, operator, *exact, device=jax.devices("cpu")[0])
    shape = "x".join(map(str, size.rows))
    good = True
    for device, implementation in implementations():
        sizes = f"{shape}x{size.h} -> {shape}x{size.n}" if shape else f"{size.h} -> {size.n}"
        print(f"{operator.name}, {sizes}, {size.dtype}, {implementation} on {device.device_kind}")
        got = gradients(operator.function, operator, arrays, cotangents, device, implementation=implementation)
        for result, t in true.items():
            largest = np.max(np.abs(t), initial=0.0)
            absolute = np.max(np.abs(got[result] - t), initial=0.0)
            relative = absolute / largest if largest else absolute
            if size.limits is None:
                error, limit, kind = relative, RELATIVE_LIMITS[size.dtype], "relative"
            else:
                error, limit, kind = absolute, size.limits[result], "absolute"
            passed = bool(error <= limit)  # a NaN fails
            good &= passed
            verdict = "PASS" if passed else "FAIL"
            print(f"  {result:8} {largest:10.3e} {absolute:10.2e} {relative:10.2e}   {kind} <= {limit:.0e}  {verdict}")
    return good


def parsed(size: str) -> tuple[tuple[int, ...], int, int]:
    """The numbers (rows, H, N) of a size's text."""
    try:
        x, n = size.split(":")
        *rows, h, n = (int(word) for word in (*x.split("x"), n))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be like 8x128x512:64, rows x H : N; got {size!r}") from None
    if min(*rows, h, n) < 1:
        raise argparse.ArgumentTypeError(f"must have no size under 1; got {size!r}")
    return tuple(rows), h, n


def sizes(size: tuple[tuple[int, ...], int, int] | None, dtype: str | None) -> list[Size]:
    if size is not None:
        return [Size(*size, dtype or "float32")]
    dtypes = [dtype] if dtype else ["float32", "bfloat16"]
    tiny, *others = SIZES
    found = [Size(*other, d) for other in others for d in dtypes]
    return [Size(*tiny, "float32", TINY), *found] if "float32" in dtypes else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parsed, metavar="BxTxH:N", help="one size instead of the built-in ones")
    parser.add_argument("--dtype", choices=sorted(RELATIVE_LIMITS), help="default: float32, and built-in bfloat16 too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    interpret_without_a_gpu()
    print(f"jax {jax.__version__}, jln {jln.__version__}, epsilon {EPSILON}, seed {arguments.seed}")
    print("  result      largest   absolute   relative   limit of the error")
    chosen = itertools.product(sizes(arguments.size, arguments.dtype), (o for o in OPERATORS.values() if o.is_linear))
    good = [report(size, operator, arguments.seed) for size, operator in chosen]
    print("all within their limits" if all(good) else "some are NOT within their limits")
    if "triton" not in {implementation for _, implementation in implementations()}:
        print(f"the Triton kernels did NOT run: {target.missing()}")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
