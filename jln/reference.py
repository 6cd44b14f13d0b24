"""The references: every operator in plain jnp, without a custom rule, for autodiff to differentiate.

Arguments are those of the operators, without `implementation` and `forward_mode`. Arithmetic is in float32 for 16-bit
and float32 inputs and in float64 for float64 ones, the result is rounded once, and the variance is two-pass.

Ba, Kiros, Hinton, "Layer Normalization" (2016); Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Axis = int | tuple[int, ...]
Gate = jax.Array | float | None
Kernels = jax.Array | tuple[jax.Array, ...]
Biases = jax.Array | None | tuple[jax.Array | None, ...]
Products = jax.Array | tuple[jax.Array, ...]


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return `(x - mean) / sqrt(variance + epsilon) * scale + offset`, over `axis`, in plain jnp.

    Arguments, shapes and dtypes are those of `jln.layer_norm`.
    """
    return _scaled(_centred(x, axis), scale, offset, axis, epsilon, zero_centered_scale).astype(dtype or x.dtype)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return `x / sqrt(mean(x**2) + epsilon) * scale`, over `axis`, in plain jnp.

    Arguments, shapes and dtypes are those of `jln.rms_norm`.
    """
    return _scaled(_wide(x), scale, None, axis, epsilon, zero_centered_scale).astype(dtype or x.dtype)


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
) -> jax.Array:
    """Return `rms_norm(x, scale) * silu(z)`, or `rms_norm(x * silu(z), scale)`, over `axis`, in plain jnp.

    Arguments, shapes and dtypes are those of `jln.rms_norm_gated`.
    """
    wide = _wide(x)
    u = jax.nn.silu(z.astype(wide.dtype))
    y = _scaled(wide if norm_before_gate else wide * u, scale, None, axis, epsilon, zero_centered_scale)
    return (y * u if norm_before_gate else y).astype(dtype or x.dtype)


def add_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    x_bias: jax.Array | None = None,
    gate: Gate = None,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `(layer_norm(total, scale, offset), total)` in plain jnp.

    `total = residual + gate * (x + x_bias)` is rounded once. Arguments, shapes and dtypes are those of
    `jln.add_layer_norm`.
    """
    total = _total(x, residual, x_bias, gate, axis)
    options = {"axis": axis, "epsilon": epsilon, "zero_centered_scale": zero_centered_scale}
    return layer_norm(total, scale, offset, **options, dtype=dtype or x.dtype), total


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    x_bias: jax.Array | None = None,
    gate: Gate = None,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `(rms_norm(total, scale), total)` in plain jnp.

    `total = residual + gate * (x + x_bias)` is rounded once. Arguments, shapes and dtypes are those of
    `jln.add_rms_norm`.
    """
    total = _total(x, residual, x_bias, gate, axis)
    options = {"axis": axis, "epsilon": epsilon, "zero_centered_scale": zero_centered_scale}
    return rms_norm(total, scale, **options, dtype=dtype or x.dtype), total


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
) -> jax.Array:
    """Return `residual + layer_norm(x, scale, offset)`, rounded once, in plain jnp.

    Arguments, shapes and dtypes are those of `jln.layer_norm_add`.
    """
    y = _scaled(_centred(x, axis), scale, offset, axis, epsilon, zero_centered_scale)
    return _added(y, x, residual, dtype)


def rms_norm_add(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return `residual + rms_norm(x, scale)`, rounded once, in plain jnp.

    Arguments, shapes and dtypes are those of `jln.rms_norm_add`.
    """
    return _added(_scaled(_wide(x), scale, None, axis, epsilon, zero_centered_scale), x, residual, dtype)


def rms_norm_add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    x_scale: jax.Array | None = None,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `(rms_norm(total, scale), total)` with `total = residual + rms_norm(x, x_scale)`, in plain jnp.

    The sum is rounded once, and the rounded sum is normalised. Arguments, shapes and dtypes are those of
    `jln.rms_norm_add_rms_norm`.
    """
    options = {"axis": axis, "epsilon": epsilon, "zero_centered_scale": zero_centered_scale}
    total = jax.lax.optimization_barrier(rms_norm_add(x, residual, x_scale, **options))
    return rms_norm(total, scale, **options, dtype=dtype or x.dtype), total


def _added(y: jax.Array, x: jax.Array, residual: jax.Array, dtype: DTypeLike | None) -> jax.Array:
    wide = _promoted(y.dtype, residual.dtype)
    total = y.astype(wide) + residual.astype(wide)
    return total.astype(dtype or _promoted(x.dtype, residual.dtype))


def _total(x: jax.Array, residual: jax.Array, x_bias: jax.Array | None, gate: Gate, axis: Axis) -> jax.Array:
    """The sum `residual + gate * (x + x_bias)`, in the dtype to which x and residual promote, and rounded to it.

    Without the barrier XLA may norm a 16-bit sum that it has not rounded, which is neither what is returned nor what an
    eager call norms.
    """
    dtype = _promoted(x.dtype, residual.dtype)
    x, wide = x.astype(dtype), _promoted(dtype, jnp.float32)
    if x_bias is not None or gate is not None:
        x, residual = x.astype(wide), residual.astype(wide)
    if x_bias is not None:
        x = x + _spread(x_bias, x, axis)
    if gate is not None:
        x = x * _spread(gate, x, axis)
    return jax.lax.optimization_barrier((x + residual.astype(x.dtype)).astype(dtype))


def layer_norm_linear(
    x: jax.Array,
    scale: jax.Array | None,
    offset: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> Products:
    """Return `layer_norm(x, scale, offset) @ kernel + bias` in plain jnp.

    Arguments, shapes and dtypes are those of `jln.layer_norm_linear`.
    """
    z = _scaled(_centred(x, -1), scale, offset, -1, epsilon, zero_centered_scale)
    return _linears(z, x.dtype, kernel, bias, precision)


def rms_norm_linear(
    x: jax.Array,
    scale: jax.Array | None,
    kernel: Kernels,
    bias: Biases = None,
    *,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    precision: jax.lax.PrecisionLike = None,
) -> Products:
    """Return `rms_norm(x, scale) @ kernel + bias` in plain jnp.

    Arguments, shapes and dtypes are those of `jln.rms_norm_linear`.
    """
    z = _scaled(_wide(x), scale, None, -1, epsilon, zero_centered_scale)
    return _linears(z, x.dtype, kernel, bias, precision)


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
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Products, jax.Array]:
    """Return `(layer_norm(total, scale, offset) @ kernel + bias, total)` in plain jnp.

    `total = residual + gate * (x + x_bias)` is rounded once. Arguments, shapes and dtypes are those of
    `jln.add_layer_norm_linear`.
    """
    total = _total(x, residual, x_bias, gate, -1)
    z = _scaled(_centred(total, -1), scale, offset, -1, epsilon, zero_centered_scale)
    return _linears(z, x.dtype, kernel, bias, precision), total


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
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Products, jax.Array]:
    """Return `(rms_norm(total, scale) @ kernel + bias, total)` in plain jnp.

    `total = residual + gate * (x + x_bias)` is rounded once. Arguments, shapes and dtypes are those of
    `jln.add_rms_norm_linear`.
    """
    total = _total(x, residual, x_bias, gate, -1)
    z = _scaled(_wide(total), scale, None, -1, epsilon, zero_centered_scale)
    return _linears(z, x.dtype, kernel, bias, precision), total


def _linears(z, x_dtype, kernel, bias, precision):
    if not isinstance(kernel, tuple):
        return _linear(z, _promoted(x_dtype, kernel.dtype), kernel, bias, precision)
    biases = (None,) * len(kernel) if bias is None else bias
    return tuple(_linear(z, _promoted(x_dtype, k.dtype), k, b, precision) for k, b in zip(kernel, biases, strict=True))


def _linear(z, dtype, kernel, bias, precision):
    """The product of z and the kernel, operands in `dtype`, sum and bias in the compute dtype, rounded once."""
    compute = _promoted(dtype, jnp.float32)
    z, kernel = z.astype(dtype), kernel.astype(dtype)
    y = jnp.tensordot(z, kernel, 1, precision=precision, preferred_element_type=compute)
    if bias is not None:
        y = y + jnp.expand_dims(bias.astype(compute), range(y.ndim - bias.ndim))
    return y.astype(dtype)


def _promoted(a, b):
    """The dtype to which two promote, also where the user's mode is strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def _wide(x):
    """The array in the compute dtype."""
    return x.astype(_promoted(x.dtype, jnp.float32))


def _centred(x, axis):
    z = _wide(x)
    return z - jnp.mean(z, axis, keepdims=True)


def _scaled(z, scale, offset, axis, epsilon, zero_centered_scale):
    z = z * jax.lax.rsqrt(jnp.mean(z * z, axis, keepdims=True) + epsilon)
    if scale is not None:
        z = z * (_spread(scale, z, axis) + (1 if zero_centered_scale else 0))
    if offset is not None:
        z = z + _spread(offset, z, axis)
    return z


def _spread(parameter: jax.Array | float, z: jax.Array, axis: Axis) -> jax.Array:
    """A parameter as one that broadcasts against z.

    It has the shape of the normalised axes, in the order given, or z's rank.
    """
    axes = [a % z.ndim for a in (axis if isinstance(axis, tuple) else (axis,))]
    parameter = jnp.asarray(parameter, z.dtype)
    if parameter.shape != tuple(z.shape[a] for a in axes):
        return parameter
    parameter = parameter.transpose(sorted(range(len(axes)), key=axes.__getitem__))
    return jnp.expand_dims(parameter, [i for i in range(z.ndim) if i not in axes])
