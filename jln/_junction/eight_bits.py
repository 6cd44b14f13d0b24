"""Results in eight bits, in plain jnp.

The result y of (4) is q, by one scale S for all of it, whose next value is made of the largest |y| of the rows; or by
one for each block of 32 elements, E, a power of two as in the microscaling formats of the Open Compute Project (version
1.0, 2023). Q is the largest number of the eight bits, (1 + 3/4) * 2^p for e4m3 (p = 8) and e5m2 (p = 15):

    (50) q     = y * (1 / S), no more than Q and no less than -Q, rounded to the nearest, of two to the even
    (51) a_m   = max_h |y_mh|
    (52) E     = 2^max(e - p, -127), with the e that has max_h |y_mh| / 2^e in (7/8, 7/4], over the block's h
    (53) q     = y / E, as in (50), rounded

So E is the least power of two with no |y| above Q * E, as cuDNN and `jax.nn.scaled_dot_general` choose it; the
specification's own example takes the power of two below max |y|, times 2^-p, and saturates the block's largest. A block
with an infinity or a NaN has the scale NaN, of which nothing is told but that q is no number either where y is none.
Gradients go straight through: the cotangent of what q stands for is taken for dy.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jln._junction.arrays import BLOCK, Arrays, Norm

LARGEST_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}  # p of (52)


def bits_of_largest(y: Array, axis: int | None, keepdims: bool = False) -> Array:
    """The bits of the largest |y|, which as integers are in the order of the numbers, NaN above all.

    XLA's CPU backend finds no NaN in a maximum of numbers.
    """
    bits = lax.bitcast_convert_type(jnp.abs(y), jnp.int32)
    return jnp.max(bits, axis, keepdims=keepdims, initial=None if y.size else 0)


def largest(y: Array, axis: int | None = None) -> Array:
    """The largest |y| of an axis, which stays, or of all; NaN if there is one."""
    return lax.bitcast_convert_type(bits_of_largest(y, axis, keepdims=axis is not None), jnp.float32)


def in_eight_bits(y: Array, operands: Arrays, norm: Norm, dtypes: Arrays) -> Arrays:
    """Terms (50) to (53) of y in float32, those that `dtypes` asks for. Without a scale y is y as it is."""
    y_max, block_scale = None if dtypes.y_max is None else largest(y, norm.axis), None  # (51)
    if norm.blocks:
        y, block_scale = by_block_scales(y, norm.blocks, y.ndim - 1)
    elif operands.y_scale is not None and dtypes.y is not None:
        y = by_scale(y, operands.y_scale, dtypes.y)
    return Arrays(y=y, y_max=y_max, block_scale=block_scale)


def by_scale(y: Array, scale: Array, dtype: str) -> Array:
    """Term (50) before the rounding."""
    return _saturate(y * (1 / scale), dtype)  # (50)


def by_block_scales(
    y: Array, dtype: str, axis: int, bits_of_largest: Callable[[Array, int], Array] = bits_of_largest
) -> tuple[Array, Array]:
    """Terms (52) and (53), before the rounding, of blocks along an axis: y, and the bits of the scales."""
    blocks = y.reshape(*y.shape[:axis], y.shape[axis] // BLOCK, BLOCK, *y.shape[axis + 1 :])
    bits = bits_of_largest(blocks, axis + 1)
    biased = jnp.maximum(((bits + 0x1FFFFF) >> 23) - LARGEST_EXPONENT[dtype], 0)  # (52): 7/4 carries
    biased = jnp.where(bits >= 0x7F800000, 255, biased)
    inverse = lax.bitcast_convert_type((254 - biased) << 23, jnp.float32)
    y = (blocks * jnp.expand_dims(inverse, axis + 1)).reshape(y.shape)  # (53)
    return _saturate(y, dtype), biased.astype(jnp.uint8)


def _saturate(y: Array, dtype: str) -> Array:
    bound = float(jnp.finfo(dtype).max)
    return jnp.clip(y, -bound, bound)
