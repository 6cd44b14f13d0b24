"""The public fused operators: a norm and the Linears behind it, keeping nothing of the size of x but x."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec

from jln import _checks
from jln._core.derivatives import in_one_program, with_automatic_axes
from jln._junction.arguments import Gate, Given, arranged, checked
from jln._junction.linears import rules
from jln._junction.linears.signature import NormLinear, Operands, Results, Settings, few_features
from jln._routes import listed

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
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Products:
    """Return `layer_norm(x, scale, offset) @ kernel + bias`, normalising the last axis of `x`.

    With a tuple of kernels, as of queries, keys and values, the result is a tuple too: one norm is read by several
    Linears. Under `jax.vmap`, and inside `jax.shard_map`, results go together: where one has an axis of examples, or
    varies over a mesh axis, all do.

    The norm's result `z` is not kept for the backward pass, which makes it again: between the two are held `x`, the
    parameters and two numbers a row. Ba, Kiros, Hinton, "Layer Normalization" (2016).

    `z` is rounded once, to the dtype of `y`, in which it is multiplied. The products add up in float32, and the bias is
    added before the one rounding of `y`; for float64 all is in float64. One case has two roundings: where XLA
    multiplies, a bfloat16 product is rounded before a bfloat16 bias is added, as in `x @ kernel + bias`. (In float16,
    where it might overflow, XLA writes the product in float32 and reads it again for the bias.) The cotangent of `z` is
    the sum over the kernels; for bfloat16 it is rounded to bfloat16 where XLA multiplies, as by autodiff.

    Up to 256 features in 16 bits, 128 in float32, of all kernels together, may be multiplied by the kernel that
    normalises: that product has the name `jln.PRODUCT` for policies of `jax.checkpoint`. More features are multiplied
    by XLA, in plain sight of policies (`dots_saveable`) and of the partitioner; so are those where examples have
    parameters of their own, and those behind a sum with `x_bias` or `gate`.

    Every gradient has its argument's dtype and shape. Gradients are bitwise the same in every run of one compiled
    program; where XLA multiplies on a GPU, a program compiled again may multiply otherwise, as its autotuner found.

    Args:
      x: `[..., H]`: float16, bfloat16, float32 or float64.
      scale: `[H]`; any supported dtype. Or `x`'s rank, with 1 or `x`'s size on every other axis: `[B, 1, H]` for `x`
        `[B, T, H]` is a scale for each example. None: no scale.
      offset: as `scale`.
      kernel: `[H, *features]`, one axis of features or more; any supported dtype. Or a tuple of such arrays, whose
        features and dtypes may differ.
      bias: `features`; any supported dtype. None: no bias. For a tuple of kernels a tuple, with an array or None for
        each, or None.
      epsilon: as in `layer_norm`.
      zero_centered_scale: multiply by `1 + scale`.
      precision: of the products, forward and backward, as in `jax.lax.dot_general`.
      implementation: "triton" (kernels; on the CPU with TRITON_INTERPRET=1), "xla", or None: Triton where the program
        is compiled for an NVIDIA GPU and jax-triton is installed, else XLA. A named one runs or raises.
      forward_mode: support forward mode too, as in `layer_norm`.

    Returns:
      y: `[..., *features]`, in the promoted dtype of `x` and `kernel`; for a tuple of kernels a tuple of such arrays.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, the last axis of `x` is empty, epsilon is negative or too large, or the precision
        or the implementation is unknown.
      RuntimeError: the implementation is "triton", and the kernels cannot run; the message says what is missing.
    """
    return _checked(**locals(), subtract_mean=True)


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
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Products:
    """Return `rms_norm(x, scale) @ kernel + bias`, normalising the last axis of `x`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Dtypes, what is kept, guarantees and errors are
    those of `layer_norm_linear`.

    Args:
      x: `[..., H]`: float16, bfloat16, float32 or float64.
      scale: as in `layer_norm_linear`.
      kernel: as in `layer_norm_linear`: `[H, *features]`, or a tuple of such arrays.
      bias: as in `layer_norm_linear`.
      epsilon: as in `layer_norm`.
      zero_centered_scale: multiply by `1 + scale`.
      precision: as in `layer_norm_linear`.
      implementation: as in `layer_norm`.
      forward_mode: as in `layer_norm`.

    Returns:
      y: `[..., *features]`, in the promoted dtype of `x` and `kernel`; for a tuple of kernels a tuple of such arrays.
    """
    return _checked(**locals(), subtract_mean=False)


@listed("fused")
def add_layer_norm_linear(
    x: jax.Array,
    residual: jax.Array,
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
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Products, jax.Array]:
    """Return `(layer_norm(total, scale, offset) @ kernel + bias, total)`, `total = residual + gate * (x + x_bias)`.

    The sum is made and read once. It is in the promoted dtype of `x` and `residual`, made in float32 (float64 for
    float64) and rounded once; it is the rounded sum that is normalised. It is all of the size of `x` that is kept for
    the backward pass, but for `x` itself where a gate has a gradient. Guarantees and errors are those of
    `layer_norm_linear`.

    Args:
      x: as in `layer_norm_linear`.
      residual: `x`'s shape; any supported dtype.
      scale: as in `layer_norm_linear`.
      offset: as in `layer_norm_linear`.
      kernel: as in `layer_norm_linear`.
      bias: as in `layer_norm_linear`.
      x_bias: as in `add_layer_norm`.
      gate: as in `add_layer_norm`.
      epsilon: as in `layer_norm_linear`.
      zero_centered_scale: as in `layer_norm_linear`.
      precision: as in `layer_norm_linear`.
      implementation: as in `layer_norm_linear`.
      forward_mode: as in `layer_norm_linear`.

    Returns:
      y: as of `layer_norm_linear`.
      total: `x`'s shape, in the promoted dtype of `x` and `residual`.
    """
    return _checked(**locals(), subtract_mean=True)


@listed("fused")
def add_rms_norm_linear(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    x_bias: jax.Array | None = None,
    gate: Gate = None,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    precision: PrecisionLike = None,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[Products, jax.Array]:
    """Return `(rms_norm(total, scale) @ kernel + bias, total)`, `total = residual + gate * (x + x_bias)`.

    The sum is made and read once, as in `add_layer_norm_linear`, whose guarantees and errors hold.

    Args:
      x: as in `layer_norm_linear`.
      residual: `x`'s shape; any supported dtype.
      scale: as in `layer_norm_linear`.
      kernel: as in `layer_norm_linear`.
      bias: as in `layer_norm_linear`.
      x_bias: as in `add_layer_norm`.
      gate: as in `add_layer_norm`.
      epsilon: as in `layer_norm_linear`.
      zero_centered_scale: as in `layer_norm_linear`.
      precision: as in `layer_norm_linear`.
      implementation: as in `layer_norm_linear`.
      forward_mode: as in `layer_norm_linear`.

    Returns:
      y: as of `layer_norm_linear`.
      total: `x`'s shape, in the promoted dtype of `x` and `residual`.
    """
    return _checked(**locals(), subtract_mean=False)


def normalised_linear(given: Given, kernel: Kernels, bias: Biases, *, precision: PrecisionLike, **of_norm: Any) -> Any:
    """Call any of the `*_linear` operators for a module, those of RMSNorm with an offset too.

    of_norm: the static arguments of `jln._junction.arguments.checked`.
    """
    products = {"kernel": kernel, "bias": bias, "precision": precision}
    return _checked(**given.present(), **products, **of_norm, implementation=None, forward_mode=True)


# From the public functions to the operator


def _checked(*, kernel, bias, precision: Any, implementation: str | None, forward_mode: bool, **of_norm: Any) -> Any:
    """Check the arguments and call the operator. of_norm: the arguments of the norm's `checked`."""
    arrays, _, norm = checked(**of_norm)
    kernels, biases = _checks.linears(kernel, bias, arrays.x)
    norm_linear = NormLinear(norm, _checks.precision(precision), tuple(k.ndim - 1 for k in kernels))
    settings = Settings(norm_linear, _checks.implementation(implementation))
    y, total = _called(settings, _checks.flag("forward_mode", forward_mode), (arrays, kernels, biases))
    y = y if isinstance(kernel, tuple) else y[0]
    return y if total is None else (y, total)


def _uses_any_of(axes, others) -> bool:
    """True where an entry of a PartitionSpec names mesh axes that other entries name."""
    names = [set(a if isinstance(a, tuple) else (a,)) for a in (axes, *others) if a is not None]
    return axes is not None and any(names[0] & other for other in names[1:])


def _spec_of_y(rows: Any, kernel: Any) -> PartitionSpec:
    return PartitionSpec(*rows, *(None if _uses_any_of(axes, rows) else axes for axes in kernel[1:]))


Arrays = tuple[Given, tuple[jax.Array, ...], tuple[jax.Array | None, ...]]


@in_one_program(static=2)
def _called(settings: Settings, forward_mode: bool, arrays: Arrays) -> Results:
    def like_y(specs: Any) -> Results:
        given, kernels, _ = specs
        ys = tuple(_spec_of_y(given.x[:-1], kernel) for kernel in kernels)
        return Results(ys, None if given.residual is None else given.x)

    def arranged_and_back(arrays: Arrays) -> Results:
        given, kernels, biases = arrays
        of_norm, norm, back = arranged(given, (given.x.ndim - 1,), settings.norm_linear.norm)
        operands = Operands(of_norm, kernels, biases)
        how = settings.norm_linear.precision, settings.implementation
        norm_linear = dataclasses.replace(settings.norm_linear, norm=norm, in_one=few_features(operands, norm, *how))
        settled = dataclasses.replace(settings, norm_linear=norm_linear)
        y, total = rules.operator(settled, operands, forward_mode)
        return Results(tuple(map(back, y)), None if total is None else back(total))

    return with_automatic_axes(arranged_and_back, like_y, arrays)
