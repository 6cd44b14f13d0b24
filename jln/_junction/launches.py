"""Launches of the norm's kernels: N-D operands in, grids out, as `jln._junction.operations` calls them."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jln._junction import formulas, tiles
from jln._junction.arrays import COLUMNS, DY, Arrays, Norm, Shape, reads_of_results, total_dtype
from jln._junction.eight_bits import LARGEST_EXPONENT
from jln._junction.formulas import forward_of_two
from jln._junction.geometry import Geometry, element_sizes, geometry_of, shared_operands, vector
from jln._junction.gradients import backward_of_two, make_again, with_one_dy
from jln._junction.kernels.backward import backward_kernel, reduce_kernel, row_sums_kernel
from jln._junction.kernels.forward import forward_kernel
from jln._triton.launch import launch
from jln._triton.target import Target
from jln._triton.tile import ceil_div


def forward(operands: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int, target: Target) -> Arrays:
    """The forward operation: one launch, or two where no tile holds the rows of a norm on both sides."""
    if dtypes.y in LARGEST_EXPONENT and not target.chip.rounds_to_eight_bits:
        return formulas.forward(operands, norm, dtypes, batch_dims)  # by XLA, which rounds in several instructions
    g = geometry_of(operands, norm, batch_dims)
    results = g.results(dtypes)
    total = jnp.dtype(total_dtype(operands))
    moved = element_sizes(operands.x, operands.residual, operands.z, operands.x_z, operands.added, results.y)
    alone = {*operands.present()} <= {"x", "residual", "scale", "offset"}
    parameters = tuple(a.dtype.itemsize for a in (operands.scale, operands.offset) if a is not None and alone)
    tile = tiles.forward(g.h, *moved, target, parameters, operands.residual is not None)
    if norm.both_sides and tile.columns < g.h:
        one = functools.partial(forward, target=target)
        return forward_of_two(operands, norm, dtypes, batch_dims, one)
    persistent = tile.stages > 1 and tile.columns >= g.h
    if persistent:  # as a chip runs at once, as many of each group
        programs = g.groups * max(1, min(g.tiles(tile), target.chip.cores * tile.programs_per_core // g.groups))
    else:
        programs = g.programs(tile)
    shared, ready = shared_operands(operands, g)
    written = launch(
        target,
        forward_kernel,
        {"a": ready, "rows": g.rows, "groups": g.groups},
        {"r": results},
        programs=programs,
        tile=tile,
        compute=jnp.promote_types(total, jnp.float32),
        H=g.h,
        HEADS=g.heads,
        VECTOR=vector(ready, results),
        SHARED=shared,
        NORM=norm.switches,
        BOTH_SIDES=norm.both_sides,
        PERSISTENT=persistent,
        BLOCKS=LARGEST_EXPONENT.get(norm.blocks),
        EPSILON=norm.epsilon,
        TOTAL=total,
    )
    return written["r"]


def backward(operands: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int, target: Target) -> Arrays:
    """The backward operation: of row sums where rows are wide, of all gradients, and of what programs share of them.

    Where no tile holds the rows of a norm on both sides, it is that of two norms.
    """
    again = functools.partial(make_again, forward=functools.partial(forward, target=target))
    if _cublas_alone():
        operands = with_one_dy(operands)
    if norm.remat and norm.both_sides:
        operands, norm = again(operands, norm, dtypes, batch_dims)
    pulls = any(d is not None for d in dtypes._replace(scale=None, offset=None, z=None, y=None))
    if not pulls and dtypes.scale is None and dtypes.z is None:
        return _without_pullback(with_one_dy(operands), norm, dtypes, batch_dims, target)
    if norm.remat and operands.residual is None:
        operands = operands._replace(total=operands.x, x=None)

    sums = tuple(name for name in COLUMNS if getattr(dtypes, name) is not None)

    def layout_and_plan(operands: Arrays, norm: Norm) -> tuple[Geometry, tiles.BackwardPlan | None]:
        g = geometry_of(operands, norm, batch_dims, bool(sums))
        return g, _backward_plan(operands, g.results(dtypes), sums, g, target)

    g, plan = layout_and_plan(operands, norm)
    if plan is None:
        one = functools.partial(backward, target=target)
        return backward_of_two(with_one_dy(operands), norm, dtypes, batch_dims, one)
    if operands.dy2 is not None and plan.sums is not None:  # each would be read twice
        operands = with_one_dy(operands)
        g, plan = layout_and_plan(operands, norm)
    if norm.remat and plan is not None and plan.sums is not None:  # no tile has a row's statistics
        operands = operands._replace(x=operands.total if operands.x is None else operands.x)
        operands, norm = again(operands, norm, dtypes, batch_dims)
        g, plan = layout_and_plan(operands, norm)
    assert plan is not None

    shared, ready = shared_operands(operands, g)
    constants = {"H": g.h, "HEADS": g.heads, "SHARED": shared, "NORM": norm.switches}
    total = total_dtype(operands) if operands.total is None else operands.total.dtype
    compute, tile, results = jnp.promote_types(total, jnp.float32), plan.tile, g.results(dtypes)
    assert plan.sums or tile.columns >= g.h or not pulls, "nobody makes c1 and c2"

    c1_and_c2: dict[str, Any] = {"c1": None, "c2": None}
    if plan.sums is not None and pulls:
        of_rows = g.results(Arrays(mean=None if operands.mean is None else compute, rstd=compute))
        read = ready.only(("dy", "total", "x_z", "z", "scale", "mean", "rstd"))
        c1_and_c2 = launch(
            target,
            row_sums_kernel,
            {"a": read, "rows": g.rows},
            {"c1": of_rows.mean, "c2": of_rows.rstd},
            programs=g.programs(plan.sums),
            tile=plan.sums,
            compute=compute,
            VECTOR=vector(read),
            **constants,
        )

    chunks = g.chunks(tile)
    programs = target.chip.cores * tile.programs_per_core // (g.groups * chunks)
    programs = max(1, min(programs, g.tiles(tile)))
    programs = ceil_div(g.tiles(tile), ceil_div(g.tiles(tile), programs))  # as few as make the same number of trips
    # A program has read the dy of its columns before it writes their y.
    overwrites_dy = results.y is not None and (results.y.dtype, results.y.shape) == (ready.dy.dtype, ready.dy.shape)
    # One buffer for all shares: XLA finds room for all of it in the memory of dkernel, and would for one only.
    shares = jax.ShapeDtypeStruct((len(sums), g.groups, programs, g.h), compute) if sums and programs > 1 else None
    by_programs = results if shares is None else results._replace(**dict.fromkeys(sums))
    written = launch(
        target,
        backward_kernel,
        {"a": ready, **c1_and_c2, "rows": g.rows, "groups": g.groups},
        {"d": by_programs, "shares": shares},
        programs=g.groups * programs * chunks,
        tile=tile,
        compute=compute,
        in_place={"a.dy": "d.y"} if overwrites_dy else {},
        VECTOR=vector(ready, results),
        SUMS=sums,
        PULLS=pulls,
        EPSILON=norm.epsilon if norm.remat else None,
        TOTAL=jnp.dtype(total) if norm.remat else None,
        **constants,
    )
    gradients = written["d"]
    if shares is not None:
        made = sums_of_shares(written["shares"], sums, results, target)._replace(y=gradients.y)
        if made.y is not None:
            # The shares are added up first, so that the memory of what y is wanted for can hold them until then.
            made = jax.lax.optimization_barrier(made)
        gradients = gradients._replace(**made.present())
    return gradients


def sums_of_shares(shares: jax.Array, sums: tuple[str, ...], results: Arrays, target: Target) -> Arrays:
    """Add up the shares [sums, groups, programs, H] of the gradients that are sums over rows."""
    _, groups, programs, h = shares.shape
    tile = tiles.reduce_tile(h, programs if groups > 1 else None)
    return launch(
        target,
        reduce_kernel,
        {"shares": shares, "groups": groups, "programs": programs},
        {"d": results.only(sums)},
        programs=len(sums) * groups * ceil_div(h, tile.columns),
        tile=tile,
        compute=shares.dtype,
        H=h,
        SUMS=sums,
    )["d"]


def _cublas_alone() -> bool:
    """True where XLA_FLAGS leave all products to cuBLAS, which then adds to each the sum of those before it.

    Else XLA makes a kernel of each product first, and one more of their sum. That stays where XLA, as it tries them
    out, puts cuBLAS in the place of its own kernels.
    """
    flags = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    values = {name: value for name, _, value in flags}
    own = (values.get(f"--xla_gpu_{name}") for name in ("enable_triton_gemm", "triton_gemm_any"))
    return any(value in ("false", "0") for value in own)


def _backward_plan(
    operands: Arrays, results: Arrays, sums: tuple[str, ...], g: Geometry, target: Target
) -> tiles.BackwardPlan | None:
    """The tiles of the backward pass; None for a norm of x and one of the total, of which one kernel takes one each."""
    dy = [*operands.only(DY).present().values()]
    rows = [*dy, operands.dtotal, operands.total, operands.x, operands.residual, operands.z, operands.x_z]
    rows += [results.y, results.residual, results.z, results.x_z]
    if g.norm.both_sides:
        of_branch = (results.x, results.x_scale, results.gate)
        if all(a is None for a in of_branch):  # then the norm's kernel is all
            return None
        moved = element_sizes(*rows, results.x)
        tile = tiles.both_sides(g.h, *moved, target.chip, operands.gate is not None, len(dy) - 1)
        return None if tile is None else tiles.BackwardPlan(tile, None)
    held = operands.gate is not None or operands.residual is None  # x, which of a total made again is in the total
    gates = (operands.gate, operands.x if held else None, operands.z, operands.x_z)
    more = max(0, len(sums) - 2) + sum(a is not None for a in gates)
    if operands.x_z is not None:
        more += 1  # silu(x_z), and what its gradient is made of, wait for the sums of their row
    by_tile = [*operands.only((*DY, "dtotal", "total", "x", "residual", "z", "x_z")).present()]
    of_columns = [*operands.only(("x_bias", "gate")).present()]
    if operands.total is None and operands.gate is not None:  # made again, and so is what is gated
        by_tile, of_columns = [*by_tile, "x"], 2 * of_columns
    if results.y is not None and operands.offset is not None:
        of_columns.append("offset")
    return tiles.backward(
        g.h,
        *element_sizes(*rows),
        results.y is not None,
        target,
        beside=len(dy) - 1 + (operands.dtotal is not None),
        more=more,
        reads=(len(by_tile), len(of_columns)),
    )


def _without_pullback(operands: Arrays, norm: Norm, dtypes: Arrays, batch_dims: int, target: Target) -> Arrays:
    """Compute the gradient of the offset, which reads dy alone, and y, which does not, where no other is wanted."""
    batch = jnp.broadcast_shapes(*(a.shape[:batch_dims] for a in operands.present().values()))
    made, dy = Arrays(), operands.dy
    if dtypes.offset is not None:  # (5), a sum for which XLA reads dy once
        columns = dy.shape[-2:] if norm.heads else dy.shape[-1:]
        rows = dy.reshape(*dy.shape[: dy.ndim - len(columns)], math.prod(columns))
        sums = column_sums(rows, dtypes.offset, batch_dims + norm.examples)
        made = made._replace(offset=sums.reshape(norm.sizes(Shape.COLUMN, dy.shape, batch_dims)))
    if dtypes.y is not None:
        again = operands.only(reads_of_results(Arrays(y=dtypes.y)))
        if not norm.remat:
            norm = dataclasses.replace(norm, both_sides=False)
            again = Arrays(x=operands.total, scale=operands.scale, offset=operands.offset)
        made = made._replace(y=forward(again, norm, Arrays(y=dtypes.y), batch_dims, target).y)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (*batch, *a.shape[batch_dims:])), made)


# Rows that are added up at once. XLA alone would leave a share for every 64 to 128: 6 of the 1720 MB that
# (8192, 4096, 12288) may move, where these are 0.4; and with fewer groups than 8192 rows make there would be too few
# programs for the chip.
_GROUP = 2048


def column_sums(a: jax.Array, dtype: DTypeLike, batch_dims: int = 0) -> jax.Array:
    """Sum rows: [*batch, *rows, C] -> [*batch, C], in float32 (float64 for float64, or for a result in it).

    XLA does it, in the kernel that makes `a` where that is XLA's own, as for the derivative of an activation: no kernel
    of ours would be worth the pass over `a` that it needs.
    """
    shares = column_shares(a, dtype, batch_dims)
    return jnp.sum(shares, axis=range(batch_dims, shares.ndim - 1)).astype(dtype)


def column_shares(a: jax.Array, dtype: DTypeLike, batch_dims: int = 0) -> jax.Array:
    """Sum some rows each, for another sum to add up: [*batch, *rows, C] -> [*batch, *shares, C].

    A sequence is a group of rows as it is. Reshaped it would be copied where its axes are in another order in memory:
    GPT-2's heads, whose gradients are put side by side, move 76 MB more in each block ([8, 1024, 2304] in bfloat16).
    """
    *batch, columns = a.shape[:batch_dims] + a.shape[-1:]
    rows = math.prod(a.shape[batch_dims:-1])
    a = a.astype(functools.reduce(jnp.promote_types, (a.dtype, jnp.float32, dtype)))
    if a.ndim > batch_dims + 2 and _GROUP // 4 <= a.shape[-2] <= _GROUP < rows:
        groups = a
    elif rows > _GROUP and rows % _GROUP == 0:
        groups = a.reshape(*batch, rows // _GROUP, _GROUP, columns)
    else:
        return jnp.sum(a, axis=range(batch_dims, a.ndim - 1), keepdims=True)
    # Two sums without the barrier are one to XLA.
    return jax.lax.optimization_barrier(jnp.sum(groups, axis=-2))
