"""The user's arrays, checked, and laid out as the operations want them.

The operations have one normalised axis, parameters of x's rank, and in front the axes of examples that have parameters
of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jln import _checks
from jln._core.modes import own_modes
from jln._junction.arrays import COLUMNS, TABLE, Arrays, Norm, Shape, Switches

Axis = int | tuple[int, ...]
Gate = jax.Array | float | None


def checked(arrays: Arrays, axes: tuple[int, ...], both_sides: bool = False) -> Arrays:
    """The arrays as a user gives them, checked for their dtypes and shapes.

    x and the other arrays of its size that the operator needs are JAX's arrays already. A user's `added` is called
    residual, as is `residual` itself; x_z is called z, and the `x_bias` behind a norm of x x_offset.

    axes: the normalised ones of x, not negative. both_sides: whether x is normalised before it is added.
    """
    x = arrays.x
    normalised = tuple(x.shape[a] for a in axes)
    for name, array in (("residual", arrays.residual), ("residual", arrays.added), ("z", arrays.z), ("z", arrays.x_z)):
        _checks.shape(name, array, x.shape, "that of x")
    parameters = {
        name: _checks.parameter(name, getattr(arrays, name), x, axes, normalised)
        for name in ("scale", "offset", "x_scale")
    }
    if arrays.residual is None:
        for name, value in (("x_bias", arrays.x_bias), ("gate", arrays.gate)):
            if value is not None:
                raise ValueError(f"{name} needs a residual, to which x is added with it; got residual=None")
    if both_sides:
        x_bias = _checks.parameter("x_offset", arrays.x_bias, x, axes, normalised)
    else:
        x_bias = _checks.optional_array("x_bias", arrays.x_bias)
        _checks.shape("x_bias", x_bias, normalised, "that of x's normalised axes")
    return arrays._replace(**parameters, x_bias=x_bias, gate=_checks.gate(arrays.gate, x, arrays.residual, axes))


def norm_of(
    arrays: Arrays,
    axes: tuple[int, ...],
    *,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool = False,
    both_sides: bool = False,
    remat: bool = False,
) -> Norm:
    """The norm of checked arrays over checked axes, its other arguments checked."""
    epsilon = _checks.epsilon(epsilon, *(a.dtype for a in (arrays.x, arrays.residual) if a is not None))
    scales = {"x_scale": arrays.x_scale} if both_sides else {}
    scales |= {"scale": arrays.scale}
    if _checks.flag("zero_centered_scale", zero_centered_scale) and all(a is None for a in scales.values()):
        raise ValueError(f"zero_centered_scale=True needs a scale; got {', '.join(f'{n}=None' for n in scales)}")
    switches = Switches(subtract_mean, bool(zero_centered_scale))
    return Norm(_merged_axis(axes, arrays.x.ndim), epsilon, switches, both_sides=both_sides, remat=remat)


def _adjacent(order: list[int]) -> bool:
    return order == list(range(order[0], order[-1] + 1))


def _merged_axis(axes: tuple[int, ...], ndim: int) -> int:
    """The place of the normalised axes once they are one, counted from the end: in place if adjacent, else last."""
    order = sorted(axes)
    return order[-1] - ndim if _adjacent(order) else -1


def arranged(arrays: Arrays, axes: tuple[int, ...], norm: Norm) -> tuple[Arrays, Norm | None]:
    """Lay out the user's arrays, but for those of Linears, for the norm's operations.

    Returns the operands, and the norm with its axes of examples and heads. On these every parameter is written out to
    x's sizes, as is a row's gate on all axes of rows. None in place of the norm where parameters vary along other axes.
    """
    x, order = arrays.x, sorted(axes)
    normalised = tuple(x.shape[a] for a in axes)
    ndim = x.ndim - len(order) + 1
    h = ndim + norm.axis
    last = range(h, h + len(order))

    def on_one_axis(a: jax.Array) -> jax.Array:
        a = a if _adjacent(order) else jnp.moveaxis(a, order, last)
        return a.reshape(*a.shape[:h], math.prod(a.shape[i] for i in last), *a.shape[h + len(order) :])

    def of_same_rank(parameter: jax.Array) -> jax.Array:
        if parameter.shape != normalised:
            return on_one_axis(parameter)
        in_order = parameter.transpose([axes.index(a) for a in order])
        return in_order.reshape([in_order.size if i == h else 1 for i in range(ndim)])

    gate = arrays.gate
    if gate is not None and gate.shape != normalised and all(gate.shape[a] == 1 for a in axes):
        arrays = arrays._replace(gate=None, row_gate=gate)
    operands = {
        name: on_one_axis(a) if TABLE[name].shape is Shape.ROW else of_same_rank(a)
        for name, a in arrays._replace(kernel=None, bias=None).present().items()
    }
    columns = [name for name in operands if TABLE[name].shape is Shape.COLUMN]
    own = sorted({i for name in columns for i, n in enumerate(operands[name].shape) if i != h and n != 1})
    examples = next((i for i in range(h) if i not in own), h)
    heads = norm.axis == -1 and own[examples:] == [h - 1]
    if len(own) == examples + heads:
        norm, x = dataclasses.replace(norm, examples=examples, heads=heads), operands["x"]
        with own_modes():
            of_groups = [name for name in operands if TABLE[name].shape in (Shape.COLUMN, Shape.ONE)]
            operands |= {name: written_out(operands[name], x, own) for name in of_groups}
            if "row_gate" in operands:
                operands["row_gate"] = written_out(operands["row_gate"], x, [i for i in range(ndim) if i != h])
        return Arrays(**operands, kernel=arrays.kernel, bias=arrays.bias), norm
    return Arrays(**operands, kernel=arrays.kernel, bias=arrays.bias), None


def no_kernels(arrays: Arrays, axes: tuple[int, ...], norm: Norm | None) -> str | None:
    """The reason why no kernel takes the user's arrays as they lie, and what to do; None where one may.

    norm: as `arranged` returns it.
    """
    x = arrays.x
    if sorted(axes) != [*range(x.ndim - len(axes), x.ndim)]:
        return (
            f"takes rows whose elements lie side by side, and axis={axes} of x {x.shape} are not its last: write "
            f"jnp.moveaxis(x, {axes}, {tuple(range(-len(axes), 0))}), or leave implementation to None, which has XLA "
            "read x where it is"
        )
    if norm is None:
        shapes = {name: getattr(arrays, name).shape for name in COLUMNS if getattr(arrays, name) is not None}
        return (
            f"takes parameters that vary along x's first axes, or along the one in front of the normalised axis; got "
            f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())} for x {x.shape}: leave implementation "
            "to None, which has XLA read them where they are"
        )
    return None


def on_several_axes(a: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """Split the one normalised axis of an array as large as x into the several axes that the user's x has."""
    order = sorted(axes)
    if _adjacent(order):
        return a.reshape(shape)
    first = len(shape) - len(order)
    moved = a.reshape(*a.shape[:first], *(shape[i] for i in order))
    return jnp.moveaxis(moved, range(first, len(shape)), order)


def written_out(a: jax.Array, x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The array with the sizes of x on these axes. The gradient of a copy is added up in the compute dtype."""
    shape = tuple(x.shape[i] if i in axes else n for i, n in enumerate(a.shape))
    wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), a.dtype)
    return a if a.shape == shape else jnp.broadcast_to(a.astype(wide), shape)
