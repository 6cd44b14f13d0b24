"""The dimensions that an operation's arrays share, as the table of arrays has them."""

from __future__ import annotations

from typing import Any

import jax

from jln._core.layout import Dim, Kind, Layout, Result, Term
from jln._junction.arrays import TABLE, Arrays, Norm, Shape

_OF_LINEAR = (Shape.KERNEL, Shape.BIAS)


def layout(operands: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int, features: int | None = None) -> Layout:
    """The layout of an operation: a gradient of a parameter is a sum over rows.

    The backward operation of a Linear is linear in dy. So a device that has a part of the features has a share of each
    result that is not split by features; and to that sum dtotal is added on one device alone.

    features: how many axes of features the Linear has; None for the norm by itself.
    """
    pulls = operands.dy is not None
    of_product = pulls and features is not None
    ndim = operands.dy[0].ndim - features + 1 if of_product else jax.tree.leaves(operands)[0].ndim

    def dims(name: str) -> Any:
        kind = TABLE[name].shape
        of_groups = norm.axes_of_groups(ndim, batch_dims)
        of_x = [Dim(Kind.BATCH if i in of_groups else Kind.ROW, i) for i in range(ndim)]
        if features is not None and (kind in _OF_LINEAR or name in ("y", "dy")):
            batch, rows = of_x[:batch_dims], of_x[batch_dims:-1]
            lead = {Shape.KERNEL: [Dim(Kind.HIDDEN, stored_as="kernel")], Shape.BIAS: []}.get(kind, rows)
            return ((*batch, *lead, *(Dim(Kind.FEATURE, i) for i in range(features))),)
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
