"""The shapes of an operation's results, and the dimensions that its arrays share, as the table of arrays has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jln._core.layout import Dim, Dims, Kind, Layout, Result, Term
from jln._junction.arrays import TABLE, Arrays, Norm, Shape


def layout(
    operands: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int, features: tuple[int, ...] | None = None
) -> Layout:
    """The layout of an operation: a gradient of a parameter is a sum over rows.

    The backward operation of Linears is linear in dy. So a device that has a part of the features has a share of each
    result that is not split by features; and to that sum dtotal is added on one device alone.

    features: how many axes of features each Linear has; None for the norm by itself.
    """
    ndim = _rank(operands, features)
    pulls = operands.dy is not None

    def dims(name: str) -> Any:
        kind = TABLE[name].shape
        of_groups = norm.axes_of_groups(ndim, batch_dims)
        of_x = [Dim(Kind.BATCH if i in of_groups else Kind.ROW, i) for i in range(ndim)]
        if features is not None and (kind in _OF_LINEAR or name in ("y", "dy")):
            return _dims_of_linears(kind, tuple(of_x[:-1]), features, batch_dims)
        of_x[norm.axis] = Dim(Kind.HIDDEN, kind is Shape.BLOCK, stored_as="parameter" if kind is Shape.COLUMN else "")
        return Term(tuple(of_x)) if name == "dtotal" and features is not None else tuple(of_x)

    def result(name: str) -> Any:
        kind, of = TABLE[name].shape, dims(name)
        if features is not None and (kind in _OF_LINEAR or name == "y"):
            over_rows = (Kind.ROW, Kind.BATCH) if norm.has_groups else (Kind.ROW,)
            return tuple(Result(d, *([over_rows, True] if pulls else [])) for d in of)
        over_features = (Kind.FEATURE,) if pulls and features is not None else ()
        is_sum = pulls and kind is Shape.COLUMN
        return Result(of, (*over_features, *[Kind.ROW] * is_sum), wide=is_sum)

    of_operands = Arrays(**{name: dims(name) for name in operands.present()})
    of_results = Arrays(**{name: result(name) for name in dtypes.present()})
    in_eight_bits = norm.blocks != "" or dtypes.y_max is not None
    return Layout.of(operands, of_operands, dtypes, of_results, whole=(Kind.HIDDEN,) * in_eight_bits)


_OF_LINEAR = (Shape.KERNEL, Shape.BIAS)


def _rank(operands: Arrays, features: tuple[int, ...] | None) -> int:
    """The rank of x, which all arrays have but those of Linears."""
    if features is not None and operands.dy is not None:
        return next(d.ndim - of + 1 for d, of in zip(operands.dy, features, strict=True) if d is not None)
    return next(a.ndim for name, a in operands.present().items() if TABLE[name].shape not in _OF_LINEAR)


def _dims_of_linears(kind: Shape, of_rows: Dims, features: tuple[int, ...], batch_dims: int) -> tuple[Dims, ...]:
    batch, rows = of_rows[:batch_dims], of_rows[batch_dims:]
    lead = {Shape.KERNEL: (Dim(Kind.HIDDEN, stored_as="kernel"),), Shape.BIAS: ()}.get(kind, rows)
    of_each = (tuple(Dim(Kind.FEATURE, i, of=of) for i in range(n)) for of, n in enumerate(features))
    return tuple((*batch, *lead, *of) for of in of_each)


def result_shapes(
    operands: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int, features: tuple[int, ...] | None = None
) -> Arrays:
    """The results of an operation as shapes and dtypes. features: as of `layout`."""
    arrays = operands.present()
    batch: Any = jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in jax.tree.leaves(arrays)))
    lead_and_h = _shape_without_batch(operands, dtypes, batch_dims, features)
    shape = (*batch, *lead_and_h)

    def of(name: str, dtype: Any) -> Any:
        kind = TABLE[name].shape
        if features is None or not (kind in _OF_LINEAR or name == "y"):
            return None if dtype is None else jax.ShapeDtypeStruct(norm.sizes(kind, shape, batch_dims), dtype)
        lead = {Shape.KERNEL: lead_and_h[-1:], Shape.BIAS: ()}.get(kind, lead_and_h[:-1])
        sizes = _sizes_of_features(operands, batch_dims, features)
        return tuple(
            None if d is None else jax.ShapeDtypeStruct((*batch, *lead, *n), d)
            for n, d in zip(sizes, dtype, strict=True)
        )

    return Arrays(**{name: of(name, dtype) for name, dtype in dtypes.present().items()})


def _shape_without_batch(
    operands: Arrays, dtypes: Arrays, batch_dims: int, features: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The shape of x, without vmap's axes, from the arrays that there are; without H where no result has it."""
    rows = (a for name, a in operands.present().items() if TABLE[name].shape is Shape.ROW and hasattr(a, "shape"))
    row = next(rows, None)
    if row is not None:
        return row.shape[batch_dims:]
    # Of the products' cotangents alone; and with the kernels, of which an offset's gradient is made.
    dy, axes = next((d, n) for d, n in zip(operands.dy, features or (), strict=True) if d is not None)
    h = [k.shape[batch_dims] for k in operands.kernel or () if k is not None]
    assert h or jax.tree.leaves(dtypes) == jax.tree.leaves(dtypes.bias), "no array tells H"
    return (*dy.shape[batch_dims : dy.ndim - axes], *h[:1])


def _sizes_of_features(operands: Arrays, batch_dims: int, features: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The features of each Linear; () of one that has no part in the operation."""
    if operands.dy is not None:
        return [() if d is None else d.shape[d.ndim - n :] for d, n in zip(operands.dy, features, strict=True)]
    return [() if k is None else k.shape[batch_dims + 1 :] for k in operands.kernel]
