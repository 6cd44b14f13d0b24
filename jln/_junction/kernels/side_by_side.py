"""The norms' backward kernel of rows side by side that no tile holds: a program has whole rows, chunk by chunk.

Rows lie as in `jln._junction.kernels.forward`. The numbers in brackets are the equations of `jln._junction.formulas`.
"""

import triton
import triton.language as tl

from jln._junction.kernels.addresses import (
    columns_at,
    contains,
    group_of,
    numbers_at,
    rows_at,
    rows_of,
    tile_from,
    tiles_of,
)
from jln._junction.kernels.row_terms import load_row_terms, pulled_back, row_sums, store_sum
from jln._junction.kernels.terms import load_scale, load_vector


@triton.jit
def _of_chunk(
    dy_ptr, dtotal_ptr, total_ptr, x_z_ptr, z_ptr, dx_ptr, dz_ptr, dx_z_ptr, first, at, mask, exists,
    mean, rstd, scale, c1, c2, NORM: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Store a chunk's dz, dx_z and dx, and return what dscale and doffset are made of: dy and x_hat."""
    x = tl.load(total_ptr + first + at, mask=mask, other=0.0).to(COMPUTE)
    dy = tl.load(dy_ptr + first + at, mask=mask, other=0.0).to(COMPUTE)
    dy, x_hat, scaled, u, of_dz = load_row_terms(
        dy, x, x_z_ptr, z_ptr, first, at, mask, exists, mean, rstd, scale, COMPUTE
    )
    if dz_ptr is not None:
        dz = of_dz * (x_hat * scale[None, :])  # (43)
        tl.store(dz_ptr + first + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)
    dx = pulled_back(scaled, x_hat, c1, c2, rstd, NORM)
    if dtotal_ptr is not None:
        dx += tl.load(dtotal_ptr + first + at, mask=mask, other=0.0).to(COMPUTE)
    if x_z_ptr is not None:
        if dx_z_ptr is not None:
            tl.store(dx_z_ptr + first + at, (dx * of_dz).to(dx_z_ptr.dtype.element_ty), mask=mask)  # (44)
        dx *= u  # (44)
    if dx_ptr is not None:
        tl.store(dx_ptr + first + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    return dy, x_hat


@triton.jit
def side_by_side_kernel(
    dy_ptr,  # [G, rows, H]
    dtotal_ptr,  # [G, rows, H]
    total_ptr,  # [G, rows, H]
    x_z_ptr,  # [G, rows, H]
    z_ptr,  # [G, rows, H]
    scale_ptr,  # [G, H]
    mean_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]
    rows,
    groups,
    dx_ptr,  # [G, rows, H]
    dz_ptr,  # [G, rows, H]
    dx_z_ptr,  # [G, rows, H]
    dscale_ptr,  # [G, H]; of a group's only program
    doffset_ptr,  # [G, H]; likewise
    shares_ptr,  # [SUMS, G, programs, H]; where there are several
    H: tl.constexpr,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    VECTOR: tl.constexpr,
    SHARED: tl.constexpr,
    SUMS: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute what `backward_kernel` does, without gates, biases and y, of rows side by side: INNER is more than 1.

    A program owns every `programs`-th tile of whole rows. It reads them for c1 and c2, STAGES chunks at a time, and at
    once again for all else, from L1 or L2. Its sums over rows have a row for each chunk, which only that chunk changes:
    so chunks need not be unrolled.
    """
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    CHUNKS: tl.constexpr = triton.next_power_of_2(chunks)
    of_all = tl.num_programs(0)  # programs of all groups
    programs = tl.maximum(of_all // groups, 1)
    group, program = group_of(tl.program_id(0), programs, SHARED)
    dy_ptr = rows_at(dy_ptr, "dy", group, rows, H, INNER, INTERLEAVED, SHARED)
    dtotal_ptr = rows_at(dtotal_ptr, "dtotal", group, rows, H, INNER, INTERLEAVED, SHARED)
    total_ptr = rows_at(total_ptr, "total", group, rows, H, INNER, INTERLEAVED, SHARED)
    x_z_ptr = rows_at(x_z_ptr, "x_z", group, rows, H, INNER, INTERLEAVED, SHARED)
    z_ptr = rows_at(z_ptr, "z", group, rows, H, INNER, INTERLEAVED, SHARED)
    scale_ptr = columns_at(scale_ptr, "scale", group, H, INTERLEAVED, SHARED)
    mean_ptr = numbers_at(mean_ptr, "mean", group, rows, INTERLEAVED, SHARED)
    rstd_ptr = numbers_at(rstd_ptr, "rstd", group, rows, INTERLEAVED, SHARED)
    dx_ptr = rows_at(dx_ptr, "dx", group, rows, H, INNER, INTERLEAVED, SHARED)
    dz_ptr = rows_at(dz_ptr, "dz", group, rows, H, INNER, INTERLEAVED, SHARED)
    dx_z_ptr = rows_at(dx_z_ptr, "dx_z", group, rows, H, INNER, INTERLEAVED, SHARED)

    number = tl.arange(0, CHUNKS)
    dscale = tl.zeros([CHUNKS, BLOCK_H], COMPUTE)
    doffset = tl.zeros([CHUNKS, BLOCK_H], COMPUTE)

    for tile in tl.range(program, tiles_of(rows, INTERLEAVED.run, BLOCK_ROWS), programs, num_stages=1):
        row, base, start, valid = rows_of(tile, rows, H, INNER, INTERLEAVED, VECTOR, BLOCK_ROWS)
        mean = load_vector(mean_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        rstd = load_vector(rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        c1, c2 = row_sums(
            dy_ptr, total_ptr, x_z_ptr, z_ptr, base, scale_ptr, start, valid, mean, rstd,
            H, INNER, VECTOR, NORM, COMPUTE, BLOCK_ROWS, BLOCK_H, 1, STAGES,
        )  # fmt: skip
        for chunk in tl.range(0, chunks, num_stages=1):
            column, exists, at, mask = tile_from(chunk * BLOCK_H, start, valid, H, INNER, VECTOR, BLOCK_H)
            scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
            dy, x_hat = _of_chunk(
                dy_ptr, dtotal_ptr, total_ptr, x_z_ptr, z_ptr, dx_ptr, dz_ptr, dx_z_ptr, base, at, mask, exists,
                mean, rstd, scale, c1, c2, NORM, COMPUTE,
            )  # fmt: skip
            is_own = (number == chunk)[:, None]
            if contains(SUMS, "dscale"):
                dscale += tl.where(is_own, tl.sum(dy * x_hat, axis=0)[None, :], 0.0)  # (6)
            if contains(SUMS, "doffset"):
                doffset += tl.where(is_own, tl.sum(dy, axis=0)[None, :], 0.0)  # (5)

    column = tl.arange(0, CHUNKS * BLOCK_H)
    at = (group * programs + program) * H + column
    dscale = tl.reshape(dscale, [1, CHUNKS * BLOCK_H])
    doffset = tl.reshape(doffset, [1, CHUNKS * BLOCK_H])
    store_sum(dscale, dscale_ptr, shares_ptr, at, column < H, of_all, "dscale", SUMS, H)
    store_sum(doffset, doffset_ptr, shares_ptr, at, column < H, of_all, "doffset", SUMS, H)
