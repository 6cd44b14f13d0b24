"""Comparison of what a real model computes as it is, and fused."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jln

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))

from counted import found

# Of an array's largest element, and of the largest of all arrays: sums of 32 to 96 terms, of which float64 rounds each
# by 1e-16 and float32 by 6e-8. Where an exact gradient is zero, as the keys' bias's, roundings of the largest
# gradient's size are left.
TOLERANCES = {"float64": (1e-12, 1e-15), "float32": (3e-5, 1e-6)}


def difference(own: Any, wanted: Any, dtype: str = "float32") -> tuple[float, bool]:
    """The largest difference of any array, as a part of its largest element; and whether all are small enough."""
    pairs = [(float(np.abs(a - b).max()), float(np.abs(b).max())) for a, b in zip(own, wanted, strict=True)]
    greatest = max(size for _, size in pairs)
    relative, rounding = TOLERANCES[dtype]
    allowed = [error <= relative * size + rounding * greatest for error, size in pairs]
    significant = [error / size for error, size in pairs if size > rounding / relative * greatest]
    return max(significant), all(allowed)


def judged(
    name: str,
    loss: Callable[[Any], Any],
    parameters: Any,
    expected: Sequence[tuple[int, int, int, int]],
    dtype: str = "float32",
    fuse: Callable[..., Callable[[Any], Any]] = jln.fuse,
) -> bool:
    """Compare a loss with itself fused, without and with `linears=True`, and print a line for each.

    Returns whether both are right: values, gradients and counts. expected: norms, sums, Linears and norms that are
    left, for each.
    """

    def results(loss: Callable[[Any], Any]) -> list[Any]:
        value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
        return [value, *jax.tree.leaves(gradients)]

    wanted, are_right = results(loss), []
    for linears, counts in zip((False, True), expected, strict=True):
        fused = fuse(loss, linears=linears)
        largest, is_right = difference(results(fused), wanted, dtype)
        found_in_it = found(fused, parameters)
        is_right &= found_in_it == counts
        named = ", ".join(f"{n} {what}" for what, n in found_in_it._asdict().items())
        print(f"{name:<28} {named}; largest difference {largest:.0e}: {'ok' if is_right else 'WRONG'}", flush=True)
        are_right.append(is_right)
    return all(are_right)
