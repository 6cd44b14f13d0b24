"""Eight bits of numbers that are off: what they may be, in numpy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import jln
from case import LARGEST, SCALE
from in_eight_bits import BLOCK, saturated
from tracked import Tracked

OF_KERNEL = jln.Float8()
OF_COTANGENT = {jln.Float8: jln.Float8(dtype=jnp.float8_e5m2), jln.MXFloat8: jln.MXFloat8()}


def quantised(y: Tracked, quantize: Any, levels: int) -> dict[str, Tracked]:
    """The numbers of a norm's result, with the scale and the largest that it tells, by the names of results.

    The numbers are those that y is rounded to, and off by what all that it may be is rounded to. So they are of the
    bits, but where the scale is the result's own: there they are y, and off by the rounding.
    """
    value, low, high = y.value, y.value - y.error, y.value + y.error
    if isinstance(quantize, jln.MXFloat8):
        scales = [_of_blocks(a, quantize.dtype) for a in _largest_of_blocks(y)]
        far = scales[2] > 2 * scales[1]
        made = [_numbers(a, s, quantize.dtype) for a in (low, high) for s in scales[1:]]
        numbers = _between(_numbers(value, scales[0], quantize.dtype), made, far, y.eps)
        return {"y": numbers, SCALE: _between(scales[0], scales[1:], far, y.eps)}
    amax = largest(y, levels)
    if quantize.scale is None:
        most = float(jnp.finfo(quantize.dtype).max)
        may_be_1 = (amax.value <= amax.error) & (amax.error > 0)  # the scale of zeros
        scale = Tracked(np.where(amax.value > 0, amax.value / most, 1), may_be_1 + amax.error / most, y.eps)
        return {"y": in_eight_bits(y, quantize), LARGEST: amax, SCALE: scale.stored("float32")}
    scale = np.float32(quantize.scale)
    made = [_numbers(a, scale, quantize.dtype) for a in (low, high)]
    numbers = _between(_numbers(value, scale, quantize.dtype), made, False, y.eps)
    return {"y": numbers, LARGEST: amax, SCALE: Tracked(np.broadcast_to(np.float64(scale), y.shape), 0, y.eps)}


def largest(y: Tracked, levels: int) -> Tracked:
    """The largest magnitude of each example, written out."""
    own = tuple(range(levels, y.value.ndim))
    value, low, high = (np.broadcast_to(a.max(own, keepdims=True), y.shape) for a in _magnitudes(y))
    return Tracked(value, np.maximum(value - low, high - value), y.eps)


def in_eight_bits(a: Tracked, quantize: Any) -> Tracked:
    """The same, and off by what rounding to eight bits may do, along whichever axes its blocks lie."""
    info = jnp.finfo(quantize.dtype)
    most, scale = float(info.max), getattr(quantize, "scale", None)
    size = a.magnitude + a.error
    largest_scale = 2 * size.max(initial=0) / most if scale is None else scale
    beyond = 0 if scale is None else np.maximum(size - most * scale, 0)
    return a.off_by(float(info.eps) / 2 * size + float(info.smallest_subnormal) / 2 * largest_scale + beyond)


def _magnitudes(y: Tracked) -> list[np.ndarray]:
    """The magnitudes of what y is, and the least and the most that they may be."""
    size, error = np.broadcast_arrays(y.magnitude, y.error)
    return [size, np.maximum(size - error, 0), size + error]


def _largest_of_blocks(y: Tracked) -> list[np.ndarray]:
    """The same of the largest of each block, written out."""
    of_blocks = (a.reshape(*a.shape[:-1], -1, BLOCK).max(-1) for a in _magnitudes(y))
    return [np.repeat(a, BLOCK, -1) for a in of_blocks]


def _of_blocks(largest: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.exp2(np.maximum(np.ceil(np.log2(largest / float(jnp.finfo(dtype).max))), -127))


def _numbers(y: np.ndarray, scale: Any, dtype: Any) -> np.ndarray:
    """The numbers that the bits of y stand for; the inverse and the product are rounded to float32."""
    scale = np.asarray(scale, np.float32)
    bits = saturated(y.astype(np.float32) * (np.float32(1) / scale), np.dtype(dtype))
    return bits.astype(np.float64) * scale


def _between(value: np.ndarray, made: list[np.ndarray], unknown: Any, eps: float) -> Tracked:
    """A value that is off by as much as those made are; by anything where `unknown`."""
    error = np.max([np.abs(a - value) for a in made], 0)
    return Tracked(value, np.where(unknown, np.inf, error), eps)
