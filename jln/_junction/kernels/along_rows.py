"""The kernel that makes a norm's result from its statistics, in eight bits, with a scale for every 32 rows of a column.

The numbers in brackets are the equations of `jln._junction.formulas` and of `jln._junction.eight_bits`.
"""

import triton
import triton.language as tl

from jln._junction.kernels.addresses import columns_at, columns_from, group_of, rows_at
from jln._junction.kernels.eight_bits import inverse_of, rounded, scales_of
from jln._junction.kernels.terms import load_offset, load_scale, load_total, load_vector, normed


@triton.jit
def along_rows_kernel(
    x_ptr,  # [G, rows, H]
    x_z_ptr,  # [G, rows, H]
    z_ptr,  # [G, rows, H]
    scale_ptr,  # [G, H]
    offset_ptr,  # [G, H]
    added_ptr,  # [G, rows, H]
    mean_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]
    rows,
    blocks,
    y_ptr,  # [G, blocks * 32, H], or [G, H, blocks * 32]
    block_scale_ptr,  # [G, blocks, H], or [G, H, blocks]
    H: tl.constexpr,
    VECTOR: tl.constexpr,
    SHARED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    RAGGED: tl.constexpr,
    EXPONENT: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Compute y and its scales, one tile of blocks a program.

    TRANSPOSED: the results have H in front of the rows. RAGGED: rows leave room in the last block, for zeros.

    Rows are loaded in the order in which a warp that takes four at a time comes to have all of a block, and each of its
    threads eight in a row: its largest is found in a thread first, and bytes go to shared memory by eight.
    """
    of_tile: tl.constexpr = BLOCK_ROWS // 32
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    group, program = group_of(tl.program_id(0), ((blocks - 1) // of_tile + 1) * chunks, SHARED)
    block = tl.cast(program // chunks, tl.int64) * of_tile
    column, exists = columns_from(program % chunks * BLOCK_H, H, VECTOR, BLOCK_H)
    local = tl.arange(0, BLOCK_ROWS)
    local = local // 4 % of_tile * 32 + local % 4 * 8 + local // (of_tile * 4)
    valid = local < tl.minimum(rows - block * 32, BLOCK_ROWS).to(tl.int32)
    step = local.to(tl.int64 if BLOCK_ROWS * H >= 2**31 else tl.int32) * H

    x_ptr = rows_at(x_ptr, "x", group, rows, H, SHARED, base=block * (32 * H))
    x_z_ptr = rows_at(x_z_ptr, "x_z", group, rows, H, SHARED, base=block * (32 * H))
    z_ptr = rows_at(z_ptr, "z", group, rows, H, SHARED, base=block * (32 * H))
    added_ptr = rows_at(added_ptr, "added", group, rows, H, SHARED, base=block * (32 * H))
    mean_ptr = rows_at(mean_ptr, "mean", group, rows, 1, SHARED)
    rstd_ptr = rows_at(rstd_ptr, "rstd", group, rows, 1, SHARED)
    scale_ptr = columns_at(scale_ptr, "scale", group, H, SHARED)
    offset_ptr = columns_at(offset_ptr, "offset", group, H, SHARED)
    at, mask = step[:, None] + column[None, :], valid[:, None] & exists[None, :]
    x = load_total(
        x_ptr, x_z_ptr, None, None, None, None, None, at, mask, column, exists, x_ptr.dtype.element_ty, COMPUTE
    )
    mean = load_vector(mean_ptr, block * 32 + local, valid, BLOCK_ROWS, COMPUTE)
    rstd = load_vector(rstd_ptr, block * 32 + local, valid, BLOCK_ROWS, COMPUTE)
    scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
    x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)
    offset = load_offset(offset_ptr, column, exists, COMPUTE)
    y = normed(x_hat, scale, offset, z_ptr, added_ptr, at, mask, COMPUTE)
    if RAGGED:
        y = tl.where(valid[:, None], y, 0.0)

    y = tl.permute(tl.reshape(y, (8, of_tile, 4, BLOCK_H)), (1, 2, 0, 3))
    y = tl.reshape(y, (of_tile, 32, BLOCK_H))
    bits = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    biased = scales_of(bits, EXPONENT)  # (52)
    y = tl.reshape(y * inverse_of(biased)[:, None, :], (BLOCK_ROWS, BLOCK_H))  # (53)
    y = rounded(y, y_ptr.dtype.element_ty)

    left = tl.minimum(blocks - block, of_tile).to(tl.int32)
    one, all_rows = tl.arange(0, of_tile), tl.arange(0, BLOCK_ROWS)
    if TRANSPOSED:
        y, biased = tl.trans(y), tl.trans(biased)
        far = (group * H + column.to(tl.int64)) * blocks + block
        at, scale_at = far[:, None] * 32 + all_rows[None, :], far[:, None] + one[None, :]
        mask, of_scales = exists[:, None] & (all_rows < left * 32)[None, :], exists[:, None] & (one < left)[None, :]
    else:
        far = (group * blocks + block) * H
        at = far * 32 + (all_rows.to(step.dtype) * H)[:, None] + column[None, :]
        scale_at = far + (one.to(step.dtype) * H)[:, None] + column[None, :]
        mask, of_scales = (all_rows < left * 32)[:, None] & exists[None, :], (one < left)[:, None] & exists[None, :]
    tl.store(y_ptr + at, y, mask=mask)
    tl.store(block_scale_ptr + scale_at, biased.to(tl.uint8), mask=of_scales)
