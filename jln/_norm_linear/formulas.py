"""LayerNorm and a Linear behind it in plain jnp, forward and backward derived by hand.

Rows are indexed by m, the H elements of a row by h, the N results by n. x_hat, s, mean and rstd are those of
`jln._norm.formulas`, whose terms (1) to (9) are cited here; K is the kernel, b the offset (0 when absent).

Forward:

    (10) z_mh = x_hat_mh * s_h + b_h                        rounded to the dtype of the product's operands
    (11) y_mn = sum_h z_mh * K_hn + bias_n

Backward. (11) is linear in each of its parts:

    (12) dbias_n   = sum_m dy_mn
    (13) dkernel_hn = sum_m z_mh * dy_mn
    (14) dz_mh     = sum_n dy_mn * K_hn

dz is what (5) to (9) call dy, so with it

    (15) doffset_h = sum_m dz_mh = sum_n K_hn * dbias_n     (5), the sums exchanged
    (16) dscale_h  = sum_m dz_mh * x_hat_mh                 (6)
    (17) g  = dz * s,  dx = rstd * (g - c1 - x_hat * c2)    (7) to (9)

Forward mode, with primed values for tangents; z' is what (19) calls y':

    (20) y' = z' @ K + z @ K' + bias'

Nothing of the size of x is kept between forward and backward but x: (13) makes z again.

Other forms of these terms, of which the fused kernels use those with a number. What is said of their errors comes from
simulating bfloat16 and float16 operands with float32 sums.

    (21) G_hn       = sum_m x_hat_mh * dy_mn
    (22) dkernel_hn = s_h * G_hn + b_h * dbias_n            (13), by (10)

- (22) is as good as (13), if G is in float32. It saves nothing here, where z costs what x_hat costs.
- (15) by the second form reads K and a vector, not dz, and is as good as the direct sum or better.
- (16) as sum_n K * G is 380 times worse where one column of x is near 1000, as in real transformers: not used.
- (17) with c1_m = (1/H) sum_n dy_mn * (s^T K)_n is safe if s^T K is in float32, and with c2 from y, as
  (1/H) sum_n dy_mn * (y - bias - b^T K)_mn, is 81 times worse at a bias of 1000, for what is left of y has lost its
  digits. Both would save a pass over dz, which XLA's dot writes and dx reads in any case: the direct sums are used.
- dz in 16 bits underflows for small dy in float16: it stays in the compute dtype.

Shapes are those of `jln._norm_linear.signature` with one axis of features, N. No operand is written out over vmap's
axes: einsum drops axes of size 1 that the other side has longer. A result is in the dtype that `dtypes` names for it,
and is not computed, nor what only it needs, where that is None. With `h_axes`, as in `jln._norm.formulas`, the sums of
(11) are taken over the devices too.

Dtypes: the products' operands are in promote_types(x.dtype, kernel.dtype), the dtype of y, and their sums in the
compute dtype, float32 or for float64 float64.

Why the `_cpu` rules put fences around their operands: see `jln._norm.formulas`. Here one stands between the two halves
of the backward too, so that z may be gone before dz is made: so it is with JAX 0.11.2, while the scheduler of 0.10.2
makes dz first. In float32 the gradient of a loss at [1024, 4096] @ [4096, 256] needs 17 MiB of temporaries with the one
and 33 with the other, and 49 by plain autodiff.

A program that returns y and is given dy may make dz before y: with 0.10.2 it does, and holds z twice and dz, 48 MiB,
where autodiff makes z once, 32; with 0.11.2 it is 16 MiB to 32. No fence was found that mends it, for they are gone
when that scheduler runs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from jln._norm import formulas as norms
from jln._norm import signature as norm_signature
from jln._norm_linear.signature import Cotangents, Gradients, NormLinear, Operands, Outcome, Results, Saved


def _like_rows(parameter: Array, ndim: int, batch_dims: int) -> Array:
    """A parameter [*batch, H] of the rank of x."""
    return jnp.expand_dims(parameter, range(batch_dims, ndim - parameter.ndim + batch_dims))


def _product(
    a: Array, a_axes: Sequence[int], b: Array, b_axes: Sequence[int], axes: Sequence[int], precision: Any
) -> Array:
    """The sum over the axes that are not in `axes`, in the compute dtype; axes are named by numbers."""
    dtype = norms.compute_dtype(a.dtype)
    return jnp.einsum(a, a_axes, b, b_axes, axes, precision=precision, preferred_element_type=dtype)


def doffset_from(dbias: Array, kernel: Array) -> Array:
    """The second form of (15), for dbias [*batch, N] in the compute dtype."""
    return jnp.sum(kernel.astype(dbias.dtype) * jnp.expand_dims(dbias, -2), axis=-1)


def forward(
    operands: Operands,
    settings: NormLinear,
    dtypes: Outcome,
    batch_dims: int,
    *,
    fence: Callable = norms.no_fence,
    h_axes: norms.MeshAxes = (),
) -> Outcome:
    """Terms (10) and (11)."""
    x, scale, offset, kernel, bias = operands
    batch = norms.common_batch(batch_dims, *operands)
    *rows, h, n = range(x.ndim + 1)
    scale, offset = (None if a is None else _like_rows(a, x.ndim, batch_dims) for a in (scale, offset))
    z, mean, rstd = norms.normalise(
        x, scale, offset, settings.norm, keep=dtypes.rstd is not None, fence=fence, h_axes=h_axes
    )
    if dtypes.y is None:  # statistics alone, made again
        return Outcome(None, *(None if a is None else norms.with_batch(a, batch) for a in (mean, rstd)))
    in_kernel = [*rows[:batch_dims], h, n]
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    y = _product(z.astype(dtype), [*rows, h], kernel.astype(dtype), in_kernel, [*rows, n], settings.precision)
    if h_axes:
        y = lax.psum(y, h_axes)
    if bias is not None:
        y = y + _like_rows(bias.astype(y.dtype), x.ndim, batch_dims)
    y = norms.with_batch(y, batch).astype(dtypes.y)
    return Outcome(y, *(None if a is None else norms.with_batch(a, batch) for a in (mean, rstd)))


def backward(
    operands: Cotangents,
    settings: NormLinear,
    dtypes: Gradients,
    batch_dims: int,
    *,
    fence: Callable = norms.no_fence,
    h_axes: norms.MeshAxes = (),
) -> Gradients:
    """Terms (12) to (17)."""
    dy, x, scale, offset, kernel, mean, rstd = operands
    batch = norms.common_batch(batch_dims, *operands)
    dtype = dy.dtype  # that of the products' operands
    *rows, h, n = range(dy.ndim + 1)
    in_batch, lead = rows[:batch_dims], rows[batch_dims:]
    row_scale, row_offset = (None if a is None else _like_rows(a, dy.ndim, batch_dims) for a in (scale, offset))

    dx = dscale = doffset = dkernel = dbias = None
    if dtypes.doffset is not None or dtypes.dbias is not None:  # (12)
        dbias = jnp.sum(dy.astype(norms.compute_dtype(dtype)), axis=lead)
    if dtypes.doffset is not None and dbias is not None:  # (15)
        doffset = doffset_from(dbias, kernel).astype(dtypes.doffset)
    dbias = None if dtypes.dbias is None or dbias is None else dbias.astype(dtypes.dbias)

    if dtypes.dkernel is not None:  # (13)
        dy, x, mean, rstd = fence((dy, x, mean, rstd))
        z = norms.scaled(x, row_scale, row_offset, mean, rstd, settings.norm).astype(dtype)
        dkernel = _product(z, [*rows, h], dy, [*rows, n], [*in_batch, h, n], settings.precision).astype(dtypes.dkernel)

    if dtypes.dx is not None or dtypes.dscale is not None:
        dy, x, mean, rstd, dkernel = fence((dy, x, mean, rstd, dkernel))
        in_kernel = [*in_batch, h, n]
        dz = _product(dy, [*rows, n], kernel.astype(dtype), in_kernel, [*rows, h], settings.precision)  # (14)
        dx, dscale, _ = norms.backward(  # (16) and (17)
            norm_signature.Cotangents(dz, None, x, row_scale, mean, rstd),
            settings.norm,
            norm_signature.Gradients(dtypes.dx, dtypes.dscale, None),
            batch_dims,
            fence=fence,
            h_axes=h_axes,
        )
        dscale = None if dscale is None else jnp.squeeze(dscale, lead)
    gradients = (dx, dscale, doffset, dkernel, dbias)
    return Gradients(*(None if a is None else norms.with_batch(a, batch) for a in gradients))


def tangent(operands: tuple[Operands, Saved], settings: NormLinear, dtypes: Results, batch_dims: int) -> Results:
    """Term (20), linear in the tangents, of which those that are None are zero."""
    (dx, dscale, doffset, dkernel, dbias), saved = operands
    x, scale, offset, kernel, mean, rstd = saved
    batch = norms.common_batch(batch_dims, dx, dscale, doffset, dkernel, dbias, *saved)
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    *rows, h, n = range(x.ndim + 1)
    row_scale, row_offset, dscale, doffset = (
        None if a is None else _like_rows(a, x.ndim, batch_dims) for a in (scale, offset, dscale, doffset)
    )

    def product(z: Array, kernel: Array) -> Array:
        in_kernel = [*rows[:batch_dims], h, n]
        return _product(z.astype(dtype), [*rows, h], kernel.astype(dtype), in_kernel, [*rows, n], settings.precision)

    dy = jnp.zeros((*x.shape[:-1], kernel.shape[-1]), norms.compute_dtype(dtype))
    if any(a is not None for a in (dx, dscale, doffset)):
        dz, _ = norms.tangent(
            (
                norm_signature.Operands(dx, None, dscale, doffset),
                norm_signature.Saved(x, row_scale, mean, rstd),
            ),
            settings.norm,
            norm_signature.Results(rstd.dtype.name, None),
            batch_dims,
        )
        dy = dy + product(dz, kernel)
    if dkernel is not None:
        dy = dy + product(norms.scaled(x, row_scale, row_offset, mean, rstd, settings.norm), dkernel)
    if dbias is not None:
        dy = dy + _like_rows(dbias.astype(dy.dtype), x.ndim, batch_dims)
    return Results(norms.with_batch(dy, batch).astype(dtypes.y))


forward_cpu = partial(forward, fence=lax.optimization_barrier)
backward_cpu = partial(backward, fence=lax.optimization_barrier)
