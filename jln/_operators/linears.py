"""The fused operators: a norm and the Linears behind it, keeping nothing of the size of x but x."""

from __future__ import annotations

from typing import Any

import jax
from jax.lax import PrecisionLike
from jax.typing import DTypeLike

from jln import _checks
from jln._checks import array
from jln._junction.arguments import Gate, NormArguments
from jln._junction.arrays import Arrays
from jln._operators.call import call, summands
from jln._operators.eight_bits import Quantize, Scaled
from jln._routes import note_calls
from jln.reference import Biases, Kernels

Products = Any  # as the kernels: an array or a tuple of arrays


@note_calls("fused")
def layer_norm_linear(
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Products:
    """Return `layer_norm(x, scale, offset) @ kernel + bias`, normalising the last axis of `x`.

    With a tuple of kernels, as of queries, keys and values, the result is a tuple too: one norm is read by several
    Linears. The norm's result `z` is not kept for the backward pass, which makes it again from `x`. Ba, Kiros, Hinton,
    "Layer Normalization" (2016).

    `z` is rounded once, to the dtype of `y`, in which it is multiplied. The products add up in float32, and the bias is
    added before the one rounding of `y`; for float64 all is in float64. Where XLA multiplies, a bfloat16 product is
    rounded before a bfloat16 bias is added, as in `x @ kernel + bias`. Every gradient has its argument's dtype and
    shape, and is bitwise the same in every run of one compiled program. A product of few features may have the name
    `jln.PRODUCT` for policies of `jax.checkpoint` (see `jln.checkpoint_policies`). Errors are those of `layer_norm`.

    Args:
      x: `[..., H]`: float16, bfloat16, float32 or float64.
      kernel: `[H, *features]`, one axis of features or more, such as `[H, heads, D]`; any supported dtype. Or a tuple
        of such arrays, whose features and dtypes may differ.
      bias: `features`; any supported dtype. None: no bias. For a tuple of kernels a tuple, with an array or None for
        each, or None.
      dtype: of `z`, for products in 16 bits of `x` in float32. None: that of `x`.
      precision: of the products, forward and backward, as in `jax.lax.dot_general`.
      remat: whether the backward pass makes a row's statistics, and with a residual the sum, again. For a
        `jax.checkpoint` that keeps the products and nothing of the norm. Not with `forward_mode`.
      quantize: `jln.MXFloat8(...)` or `jln.Float8(...)`: the products, forward and backward, are of operands in eight
        bits, with sums in float32, and gradients go straight through. `z` is in the given dtype, kernels in
        float8_e4m3fn, cotangents in float8_e5m2 (`Float8`) or float8_e4m3fn (`MXFloat8`); kernels' and cotangents'
        scales are current. Not with `dtype`, `precision`, `forward_mode` or float64.
      scale, offset, epsilon, zero_centered_scale, implementation, forward_mode: as of `layer_norm`.

    Returns:
      y: `[..., *features]`, in the promoted dtype of `z` and `kernel`; for a tuple of kernels a tuple of such arrays.
        With `Float8` of a given scale a `jln.Scaled`.
    """
    arrays = Arrays(x=array("x", x), scale=scale, offset=offset)
    norm = NormArguments(True, -1, epsilon, zero_centered_scale, dtype)
    how: Any = {"precision": precision, "remat": remat, "quantize": quantize}
    return _call(arrays, norm, kernel, bias, implementation=implementation, forward_mode=forward_mode, **how)[0]


@note_calls("fused")
def rms_norm_linear(
    x: jax.Array,
    scale: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    offset: jax.Array | None = None,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Products:
    """Return `rms_norm(x, scale, offset=offset) @ kernel + bias`, normalising the last axis of `x`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Dtypes, the result, what is kept and errors are
    those of `layer_norm_linear`.

    Args:
      x, scale, kernel, bias, dtype, precision, remat, quantize: as of `layer_norm_linear`.
      offset, epsilon, zero_centered_scale, implementation, forward_mode: as of `rms_norm`.
    """
    arrays = Arrays(x=array("x", x), scale=scale, offset=offset)
    norm = NormArguments(False, -1, epsilon, zero_centered_scale, dtype)
    how: Any = {"precision": precision, "remat": remat, "quantize": quantize}
    return _call(arrays, norm, kernel, bias, implementation=implementation, forward_mode=forward_mode, **how)[0]


@note_calls("fused")
def add_layer_norm_linear(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    x_bias: jax.Array | None = None,
    gate: Gate = None,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Products, jax.Array]:
    """Return `(layer_norm(total, scale, offset) @ kernel + bias, total)`, `total = residual + gate * (x + x_bias)`.

    The sum and what is kept are those of `add_layer_norm`, errors those of `layer_norm_linear`.

    Args:
      x, scale, offset, kernel, bias, dtype, precision, remat, quantize: as of `layer_norm_linear`.
      residual, x_bias, gate: as of `add_layer_norm`.
      epsilon, zero_centered_scale, implementation, forward_mode: as of `layer_norm`.

    Returns:
      y: as of `layer_norm_linear`.
      total: `x`'s shape, in the promoted dtype of `x` and `residual`.
    """
    arrays = summands(x, residual, x_bias, gate)._replace(scale=scale, offset=offset)
    norm = NormArguments(True, -1, epsilon, zero_centered_scale, dtype)
    how: Any = {"gives_total": True, "precision": precision, "remat": remat, "quantize": quantize}
    return _call(arrays, norm, kernel, bias, implementation=implementation, forward_mode=forward_mode, **how)


@note_calls("fused")
def add_rms_norm_linear(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    offset: jax.Array | None = None,
    x_bias: jax.Array | None = None,
    gate: Gate = None,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Products, jax.Array]:
    """Return `(rms_norm(total, scale, offset=offset) @ kernel + bias, total)` with `add_rms_norm`'s total.

    The sum, the results and errors are those of `add_layer_norm_linear`.

    Args:
      x, scale, kernel, bias, dtype, precision, remat, quantize: as of `layer_norm_linear`.
      residual, x_bias, gate: as of `add_layer_norm`.
      offset, epsilon, zero_centered_scale, implementation, forward_mode: as of `rms_norm`.
    """
    arrays = summands(x, residual, x_bias, gate)._replace(scale=scale, offset=offset)
    norm = NormArguments(False, -1, epsilon, zero_centered_scale, dtype)
    how: Any = {"gives_total": True, "precision": precision, "remat": remat, "quantize": quantize}
    return _call(arrays, norm, kernel, bias, implementation=implementation, forward_mode=forward_mode, **how)


@note_calls("fused")
def rms_norm_add_rms_norm_linear(
    x: jax.Array,
    residual: jax.Array,
    x_scale: jax.Array | None,
    scale: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    gate: Gate = None,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Products, jax.Array]:
    """Return `(rms_norm(total, scale) @ kernel + bias, total)`, `total = residual + gate * rms_norm(x, x_scale)`.

    These are the norms of `rms_norm_add_rms_norm` and the Linears behind them (Gemma 2 and 3). `x` and `total` are kept
    for the backward pass. The results and errors are those of `add_layer_norm_linear`.

    Args:
      x, scale, kernel, bias, dtype, precision, remat, quantize: as of `layer_norm_linear`.
      x_scale, residual, gate, epsilon, zero_centered_scale: as of `rms_norm_add_rms_norm`.
      implementation, forward_mode: as of `layer_norm`.
    """
    arrays = Arrays(x=array("x", x), residual=array("residual", residual), x_scale=x_scale, gate=gate, scale=scale)
    norm = NormArguments(False, -1, epsilon, zero_centered_scale, dtype, both_sides=True)
    how: Any = {"gives_total": True, "precision": precision, "remat": remat, "quantize": quantize}
    return _call(arrays, norm, kernel, bias, implementation=implementation, forward_mode=forward_mode, **how)


def _call(arrays: Arrays, norm: NormArguments, kernel: Any, bias: Any, **options: Any) -> tuple[Products, Any]:
    """Compute a norm and Linears: y, a tuple where the kernels are one, and total."""
    _checks.axes(-1, arrays.x)
    kernels, biases = _checks.linears(kernel, bias, arrays.x)
    results = call(arrays._replace(kernel=kernels, bias=biases), norm, **options)
    y = results.y if isinstance(kernel, tuple) else results.y[0]
    return y if results.y_max is None else Scaled(y, results.y_max), results.total
