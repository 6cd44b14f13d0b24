"""The junction in plain jnp: its derivation by hand, and the forward rule; `jln._junction.gradients` has the others.

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

With a residual r behind the norm, its cotangent being dy:

    (30) y = x_hat * s + b + r

With a residual r the row is a sum, rounded to its dtype before it is normalised, and an output too. Its parts are the
branch x, its bias e (0 when absent) and the gate w (1 when absent), both of H elements:

    (23) total = r + w * (x + e)

Its own cotangent is added to (9), and the sum d is that of the residual. (23) is linear in each of its parts:

    (24) dresidual = d
    (25) dx        = w * d
    (26) dx_bias_h = sum_m dx_mh
    (27) dgate_h   = sum_m d_mh * (x + e)_mh

With a gate z, u = silu(z) multiplies what is normalised or the norm's result; there is no offset then:

    (40) u     = z / (1 + exp(-z)),   its derivative u' = (1 + u * exp(-z)) / (1 + exp(-z))
    (41) total = x * u                in the compute dtype, not rounded: of it (1) to (4)     (the gate before the norm)
    (42) y     = (x_hat * s) * u                                                              (the norm before the gate)

By (42) the cotangent of the norm's result, which (6) to (9) call dy, is dy * u; by (41) that of x is d * u:

    (43) dz = dy * (x_hat * s) * u'                                                           (the norm before the gate)
    (44) dx = d * u,   dz = d * x * u'                                                        (the gate before the norm)

With an RMSNorm of x in front of the sum, (1) to (4) are of the total. Of x the same terms are p, u and the branch,
whose scale is t:

    (31) p_m   = ((1/H) sum_h x_mh^2 + epsilon)^(-1/2)
    (32) u     = x * p
    (33) total = r + w * u * t, rounded to its dtype

The cotangent d of total is (9) and total's own. (26) and (27) hold as they are, with w * d for the cotangent of the
branch; and u is to x what x_hat is to total:

    (34) dresidual  = d
    (35) dx_scale_h = sum_m (w * d)_mh * u_mh
    (36) dx         = p * (g - u * (1/H) sum_h g * u),   g = w * d * t

Here both are made of two norms, the first of which adds by (30) where no gate is between: so they are by kernels, too,
where one kernel does not take them. d is rounded to total's dtype then.

Eight bits, (50) to (53), are in `jln._junction.eight_bits`.

Shapes are those of `jln._junction.arrays`. A result is in the dtype that `dtypes` names for it, and is not computed
where that is None. Inside of a program for several devices each of which has a part of H, equally long, `h_axes` names
the mesh axes over which it is split: the means over H are then taken over the parts, and nothing else changes.

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

Why the `_tpu` rules take a row's sums of g and of g * (x - mean), as autodiff of plain jnp does: XLA's TPU backend
makes a norm where a product reads it, and a row's sum where a product writes the row. But it makes the sum of (8) where
dx is made, and then dx is written where what reads it might make it again. Nor is there a barrier behind the sum (23),
whose digits are rounded in any case. Compiled for a v5p, two layers of Llama 3 8B move 63.59 GB so, as in plain jnp;
with (8) 64.33, and with the barrier, too, 64.60 (`python benchmarks/tpu.py --model Llama`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jln._junction.arrays import Arrays, Norm
from jln._junction.eight_bits import LARGEST_EXPONENT, in_eight_bits

_MANY_ROWS = 4096

MeshAxes = tuple[str, ...]


def no_fence(operands: Any) -> Any:
    return operands


def in_one_loop(x: Any, axis: int, fence: Callable) -> bool:
    """True where every result computes its own statistics, in one loop."""
    x = x.a if isinstance(x, Product) else x
    size = math.prod(x.shape)  # in an export with symbolic shapes not an int, and nothing is known
    return fence is not no_fence and isinstance(size, int) and size >= _MANY_ROWS * x.shape[axis]


class Product(NamedTuple):
    """The product a * silu(z), made again wherever it is read: it is no array that XLA might write."""

    a: Array
    z: Array


def compute_dtype(dtype: DTypeLike) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def silu(z: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Term (40): silu of z, and its derivative."""
    z = z.astype(dtype)
    share = lax.logistic(z)
    u = z * share
    return u, share + u * (1 - share)  # (40)


def wide(a: Array | Product, dtype: DTypeLike | None = None) -> Array:
    """The array, or the product's value, in `dtype`; by default in the compute dtype."""
    array = a.a if isinstance(a, Product) else a
    array = array.astype(compute_dtype(array.dtype) if dtype is None else dtype)
    return array * silu(a.z, array.dtype)[0] if isinstance(a, Product) else array


def common_batch(batch_dims: int, *operands: Array | None) -> tuple[int, ...]:
    return jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in operands if a is not None))


def with_batch(a: Array, batch: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(a, batch + a.shape[len(batch) :])


def _with_digits_of(total: Array, dtype: DTypeLike) -> Array:
    """A sum rounded to the digits of `dtype`, in its own dtype.

    It is the rounded sum that is normalised. Of two conversions in a row, to bfloat16 and back, XLA leaves out both
    where no barrier is between them, and YNNPACK, to which jaxlib 0.10.2 and 0.11.0 give sums on a CPU, in any case.
    """
    digits = jnp.finfo(dtype).nmant
    if digits >= jnp.finfo(total.dtype).nmant:
        return total
    return lax.reduce_precision(total, jnp.finfo(total.dtype).nexp, digits)


def branch(arrays: Arrays, norm: Norm, dtype: DTypeLike) -> Array:
    """The branch x + e of (23), or u * t of (33), in the compute dtype."""
    if norm.both_sides:
        return apply_statistics(arrays.x, arrays.x_scale, None, None, arrays.x_rstd, norm).astype(dtype)
    x = arrays.x.astype(dtype)
    return x if arrays.x_bias is None else x + arrays.x_bias.astype(dtype)


def apply_gate(a: Array, arrays: Arrays) -> Array:
    """Term (25): `a` times the gate."""
    return a if arrays.gate is None else a * arrays.gate.astype(a.dtype)  # (25)


def effective_scale(scale: Array | None, dtype: DTypeLike, norm: Norm) -> Array | float:
    """The factor s of (4)."""
    if scale is None:
        return 1.0
    return 1.0 + scale.astype(dtype) if norm.switches.zero_centered_scale else scale.astype(dtype)


def center(x: Array | Product, mean: Array | None) -> Array:
    """The difference x - mean in the compute dtype."""
    x = wide(x)
    return x if mean is None else x - mean


def apply_statistics(
    x: Any, scale: Array | None, offset: Array | None, mean: Array | None, rstd: Array, norm: Norm
) -> Array:
    """Terms (3) and (4), in the compute dtype."""
    y = center(x, mean) * rstd * effective_scale(scale, rstd.dtype, norm)  # (3), (4)
    return y if offset is None else y + offset.astype(rstd.dtype)  # (4)


def over_parts(mean: Array, h_axes: MeshAxes) -> Array:
    """The mean over all of H, from the mean over this device's part of H."""
    return lax.pmean(mean, h_axes) if h_axes else mean


def statistics(
    x: Any, norm: Norm, fence: Callable = no_fence, h_axes: MeshAxes = ()
) -> tuple[Any, Array | None, Array]:
    """Terms (1) and (2). Returns (x, mean, rstd), each of them fenced."""
    mean = None
    if norm.switches.subtract_mean:
        x, mean = fence((x, over_parts(jnp.mean(center(x, None), norm.axis, keepdims=True), h_axes)))  # (1)
    variance = over_parts(jnp.mean(jnp.square(center(x, mean)), norm.axis, keepdims=True), h_axes)  # (2)
    return fence((x, mean, lax.rsqrt(variance + norm.epsilon)))  # (2)


def normalise(
    x: Any,
    scale: Array | None,
    offset: Array | None,
    norm: Norm,
    *,
    keep: bool,
    fence: Callable = no_fence,
    h_axes: MeshAxes = (),
) -> tuple[Array, Array | None, Array | None]:
    """Terms (1) to (4) of an array or a product. Returns (y, mean, rstd) in the compute dtype.

    Nothing is broadcast to vmap's axes. mean and rstd are None unless `keep` is True; mean also where none is
    subtracted.
    """
    x, scale, offset = fence((x, scale, offset))
    one_loop = in_one_loop(x, norm.axis, fence)
    x, mean, rstd = statistics(x, norm, no_fence if one_loop else fence, h_axes)
    y = apply_statistics(x, scale, offset, mean, rstd, norm)
    if not keep:
        mean = rstd = None
    elif one_loop:  # in a loop of their own, which is dropped where the backward rule computes them again
        _, mean, rstd = statistics(fence(x), norm, fence, h_axes)
    return y, mean, rstd


def forward(
    operands: Arrays,
    norm: Norm,
    dtypes: Arrays,
    batch_dims: int,
    *,
    fence: Callable = no_fence,
    sum_fence: Callable = lax.optimization_barrier,
    h_axes: MeshAxes = (),
) -> Arrays:
    """Normalise `x`, or the sum of (23), or the product of (41), by terms (1) to (4), and add by (30).

    The results are y, total and the statistics. sum_fence: without one XLA leaves out the sum's conversion to 16 bits
    on a GPU.
    """
    if norm.both_sides:
        one = functools.partial(forward, fence=fence, sum_fence=sum_fence, h_axes=h_axes)
        return forward_of_two(operands, norm, dtypes, batch_dims, one, sum_fence)
    x, residual, added = operands.x, operands.residual, operands.added
    batch = common_batch(batch_dims, *operands)
    total, read = None, x
    if operands.x_z is not None:
        read = Product(x, operands.x_z)  # (41)
    if residual is not None:
        total_dtype = jnp.promote_types(x.dtype, residual.dtype)
        dtype = compute_dtype(total_dtype)
        total = apply_gate(branch(operands, norm, dtype), operands) + residual.astype(dtype)  # (23)
        read = total = sum_fence(_with_digits_of(total, total_dtype).astype(total_dtype))
    keep = dtypes.mean is not None or dtypes.rstd is not None
    how: dict[str, Any] = {"keep": keep, "fence": fence, "h_axes": h_axes}
    y, mean, rstd = normalise(read, operands.scale, operands.offset, norm, **how)
    if operands.z is not None:
        y = wide(Product(y, operands.z))  # (42)
    if added is not None:
        dtype = jnp.promote_types(y.dtype, added.dtype)
        y = y.astype(dtype) + added.astype(dtype)  # (30)
        y = y if dtypes.y is None or dtypes.y in LARGEST_EXPONENT else _with_digits_of(y, dtypes.y)
    made = in_eight_bits(y, operands, norm, dtypes)
    return in_dtypes(made._replace(total=total, mean=mean, rstd=rstd), dtypes, batch)


def in_dtypes(arrays: Arrays, dtypes: Arrays, batch: tuple[int, ...]) -> Arrays:
    """The arrays that are wanted, in their dtypes, and with all of vmap's axes."""
    wanted = dtypes.present().items()
    return Arrays(**{name: with_batch(getattr(arrays, name), batch).astype(dtype) for name, dtype in wanted})


def forward_of_two(
    operands: Arrays,
    norm: Norm,
    dtypes: Arrays,
    batch_dims: int,
    forward: Callable[..., Arrays],
    sum_fence: Callable = lax.optimization_barrier,
) -> Arrays:
    """Terms (31) to (33) by two calls of `forward`, a norm's."""
    both, norm = norm, dataclasses.replace(norm, both_sides=False, blocks="")
    batch = common_batch(batch_dims, *operands)
    total_dtype = jnp.promote_types(operands.x.dtype, operands.residual.dtype)
    wide = compute_dtype(total_dtype)
    of_x = compute_dtype(operands.x.dtype).name
    if operands.gate is not None:  # XLA makes the branch where it multiplies and adds: written out it is in float32
        in_front = forward(Arrays(x=operands.x), norm, Arrays(rstd=of_x), batch_dims)  # (31)
        u = operands._replace(x_rstd=in_front.rstd)
        total = apply_gate(branch(u, both, wide), operands) + operands.residual.astype(wide)  # (32)
        total = _with_digits_of(total, total_dtype).astype(total_dtype)
    else:
        summands = Arrays(x=operands.x, scale=operands.x_scale, added=operands.residual)
        wanted = Arrays(y=total_dtype.name, rstd=dtypes.x_rstd)
        in_front = forward(summands, norm, wanted, batch_dims)  # (31), (32)
        total = in_front.y
    # Without a fence XLA may leave out the rounding to 16 bits and norm the unrounded sum.
    total = sum_fence(total)  # (33)
    behind, wanted = Arrays(), dtypes._replace(total=None, x_rstd=None)
    if jax.tree.leaves(wanted):
        of_total = operands.only(("scale", "y_scale"))._replace(x=total)
        behind = forward(of_total, dataclasses.replace(norm, blocks=both.blocks), wanted, batch_dims)
    behind = behind._replace(total=total, x_rstd=in_front.rstd)
    return in_dtypes(behind, dtypes, batch)


forward_cpu = functools.partial(forward, fence=lax.optimization_barrier)
forward_tpu = functools.partial(forward, sum_fence=no_fence)
