"""The fused operators: a norm and the Linears behind it, keeping nothing of the size of x but x."""

from __future__ import annotations

from typing import Any

import jax
from jax.lax import PrecisionLike

from jln import _checks
from jln._checks import array, optional_array
from jln._explain import listed
from jln._junction.arguments import Gate
from jln._junction.arrays import Arrays
from jln._operators.call import call
from jln._operators.eight_bits import Quantize, Scaled

# One array, or one for each of several Linears.
Kernels = jax.Array | tuple[jax.Array, ...]
Biases = jax.Array | None | tuple[jax.Array | None, ...]
Products = Any  # as the kernels: an array or a tuple of arrays


@listed("fused")
def layer_norm_linear(
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Products:
    """Return `layer_norm(x, scale, offset) @ kernel + bias`, normalising the last axis of `x`.

    With a tuple of kernels, as of queries, keys and values, the result is a tuple too: one norm is read by several
    Linears. Under `jax.vmap`, and inside `jax.shard_map`, results go together: where one has an axis of examples, or
    varies over a mesh axis, all do.

    The norm's result `z` is not kept for the backward pass, which makes it again: between the two are held `x`, the
    parameters and two numbers a row. JAX keeps more where plain jnp runs, as `layer_norm` says, and in gradients of
    a `jax.vmap` whose examples share `x`, lie behind rows or differ in a Linear. Ba, Kiros, Hinton, "Layer
    Normalization" (2016).

    `z` is rounded once, to the dtype of `y`, in which it is multiplied. The products add up in float32, and the bias is
    added before the one rounding of `y`; for float64 all is in float64. One case has two roundings: where XLA
    multiplies, a bfloat16 product is rounded before a bfloat16 bias is added, as in `x @ kernel + bias`. (In float16,
    where it might overflow, XLA writes the product in float32 and reads it again for the bias.) The cotangent of `z` is
    the sum over the kernels; for bfloat16 it is rounded to bfloat16 where XLA multiplies, as by autodiff.

    Up to 256 features of one kernel in 16 bits, 128 in float32, may be multiplied by the kernel that normalises: that
    product has the name `jln.PRODUCT` for policies of `jax.checkpoint`. So may those behind a sum without `x_bias` and
    `gate`. All others are multiplied by XLA, in plain sight of policies (`dots_saveable`) and of the partitioner.

    Every gradient has its argument's dtype and shape. Gradients are bitwise the same in every run of one compiled
    program; where XLA multiplies on a GPU, a program compiled again may multiply otherwise, as its autotuner found.

    Args:
      x: `[..., H]`: float16, bfloat16, float32 or float64.
      scale: `[H]`; any supported dtype. Or `x`'s rank, with 1 or `x`'s size on every other axis: `[B, 1, H]` for `x`
        `[B, T, H]` is a scale for each example. None: no scale.
      offset: as `scale`.
      kernel: `[H, *features]`, one axis of features or more; any supported dtype. Or a tuple of such arrays, whose
        features and dtypes may differ. Kernels of several heads are an axis of features, `[H, heads, D]`; a `jax.vmap`
        over them has the gradients of plain jnp; with `forward_mode=True`, "triton" or eight bits one of `x` for each.
      bias: `features`; any supported dtype. None: no bias. For a tuple of kernels a tuple, with an array or None for
        each, or None.
      precision: of the products, forward and backward, as in `jax.lax.dot_general`.
      remat: whether the backward pass makes a row's statistics again, and with a residual the sum, of what it was made
        of, which are kept in their place. For a `jax.checkpoint` that keeps the products and nothing of the norm: it
        makes these again in any case, by a kernel of their own, which writes the sum for the next to read. Rows that
        are too wide for one tile still take that kernel. Not with `forward_mode`.
      quantize: `jln.MXFloat8(...)` or `jln.Float8(...)`: the products, forward and backward, are of operands in eight
        bits, with sums in float32. The norm writes `z` in eight bits; the kernel, `y`'s cotangent and `z` made again
        are quantised along what a product sums over, and nothing more is kept. `z` is in the given dtype, kernels in
        float8_e4m3fn, cotangents in float8_e5m2 (`Float8`) or float8_e4m3fn (`MXFloat8`). Kernels' and cotangents'
        scales are current. Blocks along features or rows whose number is no multiple of 32 end with zeros. Gradients
        go straight through: those of the quantised operands are taken for the operands'. Blocks are multiplied by
        cuDNN on Blackwell, where a product has the name `jln.PRODUCT` for policies, and elsewhere in bfloat16 or
        float32, which hold their numbers. Not with `precision`, `forward_mode` or float64.
      epsilon, zero_centered_scale, implementation, forward_mode: as of `layer_norm`.

    Returns:
      y: `[..., *features]`, in the promoted dtype of `x` and `kernel`; for a tuple of kernels a tuple of such arrays.
        With `Float8` of a given scale `jln.Scaled`: these, and the largest `|z|`, of which the next scale is made.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, the last axis of `x` is empty, epsilon is negative or too large, or the precision
        or the implementation is unknown.
      RuntimeError: the implementation is "triton", and the kernels cannot run; the message says what is missing.
    """
    arrays = Arrays(x=array("x", x), scale=scale, offset=offset)
    results = call(
        with_linears(arrays, kernel, bias),
        subtract_mean=True,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        precision=precision,
        remat=remat,
        quantize=quantize,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    return _as_given(results, kernel)


@listed("fused")
def rms_norm_linear(
    x: jax.Array,
    scale: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Products:
    """Return `rms_norm(x, scale) @ kernel + bias`, normalising the last axis of `x`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Dtypes, the result, what is kept, guarantees and
    errors are those of `layer_norm_linear`.

    Args:
      x, scale, kernel, bias, precision, remat, quantize: as of `layer_norm_linear`.
      epsilon, zero_centered_scale, implementation, forward_mode: as of `layer_norm`.
    """
    arrays = Arrays(x=array("x", x), scale=scale)
    results = call(
        with_linears(arrays, kernel, bias),
        subtract_mean=False,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        precision=precision,
        remat=remat,
        quantize=quantize,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    return _as_given(results, kernel)


@listed("fused")
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
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Products, jax.Array]:
    """Return `(layer_norm(total, scale, offset) @ kernel + bias, total)`, `total = residual + gate * (x + x_bias)`.

    The sum is made and read once. It is in the promoted dtype of `x` and `residual`, made in float32 (float64 for
    float64) and rounded once; it is the rounded sum that is normalised. It is all of the size of `x` that is kept for
    the backward pass, but for `x` itself where a gate has a gradient. Guarantees and errors are those of
    `layer_norm_linear`.

    Args:
      x, scale, offset, kernel, bias, precision, remat, quantize: as of `layer_norm_linear`.
      residual, x_bias, gate: as of `add_layer_norm`.
      epsilon, zero_centered_scale, implementation, forward_mode: as of `layer_norm`.

    Returns:
      y: as of `layer_norm_linear`.
      total: `x`'s shape, in the promoted dtype of `x` and `residual`.
    """
    summands = Arrays(x=array("x", x), residual=optional_array("residual", residual), x_bias=x_bias, gate=gate)
    arrays = summands._replace(scale=scale, offset=offset)
    results = call(
        with_linears(arrays, kernel, bias),
        subtract_mean=True,
        gives_total=True,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        precision=precision,
        remat=remat,
        quantize=quantize,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    return _as_given(results, kernel), results.total


@listed("fused")
def add_rms_norm_linear(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    x_bias: jax.Array | None = None,
    gate: Gate = None,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Products, jax.Array]:
    """Return `(rms_norm(total, scale) @ kernel + bias, total)`, `total = residual + gate * (x + x_bias)`.

    The sum is made and read once, as in `add_layer_norm_linear`, whose results, guarantees and errors hold.

    Args:
      x, scale, kernel, bias, precision, remat, quantize: as of `layer_norm_linear`.
      residual, x_bias, gate: as of `add_layer_norm`.
      epsilon, zero_centered_scale, implementation, forward_mode: as of `layer_norm`.
    """
    arrays = Arrays(
        x=array("x", x), residual=optional_array("residual", residual), scale=scale, x_bias=x_bias, gate=gate
    )
    results = call(
        with_linears(arrays, kernel, bias),
        subtract_mean=False,
        gives_total=True,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        precision=precision,
        remat=remat,
        quantize=quantize,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    return _as_given(results, kernel), results.total


@listed("fused")
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
    precision: PrecisionLike = None,
    remat: bool = False,
    quantize: Quantize = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Products, jax.Array]:
    """Return `(rms_norm(total, scale) @ kernel + bias, total)`, `total = residual + gate * rms_norm(x, x_scale)`.

    These are the norms of `rms_norm_add_rms_norm` and the Linears behind them (Gemma 2 and 3). The norms are one
    operation whatever the number of features, and the products XLA's. `x`, `total` and a row's statistics are kept for
    the backward pass, which makes the norm's result again. Guarantees and errors are those of `layer_norm_linear`, the
    results those of `add_layer_norm_linear`.

    Args:
      x, scale, kernel, bias, precision, remat, quantize: as of `layer_norm_linear`.
      x_scale, residual, gate, epsilon, zero_centered_scale: as of `rms_norm_add_rms_norm`.
      implementation, forward_mode: as of `layer_norm`.
    """
    summands = Arrays(x=array("x", x), residual=array("residual", residual), x_scale=x_scale, gate=gate)
    results = call(
        with_linears(summands._replace(scale=scale), kernel, bias),
        subtract_mean=False,
        both_sides=True,
        gives_total=True,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        precision=precision,
        remat=remat,
        quantize=quantize,
        implementation=implementation,
        forward_mode=forward_mode,
    )
    return _as_given(results, kernel), results.total


def with_linears(arrays: Arrays, kernel: Any, bias: Any) -> Arrays:
    """The arrays with the kernels and biases as tuples, checked."""
    _checks.axes(-1, arrays.x)
    kernels, biases = _checks.linears(kernel, bias, arrays.x)
    return arrays._replace(kernel=kernels, bias=biases)


def _as_given(results: Arrays, kernel: Any) -> Products:
    y = results.y if isinstance(kernel, tuple) else results.y[0]
    return y if results.y_max is None else Scaled(y, results.y_max)
