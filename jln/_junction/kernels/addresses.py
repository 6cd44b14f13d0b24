"""Addresses in the norms' and the fused operators' kernels: where a program's rows, columns and groups lie."""

import triton
import triton.language as tl


@triton.jit
def numbers(N: tl.constexpr, VECTOR: tl.constexpr):
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
def rows_of(
    tile, rows, H: tl.constexpr, INNER: tl.constexpr, INTERLEAVED: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """The rows of one tile of a group, numbered from the group's first row.

    INTERLEAVED: how many groups lie interleaved, and the rows of a group that lie together, its run; 1 for one group.
    INNER rows side by side are a run, too.

    Returns where the rows are among all rows, the offset of the tile's first element, the offsets of the rows' first
    elements from there, and which rows exist. What differs between a thread's rows has 32 bits where it can, and is a
    constant.
    """
    local = numbers(BLOCK_ROWS, None if INNER == 1 else VECTOR)
    groups: tl.constexpr = INTERLEAVED.groups
    run: tl.constexpr = INTERLEAVED.run
    wide = tl.int64 if BLOCK_ROWS * H * INNER * groups >= 2**31 else tl.int32
    if run == 1:
        first = tl.cast(tile, tl.int64) * BLOCK_ROWS
        left = tl.minimum(rows - first, BLOCK_ROWS).to(tl.int32)
        valid = local < left if BLOCK_ROWS > 1 else tl.full([1], True, tl.int1)  # a tile has a row
        row = (first + local) * groups
        return row, first * (H * groups), local.to(wide) * (H * groups), valid
    else:
        tiles: tl.constexpr = (run + BLOCK_ROWS - 1) // BLOCK_ROWS
        outer = tl.cast(tile // tiles, tl.int64)
        inner = tl.cast(tile % tiles, tl.int64) * BLOCK_ROWS
        valid = inner + local < run if run % BLOCK_ROWS else tl.full([BLOCK_ROWS], True, tl.int1)
        row = outer * (run * groups) + inner + local
        step: tl.constexpr = H if INNER == 1 else 1
        return row, outer * (H * run * groups) + inner * step, local.to(wide) * step, valid


@triton.jit
def first_row_of(group, rows, INTERLEAVED: tl.constexpr):
    """The place of a group's first row among all rows, of which some groups lie interleaved."""
    groups: tl.constexpr = INTERLEAVED.groups
    if groups == 1:
        return group * rows
    else:
        return group // groups * (tl.cast(rows, tl.int64) * groups) + group % groups * INTERLEAVED.run


@triton.jit
def start_of(group, rows, H: tl.constexpr, INNER: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The offset of a group's first element."""
    groups: tl.constexpr = INTERLEAVED.groups
    if groups == 1:
        return group * size_of(rows, H, INNER)
    else:
        together = size_of(rows, H, INNER) * groups
        return group // groups * together + group % groups * (H * INTERLEAVED.run)


@triton.jit
def tiles_of(rows, RUN: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The number of tiles of a group. A tile never crosses what lies between its runs of rows.

    A grid has less than 2**31 programs, whatever the number of rows, which comes as uint32 or int64 from 2**31 on.
    """
    if RUN == 1:
        return tl.cast((rows - 1) // BLOCK_ROWS + 1, tl.int32)
    else:
        return tl.cast(rows // RUN * ((RUN + BLOCK_ROWS - 1) // BLOCK_ROWS), tl.int32)


@triton.jit
def size_of(rows, H: tl.constexpr, INNER: tl.constexpr):
    """The number of elements of a group, as a product from which the compiler sees what divides it.

    The compiler loads no wider than that allows.
    """
    return tl.cast(rows // INNER, tl.int64) * (H * INNER)


@triton.jit
def columns_from(first, H: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr, BLOCK_H: tl.constexpr):
    """Column numbers from `first` on, their offsets in a row, and which of them exist."""
    column = first + numbers(BLOCK_H, VECTOR if INNER == 1 else None)
    exists = column < H if H % BLOCK_H else tl.full([BLOCK_H], True, tl.int1)
    if H * INNER >= 2**31:
        return column, column.to(tl.int64) * INNER, exists
    else:
        return column, column * INNER, exists


@triton.jit
def tile_from(first, start, valid, H: tl.constexpr, INNER: tl.constexpr, VECTOR: tl.constexpr, BLOCK_H: tl.constexpr):
    """Column numbers from `first` on, and which of them exist; offsets and mask of those columns of a tile's rows."""
    column, step, exists = columns_from(first, H, INNER, VECTOR, BLOCK_H)
    return column, exists, start[:, None] + step[None, :], valid[:, None] & exists[None, :]


@triton.constexpr_function
def contains(names, name):
    return names is not None and name in names


@triton.constexpr_function
def count(values):
    return len(values)


@triton.constexpr_function
def position(names, name):
    return next(i for i, other in enumerate(names) if other == name)  # Triton's tuple has no `index`


@triton.jit
def group_of(program, programs, SHARED: tl.constexpr):
    """A program's group, and its number in that group. SHARED is None where there is one group.

    To divide takes 28 of the 630 instructions of a thread that norms 64 elements, in `forward_kernel`.
    """
    if SHARED is None:
        return tl.cast(program * 0, tl.int64), program
    else:
        return tl.cast(program // programs, tl.int64), program % programs


@triton.jit
def group_and_tile(tiles, SHARED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """A program's group and tile, where each tile has a program.

    Neighbouring programs take neighbouring groups of those that lie interleaved.
    """
    if INTERLEAVED.groups == 1:
        return group_of(tl.program_id(0), tiles, SHARED)
    else:
        together = tl.program_id(0) // INTERLEAVED.groups
        group = together // tiles * INTERLEAVED.groups + tl.program_id(0) % INTERLEAVED.groups
        return group.to(tl.int64), together % tiles


@triton.jit
def copy_of(group, SHARED: tl.constexpr, OPERAND: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The group whose copy of an operand to read: a shared one has a copy for each group that lies interleaved."""
    if contains(SHARED, OPERAND):
        return group % INTERLEAVED.groups
    else:
        return group


# Where a group's part of an array begins; None for an array that is absent, by no `return`: none may say so in Triton
# 3.6. A result's name is never SHARED.


@triton.jit
def rows_at(
    array_ptr, NAME: tl.constexpr, group, rows,
    H: tl.constexpr, INNER: tl.constexpr, INTERLEAVED: tl.constexpr, SHARED: tl.constexpr, base=0,
):  # fmt: skip
    """The first element of a group's rows, or that which lies `base` behind it: of [G, rows, H]."""
    if array_ptr is not None:
        return array_ptr + (start_of(copy_of(group, SHARED, NAME, INTERLEAVED), rows, H, INNER, INTERLEAVED) + base)


@triton.jit
def numbers_at(
    array_ptr, NAME: tl.constexpr, group, rows, INTERLEAVED: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """The number of a group's first row, where each row has one: of [G, rows]."""
    if array_ptr is not None:
        return array_ptr + first_row_of(copy_of(group, SHARED, NAME, INTERLEAVED), rows, INTERLEAVED)


@triton.jit
def columns_at(
    array_ptr, NAME: tl.constexpr, group, H: tl.constexpr, INTERLEAVED: tl.constexpr, SHARED: tl.constexpr
):  # fmt: skip
    """The first of a group's columns: of [G, H]."""
    if array_ptr is not None:
        return array_ptr + copy_of(group, SHARED, NAME, INTERLEAVED) * H


@triton.jit
def columns_by_row(offset_ptr, group, row, rows, INTERLEAVED: tl.constexpr, OFFSET: tl.constexpr):
    """The first column of each row, [BLOCK_ROWS, 1]: of an offset that is read row by row, found by OFFSET.

    row: the rows' places in their group, as `rows_of` returns them.
    """
    if offset_ptr is not None:
        place = first_row_of(group, rows, INTERLEAVED) + row
        at = place * 0
        for i in tl.static_range(0, count(OFFSET.terms), 3):
            at += place // OFFSET.terms[i] % OFFSET.terms[i + 1] * OFFSET.terms[i + 2]
        return offset_ptr + at[:, None]
