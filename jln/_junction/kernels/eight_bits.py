"""Rows in eight bits, by one scale for all of them or by a power of two for every 32 elements, in the forward kernel.

The numbers in brackets are the equations of `jln._junction.eight_bits`.
"""

import triton
import triton.language as tl


@triton.jit
def bits_of(y, mask):
    """The bits of |y|, which as integers are in the order of the numbers, NaN above all; 0 of what is not there."""
    return tl.where(mask, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def by_block_scales(r, y, mask, base, start, first, valid, H, EXPONENT, BLOCK_ROWS, BLOCK_H):
    """Divide the columns from `first` on by the scale of each 32 of a row, and store the scales if they are wanted.

    base, start: the offset of the tile's first scale, and from there those of the rows' first ones.
    EXPONENT: that of the largest number of the eight bits.
    """
    blocks: tl.constexpr = BLOCK_H // 32
    bits = tl.max(tl.reshape(bits_of(y, mask), (BLOCK_ROWS, blocks, 32)), axis=2)
    biased = tl.maximum(((bits + 0x1FFFFF) >> 23) - EXPONENT, 0)  # (52): 7/4 carries
    biased = tl.where(bits >= 0x7F800000, 255, biased)  # as biased exponents
    if r.block_scale is not None:
        block = first // 32 + tl.arange(0, blocks)
        exists = valid[:, None] & (block < H // 32)[None, :]
        tl.store(r.block_scale + base + (start[:, None] + block[None, :]), biased.to(tl.uint8), mask=exists)
    inverse = ((254 - biased) << 23).to(tl.float32, bitcast=True)
    y = tl.reshape(y, (BLOCK_ROWS, blocks, 32)) * inverse[:, :, None]  # (53)
    return tl.reshape(y, (BLOCK_ROWS, BLOCK_H))


@triton.jit
def rounded(y, TYPE):
    """`y` in a type: of eight bits the nearest number, no more than the largest, and NaN of NaN."""
    if TYPE.primitive_bitwidth == 8:
        largest: tl.constexpr = 448.0 if tl.float8e4nv == TYPE else 57344.0
        y = tl.clamp(y, -largest, largest, propagate_nan=tl.PropagateNan.ALL)  # (50), (53)
    return y.to(TYPE)
