"""Eight bits by numpy and ml_dtypes, written from the formats' definitions and not as the kernels make them."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 32


class Bits(NamedTuple):
    """The numbers in eight bits, the scale or scales in float32, and the largest magnitude, None of block scales."""

    values: np.ndarray
    scale: np.ndarray
    amax: Any = None


def saturated(y: np.ndarray, dtype: Any) -> np.ndarray:
    """The nearest numbers of the dtype, of two the even one, and no infinity."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(y, -largest, largest).astype(np.float32).astype(dtype)


def scaled(y: Any, scale: Any, dtype: Any) -> Bits:
    """All of y by one scale: its inverse and the products are rounded to float32, then to eight bits."""
    with np.errstate(all="ignore"):
        y, scale = np.asarray(y, np.float32), np.float32(scale)
        return Bits(saturated(y * (np.float32(1) / scale), dtype), scale, np.max(np.abs(y)))


def block_scaled(y: Any, dtype: Any) -> Bits:
    """Each 32 of a row by the least power of two with which none is above the largest number; at least 2^-127."""
    with np.errstate(all="ignore"):
        y = np.asarray(y, np.float64)
        blocks = y.reshape(*y.shape[:-1], -1, BLOCK)
        largest = np.max(np.abs(blocks), -1)
        exponent = np.ceil(np.log2(largest / float(ml_dtypes.finfo(dtype).max)))
        scale = np.where(np.isfinite(largest), np.exp2(np.maximum(exponent, -127)), np.nan)
        values = saturated(blocks / scale[..., None], dtype).reshape(y.shape)
    return Bits(values, scale.astype(np.float32))


def spread(scale: Any) -> np.ndarray:
    """The scale of each element, of one scale or of one for each block."""
    scale = np.asarray(scale, np.float32)
    return np.repeat(scale, BLOCK, -1) if scale.ndim else scale


def every_bfloat16(flushed: bool = False) -> np.ndarray:
    """All 65,536 numbers of bfloat16 in float32, [64, 1, 1024]: every number is in a block with its neighbours.

    flushed: 0 in place of those below 2^-126, as XLA's CPU backend reads them.
    """
    bits = np.arange(2**16, dtype=np.uint32).reshape(2, 64, 512).transpose(1, 0, 2).reshape(64, 1, 1024)
    numbers = (bits << np.uint32(16)).view(np.float32)
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, np.float32(0), numbers) if flushed else numbers


def compare(got: Any, true: Bits) -> None:
    """Assert that a `jln.Quantized` is the same, bit for bit, but for what is NaN or in a block with the scale NaN."""
    scale = np.asarray(got.scale, np.float32)
    np.testing.assert_array_equal(scale, true.scale)
    bits, expected = (np.asarray(a).view(np.uint8) & 0xFF for a in (got.values, true.values))
    is_nan = np.isnan(np.asarray(true.values, np.float32))
    known = ~np.isnan(np.broadcast_to(spread(scale), is_nan.shape))
    np.testing.assert_array_equal(np.isnan(np.asarray(got.values, np.float32))[known], is_nan[known])
    known &= ~is_nan
    np.testing.assert_array_equal(bits[known], expected[known])
    if true.amax is not None:
        np.testing.assert_array_equal(np.asarray(got.amax), true.amax)
