"""Launchers of the norm kernels: N-D operands in, grids out. The signatures are those of `jln._xla.layer_norm`, and
one argument more: the chip to launch for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jln._triton import config, tuning
from jln._triton import layer_norm_kernels as kernels
from jln._triton.launch import launch


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """`[*batch, *lead, H, *inner]` as the kernels' `[groups, rows, H]`, a row's elements `inner` apart."""

    shape: tuple[int, ...]
    axis: int
    batch: tuple[int, ...]
    grouped: bool

    @property
    def h(self) -> int:
        return self.shape[self.axis]

    @property
    def inner(self) -> int:
        return math.prod(self.shape[len(self.shape) + self.axis + 1 :])

    @property
    def groups(self) -> int:
        return math.prod(self.batch) if self.grouped else 1

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // (self.h * self.groups)

    def tiles(self, tile: config.Tile) -> int:
        """Tiles of rows in a group; as `_tiles` in the kernels."""
        if self.inner == 1:
            return config.ceil_div(self.rows, tile.rows)
        return self.rows // self.inner * config.ceil_div(self.inner, tile.rows)

    def programs(self, tile: config.Tile) -> int:
        """One for each tile of rows. Raises ValueError where no grid has so many."""
        programs = self.groups * self.tiles(tile)
        if programs >= 2**31:
            raise ValueError(
                f"x of shape {self.shape} takes {programs} programs, and a GPU's grid has fewer than {2**31}: "
                "use implementation='xla'"
            )
        return programs

    def chunks(self, tile: config.Tile) -> int:
        return config.ceil_div(self.h, tile.columns)

    def like_rows(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, dtype)

    def like_statistics(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        axis = len(self.shape) + self.axis
        return jax.ShapeDtypeStruct((*self.shape[:axis], 1, *self.shape[axis + 1 :]), dtype)

    def like_parameters(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        axis, batch = len(self.shape) + self.axis, len(self.batch)
        shape = tuple(n if i < batch or i == axis else 1 for i, n in enumerate(self.shape))
        return jax.ShapeDtypeStruct(shape, dtype)


def _geometry(
    row_operands: Sequence[jax.Array | None],
    parameters: Sequence[jax.Array | None],
    axis: int,
    batch_dims: int,
    per_example_gradients: bool,
) -> _Geometry:
    """Batch axes on which no operand is shared, no parameter varies and no sum is kept are rows like any other.

    Raises ValueError where a row is too long for the kernels' 32-bit numbers of columns.
    """
    present = [a for a in (*row_operands, *parameters) if a is not None]
    batch = jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in present))
    x = next(a for a in row_operands if a is not None)
    shape = batch + x.shape[batch_dims:]
    if shape[axis] >= config.LONGEST_ROW:
        raise ValueError(
            f"x of shape {x.shape} is normalised over {shape[axis]} elements, and the Triton kernels take fewer than "
            f"{config.LONGEST_ROW}: use implementation='xla'"
        )
    plain = all(a is None or a.shape[:batch_dims] == batch for a in row_operands) and all(
        a is None or math.prod(a.shape[:batch_dims]) == 1 for a in parameters
    )
    return _Geometry(shape, axis, batch, grouped=per_example_gradients or not plain)


def _shared(operands: Sequence[jax.Array | None], geometry: _Geometry) -> tuple[int, list[jax.Array | None]]:
    """The kernels' SHARED mask for these operands. One that is shared over some batch axes and not over others is
    written out over all of them.
    """
    mask, ready = 0, []
    for i, operand in enumerate(operands):
        if operand is not None and geometry.grouped:
            batch = operand.shape[: len(geometry.batch)]
            if batch != geometry.batch and math.prod(batch) == 1:
                mask |= 1 << i
            elif batch != geometry.batch:
                operand = jnp.broadcast_to(operand, geometry.batch + operand.shape[len(batch) :])
        ready.append(operand)
    return mask, ready


def _moved(*operands: jax.Array | jax.ShapeDtypeStruct | None) -> tuple[int, bool]:
    """The widest element's bytes, and whether there are several dtypes."""
    dtypes = {a.dtype for a in operands if a is not None}
    return max(d.itemsize for d in dtypes), len(dtypes) > 1


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    offset: jax.Array | None,
    *,
    axis: int,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    batch_dims: int,
    chip: config.Chip,
    y_dtype: DTypeLike | None = None,
    wanted: Sequence[str] = ("y", "total", "mean", "rstd"),
) -> tuple[jax.Array | None, ...]:
    """-> (y, total, mean, rstd), those that are wanted; y in x's dtype or in `y_dtype`"""
    g = _geometry((x, residual), (scale, offset), axis, batch_dims, per_example_gradients=False)
    total = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
    compute = jnp.promote_types(total, jnp.float32)
    y = g.like_rows(y_dtype or x.dtype)
    tile = tuning.forward(g.h, g.inner, *_moved(x, residual, y), chip)
    shared, operands = _shared((x, residual, scale, offset), g)
    wants_y, wants_total = "y" in wanted, residual is not None and "total" in wanted
    save_statistics = "mean" in wanted or "rstd" in wanted
    y, added, mean, rstd = launch(
        kernels.forward_kernel,
        [*operands, g.rows],
        [
            y if wants_y else None,
            g.like_rows(total) if wants_total else jax.ShapeDtypeStruct((0,), total),  # it is rounded all the same
            g.like_statistics(compute) if save_statistics and subtract_mean else None,
            g.like_statistics(compute) if save_statistics else None,
        ],
        programs=g.programs(tile),
        tile=tile,
        chip=chip,
        compute=compute,
        H=g.h,
        INNER=g.inner,
        SHARED=shared,
        HAS_RESIDUAL=residual is not None,
        HAS_SCALE=scale is not None,
        HAS_OFFSET=offset is not None,
        SUBTRACT_MEAN=subtract_mean,
        ZERO_CENTERED=zero_centered_scale,
        WANTS_Y=wants_y,
        WANTS_TOTAL=wants_total,
        SAVE_STATISTICS=save_statistics,
        EPSILON=epsilon,
    )
    return y, added if wants_total else None, mean if "mean" in wanted else None, rstd if "rstd" in wanted else None


def backward(
    dy: jax.Array,
    dtotal: jax.Array | None,
    total: jax.Array | None,
    scale: jax.Array | None,
    mean: jax.Array | None,
    rstd: jax.Array | None,
    *,
    axis: int,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    batch_dims: int,
    doffset_dtype: DTypeLike | None,
    chip: config.Chip,
    wanted: Sequence[str] = ("dx", "dscale", "doffset"),
) -> tuple[jax.Array | None, ...]:
    """-> (dx, dscale, doffset), those that are wanted; total and rstd may be None where none but doffset is"""
    del epsilon  # it is in rstd
    if not {"dx", "dscale"} & {*wanted}:
        batch = jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in (dy, total, mean, rstd) if a is not None))
        return None, None, None if doffset_dtype is None else _doffset(dy, axis, batch, doffset_dtype)
    assert total is not None and rstd is not None
    options = _Backward(axis, subtract_mean, zero_centered_scale, batch_dims, doffset_dtype, None, wanted, chip)
    return _backward(dy, dtotal, total, scale, None, mean, rstd, options)[:3]


def backward_and_forward(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    mean: jax.Array | None,
    rstd: jax.Array,
    *,
    subtract_mean: bool,
    zero_centered_scale: bool,
    batch_dims: int,
    y_dtype: DTypeLike,
    chip: config.Chip,
    wanted: Sequence[str] = ("dx", "dscale", "doffset", "y"),
) -> tuple[jax.Array | None, ...]:
    """-> (dx, dscale, doffset, y) over the last axis, those that are wanted, dx or dscale among them: y is the norm's
    output once more, from the same read of x. The others are bit for bit the same without it.
    """
    doffset_dtype = None if offset is None else offset.dtype
    options = _Backward(-1, subtract_mean, zero_centered_scale, batch_dims, doffset_dtype, y_dtype, wanted, chip)
    return _backward(dy, None, x, scale, offset, mean, rstd, options)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The static arguments of `_backward`; `y_dtype` None where there can be no y."""

    axis: int
    subtract_mean: bool
    zero_centered_scale: bool
    batch_dims: int
    doffset_dtype: DTypeLike | None
    y_dtype: DTypeLike | None
    wanted: Sequence[str]
    chip: config.Chip


def _backward(
    dy: jax.Array,
    dtotal: jax.Array | None,
    total: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    mean: jax.Array | None,
    rstd: jax.Array,
    options: _Backward,
) -> tuple[jax.Array | None, ...]:
    """-> (dx, dscale, doffset, y); `offset` is used only for y"""
    chip, subtract_mean = options.chip, options.subtract_mean
    y_dtype = options.y_dtype
    wants_dx = "dx" in options.wanted
    dscale_dtype = scale.dtype if scale is not None and "dscale" in options.wanted else None
    doffset_dtype = options.doffset_dtype if "doffset" in options.wanted else None
    wants_dscale, wants_doffset = dscale_dtype is not None, doffset_dtype is not None
    wants_y = y_dtype is not None and "y" in options.wanted
    rows = (dy, dtotal, total, mean, rstd)
    g = _geometry(rows, (scale, offset), options.axis, options.batch_dims, wants_dscale or wants_doffset)
    compute = rstd.dtype
    y = None if y_dtype is None else g.like_rows(y_dtype)
    plan = tuning.backward(g.h, g.inner, *_moved(dy, dtotal, total, y), y is not None, chip)
    scale = scale if wants_dx or wants_y else None
    shared, operands = _shared((dy, dtotal, total, scale, mean, rstd, offset if wants_y else None), g)
    switches = {
        "chip": chip,
        "compute": compute,
        "H": g.h,
        "INNER": g.inner,
        "HAS_SCALE": scale is not None,
        "SUBTRACT_MEAN": subtract_mean,
        "ZERO_CENTERED": options.zero_centered_scale,
    }

    c1 = c2 = None
    sums_tile = plan.sums if wants_dx else None
    if sums_tile is not None:
        sums_shared, sums_operands = _shared((dy, total, scale, mean, rstd), g)
        c1, c2 = launch(
            kernels.row_sums_kernel,
            [*sums_operands, g.rows],
            [g.like_statistics(compute) if subtract_mean else None, g.like_statistics(compute)],
            programs=g.programs(sums_tile),
            tile=sums_tile,
            SHARED=sums_shared,
            **switches,
        )

    tile, chunks = plan.tile, g.chunks(plan.tile)
    programs = chip.sms * tile.programs_per_sm // (g.groups * chunks)
    programs = max(1, min(programs, g.tiles(tile)))
    if y_dtype is not None:  # as few as keep memory busy, and of these as few as make the same number of trips
        programs = min(programs, config.busy_programs(tile, total.dtype.itemsize + dy.dtype.itemsize, chip))
        programs = config.ceil_div(g.tiles(tile), config.ceil_div(g.tiles(tile), programs))
    # A program that owns whole rows has read its dy before it writes y. (None equals np.dtype("float64"), hence `y`.)
    in_place = {0: 3} if wants_y and y is not None and y.dtype == dy.dtype and chunks == 1 and not shared & 1 else {}
    gradients = [
        g.like_parameters(dscale_dtype) if dscale_dtype is not None else None,
        g.like_parameters(doffset_dtype) if doffset_dtype is not None else None,
    ]
    # One buffer for the shares of both: XLA finds room for all of it in the memory of dkernel, and would for one only.
    one_buffer = programs > 1 and wants_dscale and wants_doffset
    partial = jax.ShapeDtypeStruct((2 if one_buffer else 1, g.groups, programs, g.h), compute)
    shares = [None if a is None else partial for a in gradients] if programs > 1 else gradients
    dx, dscale, doffset, y = launch(
        kernels.backward_kernel,
        [*operands, c1, c2, g.rows, programs],
        [
            g.like_rows(total.dtype) if wants_dx else None,
            *([partial, None] if one_buffer else shares),
            y if wants_y else None,
        ],
        programs=g.groups * programs * chunks,
        tile=tile,
        in_place=in_place,
        SHARED=shared,
        HAS_DTOTAL=dtotal is not None,
        HAS_SUMS=sums_tile is not None,
        HAS_OFFSET=wants_y and offset is not None,
        WANTS_DX=wants_dx,
        WANTS_DSCALE=wants_dscale,
        WANTS_DOFFSET=wants_doffset,
        WANTS_Y=wants_y,
        ONE_BUFFER=one_buffer,
        **switches,
    )
    if programs > 1 and (wants_dscale or wants_doffset):
        tile = config.reduce_tile(g.h)
        dscale, doffset = launch(
            kernels.reduce_kernel,
            [dscale, doffset, programs],
            gradients,
            programs=g.groups * g.chunks(tile),
            tile=tile,
            chip=chip,
            compute=compute,
            H=g.h,
            WANTS_DSCALE=wants_dscale,
            WANTS_DOFFSET=wants_doffset,
            ONE_BUFFER=one_buffer,
        )
    return dx, dscale, doffset, y


def _doffset(dy: jax.Array, axis: int, batch: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """doffset alone, of which XLA makes one read of `dy`: with the rank of `dy`, 1 on the axes of rows."""
    ndim, batch_dims = dy.ndim, len(batch)
    shape = [n if i < batch_dims or i == ndim + axis else 1 for i, n in enumerate(dy.shape)]
    if axis == -1:
        sums = column_sums(dy.reshape(*dy.shape[:batch_dims], -1, dy.shape[-1]), dtype)
    else:
        rows = [i for i in range(batch_dims, ndim) if i != ndim + axis]
        sums = jnp.sum(dy.astype(_sum_dtype(dy, dtype)), axis=rows).astype(dtype)
    return jnp.broadcast_to(sums.reshape(shape), (*batch, *shape[batch_dims:]))


# Rows that are added up at once. XLA alone would leave a share for every 64 to 128: 6 of the 1720 MB that
# (8192, 4096, 12288) may move, where these are 0.4; and with fewer groups than 8192 rows make there would be too few
# programs for the chip.
_GROUP = 2048


def column_sums(a: jax.Array, dtype: DTypeLike) -> jax.Array:
    """[*batch, rows, C] -> [*batch, C], added in float32 (float64 for float64, or for a result in it).

    By XLA, which does it in the kernel that makes `a` where that is its own, as the derivative of an activation: no
    kernel of ours would be worth the pass over `a` that it needs.
    """
    return jnp.sum(column_shares(a, dtype), axis=-2).astype(dtype)


def column_shares(a: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The sums of some rows each, for whoever adds them up: [*batch, rows, C] -> [*batch, shares, C]."""
    *batch, rows, columns = a.shape
    a = a.astype(_sum_dtype(a, dtype))
    if rows > _GROUP and rows % _GROUP == 0:
        # Two sums without the barrier are one to XLA.
        return jax.lax.optimization_barrier(jnp.sum(a.reshape(*batch, rows // _GROUP, _GROUP, columns), axis=-2))
    return jnp.sum(a, axis=-2, keepdims=True)


def _sum_dtype(a: jax.Array, result: DTypeLike) -> jnp.dtype:
    return jnp.promote_types(jnp.promote_types(a.dtype, jnp.float32), result)
