"""Where a program's rows, columns and groups lie, and how it loads what has one value a row or a column: what the
norms' kernels and the fused operators' share.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of(tile, rows, H: tl.constexpr, INNER: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The rows of one tile: their numbers, the offsets of their first elements, and which of them exist."""
    if INNER == 1:
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        return row, row * H, row < rows
    else:
        tiles: tl.constexpr = (INNER + BLOCK_ROWS - 1) // BLOCK_ROWS
        outer = tl.cast(tile // tiles, tl.int64)
        inner = tl.cast(tile % tiles, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        return outer * INNER + inner, outer * (H * INNER) + inner, inner < INNER


@triton.jit
def tiles_of(rows, INNER: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """How many tiles a group has. A tile never crosses the axes in front of the normalised one.

    A grid has less than 2**31 programs, whatever the number of rows, which comes as uint32 or int64 from 2**31 on.
    """
    if INNER == 1:
        return tl.cast((rows - 1) // BLOCK_ROWS + 1, tl.int32)
    else:
        return tl.cast(rows // INNER * ((INNER + BLOCK_ROWS - 1) // BLOCK_ROWS), tl.int32)


@triton.jit
def size_of(rows, H: tl.constexpr, INNER: tl.constexpr):
    """The elements of a group, as a product from which the compiler sees what they are a multiple of: it loads no wider
    than that allows.
    """
    return tl.cast(rows // INNER, tl.int64) * (H * INNER)


@triton.jit
def columns_from(first, H: tl.constexpr, INNER: tl.constexpr, BLOCK_H: tl.constexpr):
    """Column numbers from `first` on, their offsets in a row, and which of them exist."""
    column = first + tl.arange(0, BLOCK_H)
    if H * INNER >= 2**31:
        return column, column.to(tl.int64) * INNER, column < H
    else:
        return column, column * INNER, column < H


@triton.constexpr_function
def contains(names, name):
    return name in names


@triton.constexpr_function
def position(names, name):
    return next(i for i, other in enumerate(names) if other == name)  # Triton's tuple has no `index`


@triton.jit
def copy_of(group, SHARED: tl.constexpr, OPERAND: tl.constexpr):
    """The group whose copy of an operand to read."""
    if contains(SHARED, OPERAND):
        return group * 0
    else:
        return group


@triton.jit
def load_scale(scale_ptr, column, exists, NORM: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr):
    """The factor of every column; 1 where there is no scale."""
    scale = tl.full([BLOCK_H], 1.0, COMPUTE)
    if scale_ptr is not None:
        given = tl.load(scale_ptr + column, mask=exists, other=0.0).to(COMPUTE)
        scale = scale + given if NORM.zero_centered_scale else given  # pyright: ignore[reportAttributeAccessIssue]
    return scale


@triton.jit
def load_vector(vector_ptr, at, exists, BLOCK: tl.constexpr, COMPUTE: tl.constexpr):
    """Zeros where there is none."""
    vector = tl.zeros([BLOCK], COMPUTE)
    if vector_ptr is not None:
        vector = tl.load(vector_ptr + at, mask=exists, other=0.0).to(COMPUTE)
    return vector
