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

With a residual r behind the norm, its cotangent being dy:

    (30) y = x_hat * s + b + r

Forward mode. From the same two dependencies, with primed values for tangents (t_mh is that of x_mh),

    (18) x_hat' = rstd * (t - (1/H) sum_h t - x_hat * (1/H) sum_h t * x_hat)   (no first sum for RMSNorm)
    (19) y'     = x_hat' * s + x_hat * s' + b' + r'     (the last where r is behind the norm)

With a residual r the row is a sum, rounded to its dtype before it is normalised, and an output too. Its parts are the
branch x, its bias e (0 when absent) and the gate w (1 when absent), of H elements or one value a row:

    (23) total = r + w * (x + e)

Its own cotangent is added to (9), and the sum d is that of the residual. (23) is linear in each of its parts:

    (24) dresidual = d
    (25) dx        = w * d
    (26) dx_bias_h = sum_m dx_mh
    (27) dgate     = d * (x + e), summed over what shares a value of the gate: the rows, or a row's elements

    (28) total' = r' + w * (x' + e') + w' * (x + e)        the t of (18)

With a gate z, u = silu(z) multiplies what is normalised or the norm's result; there is no offset then:

    (40) u     = z / (1 + exp(-z)),   its derivative u' = (1 + u * exp(-z)) / (1 + exp(-z))
    (41) total = x * u                in the compute dtype, not rounded: of it (1) to (4)     (the gate before the norm)
    (42) y     = (x_hat * s) * u                                                              (the norm before the gate)

By (42) the cotangent of the norm's result, which (6) to (9) call dy, is dy * u; by (41) that of x is d * u:

    (43) dz = dy * (x_hat * s) * u'                                                           (the norm before the gate)
    (44) dx = d * u,   dz = d * x * u'                                                        (the gate before the norm)
    (45) t  = x' * u + x * u' * z'    the t of (18)                                           (the gate before the norm)
    (46) y' = (19) * u + (x_hat * s) * u' * z'                                                (the norm before the gate)

Shapes are those of `jln._junction.signature`. A result is in the dtype that `dtypes` names for it, and is not computed
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
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jln._junction.signature import Branch, Cotangents, Gradients, Norm, Operands, Outcome, Results, Saved

_MANY_ROWS = 4096

MeshAxes = tuple[str, ...]


def no_fence(operands: Any) -> Any:
    return operands


def _in_one_loop(x: Any, axis: int, fence: Callable) -> bool:
    """True where every result computes its own statistics, in one loop."""
    x = x.a if isinstance(x, _Product) else x
    size = math.prod(x.shape)  # in an export with symbolic shapes not an int, and nothing is known
    return fence is not no_fence and isinstance(size, int) and size >= _MANY_ROWS * x.shape[axis]


class _Product(NamedTuple):
    """The product a * silu(z), made again wherever it is read: it is no array that XLA might write."""

    a: Array
    z: Array


def compute_dtype(dtype: DTypeLike) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _silu(z: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Term (40): silu of z, and its derivative."""
    z = z.astype(dtype)
    share = lax.logistic(z)
    u = z * share
    return u, share + u * (1 - share)


def _wide(a: Array | _Product, dtype: DTypeLike | None = None) -> Array:
    """The array, or the product's value, in `dtype`; by default in the compute dtype."""
    given = a.a if isinstance(a, _Product) else a
    wide = given.astype(compute_dtype(given.dtype) if dtype is None else dtype)
    return wide * _silu(a.z, wide.dtype)[0] if isinstance(a, _Product) else wide


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


def _branch(branch: Branch, dtype: DTypeLike) -> Array:
    """The term of (23) that is added to the residual, in the compute dtype."""
    x, x_bias, gate, row_gate = branch
    wide = x.astype(dtype)
    if x_bias is not None:
        wide = wide + x_bias.astype(dtype)
    return _gated(wide, gate, row_gate)


def _gated(a: Array, gate: Array | None, row_gate: Array | None) -> Array:
    """Term (25): `a` times the gate."""
    for factor in (gate, row_gate):
        if factor is not None:
            a = a * factor.astype(a.dtype)
    return a


def _effective_scale(scale: Array | None, dtype: DTypeLike, norm: Norm) -> Array | float:
    """The factor s of (4)."""
    if scale is None:
        return 1.0
    return 1.0 + scale.astype(dtype) if norm.switches.zero_centered_scale else scale.astype(dtype)


def _centered(x: Array | _Product, mean: Array | None) -> Array:
    """The difference x - mean in the compute dtype."""
    wide = _wide(x)
    return wide if mean is None else wide - mean


def scaled(x: Any, scale: Array | None, offset: Array | None, mean: Array | None, rstd: Array, norm: Norm) -> Array:
    """Terms (3) and (4), in the compute dtype."""
    y = _centered(x, mean) * rstd * _effective_scale(scale, rstd.dtype, norm)
    return y if offset is None else y + offset.astype(rstd.dtype)


def _over_parts(mean: Array, h_axes: MeshAxes) -> Array:
    """The mean over all of H, from the mean over this device's part of H."""
    return lax.pmean(mean, h_axes) if h_axes else mean


def _statistics(
    x: Any, norm: Norm, fence: Callable = no_fence, h_axes: MeshAxes = ()
) -> tuple[Any, Array | None, Array]:
    """Terms (1) and (2). Returns (x, mean, rstd), each of them fenced."""
    mean = None
    if norm.switches.subtract_mean:
        x, mean = fence((x, _over_parts(jnp.mean(_centered(x, None), norm.axis, keepdims=True), h_axes)))
    variance = _over_parts(jnp.mean(jnp.square(_centered(x, mean)), norm.axis, keepdims=True), h_axes)
    return fence((x, mean, lax.rsqrt(variance + norm.epsilon)))


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
    in_one_loop = _in_one_loop(x, norm.axis, fence)
    x, mean, rstd = _statistics(x, norm, no_fence if in_one_loop else fence, h_axes)
    y = scaled(x, scale, offset, mean, rstd, norm)
    if not keep:
        mean = rstd = None
    elif in_one_loop:  # in a loop of their own, which is dropped where the backward rule computes them again
        _, mean, rstd = _statistics(fence(x), norm, fence, h_axes)
    return y, mean, rstd


def forward(
    operands: Operands,
    norm: Norm,
    dtypes: Outcome,
    batch_dims: int,
    *,
    fence: Callable = no_fence,
    h_axes: MeshAxes = (),
) -> Outcome:
    """Normalise `x`, or the sum of (23), or the product of (41), by terms (1) to (4), and add by (30)."""
    x, residual, scale, offset, *branch, z, added = operands
    batch = common_batch(batch_dims, *operands)
    total, read = None, x
    if z is not None and not norm.switches.norm_before_gate:
        read = _Product(x, z)
    if residual is not None:
        total_dtype = jnp.promote_types(x.dtype, residual.dtype)
        dtype = compute_dtype(total_dtype)
        total = _branch(Branch(x, *branch), dtype) + residual.astype(dtype)  # (23)
        # A barrier on every platform, or XLA leaves out the conversion to 16 bits.
        read = total = lax.optimization_barrier(_with_digits_of(total, total_dtype).astype(total_dtype))
    y, mean, rstd = normalise(read, scale, offset, norm, keep=dtypes.rstd is not None, fence=fence, h_axes=h_axes)
    if z is not None and norm.switches.norm_before_gate:
        y = _wide(_Product(y, z))  # (42)
    if added is not None:
        dtype = jnp.promote_types(y.dtype, added.dtype)
        y = y.astype(dtype) + added.astype(dtype)  # (30)
        y = y if dtypes.y is None else _with_digits_of(y, dtypes.y)
    made = Outcome(y, total, mean, rstd)
    return Outcome(*(None if d is None else with_batch(a, batch).astype(d) for a, d in zip(made, dtypes, strict=True)))


def backward(
    operands: Cotangents,
    norm: Norm,
    dtypes: Gradients,
    batch_dims: int,
    *,
    fence: Callable = no_fence,
    h_axes: MeshAxes = (),
) -> Gradients:
    """Terms (5) to (9), (24) to (27), (43), (44), and (4) again for a y that is wanted.

    mean and rstd are as saved, or None to be computed here. (5) reads dy alone.
    """
    dy, dtotal, total, scale, offset, mean, rstd, *branch, z = operands
    branch = Branch(*branch)
    batch = common_batch(batch_dims, *operands)
    dtype = compute_dtype(dy.dtype if total is None else total.dtype)
    ndim = next(a.ndim for a in operands if a is not None)
    sum_over_rows = _over_rows(ndim, norm, batch_dims)
    made: dict[str, Array] = {}
    if z is not None:
        if norm.switches.norm_before_gate:
            dy = _Product(dy, z)
        elif total is not None:
            total = _Product(total, z)

    if dtypes.doffset is not None:  # (5)
        dy, total = fence((dy, total))
        made["doffset"] = sum_over_rows(_wide(dy, dtype))
    if any(d is not None for d in dtypes._replace(doffset=None)):
        assert total is not None
        if _in_one_loop(total, norm.axis, fence):
            mean = rstd = None
        elif rstd is None:
            total, mean, rstd = _statistics(total, norm, fence, h_axes)

    def x_hat_and_rstd() -> tuple[Array, Array]:
        m, r = (mean, rstd) if rstd is not None else _statistics(total, norm, h_axes=h_axes)[1:]
        return _centered(total, m) * r, r

    def mean_over_h(divided_by_h: Array) -> Array:
        return _over_parts(jnp.sum(divided_by_h, norm.axis, keepdims=True), h_axes)

    def d() -> Array:
        """The cotangent of total."""
        x_hat, r = x_hat_and_rstd()
        s = _effective_scale(scale, dtype, norm)
        g = _wide(dy, dtype) * s
        g_over_h = _wide(dy, dtype) * (s / x_hat.shape[norm.axis])
        d = g - x_hat * mean_over_h(g_over_h * x_hat)  # (8)
        if norm.switches.subtract_mean:
            d = d - mean_over_h(g_over_h)  # (7)
        d = r * d  # (9)
        return d if dtotal is None else d + dtotal.astype(dtype)

    if dtypes.dscale is not None:  # (6)
        dy, total, mean, rstd = fence((dy, total, mean, rstd))
        x_hat, _ = x_hat_and_rstd()
        made["dscale"] = sum_over_rows(_wide(dy, dtype) * x_hat)

    if dtypes.y is not None:  # (4)
        dy, total, mean, rstd, scale = fence((dy, total, mean, rstd, scale))
        x_hat, _ = x_hat_and_rstd()
        y = x_hat * _effective_scale(scale, dtype, norm)
        made["y"] = y if offset is None else y + offset.astype(dtype)

    if dtypes.dz is not None:
        dy, total, mean, rstd, scale = fence((dy, total, mean, rstd, scale))
        if isinstance(dy, _Product):  # (43)
            x_hat, _ = x_hat_and_rstd()
            by, slope = dy.a.astype(dtype) * _effective_scale(scale, dtype, norm), _silu(dy.z, dtype)[1]
            made["dz"] = by * x_hat * slope
        else:  # (44)
            made["dz"] = d() * total.a.astype(dtype) * _silu(total.z, dtype)[1]

    for name in _OF_SUM:
        if getattr(dtypes, name) is not None:
            dy, total, mean, rstd, scale = fence((dy, total, mean, rstd, scale))
            made[name] = _of_sum(name, d(), branch, norm, sum_over_rows, h_axes)
    if "dx" in made and isinstance(total, _Product):
        made["dx"] = _wide(_Product(made["dx"], total.z))  # (44)
    return _as_wanted(made, dtypes, batch)


# dx comes last, so that its buffer can be that of a dead total.
_OF_SUM = ("dx_bias", "dgate", "drow_gate", "dresidual", "dx")


def _of_sum(name: str, d: Array, branch: Branch, norm: Norm, sum_over_rows: Callable, h_axes: MeshAxes) -> Array:
    """One of terms (24) to (27), from the cotangent of total."""
    if name == "dresidual":
        return d
    if name in ("dgate", "drow_gate"):
        of_elements = d * _branch(branch._replace(gate=None, row_gate=None), d.dtype)
        if name == "dgate":
            return sum_over_rows(of_elements)
        share = jnp.sum(of_elements, norm.axis, keepdims=True)
        return lax.psum(share, h_axes) if h_axes else share
    dx = _gated(d, branch.gate, branch.row_gate)
    return dx if name == "dx" else sum_over_rows(dx)


def of_total_alone(dtotal: Array, branch: Branch, norm: Norm, dtypes: Gradients, batch_dims: int) -> Gradients:
    """Terms (24) to (27) where y was not used: from the total's own cotangent."""
    batch = common_batch(batch_dims, dtotal, *branch)
    sum_over_rows = _over_rows(dtotal.ndim, norm, batch_dims)
    d = dtotal.astype(compute_dtype(dtotal.dtype))
    wanted = [name for name in _OF_SUM if getattr(dtypes, name) is not None]
    return _as_wanted({n: _of_sum(n, d, branch, norm, sum_over_rows, ()) for n in wanted}, dtypes, batch)


def _over_rows(ndim: int, norm: Norm, batch_dims: int) -> Callable[[Array], Array]:
    """A function that sums over the rows, but not over the examples."""
    others = {*norm.axes_of_examples(ndim, batch_dims), ndim + norm.axis}
    rows = [i for i in range(ndim) if i not in others]
    return functools.partial(jnp.sum, axis=rows, keepdims=True)


def _as_wanted(made: dict[str, Array], dtypes: Gradients, batch: tuple[int, ...]) -> Gradients:
    named = dtypes._asdict().items()
    return Gradients(**{n: None if d is None else with_batch(made[n], batch).astype(d) for n, d in named})


def tangent(operands: tuple[Operands, Saved], norm: Norm, dtypes: Results, batch_dims: int) -> Results:
    """Terms (18), (19), (28), (45) and (46), linear in the tangents, of which those that are None are zero."""
    tangents, (total, scale, mean, rstd, branch, z) = operands
    batch = common_batch(batch_dims, *tangents, total, scale, mean, rstd, *branch, z)
    dtype = rstd.dtype
    u, slope = (None, None) if z is None else _silu(z, dtype)
    if z is None or norm.switches.norm_before_gate:
        x_hat = _centered(total, mean) * rstd
        moves = [*_gated_tangents(tangents, branch, dtype)]
    else:
        x_hat = _centered(_Product(total, z), mean) * rstd
        pairs = ((tangents.x, u), (tangents.z, total.astype(dtype) * slope))
        moves = [a.astype(dtype) * factor for a, factor in pairs if a is not None]  # (45)
    dy, dtotal = jnp.zeros_like(x_hat), jnp.zeros_like(total)
    if moves:
        t = functools.reduce(jnp.add, moves)
        dtotal = jnp.broadcast_to(t, jnp.broadcast_shapes(t.shape, total.shape)).astype(total.dtype)
        dy = t - x_hat * jnp.mean(t * x_hat, norm.axis, keepdims=True)
        if norm.switches.subtract_mean:
            dy = dy - jnp.mean(t, norm.axis, keepdims=True)
        dy = dy * rstd * _effective_scale(scale, dtype, norm)
    if tangents.scale is not None:
        dy = dy + x_hat * tangents.scale.astype(dtype)
    if tangents.offset is not None:
        dy = dy + tangents.offset.astype(dtype)
    if u is not None and norm.switches.norm_before_gate:  # (46)
        dy = dy * u
        if tangents.z is not None:
            dy = dy + x_hat * _effective_scale(scale, dtype, norm) * slope * tangents.z.astype(dtype)
    if tangents.added is not None:
        wide = jnp.promote_types(dtype, tangents.added.dtype)
        dy = dy.astype(wide) + tangents.added.astype(wide)
    dtotal = None if dtypes.total is None else with_batch(dtotal, batch)
    return Results(with_batch(dy, batch).astype(dtypes.y), dtotal)


def _gated_tangents(tangents: Operands, branch: Branch, dtype: DTypeLike) -> Iterator[Array]:
    """The terms of (28)."""
    for a in (tangents.x, tangents.x_bias):
        if a is not None:
            yield _gated(a.astype(dtype), branch.gate, branch.row_gate)
    for a in (tangents.gate, tangents.row_gate):
        if a is not None:
            yield a.astype(dtype) * _branch(branch._replace(gate=None, row_gate=None), dtype)
    if tangents.residual is not None:
        yield tangents.residual.astype(dtype)


forward_cpu = functools.partial(forward, fence=lax.optimization_barrier)
backward_cpu = functools.partial(backward, fence=lax.optimization_barrier)
