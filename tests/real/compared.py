"""Comparison of what a real model computes as it is, and fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import jln
from counted import found


def difference(own: Any, wanted: Any, tolerances: tuple[float, float]) -> tuple[float, bool]:
    """The largest difference of any array, as a part of its largest element; and whether all are small enough.

    tolerances: the part of its own largest element by which an array may differ, and of the largest of all arrays.
    """
    pairs = [(float(np.abs(a - b).max()), float(np.abs(b).max())) for a, b in zip(own, wanted, strict=True)]
    greatest = max(size for _, size in pairs)
    relative, rounding = tolerances
    allowed = [error <= relative * size + rounding * greatest for error, size in pairs]
    significant = [error / size for error, size in pairs if size > rounding / relative * greatest]
    return max(significant), all(allowed)


def judged(
    name: str,
    results: Callable[[Callable[[Any], Any]], list[Any]],
    loss: Callable[[Any], Any],
    parameters: Any,
    expected: Sequence[tuple[int, int, int, int]],
    tolerances: tuple[float, float],
    fuse: Callable[..., Callable[[Any], Any]] = jln.fuse,
) -> bool:
    """Compare a loss with itself fused, without and with `linears=True`, and print a line for each.

    Returns whether both are right. results: of a loss, its value and its gradients. expected: norms, sums, Linears and
    norms that are left, for each.
    """
    wanted, are_right = results(loss), []
    for linears, counts in zip((False, True), expected, strict=True):
        fused = fuse(loss, linears=linears)
        largest, is_right = difference(results(fused), wanted, tolerances)
        found_in_it = found(fused, parameters)
        is_right &= found_in_it == counts
        named = ", ".join(f"{n} {what}" for what, n in found_in_it._asdict().items())
        print(f"{name:<28} {named}; largest difference {largest:.0e}: {'ok' if is_right else 'WRONG'}", flush=True)
        are_right.append(is_right)
    return all(are_right)
