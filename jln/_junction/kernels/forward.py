"""The norms' forward kernel, with or without a sum, gates, silu and a norm of x before it is added, by constexprs.

A kernel's `a` is the table's record (`jln._junction.arrays`) of pointers to what it reads, `r` that of what it writes.
An operand that is absent, and a result that nobody wants, is None.

Rows are `[G, rows, H]`: G counts the groups that vmap put in front, and the examples that have parameters of their own.
HEADS next to H, with parameters of their own, are groups whose rows take turns; else it is 1. SHARED names the operands
that have one copy for all groups, and is None where there is only one group.

The numbers in brackets are the equations of `jln._junction.formulas`.
"""

import triton
import triton.language as tl

from jln._junction.arrays import Arrays
from jln._junction.kernels.addresses import columns_from, group_of, rows_of, tile_from, tiles_of
from jln._junction.kernels.eight_bits import bits_of, by_block_scales, rounded
from jln._junction.kernels.records import FIELDS, place
from jln._junction.kernels.terms import load_offset, load_scale, load_total, load_total_of_normed, normed, rstd_of


@triton.jit
def _add(total, excess, term):
    """The sum total + term, and by how much it is too large, which the next term takes along (Kahan, 1965)."""
    term -= excess
    new = total + term
    return new, (new - total) - term


@triton.jit
def _statistics_of_chunks(a, base, start, valid, H, VECTOR, NORM, EPSILON, TOTAL, COMPUTE, BLOCK_ROWS, BLOCK_H):
    """The mean and rstd of rows wider than BLOCK_H.

    Every chunk has its own two-pass mean and sum of squares, and those of the chunks are merged by the formula of Chan,
    Golub and LeVeque (1979), which loses nothing when the mean is large. Nor do many chunks, by compensated sums.
    """
    mean = tl.zeros([BLOCK_ROWS], COMPUTE)
    squares = tl.zeros([BLOCK_ROWS], COMPUTE)
    mean_excess, squares_excess = squares, squares
    for first in range(0, H, BLOCK_H):
        column, exists, at, mask = tile_from(first, start, valid, H, VECTOR, BLOCK_H)
        x = load_total(a, base, at, mask, column, exists, TOTAL, COMPUTE)
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
def forward_kernel(
    a: Arrays,  # the operands
    rows,
    groups,
    r: Arrays,  # the results: y, y_max, block_scale, total, mean, rstd and x_rstd
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
    """Compute the results, tile by tile of rows.

    BOTH_SIDES: x is normalised before it is added, in a tile of whole rows, and its x_rstd computed, too.
    BLOCKS: the exponent of the largest number of y where its blocks have scales; else None.

    A row that fits in BLOCK_H stays in registers and is read once. A wider one is taken chunk by chunk, twice, the
    second read being served by L2. A program has one tile. A PERSISTENT one has every `programs`-th of its group's,
    reads them ahead, and holds scale and offset: rows then fit in BLOCK_H.
    """
    programs = tl.maximum(tl.num_programs(0) // groups, 1)
    group, program = group_of(tl.program_id(0), programs, SHARED, HEADS)
    for i in tl.static_range(FIELDS):  # each pointer to its group's part
        if a[i] is not None:
            a = Arrays(*a[:i], place(a[i], i, group, rows, H, SHARED, HEADS), *a[i + 1 :])
        if r[i] is not None:
            r = Arrays(*r[:i], place(r[i], i, group, rows, H, None, HEADS), *r[i + 1 :])
    if PERSISTENT:
        column, exists = columns_from(0, H, VECTOR, BLOCK_H)
        scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
        offset = load_offset(a.offset, column, exists, COMPUTE)

    end = tiles_of(rows, BLOCK_ROWS) if PERSISTENT else program + 1
    for tile in tl.range(program, end, programs if PERSISTENT else 1, num_stages=STAGES if PERSISTENT else 1):
        row, base, start, valid = rows_of(tile, rows, H, BLOCK_ROWS, HEADS)

        # The rows' statistics.
        if BLOCK_H >= H:
            column, exists, at, mask = tile_from(0, start, valid, H, VECTOR, BLOCK_H)
            if BOTH_SIDES:
                x, x_rstd = load_total_of_normed(
                    a, base, at, mask, column, exists, H, NORM, EPSILON, TOTAL, COMPUTE, BLOCK_H
                )
            else:
                x = load_total(a, base, at, mask, column, exists, TOTAL, COMPUTE)
            mean = tl.zeros([BLOCK_ROWS], COMPUTE)
            if NORM.subtract_mean:
                mean = tl.sum(x, axis=1) * (1.0 / H)  # (1)
            rstd = rstd_of(tl.where(exists[None, :], x - mean[:, None], 0.0), H, EPSILON)  # (2)
        else:
            mean, rstd = _statistics_of_chunks(
                a, base, start, valid, H, VECTOR, NORM, EPSILON, TOTAL, COMPUTE, BLOCK_ROWS, BLOCK_H
            )

        # The rows and their norm.
        largest = tl.zeros([BLOCK_ROWS], tl.int32)
        for first in range(0, H, BLOCK_H):
            if BLOCK_H < H:
                column, exists, at, mask = tile_from(first, start, valid, H, VECTOR, BLOCK_H)
                x = load_total(a, base, at, mask, column, exists, TOTAL, COMPUTE)
            if not PERSISTENT:
                scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
                offset = load_offset(a.offset, column, exists, COMPUTE)
            if r.total is not None:
                tl.store(r.total + base + at, x.to(r.total.dtype.element_ty), mask=mask)
            if r.y is not None or r.y_max is not None or r.block_scale is not None:
                x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)
                y = normed(a, x_hat, scale, offset, base, at, mask, COMPUTE)  # (4)
                if r.y_max is not None:
                    of_chunk = tl.max(bits_of(y, mask), axis=1)  # (51)
                    largest = of_chunk if BLOCK_H >= H else tl.maximum(largest, of_chunk)
                if BLOCKS is not None:
                    _, first_block, block, _ = rows_of(tile, rows, H // 32, BLOCK_ROWS, HEADS)
                    y = by_block_scales(r, y, mask, first_block, block, first, valid, H, BLOCKS, BLOCK_ROWS, BLOCK_H)
                if r.y is not None:
                    if a.y_scale is not None:
                        y *= tl.div_rn(1.0, tl.load(a.y_scale))  # (50)
                    tl.store(r.y + base + at, rounded(y, r.y.dtype.element_ty), mask=mask)

        if r.y_max is not None:
            tl.store(r.y_max + row, largest.to(tl.float32, bitcast=True), mask=valid)
        if r.rstd is not None:
            tl.store(r.rstd + row, rstd, mask=valid)
        if r.mean is not None:
            tl.store(r.mean + row, mean, mask=valid)
        if r.x_rstd is not None:
            tl.store(r.x_rstd + row, x_rstd.to(r.x_rstd.dtype.element_ty), mask=valid)
