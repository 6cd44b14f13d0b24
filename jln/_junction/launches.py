"""Launchers of the norm kernels: N-D operands in, grids out, for the operations of `jln._junction.formulas`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jln._junction import tiles
from jln._junction.kernels import backward as backward_kernels
from jln._junction.kernels import forward as forward_kernels
from jln._junction.signature import Cotangents, Gradients, Norm, Operands, Outcome
from jln._triton.launch import launch
from jln._triton.target import Target
from jln._triton.tile import Tile, ceil_div


@dataclasses.dataclass(frozen=True)
class _Geometry:
    """The layout of rows for the kernels: `[*batch, *lead, *examples, H, *inner]` as `[groups, rows, H]`.

    The elements of a row lie `inner` apart. interleaved: the number of axes of examples that lie directly before H.
    """

    shape: tuple[int, ...]
    axis: int
    batch: tuple[int, ...]
    grouped: bool
    interleaved: int

    @property
    def h(self) -> int:
        return self.shape[self.axis]

    @property
    def inner(self) -> int:
        return math.prod(self.shape[len(self.shape) + self.axis + 1 :])

    @property
    def interleaved_groups(self) -> int:
        axis = len(self.shape) + self.axis
        return math.prod(self.shape[axis - self.interleaved : axis])

    @property
    def groups(self) -> int:
        return (math.prod(self.batch) if self.grouped else 1) * self.interleaved_groups

    @property
    def constants(self) -> dict[str, Any]:
        """The kernels' constexprs."""
        return {"H": self.h, "INNER": self.inner, "INTERLEAVED": self.interleaved_groups}

    @property
    def rows(self) -> int:
        return math.prod(self.shape) // (self.h * self.groups)

    def tiles(self, tile: Tile) -> int:
        """The number of tiles of rows in a group, the same as of `tiles_of` in the kernels."""
        if self.inner == 1:
            return ceil_div(self.rows, tile.rows)
        return self.rows // self.inner * ceil_div(self.inner, tile.rows)

    def programs(self, tile: Tile) -> int:
        """The number of programs, one for each tile of rows. Raises ValueError where no grid has so many."""
        programs = self.groups * self.tiles(tile)
        if programs >= 2**31:
            raise ValueError(
                f"x of shape {self.shape} takes {programs} programs, and a GPU's grid has fewer than {2**31}: "
                "use implementation='xla'"
            )
        return programs

    def chunks(self, tile: Tile) -> int:
        return ceil_div(self.h, tile.columns)

    def like_rows(self, dtype: DTypeLike | None) -> jax.ShapeDtypeStruct | None:
        return _shape(self.shape, dtype)

    def like_statistics(self, dtype: DTypeLike | None) -> jax.ShapeDtypeStruct | None:
        axis = len(self.shape) + self.axis
        return _shape((*self.shape[:axis], 1, *self.shape[axis + 1 :]), dtype)

    def like_parameters(self, dtype: DTypeLike | None) -> jax.ShapeDtypeStruct | None:
        axis, batch = len(self.shape) + self.axis, len(self.batch)
        own = {*range(batch), *range(axis - self.interleaved, axis + 1)}
        return _shape(tuple(n if i in own else 1 for i, n in enumerate(self.shape)), dtype)


def _shape(shape: tuple[int, ...], dtype: DTypeLike | None) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of a result; None for a result that nobody wants."""
    return None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)


def _geometry(
    row_operands: Sequence[jax.Array | None],
    parameters: Sequence[jax.Array | None],
    norm: Norm,
    batch_dims: int,
    per_example_gradients: bool,
) -> _Geometry:
    """The layout of these operands for the kernels.

    The axes of vmap, and those of examples in front, become rows like any other where no operand is shared on them, no
    parameter varies and no sum is kept.

    Raises ValueError where a row is too long for the kernels' 32-bit numbers of columns.
    """
    axis, batch_dims = norm.axis, batch_dims + norm.examples
    present = [a for a in (*row_operands, *parameters) if a is not None]
    batch = jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in present))
    x = next(a for a in row_operands if a is not None)
    shape = batch + x.shape[batch_dims:]
    if shape[axis] >= tiles.LONGEST_ROW:
        raise ValueError(
            f"x of shape {x.shape} is normalised over {shape[axis]} elements, and the Triton kernels take fewer than "
            f"{tiles.LONGEST_ROW}: use implementation='xla'"
        )
    plain = all(a is None or a.shape[:batch_dims] == batch for a in row_operands) and all(
        a is None or math.prod(a.shape[:batch_dims]) == 1 for a in parameters
    )
    return _Geometry(shape, axis, batch, grouped=per_example_gradients or not plain, interleaved=norm.interleaved)


def _shared(operands: dict[str, jax.Array | None], geometry: _Geometry) -> tuple[Any, dict[str, Any]]:
    """Return the names of the operands with one copy for all groups, None for one group, and the operands.

    An operand that is shared over some batch axes and not over others is written out over all of them.
    """
    shared, ready = [], {}
    for name, operand in operands.items():
        if operand is not None and geometry.grouped:
            batch = operand.shape[: len(geometry.batch)]
            if batch != geometry.batch and math.prod(batch) == 1:
                shared.append(name)
            elif batch != geometry.batch:
                operand = jnp.broadcast_to(operand, geometry.batch + operand.shape[len(batch) :])
        ready[name] = operand
    return tuple(shared) if geometry.grouped or geometry.interleaved else None, ready


def _moved(*operands: jax.Array | jax.ShapeDtypeStruct | None) -> tuple[int, bool]:
    """The bytes of the widest element, and whether the arrays have several dtypes."""
    dtypes = {a.dtype for a in operands if a is not None}
    return max(d.itemsize for d in dtypes), len(dtypes) > 1


# Gradients that are sums over rows.
_SUMS = ("dscale", "doffset", "dx_bias", "dgate")


def forward(operands: Operands, norm: Norm, dtypes: Outcome, batch_dims: int, target: Target) -> Outcome:
    x, residual, scale, offset, x_bias, gate, row_gate, z, added = operands
    parameters = (x_bias, gate, scale, offset)
    g = _geometry((x, residual, row_gate, z, added), parameters, norm, batch_dims, per_example_gradients=False)
    results = Outcome(
        y=g.like_rows(dtypes.y),
        total=g.like_rows(dtypes.total),
        mean=g.like_statistics(dtypes.mean),
        rstd=g.like_statistics(dtypes.rstd),
    )
    total = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
    tile = tiles.forward(g.h, g.inner, *_moved(x, residual, z, added, results.y), target)
    shared, ready = _shared(operands._asdict(), g)
    written = launch(
        target,
        forward_kernels.forward_kernel,
        {**ready, "x_scale": None, "rows": g.rows},
        {**results._asdict(), "x_rstd": None},
        programs=g.programs(tile),
        tile=tile,
        compute=jnp.promote_types(total, jnp.float32),
        **g.constants,
        SHARED=shared,
        NORM=norm.switches,
        BOTH_SIDES=False,
        EPSILON=norm.epsilon,
        TOTAL=total,
    )
    return Outcome(**{name: written[name] for name in Outcome._fields})


def backward(operands: Cotangents, norm: Norm, dtypes: Gradients, batch_dims: int, target: Target) -> Gradients:
    dy, dtotal, total, scale, offset, mean, rstd, x, x_bias, gate, row_gate, z = operands
    of_pull = dtypes._replace(dscale=None, doffset=None, y=None)
    if norm.switches.norm_before_gate:
        of_pull = of_pull._replace(dz=None)
    pulls = any(d is not None for d in of_pull)
    if not pulls and dtypes.dscale is None and dtypes.dz is None:
        return _without_pullback(operands, norm, dtypes, batch_dims, target)
    chip, compute = target.chip, rstd.dtype
    sums = tuple(name for name in _SUMS if getattr(dtypes, name) is not None)
    of_rows, parameters = (dy, dtotal, total, mean, rstd, x, row_gate, z), (scale, offset, x_bias, gate)
    g = _geometry(of_rows, parameters, norm, batch_dims, bool(sums))
    y, dx, dresidual, dz = (g.like_rows(d) for d in (dtypes.y, dtypes.dx, dtypes.dresidual, dtypes.dz))
    moved = _moved(dy, dtotal, total, x, y, dresidual, z, dz)
    more = max(0, len(sums) - 2) + sum(a is not None for a in (gate, row_gate, x, z))
    if z is not None and not norm.switches.norm_before_gate:
        more += 1  # silu(z), and what dz is made of, wait for the sums of their row
    plan = tiles.backward(g.h, g.inner, *moved, y is not None, target, has_dtotal=dtotal is not None, more=more)
    shared, ready = _shared(operands._asdict(), g)
    constants = {**g.constants, "SHARED": shared, "NORM": norm.switches}

    c1_and_c2: dict[str, Any] = {"c1": None, "c2": None}
    if plan.sums is not None and pulls:
        c1_and_c2 = launch(
            target,
            backward_kernels.row_sums_kernel,
            {**{name: ready[name] for name in ("dy", "total", "z", "scale", "mean", "rstd")}, "rows": g.rows},
            {"c1": g.like_statistics(None if mean is None else compute), "c2": g.like_statistics(compute)},
            programs=g.programs(plan.sums),
            tile=plan.sums,
            compute=compute,
            **constants,
        )

    tile, chunks = plan.tile, g.chunks(plan.tile)
    programs = chip.cores * tile.programs_per_core // (g.groups * chunks)
    programs = max(1, min(programs, g.tiles(tile)))
    if y is not None:  # as few as keep memory busy, and of these as few as make the same number of trips
        itemsize = sum(a.dtype.itemsize for a in (dy, dtotal, total) if a is not None)
        programs = min(programs, tiles.busy_programs(tile, itemsize, chip))
        programs = ceil_div(g.tiles(tile), ceil_div(g.tiles(tile), programs))
    # A program that owns whole rows has read its dy before it writes y.
    overwrites_dy = y is not None and (y.dtype, y.shape) == (dy.dtype, dy.shape) and chunks == 1
    gradients = {name: g.like_parameters(getattr(dtypes, name)) for name in _SUMS}
    drow_gate = g.like_statistics(None if dtypes.drow_gate is None else compute)
    if drow_gate is not None:
        drow_gate = jax.ShapeDtypeStruct((chunks, *drow_gate.shape), compute)
    # One buffer for all shares: XLA finds room for all of it in the memory of dkernel, and would for one only.
    shares = jax.ShapeDtypeStruct((len(sums), g.groups, programs, g.h), compute) if sums and programs > 1 else None
    written = launch(
        target,
        backward_kernels.backward_kernel,
        {**ready, **c1_and_c2, "x_scale": None, "x_rstd": None, "rows": g.rows, "programs": programs},
        {
            "dx": dx,
            "dz": dz,
            "dresidual": dresidual,
            "drow_gate": drow_gate,
            **(gradients if shares is None else dict.fromkeys(gradients)),
            "dx_scale": None,
            "shares": shares,
            "y": y,
        },
        programs=g.groups * programs * chunks,
        tile=tile,
        compute=compute,
        in_place={"dy": "y"} if overwrites_dy else {},
        SUMS=sums,
        PULLS=pulls,
        **constants,
    )
    if drow_gate is not None:
        written["drow_gate"] = jnp.sum(written["drow_gate"], axis=0).astype(dtypes.drow_gate)
    if shares is not None:
        tile = tiles.reduce_tile(g.h)
        written |= launch(
            target,
            backward_kernels.reduce_kernel,
            {"shares": written["shares"], "groups": g.groups, "programs": programs},
            {**gradients, "dx_scale": None},
            programs=len(sums) * g.groups * g.chunks(tile),
            tile=tile,
            compute=compute,
            H=g.h,
            SUMS=sums,
        )
    if y is not None and shares is not None:
        # The shares are added up first, so that the memory of what y is wanted for can hold them until then.
        made = {name: a for name, a in written.items() if a is not None and name in ("y", *sums)}
        written |= jax.lax.optimization_barrier(made)
    return Gradients(**{name: written[name] for name in Gradients._fields})


def _without_pullback(
    operands: Cotangents, norm: Norm, dtypes: Gradients, batch_dims: int, target: Target
) -> Gradients:
    """Compute doffset, which reads dy alone, and y, which does not read dy, where no other gradient is wanted."""
    batch = jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in operands if a is not None))
    doffset = y = None
    if dtypes.doffset is not None:
        doffset = _doffset(operands.dy, norm, batch_dims, dtypes.doffset)
        doffset = jnp.broadcast_to(doffset, (*batch, *doffset.shape[batch_dims:]))
    if dtypes.y is not None:
        again = Operands(operands.total, scale=operands.scale, offset=operands.offset)
        y = forward(again, norm, Outcome(dtypes.y, None, None, None), batch_dims, target).y
        y = jnp.broadcast_to(y, (*batch, *y.shape[batch_dims:]))
    return Gradients(doffset=doffset, y=y)


def _doffset(dy: jax.Array, norm: Norm, batch_dims: int, dtype: DTypeLike) -> jax.Array:
    """The sum doffset alone, for which XLA reads `dy` once: of the rank of `dy`, with 1 on the axes of rows."""
    own = {*norm.axes_of_examples(dy.ndim, batch_dims), dy.ndim + norm.axis}
    rows = [i for i in range(dy.ndim) if i not in own]
    shape = [n if i in own else 1 for i, n in enumerate(dy.shape)]
    if norm.axis == -1:  # the columns of all groups that lie interleaved side by side
        columns = math.prod(shape[dy.ndim - 1 - norm.interleaved :])
        sums = column_sums(dy.reshape(*dy.shape[: batch_dims + norm.examples], -1, columns), dtype)
    else:
        sums = jnp.sum(dy.astype(_sum_dtype(dy, dtype)), axis=rows).astype(dtype)
    return sums.reshape(shape)


# Rows that are added up at once. XLA alone would leave a share for every 64 to 128: 6 of the 1720 MB that
# (8192, 4096, 12288) may move, where these are 0.4; and with fewer groups than 8192 rows make there would be too few
# programs for the chip.
_GROUP = 2048


def column_sums(a: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Sum rows: [*batch, rows, C] -> [*batch, C], in float32 (float64 for float64, or for a result in it).

    XLA does it, in the kernel that makes `a` where that is XLA's own, as for the derivative of an activation: no kernel
    of ours would be worth the pass over `a` that it needs.
    """
    return jnp.sum(column_shares(a, dtype), axis=-2).astype(dtype)


def column_shares(a: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Sum some rows each, for another sum to add up: [*batch, rows, C] -> [*batch, shares, C]."""
    *batch, rows, columns = a.shape
    a = a.astype(_sum_dtype(a, dtype))
    if rows > _GROUP and rows % _GROUP == 0:
        # Two sums without the barrier are one to XLA.
        return jax.lax.optimization_barrier(jnp.sum(a.reshape(*batch, rows // _GROUP, _GROUP, columns), axis=-2))
    return jnp.sum(a, axis=-2, keepdims=True)


def _sum_dtype(a: jax.Array, result: DTypeLike) -> jnp.dtype:
    return jnp.promote_types(jnp.promote_types(a.dtype, jnp.float32), result)
