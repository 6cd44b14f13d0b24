"""The norms' operations and their derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jln._core.derivatives import Rules, Unneeded, named_statistics
from jln._core.mesh import Dim, Dims, Kind, Layout, Result
from jln._core.operation import LinearOperation, Operation, only_rows_differ
from jln._norm import formulas
from jln._norm.signature import Cotangents, Gradients, Norm, Operands, Outcome, Results, Saved, Settings


def _dims(ndim: int, axis: int, batch_dims: int, stored_as: str = "") -> Dims:
    """Every array's dimensions: all have the same rank, with 1 where they have less than x."""
    dims = [Dim(Kind.BATCH if i < batch_dims else Kind.ROW, i) for i in range(ndim)]
    dims[axis] = Dim(Kind.HIDDEN, stored_as=stored_as)
    return tuple(dims)


def _forward_layout(operands: Operands, norm: Norm, dtypes: Outcome, batch_dims: int) -> Layout:
    rows, parameter = (_dims(operands.x.ndim, norm.axis, batch_dims, of) for of in ("", "parameter"))
    given = Operands(x=rows, residual=rows, scale=parameter, offset=parameter)
    of_rows = Result(rows)
    return Layout.of(operands, given, dtypes, Outcome(y=of_rows, total=of_rows, mean=of_rows, rstd=of_rows))


def _backward_layout(operands: Cotangents, norm: Norm, dtypes: Gradients, batch_dims: int) -> Layout:
    ndim = jax.tree.leaves(operands)[0].ndim  # as that of all
    rows, parameter = (_dims(ndim, norm.axis, batch_dims, of) for of in ("", "parameter"))
    given = Cotangents(dy=rows, dtotal=rows, total=rows, scale=parameter, offset=parameter, mean=rows, rstd=rows)
    shares = Result(parameter, summed=(Kind.ROW,), wide=True)
    return Layout.of(operands, given, dtypes, Gradients(Result(rows), shares, shares, y=Result(rows)))


def _launcher():
    from jln._norm import launcher

    return launcher


forward: Operation[Operands, Outcome] = Operation(
    "jln_norm_forward",
    formulas.forward,
    formula_cpu=formulas.forward_cpu,
    launcher=lambda: _launcher().forward,
    layout=_forward_layout,
    made_of=Outcome(
        y=("x", "residual", "scale", "offset"),
        total=("x", "residual"),
        mean=("x", "residual"),
        rstd=("x", "residual"),
    ),
)
backward: Operation[Cotangents, Gradients] = Operation(
    "jln_norm_backward",
    formulas.backward,
    formula_cpu=formulas.backward_cpu,
    launcher=lambda: _launcher().backward,
    layout=_backward_layout,
    made_of=Gradients(
        dx=("dy", "dtotal", "total", "scale", "mean", "rstd"),
        dscale=("dy", "total", "mean", "rstd"),
        doffset=("dy",),
        y=("total", "scale", "offset", "mean", "rstd"),
    ),
)


# The rules


def _outcome(settings: Settings, operands: Operands, keep: bool) -> Outcome:
    norm, (x, residual, _, _) = settings.norm, operands
    total = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
    statistic = jnp.promote_types(total, jnp.float32).name if keep else None
    dtypes = Outcome(
        y=settings.y_dtype,
        total=None if residual is None else total.name,
        mean=statistic if norm.subtract_mean else None,
        rstd=statistic,
    )
    return forward(operands, norm, dtypes, implementation=settings.implementation)


def _value(settings: Settings, operands: Operands) -> Results:
    y, total, _, _ = _outcome(settings, operands, keep=False)
    return Results(y, total)


def _saving(settings: Settings, operands: Operands, wanted: Operands) -> tuple[Results, Saved]:
    """Keep what the wanted gradients are made of: that of the offset is made of dy alone."""
    needed = backward.needs(_dtypes(wanted, settings.y_dtype))
    y, total, *statistics = _outcome(settings, operands, keep="rstd" in needed)
    saved = Saved(operands.x if total is None else total, operands.scale, *named_statistics(*statistics))
    if "rstd" not in needed:
        nothing = Unneeded(y)
        saved = Saved(Unneeded(saved.total), saved.scale, nothing if settings.norm.subtract_mean else None, nothing)
    return Results(y, total), saved


def _dtypes(wanted: Operands, total_dtype: str) -> Gradients:
    """Of the gradients that give those of the wanted operands; dx, that of the total, goes to x and to residual."""
    through_total = wanted.x is not None or wanted.residual is not None
    return Gradients(total_dtype if through_total else None, wanted.scale, wanted.offset, None)


def _gradients(settings: Settings, saved: Saved, cotangents: Results, wanted: Operands) -> Operands:
    dx, dscale, doffset, _ = _pulled_back(cotangents, saved, settings.norm, wanted, 0, settings.implementation)
    dx, dresidual = (None if d is None or dx is None else dx.astype(d) for d in (wanted.x, wanted.residual))
    return Operands(dx, dresidual, dscale, doffset)


def _pulled_back(
    cotangents: Results, saved: Saved, norm: Norm, wanted: Operands, batch_dims: int, implementation: str | None
) -> Gradients:
    dy, dtotal = cotangents
    if dy is None:
        return Gradients(dtotal, None, None, None)
    dtypes = _dtypes(wanted, dy.dtype.name if saved.total is None else saved.total.dtype.name)
    total, scale, *statistics = saved
    operands = Cotangents(dy, dtotal, total, scale, None, *statistics)
    return backward(operands, norm, dtypes, implementation=implementation, batch_dims=batch_dims)


def _transposed(cotangents: Results, tangents: Operands, saved: Saved, norm: Norm, batch_dims: int, implementation):
    """Reverse mode after all, by the backward kernel."""
    rows = (*cotangents, saved.total, saved.mean, saved.rstd)
    if only_rows_differ(batch_dims, rows, (saved.scale, tangents.scale, tangents.offset)):
        batch_dims = 0
    wanted = Operands(*(None if a is None else a.dtype.name for a in tangents))
    dx, dscale, doffset, _ = _pulled_back(cotangents, saved, norm, wanted, batch_dims, implementation)
    return Operands(dx, dx, dscale, doffset)


_tangent: LinearOperation[tuple[Operands, Saved], Results] = LinearOperation(
    "jln_norm_tangent", formulas.tangent, transpose=_transposed
)


def _tangents(settings: Settings, saved: Saved, tangents: Operands, results: Results) -> Results:
    y, total = results
    if saved.rstd is None:  # (19) of the offset alone, which reads nothing
        wide = tangents.offset.astype(jnp.promote_types(tangents.offset.dtype, formulas.compute_dtype(y.dtype)))
        dy = jnp.broadcast_to(wide, y.shape).astype(y.dtype)
        return Results(dy, None if total is None else jnp.zeros_like(total))
    dtypes = Results(y.dtype.name, None if total is None else total.dtype.name)
    return _tangent((tangents, saved), settings.norm, dtypes, implementation=settings.implementation)


operator = Rules(_value, _saving, _gradients, _tangents).operator()
