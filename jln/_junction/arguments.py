"""The user's arrays, checked, and laid out as the operations want them.

The operations have one normalised axis, parameters of x's rank, and in front the axes of examples that have parameters
of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

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


def arranged(
    arrays: Arrays, axes: tuple[int, ...], norm: Norm
) -> tuple[Arrays, Norm, Callable[[jax.Array], jax.Array] | None]:
    """Lay out the user's arrays, but for those of Linears, for the norm's operations.

    Returns the operands; the norm, with the axes of examples; and a function that puts a result's axes of rows back
    where they were, whatever axes are behind them, None where none has moved.
    """
    x, order = arrays.x, sorted(axes)
    normalised = tuple(x.shape[a] for a in axes)
    ndim = x.ndim - len(order) + 1
    first = ndim + norm.axis
    last = range(first, first + len(order))

    def on_one_axis(a: jax.Array) -> jax.Array:
        a = a if _adjacent(order) else jnp.moveaxis(a, order, last)
        return a.reshape(*a.shape[:first], math.prod(a.shape[i] for i in last), *a.shape[first + len(order) :])

    def of_same_rank(parameter: jax.Array) -> jax.Array:
        if parameter.shape != normalised:
            return on_one_axis(parameter)
        in_order = parameter.transpose([axes.index(a) for a in order])
        return in_order.reshape([in_order.size if i == first else 1 for i in range(ndim)])

    gate = arrays.gate
    if gate is not None and gate.shape != normalised and all(gate.shape[a] == 1 for a in axes):
        arrays = arrays._replace(gate=None, row_gate=gate)
    operands = Arrays(
        **{
            name: on_one_axis(a) if TABLE[name].shape is Shape.ROW else of_same_rank(a)
            for name, a in arrays._replace(kernel=None, bias=None).present().items()
        },
        kernel=arrays.kernel,
        bias=arrays.bias,
    )
    with own_modes():
        operands, norm, places = _with_examples(operands, norm)
    if places is None:
        return operands, norm, None
    return operands, norm, lambda a: a.transpose(*places, *range(len(places), a.ndim))


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


def _along(a: jax.Array | None, h: int) -> set[int]:
    """The axes of rows along which a parameter varies."""
    return set() if a is None else {i for i, n in enumerate(a.shape) if i != h and n != 1}


def _axes_of_offset_by_row(operands: Arrays, h: int) -> set[int]:
    """The axes along which an offset varies that is read row by row; none where it is as the other parameters are.

    That is one that varies along an axis along which no other parameter does, if others vary along some, or if it has a
    copy for each row: with all these axes in the examples there would be few rows in each. A scale cannot be read so,
    since its gradient is made of more than dy.
    """
    own = _along(operands.offset, h)
    others = set[int]().union(*(_along(getattr(operands, name), h) for name in COLUMNS if name != "offset"))
    return own if own - others and (others or own == _along(operands.x, h)) else set()


def _with_examples(operands: Arrays, norm: Norm) -> tuple[Arrays, Norm, list[int] | None]:
    """Move the axes along which a parameter varies to where the kernels read them: in front, or together before H.

    They stay where they are if they lie there. On them every parameter is written out to x's sizes, but for an offset
    that is read row by row, and a row's gate on all axes of rows.

    Returns the operands, the norm, and for each axis of a result where it comes from; None where no axis has moved.
    """
    x = operands.x
    h = x.ndim + norm.axis
    by_row = sorted(_axes_of_offset_by_row(operands, h))
    norm = dataclasses.replace(norm, offset_rows=tuple(i - x.ndim for i in by_row))
    as_it_is = {"kernel": operands.kernel, "bias": operands.bias} | ({"offset": operands.offset} if by_row else {})
    of_norm = operands._replace(**dict.fromkeys(as_it_is))
    examples = sorted(set[int]().union(*(_along(getattr(of_norm, name), h) for name in COLUMNS)))
    if of_norm.row_gate is not None:
        of_norm = of_norm._replace(row_gate=written_out(of_norm.row_gate, x, [i for i in range(x.ndim) if i != h]))
    if examples:
        of_norm = jax.tree.map(lambda a: a if a.shape == x.shape else written_out(a, x, examples), of_norm)
    operands = of_norm._replace(**as_it_is)
    in_front = next((i for i in range(h) if i not in examples), h)
    interleaved = len(examples) - in_front
    end = examples[-1] + 1 if interleaved and norm.axis == -1 else h
    if examples == [*range(in_front), *range(end - interleaved, end)]:
        return operands, dataclasses.replace(norm, examples=in_front, interleaved=interleaved, behind=h - end), None
    order = examples + [i for i in range(x.ndim) if i not in examples]
    by_row = tuple(order.index(i) - x.ndim for i in by_row)
    norm = dataclasses.replace(norm, axis=order.index(h) - x.ndim, examples=len(examples), offset_rows=by_row)
    of_norm = jax.tree.map(lambda a: a.transpose(order), operands._replace(kernel=None, bias=None))
    operands = of_norm._replace(kernel=operands.kernel, bias=operands.bias)
    return operands, norm, sorted(range(x.ndim), key=order.__getitem__)
