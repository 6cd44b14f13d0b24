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
    save_statistics: bool,
    chip: config.Chip,
    y_dtype: DTypeLike | None = None,
) -> tuple[jax.Array | None, ...]:
    """-> (y, total, mean, rstd); y in x's dtype or in `y_dtype`"""
    g = _geometry((x, residual), (scale, offset), axis, batch_dims, per_example_gradients=False)
    total = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
    compute = jnp.promote_types(total, jnp.float32)
    y = g.like_rows(y_dtype or x.dtype)
    tile = tuning.forward(g.h, g.inner, *_moved(x, residual, y), chip)
    shared, operands = _shared((x, residual, scale, offset), g)
    return tuple(
        launch(
            kernels.forward_kernel,
            [*operands, g.rows],
            [
                y,
                g.like_rows(total) if residual is not None else None,
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
            SAVE_STATISTICS=save_statistics,
            EPSILON=epsilon,
        )
    )


def backward(
    dy: jax.Array,
    dtotal: jax.Array | None,
    total: jax.Array,
    scale: jax.Array | None,
    mean: jax.Array | None,
    rstd: jax.Array,
    *,
    axis: int,
    epsilon: float,
    subtract_mean: bool,
    zero_centered_scale: bool,
    batch_dims: int,
    doffset_dtype: DTypeLike | None,
    chip: config.Chip,
) -> tuple[jax.Array | None, ...]:
    """-> (dx, dscale, doffset)"""
    del epsilon  # it is in rstd
    options = _Backward(axis, subtract_mean, zero_centered_scale, batch_dims, doffset_dtype, None, chip)
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
) -> tuple[jax.Array | None, ...]:
    """-> (dx, dscale, doffset, y) over the last axis: the norm's output once more, from the same read of x."""
    doffset_dtype = None if offset is None else offset.dtype
    options = _Backward(-1, subtract_mean, zero_centered_scale, batch_dims, doffset_dtype, y_dtype, chip)
    return _backward(dy, None, x, scale, offset, mean, rstd, options)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """The static arguments of `_backward`; `y_dtype` None for no y."""

    axis: int
    subtract_mean: bool
    zero_centered_scale: bool
    batch_dims: int
    doffset_dtype: DTypeLike | None
    y_dtype: DTypeLike | None
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
    doffset_dtype, y_dtype = options.doffset_dtype, options.y_dtype
    has_scale, has_offset = scale is not None, doffset_dtype is not None
    rows = (dy, dtotal, total, mean, rstd)
    g = _geometry(rows, (scale, offset), options.axis, options.batch_dims, has_scale or has_offset)
    compute = rstd.dtype
    y = None if y_dtype is None else g.like_rows(y_dtype)
    plan = tuning.backward(g.h, g.inner, *_moved(dy, dtotal, total, y), y is not None, chip)
    shared, operands = _shared((dy, dtotal, total, scale, mean, rstd, offset), g)
    switches = {
        "chip": chip,
        "compute": compute,
        "H": g.h,
        "INNER": g.inner,
        "HAS_SCALE": has_scale,
        "SUBTRACT_MEAN": subtract_mean,
        "ZERO_CENTERED": options.zero_centered_scale,
    }

    c1 = c2 = None
    if plan.sums is not None:
        sums_shared, sums_operands = _shared((dy, total, scale, mean, rstd), g)
        c1, c2 = launch(
            kernels.row_sums_kernel,
            [*sums_operands, g.rows],
            [g.like_statistics(compute) if subtract_mean else None, g.like_statistics(compute)],
            programs=g.programs(plan.sums),
            tile=plan.sums,
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
    in_place = {0: 3} if y is not None and y.dtype == dy.dtype and chunks == 1 and not shared & 1 else {}
    gradients = [
        g.like_parameters(scale.dtype) if scale is not None else None,
        g.like_parameters(doffset_dtype) if doffset_dtype is not None else None,
    ]
    # One buffer for the shares of both: XLA finds room for all of it in the memory of dkernel, and would for one only.
    one_buffer = programs > 1 and has_scale and has_offset
    partial = jax.ShapeDtypeStruct((2 if one_buffer else 1, g.groups, programs, g.h), compute)
    shares = [None if a is None else partial for a in gradients] if programs > 1 else gradients
    dx, dscale, doffset, y = launch(
        kernels.backward_kernel,
        [*operands, c1, c2, g.rows, programs],
        [
            g.like_rows(total.dtype),
            *([partial, None] if one_buffer else shares),
            y,
        ],
        programs=g.groups * programs * chunks,
        tile=tile,
        in_place=in_place,
        SHARED=shared,
        HAS_DTOTAL=dtotal is not None,
        HAS_SUMS=plan.sums is not None,
        HAS_OFFSET=has_offset,
        WANTS_Y=y is not None,
        ONE_BUFFER=one_buffer,
        **switches,
    )
    if programs > 1 and (has_scale or has_offset):
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
            HAS_SCALE=has_scale,
            HAS_OFFSET=has_offset,
            ONE_BUFFER=one_buffer,
        )
    return dx, dscale, doffset, y
