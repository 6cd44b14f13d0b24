"""The operations of a norm on both sides of a sum, and their derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jln._core.derivatives import Rules, Unneeded, named_statistics
from jln._core.layout import Kind, Layout, Result
from jln._core.operation import LinearOperation, Operation, only_rows_differ
from jln._junction import rules as norms
from jln._junction import signature as of_norm
from jln._junction.both_sides import formulas
from jln._junction.both_sides.signature import Cotangents, Gradients, Operands, Outcome, Results, Saved
from jln._junction.signature import Norm, Settings


def _forward_layout(operands: Operands, norm: Norm, dtypes: Outcome, batch_dims: int) -> Layout:
    of = norms.dims_of_operands(operands.x.ndim, norm, batch_dims)
    given = Operands(of.x, of.x, of.scale, of.scale)
    return Layout.of(operands, given, dtypes, Outcome(*[Result(of.x)] * len(Outcome._fields)))


def _backward_layout(operands: Cotangents, norm: Norm, dtypes: Gradients, batch_dims: int) -> Layout:
    ndim = jax.tree.leaves(operands)[0].ndim  # all have x's rank
    of = norms.dims_of_operands(ndim, norm, batch_dims)
    given = Cotangents(*(of.scale if name in ("scale", "x_scale") else of.x for name in Cotangents._fields))
    row, share = Result(of.x), Result(of.scale, summed=(Kind.ROW,), wide=True)
    return Layout.of(operands, given, dtypes, Gradients(row, row, share, share))


def _launcher():
    from jln._junction.both_sides import launches as launcher

    return launcher


_SUM = ("x", "residual", "x_scale")
# The operands that the total's cotangent is made of, and those of the gradients of the branch.
_OF_TOTAL = ("dy", "dtotal", "total", "scale", "rstd")
_OF_BRANCH = (*_OF_TOTAL, "x", "x_rstd")

_forward: Operation[Operands, Outcome] = Operation(
    "jln_norm_add_norm_forward",
    formulas.forward,
    formula_cpu=formulas.forward_cpu,
    launcher=lambda: _launcher().forward,
    layout=_forward_layout,
    made_of=Outcome(y=(*_SUM, "scale"), total=_SUM, x_rstd=_SUM, rstd=_SUM),
)
_backward: Operation[Cotangents, Gradients] = Operation(
    "jln_norm_add_norm_backward",
    formulas.backward,
    formula_cpu=formulas.backward_cpu,
    launcher=lambda: _launcher().backward,
    layout=_backward_layout,
    made_of=Gradients(
        dx=(*_OF_BRANCH, "x_scale"), dresidual=_OF_TOTAL, dx_scale=_OF_BRANCH, dscale=("dy", "total", "rstd")
    ),
)


# The rules


def _outcome(settings: Settings, operands: Operands, *, keep: bool, keep_x: bool) -> Outcome:
    x, residual = operands.x.dtype, operands.residual.dtype
    total = jnp.promote_types(x, residual)
    dtypes = Outcome(
        y=settings.y_dtype,
        total=total.name,
        x_rstd=jnp.promote_types(x, jnp.float32).name if keep_x else None,
        rstd=jnp.promote_types(total, jnp.float32).name if keep else None,
    )
    return _forward(operands, settings.norm, dtypes, implementation=settings.implementation)


def _value(settings: Settings, operands: Operands) -> Results:
    y, total, *_ = _outcome(settings, operands, keep=False, keep_x=False)
    return Results(y, total)


def _gradients_for(wanted: Operands) -> Gradients:
    return Gradients(wanted.x, wanted.residual, wanted.x_scale, wanted.scale)


def _saving(settings: Settings, operands: Operands, wanted: Operands) -> tuple[Results, Saved]:
    """Keep the arrays that the wanted gradients are made of: x is needed for its own and its scale's alone."""
    of_x = wanted.x is not None or wanted.x_scale is not None
    y, total, x_rstd, rstd = _outcome(settings, operands, keep=True, keep_x=of_x)
    x_rstd, rstd = named_statistics(x_rstd, rstd)
    x, x_scale, x_rstd = (
        a if of_x or a is None else Unneeded(a) for a in (operands.x, operands.x_scale, x_rstd if of_x else y)
    )
    return Results(y, total), Saved(total, operands.scale, rstd, x, x_scale, x_rstd)


def _gradients(settings: Settings, saved: Saved, cotangents: Results, wanted: Operands) -> Operands:
    return _pulled_back(cotangents, saved, settings.norm, wanted, 0, settings.implementation)


def _pulled_back(
    cotangents: Results, saved: Saved, norm: Norm, wanted: Operands, batch_dims: int, implementation: str | None
) -> Operands:
    dy, dtotal = cotangents
    dtypes = _gradients_for(wanted)
    how = {"implementation": implementation, "batch_dims": batch_dims}
    if dy is not None:
        operands = Cotangents(dy, dtotal, *saved)
        dx, dresidual, dx_scale, dscale = _backward(operands, norm, dtypes, **how)
        return Operands(dx, dresidual, dx_scale, dscale)
    if dtotal is None:
        return Operands(None, None)
    dresidual = None if wanted.residual is None else dtotal.astype(wanted.residual)
    if wanted.x is None and wanted.x_scale is None:
        return Operands(None, dresidual)
    of_x = of_norm.Cotangents(dtotal, None, saved.x, saved.x_scale, None, None, saved.x_rstd)
    found = norms.backward(of_x, norm, of_norm.Gradients(dx=wanted.x, dscale=wanted.x_scale), **how)
    return Operands(found.dx, dresidual, found.dscale)


def _transposed(cotangents: Results, tangents: Operands, saved: Saved, norm: Norm, batch_dims: int, implementation):
    """The transpose of the tangents, by the backward kernel: reverse mode of a function made for forward mode."""
    rows = (*cotangents, saved.total, saved.rstd, saved.x, saved.x_rstd)
    parameters = (saved.scale, saved.x_scale, tangents.scale, tangents.x_scale)
    if not norm.examples and only_rows_differ(batch_dims, rows, parameters):
        batch_dims = 0
    wanted = Operands(*(None if a is None else a.dtype.name for a in tangents))
    return _pulled_back(cotangents, saved, norm, wanted, batch_dims, implementation)


_tangent: LinearOperation[tuple[Operands, Saved], Results] = LinearOperation(
    "jln_norm_add_norm_tangent", formulas.tangent, transpose=_transposed
)


def _tangents(settings: Settings, saved: Saved, tangents: Operands, results: Results) -> Results:
    dtypes: Any = Results(results.y.dtype.name, results.total.dtype.name)
    return _tangent((tangents, saved), settings.norm, dtypes, implementation=settings.implementation)


operator = Rules(_value, _saving, _gradients, _tangents).operator()
