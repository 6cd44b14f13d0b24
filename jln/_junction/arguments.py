"""The user's arrays, checked, and laid out as the operations want them.

The operations have one normalised axis, parameters of x's rank, and in front the axes of examples that have parameters
of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jln import _checks
from jln._junction.signature import Norm, Operands, Switches

Axis = int | tuple[int, ...]
Gate = jax.Array | float | None


class Given(NamedTuple):
    """The arrays as the user gives them.

    residual: where the norm is of the sum. added: where the sum is of the norm's result; the user's argument
      `residual`.
    """

    x: Any
    residual: Any = None
    scale: Any = None
    offset: Any = None
    x_bias: Any = None
    gate: Any = None
    z: Any = None
    added: Any = None

    def present(self) -> dict[str, Any]:
        return {name: a for name, a in self._asdict().items() if a is not None}


def checked(
    *,
    axis: Axis = -1,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool = False,
    norm_before_gate: bool = True,
    **arrays: Any,
) -> tuple[Given, tuple[int, ...], Norm]:
    """Check a norm's arguments, and return the arrays, the normalised axes and the norm.

    arrays: those of `Given`. A key "residual", "z" or "added" says that the operator has this array, which must then be
      given.
    """
    x = _checks.array("x", arrays["x"])
    axes = _checks.axes(axis, x)
    given = checked_arrays(axes, **arrays)
    epsilon = _checks.epsilon(epsilon, *(a.dtype for a in (x, given.residual) if a is not None))
    if _checks.flag("zero_centered_scale", zero_centered_scale) and given.scale is None:
        raise ValueError("zero_centered_scale=True needs a scale; got scale=None")
    norm_before_gate = _checks.flag("norm_before_gate", norm_before_gate)
    switches = Switches(subtract_mean, bool(zero_centered_scale), norm_before_gate)
    return given, axes, Norm(_merged_axis(axes, x.ndim), epsilon, switches)


def checked_arrays(axes: tuple[int, ...], **arrays: Any) -> Given:
    """The user's arrays, checked for their dtypes and shapes. axes: the normalised ones of x, not negative."""
    given = Given(**arrays)
    x = _checks.array("x", given.x)
    residual, added = (
        _checks.array("residual", getattr(given, which)) if which in arrays else None for which in ("residual", "added")
    )
    normalised = tuple(x.shape[a] for a in axes)
    for summand in (residual, added):
        _checks.shape("residual", summand, x.shape, "that of x")
    scale = _checks.parameter("scale", given.scale, x, axes, normalised)
    offset = _checks.parameter("offset", given.offset, x, axes, normalised)
    x_bias = _checks.optional_array("x_bias", given.x_bias)
    _checks.shape("x_bias", x_bias, normalised, "that of x's normalised axes")
    z = _checks.array("z", given.z) if "z" in arrays else None
    _checks.shape("z", z, x.shape, "that of x")
    return Given(x, residual, scale, offset, x_bias, _checks.gate(given.gate, x, residual, axes), z, added)


def _adjacent(order: list[int]) -> bool:
    return order == list(range(order[0], order[-1] + 1))


def _merged_axis(axes: tuple[int, ...], ndim: int) -> int:
    """The place of the normalised axes once they are one, counted from the end: in place if adjacent, else last."""
    order = sorted(axes)
    return order[-1] - ndim if _adjacent(order) else -1


def arranged(
    given: Given, axes: tuple[int, ...], norm: Norm
) -> tuple[Operands, Norm, Callable[[jax.Array], jax.Array]]:
    """Lay out the user's arrays for the norm's operations.

    Returns the operands; the norm, with the axes of examples; and a function that puts a result's axes of rows back
    where they were, whatever axes are behind them.
    """
    x, order = given.x, sorted(axes)
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

    gates = {"gate": given.gate, "row_gate": None}
    if given.gate is not None and given.gate.shape != normalised and all(given.gate.shape[a] == 1 for a in axes):
        gates = {"gate": None, "row_gate": given.gate}
    rows = {"x": x, "residual": given.residual, "z": given.z, "added": given.added}
    parameters = {"scale": given.scale, "offset": given.offset, "x_bias": given.x_bias} | gates
    operands = Operands(**jax.tree.map(on_one_axis, rows), **jax.tree.map(of_same_rank, parameters))
    with jax.numpy_dtype_promotion("standard"):  # every dtype is chosen on purpose, whatever the user's mode
        operands, norm, places = _with_examples(operands, norm)
    if places is None:
        return operands, norm, lambda a: a
    return operands, norm, lambda a: a.transpose(*places, *range(len(places), a.ndim))


def on_several_axes(a: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """Split the one normalised axis of an array as large as x into the several axes that the user's x has."""
    order = sorted(axes)
    if _adjacent(order):
        return a.reshape(shape)
    first = len(shape) - len(order)
    moved = a.reshape(*a.shape[:first], *(shape[i] for i in order))
    return jnp.moveaxis(moved, range(first, len(shape)), order)


def _with_examples(operands: Operands, norm: Norm) -> tuple[Operands, Norm, list[int] | None]:
    """Move the axes along which a parameter varies to where the kernels read them: in front, or directly before H.

    They stay where they are if they lie there. On them every parameter is written out to x's sizes, and a row's gate on
    all axes of rows; the gradient of what is written out is added up in the compute dtype.

    Returns the operands, the norm, and for each axis of a result where it comes from; None where no axis has moved.
    """
    x = operands.x
    h = x.ndim + norm.axis
    parameters = [a for a in (operands.scale, operands.offset, operands.gate) if a is not None]
    examples = [i for i in range(x.ndim) if i != h and any(a.shape[i] != 1 for a in parameters)]
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def written_out(a: jax.Array, axes: list[int]) -> jax.Array:
        shape = tuple(x.shape[i] if i in axes else n for i, n in enumerate(a.shape))
        return a if a.shape == shape else jnp.broadcast_to(a.astype(jnp.promote_types(a.dtype, wide)), shape)

    if operands.row_gate is not None:
        rows = [i for i in range(x.ndim) if i != h]
        operands = operands._replace(row_gate=written_out(operands.row_gate, rows))
    if not examples:
        return operands, norm, None
    operands = jax.tree.map(lambda a: a if a.shape == x.shape else written_out(a, examples), operands)
    in_front = next((i for i in range(h) if i not in examples), h)
    interleaved = len(examples) - in_front
    if examples == [*range(in_front), *range(h - interleaved, h)]:
        return operands, dataclasses.replace(norm, examples=in_front, interleaved=interleaved), None
    order = examples + [i for i in range(x.ndim) if i not in examples]
    norm = dataclasses.replace(norm, axis=order.index(h) - x.ndim, examples=len(examples))
    return jax.tree.map(lambda a: a.transpose(order), operands), norm, sorted(range(x.ndim), key=order.__getitem__)
