"""The norms of a sum with a residual, in which x may have a bias, a gate or a norm of its own."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from jln._checks import array, optional_array
from jln._explain import listed
from jln._junction.arguments import Axis, Gate
from jln._junction.arrays import Arrays
from jln._operators.call import call
from jln._operators.eight_bits import Kind, Result


@listed("norm")
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

    The sum is made and read once. It is in the promoted dtype of `x` and `residual`, made in float32 (float64 for
    float64) and rounded once; it is the rounded sum that is normalised. Without a gate `total` is all of the size of
    `x` that is kept for the backward pass; for the gradient of a gate `x` is kept too. Guarantees and errors are those
    of `layer_norm`.

    Args:
      residual: `x`'s shape; any supported dtype. None: nothing is added, and `total` is `x` itself. It is for a norm
        whose `x` others read too, such as the first one of a block: where they read `total`, the kernel of the norm's
        gradient adds theirs, which else is a pass over three arrays.
      x_bias: the bias of the Linear that made `x`: the normalised axes' shape; any supported dtype. None: no bias.
      gate: a factor of the branch: LayerScale, a gate of adaLN, of stochastic depth. Of the shapes of `scale`, with
        `x`'s rank also 1 on the normalised axes; or a number, static or an array. Where each row has a number of its
        own, plain jnp runs. None: 1.
      dtype: of `y`, as of `layer_norm`.
      x, scale, offset, axis, epsilon, zero_centered_scale, quantize, implementation, forward_mode: as of `layer_norm`.

    Returns:
      y: `x`'s shape, in `dtype`.
      total: `x`'s shape, in the promoted dtype of `x` and `residual`.
    """
    summands = Arrays(x=array("x", x), residual=optional_array("residual", residual), x_bias=x_bias, gate=gate)
    arrays = summands._replace(scale=scale, offset=offset)
    results = call(
        arrays,
        subtract_mean=True,
        gives_total=True,
        axis=axis,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        dtype=dtype,
        quantize=quantize,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    return results.y, results.total


@listed("norm")
def add_rms_norm(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None = None,
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
    """Return `(rms_norm(total, scale), total)` with `total = residual + gate * (x + x_bias)`.

    The sum is made and read once, as in `add_layer_norm`, whose results, guarantees and errors hold.

    Args:
      residual, x_bias, gate, dtype: as of `add_layer_norm`.
      x, scale, axis, epsilon, zero_centered_scale, quantize, implementation, forward_mode: as of `layer_norm`.
    """
    summands = Arrays(x=array("x", x), residual=optional_array("residual", residual), x_bias=x_bias, gate=gate)
    results = call(
        summands._replace(scale=scale),
        subtract_mean=False,
        gives_total=True,
        axis=axis,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        dtype=dtype,
        quantize=quantize,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    return results.y, results.total


@listed("norm")
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
    Lumina 2), with every large array read and written once each way. Zhang, Sennrich, "Root Mean Square Layer
    Normalization" (2019).

    The sum is in the promoted dtype of `x` and `residual`, made in float32 (float64 for float64) and rounded once; it
    is the rounded sum that is normalised. `x`, `total` and a row's two statistics are kept for the backward pass.
    Guarantees and errors are those of `layer_norm`, the results those of `add_layer_norm`.

    Rows take one Triton kernel forward and two backward, up to 8192 elements (up to 4096 where they do not start on 16
    bytes or the dtypes differ; with a gate half of these, but for aligned 16 bits; of float64 a quarter). Wider ones
    take one more each way, which reads the sum or its gradient again; with a gate XLA multiplies by it in between.

    Args:
      x_scale: the scale of `x`'s norm; shapes and dtypes as of `scale` in `layer_norm`.
      scale: the scale of the sum's norm; shapes and dtypes as in `layer_norm`.
      zero_centered_scale: multiply by `1 + x_scale` and by `1 + scale`.
      residual: `x`'s shape; any supported dtype.
      gate, dtype: as of `add_layer_norm`.
      x, quantize, implementation, forward_mode: as of `layer_norm`.
      axis, epsilon: as of `layer_norm`, of both norms.
    """
    summands = Arrays(x=array("x", x), residual=array("residual", residual), x_scale=x_scale, gate=gate)
    arrays = summands._replace(scale=scale)
    results = call(
        arrays,
        subtract_mean=False,
        both_sides=True,
        gives_total=True,
        axis=axis,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        dtype=dtype,
        quantize=quantize,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    return results.y, results.total
