"""LayerNorm or RMSNorm and the Linear behind it as one operator, which keeps nothing of the size of x but x."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike

from jln import _checks
from jln._transforms import Operation, vary_together
from jln._xla import layer_norm_linear as xla


def layer_norm_linear(
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    precision: PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """`layer_norm(x, scale, offset) @ kernel + bias`, normalising the last axis of `x`.

    The norm's result `z` is not kept for the backward pass, which makes it again: between the two are held `x`, the
    parameters and two numbers a row. Ba, Kiros, Hinton, "Layer Normalization" (2016).

    `z` is rounded once, to the dtype of `y`, in which it is multiplied. The products add up in float32, and the bias is
    added before the one rounding of `y`; for float64 all is in float64. Every gradient has its argument's dtype and
    shape. Gradients are bitwise the same from run to run.

    Args:
      x: `[..., H]`: float16, bfloat16, float32 or float64.
      scale: `[H]`; any supported dtype. None: no scale.
      offset: as `scale`.
      kernel: `[H, *features]`, one axis of features or more; any supported dtype.
      bias: `features`; any supported dtype. None: no bias.
      epsilon: added to the variance; not negative.
      zero_centered_scale: multiply by `1 + scale`.
      precision: of the products, forward and backward, as in `jax.lax.dot_general`.
      implementation: "triton" (kernels; on the CPU with TRITON_INTERPRET=1), "xla", or None: Triton where the program
        is compiled for an NVIDIA GPU and jax-triton is installed, else XLA. A named one runs or raises.

    Returns:
      y: `[..., *features]`, in the promoted dtype of `x` and `kernel`.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, the last axis of `x` is empty, epsilon is negative, or the precision or the
        implementation is unknown.
    """
    options = _Options(epsilon, zero_centered_scale, precision, implementation, subtract_mean=True)
    return _checked(x, scale, offset, kernel, bias, options)


def rms_norm_linear(
    x: jax.Array,
    scale: jax.Array | None,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    precision: PrecisionLike = None,
    implementation: str | None = None,
) -> jax.Array:
    """`rms_norm(x, scale) @ kernel + bias`, normalising the last axis of `x`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Arguments, dtypes, guarantees and errors are those
    of `layer_norm_linear`.
    """
    options = _Options(epsilon, zero_centered_scale, precision, implementation, subtract_mean=False)
    return _checked(x, scale, None, kernel, bias, options)


def normalised_linear(
    x, scale, offset, kernel, bias, *, epsilon: float, subtract_mean: bool, precision: PrecisionLike
) -> jax.Array:
    """What the modules call: `layer_norm_linear` or `rms_norm_linear`, this one with an offset too."""
    return _checked(x, scale, offset, kernel, bias, _Options(epsilon, False, precision, None, subtract_mean))


class _Options(NamedTuple):
    """The static arguments, as given."""

    epsilon: float
    zero_centered_scale: bool
    precision: PrecisionLike
    implementation: str | None
    subtract_mean: bool


class _NormLinear(NamedTuple):
    """The static arguments of the operator: checked, and all that its rules must know without an array.

    precision: canonical, so hashable. bias_dtype: the backward rule has no other trace of the bias; None if absent.
    """

    epsilon: float
    zero_centered_scale: bool
    precision: Any
    implementation: str | None
    subtract_mean: bool
    bias_dtype: jnp.dtype | None

    def options(self) -> dict[str, Any]:
        """What the forward and the backward operation are told."""
        return {k: v for k, v in self._asdict().items() if k != "bias_dtype"}


_forward = Operation(
    "jln_norm_linear_forward", xla=xla.forward, xla_cpu=xla.forward_cpu, triton=lambda: _kernels().forward
)
_backward = Operation(
    "jln_norm_linear_backward", xla=xla.backward, xla_cpu=xla.backward_cpu, triton=lambda: _kernels().backward
)


def _kernels():
    from jln._triton import layer_norm_linear as triton

    return triton


def _norm_linear(norm: _NormLinear, x, scale, offset, kernel, bias):
    return _apply(norm, x, scale, offset, kernel, bias, save_statistics=False)[0]


def _norm_linear_forward(norm: _NormLinear, x, scale, offset, kernel, bias):
    y, mean, rstd = _apply(norm, x, scale, offset, kernel, bias, save_statistics=True)
    return y, (x, scale, offset, kernel, mean, rstd)


def _norm_linear_backward(norm: _NormLinear, residuals, dy):
    x, scale, offset, kernel, mean, rstd = residuals
    features = kernel.shape[1:]
    dx, dscale, doffset, dkernel, dbias = _backward(
        dy.reshape(*x.shape[:-1], math.prod(features)),
        x,
        scale,
        offset,
        _matrix(kernel),
        mean,
        rstd,
        dbias_dtype=norm.bias_dtype,
        **norm.options(),
    )
    assert dkernel is not None
    return dx, dscale, doffset, dkernel.reshape(kernel.shape), None if dbias is None else dbias.reshape(features)


_operator = jax.custom_vjp(_norm_linear, nondiff_argnums=(0,))
_operator.defvjp(_norm_linear_forward, _norm_linear_backward)


def _matrix(kernel: jax.Array) -> jax.Array:
    """[H, *features] -> [H, N]"""
    return kernel.reshape(kernel.shape[0], math.prod(kernel.shape[1:]))


def _apply(norm: _NormLinear, x, scale, offset, kernel, bias, *, save_statistics: bool):
    """-> (y, mean, rstd), several axes of features made one and several again."""
    bias = None if bias is None else bias.reshape(-1)
    y, mean, rstd = _forward(x, scale, offset, _matrix(kernel), bias, save_statistics=save_statistics, **norm.options())
    assert y is not None
    return y.reshape(*x.shape[:-1], *kernel.shape[1:]), mean, rstd


def _checked(x, scale, offset, kernel, bias, options: _Options) -> jax.Array:
    x, kernel = _checks.array("x", x), _checks.array("kernel", kernel)
    scale, offset = _checks.optional_array("scale", scale), _checks.optional_array("offset", offset)
    bias = _checks.optional_array("bias", bias)
    _checks.axes(-1, x)
    _checks.shape("scale", scale, x.shape[-1:], "that of x's last axis")
    _checks.shape("offset", offset, x.shape[-1:], "that of x's last axis")
    _checks.kernel(kernel, x)
    _checks.shape("bias", bias, kernel.shape[1:], "that of kernel's axes after the first")
    norm = _NormLinear(
        _checks.epsilon(options.epsilon),
        _checks.flag("zero_centered_scale", options.zero_centered_scale),
        _checks.precision(options.precision),
        _checks.implementation(options.implementation),
        options.subtract_mean,
        None if bias is None else bias.dtype,
    )
    if norm.zero_centered_scale and scale is None:
        raise ValueError("zero_centered_scale=True needs a scale; got scale=None")
    return _jitted(norm, x, scale, offset, kernel, bias)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _jitted(norm: _NormLinear, *arguments: jax.Array | None) -> jax.Array:
    return _operator(norm, *vary_together(*arguments))
