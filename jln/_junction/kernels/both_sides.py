"""RMSNorm on both sides of a sum: `[G, rows, H]` in one kernel each way, rows along the last axis, each in one tile.

As in `jln._junction.kernels.forward`; the numbers in brackets are the equations of `jln._junction.formulas` and, from
(31) on, of `jln._junction.both_sides.formulas`.
"""

import triton
import triton.language as tl

from jln._junction.kernels.addresses import (
    columns_from,
    contains,
    copy_of,
    group_of,
    rows_of,
    size_of,
    tiles_of,
)
from jln._junction.kernels.backward import _store_sum
from jln._junction.kernels.terms import load_scale, load_vector, widened


@triton.jit
def _rstd(x, H: tl.constexpr, EPSILON: tl.constexpr):
    """The rstd of a row in a tile that is 0 where there is no column."""
    return tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / H) + EPSILON)


@triton.jit
def forward_kernel(
    x_ptr,  # [G, rows, H]
    residual_ptr,  # [G, rows, H]
    x_scale_ptr,  # [G, H]
    scale_ptr,  # [G, H]
    rows,
    y_ptr,  # [G, rows, H]
    total_ptr,  # [G, rows, H]
    x_rstd_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]
    H: tl.constexpr,
    SHARED: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
    TOTAL: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute y, total and both norms' rstd, one tile of rows a program."""
    group, tile = group_of(tl.program_id(0), tiles_of(rows, 1, BLOCK_ROWS), SHARED)
    row, base, start, valid = rows_of(tile, rows, H, 1, 1, BLOCK_ROWS)
    size = size_of(rows, H, 1)
    x_ptr += copy_of(group, SHARED, "x", 1) * size + base
    residual_ptr += copy_of(group, SHARED, "residual", 1) * size + base
    if x_scale_ptr is not None:
        x_scale_ptr += copy_of(group, SHARED, "x_scale", 1) * H
    if scale_ptr is not None:
        scale_ptr += copy_of(group, SHARED, "scale", 1) * H
    column, step, exists = columns_from(0, H, 1, BLOCK_H)
    at = start[:, None] + step[None, :]
    mask = valid[:, None] & exists[None, :]

    x = widened(tl.load(x_ptr + at, mask=mask, other=0.0), COMPUTE)
    x_rstd = _rstd(x, H, EPSILON)  # (31)
    x_scale = load_scale(x_scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
    residual = widened(tl.load(residual_ptr + at, mask=mask, other=0.0), COMPUTE)
    total = tl.fma(x * x_rstd[:, None], x_scale[None, :], residual).to(TOTAL)  # (32), (33)
    if total_ptr is not None:
        tl.store(total_ptr + (group * size + base) + at, total, mask=mask)
    total = total.to(COMPUTE)
    rstd = _rstd(total, H, EPSILON)  # (2)
    if y_ptr is not None:
        scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
        y = total * rstd[:, None] * scale[None, :]  # (3), (4)
        tl.store(y_ptr + (group * size + base) + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if x_rstd_ptr is not None:
        tl.store(x_rstd_ptr + group * rows + row, x_rstd.to(x_rstd_ptr.dtype.element_ty), mask=valid)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + group * rows + row, rstd, mask=valid)


@triton.jit
def backward_kernel(
    dy_ptr,  # [G, rows, H]
    dtotal_ptr,  # [G, rows, H]
    total_ptr,  # [G, rows, H]
    scale_ptr,  # [G, H]
    rstd_ptr,  # [G, rows]
    x_ptr,  # [G, rows, H]
    x_scale_ptr,  # [G, H]
    x_rstd_ptr,  # [G, rows]
    rows,
    programs,
    dx_ptr,  # [G, rows, H]
    dresidual_ptr,  # [G, rows, H]
    dx_scale_ptr,  # [G, H]; of a group's only program
    dscale_ptr,  # [G, H]; likewise
    shares_ptr,  # [SUMS, G, programs, H]; where there are several
    H: tl.constexpr,
    SHARED: tl.constexpr,
    SUMS: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx, dresidual and each program's share of the SUMS (dx_scale, dscale), each if it is wanted.

    A program owns every `programs`-th tile of rows.
    """
    group, program = group_of(tl.program_id(0), programs, SHARED)
    size = size_of(rows, H, 1)
    dy_ptr += copy_of(group, SHARED, "dy", 1) * size
    total_ptr += copy_of(group, SHARED, "total", 1) * size
    rstd_ptr += copy_of(group, SHARED, "rstd", 1) * rows
    x_ptr += copy_of(group, SHARED, "x", 1) * size
    x_rstd_ptr += copy_of(group, SHARED, "x_rstd", 1) * rows
    if dtotal_ptr is not None:
        dtotal_ptr += copy_of(group, SHARED, "dtotal", 1) * size
    if scale_ptr is not None:
        scale_ptr += copy_of(group, SHARED, "scale", 1) * H
    if x_scale_ptr is not None:
        x_scale_ptr += copy_of(group, SHARED, "x_scale", 1) * H
    if dx_ptr is not None:
        dx_ptr += group * size
    if dresidual_ptr is not None:
        dresidual_ptr += group * size
    column, step, exists = columns_from(0, H, 1, BLOCK_H)
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    dx_scale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for tile in tl.range(program, tiles_of(rows, 1, BLOCK_ROWS), programs, num_stages=STAGES):
        row, base, start, valid = rows_of(tile, rows, H, 1, 1, BLOCK_ROWS)
        at = start[:, None] + step[None, :]
        mask = valid[:, None] & exists[None, :]
        rstd = load_vector(rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        x_rstd = load_vector(x_rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        dy = tl.load(dy_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        x_hat = tl.load(total_ptr + base + at, mask=mask, other=0.0).to(COMPUTE) * rstd[:, None]
        if contains(SUMS, "dscale"):
            dscale = tl.fma(dy, x_hat, dscale)  # (6)
        # The scales anew for every tile, from L2: a row of 8192 leaves no registers to hold them over the loop.
        scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
        dy *= scale[None, :]
        c2 = tl.sum(dy * x_hat, axis=1) * (1.0 / H)  # (8)
        d = tl.fma(dy, rstd[:, None], x_hat * -(c2 * rstd)[:, None])  # (9)
        if dtotal_ptr is not None:
            d += tl.load(dtotal_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + base + at, d.to(dresidual_ptr.dtype.element_ty), mask=mask)  # (34)
        u = tl.load(x_ptr + base + at, mask=mask, other=0.0).to(COMPUTE) * x_rstd[:, None]  # (32)
        if contains(SUMS, "dx_scale"):
            dx_scale = tl.fma(d, u, dx_scale)  # (35)
        if dx_ptr is not None:
            d *= load_scale(x_scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)[None, :]
            c = tl.sum(d * u, axis=1) * (1.0 / H)
            dx = tl.fma(d, x_rstd[:, None], u * -(c * x_rstd)[:, None])  # (36)
            tl.store(dx_ptr + base + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)

    at = (group * programs + program) * H + column
    of_all = tl.num_programs(0)
    if contains(SUMS, "dx_scale"):
        _store_sum(dx_scale, dx_scale_ptr, shares_ptr, at, exists, of_all, "dx_scale", SUMS, H)
    if contains(SUMS, "dscale"):
        _store_sum(dscale, dscale_ptr, shares_ptr, at, exists, of_all, "dscale", SUMS, H)
