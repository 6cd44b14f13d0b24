"""Calls under `vmap` as one wider call, where the examples are rows like any other, or features of the Linears."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jln._junction.arrays import TABLE, Arrays, Junction, Shape
from jln._junction.linears.tiles import few_features

_OF_ROWS = {name for name, array in TABLE.items() if array.shape in (Shape.ROW, Shape.NUMBER)}


def widened(junction: Junction, operands: Arrays, axes: Arrays) -> tuple[Junction, Arrays, Arrays] | None:
    """The one call that computes what examples do, as `jln._core.reverse_mode.Widen` says.

    axes: the place of vmap's axis in each operand, None in one that is shared.
    """
    if junction.eight_bits == "one":  # each example has a scale of its own
        return None
    present = operands.present()
    if any(getattr(axes, name) is not None for name in present.keys() - _OF_ROWS - {"kernel", "bias"}):
        return None
    of_linears = [*(axes.kernel or ()), *(axes.bias or ())]
    of_rows = [getattr(axes, name) for name in present.keys() & _OF_ROWS]
    if None not in of_rows and not any(a is not None for a in of_linears):
        return _with_rows(junction, operands, axes)
    if all(a is None for a in of_rows):
        return _with_features(junction, operands, axes)
    return None


def _with_rows(junction: Junction, operands: Arrays, axes: Arrays) -> tuple[Junction, Arrays, Arrays] | None:
    """The call with the examples as rows: all arrays of rows differ from example to example, and no parameter does."""
    norm = junction.norm
    if norm.of_examples or norm.offset_rows:
        return None
    axis, h = axes.x, operands.x.ndim - 1 + norm.axis
    if (axis > h and junction.features) or junction.eight_bits:  # H has features behind it, blocks have rows in them
        axis = 0
    elif axis > h:
        norm = dataclasses.replace(norm, axis=norm.axis - 1)

    def placed(name: str, a: Any) -> Any:
        if name in ("kernel", "bias"):
            return a
        return jnp.moveaxis(a, getattr(axes, name), axis) if name in _OF_ROWS else jnp.expand_dims(a, axis)

    operands = Arrays(**{name: placed(name, a) for name, a in operands.present().items()})
    y = (axis,) * len(junction.features) if junction.features else axis
    return dataclasses.replace(junction, norm=norm), operands, _places(junction, y, axis)


def _with_features(junction: Junction, operands: Arrays, axes: Arrays) -> tuple[Junction, Arrays, Arrays] | None:
    """The call with the examples as features: nothing but kernels, and their biases, differs between examples."""
    of_each = [*zip(operands.kernel, operands.bias, axes.kernel, axes.bias, strict=True)]
    if any(k is None and b is not None for *_, k, b in of_each):
        return None

    def bias_of(bias: Any, kernel: Any, axis: int | None, of_bias: int | None) -> Any:
        if bias is None or axis is None:
            return bias
        if of_bias is None:
            return jnp.broadcast_to(bias, (kernel.shape[axis], *bias.shape))
        return jnp.moveaxis(bias, of_bias, 0)

    operands = operands._replace(
        kernel=tuple(k if a is None else jnp.moveaxis(k, a, 1) for k, _, a, _ in of_each),
        bias=tuple(bias_of(b, k, a, of_bias) for k, b, a, of_bias in of_each),
    )
    features = tuple(n + (a is not None) for n, a in zip(junction.features, axes.kernel, strict=True))
    junction = dataclasses.replace(junction, features=features)
    junction = dataclasses.replace(junction, in_one=few_features(operands, junction))
    y = tuple(None if a is None else operands.x.ndim - 1 for a in axes.kernel)
    return junction, operands, _places(junction, y, None)


def _places(junction: Junction, y: Any, total: int | None) -> Arrays:
    places = Arrays(y=y, total=total if junction.gives_total else None)
    return places._replace(block_scale=y, carrier=y) if junction.quantises else places
