"""Policies for `jax.checkpoint`: JAX's own that save products, made to save those of this library's kernels too.

    jax.checkpoint(block, policy=jln.checkpoint_policies.dots_with_no_batch_dims_saveable)

A product behind one of this library's norms is a `dot_general` where XLA multiplies, and every policy of JAX sees it.
Only the product of few features that one kernel makes with the norm is none: it has the name `jln.PRODUCT`. To save it
without the statistics saves no launch, for these need the same pass over x. Row statistics, two numbers a row, have the
name `jln.STATISTICS`. So has the float32 product, before its bias, that few features keep for the row sums of the
backward pass. With either name `jax.checkpoint_policies.save_only_these_names` makes policies of any other kind.

- `dots_saveable`: save every product.
- `dots_with_no_batch_dims_saveable`: save every product without batch dimensions: a Linear's, not attention's.
- `dots_and_statistics_saveable`, `dots_with_no_batch_dims_and_statistics_saveable`: save row statistics, too.

Under each of these policies a norm is made again in the backward pass: its statistics alone, unless they are saved, and
where a product's gradient is wanted its result too, by the kernel that reads x in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jln._core.derivatives import PRODUCT, STATISTICS

__all__ = [
    "dots_and_statistics_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_and_statistics_saveable",
    "dots_with_no_batch_dims_saveable",
    "offload_dots_with_no_batch_dims",
]

_jax = jax.checkpoint_policies
_products = _jax.save_only_these_names(PRODUCT)
_statistics = _jax.save_only_these_names(STATISTICS)

dots_saveable = _jax.save_from_both_policies(_jax.dots_saveable, _products)
dots_with_no_batch_dims_saveable = _jax.save_from_both_policies(_jax.dots_with_no_batch_dims_saveable, _products)
dots_and_statistics_saveable = _jax.save_from_both_policies(dots_saveable, _statistics)
dots_with_no_batch_dims_and_statistics_saveable = _jax.save_from_both_policies(
    dots_with_no_batch_dims_saveable, _statistics
)


def offload_dots_with_no_batch_dims(offload_src: str, offload_dst: str) -> Callable[..., Any]:
    """Return a policy that moves products to other memory instead of making them again, and saves row statistics.

    It is `jax.checkpoint_policies.offload_dot_with_no_batch_dims` with the products of this library's kernels.

    Args:
      offload_src: the memory in which products are made, "device".
      offload_dst: the memory in which they wait for the backward pass, "pinned_host".

    Returns:
      A policy for `jax.checkpoint`.
    """
    of_dots = _jax.offload_dot_with_no_batch_dims(offload_src, offload_dst)
    of_names = _jax.save_and_offload_only_these_names(
        names_which_can_be_saved=[STATISTICS],
        names_which_can_be_offloaded=[PRODUCT],
        offload_src=offload_src,
        offload_dst=offload_dst,
    )

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        return (of_dots if primitive is jax.lax.dot_general_p else of_names)(primitive, *avals, **params)

    return policy
