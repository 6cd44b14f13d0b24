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
    chip: config.Chip,
    wanted: Sequence[str] = ("y", "mean", "rstd"),
) -> tuple[jax.Array | None, ...]:
    """-> (y, mean, rstd), those that are wanted

    x [*batch, *lead, H]; scale, offset [*batch, H] or None; kernel [*batch, H, N]; bias [*batch, N] or None.
    y [*batch, *lead, N]; mean, rstd [*batch, *lead, 1].
    """
    batch = _common_batch(batch_dims, x, scale, offset, kernel, bias)
    wants_y, save_statistics = "y" in wanted, "mean" in wanted or "rstd" in wanted
    if all(p is None or math.prod(p.shape[:batch_dims]) == 1 for p in (scale, offset, kernel, bias)):
        # Where every example has the same parameters, examples are rows like any other.
        kernel = kernel.reshape(kernel.shape[batch_dims:])
        scale, offset, bias = (None if p is None else p.reshape(p.shape[batch_dims:]) for p in (scale, offset, bias))
        batch_dims = 0
    fused = _fused(tuning.fused_forward, x, kernel, precision, batch_dims, chip)
    if fused is not None and wants_y:
        switches = _fused_switches(scale, kernel, subtract_mean, zero_centered_scale, chip)
        y, mean, rstd = _fused_forward(x, scale, offset, kernel, bias, fused, epsilon, save_statistics, switches)
        return y, mean if "mean" in wanted else None, rstd if "rstd" in wanted else None
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
        wanted=wanted,
        chip=chip,
        y_dtype=_product_dtype(x, kernel),
    )
    y = None
    if z is not None:
        y = _affine(_rows(z, batch_dims), kernel, bias, precision)
        y = y.reshape(*y.shape[:batch_dims], *x.shape[batch_dims:-1], y.shape[-1])
    return tuple(None if a is None else _with_batch(a, batch) for a in (y, mean, rstd))


def backward(
    dy: jax.Array,
    x: jax.Array | None,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: jax.Array,
    mean: jax.Array | None,
    rstd: jax.Array | None,
    *,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    precision: jax.lax.PrecisionLike,
    batch_dims: int,
    dbias_dtype: DTypeLike | None,
    chip: config.Chip,
    wanted: Sequence[str] = ("dx", "dscale", "doffset", "dkernel", "dbias"),
) -> tuple[jax.Array | None, ...]:
    """-> (dx, dscale, doffset, dkernel, dbias), those that are wanted, the last four not summed over the batch

    dy [*batch, *lead, N]; `dbias_dtype` None for no bias; the others as in `forward`. x, mean and rstd may be None
    where none but doffset and dbias is wanted.
    """
    batch = _common_batch(batch_dims, dy, x, scale, offset, kernel)
    dtype = dy.dtype if x is None else _product_dtype(x, kernel)
    dy_rows = _rows(dy, batch_dims).astype(dtype)
    doffset_dtype = offset.dtype if offset is not None and "doffset" in wanted else None
    dbias_dtype = dbias_dtype if "dbias" in wanted else None
    wants_dz, wants_dkernel = _wants_dz(wanted, scale), "dkernel" in wanted
    if not wants_dz and not wants_dkernel:
        sums = _doffset(dy_rows, kernel, doffset_dtype), _dbias(dy_rows, dbias_dtype)
        doffset, dbias = (None if a is None else _with_batch(a, batch) for a in sums)
        return None, None, doffset, None, dbias
    assert x is not None and rstd is not None
    fused = _fused(tuning.fused_backward, x, kernel, precision, batch_dims, chip)
    if fused is not None:
        switches = _fused_switches(scale, kernel, subtract_mean, zero_centered_scale, chip)
        return _fused_backward(dy, x, scale, offset, kernel, mean, rstd, fused, dbias_dtype, wanted, switches)

    options = {
        "subtract_mean": subtract_mean,
        "zero_centered_scale": zero_centered_scale,
        "batch_dims": batch_dims,
        "chip": chip,
    }
    row_scale, row_offset = _to_rank_of(x, scale), _to_rank_of(x, offset)
    dx = dscale = dkernel = None
    if wants_dz:
        # dz goes through memory. bfloat16 only rounds it there; in float16 what is under 6e-8 would vanish.
        dz = jnp.matmul(
            dy_rows,
            jnp.swapaxes(kernel.astype(dtype), -1, -2),
            precision=precision,
            preferred_element_type=dtype if dtype == jnp.bfloat16 else jnp.promote_types(dtype, jnp.float32),
        )
        dz = dz.reshape(*dz.shape[:batch_dims], *dy.shape[batch_dims:-1], dz.shape[-1])
        made = (*wanted, "y") if wants_dkernel else wanted
        dx, dscale, doffset, z = norm.backward_and_forward(
            dz, x, row_scale, row_offset, mean, rstd, y_dtype=dtype, wanted=made, **options
        )
        # The shares of dscale and doffset are added up first, so that dkernel's memory can hold them until then.
        z, dscale, doffset = jax.lax.optimization_barrier((z, dscale, doffset))
        dscale, doffset = (None if a is None else a.reshape(*a.shape[:batch_dims], -1) for a in (dscale, doffset))
    else:
        z, *_ = norm.forward(
            x, None, row_scale, row_offset, axis=-1, epsilon=epsilon, y_dtype=dtype, wanted=("y",), **options
        )
        doffset = _doffset(dy_rows, kernel, doffset_dtype)
    if z is not None:
        z_columns = jnp.swapaxes(_rows(z, batch_dims), -1, -2)
        dkernel = jnp.matmul(z_columns, dy_rows, precision=precision, preferred_element_type=kernel.dtype)
    gradients = dx, dscale, doffset, dkernel, _dbias(dy_rows, dbias_dtype)
    return tuple(None if a is None else _with_batch(a, batch) for a in gradients)


def _wants_dz(wanted: Sequence[str], scale: jax.Array | None) -> bool:
    return "dx" in wanted or ("dscale" in wanted and scale is not None)


def _dbias(dy_rows: jax.Array, dtype: DTypeLike | None) -> jax.Array | None:
    return None if dtype is None else norm.column_sums(dy_rows, dtype)


def _doffset(dy_rows: jax.Array, kernel: jax.Array, dtype: DTypeLike | None) -> jax.Array | None:
    """Term (15) by its second form, which needs no dz: [*batch, rows, N] and [*batch, H, N] -> [*batch, H]."""
    if dtype is None:
        return None
    dbias = norm.column_sums(dy_rows, jnp.promote_types(dy_rows.dtype, jnp.float32))
    return jnp.sum(kernel.astype(dbias.dtype) * jnp.expand_dims(dbias, -2), axis=-1).astype(dtype)


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
            BY_REGISTERS=switches["chip"].capability >= 90 and _product_dtype(x, kernel) == jnp.float32,
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
    wanted: Sequence[str],
    switches: dict[str, Any],
) -> tuple[jax.Array | None, ...]:
    """`backward` without a batch, in up to three kernels: row sums and shares of dbias, where dx is wanted; dx and
    shares of G and dscale; and what adds up the shares.
    """
    rows, (h, n) = math.prod(x.shape[:-1]), kernel.shape

    def float32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    programs, parts, splits = plan.row_programs, plan.parts, plan.splits
    wants_dx, wants_dkernel = "dx" in wanted, "dkernel" in wanted
    wants_dscale = "dscale" in wanted and scale is not None
    wants_doffset = "doffset" in wanted and offset is not None
    wants_sums = wants_doffset or dbias_dtype is not None or (wants_dkernel and offset is not None)
    c1 = c2 = dbias = None
    if wants_dx:
        c1, c2, dbias = launch(
            kernels.row_sums_kernel,
            [dy, x, scale, kernel, mean, rstd, rows, programs],
            [
                float32(parts, rows) if switches["SUBTRACT_MEAN"] else None,
                float32(parts, rows),
                float32(programs, n) if wants_sums else None,
            ],
            programs=programs * parts,
            tile=plan.row_sums,
            WANTS_DBIAS=wants_sums,
            PARTS=parts,
            **switches,
        )
    elif wants_sums:
        dbias = norm.column_shares(_rows(dy, 0), jnp.float32)
        programs = len(dbias)

    dx, g, dscale = launch(
        kernels.backward_kernel,
        [dy, x, scale, kernel, mean, rstd, c1, c2, rows, splits],
        [
            jax.ShapeDtypeStruct(x.shape, x.dtype) if wants_dx else None,
            float32(splits, h, n) if wants_dkernel else None,
            float32(splits, h) if wants_dscale else None,
        ],
        programs=splits * config.ceil_div(h, plan.backward.columns),
        tile=plan.backward,
        WANTS_DX=wants_dx,
        WANTS_DKERNEL=wants_dkernel,
        WANTS_DSCALE=wants_dscale,
        PARTS=parts,
        **switches,
    )
    if g is None and dscale is None and dbias is None:
        return dx, None, None, None, None

    dkernel, dscale, doffset, dbias = launch(
        kernels.parameters_kernel,
        [g, dscale, dbias, scale, offset, kernel, splits, programs],
        [
            jax.ShapeDtypeStruct(kernel.shape, kernel.dtype) if wants_dkernel else None,
            jax.ShapeDtypeStruct((h,), scale.dtype) if scale is not None and wants_dscale else None,
            jax.ShapeDtypeStruct((h,), offset.dtype) if offset is not None and wants_doffset else None,
            jax.ShapeDtypeStruct((n,), dbias_dtype) if dbias_dtype is not None else None,
        ],
        programs=config.ceil_div(h, plan.parameters.columns),
        tile=plan.parameters,
        HAS_OFFSET=offset is not None,
        WANTS_DKERNEL=wants_dkernel,
        WANTS_DSCALE=wants_dscale,
        WANTS_DOFFSET=wants_doffset,
        WANTS_DBIAS=dbias_dtype is not None,
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
