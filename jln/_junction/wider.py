"""The axes of examples that `vmap` brings: where operations leave them, and calls that are one wider call.

Examples are rows like any other, examples of the norm, features of the Linears, or copies of the parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jln._core.layout import Place
from jln._junction.arguments import written_out
from jln._junction.arrays import SCALE_OF, TABLE, Arrays, Junction, Norm, Shape, columns_of
from jln._junction.linears.tiles import few_features

# What is taken where an axis is moved and nobody names an implementation: XLA reads the arrays where they were. For
# kernels they would be transposed, and the results.
_OF_MOVED = "xla"


def in_place(operands: Arrays, axes: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int) -> Place | None:
    """The place of vmap's examples in an operation: where they are, if they can stay, else in front of all arrays.

    None where nothing of x's size moves for that, and of an x in blocks, which kernels are to make all the same.

    axes: the place of vmap's axis in each operand, None in one that is shared.
    """
    given, names = operands.present(), {*operands.present(), *dtypes.present()}
    of_rows = [name for name in given if TABLE[name].shape is Shape.ROW]
    axis = next((getattr(axes, name) for name in of_rows if getattr(axes, name) is not None), None)
    if axis is None:
        return None
    if axis <= batch_dims:
        return Place(axis, batch_dims + 1, norm)
    in_front = None if norm.blocks else Place(0, batch_dims + 1, norm, implementation=_OF_MOVED, back=axis)
    if any(getattr(axes, name) is None for name in of_rows):
        return in_front
    ndim = given[of_rows[0]].ndim - 1
    are_rows = {*axes.present(), *dtypes.present()}.isdisjoint(columns_of(norm, names))
    if norm.blocks and axis > ndim + norm.axis:  # blocks have rows in them
        return in_front
    wider = grown(norm, names, are_rows, axis, ndim, batch_dims)
    return in_front if wider is None else Place(axis, batch_dims, *wider)


def grown(
    norm: Norm, names: Iterable[str], are_rows: bool, axis: int, ndim: int, batch_dims: int = 0
) -> tuple[Norm, frozenset[str]] | None:
    """The norm with one more axis, and the names of the arrays that have a copy for each example; None where it cannot.

    are_rows: whether examples share the parameters and these have no gradient of each, but for an offset that is read
      row by row: then they are rows like any other, if they can be. axis, ndim, batch_dims: as of `Norm.with_rows`.
    """
    copies = {name for name in names if TABLE[name].shape is Shape.NUMBER}
    wider = norm.with_rows(axis, ndim, batch_dims) if are_rows else None
    if wider is None:
        wider, copies = norm.with_examples(axis, ndim, batch_dims), copies | columns_of(norm, names)
    return None if wider is None else (wider, frozenset(copies))


def grown_in_front(norm: Norm, names: Iterable[str], are_rows: bool, ndim: int) -> tuple[Norm, frozenset[str]]:
    """The same for an axis in front of all others, where it always can."""
    wider = grown(norm, names, are_rows, 0, ndim)
    assert wider is not None, "examples in front are examples of any norm"
    return wider


def widened(junction: Junction, operands: Arrays, axes: Arrays) -> tuple[Junction, Arrays, Arrays] | None:
    """The one call that computes what examples do, as `jln._core.reverse_mode.Widen` says.

    axes: the place of vmap's axis in each operand, None in one that is shared.
    """
    has_scales = not axes.present().keys().isdisjoint(SCALE_OF.values())
    if junction.eight_bits in ("one", "rows") or has_scales:  # each example has a scale, or blocks, of its own
        return None
    if not junction.features and axes.present().keys() <= {"scale", "offset"}:
        return _with_copies(junction, operands, axes)
    of_linears = [*(axes.kernel or ()), *(axes.bias or ())]
    of_rows = [getattr(axes, name) for name in operands.present() if TABLE[name].shape is Shape.ROW]
    if None not in of_rows and not any(a is not None for a in of_linears):
        return _with_rows(junction, operands, axes)
    if not axes._replace(kernel=None, bias=None).present():
        return _with_features(junction, operands, axes)
    return None


def _with_rows(junction: Junction, operands: Arrays, axes: Arrays) -> tuple[Junction, Arrays, Arrays] | None:
    """The call with the examples as rows, or as examples of the norm: all arrays of x's size differ between them."""
    norm, ndim = junction.norm, operands.x.ndim - 1
    names = [name for name in operands.present() if name not in ("kernel", "bias")]
    are_rows = axes.present().keys().isdisjoint(columns_of(norm, names))
    axis, wider = axes.x, None
    # Behind H a Linear has its features, and there are no rows in a block.
    if axis <= ndim + norm.axis or not (junction.features or junction.eight_bits):
        wider = grown(norm, names, are_rows, axis, ndim)
    if wider is None:
        if axis and not (junction.features or junction.eight_bits):
            junction = dataclasses.replace(junction, implementation=junction.implementation or _OF_MOVED)
        axis, wider = 0, grown_in_front(norm, names, are_rows, ndim)
    norm, copies = wider
    if norm.offset_rows and axes.offset is not None:
        norm = dataclasses.replace(norm, offset_rows=tuple(sorted((*norm.offset_rows, axis - ndim - 1))))
    x = jnp.moveaxis(operands.x, axes.x, axis)

    def placed(name: str) -> Any:
        a, given = getattr(operands, name), getattr(axes, name)
        in_front = norm.copies if name in ("scale", "offset") else 0
        if given is not None:
            return jnp.moveaxis(a, given, in_front + axis)
        a, like = jnp.expand_dims(a, in_front + axis), jnp.expand_dims(x, range(in_front))
        return written_out(a, like, [in_front + axis] if name in copies else [])

    operands = operands._replace(**{name: placed(name) for name in names})
    y = (axis,) * len(junction.features) if junction.features else axis + norm.copies
    return dataclasses.replace(junction, norm=norm), operands, _places(junction, y, axis)


def _with_copies(junction: Junction, operands: Arrays, axes: Arrays) -> tuple[Junction, Arrays, Arrays] | None:
    """The call with a scale and an offset for each example of the same rows."""
    norm, present = junction.norm, operands.present()
    if norm.offset_rows or norm.remat or junction.eight_bits or {"x_z", "z", "added"} & {*present}:
        return None
    (size,) = {a.shape[getattr(axes, name)] for name, a in present.items() if getattr(axes, name) is not None}

    def in_copies(a: Any, axis: int | None) -> Any:
        if axis is not None:
            return jnp.moveaxis(a, axis, 0)
        wide = jnp.promote_types(a.dtype, jnp.float32)  # in which its gradients are added up
        return jnp.broadcast_to(a.astype(wide), (size, *a.shape))

    names = [name for name in present if name in ("scale", "offset")]
    operands = operands._replace(**{name: in_copies(getattr(operands, name), getattr(axes, name)) for name in names})
    junction = dataclasses.replace(junction, norm=dataclasses.replace(norm, copies=norm.copies + 1))
    return junction, operands, _places(junction, 0, None)


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
    if not junction.quantises:
        return places
    names = ["block_scale", "carrier", *("y2", "y3")[: len(junction.more)]]
    if junction.gives_statistics:
        names += ["mean", "rstd"] if junction.norm.switches.subtract_mean else ["rstd"]
    return places._replace(**dict.fromkeys(names, y))
