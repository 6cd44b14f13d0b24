"""Launchers of LayerNorm+Linear: fused kernels for few features (`config.fused_forward`, `config.fused_backward`), else
norm kernels composed with XLA's products.

The signatures are those of `jln._xla.layer_norm_linear`, and one argument more: the chip to launch for. The first
`batch_dims` axes are vmap's, of size 1 where an operand is shared. Between them and the last axis lie x's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jln._triton import config, tuning
from jln._triton import layer_norm as norm
from jln._triton import layer_norm_linear_kernels as kernels
from jln._triton.launch import launch

_Plan = TypeVar("_Plan")


def forward(
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    precision: jax.lax.PrecisionLike,
    batch_dims: int,
    save_statistics: bool,
    chip: config.Chip,
) -> tuple[jax.Array | None, ...]:
    """-> (y, mean, rstd)

    x [*batch, *lead, H]; scale, offset [*batch, H] or None; kernel [*batch, H, N]; bias [*batch, N] or None.
    y [*batch, *lead, N]; mean, rstd [*batch, *lead, 1].
    """
    batch = _common_batch(batch_dims, x, scale, offset, kernel, bias)
    if all(p is None or math.prod(p.shape[:batch_dims]) == 1 for p in (scale, offset, kernel, bias)):
        # Where every example has the same parameters, examples are rows like any other.
        kernel = kernel.reshape(kernel.shape[batch_dims:])
        scale, offset, bias = (None if p is None else p.reshape(p.shape[batch_dims:]) for p in (scale, offset, bias))
        batch_dims = 0
    fused = _fused(tuning.fused_forward, x, kernel, precision, batch_dims, chip)
    if fused is not None:
        switches = _fused_switches(scale, kernel, subtract_mean, zero_centered_scale, chip)
        return _fused_forward(x, scale, offset, kernel, bias, fused, epsilon, save_statistics, switches)
    z, _, mean, rstd = norm.forward(
        x,
        None,
        _to_rank_of(x, scale),
        _to_rank_of(x, offset),
        axis=-1,
        epsilon=epsilon,
        subtract_mean=subtract_mean,
        zero_centered_scale=zero_centered_scale,
        batch_dims=batch_dims,
        save_statistics=save_statistics,
        chip=chip,
        y_dtype=_product_dtype(x, kernel),
    )
    assert z is not None
    y = _affine(_rows(z, batch_dims), kernel, bias, precision)
    y = y.reshape(*y.shape[:batch_dims], *x.shape[batch_dims:-1], y.shape[-1])
    return tuple(None if a is None else _with_batch(a, batch) for a in (y, mean, rstd))


def backward(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    *,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    precision: jax.lax.PrecisionLike,
    batch_dims: int,
    dbias_dtype: DTypeLike | None,
    chip: config.Chip,
) -> tuple[jax.Array | None, ...]:
    """-> (dx, dscale, doffset, dkernel, dbias), the last four not summed over the batch

    dy [*batch, *lead, N]; `dbias_dtype` None for no bias; the others as in `forward`.
    """
    del epsilon  # it is in rstd
    batch = _common_batch(batch_dims, dy, x, scale, offset, kernel)
    dtype = _product_dtype(x, kernel)
    fused = _fused(tuning.fused_backward, x, kernel, precision, batch_dims, chip)
    if fused is not None:
        switches = _fused_switches(scale, kernel, subtract_mean, zero_centered_scale, chip)
        return _fused_backward(dy, x, scale, offset, kernel, mean, rstd, fused, dbias_dtype, switches)
    accumulator = jnp.promote_types(dtype, jnp.float32)
    dy_rows = _rows(dy, batch_dims).astype(dtype)
    # dz goes through memory. bfloat16 only rounds it there; in float16 what is under 6e-8 would vanish.
    dz = jnp.matmul(
        dy_rows,
        jnp.swapaxes(kernel.astype(dtype), -1, -2),
        precision=precision,
        preferred_element_type=dtype if dtype == jnp.bfloat16 else accumulator,
    )
    dz = dz.reshape(*dz.shape[:batch_dims], *dy.shape[batch_dims:-1], dz.shape[-1])
    dx, dscale, doffset, z = norm.backward_and_forward(
        dz,
        x,
        _to_rank_of(x, scale),
        _to_rank_of(x, offset),
        mean,
        rstd,
        subtract_mean=subtract_mean,
        zero_centered_scale=zero_centered_scale,
        batch_dims=batch_dims,
        y_dtype=dtype,
        chip=chip,
    )
    # The shares of dscale and doffset are added up first, so that dkernel's memory can hold them until then.
    z, dscale, doffset = jax.lax.optimization_barrier((z, dscale, doffset))
    assert z is not None
    dkernel = jnp.matmul(
        jnp.swapaxes(_rows(z, batch_dims), -1, -2), dy_rows, precision=precision, preferred_element_type=kernel.dtype
    )
    dbias = None if dbias_dtype is None else _column_sums(dy_rows, dbias_dtype)
    dscale, doffset = (None if a is None else a.reshape(*a.shape[:batch_dims], -1) for a in (dscale, doffset))
    return tuple(None if a is None else _with_batch(a, batch) for a in (dx, dscale, doffset, dkernel, dbias))


def _fused_forward(
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: jax.Array,
    bias: jax.Array | None,
    tile: config.Tile,
    epsilon: float,
    save_statistics: bool,
    switches: dict[str, Any],
) -> tuple[jax.Array | None, ...]:
    """`forward` without a batch, in one kernel."""
    rows = math.prod(x.shape[:-1])
    statistic = jax.ShapeDtypeStruct((*x.shape[:-1], 1), jnp.float32)
    return tuple(
        launch(
            kernels.forward_kernel,
            [x, scale, offset, kernel, bias, rows],
            [
                jax.ShapeDtypeStruct((*x.shape[:-1], kernel.shape[-1]), _product_dtype(x, kernel)),
                statistic if save_statistics and switches["SUBTRACT_MEAN"] else None,
                statistic if save_statistics else None,
            ],
            programs=config.ceil_div(rows, tile.rows),
            tile=tile,
            HAS_OFFSET=offset is not None,
            HAS_BIAS=bias is not None,
            SAVE_STATISTICS=save_statistics,
            EPSILON=epsilon,
            **switches,
        )
    )


def _fused_backward(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array,
    plan: config.FusedBackward,
    dbias_dtype: DTypeLike | None,
    switches: dict[str, Any],
) -> tuple[jax.Array | None, ...]:
    """`backward` without a batch, in three kernels: row sums and shares of dbias; dx and shares of G and dscale; and
    what adds up the shares.
    """
    rows, (h, n) = math.prod(x.shape[:-1]), kernel.shape

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    programs, parts, splits = plan.row_programs, plan.parts, plan.splits
    wants_dbias = offset is not None or dbias_dtype is not None
    c1, c2, dbias = launch(
        kernels.row_sums_kernel,
        [dy, x, scale, kernel, mean, rstd, rows, programs],
        [
            float32(parts, rows) if switches["SUBTRACT_MEAN"] else None,
            float32(parts, rows),
            float32(programs, n) if wants_dbias else None,
        ],
        programs=programs * parts,
        tile=plan.row_sums,
        WANTS_DBIAS=wants_dbias,
        PARTS=parts,
        **switches,
    )

    dx, g, dscale = launch(
        kernels.backward_kernel,
        [dy, x, scale, kernel, mean, rstd, c1, c2, rows, splits],
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            float32(splits, h, n),
            float32(splits, h) if scale is not None else None,
        ],
        programs=splits * config.ceil_div(h, plan.backward.columns),
        tile=plan.backward,
        PARTS=parts,
        **switches,
    )

    dkernel, dscale, doffset, dbias = launch(
        kernels.parameters_kernel,
        [g, dscale, dbias, scale, offset, kernel, splits, programs],
        [
            jax.ShapeDtypeStruct(kernel.shape, kernel.dtype),
            jax.ShapeDtypeStruct((h,), scale.dtype) if scale is not None else None,
            jax.ShapeDtypeStruct((h,), offset.dtype) if offset is not None else None,
            jax.ShapeDtypeStruct((n,), dbias_dtype) if dbias_dtype is not None else None,
        ],
        programs=config.ceil_div(h, plan.parameters.columns),
        tile=plan.parameters,
        HAS_OFFSET=offset is not None,
        HAS_BIAS=dbias_dtype is not None,
        **switches,
    )
    return dx, dscale, doffset, dkernel, dbias


# The presets of `jax.lax.DotAlgorithmPreset` that name what the fused kernels do.
_ALGORITHMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
    "float32": jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
}


def _multiplied_as_asked(precision: Any, dtype: jnp.dtype) -> bool:
    """Whether the fused kernels' products of operands of this dtype are what `precision` means on a GPU, where float32
    is multiplied in TF32 by default, and 16 bits alike at all levels.
    """
    if isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return precision == _ALGORITHMS.get(dtype.name)
    levels = precision if isinstance(precision, tuple) else (precision,)
    return dtype.itemsize == 2 or all(level in (None, jax.lax.Precision.DEFAULT) for level in levels)


def _fused(
    plan: Callable[..., _Plan | None],
    x: jax.Array,
    kernel: jax.Array,
    precision: Any,
    batch_dims: int,
    chip: config.Chip,
) -> _Plan | None:
    """What `plan` makes of these sizes; None if parameters differ over a batch or another precision is asked for."""
    dtype = _product_dtype(x, kernel)
    if batch_dims or not _multiplied_as_asked(precision, dtype):
        return None
    return plan(math.prod(x.shape[:-1]), *kernel.shape, dtype.name, chip)


def _fused_switches(
    scale: jax.Array | None,
    kernel: jax.Array,
    subtract_mean: bool,
    zero_centered_scale: bool,
    chip: config.Chip,
) -> dict[str, Any]:
    """What all fused kernels are told."""
    return {
        "chip": chip,
        "compute": jnp.float32,
        "H": kernel.shape[0],
        "N": kernel.shape[1],
        "BLOCK_N": config.features(kernel.shape[1]),
        "HAS_SCALE": scale is not None,
        "SUBTRACT_MEAN": subtract_mean,
        "ZERO_CENTERED": zero_centered_scale,
    }


def _affine(z: jax.Array, kernel: jax.Array, bias: jax.Array | None, precision: jax.lax.PrecisionLike) -> jax.Array:
    """z @ kernel + bias over [*batch, rows, H], rounded once; in bfloat16 with a bfloat16 bias, twice.

    XLA adds a 16-bit bias inside its product only if the product is rounded to 16 bits first, else it writes the
    product in float32 and reads it again: (8192, 4096, 12288) in bfloat16 moves 503 MB forward or 1309. That is
    bfloat16's price, whose range is float32's; a float16 product may overflow where y does not. A float32 bias it adds
    to the float32 product inside, if the bias is an argument of the program.
    """
    kernel = kernel.astype(z.dtype)
    if bias is None:
        return jnp.matmul(z, kernel, precision=precision)
    rounded_first = z.dtype == bias.dtype == jnp.bfloat16
    compute = z.dtype if rounded_first else jnp.promote_types(z.dtype, jnp.float32)
    y = jnp.matmul(z, kernel, precision=precision, preferred_element_type=compute)
    return (y + jnp.expand_dims(bias.astype(compute), -2)).astype(z.dtype)


# Rows that are added up at once. XLA alone would leave a share for every 64 to 128: 6 of the 1720 MB that
# (8192, 4096, 12288) may move, where these are 0.4; and with fewer groups than 8192 rows make there would be too few
# programs for the chip.
_GROUP = 2048


def _column_sums(a: jax.Array, dtype: DTypeLike) -> jax.Array:
    """[*batch, rows, C] -> [*batch, C], added in float32 (float64 for float64).

    By XLA, which does it in the kernel that makes `a` where that is its own, as the derivative of an activation: no
    kernel of ours would be worth the pass over `a` that it needs.
    """
    *batch, rows, columns = a.shape
    a = a.astype(jnp.promote_types(a.dtype, jnp.float32))
    if rows > _GROUP and rows % _GROUP == 0:
        # Two sums without the barrier are one to XLA.
        a = jax.lax.optimization_barrier(jnp.sum(a.reshape(*batch, rows // _GROUP, _GROUP, columns), axis=-2))
    return jnp.sum(a, axis=-2).astype(dtype)


def _product_dtype(x: jax.Array, kernel: jax.Array) -> jnp.dtype:
    """The dtype of the products' operands, and of y."""
    return jnp.promote_types(x.dtype, kernel.dtype)


def _rows(a: jax.Array, batch_dims: int) -> jax.Array:
    """[*batch, *lead, C] as [*batch, rows, C]."""
    return a.reshape(*a.shape[:batch_dims], math.prod(a.shape[batch_dims:-1]), a.shape[-1])


def _to_rank_of(x: jax.Array, parameter: jax.Array | None) -> jax.Array | None:
    """A parameter [*batch, H] as [*batch, 1, ..., 1, H]."""
    if parameter is None:
        return None
    ones = (1,) * (x.ndim - parameter.ndim)
    return parameter.reshape(*parameter.shape[:-1], *ones, parameter.shape[-1])


def _common_batch(batch_dims: int, *operands: jax.Array | None) -> tuple[int, ...]:
    return jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in operands if a is not None))


def _with_batch(a: jax.Array, batch: Sequence[int]) -> jax.Array:
    return jnp.broadcast_to(a, (*batch, *a.shape[len(batch) :]))
