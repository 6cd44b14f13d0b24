"""A Linear that reads the result of a norm, which others may read, too.

For its kernel's gradient it keeps what the norm was made of in place of the norm's result, and makes the result again.

The terms are those of `jln._norm_linear.formulas`: (11) forward, (12) to (14) backward with (10) again, (20) without
the norm's part in forward mode. dz goes to the norm, which is another operator, by JAX's own differentiation; so the
cotangents of several Linears are added up in front of one norm. What several Linears make again is one kernel's work
where XLA sees that it is the same, as it does in a compiled program.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jln._core.derivatives import Rules, Unneeded
from jln._core.operation import LinearOperation, only_rows_differ
from jln._norm import formulas as jnp_norms
from jln._norm import rules as norm_rules
from jln._norm import signature as norm
from jln._norm_linear import formulas, rules
from jln._norm_linear.signature import Cotangents, Gradients, NormLinear, Outcome
from jln._norm_linear.signature import Operands as OfOneOperator


class Operands(NamedTuple):
    """The operands of a Linear that reads a norm's result.

    z: [*lead, H], the norm's result.
    kernel: [H, *features].
    bias: [*features] or None.
    made_of: x, scale and offset, which make z again, as the norm's operations take them.
    """

    z: Any
    kernel: Any
    bias: Any
    made_of: norm.Operands


class Results(NamedTuple):
    """The Linear's result y [*lead, *features]."""

    y: Any


class Saved(NamedTuple):
    """The arrays kept between forward and backward."""

    kernel: Any
    made_of: Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """The operator's static arguments. z_dtype, dtype: names of the dtypes of the norm's result and of the product."""

    norm_linear: NormLinear
    z_dtype: str
    dtype: str
    implementation: str | None


def _value(settings: Settings, operands: Operands) -> Results:
    z, kernel, bias, made_of = operands
    there = formulas.IN_JNP._replace(forward=lambda *_: Outcome(z, None, None, None))
    as_one = OfOneOperator(norm.Operands(made_of.x), (kernel,), (bias,))
    made = formulas.forward(as_one, settings.norm_linear, Outcome((settings.dtype,), None, None, None), 0, norms=there)
    return Results(made.y[0])


def _saving(settings: Settings, operands: Operands, wanted: Operands) -> tuple[Results, Saved]:
    def needed(a: Any, by: Any) -> Any:
        return a if by is not None else jax.tree.map(Unneeded, a)

    saved = Saved(needed(operands.kernel, wanted.z), needed(operands.made_of, wanted.kernel))
    return _value(settings, operands), saved


def _gradients(settings: Settings, saved: Saved, cotangents: Results, wanted: Operands) -> Operands:
    return _pulled_back(cotangents.y, saved, settings, wanted, 0, settings.implementation)


def _pulled_back(
    dy: Any, saved: Saved, settings: Settings, wanted: Operands, batch_dims: int, implementation: str | None
) -> Operands:
    nothing = norm.Operands(None)
    if dy is None:
        return Operands(None, None, None, nothing)
    made_of: Any = saved.made_of

    def of_norm(read: norm.Cotangents, of: norm.Norm, dtypes: norm.Gradients, batch_dims: int) -> norm.Gradients:
        """A stand-in for the norm's gradients: it returns their dy, and z made again."""
        z = None
        if dtypes.y is not None:
            of_z = Outcome(settings.z_dtype, None, None, None)
            z = norm_rules.forward(made_of, of, of_z, batch_dims, implementation=implementation).y
        return norm.Gradients(dx=None if dtypes.dx is None else read.dy.astype(dtypes.dx), y=z)

    read = norm.Cotangents(None, None, made_of.x, None, None, None, None)
    dtypes = Gradients(norm.Gradients(dx=wanted.z), (wanted.kernel,), (wanted.bias,))
    operands, norms = Cotangents((dy,), read, (saved.kernel,)), rules.norms(implementation)._replace(backward=of_norm)
    found = formulas.backward(operands, settings.norm_linear, dtypes, batch_dims, norms=norms)
    return Operands(found.of_norm.dx, found.dkernel[0], found.dbias[0], nothing)


def _tangent_of_product(
    operands: tuple[Operands, Saved], settings: Settings, dtypes: Results, batch_dims: int
) -> Results:
    """Term (20) of z and of the kernel, at least one of which has a tangent."""
    tangents, (kernel, made_of) = operands
    rows = tangents.z if tangents.z is not None else made_of.x
    axes = formulas.Axes(rows.ndim, batch_dims, *settings.norm_linear.features)
    batch = jnp_norms.common_batch(batch_dims, *jax.tree.leaves(operands))
    dtype, precision = settings.dtype, settings.norm_linear.precision
    dy = jnp.zeros((), jnp_norms.compute_dtype(dtype))
    if tangents.z is not None:
        dy = dy + formulas.product_of_rows(tangents.z, kernel, axes, dtype, precision)
    if tangents.kernel is not None:
        of_z = Outcome(settings.z_dtype, None, None, None)
        z = jnp_norms.forward(made_of, settings.norm_linear.norm, of_z, batch_dims).y
        dy = dy + formulas.product_of_rows(z, tangents.kernel, axes, dtype, precision)
    return Results(jnp_norms.with_batch(dy.astype(dtypes.y), batch))


def _transposed(
    cotangents: Results, tangents: Operands, saved: Saved, settings: Settings, batch_dims: int, implementation
) -> Operands:
    """The transpose of the tangents: reverse mode of a function made for forward mode."""
    rows = (cotangents.y, tangents.z, None if saved.made_of is None else saved.made_of.x)
    parameters = jax.tree.leaves((saved.kernel, tangents.kernel, saved.made_of and saved.made_of._replace(x=None)))
    shared = only_rows_differ(batch_dims, rows, parameters)
    if shared and saved.kernel is not None:  # the norm's parameters have x's rank, and examples are rows like any other
        saved = saved._replace(kernel=saved.kernel.reshape(saved.kernel.shape[batch_dims:]))
    z, kernel, bias = (None if a is None else a.dtype.name for a in tangents[:3])
    wanted = Operands(z, kernel, bias, norm.Operands(None))
    found = _pulled_back(cotangents.y, saved, settings, wanted, 0 if shared else batch_dims, implementation)
    if shared and found.kernel is not None:
        found = found._replace(kernel=jnp.expand_dims(found.kernel, range(batch_dims)))
    return found


_tangent: LinearOperation[tuple[Operands, Saved], Results] = LinearOperation(
    "jln_reading_linear_tangent", _tangent_of_product, transpose=_transposed
)


def _tangents(settings: Settings, saved: Saved, tangents: Operands, results: Results) -> Results:
    y = results.y
    dy = jnp.zeros_like(y)
    if tangents.z is not None or tangents.kernel is not None:
        of_product = tangents._replace(bias=None, made_of=norm.Operands(None))
        dtypes = Results(y.dtype.name)
        dy = _tangent((of_product, saved), settings, dtypes, implementation=settings.implementation).y
    if tangents.bias is not None:
        dy = dy + jnp.broadcast_to(tangents.bias.astype(y.dtype), y.shape)
    return Results(dy)


operator = Rules(_value, _saving, _gradients, _tangents).operator()
