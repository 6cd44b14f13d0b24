"""LayerNorm and a Linear behind it in plain jnp, forward and backward derived by hand.

Rows are indexed by m, the H elements of a row by h, the N results by n. x_hat, s, mean and rstd are those of
`jln._xla.layer_norm`, whose terms (1) to (9) are cited here; K is the kernel, b the offset (0 when absent).

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

Other forms of these terms, with G = x_hat^T dy [H, N]; what is said of their errors comes from simulating bfloat16 and
float16 operands with float32 sums:

- (13) as s * G + b * dbias is as good, if G is in float32. It saves nothing here, where z costs what x_hat costs.
- (15) by the second form reads K and a vector, not dz, and is as good as the direct sum or better.
- (16) as sum_n K * G is 380 times worse where one column of x is near 1000, as in real transformers: not used.
- (17) with c1_m = (1/H) sum_n dy_mn * (s^T K)_n is safe if s^T K is in float32, and with c2 from y, as
  (1/H) sum_n dy_mn * (y - bias - b^T K)_mn, is 81 times worse at a bias of 1000, for what is left of y has lost its
  digits. Both would save a pass over dz, which XLA's dot writes and dx reads in any case: the direct sums are used.
- dz in 16 bits underflows for small dy in float16: it stays in the compute dtype.

Layout, for every function here: x [*batch, *lead, H]; scale, offset [*batch, H]; kernel [*batch, H, N]; bias
[*batch, N]; y, dy [*batch, *lead, N]; mean, rstd [*batch, *lead, 1]. The `batch_dims` axes of `batch` are vmap's: on
them any operand may have size 1 instead of the batch's, results always have the batch's, and parameter gradients are
not summed over them. No operand is written out over them: einsum drops axes of size 1 that the other side has longer.
With `h_axes`, as in `jln._xla.layer_norm`, the sums of (11) are taken over the devices too.

Dtypes: the products' operands are in promote_types(x.dtype, kernel.dtype), the dtype of y, and their sums in the
compute dtype, float32 or for float64 float64.

Why the `_cpu` rules put fences around their operands: see `jln._xla.layer_norm`. Here one stands between the two halves
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
from jax.typing import DTypeLike

from jln._xla import layer_norm as norm

# What there is to make, forward and backward.
RESULTS = ("y", "mean", "rstd")
GRADIENTS = ("dx", "dscale", "doffset", "dkernel", "dbias")


def _like_rows(parameter: Array, ndim: int, batch_dims: int) -> Array:
    """A parameter [*batch, H] of the rank of x."""
    return jnp.expand_dims(parameter, range(batch_dims, ndim - parameter.ndim + batch_dims))


def _product(
    a: Array, a_axes: Sequence[int], b: Array, b_axes: Sequence[int], axes: Sequence[int], precision: Any
) -> Array:
    """The sum over the axes that are not in `axes`, in the compute dtype; axes are named by numbers."""
    dtype = norm.compute_dtype(a.dtype)
    return jnp.einsum(a, a_axes, b, b_axes, axes, precision=precision, preferred_element_type=dtype)


def forward(
    x: Array,
    scale: Array | None,
    offset: Array | None,
    kernel: Array,
    bias: Array | None,
    *,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    precision: Any,
    batch_dims: int,
    wanted: Sequence[str] = RESULTS,
    fence: Callable = norm.no_fence,
    h_axes: norm.MeshAxes = (),
) -> tuple[Array | None, ...]:
    """Terms (10) and (11): -> (y, mean, rstd).

    y has the promoted dtype of x and kernel. mean and rstd have the compute dtype of x; mean is None without
    `subtract_mean`. Each is None unless it is wanted.
    """
    batch = norm.common_batch(batch_dims, x, scale, offset, kernel, bias)
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    *rows, h, n = range(x.ndim + 1)
    scale, offset = (None if a is None else _like_rows(a, x.ndim, batch_dims) for a in (scale, offset))
    z, mean, rstd = norm.normalise(
        x,
        scale,
        offset,
        axis=-1,
        epsilon=epsilon,
        subtract_mean=subtract_mean,
        zero_centered_scale=zero_centered_scale,
        save_statistics="mean" in wanted or "rstd" in wanted,
        fence=fence,
        h_axes=h_axes,
    )
    y = _product(z.astype(dtype), [*rows, h], kernel.astype(dtype), [*rows[:batch_dims], h, n], [*rows, n], precision)
    if h_axes:
        y = lax.psum(y, h_axes)
    if bias is not None:
        y = y + _like_rows(bias.astype(y.dtype), x.ndim, batch_dims)
    made = zip(RESULTS, (y.astype(dtype), mean, rstd), strict=True)
    return tuple(norm.with_batch(a, batch) if a is not None and name in wanted else None for name, a in made)


def doffset_from(dbias: Array, kernel: Array) -> Array:
    """Term (15), the second form: [*batch, N] and [*batch, H, N] -> [*batch, H]."""
    return jnp.sum(kernel.astype(dbias.dtype) * jnp.expand_dims(dbias, -2), axis=-1)


def backward(
    dy: Array,
    x: Array | None,
    scale: Array | None,
    offset: Array | None,
    kernel: Array,
    mean: Array | None,
    rstd: Array | None,
    *,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    precision: Any,
    batch_dims: int,
    dbias_dtype: DTypeLike | None,
    wanted: Sequence[str] = GRADIENTS,
    fence: Callable = norm.no_fence,
    h_axes: norm.MeshAxes = (),
) -> tuple[Array | None, ...]:
    """Terms (12) to (17): -> (dx, dscale, doffset, dkernel, dbias).

    mean and rstd as saved; `dbias_dtype` None for no bias. Each result has the dtype of what it is the gradient of, and
    is None where that is absent, or is not wanted; x, mean and rstd may be None where none but doffset and dbias is.
    """
    batch = norm.common_batch(batch_dims, dy, x, scale, offset, kernel, mean, rstd)
    dtype = dy.dtype if x is None else jnp.promote_types(x.dtype, kernel.dtype)
    *rows, h, n = range(dy.ndim + 1)
    in_batch, lead = rows[:batch_dims], rows[batch_dims:]
    row_scale, row_offset = (None if a is None else _like_rows(a, dy.ndim, batch_dims) for a in (scale, offset))

    dx = dscale = doffset = dkernel = dbias = None
    if {"doffset", "dbias"} & {*wanted}:
        sums = jnp.sum(dy.astype(norm.compute_dtype(dtype)), axis=lead)  # (12)
        if dbias_dtype is not None and "dbias" in wanted:
            dbias = sums.astype(dbias_dtype)
        if offset is not None and "doffset" in wanted:
            doffset = doffset_from(sums, kernel).astype(offset.dtype)

    if "dkernel" in wanted:  # (13)
        dy, x, mean, rstd = fence((dy, x, mean, rstd))
        assert x is not None and rstd is not None
        z = norm.scaled(x, row_scale, row_offset, mean, rstd, zero_centered_scale).astype(dtype)
        dkernel = _product(z, [*rows, h], dy, [*rows, n], [*in_batch, h, n], precision).astype(kernel.dtype)

    if {"dx", "dscale"} & {*wanted}:
        dy, x, mean, rstd, dkernel = fence((dy, x, mean, rstd, dkernel))
        dz = _product(dy, [*rows, n], kernel.astype(dtype), [*in_batch, h, n], [*rows, h], precision)  # (14)
        dx, dscale, _ = norm.backward(  # (16) and (17)
            dz,
            None,
            x,
            row_scale,
            mean,
            rstd,
            axis=-1,
            epsilon=epsilon,
            subtract_mean=subtract_mean,
            zero_centered_scale=zero_centered_scale,
            batch_dims=batch_dims,
            doffset_dtype=None,
            wanted=wanted,
            fence=fence,
            h_axes=h_axes,
        )
        dscale = None if dscale is None else jnp.squeeze(dscale, lead)
    gradients = (dx, dscale, doffset, dkernel, dbias)
    return tuple(None if a is None else norm.with_batch(a, batch) for a in gradients)


def tangent(
    dx: Array | None,
    dscale: Array | None,
    doffset: Array | None,
    dkernel: Array | None,
    dbias: Array | None,
    x: Array,
    scale: Array | None,
    offset: Array | None,
    kernel: Array,
    mean: Array | None,
    rstd: Array,
    *,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    precision: Any,
    batch_dims: int,
) -> tuple[Array]:
    """Term (20), linear in the first five arguments, tangents here: -> (dy,), in the dtype of y.

    Those tangents that are None are zero; the other arguments are those of `backward`.
    """
    batch = norm.common_batch(batch_dims, dx, dscale, doffset, dkernel, dbias, x, scale, offset, kernel, mean, rstd)
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    *rows, h, n = range(x.ndim + 1)
    row_scale, row_offset, dscale, doffset = (
        None if a is None else _like_rows(a, x.ndim, batch_dims) for a in (scale, offset, dscale, doffset)
    )

    def product(z: Array, kernel: Array) -> Array:
        kernel = kernel.astype(dtype)
        return _product(z.astype(dtype), [*rows, h], kernel, [*rows[:batch_dims], h, n], [*rows, n], precision)

    dy = jnp.zeros((*x.shape[:-1], kernel.shape[-1]), norm.compute_dtype(dtype))
    if any(a is not None for a in (dx, dscale, doffset)):
        dz, _ = norm.tangent(
            dx,
            None,
            dscale,
            doffset,
            x,
            row_scale,
            mean,
            rstd,
            axis=-1,
            epsilon=epsilon,
            subtract_mean=subtract_mean,
            zero_centered_scale=zero_centered_scale,
            batch_dims=batch_dims,
            y_dtype=rstd.dtype,
            has_residual=False,
        )
        dy = dy + product(dz, kernel)
    if dkernel is not None:
        dy = dy + product(norm.scaled(x, row_scale, row_offset, mean, rstd, zero_centered_scale), dkernel)
    if dbias is not None:
        dy = dy + _like_rows(dbias.astype(dy.dtype), x.ndim, batch_dims)
    return (norm.with_batch(dy, batch).astype(dtype),)


forward_cpu = partial(forward, fence=lax.optimization_barrier)
backward_cpu = partial(backward, fence=lax.optimization_barrier)
