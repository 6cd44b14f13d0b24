"""LayerNorm and RMSNorm, alone and with a residual added first: one operator, four public functions."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jln import _checks
from jln._core.derivatives import with_automatic_axes
from jln._norm import rules
from jln._norm.signature import Norm, Operands, Results, Settings

Axis = int | tuple[int, ...]


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> jax.Array:
    """Layer normalisation: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset`.

    Mean and (biased, two-pass) variance are taken over `axis`, for each element of the other axes by itself.
    Ba, Kiros, Hinton, "Layer Normalization" (2016).

    All arithmetic is in float32, for float64 `x` in float64; the result is rounded once. Every gradient has its
    argument's dtype and shape. Gradients are bitwise the same from run to run. From the Triton kernels a row's `y` and
    `dx` do not depend, bit for bit, on the other rows or on their number (with rows that lie side by side: as long as
    the axes behind the normalised one keep their sizes).

    Args:
      x: array of at least one axis: float16, bfloat16, float32 or float64. `M` rows of `H` elements.
      scale: the normalised axes' shape, in the order in which `axis` gives them (`[H]` for one axis); any supported
        dtype. None: no scale.
      offset: as `scale`.
      axis: the axis or axes to normalise over. Adjacent ones are read in place, wherever they are; others are
        transposed.
      epsilon: added to the variance; not negative, and no more than float32 holds, for float64 `x` float64.
      zero_centered_scale: multiply by `1 + scale`.
      dtype: of the result, which is rounded to it once: float32 for a router, bfloat16 from a float32 stream. None:
        that of `x`.
      implementation: "triton" (kernels; on the CPU with TRITON_INTERPRET=1), "xla", or None: Triton where the program
        is compiled for an NVIDIA GPU and jax-triton is installed, else XLA. A named one runs or raises.
      forward_mode: support forward mode too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`, `jax.hessian`), the same kernels
        serving reverse mode. Without it this is a `jax.custom_vjp` function, which has reverse mode only, and forward
        mode over it.

    Returns:
      y: `x`'s shape, in `dtype`.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, an axis is out of range or twice there, the normalised axes are empty, epsilon is
        negative or too large, or the implementation is unknown.
    """
    static = axis, epsilon, zero_centered_scale, dtype, implementation, forward_mode
    return _checked(x, None, scale, offset, *static, subtract_mean=True).y


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> jax.Array:
    """Root-mean-square normalisation: `y = x / sqrt(mean(x**2) + epsilon) * scale`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Arguments, dtypes, guarantees and errors are those
    of `layer_norm`.
    """
    static = axis, epsilon, zero_centered_scale, dtype, implementation, forward_mode
    return _checked(x, None, scale, None, *static, subtract_mean=False).y


def add_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`(layer_norm(x + residual, scale, offset), x + residual)`, the sum read and written once.

    The sum is in the promoted dtype of `x` and `residual`, and it is the rounded sum that is normalised. Guarantees and
    errors are those of `layer_norm`.

    Args:
      x: as in `layer_norm`.
      residual: `x`'s shape; any supported dtype.
      scale: as in `layer_norm`.
      offset: as in `layer_norm`.
      axis: as in `layer_norm`.
      epsilon: as in `layer_norm`.
      zero_centered_scale: as in `layer_norm`.
      dtype: of `y`, as in `layer_norm`.
      implementation: as in `layer_norm`.
      forward_mode: as in `layer_norm`.

    Returns:
      y: `x`'s shape, in `dtype`.
      total: `x + residual`, `x`'s shape and the promoted dtype.
    """
    static = axis, epsilon, zero_centered_scale, dtype, implementation, forward_mode
    return tuple(_checked(x, residual, scale, offset, *static, adds=True, subtract_mean=True))


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`(rms_norm(x + residual, scale), x + residual)`; arguments and results are those of `add_layer_norm`."""
    static = axis, epsilon, zero_centered_scale, dtype, implementation, forward_mode
    return tuple(_checked(x, residual, scale, None, *static, adds=True, subtract_mean=False))


def normalised(
    x,
    scale,
    offset,
    *,
    axis: Axis,
    epsilon: float,
    subtract_mean: bool,
    dtype: DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """What the modules call: `layer_norm` or `rms_norm`, this one with an offset too.

    A module's dtype may be wider than x's (bfloat16 x, float32 parameters) or narrower; there is one rounding still.
    The frameworks' own layers can be differentiated in forward mode, so these can.
    """
    static = axis, epsilon, False, dtype, implementation, True
    return _checked(x, None, scale, offset, *static, subtract_mean=subtract_mean).y


# From the public functions to the operator


def _checked(
    x,
    residual,
    scale,
    offset,
    axis: Axis,
    epsilon: float,
    zero_centered_scale: bool,
    dtype: DTypeLike | None,
    implementation: str | None,
    forward_mode: bool,
    *,
    subtract_mean: bool,
    adds: bool = False,
) -> Results:
    x, residual = _checks.array("x", x), _checks.array("residual", residual) if adds else None
    scale, offset = _checks.optional_array("scale", scale), _checks.optional_array("offset", offset)
    axes = _checks.axes(axis, x)
    normalised = tuple(x.shape[a] for a in axes)
    _checks.shape("residual", residual, x.shape, "that of x")
    _checks.shape("scale", scale, normalised, f"that of x's axes {axes}")
    _checks.shape("offset", offset, normalised, f"that of x's axes {axes}")
    norm = Norm(
        _merged_axis(axes, x.ndim),
        _checks.epsilon(epsilon, *(a.dtype for a in (x, residual) if a is not None)),
        subtract_mean,
        _checks.zero_centered_scale(zero_centered_scale, scale),
    )
    settings = Settings(norm, _checks.dtype(dtype, x.dtype), _checks.implementation(implementation))
    forward_mode = _checks.flag("forward_mode", forward_mode)
    return _jitted(settings, axes, forward_mode, Operands(x, residual, scale, offset))


def _adjacent(order: list[int]) -> bool:
    return order == list(range(order[0], order[-1] + 1))


def _merged_axis(axes: tuple[int, ...], ndim: int) -> int:
    """Where the normalised axes are once they are one, counted from the end: in place if they are adjacent."""
    order = sorted(axes)
    return order[-1] - ndim if _adjacent(order) else -1


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _jitted(settings: Settings, axes: tuple[int, ...], forward_mode: bool, operands: Operands) -> Results:
    def like_x(specs: Operands) -> Results:
        return Results(specs.x, None if specs.residual is None else specs.x)

    return with_automatic_axes(functools.partial(_on_one_axis, settings, axes, forward_mode), like_x, operands)


def _on_one_axis(settings: Settings, axes: tuple[int, ...], forward_mode: bool, operands: Operands) -> Results:
    """Make the normalised axes one, and several again."""
    x, order = operands.x, sorted(axes)
    h = math.prod(x.shape[a] for a in order)
    ndim = x.ndim - len(order) + 1
    first = ndim + settings.norm.axis
    last = range(first, first + len(order))

    def to_one_axis(a: jax.Array) -> jax.Array:
        a = a if _adjacent(order) else jnp.moveaxis(a, order, last)
        return a.reshape(*a.shape[:first], h, *a.shape[first + len(order) :])

    def to_same_rank(parameter: jax.Array) -> jax.Array:
        in_order = parameter.transpose([axes.index(a) for a in order])
        return in_order.reshape([h if i == first else 1 for i in range(ndim)])

    def from_one_axis(a: jax.Array) -> jax.Array:
        if _adjacent(order):
            return a.reshape(x.shape)
        moved = a.reshape(*a.shape[:first], *(x.shape[i] for i in order))
        return jnp.moveaxis(moved, last, order)

    arrays, parameters = (operands.x, operands.residual), (operands.scale, operands.offset)
    merged = Operands(*jax.tree.map(to_one_axis, arrays), *jax.tree.map(to_same_rank, parameters))
    return jax.tree.map(from_one_axis, rules.operator(settings, merged, forward_mode))
