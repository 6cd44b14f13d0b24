"""LayerNorm+Linear's operations and their derivatives.

More features than one kernel multiplies are XLA's in any case: the operator is then the norm's operation and products
in plain sight, which checkpoint policies save, Shardy splits, and XLA fuses with what is around them, as any others.
Few features are one operation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jln._core.derivatives import PRODUCT, Rules
from jln._core.layout import Dim, Dims, Kind, Layout, Result, Term
from jln._core.operation import LinearOperation, Operation, only_rows_differ
from jln._junction import rules as norm
from jln._junction.linears import formulas
from jln._junction.linears.signature import (
    ColumnSums,
    Cotangents,
    Gradients,
    NormLinear,
    Operands,
    Outcome,
    Results,
    Rows,
    Saved,
    Settings,
)


class _Dims:
    """The dimensions of the arrays that belong to products."""

    def __init__(self, ndim: int, features: tuple[int, ...], batch_dims: int):
        """Take x's rank, the number of axes of features of each product, and the number of vmap's axes."""
        batch = tuple(Dim(Kind.BATCH, i) for i in range(batch_dims))
        rows: Dims = (*batch, *(Dim(Kind.ROW, i) for i in range(batch_dims, ndim - 1)))
        of_product = [tuple(Dim(Kind.FEATURE, i, of=of) for i in range(n)) for of, n in enumerate(features)]
        self.kernel = tuple((*batch, Dim(Kind.HIDDEN, stored_as="kernel"), *n) for n in of_product)
        self.bias = tuple((*batch, *n) for n in of_product)
        self.y = tuple((*rows, *n) for n in of_product)


def _forward_layout(operands: Operands, settings: NormLinear, dtypes: Outcome, batch_dims: int) -> Layout:
    ndim = operands.of_norm.x.ndim
    of, of_norm = _Dims(ndim, settings.features, batch_dims), norm.dims_of_operands(ndim, settings.norm, batch_dims)
    given = Operands(of_norm, of.kernel, of.bias)
    row = Result(of_norm.x)
    return Layout.of(operands, given, dtypes, Outcome(tuple(map(Result, of.y)), total=row, mean=row, rstd=row))


def _backward_layout(operands: Cotangents, settings: NormLinear, dtypes: Gradients, batch_dims: int) -> Layout:
    """The layout of the backward operation, which is linear in dy.

    So a device that has a part of the features has a share of each result that is not split by features.
    """
    ndim = next(
        d.ndim - features + 1 for d, features in zip(operands.dy, settings.features, strict=True) if d is not None
    )
    of, how = _Dims(ndim, settings.features, batch_dims), (ndim, settings.norm, batch_dims)
    of_norm = norm.dims_of_cotangents(*how)
    given = Cotangents(of.y, of_norm._replace(dtotal=Term(of_norm.dtotal)), of.kernel)
    shares = (dataclasses.replace(r, summed=(Kind.FEATURE, *r.summed)) for r in norm.spread_gradients(*how))
    gradients = Gradients(
        of_norm=norm.Gradients(*shares),
        dkernel=tuple(Result(k, summed=(Kind.ROW,), wide=True) for k in of.kernel),
        dbias=tuple(Result(b, summed=(Kind.ROW,), wide=True) for b in of.bias),
    )
    return Layout.of(operands, given, dtypes, gradients)


def _launcher():
    from jln._junction.linears import launches as launcher

    return launcher


_forward: Operation[Operands, Outcome] = Operation(
    "jln_norm_linear_forward",
    formulas.forward,
    formula_cpu=formulas.forward_cpu,
    launcher=lambda: _launcher().forward,
    layout=_forward_layout,
    made_of=norm.OUTCOME_MADE_OF._replace(y=(*norm.OUTCOME_MADE_OF.y, "kernel", "bias")),
)
_backward: Operation[Cotangents, Gradients] = Operation(
    "jln_norm_linear_backward",
    formulas.backward,
    formula_cpu=formulas.backward_cpu,
    launcher=lambda: _launcher().backward,
    layout=_backward_layout,
    made_of=Gradients(
        of_norm=norm.Gradients(*((*of, "kernel") for of in norm.GRADIENTS_MADE_OF)),
        dkernel=("dy", *norm.GRADIENTS_MADE_OF.y),
        dbias=("dy",),
    ),
)


def _sums_layout(operands: Rows, features: int, dtypes: ColumnSums, batch_dims: int) -> Layout:
    of = _Dims(operands.rows.ndim - features + 1, (features,), batch_dims)
    result = Result(of.bias[0], summed=(Kind.ROW,), wide=True)
    return Layout.of(operands, Rows(of.y[0]), dtypes, ColumnSums(result))


_column_sums: Operation[Rows, ColumnSums] = Operation(
    "jln_column_sums", formulas.column_sums, launcher=lambda: _launcher().column_sums, layout=_sums_layout
)


def _norms(implementation: str | None) -> formulas.Norms:
    """The norm's operations, by themselves."""
    return formulas.Norms(
        functools.partial(norm.forward, implementation=implementation),
        functools.partial(norm.backward, implementation=implementation),
        functools.partial(_column_sums, implementation=implementation),
    )


# The rules


def _outcome(settings: Settings, operands: Operands, keep: bool) -> Outcome:
    norm_linear, total = settings.norm_linear, norm.total_dtype(operands.of_norm)
    statistic = jnp.promote_types(total, jnp.float32).name if keep else None
    dtypes = Outcome(
        y=tuple(jnp.promote_types(operands.of_norm.x.dtype, kernel.dtype).name for kernel in operands.kernel),
        total=None if operands.of_norm.residual is None else total,
        mean=statistic if norm_linear.norm.switches.subtract_mean else None,
        rstd=statistic,
    )
    if not norm_linear.in_one:
        return formulas.forward(operands, norm_linear, dtypes, 0, norms=_norms(settings.implementation))
    made = _forward(operands, norm_linear, dtypes, implementation=settings.implementation)
    return made._replace(y=tuple(checkpoint_name(y, PRODUCT) for y in made.y))


def _value(settings: Settings, operands: Operands) -> Results:
    y, total, _, _ = _outcome(settings, operands, keep=False)
    return Results(y, total)


def _saving(settings: Settings, operands: Operands, wanted: Operands) -> tuple[Results, Saved]:
    """Keep the arrays that the wanted gradients are made of.

    That of a bias is made of dy alone, that of the offset of dy and the kernels.
    """
    of_norm = operands.of_norm
    needed = _backward.needs(_dtypes(wanted, norm.total_dtype(of_norm), of_norm.gated))
    outcome = _outcome(settings, operands, keep="rstd" in needed)
    first, centres = outcome._replace(y=outcome.y[0]), settings.norm_linear.norm.switches.subtract_mean
    saved = Saved(norm.kept(of_norm, first, needed, centres), of_norm.offset, operands.kernel)
    return Results(outcome.y, outcome.total), saved


def _dtypes(wanted: Operands, total_dtype: str, gated: bool) -> Gradients:
    """The dtypes of the gradients to be computed for those of the wanted operands."""
    return Gradients(norm.gradients_for(wanted.of_norm, total_dtype, gated), wanted.kernel, wanted.bias)


def _of_operands(found: Gradients, gated: bool, wanted: Operands) -> Operands:
    return Operands(norm.of_operands(found.of_norm, gated, wanted.of_norm), found.dkernel, found.dbias)


def _gradients(settings: Settings, saved: Saved, cotangents: Results, wanted: Operands) -> Operands:
    found = _pulled_back(cotangents, saved, settings.norm_linear, wanted, 0, settings.implementation)
    return _of_operands(found, saved.of_norm.branch.gated, wanted)


def _pulled_back(
    cotangents: Results,
    saved: Saved,
    norm_linear: NormLinear,
    wanted: Operands,
    batch_dims: int,
    implementation: str | None,
) -> Gradients:
    dy, dtotal = cotangents
    total, scale, mean, rstd, branch, _ = saved.of_norm
    nothing = (None,) * len(dy)
    dtypes = _dtypes(wanted, total.dtype.name, branch.gated)
    if all(d is None for d in dy):
        of_norm = norm.of_total_alone(dtotal, branch, norm_linear.norm, wanted.of_norm, batch_dims)
        return Gradients(of_norm, dkernel=nothing, dbias=nothing)

    def of_used(parameters: tuple[Any, ...]) -> tuple[Any, ...]:
        """The parameters, with None for those of a product that was not used: they have no part in the gradients."""
        return tuple(None if d is None else p for p, d in zip(parameters, dy, strict=True))

    of_norm = norm.Cotangents(None, dtotal, total, scale, saved.offset, mean, rstd, *branch)
    operands = Cotangents(dy, of_norm, of_used(saved.kernel))
    dtypes = dtypes._replace(dkernel=of_used(dtypes.dkernel), dbias=of_used(dtypes.dbias))
    if not jax.tree.leaves(dtypes):  # wanted are those of unused products alone
        return dtypes
    if norm_linear.in_one:
        return _backward(operands, norm_linear, dtypes, implementation=implementation, batch_dims=batch_dims)
    return formulas.backward(operands, norm_linear, dtypes, batch_dims, norms=_norms(implementation))


def _transposed(
    cotangents: Results, tangents: Operands, saved: Saved, norm_linear: NormLinear, batch_dims: int, implementation
) -> Operands:
    """The transpose of the tangents, by the backward kernels: reverse mode of a function made for forward mode."""
    of_norm, branch = saved.of_norm, saved.of_norm.branch
    rows = (*cotangents.y, cotangents.total, of_norm.total, of_norm.mean, of_norm.rstd, branch.x, branch.row_gate)
    parameters = jax.tree.leaves(
        (
            saved._replace(of_norm=of_norm.scale),
            (branch.x_bias, branch.gate),
            tangents._replace(of_norm=tangents.of_norm._replace(x=None, residual=None, row_gate=None)),
        )
    )
    shared = not norm_linear.norm.examples and only_rows_differ(
        batch_dims, (*rows, tangents.of_norm.row_gate), parameters
    )
    if shared:  # a norm's parameters have x's rank, and examples are rows like any other

        def without_batch(kernel: jax.Array) -> jax.Array:
            return kernel.reshape(kernel.shape[batch_dims:])

        saved = saved._replace(kernel=jax.tree.map(without_batch, saved.kernel))
    wanted = jax.tree.map(lambda a: a.dtype.name, tangents)
    left = 0 if shared else batch_dims
    found = _pulled_back(cotangents, saved, norm_linear, wanted, left, implementation)
    if shared:
        more = jax.tree.map(lambda a: jnp.expand_dims(a, range(batch_dims)), (found.dkernel, found.dbias))
        found = found._replace(dkernel=more[0], dbias=more[1])
    return _of_operands(found, branch.gated, wanted)


_tangent: LinearOperation[tuple[Operands, Saved], Results] = LinearOperation(
    "jln_norm_linear_tangent", formulas.tangent, transpose=_transposed
)


def _tangents(settings: Settings, saved: Saved, tangents: Operands, results: Results) -> Results:
    norm_linear = settings.norm_linear
    if saved.of_norm.rstd is None:  # of the offset and biases alone
        dy = formulas.tangents_of_constants(tangents, saved, norm_linear, results)
        return Results(dy, None if results.total is None else jnp.zeros_like(results.total))
    dtypes = jax.tree.map(lambda a: a.dtype.name, results)
    return _tangent((tangents, saved), norm_linear, dtypes, implementation=settings.implementation)


operator = Rules(_value, _saving, _gradients, _tangents).operator()
