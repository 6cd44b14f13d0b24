"""The records of pointers that the kernels take, and where a group's part of each array begins.

A record is `jln._junction.arrays.Arrays`, the table's. A field is known to the compiler by its number, as Triton's
tuples are. No record with a None in it may be returned in Triton 3.6, so that the loop over its fields stands in each
kernel.
"""

import triton
import triton.language as tl

from jln._junction.arrays import TABLE
from jln._junction.kernels.addresses import first_of

NAMES = tl.constexpr(tuple(TABLE))
SHAPES = tl.constexpr(tuple(array.shape.name for array in TABLE.values()))
FIELDS = tl.constexpr(len(TABLE))


@triton.constexpr_function
def item(values, i):
    return values[i]


@triton.constexpr_function
def contains(names, name):
    return names is not None and name in names


@triton.constexpr_function
def position(names, name):
    return next(i for i, other in enumerate(names) if other == name)  # Triton's tuple has no `index`


@triton.jit
def copy_of(group, SHARED, NAME, HEADS):
    """The group whose copy of an operand to read: a shared one has a copy for each head."""
    return group % HEADS if contains(SHARED, NAME) else group


@triton.jit
def place(array_ptr, FIELD, group, rows, H, SHARED, HEADS):
    """The first element of a group's part of an array, by its shape in the table.

    FIELD: its number there. SHARED: as of `forward_kernel`; None for a result, of which every group has its own.
    """
    shape: tl.constexpr = item(SHAPES, FIELD)
    group = copy_of(group, SHARED, item(NAMES, FIELD), HEADS)
    if shape == "ROW":
        return array_ptr + first_of(group, rows, H, HEADS)
    elif shape == "NUMBER":
        return array_ptr + first_of(group, rows, 1, HEADS)
    elif shape == "BLOCK":
        return array_ptr + first_of(group, rows, H // 32, HEADS)
    elif shape == "COLUMN":
        return array_ptr + group * H
    else:
        tl.static_assert(shape == "ONE")
        return array_ptr + group
