"""RMSNorm on both sides of a sum in plain jnp, forward and backward derived by hand.

The terms go on from those of `jln._junction.formulas`, as do the names: t is x's scale as s is the total's,
`1 + x_scale` when zero-centered and 1 when absent, r the residual.

Forward, x_hat being that of the total:

    (31) p_m   = ((1/H) sum_h x_mh^2 + epsilon)^(-1/2)
    (32) u     = x * p
    (33) total = r + u * t, rounded to its dtype; y by (2) to (4) of it

Backward. The cotangent d of total is (9) and total's own; u is to x what x_hat is to total.

    (34) dresidual  = d
    (35) dx_scale_h = sum_m d_mh * u_mh
    (36) dx         = p * (d * t - u * (1/H) sum_h d * t * u)

Here they are made of two norms, the first of which adds by (30): so they are by kernels, too, where one kernel does not
take them. d is rounded to total's dtype then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jln._junction import formulas as norms
from jln._junction import signature as of_norm
from jln._junction.both_sides.signature import Cotangents, Gradients, Operands, Outcome, Results, Saved
from jln._junction.formulas import MeshAxes, common_batch, compute_dtype, no_fence, with_batch
from jln._junction.signature import Norm


def composed_forward(
    operands: Operands, norm: Norm, dtypes: Outcome, batch_dims: int, forward: Callable[..., of_norm.Outcome]
) -> Outcome:
    """Terms (31) to (33) by two calls of `forward`, a norm's."""
    x, residual, x_scale, scale = operands
    batch = common_batch(batch_dims, *operands)
    total_dtype = jnp.promote_types(x.dtype, residual.dtype).name
    summands = of_norm.Operands(x, scale=x_scale, added=residual)
    total, _, _, x_rstd = forward(summands, norm, of_norm.Outcome(total_dtype, None, None, dtypes.x_rstd), batch_dims)
    # A barrier, or XLA leaves out the rounding to 16 bits and norms the unrounded sum.
    total = lax.optimization_barrier(total)
    made = Outcome(None, total, x_rstd, None)
    if dtypes.y is not None or dtypes.rstd is not None:
        behind = of_norm.Outcome(dtypes.y, None, None, dtypes.rstd)
        y, _, _, rstd = forward(of_norm.Operands(total, scale=scale), norm, behind, batch_dims)
        made = made._replace(y=y, rstd=rstd)
    return Outcome(*(None if d is None else with_batch(a, batch) for a, d in zip(made, dtypes, strict=True)))


def composed_backward(
    operands: Cotangents, norm: Norm, dtypes: Gradients, batch_dims: int, backward: Callable[..., of_norm.Gradients]
) -> Gradients:
    """Terms (34) to (36), and (6) of total, by one or two calls of `backward`, a norm's."""
    dy, dtotal, total, scale, rstd, x, x_scale, x_rstd = operands
    batch = common_batch(batch_dims, *operands)
    pulls = any(d is not None for d in dtypes._replace(dscale=None))
    behind = of_norm.Cotangents(dy, dtotal, total, scale, None, None, rstd)
    wanted = of_norm.Gradients(dx=total.dtype.name if pulls else None, dscale=dtypes.dscale)
    d, dscale, *_ = backward(behind, norm, wanted, batch_dims)
    made = Gradients(None, d, None, dscale)
    if dtypes.dx is not None or dtypes.dx_scale is not None:
        in_front = of_norm.Cotangents(d, None, x, x_scale, None, None, x_rstd)
        wanted = of_norm.Gradients(dx=dtypes.dx, dscale=dtypes.dx_scale)
        dx, dx_scale, *_ = backward(in_front, norm, wanted, batch_dims)
        made = made._replace(dx=dx, dx_scale=dx_scale)
    return Gradients(
        *(None if d is None else with_batch(a, batch).astype(d) for a, d in zip(made, dtypes, strict=True))
    )


def forward(
    operands: Operands,
    norm: Norm,
    dtypes: Outcome,
    batch_dims: int,
    *,
    fence: Callable = no_fence,
    h_axes: MeshAxes = (),
) -> Outcome:
    """Terms (31) to (33)."""
    one = functools.partial(norms.forward, fence=fence, h_axes=h_axes)
    return composed_forward(operands, norm, dtypes, batch_dims, one)


def backward(
    operands: Cotangents,
    norm: Norm,
    dtypes: Gradients,
    batch_dims: int,
    *,
    fence: Callable = no_fence,
    h_axes: MeshAxes = (),
) -> Gradients:
    """Terms (34) to (36), and (6) of total."""
    one = functools.partial(norms.backward, fence=fence, h_axes=h_axes)
    return composed_backward(operands, norm, dtypes, batch_dims, one)


def tangent(operands: tuple[Operands, Saved], norm: Norm, dtypes: Results, batch_dims: int) -> Results:
    """Terms (18) and (19) of both norms, linear in the tangents, of which those that are None are zero."""
    tangents, (total, scale, rstd, x, x_scale, x_rstd) = operands
    batch = common_batch(batch_dims, *(a for tree in operands for a in tree))
    wide = compute_dtype(total.dtype).name
    of_total = tangents.residual
    if tangents.x is not None or tangents.x_scale is not None:
        in_front = of_norm.Operands(tangents.x, scale=tangents.x_scale, added=tangents.residual)
        saved = of_norm.Saved(x, x_scale, None, x_rstd)
        of_total = norms.tangent((in_front, saved), norm, of_norm.Results(wide, None), batch_dims).y
    behind = of_norm.Operands(of_total, scale=tangents.scale)
    dy, _ = norms.tangent(
        (behind, of_norm.Saved(total, scale, None, rstd)), norm, of_norm.Results(dtypes.y, None), batch_dims
    )
    dtotal = jnp.zeros_like(total) if of_total is None else of_total.astype(dtypes.total)
    return Results(with_batch(dy, batch), with_batch(dtotal, batch))


forward_cpu: Any = functools.partial(forward, fence=lax.optimization_barrier)
backward_cpu: Any = functools.partial(backward, fence=lax.optimization_barrier)
