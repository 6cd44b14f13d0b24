"""The norms: LayerNorm and RMSNorm, alone, gated, and with a residual added behind."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from jln import _checks
from jln._checks import array
from jln._junction.arguments import Axis, NormArguments
from jln._junction.arrays import Arrays
from jln._operators.call import call
from jln._operators.eight_bits import Kind, Result
from jln._routes import note_calls


@note_calls("norm")
def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    quantize: Kind[Result] | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Result:
    """Layer normalisation: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset`.

    Mean and (biased, two-pass) variance are taken over `axis`. Ba, Kiros, Hinton, "Layer Normalization" (2016).

    Arithmetic is in float32, for float64 `x` in float64; the result is rounded once. Every gradient has its argument's
    dtype and shape, and is bitwise the same from run to run.

    Args:
      x: array of at least one axis: float16, bfloat16, float32 or float64.
      scale: the normalised axes' shape, in the order in which `axis` gives them (`[H]` for one axis); any supported
        dtype. Or `x`'s rank, with 1 or `x`'s size on every other axis: `[B, 1, H]` for `x` `[B, T, H]` is a scale for
        each example. Kernels take those that vary along `x`'s first axes, along the one in front of the last (heads),
        or both. None: no scale.
      offset: as `scale`.
      axis: the axis or axes to normalise over. Kernels take the last ones.
      epsilon: added to the variance; not negative, and no more than float32 holds, for float64 `x` float64.
      zero_centered_scale: multiply by `1 + scale`.
      dtype: of the result. None: that of `x`.
      quantize: `jln.Float8(...)` or `jln.MXFloat8()`: the result in eight bits, whose gradients go straight through.
        The axes must be adjacent, and the parameters such as kernels take.
      implementation: "triton" (kernels; on the CPU with TRITON_INTERPRET=1), "xla", or None: Triton where the program
        is compiled for an NVIDIA GPU, jax-triton is installed, and kernels take `axis` and the parameters; else XLA.
        "triton" runs or raises.
      forward_mode: support forward mode too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`). Without it this is a
        `jax.custom_vjp` function, which has reverse mode, and forward mode over it (`jax.hessian`).

    Returns:
      y: `x`'s shape, in `dtype`; with `quantize` a `jln.Quantized`.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, an axis is out of range or given twice, the normalised axes are empty, epsilon is
        negative or too large, the implementation is unknown, or "triton" and no kernel takes the call: the message
        says what to write.
      RuntimeError: the implementation is "triton", and the kernels cannot run; the message says what is missing.
    """
    arrays = Arrays(x=array("x", x), scale=scale, offset=offset)
    norm = NormArguments(True, axis, epsilon, zero_centered_scale, dtype)
    return call(arrays, norm, quantize=quantize, implementation=implementation, forward_mode=forward_mode).y


@note_calls("norm")
def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    offset: jax.Array | None = None,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    quantize: Kind[Result] | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Result:
    """Root-mean-square normalisation: `y = x / sqrt(mean(x**2) + epsilon) * scale + offset`.

    The mean is taken over `axis`. Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Dtypes, the result
    and errors are those of `layer_norm`.

    Args:
      x, scale, offset, axis, zero_centered_scale, dtype, quantize, implementation, forward_mode: as of `layer_norm`.
      epsilon: added to the mean square, as of `layer_norm`.
    """
    arrays = Arrays(x=array("x", x), scale=scale, offset=offset)
    norm = NormArguments(False, axis, epsilon, zero_centered_scale, dtype)
    return call(arrays, norm, quantize=quantize, implementation=implementation, forward_mode=forward_mode).y


@note_calls("norm")
def rms_norm_gated(
    x: jax.Array,
    z: jax.Array,
    scale: jax.Array | None = None,
    *,
    norm_before_gate: bool = True,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    quantize: Kind[Result] | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Result:
    """Return `rms_norm(x, scale) * silu(z)`, as in Qwen 3 Next, or `rms_norm(x * silu(z), scale)`, as in Mamba 2.

    Dtypes, the result and errors are those of `layer_norm`. For several groups in a row, as Mamba 2 has them, give `x`
    and `z` an axis of groups in front of the normalised one, `[..., G, D]`, and a scale that varies over it,
    `[1, ..., G, D]`.

    Args:
      z: `x`'s shape; any supported dtype.
      norm_before_gate: whether `silu(z)` multiplies the norm's result, or `x`.
      x, scale, axis, epsilon, zero_centered_scale, dtype, quantize, implementation, forward_mode: as of `layer_norm`.
    """
    x, z = array("x", x), array("z", z)
    is_behind = _checks.flag("norm_before_gate", norm_before_gate)
    arrays = Arrays(x=x, scale=scale, z=z) if is_behind else Arrays(x=x, scale=scale, x_z=z)
    norm = NormArguments(False, axis, epsilon, zero_centered_scale, dtype)
    return call(arrays, norm, quantize=quantize, implementation=implementation, forward_mode=forward_mode).y


@note_calls("norm")
def layer_norm_add(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    quantize: Kind[Result] | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Result:
    """Return `residual + layer_norm(x, scale, offset)`, the sum behind a norm of the branch alone (Swin 2).

    The norm and the sum are in float32 (float64 for a float64 `x`, and the sum for a float64 `residual`) and rounded
    once. The result and errors are those of `layer_norm`.

    Args:
      residual: `x`'s shape; any supported dtype.
      dtype: of the result. None: the promoted dtype of `x` and `residual`.
      x, scale, offset, axis, epsilon, zero_centered_scale, quantize, implementation, forward_mode: as of `layer_norm`.
    """
    arrays = Arrays(x=array("x", x), added=array("residual", residual), scale=scale, offset=offset)
    norm = NormArguments(True, axis, epsilon, zero_centered_scale, dtype)
    return call(arrays, norm, quantize=quantize, implementation=implementation, forward_mode=forward_mode).y


@note_calls("norm")
def rms_norm_add(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    offset: jax.Array | None = None,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    quantize: Kind[Result] | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Result:
    """Return `residual + rms_norm(x, scale, offset=offset)`, the sum behind a norm of the branch alone (OLMo 2).

    Dtypes, the result and errors are those of `layer_norm_add`.

    Args:
      residual, dtype: as of `layer_norm_add`.
      x, scale, axis, zero_centered_scale, quantize, implementation, forward_mode: as of `layer_norm`.
      offset, epsilon: as of `rms_norm`.
    """
    arrays = Arrays(x=array("x", x), added=array("residual", residual), scale=scale, offset=offset)
    norm = NormArguments(False, axis, epsilon, zero_centered_scale, dtype)
    return call(arrays, norm, quantize=quantize, implementation=implementation, forward_mode=forward_mode).y
