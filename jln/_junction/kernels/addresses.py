"""Addresses in the norms' and the fused operators' kernels: where a program's rows, columns and groups lie.

An array of rows is [G, rows, H]. Or G counts, behind the groups in front, the heads next to H, of which HEADS take
turns: [G / HEADS, rows, HEADS, H].
"""

import triton
import triton.language as tl


@triton.jit
def numbers(N, VECTOR):
    """The numbers below N. VECTOR: how many in a row a thread takes at most; None for as many as one load takes.

    The compiler gives a thread as many as one load takes of the narrowest array. A load of a wider one is then several,
    with gaps between a warp's threads: of 8 elements of float32 beside bfloat16 each load and each store has half of
    twice as many sectors. With 16 bytes of the widest, as launches ask for, narrower ones come by 8, without gaps.
    """
    if VECTOR is None or VECTOR > N:
        return tl.arange(0, N)
    else:
        return tl.max_contiguous(tl.arange(0, N), VECTOR)


@triton.jit
def rows_of(tile, rows, H, BLOCK_ROWS, HEADS: tl.constexpr = 1):
    """The rows of one tile of a group: where they are from its first row, and which of them exist.

    Between these two stand the offset of the tile's first element, and those of the rows' first elements from there.
    What differs between a thread's rows has 32 bits where it can, and is a constant.
    """
    local = tl.arange(0, BLOCK_ROWS)
    wide = tl.int64 if BLOCK_ROWS * H * HEADS >= 2**31 else tl.int32
    first = tl.cast(tile, tl.int64) * BLOCK_ROWS
    left = tl.minimum(rows - first, BLOCK_ROWS).to(tl.int32)
    valid = local < left if BLOCK_ROWS > 1 else tl.full([1], True, tl.int1)  # a tile has a row
    return (first + local) * HEADS, first * (H * HEADS), local.to(wide) * (H * HEADS), valid


@triton.jit
def tiles_of(rows, BLOCK_ROWS):
    """The number of tiles of a group: of less than 2**31 programs, be the rows uint32 or int64, as from 2**31 on."""
    return tl.cast((rows - 1) // BLOCK_ROWS + 1, tl.int32)


@triton.jit
def columns_from(first, H, VECTOR, BLOCK_H):
    """Column numbers from `first` on, and which of them exist."""
    column = first + numbers(BLOCK_H, VECTOR)
    return column, column < H if H % BLOCK_H else tl.full([BLOCK_H], True, tl.int1)


@triton.jit
def tile_from(first, start, valid, H, VECTOR, BLOCK_H):
    """Column numbers from `first` on, and which of them exist; offsets and mask of those columns of a tile's rows."""
    column, exists = columns_from(first, H, VECTOR, BLOCK_H)
    return column, exists, start[:, None] + column[None, :], valid[:, None] & exists[None, :]


@triton.jit
def group_of(program, programs, SHARED, HEADS: tl.constexpr = 1):
    """A program's group, and its number in that group; neighbours take neighbouring HEADS. SHARED: None for one group.

    To divide takes 28 of the 630 instructions of a thread that norms 64 elements, in `forward_kernel`.
    """
    if SHARED is None:
        return tl.cast(program * 0, tl.int64), program
    else:
        turn = program // HEADS
        return tl.cast(turn // programs * HEADS + program % HEADS, tl.int64), turn % programs


@triton.jit
def first_of(group, rows, H, HEADS: tl.constexpr = 1):
    """The offset of a group's first row, as a product: the compiler loads as wide as it sees what divides that."""
    if HEADS == 1:
        return group * (tl.cast(rows, tl.int64) * H)
    else:
        return group // HEADS * (tl.cast(rows, tl.int64) * (H * HEADS)) + group % HEADS * H
