"""The arrays that a user gives, checked, and laid out as the operations want them: one normalised axis, parameters of
x's rank, and first the axes of examples that have parameters of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jln import _checks
from jln._norm.signature import Norm, Operands, Switches

Axis = int | tuple[int, ...]
Gate = jax.Array | float | None


class Given(NamedTuple):
    """The arrays as the user gives them. A residual is `residual` where the norm is of the sum, `added` where it is in
    the sum.
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
    """-> (the arrays, of supported dtypes and of shapes that they may have; the normalised axes; the norm)

    arrays: those of `Given`; with "residual", "z" or "added" among them there must be one.
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
    """Of supported dtypes and of shapes that they may have. axes: the normalised ones of x, from 0 on."""
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
    """Where the normalised axes are once they are one, counted from the end: in place if they are adjacent."""
    order = sorted(axes)
    return order[-1] - ndim if _adjacent(order) else -1


def arranged(
    given: Given, axes: tuple[int, ...], norm: Norm
) -> tuple[Operands, Norm, Callable[[jax.Array], jax.Array]]:
    """-> (the operands of the norm's operations; the norm, which knows of examples; what puts the axes of rows of a
    result, whatever is behind them, where they were)
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
    """The opposite of making the normalised axes one, for an array as large as x."""
    order = sorted(axes)
    if _adjacent(order):
        return a.reshape(shape)
    first = len(shape) - len(order)
    moved = a.reshape(*a.shape[:first], *(shape[i] for i in order))
    return jnp.moveaxis(moved, range(first, len(shape)), order)


def _with_examples(operands: Operands, norm: Norm) -> tuple[Operands, Norm, list[int] | None]:
    """Axes along which a parameter varies in front, or where they are if they lie in front or directly before the
    normalised one; on them every parameter has x's sizes, and a row's gate has them on all axes of rows. Of what is
    written out so, the gradient is added up in the compute dtype.

    -> (the operands, the norm, where the axes of a result come from if they are elsewhere than they were)
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
