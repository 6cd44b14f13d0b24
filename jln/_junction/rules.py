"""The norms' operations and their derivatives."""

from __future__ import annotations

import functools
from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp

from jln._core.derivatives import Rules, Unneeded, batched_like, named_statistics
from jln._core.layout import Dim, Dims, Kind, Layout, Result
from jln._core.operation import LinearOperation, Operation, only_rows_differ
from jln._junction import formulas
from jln._junction.signature import (
    Branch,
    Cotangents,
    Gradients,
    Norm,
    Operands,
    Outcome,
    Results,
    Saved,
    Settings,
)


def _dims(ndim: int, norm: Norm, batch_dims: int, stored_as: str = "") -> Dims:
    """The dimensions of every array: all have the same rank, with 1 where they have less than x."""
    of_examples = norm.axes_of_examples(ndim, batch_dims)
    dims = [Dim(Kind.BATCH if i in of_examples else Kind.ROW, i) for i in range(ndim)]
    dims[norm.axis] = Dim(Kind.HIDDEN, stored_as=stored_as)
    return tuple(dims)


def dims_of_operands(ndim: int, norm: Norm, batch_dims: int) -> Operands:
    rows, parameter = (_dims(ndim, norm, batch_dims, of) for of in ("", "parameter"))
    parameters = dict.fromkeys(("x_bias", "gate", "scale", "offset"), parameter)
    return Operands(x=rows, residual=rows, row_gate=rows, z=rows, added=rows, **parameters)


def dims_of_cotangents(ndim: int, norm: Norm, batch_dims: int) -> Cotangents:
    of = dims_of_operands(ndim, norm, batch_dims)
    read = {name: getattr(of, name) for name in Cotangents._fields if name in Operands._fields}
    return Cotangents(dy=of.x, dtotal=of.x, total=of.x, mean=of.x, rstd=of.x, **read)


def spread_gradients(ndim: int, norm: Norm, batch_dims: int) -> Gradients:
    of = dims_of_operands(ndim, norm, batch_dims)
    row, share = Result(of.x), Result(of.scale, summed=(Kind.ROW,), wide=True)
    shares = dict.fromkeys(("dscale", "doffset", "dx_bias", "dgate"), share)
    return Gradients(dx=row, y=row, dresidual=row, drow_gate=row, dz=row, **shares)


def _forward_layout(operands: Operands, norm: Norm, dtypes: Outcome, batch_dims: int) -> Layout:
    given = dims_of_operands(operands.x.ndim, norm, batch_dims)
    row = Result(given.x)
    return Layout.of(operands, given, dtypes, Outcome(y=row, total=row, mean=row, rstd=row))


def _backward_layout(operands: Cotangents, norm: Norm, dtypes: Gradients, batch_dims: int) -> Layout:
    how = jax.tree.leaves(operands)[0].ndim, norm, batch_dims  # all have x's rank
    return Layout.of(operands, dims_of_cotangents(*how), dtypes, spread_gradients(*how))


def _launcher():
    from jln._junction import launches as launcher

    return launcher


# The operands that total is made of, and those that total's cotangent is made of.
_SUM = ("x", "residual", "x_bias", "gate", "row_gate", "z")
_PULLED = ("dy", "dtotal", "total", "scale", "mean", "rstd", "z")
OUTCOME_MADE_OF = Outcome(y=(*_SUM, "scale", "offset", "added"), total=_SUM, mean=_SUM, rstd=_SUM)
GRADIENTS_MADE_OF = Gradients(
    dx=(*_PULLED, "gate", "row_gate"),
    dscale=("dy", "total", "mean", "rstd", "z"),
    doffset=("dy",),
    y=("total", "scale", "offset", "mean", "rstd"),
    dresidual=_PULLED,
    dx_bias=(*_PULLED, "gate", "row_gate"),
    dgate=(*_PULLED, "x", "x_bias"),
    drow_gate=(*_PULLED, "x", "x_bias"),
    dz=_PULLED,
)

forward: Operation[Operands, Outcome] = Operation(
    "jln_norm_forward",
    formulas.forward,
    formula_cpu=formulas.forward_cpu,
    launcher=lambda: _launcher().forward,
    layout=_forward_layout,
    made_of=OUTCOME_MADE_OF,
)
backward: Operation[Cotangents, Gradients] = Operation(
    "jln_norm_backward",
    formulas.backward,
    formula_cpu=formulas.backward_cpu,
    launcher=lambda: _launcher().backward,
    layout=_backward_layout,
    made_of=GRADIENTS_MADE_OF,
)


# The rules


def total_dtype(operands: Any) -> str:
    """The dtype of the array that is normalised: of x, or of its sum with the residual."""
    x, residual = operands.x, operands.residual
    return (x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)).name


def _outcome(settings: Settings, operands: Operands, keep: bool) -> Outcome:
    total = total_dtype(operands)
    statistic = jnp.promote_types(total, jnp.float32).name if keep else None
    dtypes = Outcome(
        y=settings.y_dtype,
        total=None if operands.residual is None else total,
        mean=statistic if settings.norm.switches.subtract_mean else None,
        rstd=statistic,
    )
    return forward(operands, settings.norm, dtypes, implementation=settings.implementation)


def _value(settings: Settings, operands: Operands) -> Results:
    y, total, _, _ = _outcome(settings, operands, keep=False)
    return Results(y, total)


def kept(operands: Operands, outcome: Any, needed: Container[str], subtract_mean: bool) -> Saved:
    """The arrays that the derivatives may read, with `Unneeded` in place of those that no wanted one does.

    needed: the names of the arrays that the wanted derivatives read.
    """
    branch = {name: getattr(operands, name) for name in Branch._fields}
    if not operands.gated:
        branch |= {"x": None, "x_bias": None}
    branch = {n: a if a is None or n in needed else Unneeded(a) for n, a in branch.items()}
    total = operands.x if outcome.total is None else outcome.total
    z = operands.z
    if "rstd" in needed:
        mean, rstd = named_statistics(outcome.mean, outcome.rstd)
    else:
        total, rstd = Unneeded(total), Unneeded(outcome.y)
        mean = rstd if subtract_mean else None
        z = None if z is None else Unneeded(z)
    return Saved(total, operands.scale, mean, rstd, Branch(**branch), z)


def _saving(settings: Settings, operands: Operands, wanted: Operands) -> tuple[Results, Saved]:
    """Keep the arrays that the wanted gradients are made of: that of the offset is made of dy alone."""
    needed = backward.needs(gradients_for(wanted, total_dtype(operands), operands.gated))
    outcome = _outcome(settings, operands, keep="rstd" in needed)
    return Results(outcome.y, outcome.total), kept(operands, outcome, needed, settings.norm.switches.subtract_mean)


def gradients_for(wanted: Operands, total_dtype: str, gated: bool) -> Gradients:
    """The dtypes of the gradients to be computed for those of the wanted operands.

    Without a gate dx is the gradient of the total, and goes to both x and residual.
    """
    dx, dresidual = wanted.x, wanted.residual
    if not gated:
        dx, dresidual = None if dx is None and dresidual is None else total_dtype, None
    return Gradients(
        dx=dx,
        dscale=wanted.scale,
        doffset=wanted.offset,
        y=None,
        dresidual=dresidual,
        dx_bias=wanted.x_bias,
        dgate=wanted.gate,
        drow_gate=wanted.row_gate,
        dz=wanted.z,
    )


def of_operands(found: Any, gated: bool, wanted: Any, dadded: Any = None) -> Operands:
    """The gradients that `gradients_for` asked for, operand by operand. dadded: the gradient of what y was added to."""
    dresidual = found.dresidual if gated else found.dx
    dx, dresidual = (
        None if d is None or a is None else a.astype(d) for d, a in ((wanted.x, found.dx), (wanted.residual, dresidual))
    )
    return Operands(
        x=dx,
        residual=dresidual,
        scale=found.dscale,
        offset=found.doffset,
        x_bias=found.dx_bias,
        gate=found.dgate,
        row_gate=found.drow_gate,
        z=found.dz,
        added=dadded,
    )


def _gradients(settings: Settings, saved: Saved, cotangents: Results, wanted: Operands) -> Operands:
    found = _pulled_back(cotangents, saved, settings.norm, wanted, 0, settings.implementation)
    return of_operands(found, saved.branch.gated, wanted, _of_added(cotangents.y, wanted))


def _of_added(dy: Any, wanted: Operands) -> Any:
    """The gradient of the array to which the norm's result was added: y's cotangent, with no kernel."""
    return None if dy is None or wanted.added is None else dy.astype(wanted.added)


def _pulled_back(
    cotangents: Results, saved: Saved, norm: Norm, wanted: Operands, batch_dims: int, implementation: str | None
) -> Gradients:
    dy, dtotal = cotangents
    total, scale, mean, rstd, branch, z = saved
    dtypes = gradients_for(wanted, total.dtype.name, branch.gated)
    if dy is None:
        return of_total_alone(dtotal, branch, norm, wanted, batch_dims)
    if not jax.tree.leaves(dtypes):
        return Gradients()
    operands = Cotangents(dy, dtotal, total, scale, None, mean, rstd, **branch._asdict(), z=z)
    return backward(operands, norm, dtypes, implementation=implementation, batch_dims=batch_dims)


def of_total_alone(dtotal: Any, branch: Branch, norm: Norm, wanted: Operands, batch_dims: int) -> Gradients:
    """The gradients where y was not used, from the total's cotangent."""
    if dtotal is None:
        return Gradients()
    dtypes = gradients_for(wanted, dtotal.dtype.name, branch.gated)._replace(dscale=None, doffset=None)
    return formulas.of_total_alone(dtotal, branch, norm, dtypes, batch_dims)


def _transposed(cotangents: Results, tangents: Operands, saved: Saved, norm: Norm, batch_dims: int, implementation):
    """The transpose of the tangents, by the backward kernel: reverse mode of a function made for forward mode."""
    row_gates = (saved.branch.row_gate, tangents.row_gate)
    rows = (*cotangents, saved.total, saved.mean, saved.rstd, saved.branch.x, *row_gates, saved.z, tangents.z)
    parameters = (saved.scale, saved.branch.x_bias, saved.branch.gate)
    more = (tangents.x_bias, tangents.gate, tangents.scale, tangents.offset)
    if not norm.examples and only_rows_differ(batch_dims, rows, (*parameters, *more)):
        batch_dims = 0
    wanted = Operands(*(None if a is None else a.dtype.name for a in tangents))
    found = _pulled_back(cotangents, saved, norm, wanted, batch_dims, implementation)
    return of_operands(found, saved.branch.gated, wanted, _of_added(cotangents.y, wanted))


_tangent: LinearOperation[tuple[Operands, Saved], Results] = LinearOperation(
    "jln_norm_tangent", formulas.tangent, transpose=_transposed
)


def _tangents(settings: Settings, saved: Saved, tangents: Operands, results: Results) -> Results:
    y, total = results
    if saved.rstd is None:  # (19) of the offset and of what y is added to, which read nothing
        terms = [a for a in (tangents.offset, tangents.added) if a is not None]
        wide = functools.reduce(jnp.promote_types, (a.dtype for a in terms), formulas.compute_dtype(y.dtype))
        dy = functools.reduce(jnp.add, (a.astype(wide) for a in terms))
        dy = batched_like(jnp.broadcast_to(dy, y.shape), y).astype(y.dtype)
        return Results(dy, None if total is None else jnp.zeros_like(total))
    dtypes = Results(y.dtype.name, None if total is None else total.dtype.name)
    return _tangent((tangents, saved), settings.norm, dtypes, implementation=settings.implementation)


operator = Rules(_value, _saving, _gradients, _tangents).operator()
