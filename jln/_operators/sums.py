"""The norms of a sum with a residual, in which x may have a bias, a gate or a norm of its own."""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from jln._checks import array
from jln._junction.arguments import Axis, Gate, NormArguments
from jln._junction.arrays import Arrays
from jln._operators.call import call, summands
from jln._operators.eight_bits import Kind, Result
from jln._routes import note_calls


@note_calls("norm")
def add_layer_norm(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    x_bias: jax.Array | None = None,
    gate: Gate = None,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    quantize: Kind[Result] | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Result, jax.Array]:
    """Return `(layer_norm(total, scale, offset), total)` with `total = residual + gate * (x + x_bias)`.

    The sum is made in float32 (float64 for float64) and rounded once; it is the rounded sum that is normalised. `total`
    is kept for the backward pass in place of `x`; for the gradient of a gate `x` is kept too. Errors are those of
    `layer_norm`.

    Args:
      residual: `x`'s shape; any supported dtype. None: nothing is added, and `total` is `x` itself, for a norm whose
        `x` others read too. Where they read `total`, their gradient is added in the kernel of the norm's.
      x_bias: the bias of the Linear that made `x`: the normalised axes' shape; any supported dtype. None: no bias.
      gate: a factor of the branch: LayerScale, a gate of adaLN, of stochastic depth. Of the shapes of `scale`, with
        `x`'s rank also 1 on the normalised axes; or a number, static or an array. Where each row has a number of its
        own, plain jnp runs. None: 1.
      dtype: of `y`, as of `layer_norm`.
      x, scale, offset, axis, epsilon, zero_centered_scale, quantize, implementation, forward_mode: as of `layer_norm`.

    Returns:
      y: `x`'s shape, in `dtype`; with `quantize` a `jln.Quantized`.
      total: `x`'s shape, in the promoted dtype of `x` and `residual`.
    """
    arrays = summands(x, residual, x_bias, gate)._replace(scale=scale, offset=offset)
    norm = NormArguments(True, axis, epsilon, zero_centered_scale, dtype)
    return _call(arrays, norm, quantize=quantize, implementation=implementation, forward_mode=forward_mode)


@note_calls("norm")
def add_rms_norm(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None = None,
    *,
    offset: jax.Array | None = None,
    x_bias: jax.Array | None = None,
    gate: Gate = None,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    quantize: Kind[Result] | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Result, jax.Array]:
    """Return `(rms_norm(total, scale, offset=offset), total)` with `total = residual + gate * (x + x_bias)`.

    The sum, the results and errors are those of `add_layer_norm`.

    Args:
      residual, x_bias, gate, dtype: as of `add_layer_norm`.
      x, scale, axis, zero_centered_scale, quantize, implementation, forward_mode: as of `layer_norm`.
      offset, epsilon: as of `rms_norm`.
    """
    arrays = summands(x, residual, x_bias, gate)._replace(scale=scale, offset=offset)
    norm = NormArguments(False, axis, epsilon, zero_centered_scale, dtype)
    return _call(arrays, norm, quantize=quantize, implementation=implementation, forward_mode=forward_mode)


@note_calls("norm")
def rms_norm_add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    x_scale: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    gate: Gate = None,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
    quantize: Kind[Result] | None = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Result, jax.Array]:
    """Return `(rms_norm(total, scale), total)` with `total = residual + gate * rms_norm(x, x_scale)`.

    These are the norm behind one sublayer, the sum, and the norm in front of the next (Gemma 2 and 3; with a gate
    Lumina 2). Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). `x` and `total` are kept for the backward
    pass. The sum, the results and errors are those of `add_layer_norm`.

    Args:
      residual: `x`'s shape; any supported dtype.
      x_scale: the scale of `x`'s norm; shapes and dtypes as of `scale` in `layer_norm`.
      scale: the scale of the sum's norm; shapes and dtypes as in `layer_norm`.
      zero_centered_scale: multiply by `1 + x_scale` and by `1 + scale`.
      gate, dtype: as of `add_layer_norm`.
      x, quantize, implementation, forward_mode: as of `layer_norm`.
      axis, epsilon: as of `layer_norm`, of both norms.
    """
    arrays = Arrays(x=array("x", x), residual=array("residual", residual), x_scale=x_scale, gate=gate, scale=scale)
    norm = NormArguments(False, axis, epsilon, zero_centered_scale, dtype, both_sides=True)
    return _call(arrays, norm, quantize=quantize, implementation=implementation, forward_mode=forward_mode)


def _call(arrays: Arrays, norm: NormArguments, **options: Any) -> tuple[Any, Any]:
    results = call(arrays, norm, gives_total=True, **options)
    return results.y, results.total
