"""The norm family in plain jnp, forward and backward derived by hand.

Rows are indexed by m, the H elements of a row by h; every term is in the compute dtype. `scale` s is `1 + scale` when
zero-centered and 1 when absent, `offset` b is 0 when absent.

Forward:

    (1) mean_m  = (1/H) sum_h x_mh                          (0 for RMSNorm)
    (2) rstd_m  = ((1/H) sum_h (x_mh - mean_m)^2 + epsilon)^(-1/2)
    (3) x_hat   = (x - mean) * rstd
    (4) y       = x_hat * s + b

Backward. From (4), with g = dy * s the cotangent of x_hat,

    (5) doffset_h = sum_m dy_mh
    (6) dscale_h  = sum_m dy_mh * x_hat_mh

From (3), dx = rstd * g directly, plus what flows through the two statistics. By (2) the derivative of rstd by x_h is
-rstd^2 * x_hat_h / H and its cotangent is sum_h g * (x - mean) = H * c2 / rstd: together -rstd * x_hat * c2. The
cotangent of mean is -rstd * sum_h g (the variance's own part vanishes, as sum_h (x - mean) = 0): by (1), -rstd * c1.

    (7) c1_m = (1/H) sum_h g_mh                             (0 for RMSNorm)
    (8) c2_m = (1/H) sum_h g_mh * x_hat_mh
    (9) dx   = rstd * (g - c1 - x_hat * c2)

Forward mode. From the same two dependencies, with primed values for tangents (t_mh is that of x_mh),

    (18) x_hat' = rstd * (t - (1/H) sum_h t - x_hat * (1/H) sum_h t * x_hat)   (no first sum for RMSNorm)
    (19) y'     = x_hat' * s + x_hat * s' + b'

With a residual the row is `total = x + residual`, rounded to its dtype before it is normalised, and it is an output
too: its own cotangent is added to (9), and the sum is the cotangent of x and of residual alike.

Layout, for every function here: large arrays are [*lead, H, *inner] with H at the negative `axis`; `scale` and
`offset` have the same rank with 1 everywhere but at `axis`; `mean` and `rstd` have 1 at `axis`. The first `batch_dims`
axes are vmap's: on them any operand may have size 1 instead of the batch's, results always have the batch's, and
parameter gradients are not summed over them.
Inside of a program for several devices each of which has a part of H, equally long, `h_axes` names the mesh axes over
which it is split: the means over H are then taken over the parts, and nothing else changes.

Why the `_cpu` rules put fences (`lax.optimization_barrier`) around their operands: XLA's CPU backend makes one loop of
a whole chain of elementwise operations and sums, but one for each result, and any [M, H] value that two loops share (a
float32 copy of x, x_hat, even a broadcast rstd or scale) is written out first; the page faults of those temporaries
cost more than the arithmetic. Fenced operands are new values to the compiler: nothing is shared, every result
recomputes x_hat in its own loop, and nothing is copied. Equal fences would be merged, so they are chained. A loop also
breaks at an elementwise operation on fewer than `_MANY_ROWS` elements, such as those of (1) and (2) on the row sums:
with more rows every loop recomputes the statistics; with fewer they are fenced results of their own, saved by the
forward, and the 1/H of (7) and (8) goes to the scale. dx comes last so that its buffer can be that of a dead total.
Measured on 2 cores with JAX 0.10.2 and 0.11.2, gradient of [4096, 1024], [1024, 4096] and [16384, 256]: fences take the
temporaries from 16-32 MiB (float32) and 48 MiB (bfloat16) to at most 0.13, and are 1.4 to 3.6 and 2.8 to 8.2 times
faster; one loop for a whole forward is 1.3 times faster than fenced statistics on 0.11.2, as fast on 0.10.2.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

_MANY_ROWS = 4096

MeshAxes = tuple[str, ...]

# What there is to make, forward and backward.
RESULTS = ("y", "total", "mean", "rstd")
GRADIENTS = ("dx", "dscale", "doffset")


def no_fence(operands: Any) -> Any:
    return operands


def _in_one_loop(x: Array, axis: int, fence: Callable) -> bool:
    """Whether every result computes its own statistics."""
    size = math.prod(x.shape)  # in an export with symbolic shapes not an int, and nothing is known
    return fence is not no_fence and isinstance(size, int) and size >= _MANY_ROWS * x.shape[axis]


def compute_dtype(dtype: DTypeLike) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def sum_dtype(dtype: DTypeLike, result: DTypeLike) -> Any:
    """In which to add up a cotangent of `dtype` alone, for a gradient in `result`."""
    return jnp.promote_types(compute_dtype(dtype), result)


def common_batch(batch_dims: int, *operands: Array | None) -> tuple[int, ...]:
    return jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in operands if a is not None))


def with_batch(a: Array, batch: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(a, batch + a.shape[len(batch) :])


def _effective_scale(scale: Array | None, dtype: DTypeLike, zero_centered_scale: bool) -> Array | float:
    """The s of (4)."""
    if scale is None:
        return 1.0
    return 1.0 + scale.astype(dtype) if zero_centered_scale else scale.astype(dtype)


def _centered(x: Array, mean: Array | None) -> Array:
    """x - mean in the compute dtype."""
    x = x.astype(compute_dtype(x.dtype))
    return x if mean is None else x - mean


def scaled(
    x: Array, scale: Array | None, offset: Array | None, mean: Array | None, rstd: Array, zero_centered_scale: bool
) -> Array:
    """Terms (3) and (4), in the compute dtype."""
    y = _centered(x, mean) * rstd * _effective_scale(scale, rstd.dtype, zero_centered_scale)
    return y if offset is None else y + offset.astype(rstd.dtype)


def _over_parts(mean: Array, h_axes: MeshAxes) -> Array:
    """The mean over H from that over this device's part of it."""
    return lax.pmean(mean, h_axes) if h_axes else mean


def _statistics(
    x: Array, axis: int, epsilon: float, subtract_mean: bool, fence: Callable = no_fence, h_axes: MeshAxes = ()
) -> tuple[Array, Array | None, Array]:
    """Terms (1) and (2): -> (x, mean, rstd), each of them fenced."""
    mean = None
    if subtract_mean:
        x, mean = fence((x, _over_parts(jnp.mean(_centered(x, None), axis, keepdims=True), h_axes)))
    variance = _over_parts(jnp.mean(jnp.square(_centered(x, mean)), axis, keepdims=True), h_axes)
    return fence((x, mean, lax.rsqrt(variance + epsilon)))


def normalise(
    x: Array,
    scale: Array | None,
    offset: Array | None,
    *,
    axis: int,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    save_statistics: bool,
    fence: Callable = no_fence,
    h_axes: MeshAxes = (),
) -> tuple[Array, Array | None, Array | None]:
    """Terms (1) to (4): -> (y, mean, rstd) in the compute dtype, the last two as in `forward`, without its batch."""
    x, scale, offset = fence((x, scale, offset))
    in_one_loop = _in_one_loop(x, axis, fence)
    x, mean, rstd = _statistics(x, axis, epsilon, subtract_mean, no_fence if in_one_loop else fence, h_axes)
    y = scaled(x, scale, offset, mean, rstd, zero_centered_scale)
    if not save_statistics:
        mean = rstd = None
    elif in_one_loop:  # a loop of their own, dropped where only a backward rule that recomputes them follows
        _, mean, rstd = _statistics(fence(x), axis, epsilon, subtract_mean, fence, h_axes)
    return y, mean, rstd


def forward(
    x: Array,
    residual: Array | None,
    scale: Array | None,
    offset: Array | None,
    *,
    axis: int,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    batch_dims: int,
    y_dtype: DTypeLike,
    wanted: Sequence[str] = RESULTS,
    fence: Callable = no_fence,
    h_axes: MeshAxes = (),
) -> tuple[Array | None, ...]:
    """Normalise `x` or, if there is one, `x + residual`: -> (y, total, mean, rstd).

    x, residual [*lead, H, *inner]; scale, offset [1, ..., H, ..., 1] at `axis`, each or None.

    y [*lead, H, *inner] has `y_dtype`. total [*lead, H, *inner] has the promoted dtype of x and residual, and is None
    without a residual. mean and rstd [*lead, 1, *inner] have the compute dtype; mean is None without `subtract_mean`.
    Each is None unless it is wanted.
    """
    batch = common_batch(batch_dims, x, residual, scale, offset)
    total = None
    if residual is not None:
        total_dtype = jnp.promote_types(x.dtype, residual.dtype)
        dtype = compute_dtype(total_dtype)
        total = (x.astype(dtype) + residual.astype(dtype)).astype(total_dtype)
        # On every platform, or XLA elides the rounding to 16 bits and norms the unrounded sum.
        x = total = lax.optimization_barrier(total)

    y, mean, rstd = normalise(
        x,
        scale,
        offset,
        axis=axis,
        epsilon=epsilon,
        subtract_mean=subtract_mean,
        zero_centered_scale=zero_centered_scale,
        save_statistics="mean" in wanted or "rstd" in wanted,
        fence=fence,
        h_axes=h_axes,
    )
    made = zip(RESULTS, (y.astype(y_dtype), total, mean, rstd), strict=True)
    return tuple(with_batch(a, batch) if a is not None and name in wanted else None for name, a in made)


def backward(
    dy: Array,
    dtotal: Array | None,
    total: Array | None,
    scale: Array | None,
    mean: Array | None,
    rstd: Array | None,
    *,
    axis: int,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    batch_dims: int,
    doffset_dtype: DTypeLike | None,
    wanted: Sequence[str] = GRADIENTS,
    fence: Callable = no_fence,
    h_axes: MeshAxes = (),
) -> tuple[Array | None, Array | None, Array | None]:
    """Terms (5) to (9): -> (dtotal_in, dscale, doffset).

    dy, the cotangent of y, dtotal, that of the returned total or None, and total, what was normalised (x where there
    was no residual) [*lead, H, *inner]; scale [1, ..., H, ..., 1] or None; mean, rstd [*lead, 1, *inner] as saved, or
    None to compute them here; `doffset_dtype` None for no offset.

    dtotal_in [*lead, H, *inner], the cotangent of x and of residual, has total's dtype. dscale and doffset
    [1, ..., H, ..., 1] have scale's dtype and `doffset_dtype`, and are None without a scale and an offset. Each is None
    unless it is wanted; total may be None where none but doffset is.
    """
    batch = common_batch(batch_dims, dy, dtotal, total, scale, mean, rstd)
    rows = [i for i in range(batch_dims, dy.ndim) if i != dy.ndim + axis]
    sum_over_rows = partial(jnp.sum, axis=rows, keepdims=True)
    doffset_dtype = doffset_dtype if "doffset" in wanted else None
    if not {"dx", "dscale"} & {*wanted}:  # (5) alone
        if doffset_dtype is None:
            return None, None, None
        doffset = sum_over_rows(dy.astype(sum_dtype(dy.dtype, doffset_dtype)))
        return None, None, with_batch(doffset, batch).astype(doffset_dtype)

    assert total is not None
    x: Array = total
    dtype = compute_dtype(x.dtype)
    if _in_one_loop(x, axis, fence):
        mean = rstd = None
    elif rstd is None:
        x, mean, rstd = _statistics(x, axis, epsilon, subtract_mean, fence, h_axes)

    def x_hat_and_rstd() -> tuple[Array, Array]:
        m, r = (mean, rstd) if rstd is not None else _statistics(x, axis, epsilon, subtract_mean, h_axes=h_axes)[1:]
        return _centered(x, m) * r, r

    def mean_over_h(divided_by_h: Array) -> Array:
        return _over_parts(jnp.sum(divided_by_h, axis, keepdims=True), h_axes)

    dscale = doffset = None
    if doffset_dtype is not None:  # (5)
        dy, x = fence((dy, x))
        doffset = with_batch(sum_over_rows(dy.astype(dtype)), batch).astype(doffset_dtype)

    if scale is not None and "dscale" in wanted:  # (6)
        dy, x, mean, rstd = fence((dy, x, mean, rstd))
        x_hat, _ = x_hat_and_rstd()
        dscale = with_batch(sum_over_rows(dy.astype(dtype) * x_hat), batch).astype(scale.dtype)

    if "dx" not in wanted:
        return None, dscale, doffset
    dy, x, mean, rstd, scale = fence((dy, x, mean, rstd, scale))
    x_hat, r = x_hat_and_rstd()
    s = _effective_scale(scale, dtype, zero_centered_scale)
    g = dy.astype(dtype) * s
    g_over_h = dy.astype(dtype) * (s / x.shape[axis])
    dx = g - x_hat * mean_over_h(g_over_h * x_hat)  # (8)
    if subtract_mean:
        dx = dx - mean_over_h(g_over_h)  # (7)
    dx = r * dx  # (9)
    if dtotal is not None:
        dx = dx + dtotal.astype(dtype)
    return with_batch(dx, batch).astype(x.dtype), dscale, doffset


def tangent(
    dx: Array | None,
    dresidual: Array | None,
    dscale: Array | None,
    doffset: Array | None,
    total: Array,
    scale: Array | None,
    mean: Array | None,
    rstd: Array,
    *,
    axis: int,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    batch_dims: int,
    y_dtype: DTypeLike,
    has_residual: bool,
) -> tuple[Array, Array | None]:
    """Terms (18) and (19), linear in the first four arguments, tangents here: -> (dy, dtotal).

    Those tangents that are None are zero; the other arguments are those of `backward`. dy has `y_dtype`. dtotal has
    total's dtype and is None without a residual.
    """
    del epsilon  # it is in rstd
    batch = common_batch(batch_dims, dx, dresidual, dscale, doffset, total, scale, mean, rstd)
    dtype = rstd.dtype
    x_hat = _centered(total, mean) * rstd
    dy, dtotal = jnp.zeros_like(x_hat), jnp.zeros_like(total)
    given = [a.astype(dtype) for a in (dx, dresidual) if a is not None]
    if given:
        t = sum(given[1:], given[0])
        dtotal = t.astype(total.dtype)
        dy = t - x_hat * jnp.mean(t * x_hat, axis, keepdims=True)
        if subtract_mean:
            dy = dy - jnp.mean(t, axis, keepdims=True)
        dy = dy * rstd * _effective_scale(scale, dtype, zero_centered_scale)
    if dscale is not None:
        dy = dy + x_hat * dscale.astype(dtype)
    if doffset is not None:
        dy = dy + doffset.astype(dtype)
    return with_batch(dy, batch).astype(y_dtype), with_batch(dtotal, batch) if has_residual else None


forward_cpu = partial(forward, fence=lax.optimization_barrier)
backward_cpu = partial(backward, fence=lax.optimization_barrier)
