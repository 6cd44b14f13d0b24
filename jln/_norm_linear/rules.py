"""LayerNorm+Linear's operations and their derivatives.

Where XLA multiplies in any case, the operator is the norm's operation and products in plain sight: checkpoint policies
save them, Shardy splits them and XLA fuses what is around them as with any others. Few features are one operation.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jln._core.derivatives import PRODUCT, Rules, Unneeded, named_statistics
from jln._core.mesh import Dim, Dims, Kind, Layout, Result, Term
from jln._core.operation import LinearOperation, Operation, only_rows_differ
from jln._norm import rules as norm
from jln._norm_linear import formulas
from jln._norm_linear.signature import (
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
    """Every array's dimensions."""

    def __init__(self, ndim: int, features: tuple[int, ...], batch_dims: int):
        """ndim: x's."""
        batch = tuple(Dim(Kind.BATCH, i) for i in range(batch_dims))
        rows: Dims = (*batch, *(Dim(Kind.ROW, i) for i in range(batch_dims, ndim - 1)))
        of_product = [tuple(Dim(Kind.FEATURE, i, of=of) for i in range(n)) for of, n in enumerate(features)]
        self.x: Dims = (*rows, Dim(Kind.HIDDEN))
        self.parameter: Dims = (*batch, Dim(Kind.HIDDEN, stored_as="parameter"))
        self.kernel = tuple((*batch, Dim(Kind.HIDDEN, stored_as="kernel"), *n) for n in of_product)
        self.bias = tuple((*batch, *n) for n in of_product)
        self.y = tuple((*rows, *n) for n in of_product)


def _forward_layout(operands: Operands, settings: NormLinear, dtypes: Outcome, batch_dims: int) -> Layout:
    of = _Dims(operands.x.ndim, settings.features, batch_dims)
    given = Operands(of.x, of.x, scale=of.parameter, offset=of.parameter, kernel=of.kernel, bias=of.bias)
    rows = Result(of.x)
    return Layout.of(operands, given, dtypes, Outcome(tuple(map(Result, of.y)), total=rows, mean=rows, rstd=rows))


def _backward_layout(operands: Cotangents, settings: NormLinear, dtypes: Gradients, batch_dims: int) -> Layout:
    """All is linear in dy, so a device that has a part of the features has a share of what is not split by features."""
    ndim = next(
        d.ndim - features + 1 for d, features in zip(operands.dy, settings.features, strict=True) if d is not None
    )
    of = _Dims(ndim, settings.features, batch_dims)
    given = Cotangents(of.y, Term(of.x), of.x, of.parameter, of.parameter, of.kernel, mean=of.x, rstd=of.x)
    over_both = Result(of.parameter, summed=(Kind.FEATURE, Kind.ROW), wide=True)
    gradients = Gradients(
        dx=Result(of.x, summed=(Kind.FEATURE,)),
        dscale=over_both,
        doffset=over_both,
        dkernel=tuple(Result(k, summed=(Kind.ROW,)) for k in of.kernel),
        dbias=tuple(Result(b, summed=(Kind.ROW,), wide=True) for b in of.bias),
    )
    return Layout.of(operands, given, dtypes, gradients)


def _launcher():
    from jln._norm_linear import launcher

    return launcher


_forward: Operation[Operands, Outcome] = Operation(
    "jln_norm_linear_forward",
    formulas.forward,
    formula_cpu=formulas.forward_cpu,
    launcher=lambda: _launcher().forward,
    layout=_forward_layout,
    made_of=Outcome(
        y=("x", "residual", "scale", "offset", "kernel", "bias"),
        total=("x", "residual"),
        mean=("x", "residual"),
        rstd=("x", "residual"),
    ),
)
_backward: Operation[Cotangents, Gradients] = Operation(
    "jln_norm_linear_backward",
    formulas.backward,
    formula_cpu=formulas.backward_cpu,
    launcher=lambda: _launcher().backward,
    layout=_backward_layout,
    made_of=Gradients(
        dx=("dy", "dtotal", "total", "scale", "kernel", "mean", "rstd"),
        dscale=("dy", "total", "kernel", "mean", "rstd"),
        doffset=("dy", "kernel"),
        dkernel=("dy", "total", "scale", "offset", "mean", "rstd"),
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
    """As operations of their own."""
    return formulas.Norms(
        functools.partial(norm.forward, implementation=implementation),
        functools.partial(norm.backward, implementation=implementation),
        functools.partial(_column_sums, implementation=implementation),
    )


# The rules


def _outcome(settings: Settings, operands: Operands, keep: bool) -> Outcome:
    norm_linear, x, residual = settings.norm_linear, operands.x, operands.residual
    total = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
    statistic = jnp.promote_types(total, jnp.float32).name if keep else None
    dtypes = Outcome(
        y=tuple(jnp.promote_types(x.dtype, kernel.dtype).name for kernel in operands.kernel),
        total=None if residual is None else total.name,
        mean=statistic if norm_linear.norm.subtract_mean else None,
        rstd=statistic,
    )
    if not norm_linear.in_one:
        return formulas.forward(operands, norm_linear, dtypes, 0, norms=_norms(settings.implementation))
    made = _forward(operands, norm_linear, dtypes, implementation=settings.implementation)
    return made._replace(y=tuple(checkpoint_name(y, PRODUCT) for y in made.y))


def _value(settings: Settings, operands: Operands) -> Results:
    y, total, _, _ = _outcome(settings, operands, keep=False)
    return Results(y, total)


_ANY_DTYPE = "float32"  # what is read for a gradient does not depend on its dtype


def _saving(settings: Settings, operands: Operands, wanted: Operands) -> tuple[Results, Saved]:
    """Keep what the wanted gradients are made of: that of a bias is made of dy alone, that of the offset of dy and the
    kernels.
    """
    needed = _backward.needs(_dtypes(wanted, _ANY_DTYPE))
    y, total, *statistics = _outcome(settings, operands, keep="rstd" in needed)
    x, _, scale, offset, kernel, _ = operands
    saved = Saved(x if total is None else total, scale, offset, kernel, *named_statistics(*statistics))
    if "rstd" not in needed:
        nothing = Unneeded(y[0])
        mean = nothing if settings.norm_linear.norm.subtract_mean else None
        saved = saved._replace(total=Unneeded(saved.total), mean=mean, rstd=nothing)
    return Results(y, total), saved


def _dtypes(wanted: Operands, total_dtype: str) -> Gradients:
    """Of the gradients that give those of the wanted operands; dx, that of the total, goes to x and to residual."""
    x, residual, scale, offset, kernel, bias = wanted
    return Gradients(None if x is None and residual is None else total_dtype, scale, offset, kernel, bias)


def _gradients(settings: Settings, saved: Saved, cotangents: Results, wanted: Operands) -> Operands:
    dx, *gradients = _pulled_back(cotangents, saved, settings.norm_linear, wanted, 0, settings.implementation)
    dx, dresidual = (None if d is None or dx is None else dx.astype(d) for d in (wanted.x, wanted.residual))
    return Operands(dx, dresidual, *gradients)


def _pulled_back(
    cotangents: Results,
    saved: Saved,
    norm_linear: NormLinear,
    wanted: Operands,
    batch_dims: int,
    implementation: str | None,
) -> Gradients:
    dy, dtotal = cotangents
    nothing = (None,) * len(dy)
    if all(d is None for d in dy):
        return Gradients(dtotal, None, None, nothing, nothing)

    def of_used(parameters: tuple[Any, ...]) -> tuple[Any, ...]:
        """What an unused y was made of has no part in the gradients."""
        return tuple(None if d is None else p for p, d in zip(parameters, dy, strict=True))

    operands = Cotangents(dy, dtotal, *saved._replace(kernel=of_used(saved.kernel)))
    dtypes = _dtypes(wanted, saved.total.dtype.name)
    dtypes = dtypes._replace(dkernel=of_used(dtypes.dkernel), dbias=of_used(dtypes.dbias))
    if norm_linear.in_one:
        return _backward(operands, norm_linear, dtypes, implementation=implementation, batch_dims=batch_dims)
    return formulas.backward(operands, norm_linear, dtypes, batch_dims, norms=_norms(implementation))


def _transposed(
    cotangents: Results, tangents: Operands, saved: Saved, norm_linear: NormLinear, batch_dims: int, implementation
) -> Operands:
    """Reverse mode after all, by the backward kernels."""
    total, scale, offset, kernel, mean, rstd = saved
    parameters = jax.tree.leaves((scale, offset, kernel, tangents._replace(x=None, residual=None)))
    shared = only_rows_differ(batch_dims, (*cotangents.y, cotangents.total, total, mean, rstd), parameters)
    if shared:
        saved = jax.tree.map(lambda a: a.reshape(a.shape[batch_dims:]), Saved(None, scale, offset, kernel, None, None))
        saved = saved._replace(total=total, mean=mean, rstd=rstd)
    wanted = jax.tree.map(lambda a: a.dtype.name, tangents)
    left = 0 if shared else batch_dims
    dx, *gradients = _pulled_back(cotangents, saved, norm_linear, wanted, left, implementation)
    if shared:
        gradients = jax.tree.map(lambda a: jnp.expand_dims(a, range(batch_dims)), gradients)
    return Operands(dx, dx, *gradients)


_tangent: LinearOperation[tuple[Operands, Saved], Results] = LinearOperation(
    "jln_norm_linear_tangent", formulas.tangent, transpose=_transposed
)


def _tangents(settings: Settings, saved: Saved, tangents: Operands, results: Results) -> Results:
    norm_linear = settings.norm_linear
    if saved.rstd is None:  # of the offset and biases alone
        dy = formulas.tangents_of_constants(tangents, saved, norm_linear, results)
        return Results(dy, None if results.total is None else jnp.zeros_like(results.total))
    dtypes = jax.tree.map(lambda a: a.dtype.name, results)
    return _tangent((tangents, saved), norm_linear, dtypes, implementation=settings.implementation)


operator = Rules(_value, _saving, _gradients, _tangents).operator()
