"""Policies for `jax.checkpoint`: JAX's own that save products, made to save those of this library's kernels too.

    jax.checkpoint(block, policy=jln.checkpoint_policies.dots_with_no_batch_dims_saveable)

XLA's products are `dot_general`s, which JAX's policies see. The product of few features, which one kernel makes with
the norm, has the name `jln.PRODUCT`, and a norm's row statistics have the name `jln.STATISTICS`. With these names
`jax.checkpoint_policies.save_only_these_names` makes policies of any other kind.

- `dots_saveable`: save every product.
- `dots_with_no_batch_dims_saveable`: save every product without batch dimensions: a Linear's, not attention's.
- `dots_and_statistics_saveable`, `dots_with_no_batch_dims_and_statistics_saveable`: save row statistics, too.
"""

from __future__ import annotations

import jax

from jln._core.derivatives import PRODUCT, STATISTICS

__all__ = [
    "dots_and_statistics_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_and_statistics_saveable",
    "dots_with_no_batch_dims_saveable",
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
