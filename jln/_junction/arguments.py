"""The user's arrays, checked, and laid out as the operations want them.

The operations have one normalised axis, parameters of x's rank, and in front the axes of examples, and next to H that
of heads, that have parameters of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jln import _checks
from jln._core.modes import own_modes
from jln._junction.arrays import COLUMNS, TABLE, Arrays, Norm, Shape, Switches

Axis = int | tuple[int, ...]
Gate = jax.Array | float | None


class NormArguments(NamedTuple):
    """The static arguments of a norm, as users give them; dtype is that of its result."""

    subtract_mean: bool
    axis: Axis
    epsilon: Any
    zero_centered_scale: bool = False
    dtype: DTypeLike | None = None
    both_sides: bool = False


def check(arrays: Arrays, axes: tuple[int, ...]) -> Arrays:
    """The arrays as a user gives them, checked for their dtypes and shapes.

    x and the other arrays of its size that the operator needs are JAX's arrays already. A user's `added` is called
    residual, as is `residual` itself, and x_z is called z.

    axes: the normalised ones of x, not negative.
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
    x_bias = _checks.optional_array("x_bias", arrays.x_bias)
    _checks.shape("x_bias", x_bias, normalised, "that of x's normalised axes")
    return arrays._replace(**parameters, x_bias=x_bias, gate=_checks.gate(arrays.gate, x, arrays.residual, axes))


def norm_of(arrays: Arrays, axes: tuple[int, ...], given: NormArguments, remat: bool) -> Norm:
    """The norm of checked arrays over checked axes, its other arguments checked."""
    epsilon = _checks.epsilon(given.epsilon, *(a.dtype for a in (arrays.x, arrays.residual) if a is not None))
    switches = Switches(given.subtract_mean, _checks.flag("zero_centered_scale", given.zero_centered_scale))
    scales = ("x_scale", "scale") if given.both_sides else ("scale",)
    if switches.zero_centered_scale and not arrays.only(scales).present():
        raise ValueError(f"zero_centered_scale=True needs a scale; got {', '.join(f'{n}=None' for n in scales)}")
    return Norm(max(axes) - arrays.x.ndim, epsilon, switches, both_sides=given.both_sides, remat=remat)


# Groups with fewer rows may move more than plain jnp, as a parameter that they share is written out for each: forward
# and backward of [B, 8192 / B, 4096] in bfloat16, with an offset (a scale) for each place in a sequence, take 1143
# (1076), 738 (705) and 537 (520) MB for B of 1, 2 and 4, plain jnp 942 (740), 875 (640) and 841 (589).
FEWEST_ROWS = 4


def are_few_rows(x: Sequence[int], others: Container[int], shared: int) -> bool:
    """True where groups have too few rows for kernels, as so many parameters are shared by groups.

    others: the axes of x that are not those of a group's rows.
    """
    rows = math.prod(n for i, n in enumerate(x) if i not in others)
    return isinstance(rows, int) and rows < FEWEST_ROWS * shared


def groups_of(
    x: Sequence[int], h: int, columns: Sequence[Sequence[int]], may_be_plain: bool = True
) -> tuple[int, bool] | None:
    """The number of first axes that are those of examples, and whether heads are in front of H, the axis `h`.

    None where parameters of these sizes, all of x's rank, vary along other axes, or where the call may be plain jnp and
    groups have few rows for those of them that are shared: by groups, or by a group's elements, as a row's gate is.
    """
    own = {i for sizes in columns for i, n in enumerate(sizes) if i != h and n != 1}
    behind = next((i for i in range(h) if i not in own and x[i] != 1), h)
    examples = 1 + max((i for i in own if i < behind), default=-1)
    others = {i for i in own if i >= examples}
    heads = others == {h - 1} and h == len(x) - 1
    shared = sum(any(sizes[i] == 1 for i in (*own, h) if x[i] != 1) for sizes in columns if math.prod(sizes) != 1)
    if (others and not heads) or (may_be_plain and are_few_rows(x, {*own, h}, shared)):
        return None
    return examples, heads


def arrange(arrays: Arrays, axes: tuple[int, ...], norm: Norm, may_be_plain: bool) -> tuple[Arrays, Norm] | None:
    """Lay out the user's arrays, but for those of Linears, for the norm's operations: adjacent axes of H are one.

    Returns the operands, and the norm with its axes of examples and heads. On these every parameter is written out to
    x's sizes, and along H a gate that has one value for it. None where axes are not adjacent, or as of `groups_of`.
    """
    x, order = arrays.x, sorted(axes)
    normalised = tuple(x.shape[a] for a in axes)
    h, end = order[0], order[-1] + 1
    if end - h != len(order):
        return None
    ndim = x.ndim - len(order) + 1

    def on_one_axis(a: jax.Array) -> jax.Array:
        return a.reshape(*a.shape[:h], math.prod(a.shape[h:end]), *a.shape[end:])

    def align(parameter: jax.Array) -> jax.Array:
        if parameter.shape != normalised:
            return on_one_axis(parameter)
        in_order = parameter.transpose([axes.index(a) for a in order])
        return in_order.reshape([in_order.size if i == h else 1 for i in range(ndim)])

    operands = {
        name: on_one_axis(a) if TABLE[name].shape is Shape.ROW else align(a)
        for name, a in arrays._replace(kernel=None, bias=None).present().items()
    }
    columns = [name for name in operands if TABLE[name].shape is Shape.COLUMN]
    sizes = operands["x"].shape
    groups = groups_of(sizes, h, [operands[name].shape for name in columns], may_be_plain)
    if groups is None:
        return None
    norm = dataclasses.replace(norm, examples=groups[0], heads=groups[1])
    of_groups = norm.axes_of_groups(ndim, 0)
    with own_modes():
        for name, a in operands.items():
            if TABLE[name].shape is not Shape.ROW:
                of_h = [h] if TABLE[name].shape is Shape.COLUMN else []
                operands[name] = write_out(a, operands["x"], of_groups + of_h)
    return Arrays(**operands, kernel=arrays.kernel, bias=arrays.bias), norm


def no_kernels(arrays: Arrays, axes: tuple[int, ...], is_arranged: bool) -> str | None:
    """The reason why no kernel takes the user's arrays as they lie, and what to do; None where one may.

    is_arranged: whether `arranged` has laid them out.
    """
    x, order = arrays.x, sorted(axes)
    if order[-1] - order[0] >= len(order) or order[-1] != x.ndim - 1:
        are = "are not adjacent" if order[-1] - order[0] >= len(order) else "are not its last"
        return (
            f"takes rows whose elements lie side by side, and axis={axes} of x {x.shape} {are}: write "
            f"jnp.moveaxis(x, {axes}, {tuple(range(-len(axes), 0))}), or leave it out, and XLA reads x where it is"
        )
    if not is_arranged:
        shapes = {name: a.shape for name, a in arrays.only(COLUMNS).present().items()}
        return (
            "takes parameters that vary along x's first axes, or along the one in front of the normalised axis; got "
            f"{', '.join(f'{name} {shape}' for name, shape in shapes.items())} for x {x.shape}: leave it out, and XLA "
            "reads them where they are"
        )
    return None


def write_out(a: jax.Array, x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The array with the sizes of x on these axes. The gradient of a copy is added up in the compute dtype."""
    shape = tuple(x.shape[i] if i in axes else n for i, n in enumerate(a.shape))
    wide = jnp.promote_types(jnp.promote_types(x.dtype, jnp.float32), a.dtype)
    return a if a.shape == shape else jnp.broadcast_to(a.astype(wide), shape)
