"""Numbers on which quantisations are compared, the operators' own of them, and what a quantisation may have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jln._fuse.certificate import FLOATS
from jln._fuse.graph import Node
from jln._junction.arrays import BLOCK


@functools.cache
def probes(sizes: tuple[float, ...]) -> tuple[tuple[np.ndarray, float], ...]:
    """Arrays z `[blocks, 32]` of numbers of every size, within a block and from block to block, each with a scale.

    sizes: those of z that a part may tell from others. In the last array some rows are not finite.
    """
    generator = np.random.default_rng(0)
    rows = 512

    def numbers(exponents: np.ndarray) -> np.ndarray:
        signs = generator.choice((-1, 1), exponents.shape)
        return np.ldexp(signs * generator.uniform(1, 2, exponents.shape), exponents)

    near = numbers(generator.integers(-12, 3, (rows, BLOCK)))
    wide = numbers(generator.integers(-50, 50, (rows, BLOCK)))
    alike = numbers(generator.integers(-40, 40, (rows, 1)) + generator.integers(-2, 2, (rows, BLOCK)))
    alike[7] = 0
    scales = ((1.0, 1.0), (300.0, 0.7134), (1 / 5000, 3.1e-5), (70000.0, 411.7))
    drawn = [(z * size, scale) for z in (near, wide, alike) for size, scale in scales]
    drawn += [(near * size, size) for size in (3e-33, 2e34, *sizes)]
    unbounded = near[:8].copy()
    unbounded[1], unbounded[2, 5], unbounded[3, 7], unbounded[4] = np.nan, np.inf, -np.inf, -0.0
    return *drawn, (unbounded, 0.011)


def quantised(dtype: str, z: np.ndarray, scale: float | None, is_factor: bool) -> tuple[np.ndarray, np.ndarray]:
    """The operators' own eight bits and the scales of blocks, in float64. scale: None for those of blocks.

    Infinity stands for what may be anything, in a block that is not finite; NaN in eight bits is always NaN.
    """
    largest = float(jnp.finfo(dtype).max)
    of_blocks = np.maximum(np.abs(z).max(-1, keepdims=True), 2.0**-200)
    is_finite = np.isfinite(of_blocks)
    scales = np.where(is_finite, np.exp2(np.ceil(np.log2(of_blocks / largest)).clip(-127, 127)), np.inf)
    divisor = scales if scale is None else 1 / scale if is_factor else scale
    with np.errstate(all="ignore"):
        values = np.clip(z / divisor, -largest, largest).astype(jnp.dtype(dtype)).astype(np.float64)
    return values if scale is not None else np.where(is_finite | np.isnan(z), values, np.inf), scales


def equal(got: np.ndarray, wanted: np.ndarray) -> bool:
    """True of equal arrays; integers are the bits of powers of two."""
    if np.issubdtype(got.dtype, np.integer):
        wanted = np.log2(wanted) + 127
    got = got.astype(np.float64)
    return bool(np.all((got == wanted) | np.isinf(wanted) | (np.isnan(got) & np.isnan(wanted))))


def _converted(node: Node, a: np.ndarray) -> np.ndarray:
    name = node.output.dtype.name
    return a.astype(np.float64 if name in FLOATS else jnp.dtype(name))


def _bits(node: Node, a: np.ndarray) -> np.ndarray:
    """The bits as another dtype of as many; a float has those of its own dtype."""
    return _converted(node, np.ascontiguousarray(a.astype(node.inputs[0].dtype)).view(node.output.dtype))


def _selected(node: Node, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if which.dtype != np.bool_:
        raise NotImplementedError
    return np.where(which, cases[1], cases[0])


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, *arrays: function(*arrays)


LAYOUT = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose")
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": _plain(np.abs),
    "sign": _plain(np.sign),
    "neg": _plain(np.negative),
    "add": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _plain(np.multiply),
    "div": _plain(np.divide),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "clamp": _plain(lambda low, a, high: np.clip(a, low, high)),
    "exp2": _plain(np.exp2),
    "log": _plain(np.log),
    "log2": _plain(np.log2),
    "floor": _plain(np.floor),
    "ceil": _plain(np.ceil),
    "is_finite": _plain(np.isfinite),
    "eq": _plain(np.equal),
    "ne": _plain(np.not_equal),
    "lt": _plain(np.less),
    "le": _plain(np.less_equal),
    "gt": _plain(np.greater),
    "ge": _plain(np.greater_equal),
    "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or),
    "not": _plain(np.invert),
    "shift_left": _plain(np.left_shift),
    "shift_right_logical": _plain(np.right_shift),
    "select_n": _selected,
    "convert_element_type": _converted,
    "bitcast_convert_type": _bits,
    "copy": _plain(lambda a: a),
    "stop_gradient": _plain(lambda a: a),
    "copy_p": _plain(lambda a: a),
    "optimization_barrier": _plain(lambda a: a),
    "pvary": _plain(lambda a: a),
    "pcast": _plain(lambda a: a),
}
