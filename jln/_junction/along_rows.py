"""A norm's result from its statistics, in eight bits, with a scale for every 32 rows of a column: one operation.

A product that sums over rows reads it. Blocks are those of all rows, one axis behind the other; a last one that rows do
not fill ends with zeros, which are in the result. The operation sees the rows of a block as one axis in front of H,
which devices do not split; where the last block is not filled, that axis has all rows.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jln._core.layout import Dim, Dims, Kind, Layout, Result
from jln._junction.arrays import BLOCK, TABLE, Arrays, Norm, Shape
from jln._junction.eight_bits import bits_of_largest as largest_of_bits
from jln._junction.eight_bits import by_block_scales
from jln._junction.formulas import Product, common_batch, scaled, wide, with_batch


class AlongRows(NamedTuple):
    """The settings of the operation. transposed: whether its results have H in front of the rows, and not behind."""

    norm: Norm
    transposed: bool


def takes(norm: Norm) -> bool:
    """True where all rows have one scale and one offset."""
    return not norm.has_groups


def in_blocks_of_rows(
    operation: Callable[..., Arrays], operands: Arrays, settings: AlongRows, dtype: str
) -> tuple[Array, Array]:
    """The values and the bits of the scales, of x `[*rows, H]`.

    They are `[*rows, H]` or `[H, *rows]` with a 32nd of the last rows for the scales. Where the last axis of rows is no
    multiple of 32, all rows are one axis, and so many more that it is.
    """
    *rows, h = operands.x.shape
    n = math.prod(rows)
    if not rows or rows[-1] % BLOCK:
        rows = [n]
    within = (*rows[:-1], rows[-1] // BLOCK, BLOCK) if n % BLOCK == 0 else (n,)

    def split(name: str, a: Array) -> Array:
        of_rows = [1] * len(within) if TABLE[name].shape is Shape.COLUMN else within
        return a.reshape(*of_rows, a.shape[-1])

    given = Arrays(**{name: split(name, a) for name, a in operands.present().items()})
    made = operation(given, settings, Arrays(y=dtype, block_scale="uint8"))

    def joined(a: Array, size: int) -> Array:
        of_rows = (*rows[:-1], -(-rows[-1] // BLOCK) * size)
        return a.reshape(h, *of_rows) if settings.transposed else a.reshape(*of_rows, h)

    return joined(made.y, BLOCK), joined(made.block_scale, 1)


def bits_of_largest(blocks: Array, axis: int) -> Array:
    """The bits of the largest magnitude as a number: of bits XLA's GPU backend writes out what is transposed.

    XLA's CPU backend may overlook a NaN here, which is NaN in eight bits, too.
    """
    return lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis), jnp.int32)


def formula(
    operands: Arrays, settings: AlongRows, dtypes: Arrays, batch_dims: int, *, largest: Callable = bits_of_largest
) -> Arrays:
    """Terms (3), (4), (52) and (53), of x gated by (41), y gated by (42), and with what is added by (30)."""
    read = operands.x if operands.x_z is None else Product(operands.x, operands.x_z)  # (41)
    y = scaled(read, operands.scale, operands.offset, operands.mean, operands.rstd, settings.norm)
    if operands.z is not None:
        y = wide(Product(y, operands.z))  # (42)
    if operands.added is not None:
        y = y + operands.added.astype(y.dtype)  # (30)
    y = with_batch(y, common_batch(batch_dims, *operands))
    y = jnp.pad(y, [(0, -n % BLOCK if i == y.ndim - 2 else 0) for i, n in enumerate(y.shape)])
    axis = y.ndim - 2
    if settings.transposed:  # first: so XLA writes it in no more than eight bits
        y, axis = jnp.moveaxis(y, -1, batch_dims), y.ndim - 1
    y, block_scale = by_block_scales(y, dtypes.y, axis, largest)
    return Arrays(y=y.astype(dtypes.y), block_scale=block_scale)


formula_cpu = functools.partial(formula, largest=largest_of_bits)


def layout(operands: Arrays, settings: AlongRows, dtypes: Arrays, batch_dims: int) -> Layout:
    """The layout of the operation, in which all but a block's rows are alike."""
    ndim = operands.x.ndim

    def dims(name: str) -> Dims:
        of_x = [Dim(Kind.ROW, i) for i in range(ndim)]
        if TABLE[name].shape is Shape.COLUMN:
            of_x[-1] = Dim(Kind.ROW, ndim - 1, stored_as="parameter")
        return (*of_x[:-2], Dim(Kind.HIDDEN), of_x[-1])

    def result(index: int) -> Result:
        *of_rows, _, h = dims("x")
        of_rows += [Dim(Kind.HIDDEN, index)]  # a scale, or rows and zeros
        if settings.transposed:
            return Result((*of_rows[:batch_dims], h, *of_rows[batch_dims:]))
        return Result((*of_rows, h))

    of_operands = Arrays(**{name: dims(name) for name in operands.present()})
    written = Arrays(y=result(1), block_scale=result(2))
    return Layout.of(operands, of_operands, dtypes, written, whole=(Kind.HIDDEN,))
