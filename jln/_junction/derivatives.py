"""The junction's derivatives: what a wanted gradient is made of is kept, and nothing else.

Linears of more features than one kernel multiplies are XLA's in any case: the operator is then the norm's operation and
products in plain sight, which checkpoint policies save, Shardy splits, and XLA fuses with what is around them, as any
others. Few features are one operation with the norm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jln._core.derivatives import PRODUCT, STATISTICS, Rules, Unneeded
from jln._core.modes import own_modes
from jln._core.operation import LinearOperation, vary_together
from jln._junction import arrays, gradients
from jln._junction.arrays import DY, KEPT, TABLE, Arrays, Junction, Norm, Shape
from jln._junction.eight_bits import largest
from jln._junction.linears import eight_bits
from jln._junction.linears import formulas as linears
from jln._junction.operations import backward, backward_in_one, forward, forward_in_one, norms_by, rows_of
from jln._junction.tangents import tangent
from jln._junction.vmaps import sum_examples_as_rows
from jln.reference import _junction, _Norm


def _outcome(junction: Junction, operands: Arrays, keeps: set[str]) -> Arrays:
    """The results, and the statistics that are to be kept."""
    norm, total = junction.norm, None if operands.residual is None else arrays.total_dtype(operands)
    dtypes = arrays.statistics_dtypes(operands, norm, keeps)._replace(y=junction.y_dtype, total=total)
    if operands.kernel is None:
        if junction.eight_bits:
            return _norm_in_eight_bits(junction, operands, dtypes)
        return forward(operands, norm, dtypes, implementation=junction.implementation)
    if junction.eight_bits:
        z = _norm_in_eight_bits(junction, operands._replace(kernel=None, bias=None), dtypes)
        y = eight_bits.forward(z, operands, junction, linears.product_dtypes(operands, junction))
        if junction.by_cudnn:  # no policy knows such a product
            y = tuple(checkpoint_name(a, PRODUCT) for a in y)
        scale = None if z.y_scale is None else z.y_scale.reshape((1,) * operands.x.ndim)
        return z._replace(y=y, block_scale=None, y_scale=scale)
    dtypes = dtypes._replace(y=linears.product_dtypes(operands, junction))
    if not junction.in_one:
        return linears.forward(operands, junction, dtypes, 0, norms=norms_by(junction.implementation))
    results = forward_in_one(operands, junction, dtypes, implementation=junction.implementation)
    return results._replace(y=tuple(checkpoint_name(y, PRODUCT) for y in results.y))


def _norm_in_eight_bits(junction: Junction, operands: Arrays, dtypes: Arrays) -> Arrays:
    """The norm's results with y in eight bits, and its block_scale, or the scale and y_max of all rows."""
    norm, by = junction.norm, functools.partial(forward, implementation=junction.implementation)
    dtypes = dtypes._replace(y=junction.y_dtype)
    if junction.eight_bits == "blocks":
        return by(operands, dataclasses.replace(norm, blocks=junction.y_dtype), dtypes._replace(block_scale="uint8"))
    dtypes = dtypes._replace(y_max="float32")
    if operands.y_scale is not None:
        outcome = by(operands, norm, dtypes)
        return outcome._replace(y_max=largest(outcome.y_max), y_scale=jnp.max(operands.y_scale))  # all are one
    outcome = by(operands, norm, dtypes._replace(y=None))
    amax = largest(outcome.y_max)
    scale = amax / float(jnp.finfo(junction.y_dtype).max)
    scale = jnp.where((scale >= float(jnp.finfo(scale.dtype).tiny)) & jnp.isfinite(scale), scale, 1)
    again = operands._replace(y_scale=jnp.broadcast_to(scale, norm.sizes(Shape.ONE, operands.x.shape, 0)))
    if outcome.total is not None:
        again = again.only(("scale", "offset", "y_scale"))._replace(x=outcome.total)
        norm = dataclasses.replace(norm, both_sides=False)
    return outcome._replace(y=by(again, norm, Arrays(y=junction.y_dtype)).y, y_max=amax, y_scale=scale)


def _results(junction: Junction, operands: Arrays, outcome: Arrays) -> Arrays:
    total = operands.x if operands.residual is None and junction.gives_total else outcome.total
    if junction.quantises:
        dtypes = [a.dtype for a in (operands.x, operands.added) if a is not None]
        carrier = jnp.zeros(outcome.y.shape, functools.reduce(jnp.promote_types, dtypes))
        results = outcome.only(("y", "y_scale", "y_max", "block_scale"))
        return results._replace(total=total, carrier=vary_together((carrier, outcome.y))[0])
    amax = outcome.y_max if operands.y_scale is not None else None
    return Arrays(y=_copied(outcome.y, junction), total=total, y_max=amax)


def _copied(y: Any, junction: Junction) -> Any:
    return y if junction.copies == 1 else (y,) * junction.copies


def _differ(norm: Norm, operands: Arrays) -> bool:
    """True where the gradients of x and of the residual differ by more than their dtypes."""
    return operands.gate is not None or norm.both_sides


def _reads(junction: Junction, operands: Arrays, wanted: Arrays) -> set[str]:
    """The names of the arrays that the wanted operands' gradients are made of, and the kernels, for their sizes.

    wanted: by their dtypes' names.
    """
    dtypes = arrays.gradient_dtypes(wanted, arrays.total_dtype(operands), _differ(junction.norm, operands))
    return arrays.reads_of_gradients(junction.norm, dtypes, operands.kernel is not None) | {"kernel"}


def _fwd(junction: Junction, operands: Arrays, wanted: Arrays) -> tuple[Arrays, Arrays]:
    """Keep the arrays that the wanted gradients are made of.

    In place of the others that some gradient is made of stands an `Unneeded`. total is x where nothing is added. Of a
    norm with `remat` they are made of the operands alone.
    """
    reads = _reads(junction, operands, wanted)
    of_all = _reads(junction, operands, jax.tree.map(lambda a: a.dtype.name, operands))
    outcome = _outcome(junction, operands, reads)
    if junction.quantises:
        outcome = outcome._replace(y=_differentiate_once(outcome.y))
    total = operands.x if outcome.total is None else outcome.total
    there = operands._replace(total=total, y_scale=outcome.y_scale)
    there = there._replace(**{n: checkpoint_name(a, STATISTICS) for n, a in outcome.only(KEPT).present().items()})
    if not junction.norm.switches.subtract_mean:
        of_all -= {"mean"}
    # A statistic that nobody reads was not computed: what stands for it is batched as a result is.
    like = jax.tree.leaves(outcome.y)[0]
    unneeded = jax.tree.map(Unneeded, there._replace(**dict.fromkeys(of_all.intersection(KEPT), like)))
    saved = {name: getattr(there if name in reads else unneeded, name) for name in sorted(of_all)}
    return _results(junction, operands, outcome), Arrays(**saved)


@jax.custom_jvp
def _differentiate_once(y: jax.Array) -> jax.Array:
    return y


@_differentiate_once.defjvp
def _refuse(*_: Any) -> Any:
    raise TypeError("gradients that go straight through eight bits have no derivatives")


def _bwd(junction: Junction, saved: Arrays, cotangents: Arrays, wanted: Arrays) -> Arrays:
    if junction.quantises:
        if cotangents.y is not None:
            raise TypeError(
                "the values of a result in eight bits have no derivative: differentiate its dequantized(), or a "
                "custom_vjp function whose cotangent of values is None, and of the carrier that of the numbers"
            )
        cotangents = Arrays(y=cotangents.carrier, total=cotangents.total)
    return _pull_back(cotangents, saved, junction, wanted, 0)


def _pull_back(cotangents: Arrays, saved: Arrays, junction: Junction, wanted: Arrays, batch_dims: int) -> Arrays:
    """The gradients of the wanted operands, each in its dtype."""
    dy, dtotal, differ = cotangents.y, cotangents.total, _differ(junction.norm, saved)
    if junction.norm.remat:
        total = arrays.total_dtype(saved)
    else:
        total = (dtotal if saved.total is None else saved.total).dtype.name
    dtypes = arrays.gradient_dtypes(wanted, total, differ)
    if jax.tree.leaves(dy):
        given: dict[str, Any] = {"dy": dy}
        if junction.copies > 1:
            given = dict(zip(DY, (d for d in dy if d is not None), strict=False))
        pulled = _pull_by_operation(saved._replace(**given, dtotal=dtotal), junction, dtypes, batch_dims)
    elif dtotal is None:
        pulled = Arrays()
    else:
        pulled = _pull_back_total(dtotal, saved, junction, dtypes, batch_dims)
    residual = pulled.residual if differ else pulled.x

    def like(a: Any, dtype: Any) -> Any:
        return None if a is None or dtype is None else a.astype(dtype)

    # That of what y was added to is y's cotangent, with no kernel.
    added = None if wanted.added is None else like(dy, wanted.added)
    return pulled._replace(x=like(pulled.x, wanted.x), residual=like(residual, wanted.residual), added=added)


def _pull_by_operation(operands: Arrays, junction: Junction, dtypes: Arrays, batch_dims: int) -> Arrays:
    how: Any = {"implementation": junction.implementation, "batch_dims": batch_dims}
    if not jax.tree.leaves(dtypes):  # y was only added to
        return Arrays()
    if not junction.features:
        return backward(operands, junction.norm, dtypes, **how)
    if junction.in_one:
        return backward_in_one(operands, junction, dtypes, **how)
    return linears.backward(operands, junction, dtypes, batch_dims, norms=norms_by(junction.implementation))


def _pull_back_total(dtotal: Any, saved: Arrays, junction: Junction, dtypes: Arrays, batch_dims: int) -> Arrays:
    """The gradients where y was not used, from the total's cotangent."""
    if not junction.norm.both_sides:
        pulled = gradients.gradients_from_total(saved, dtotal, junction.norm, dtypes, batch_dims)
    else:
        by = norms_by(junction.implementation)
        norm = junction.norm
        if norm.remat:
            saved, norm = gradients.make_again(saved, norm, dtypes, batch_dims, by.forward)
        pulled = gradients.gradients_from_branch(dtotal, saved, norm, dtypes, batch_dims, by.backward)
        pulled = pulled._replace(residual=None if dtypes.residual is None else dtotal.astype(dtypes.residual))
    nothing = None if not junction.features else (None,) * len(junction.features)
    return pulled._replace(kernel=nothing, bias=nothing)


def _transpose_tangent(
    cotangents: Arrays, tangents: Arrays, saved: Arrays, settings: Any, batch_dims: int, implementation: Any
) -> Arrays:
    """The transpose of the tangents, by the backward kernels: reverse mode of a function made for forward mode."""
    junction = dataclasses.replace(settings[0], implementation=implementation)
    parameters = [name for name, array in TABLE.items() if array.shape in (Shape.COLUMN, Shape.KERNEL, Shape.BIAS)]
    rows = saved._replace(**dict.fromkeys(parameters)), tangents.only(("z", "x_z"))
    batches = {a.shape[:batch_dims] for a in jax.tree.leaves((cotangents, rows))}
    given = jax.tree.leaves((saved.only(parameters), tangents.only(parameters)))
    are_shared = all(math.prod(a.shape[:batch_dims]) == 1 for a in given)
    wanted = jax.tree.map(lambda a: a.dtype.name, tangents)
    if junction.norm.examples or len(batches) > 1 or not are_shared:
        return _pull_back(cotangents, saved, junction, wanted, batch_dims)
    # Examples are rows like any other. A norm's parameters have x's rank; those of Linears have not.
    kernel = jax.tree.map(lambda a: a.reshape(a.shape[batch_dims:]), saved.kernel)
    pulled = _pull_back(cotangents, saved._replace(kernel=kernel), junction, wanted, 0)
    kernel, bias = jax.tree.map(lambda a: jnp.expand_dims(a, range(batch_dims)), (pulled.kernel, pulled.bias))
    return pulled._replace(kernel=kernel, bias=bias)


_tangent: LinearOperation[tuple[Arrays, Arrays], Arrays] = LinearOperation(
    "jln_norm_tangent", tangent, transpose=_transpose_tangent, rows=lambda operands: rows_of(operands[1])
)


def _jvp(junction: Junction, operands: Arrays, saved: Arrays, tangents: Arrays, results: Arrays) -> Arrays:
    if saved.total is None:  # no tangent is made of it, but of its shape
        saved = saved._replace(total=Unneeded(operands.x).nothing())
    dtypes = jax.tree.map(lambda a: a.dtype.name, results)
    settings = junction, operands.x.shape
    return _tangent((tangents, saved), settings, dtypes, implementation=junction.implementation)


def in_plain_jnp(junction: Junction, operands: Arrays, axes: tuple[int, ...] | None = None) -> Arrays:
    """The results by plain jnp, which JAX differentiates, where no operation takes the operands.

    operands: a user's, with the normalised axes, or laid out for the norm's.
    """
    norm, switches = junction.norm, junction.norm.switches
    axis = norm.axis if axes is None else axes
    of_norm = _Norm(switches.subtract_mean, axis, norm.epsilon, switches.zero_centered_scale)

    def compute(a: Arrays) -> Arrays:
        z = a.x_z if a.z is None else a.z
        made = _junction(
            a.x, of_norm, a.scale, a.offset, adds=junction.gives_total, residual=a.residual, x_bias=a.x_bias,
            both_sides=norm.both_sides, x_scale=a.x_scale, gate=a.gate, z=z,
            norm_before_gate=a.x_z is None, added=a.added, dtype=junction.y_dtype,
            linears=None if a.kernel is None else (a.kernel, a.bias, junction.precision, junction.y_dtype),
        )  # fmt: skip
        y, total = made if junction.gives_total or a.residual is not None else (made, None)
        return Arrays(y=_copied(y, junction), total=total)

    with own_modes():
        return (jax.checkpoint(compute) if norm.remat else compute)(operands)


def _plain(junction: Junction, axes: Arrays) -> Callable[..., Arrays] | None:
    """The function that JAX differentiates itself, as `jln._core.reverse_mode.Plain` says.

    None where examples have parameters alone, and share all rows: with 4 scales and offsets 8192 x 4096 in bfloat16
    move 1284 MB so, and 1426 by plain jnp, of which XLA's CPU backend makes garbage in jaxlib 0.10.2.
    """
    shares_rows = not rows_of(axes).present() and not jax.tree.leaves((axes.kernel, axes.bias))
    return in_plain_jnp if junction.may_be_plain and not shares_rows else None


operator = Rules(_fwd, _bwd, _jvp).operator(sum_examples_as_rows, _plain)
