"""Policies for `jax.checkpoint`: JAX's own that save products, made to save those of this library's kernels too.

    jax.checkpoint(block, policy=jln.checkpoint_policies.dots_with_no_batch_dims_saveable)

XLA's products are `dot_general`s, which JAX's policies see. The product of few features, which one kernel makes with
the norm, has the name `jln.PRODUCT`, and a norm's row statistics have the name `jln.STATISTICS`. With these names
`jax.checkpoint_policies.save_only_these_names` makes policies of any other kind.

- `dots_saveable`: save every product.
- `dots_with_no_batch_dims_saveable`: save every product without batch dimensions: a Linear's, not attention's.
- `dots_and_statistics_saveable`, `dots_with_no_batch_dims_and_statistics_saveable`: save row statistics, too.

Under each of these the backward pass makes norms again.
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

    Args:
      offload_src: the memory in which products are made, "device".
      offload_dst: the memory in which they wait for the backward pass, "pinned_host".
    """
    for_products = _jax.offload_dot_with_no_batch_dims(offload_src, offload_dst)
    for_names = _jax.save_and_offload_only_these_names(
        names_which_can_be_saved=[STATISTICS],
        names_which_can_be_offloaded=[PRODUCT],
        offload_src=offload_src,
        offload_dst=offload_dst,
    )

    def policy(primitive: Any, *avals: Any, **params: Any) -> Any:
        return (for_products if primitive is jax.lax.dot_general_p else for_names)(primitive, *avals, **params)

    return policy
