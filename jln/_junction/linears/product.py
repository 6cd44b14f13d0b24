"""One Linear's product by itself, which any `vmap` widens: an axis of examples is a label more, as einsum takes them.

Its gradients are sums over all axes that an operand has no part in, made at once: examples that share a kernel or a row
add nothing that would be written for each of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

from jln._core.derivatives import Rules, Unneeded
from jln._junction.linears.axes import Axes
from jln._junction.linears.formulas import affine, of_columns, of_features, of_rows


class Operands(NamedTuple):
    """The operands of a product, or their gradients: the norm's result in the dtype of dz, kernel, and bias or None."""

    z: Any
    kernel: Any
    bias: Any = None


@dataclasses.dataclass(frozen=True)
class Product:
    """A product, in all that is static about it. dtype: that of y."""

    axes: Axes
    dtype: str
    precision: Any


def widened(product: Product, operands: Operands, places: Operands) -> tuple[Product, Operands, int]:
    """The product with the examples as one more axis, as `jln._core.reverse_mode.Widen` says."""
    axes = product.axes
    label = min(*axes.z, *axes.y) - 1  # einsum sums over axes in the order of their labels, and y has this one first

    def grown(labels: tuple[int, ...], place: int | None) -> tuple[int, ...]:
        return labels if place is None else (*labels[:place], label, *labels[place:])

    if places.bias is not None:  # its axes are in the order of y
        operands = operands._replace(bias=jnp.moveaxis(operands.bias, places.bias, 0))
    bias = grown(axes.bias, None if places.bias is None else 0)
    axes = Axes(grown(axes.z, places.z), grown(axes.kernel, places.kernel), bias, grown(axes.y, 0))
    return dataclasses.replace(product, axes=axes), operands, 0


def _value(product: Product, operands: Operands) -> Any:
    z, kernel, bias = operands
    return affine(z.astype(product.dtype), kernel, bias, product.axes, product.precision)


def _saving(product: Product, operands: Operands, wanted: Operands) -> tuple[Any, Operands]:
    z, kernel, _ = operands
    saved = Operands(Unneeded(z) if wanted.kernel is None else z, Unneeded(kernel) if wanted.z is None else kernel)
    return _value(product, operands), saved


def _gradients(product: Product, saved: Operands, dy: Any, wanted: Operands) -> Operands:
    axes, precision = product.axes, product.precision
    if dy is None:
        return Operands(None, None)
    return Operands(
        None if wanted.z is None else of_features(dy, saved.kernel, axes, precision).astype(wanted.z),
        None if wanted.kernel is None else of_rows(dy, saved.z, axes, precision, wanted.kernel),
        None if wanted.bias is None else of_columns(dy, axes, wanted.bias),
    )


# Inside of a call in reverse mode, which forward mode never sees.
product = Rules(_value, _saving, _gradients).in_reverse_mode(widened)
