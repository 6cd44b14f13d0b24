"""LayerNorm and RMSNorm, alone and with a residual added first: one operator, four public functions."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jln import _checks
from jln._transforms import Operation
from jln._xla import layer_norm as xla

Axis = int | tuple[int, ...]


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Layer normalisation: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset`.

    Mean and (biased, two-pass) variance are taken over `axis`, for each element of the other axes by itself.
    Ba, Kiros, Hinton, "Layer Normalization" (2016).

    All arithmetic is in float32, for float64 `x` in float64; the result is rounded once. Every gradient has its
    argument's dtype and shape. Gradients are bitwise the same from run to run, and a row's `y` and `dx` do not depend,
    bit for bit, on the other rows or on their number.

    Args:
      x: array of at least one axis: float16, bfloat16, float32 or float64. `M` rows of `H` elements.
      scale: the normalised axes' shape, in the order in which `axis` gives them (`[H]` for one axis); any supported
        dtype. None: no scale.
      offset: as `scale`.
      axis: the axis or axes to normalise over. Adjacent ones are read in place, wherever they are; others are
        transposed.
      epsilon: added to the variance; not negative.
      zero_centered_scale: multiply by `1 + scale`.
      implementation: "triton" (kernels; on the CPU with TRITON_INTERPRET=1), "xla", or None: Triton where the program
        is compiled for an NVIDIA GPU and jax-triton is installed, else XLA. A named one runs or raises.

    Returns:
      y: `x`'s shape and dtype.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, an axis is out of range or twice there, the normalised axes are empty, epsilon is
        negative, or the implementation is unknown.
    """
    options = _Options(axis, epsilon, zero_centered_scale, implementation, subtract_mean=True)
    return _checked(options, x, None, scale, offset)[0]


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Root-mean-square normalisation: `y = x / sqrt(mean(x**2) + epsilon) * scale`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Arguments, dtypes, guarantees and errors are those
    of `layer_norm`.
    """
    options = _Options(axis, epsilon, zero_centered_scale, implementation, subtract_mean=False)
    return _checked(options, x, None, scale, None)[0]


def add_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`(layer_norm(x + residual, scale, offset), x + residual)`, the sum read and written once.

    The sum is in the promoted dtype of `x` and `residual`, and it is the rounded sum that is normalised.

    Args:
      residual: `x`'s shape; any supported dtype.
      The others are those of `layer_norm`.

    Returns:
      y: `x`'s shape and dtype.
      total: `x + residual`, `x`'s shape and the promoted dtype.
    """
    options = _Options(axis, epsilon, zero_centered_scale, implementation, subtract_mean=True)
    return _checked(options, x, residual, scale, offset, adds=True)


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`(rms_norm(x + residual, scale), x + residual)`; arguments and results are those of `add_layer_norm`."""
    options = _Options(axis, epsilon, zero_centered_scale, implementation, subtract_mean=False)
    return _checked(options, x, residual, scale, None, adds=True)


@dataclasses.dataclass(frozen=True)
class _Options:
    """The static arguments; after `_to_one_axis`, `axis` is a negative int."""

    axis: Axis
    epsilon: float
    zero_centered_scale: bool
    implementation: str | None
    subtract_mean: bool

    def formula(self) -> dict:
        """What the forward and the backward operation are told."""
        return dataclasses.asdict(self)


class _Dtypes(NamedTuple):
    """What the backward rule must know of arguments that it does not save."""

    x: jnp.dtype
    residual: jnp.dtype | None
    offset: jnp.dtype | None


_forward = Operation(
    "jln_norm_forward", xla=xla.forward, xla_cpu=xla.forward_cpu, triton=lambda: _kernels().forward
)
_backward = Operation(
    "jln_norm_backward", xla=xla.backward, xla_cpu=xla.backward_cpu, triton=lambda: _kernels().backward
)


def _kernels():
    from jln._triton import layer_norm as triton

    return triton


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(options: _Options, dtypes: _Dtypes, x, residual, scale, offset):
    """-> (y, total); total is None without a residual."""
    y, total, _, _ = _forward(x, residual, scale, offset, save_statistics=False, **options.formula())
    return y, total


def _norm_forward(options: _Options, dtypes: _Dtypes, *arguments: CustomVJPPrimal):
    x, residual, scale, offset = (None if a is None else a.value for a in arguments)
    y, total, mean, rstd = _forward(x, residual, scale, offset, save_statistics=True, **options.formula())
    return (y, total), (x if total is None else total, scale, mean, rstd)


def _norm_backward(options: _Options, dtypes: _Dtypes, residuals, cotangents):
    dy, dtotal = cotangents
    if isinstance(dtotal, SymbolicZero):  # the sum was not used: do not read an array of zeros
        dtotal = None
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros(dy.shape, dy.dtype)
    total, scale, mean, rstd = residuals
    dx, dscale, doffset = _backward(
        dy, dtotal, total, scale, mean, rstd, doffset_dtype=dtypes.offset, **options.formula()
    )
    dresidual = None if dtypes.residual is None else dx.astype(dtypes.residual)
    return dx.astype(dtypes.x), dresidual, dscale, doffset


_norm.defvjp(_norm_forward, _norm_backward, symbolic_zeros=True)


def _checked(options: _Options, x, residual, scale, offset, adds: bool = False):
    x = _checks.array("x", x)
    residual = _checks.array("residual", residual) if adds else None
    scale, offset = _checks.optional_array("scale", scale), _checks.optional_array("offset", offset)
    options = dataclasses.replace(
        options,
        axis=_checks.axes(options.axis, x),
        epsilon=_checks.epsilon(options.epsilon),
        zero_centered_scale=_checks.flag("zero_centered_scale", options.zero_centered_scale),
        implementation=_checks.implementation(options.implementation),
    )
    normalised = tuple(x.shape[a] for a in options.axis)
    _checks.shape("residual", residual, x.shape, "that of x")
    _checks.shape("scale", scale, normalised, f"that of x's axes {options.axis}")
    _checks.shape("offset", offset, normalised, f"that of x's axes {options.axis}")
    if options.zero_centered_scale and scale is None:
        raise ValueError("zero_centered_scale=True needs a scale; got scale=None")
    return _jitted(options, x, residual, scale, offset)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _jitted(options: _Options, x, residual, scale, offset):
    """Bring the normalised axes together as one, and back."""
    order = sorted(options.axis)
    h = math.prod(x.shape[a] for a in order)
    adjacent = order == list(range(order[0], order[-1] + 1))
    last = range(x.ndim - len(order), x.ndim)
    first = order[0] if adjacent else last[0]

    def to_one_axis(a):
        if a is None:
            return None
        a = a if adjacent else jnp.moveaxis(a, order, last)
        return a.reshape(*a.shape[:first], h, *a.shape[first + len(order) :])

    merged = to_one_axis(x)
    axis = first - merged.ndim

    def to_same_rank(parameter):
        if parameter is None:
            return None
        in_order = parameter.transpose([options.axis.index(a) for a in order])
        return in_order.reshape([h if i == first else 1 for i in range(merged.ndim)])

    def from_one_axis(a):
        if a is None:
            return None
        if adjacent:
            return a.reshape(x.shape)
        shape = [n for i, n in enumerate(x.shape) if i not in order] + [x.shape[i] for i in order]
        return jnp.moveaxis(a.reshape(shape), last, order)

    y, total = _norm(
        dataclasses.replace(options, axis=axis),
        _Dtypes(*(None if a is None else a.dtype for a in (x, residual, offset))),
        merged,
        to_one_axis(residual),
        to_same_rank(scale),
        to_same_rank(offset),
    )
    return from_one_axis(y), from_one_axis(total)
