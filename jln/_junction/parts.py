"""Calls under `vmap` that no wider one is, in parts: the norm, and behind it the Linears, each a product by itself.

Each part has the examples that its own arrays have, and may be one wider call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jln._core.modes import own_modes
from jln._junction.arrays import Arrays, Junction
from jln._junction.gradients import dtype_in_memory
from jln._junction.linears.axes import Axes
from jln._junction.linears.product import Operands, Product, product


def in_parts(junction: Junction) -> Callable[..., Arrays] | None:
    """The call in parts, as `jln._core.reverse_mode.Parts` says; None where there are none."""
    if junction.eight_bits or not junction.features:
        return None

    def parts(call: Callable[..., Arrays], operands: Arrays, moving: Arrays) -> Arrays:
        def of_operands(operands: Arrays) -> Arrays:
            with own_modes():
                return _norm_and_products(call, junction, operands, moving)

        # What a norm with `remat` is there for is to hold the operands alone.
        return (jax.checkpoint(of_operands) if junction.norm.remat else of_operands)(operands)

    return parts


def _norm_and_products(call: Callable[..., Arrays], junction: Junction, operands: Arrays, moving: Arrays) -> Arrays:
    dtypes = [jnp.promote_types(operands.x.dtype, kernel.dtype).name for kernel in operands.kernel]
    z_dtype = dtype_in_memory(jnp.result_type(*dtypes))  # that of dz
    norm = dataclasses.replace(junction, y_dtype=z_dtype, precision=None, features=(), in_one=False)
    of_norm = moving._replace(kernel=None, bias=None)
    results = call(norm, operands._replace(kernel=None, bias=None), of_norm)
    y = []
    for i, (features, dtype) in enumerate(zip(junction.features, dtypes, strict=True)):
        linear = Product(Axes.of(operands.x.ndim, 0, features), dtype, junction.precision)
        of_linear = Operands(any(jax.tree.leaves(of_norm)), moving.kernel[i], moving.bias[i])
        y.append(product(linear, Operands(results.y, operands.kernel[i], operands.bias[i]), of_linear))
    return results._replace(y=tuple(y))
