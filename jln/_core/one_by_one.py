"""A detour around a fault of XLA's CPU backend: examples of vmap that share an operand are computed one by one.

jaxlib 0.10.2 and 0.11.0 give sums to YNNPACK (`__ynn_fusion` in the compiled program). There the product of two arrays
is wrong, off by as much as itself, if both are broadcast along an axis and not the same way. An example's own scale
times an x that all share is such a product: vmap's axis is of size 1 in x and broadcast with it. XLA removes most of
these broadcasts before it fuses, but not those behind a fence (`jln._junction.formulas`), nor all others.

In a loop over the examples there is no such axis, and what a loop writes hides no broadcast. The jaxlibs before and
after are right, and have no loop (`tests/operators/test_shared_operands.py` has the program without jln).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jaxlib

WRONG = ((0, 10, 2), (0, 11, 0))


def right_on_cpu(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute`, one by one where jaxlib is one of those that are wrong."""
    return one_by_one(compute) if jaxlib.version.__version_info__[:3] in WRONG else compute


def one_by_one(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute(operands, settings, dtypes, batch_dims)` in a loop over vmap's axes that an operand is shared on.

    On these axes, the first `batch_dims` of all operands, a shared operand has size 1, and results have the batch's.
    `compute` may take `gathered`, pairs of an axis and what it is gathered over.
    """

    @functools.wraps(compute)
    def call(operands: Any, settings: Any, dtypes: Any, batch_dims: int, **how: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        sizes = {a.shape[:batch_dims] for a in leaves}
        if len(sizes) == 1:
            return compute(operands, settings, dtypes, batch_dims, **how)
        if "gathered" in how:
            how = how | {"gathered": tuple((axis - 1, over) for axis, over in how["gathered"])}
        of_all = next((size[0] for size in sizes if size[0] != 1), 1)  # symbolic sizes have no largest
        shared = [a.shape[0] != of_all for a in leaves]

        def compute_one(differing: list[jax.Array]) -> Any:
            left = iter(differing)
            of_example = [a[0] if is_shared else next(left) for a, is_shared in zip(leaves, shared, strict=True)]
            return call(tree.unflatten(of_example), settings, dtypes, batch_dims - 1, **how)

        return jax.lax.map(compute_one, [a for a, is_shared in zip(leaves, shared, strict=True) if not is_shared])

    return call
