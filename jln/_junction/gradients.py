"""The junction in plain jnp: its backward rule, by the terms of `jln._junction.formulas`."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import jaxlib
from jax import Array, lax
from jax.typing import DTypeLike

from jln._junction.arrays import (
    DY,
    TABLE,
    Arrays,
    Norm,
    reads_of_gradients,
    reads_of_results,
    statistics_dtypes,
    total_dtype,
)
from jln._junction.formulas import (
    MeshAxes,
    Product,
    apply_gate,
    branch,
    center,
    common_batch,
    compute_dtype,
    effective_scale,
    forward,
    in_dtypes,
    in_one_loop,
    no_fence,
    over_parts,
    silu,
    statistics,
    wide,
)


def backward(
    operands: Arrays,
    norm: Norm,
    dtypes: Arrays,
    batch_dims: int,
    *,
    fence: Callable = no_fence,
    sums_of_g: bool = False,
    h_axes: MeshAxes = (),
) -> Arrays:
    """Terms (5) to (9), (24) to (27), (43), (44), and (4) again for a y that is wanted.

    operands: dy, dtotal and what was saved; mean and rstd may be None, to be computed here. (5) reads dy alone.
    sums_of_g: take a row's sums of g and g * (x - mean), as autodiff does, and divide the sums.

    A cotangent of total that several gradients are made of goes through memory on a GPU: XLA would make it again for
    some of them, and write it wider for others.
    """
    operands = with_one_dy(operands)
    sum_fence = no_fence if sums_of_g and fence is no_fence else lax.optimization_barrier  # as of the forward rules
    written = sum_fence if fence is no_fence else no_fence
    # Over another axis than the last XLA on a GPU would write x_hat for (8), in float32.
    sums_of_g = sums_of_g or (norm.axis != -1 and fence is no_fence)
    if norm.remat:
        again = functools.partial(forward, fence=fence, sum_fence=sum_fence, h_axes=h_axes)
        operands, norm = make_again(operands, norm, dtypes, batch_dims, again)
    if norm.both_sides:
        one = functools.partial(backward, fence=fence, sums_of_g=sums_of_g, h_axes=h_axes)
        return backward_of_two(operands, norm, dtypes, batch_dims, one, written)
    dy, total, scale = operands.dy, operands.total, operands.scale
    mean, rstd = operands.mean, operands.rstd
    dtype = compute_dtype(dy.dtype if total is None else total.dtype)
    sum_over_rows = _over_rows(next(a.ndim for a in operands if a is not None), norm, batch_dims)
    sums_of_g = sums_of_g and (fence is no_fence or dtypes.scale is None)
    gradients: dict[str, Array] = {}
    if operands.z is not None:
        dy = Product(dy, operands.z)
    if operands.x_z is not None and total is not None:
        total = Product(total, operands.x_z)

    if dtypes.offset is not None:
        if total is not None:  # one array needs no fence; XLA sums a repeated number wrongly behind one
            dy, total = fence((dy, total))
        # total is not read, and so may be absent: a float64 offset's gradient is added up in float64 all the same.
        gradients["offset"] = sum_over_rows(wide(dy, jnp.promote_types(dtype, dtypes.offset)))  # (5)
    if any(d is not None for d in dtypes._replace(offset=None)):
        assert total is not None
        if in_one_loop(total, norm.axis, fence):
            mean, rstd, sums_of_g = None, None, False
        elif rstd is None:
            total, mean, rstd = statistics(total, norm, fence, h_axes)

    def x_hat_and_rstd() -> tuple[Array, Array]:
        m, r = (mean, rstd) if rstd is not None else statistics(total, norm, h_axes=h_axes)[1:]
        return center(total, m) * r, r

    def mean_over_h(divided_by_h: Array) -> Array:
        return over_parts(jnp.sum(divided_by_h, norm.axis, keepdims=True), h_axes)

    def d() -> Array:
        """The cotangent of total."""
        x_hat, r = x_hat_and_rstd()
        s = effective_scale(scale, dtype, norm)
        g, h = wide(dy, dtype) * s, x_hat.shape[norm.axis]
        if sums_of_g:
            d = g - x_hat * (r * (mean_over_h(g * center(total, mean)) / h))  # (8)
            if norm.switches.subtract_mean:
                d = d - mean_over_h(g) / h  # (7)
        else:
            g_over_h = wide(dy, dtype) * (s / h)
            d = g - x_hat * mean_over_h(g_over_h * x_hat)  # (8)
            if norm.switches.subtract_mean:
                d = d - mean_over_h(g_over_h)  # (7)
        d = r * d  # (9)
        return d if operands.dtotal is None else d + operands.dtotal.astype(dtype)

    if dtypes.scale is not None:
        dy, total, mean, rstd = fence((dy, total, mean, rstd))
        x_hat, _ = x_hat_and_rstd()
        gradients["scale"] = sum_over_rows(wide(dy, dtype) * x_hat)  # (6)

    if dtypes.y is not None:
        dy, total, mean, rstd, scale = fence((dy, total, mean, rstd, scale))
        x_hat, _ = x_hat_and_rstd()
        y = x_hat * effective_scale(scale, dtype, norm)
        gradients["y"] = y if operands.offset is None else y + operands.offset.astype(dtype)  # (4)

    if dtypes.z is not None:
        dy, total, mean, rstd, scale = fence((dy, total, mean, rstd, scale))
        x_hat, _ = x_hat_and_rstd()
        by, slope = dy.a.astype(dtype) * effective_scale(scale, dtype, norm), silu(dy.z, dtype)[1]
        gradients["z"] = by * x_hat * slope  # (43)

    if dtypes.x_z is not None:
        dy, total, mean, rstd, scale = fence((dy, total, mean, rstd, scale))
        gradients["x_z"] = d() * total.a.astype(dtype) * silu(total.z, dtype)[1]  # (44)

    of_sum = [name for name in _OF_SUM if getattr(dtypes, name) is not None]
    d_once = None
    if len(of_sum) > 1 and written is not no_fence:
        d_once = written(d().astype(dtype_in_memory(operands.total.dtype))).astype(dtype)
    for name in of_sum:
        dy, total, mean, rstd, scale = fence((dy, total, mean, rstd, scale))
        gradients[name] = _summand_gradient(name, d() if d_once is None else d_once, operands, norm, sum_over_rows)
    if "x" in gradients and isinstance(total, Product):
        gradients["x"] = wide(Product(gradients["x"], total.z))  # (44)
    return in_dtypes(Arrays(**gradients), dtypes, common_batch(batch_dims, *operands))


def add_up(cotangents: Sequence[Array]) -> Array:
    """The sum of what several products pull back.

    The sum so far is on the right: cuBLAS then adds it in its product, which XLA does not ask for on the left.
    """
    return functools.reduce(lambda sum, dz: dz + sum, cotangents)


def with_one_dy(operands: Arrays) -> Arrays:
    """The operands with dy, dy2 and dy3 added up."""
    present = [*operands.only(DY).present().values()]
    return operands if len(present) < 2 else operands._replace(dy=add_up(present), dy2=None, dy3=None)


def dtype_in_memory(dtype: DTypeLike) -> str:
    """The dtype in which a cotangent goes through memory between two steps, made of one of that dtype.

    In bfloat16 it only loses digits; in float16 values under 6e-8 would vanish, so it is written wider.
    """
    return jnp.dtype(dtype if jnp.dtype(dtype) == jnp.bfloat16 else compute_dtype(dtype)).name


def make_again(
    operands: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int, forward: Callable[..., Arrays]
) -> tuple[Arrays, Norm]:
    """Return the operands with the total and the statistics that the gradients are made of, and the norm without remat.

    forward: the norm's, by whatever computes it.
    """
    norm = dataclasses.replace(norm, remat=False)
    reads = reads_of_gradients(norm, dtypes)
    wanted = statistics_dtypes(operands, norm, reads)
    if operands.residual is not None and "total" in reads:
        wanted = wanted._replace(total=total_dtype(operands))
    made = Arrays(total=operands.x if operands.residual is None else None)
    if wanted.present():
        of_sum = operands.only(reads_of_results(wanted))
        made = made._replace(**forward(of_sum, norm, wanted, batch_dims).present())
    done = dict.fromkeys(name for name in TABLE["total"].made_of if name not in reads)
    return operands._replace(**done, **made.present()), norm


# x comes last, so that the buffer of its gradient can be that of a dead total.
_OF_SUM = ("x_bias", "gate", "residual", "x")


def _summand_gradient(name: str, d: Array, arrays: Arrays, norm: Norm, sum_over_rows: Callable) -> Array:
    """One of terms (24) to (27), from the cotangent of total."""
    if name == "residual":
        return d  # (24)
    if name == "gate":
        return sum_over_rows(d * branch(arrays, norm, d.dtype))  # (27)
    dx = apply_gate(d, arrays)
    return dx if name == "x" else sum_over_rows(dx)  # (26)


def gradients_from_total(saved: Arrays, dtotal: Array, norm: Norm, dtypes: Arrays, batch_dims: int) -> Arrays:
    """The gradients of what is in a sum where y was not used: from the total's own cotangent."""
    batch = common_batch(batch_dims, dtotal, saved.x, saved.x_bias, saved.gate)
    sum_over_rows = _over_rows(dtotal.ndim, norm, batch_dims)
    d = dtotal.astype(compute_dtype(dtotal.dtype))
    dtypes = dtypes.only(_OF_SUM)
    gradients = {name: _summand_gradient(name, d, saved, norm, sum_over_rows) for name in dtypes.present()}
    return in_dtypes(Arrays(**gradients), dtypes, batch)


def backward_of_two(
    operands: Arrays,
    norm: Norm,
    dtypes: Arrays,
    batch_dims: int,
    backward: Callable[..., Arrays],
    written: Callable = no_fence,
) -> Arrays:
    """Terms (34) to (36), and what is of the total's norm, by one or two calls of `backward`, a norm's.

    written: the fence behind a cotangent of total that goes through memory.
    """
    of_total = dtypes.only(("scale", "y"))
    pulls = any(d is not None for d in dtypes._replace(**dict.fromkeys(of_total.present())))
    wanted = of_total._replace(x=operands.total.dtype.name if pulls else None)
    behind = operands.only(("dy", "dtotal", "total", "scale", "rstd"))
    pulled = backward(behind, dataclasses.replace(norm, both_sides=False), wanted, batch_dims)  # (34)
    pulled = pulled._replace(x=written(pulled.x))
    gradients = gradients_from_branch(pulled.x, operands, norm, dtypes, batch_dims, backward)
    gradients = gradients._replace(residual=pulled.x, **pulled.only(("scale", "y")).present())
    return in_dtypes(gradients, dtypes, common_batch(batch_dims, *operands))


def gradients_from_branch(
    d: Array, arrays: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int, backward: Callable[..., Arrays]
) -> Arrays:
    """Terms (26), (27), (35) and (36) from the cotangent of total, the norm of x by a call of `backward`."""
    of_x = dataclasses.replace(norm, both_sides=False)
    wanted = Arrays(x=dtypes.x, scale=dtypes.x_scale)
    gradients = {}
    if dtypes.gate is not None:
        sum_over_rows, wide = _over_rows(d.ndim, norm, batch_dims), d.astype(compute_dtype(d.dtype))
        gradients["gate"] = _summand_gradient("gate", wide, arrays, norm, sum_over_rows)  # (27)
    if wanted.present():
        dy = d
        if arrays.gate is not None:  # in 16 bits only if they have float32's range, as a small gate would vanish
            dy = apply_gate(d.astype(compute_dtype(d.dtype)), arrays)
            dy = dy.astype(d.dtype) if d.dtype == jnp.bfloat16 else dy
        saved = Arrays(dy=dy, total=arrays.x, scale=arrays.x_scale, rstd=arrays.x_rstd)
        pulled = backward(saved.only(reads_of_gradients(of_x, wanted)), of_x, wanted, batch_dims)  # (35), (36)
        gradients |= {"x": pulled.x, "x_scale": pulled.scale}
    of_branch = ("x", "x_scale", "gate")
    batch = common_batch(batch_dims, d, *arrays.only((*of_branch, "x_rstd")))
    return in_dtypes(Arrays(**gradients), dtypes.only(of_branch), batch)


def _over_rows(ndim: int, norm: Norm, batch_dims: int) -> Callable[[Array], Array]:
    """A function that sums over the rows of each group."""
    others = {*norm.axes_of_groups(ndim, batch_dims), ndim + norm.axis}
    rows = [i for i in range(ndim) if i not in others]
    return functools.partial(jnp.sum, axis=rows, keepdims=True)


# jaxlib 0.10.2 computes `g - x * sum(g * x)` wrongly on a CPU where g repeats one row, as under a loss of means, and no
# scale's gradient reads it, too. Autodiff's sums are right, except in one loop, and take up to twice the time.
_SUMS_OF_G_ON_CPU = jaxlib.version.__version_info__[:3] == (0, 10, 2)
backward_cpu = functools.partial(backward, fence=lax.optimization_barrier, sums_of_g=_SUMS_OF_G_ON_CPU)
backward_tpu = functools.partial(backward, sums_of_g=True)
