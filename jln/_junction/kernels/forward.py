"""The norms' forward kernel, with or without a sum, gates, silu and a norm of x before it is added, by constexprs.

Every kernel of the norms sees `x` as `[G, rows, H]`. G counts the groups that vmap put in front, and the examples that
have parameters of their own. HEADS next to H, with parameters of their own, are groups whose rows take turns; else it
is 1. SHARED names the operands that have one copy for all groups, and is None where there is only one group. An operand
that is absent, and a result that nobody wants, is None for the compiler.

The numbers in brackets are the equations of `jln._junction.formulas`.
"""

import triton
import triton.language as tl

from jln._junction.kernels.addresses import columns_at, columns_from, group_of, rows_at, rows_of, tile_from, tiles_of
from jln._junction.kernels.eight_bits import bits_of, by_block_scales, rounded
from jln._junction.kernels.terms import apply_gate, load_offset, load_scale, load_total, normed, rstd_of, widen


@triton.jit
def _load_total_of_normed(
    x_ptr, x_scale_ptr, gate_ptr, residual_ptr, at, mask, column, exists,
    H: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr, TOTAL: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The rows that are normalised where x is so before it is added, in their dtype, and the rstd of x."""
    x = widen(tl.load(x_ptr + at, mask=mask, other=0.0), COMPUTE)
    x_rstd = rstd_of(x, H, EPSILON)  # (31)
    x_scale = load_scale(x_scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
    residual = widen(tl.load(residual_ptr + at, mask=mask, other=0.0), COMPUTE)
    u = x * x_rstd[:, None]  # (32)
    if gate_ptr is None:
        total = tl.fma(u, x_scale[None, :], residual)  # (33)
    else:
        branch = u * x_scale[None, :]
        total = apply_gate(branch, gate_ptr, column, exists, COMPUTE) + residual  # (33)
    return total.to(TOTAL), x_rstd


@triton.jit
def _add(total, excess, term):
    """The sum total + term, and by how much it is too large, which the next term takes along (Kahan, 1965)."""
    term -= excess
    new = total + term
    return new, (new - total) - term


@triton.jit
def _statistics_of_chunks(
    x_ptr, x_z_ptr, residual_ptr, x_bias_ptr, gate_ptr, start, valid,
    H: tl.constexpr, VECTOR: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr,
    TOTAL: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The mean and rstd of rows wider than BLOCK_H.

    Every chunk has its own two-pass mean and sum of squares, and those of the chunks are merged by the formula of Chan,
    Golub and LeVeque (1979), which loses nothing when the mean is large. Nor do many
    chunks, by compensated sums.
    """
    mean = tl.zeros([BLOCK_ROWS], COMPUTE)
    squares = tl.zeros([BLOCK_ROWS], COMPUTE)
    mean_excess, squares_excess = squares, squares
    for first in range(0, H, BLOCK_H):
        column, exists, at, mask = tile_from(first, start, valid, H, VECTOR, BLOCK_H)
        x = load_total(
            x_ptr, x_z_ptr, residual_ptr, x_bias_ptr, gate_ptr, at, mask, column, exists,
            TOTAL, COMPUTE,
        )  # fmt: skip
        more = tl.zeros([BLOCK_ROWS], COMPUTE)
        if NORM.subtract_mean:
            count = tl.minimum(BLOCK_H, H - first).to(COMPUTE)
            chunk_mean = tl.sum(x, axis=1) / count
            x = tl.where(mask, x - chunk_mean[:, None], 0.0)
            ahead = chunk_mean - mean + mean_excess
            share = count / (first + count)
            mean, mean_excess = _add(mean, mean_excess, ahead * share)  # (1)
            more = ahead * (ahead * (share * first))  # 0 in the first chunk, whatever its mean squared is
        squares, squares_excess = _add(squares, squares_excess, more + tl.sum(x * x, axis=1))
    return mean, tl.rsqrt(squares * (1.0 / H) + EPSILON)  # (2)


@triton.jit
def _store_rows(
    x, mean, rstd, z_ptr, scale, offset, added_ptr, y_scale_ptr,
    y_ptr, y_max_ptr, block_scale_ptr, total_ptr, at, mask, first_scale, first, valid,
    H: tl.constexpr, BLOCKS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Normalise rows, and store their norm and the rows themselves, each if it is wanted.

    Returns the bits of each row's largest |y|, 0 if nobody wants it.
    """
    largest = tl.zeros([BLOCK_ROWS], tl.int32)
    if total_ptr is not None:
        tl.store(total_ptr + at, x.to(total_ptr.dtype.element_ty), mask=mask)
    if y_ptr is not None or y_max_ptr is not None or block_scale_ptr is not None:
        x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)
        y = normed(x_hat, scale, offset, z_ptr, added_ptr, at, mask, COMPUTE)
        if y_max_ptr is not None:
            largest = tl.max(bits_of(y, mask), axis=1)  # (51)
        if BLOCKS is not None:
            y = by_block_scales(y, mask, block_scale_ptr, first_scale, first, valid, H, BLOCKS, BLOCK_ROWS, BLOCK_H)
        if y_ptr is not None:
            if y_scale_ptr is not None:
                y *= tl.div_rn(1.0, tl.load(y_scale_ptr))  # (50)
            tl.store(y_ptr + at, rounded(y, y_ptr.dtype.element_ty), mask=mask)
    return largest


@triton.jit
def forward_kernel(
    x_ptr,  # [G, rows, H]
    x_z_ptr,  # [G, rows, H]
    z_ptr,  # [G, rows, H]
    residual_ptr,  # [G, rows, H]
    x_bias_ptr,  # [G, H]
    gate_ptr,  # [G, H]
    x_scale_ptr,  # [G, H]
    scale_ptr,  # [G, H]
    offset_ptr,  # [G, H]
    added_ptr,  # [G, rows, H]
    y_scale_ptr,  # [G]
    rows,
    groups,
    y_ptr,  # [G, rows, H]
    y_max_ptr,  # [G, rows]
    block_scale_ptr,  # [G, rows, H / 32]
    total_ptr,  # [G, rows, H]
    mean_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]
    x_rstd_ptr,  # [G, rows]
    H: tl.constexpr,
    HEADS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHARED: tl.constexpr,
    NORM: tl.constexpr,
    BOTH_SIDES: tl.constexpr,
    PERSISTENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    EPSILON: tl.constexpr,
    TOTAL: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute y, total, mean and rstd, tile by tile of rows.

    BOTH_SIDES: x is normalised before it is added, in a tile of whole rows, and its x_rstd computed, too.
    BLOCKS: the exponent of the largest number of y where its blocks have scales; else None.

    A row that fits in BLOCK_H stays in registers and is read once. A wider one is taken chunk by chunk, twice, the
    second read being served by L2. A program has one tile. A PERSISTENT one has every `programs`-th of its group's,
    reads them ahead, and holds scale and offset: rows then fit in BLOCK_H.
    """
    programs = tl.maximum(tl.num_programs(0) // groups, 1)
    group, program = group_of(tl.program_id(0), programs, SHARED, HEADS)
    x_bias_ptr = columns_at(x_bias_ptr, "x_bias", group, H, SHARED, HEADS)
    gate_ptr = columns_at(gate_ptr, "gate", group, H, SHARED, HEADS)
    x_scale_ptr = columns_at(x_scale_ptr, "x_scale", group, H, SHARED, HEADS)
    scale_ptr = columns_at(scale_ptr, "scale", group, H, SHARED, HEADS)
    offset_ptr = columns_at(offset_ptr, "offset", group, H, SHARED, HEADS)
    y_scale_ptr = columns_at(y_scale_ptr, "y_scale", group, 1, SHARED, HEADS)
    y_max_ptr = rows_at(y_max_ptr, "y_max", group, rows, 1, SHARED, HEADS)
    rstd_ptr = rows_at(rstd_ptr, "rstd", group, rows, 1, SHARED, HEADS)
    mean_ptr = rows_at(mean_ptr, "mean", group, rows, 1, SHARED, HEADS)
    x_rstd_ptr = rows_at(x_rstd_ptr, "x_rstd", group, rows, 1, SHARED, HEADS)

    if PERSISTENT:
        column, exists = columns_from(0, H, VECTOR, BLOCK_H)
        scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
        offset = load_offset(offset_ptr, column, exists, COMPUTE)

    end = tiles_of(rows, BLOCK_ROWS) if PERSISTENT else program + 1
    for tile in tl.range(program, end, programs if PERSISTENT else 1, num_stages=STAGES if PERSISTENT else 1):
        row, base, start, valid = rows_of(tile, rows, H, BLOCK_ROWS, HEADS)
        of_x_ptr = rows_at(x_ptr, "x", group, rows, H, SHARED, HEADS, base)
        of_x_z_ptr = rows_at(x_z_ptr, "x_z", group, rows, H, SHARED, HEADS, base)
        of_z_ptr = rows_at(z_ptr, "z", group, rows, H, SHARED, HEADS, base)
        of_residual_ptr = rows_at(residual_ptr, "residual", group, rows, H, SHARED, HEADS, base)
        of_total_ptr = rows_at(total_ptr, "total", group, rows, H, SHARED, HEADS, base)
        of_added_ptr = rows_at(added_ptr, "added", group, rows, H, SHARED, HEADS, base)
        of_y_ptr = rows_at(y_ptr, "y", group, rows, H, SHARED, HEADS, base)
        first_scale = start
        of_blocks_ptr = block_scale_ptr
        if block_scale_ptr is not None:
            _, base, first_scale, _ = rows_of(tile, rows, H // 32, BLOCK_ROWS, HEADS)
            of_blocks_ptr = rows_at(block_scale_ptr, "block_scale", group, rows, H // 32, SHARED, HEADS, base)

        mean = tl.zeros([BLOCK_ROWS], COMPUTE)
        if BLOCK_H >= H:
            column, exists, at, mask = tile_from(0, start, valid, H, VECTOR, BLOCK_H)
            if BOTH_SIDES:
                x, x_rstd = _load_total_of_normed(
                    of_x_ptr, x_scale_ptr, gate_ptr, of_residual_ptr, at, mask, column, exists,
                    H, NORM, EPSILON, TOTAL, COMPUTE, BLOCK_H,
                )  # fmt: skip
                x = x.to(COMPUTE)
            else:
                x = load_total(
                    of_x_ptr, of_x_z_ptr, of_residual_ptr, x_bias_ptr, gate_ptr, at, mask,
                    column, exists, TOTAL, COMPUTE,
                )  # fmt: skip
            if NORM.subtract_mean:
                mean = tl.sum(x, axis=1) * (1.0 / H)  # (1)
            rstd = rstd_of(tl.where(exists[None, :], x - mean[:, None], 0.0), H, EPSILON)  # (2)
            if not PERSISTENT:
                scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
                offset = load_offset(offset_ptr, column, exists, COMPUTE)
            largest = _store_rows(
                x, mean, rstd, of_z_ptr, scale, offset, of_added_ptr, y_scale_ptr,
                of_y_ptr, y_max_ptr, of_blocks_ptr, of_total_ptr, at, mask, first_scale, 0, valid,
                H, BLOCKS, COMPUTE, BLOCK_ROWS, BLOCK_H,
            )  # fmt: skip
        else:
            mean, rstd = _statistics_of_chunks(
                of_x_ptr, of_x_z_ptr, of_residual_ptr, x_bias_ptr, gate_ptr, start, valid,
                H, VECTOR, NORM, EPSILON, TOTAL, COMPUTE, BLOCK_ROWS, BLOCK_H,
            )  # fmt: skip
            largest = tl.zeros([BLOCK_ROWS], tl.int32)
            for first in range(0, H, BLOCK_H):
                column, exists, at, mask = tile_from(first, start, valid, H, VECTOR, BLOCK_H)
                x = load_total(
                    of_x_ptr, of_x_z_ptr, of_residual_ptr, x_bias_ptr, gate_ptr, at, mask,
                    column, exists, TOTAL, COMPUTE,
                )  # fmt: skip
                scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
                offset = load_offset(offset_ptr, column, exists, COMPUTE)
                more = _store_rows(
                    x, mean, rstd, of_z_ptr, scale, offset, of_added_ptr, y_scale_ptr,
                    of_y_ptr, y_max_ptr, of_blocks_ptr, of_total_ptr, at, mask, first_scale, first, valid,
                    H, BLOCKS, COMPUTE, BLOCK_ROWS, BLOCK_H,
                )  # fmt: skip
                if y_max_ptr is not None:
                    largest = tl.maximum(largest, more)

        if y_max_ptr is not None:
            tl.store(y_max_ptr + row, largest.to(tl.float32, bitcast=True), mask=valid)
        if rstd_ptr is not None:
            tl.store(rstd_ptr + row, rstd, mask=valid)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=valid)
        if x_rstd_ptr is not None:
            tl.store(x_rstd_ptr + row, x_rstd.to(x_rstd_ptr.dtype.element_ty), mask=valid)
