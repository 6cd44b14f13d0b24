"""The references: every operator in plain jnp, without a custom rule, for autodiff to differentiate.

Arguments, shapes and dtypes are those of the operators of the same names, but for `implementation`, `forward_mode`,
`remat` and `quantize`. Arithmetic is in float32 for 16-bit and float32 inputs and in float64 for float64 ones. The
result is rounded once, and so is `total`, before it is normalised. The variance is two-pass.

Ba, Kiros, Hinton, "Layer Normalization" (2016); Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Axis = int | tuple[int, ...]
Gate = jax.Array | float | None
Kernels = jax.Array | tuple[jax.Array, ...]
Biases = jax.Array | None | tuple[jax.Array | None, ...]
Products = jax.Array | tuple[jax.Array, ...]


def layer_norm(
    x: jax.Array, scale: jax.Array | None = None, offset: jax.Array | None = None, *,
    axis: Axis = -1, epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
) -> jax.Array:  # fmt: skip
    """Return `(x - mean) / sqrt(variance + epsilon) * scale + offset`, over `axis`."""
    return _junction(x, _Norm(True, axis, epsilon, zero_centered_scale), scale, offset, dtype=dtype)


def rms_norm(
    x: jax.Array, scale: jax.Array | None = None, *, offset: jax.Array | None = None,
    axis: Axis = -1, epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
) -> jax.Array:  # fmt: skip
    """Return `x / sqrt(mean(x**2) + epsilon) * scale + offset`, over `axis`."""
    return _junction(x, _Norm(False, axis, epsilon, zero_centered_scale), scale, offset, dtype=dtype)


def add_layer_norm(
    x: jax.Array, residual: jax.Array | None, scale: jax.Array | None = None, offset: jax.Array | None = None, *,
    x_bias: jax.Array | None = None, gate: Gate = None,
    axis: Axis = -1, epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return `(layer_norm(total, scale, offset), total)` with `total = residual + gate * (x + x_bias)`."""
    norm = _Norm(True, axis, epsilon, zero_centered_scale)
    return _junction(x, norm, scale, offset, adds=True, residual=residual, x_bias=x_bias, gate=gate, dtype=dtype)


def add_rms_norm(
    x: jax.Array, residual: jax.Array | None, scale: jax.Array | None = None, *, offset: jax.Array | None = None,
    x_bias: jax.Array | None = None, gate: Gate = None,
    axis: Axis = -1, epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return `(rms_norm(total, scale, offset=offset), total)` with `total = residual + gate * (x + x_bias)`."""
    norm = _Norm(False, axis, epsilon, zero_centered_scale)
    return _junction(x, norm, scale, offset, adds=True, residual=residual, x_bias=x_bias, gate=gate, dtype=dtype)


def layer_norm_add(
    x: jax.Array, residual: jax.Array, scale: jax.Array | None = None, offset: jax.Array | None = None, *,
    axis: Axis = -1, epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
) -> jax.Array:  # fmt: skip
    """Return `residual + layer_norm(x, scale, offset)`, rounded once."""
    return _junction(x, _Norm(True, axis, epsilon, zero_centered_scale), scale, offset, added=residual, dtype=dtype)


def rms_norm_add(
    x: jax.Array, residual: jax.Array, scale: jax.Array | None = None, *, offset: jax.Array | None = None,
    axis: Axis = -1, epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
) -> jax.Array:  # fmt: skip
    """Return `residual + rms_norm(x, scale, offset=offset)`, rounded once."""
    return _junction(x, _Norm(False, axis, epsilon, zero_centered_scale), scale, offset, added=residual, dtype=dtype)


def rms_norm_add_rms_norm(
    x: jax.Array, residual: jax.Array, x_scale: jax.Array | None = None, scale: jax.Array | None = None, *,
    gate: Gate = None,
    axis: Axis = -1, epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Return `(rms_norm(total, scale), total)` with `total = residual + gate * rms_norm(x, x_scale)`."""
    norm = _Norm(False, axis, epsilon, zero_centered_scale)
    return _junction(x, norm, scale, residual=residual, both_sides=True, x_scale=x_scale, gate=gate, dtype=dtype)


def rms_norm_gated(
    x: jax.Array, z: jax.Array, scale: jax.Array | None = None, *, norm_before_gate: bool = True,
    axis: Axis = -1, epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
) -> jax.Array:  # fmt: skip
    """Return `rms_norm(x, scale) * silu(z)` or `rms_norm(x * silu(z), scale)`."""
    norm = _Norm(False, axis, epsilon, zero_centered_scale)
    return _junction(x, norm, scale, z=z, norm_before_gate=norm_before_gate, dtype=dtype)


def layer_norm_linear(
    x: jax.Array, scale: jax.Array | None, offset: jax.Array | None, kernel: Kernels, bias: Biases = None, *,
    epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Products:  # fmt: skip
    """Return `layer_norm(x, scale, offset) @ kernel + bias`."""
    norm, linears = _Norm(True, -1, epsilon, zero_centered_scale), (kernel, bias, precision, dtype)
    return _junction(x, norm, scale, offset, linears=linears)


def rms_norm_linear(
    x: jax.Array, scale: jax.Array | None, kernel: Kernels, bias: Biases = None, *,
    offset: jax.Array | None = None, epsilon: float = 1e-6, zero_centered_scale: bool = False,
    dtype: DTypeLike | None = None, precision: jax.lax.PrecisionLike = None,
) -> Products:  # fmt: skip
    """Return `rms_norm(x, scale, offset=offset) @ kernel + bias`."""
    norm, linears = _Norm(False, -1, epsilon, zero_centered_scale), (kernel, bias, precision, dtype)
    return _junction(x, norm, scale, offset, linears=linears)


def add_layer_norm_linear(
    x: jax.Array, residual: jax.Array | None, scale: jax.Array | None, offset: jax.Array | None, kernel: Kernels,
    bias: Biases = None, *, x_bias: jax.Array | None = None, gate: Gate = None,
    epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Products, jax.Array]:  # fmt: skip
    """Return `(layer_norm(total, scale, offset) @ kernel + bias, total)`, `total = residual + gate * (x + x_bias)`."""
    norm, linears = _Norm(True, -1, epsilon, zero_centered_scale), (kernel, bias, precision, dtype)
    return _junction(x, norm, scale, offset, adds=True, residual=residual, x_bias=x_bias, gate=gate, linears=linears)


def add_rms_norm_linear(
    x: jax.Array, residual: jax.Array | None, scale: jax.Array | None, kernel: Kernels, bias: Biases = None, *,
    offset: jax.Array | None = None, x_bias: jax.Array | None = None, gate: Gate = None,
    epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Products, jax.Array]:  # fmt: skip
    """Return `(rms_norm(total, scale, offset=offset) @ kernel + bias, total)`, with `add_rms_norm`'s total."""
    norm, linears = _Norm(False, -1, epsilon, zero_centered_scale), (kernel, bias, precision, dtype)
    return _junction(x, norm, scale, offset, adds=True, residual=residual, x_bias=x_bias, gate=gate, linears=linears)


def rms_norm_add_rms_norm_linear(
    x: jax.Array, residual: jax.Array, x_scale: jax.Array | None, scale: jax.Array | None, kernel: Kernels,
    bias: Biases = None, *, gate: Gate = None,
    epsilon: float = 1e-6, zero_centered_scale: bool = False, dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[Products, jax.Array]:  # fmt: skip
    """Return `(rms_norm(total, scale) @ kernel + bias, total)`, `total = residual + gate * rms_norm(x, x_scale)`."""
    norm, linears = _Norm(False, -1, epsilon, zero_centered_scale), (kernel, bias, precision, dtype)
    return _junction(x, norm, scale, residual=residual, both_sides=True, x_scale=x_scale, gate=gate, linears=linears)


class _Norm(NamedTuple):
    """The norm of an array in the compute dtype: LayerNorm if it centres, RMSNorm if not."""

    centres: bool
    axis: Axis
    epsilon: float
    zero_centered_scale: bool

    def __call__(self, a, scale, offset=None):
        a = _wide(a)
        if self.centres:
            a = a - jnp.mean(a, self.axis, keepdims=True)
        a = a * jax.lax.rsqrt(jnp.mean(a * a, self.axis, keepdims=True) + self.epsilon)
        if scale is not None:
            a = a * (_spread(scale, a, self.axis) + (1 if self.zero_centered_scale else 0))
        return a if offset is None else a + _spread(offset, a, self.axis)


def _junction(
    x, norm, scale=None, offset=None, *, adds=False, residual=None, x_bias=None, both_sides=False, x_scale=None,
    gate=None, z=None, norm_before_gate=True, added=None, linears=None, dtype=None,
) -> Any:  # fmt: skip
    """Say the sentence that every operator is a part of. Returns y, or `(y, total)` where it adds, be it nothing."""
    # branch = x + x_bias  |  rms_norm(x, x_scale)  |  x * silu(z)
    total_dtype = x.dtype if residual is None else _promoted(x.dtype, residual.dtype)
    branch = norm(x, x_scale) if both_sides else x
    branch = branch.astype(_promoted(branch.dtype, total_dtype))
    if x_bias is not None:
        branch = _wide(branch) + _spread(x_bias, branch, norm.axis)
    if z is not None and not norm_before_gate:
        branch = _wide(branch) * jax.nn.silu(z.astype(_wide(branch).dtype))

    # total = residual + gate * branch
    total = branch if gate is None else _wide(branch) * _spread(gate, branch, norm.axis)
    if residual is not None:
        # Without the barrier XLA may norm a 16-bit sum unrounded: not what is returned, nor what an eager call norms.
        total = jax.lax.optimization_barrier((total + residual.astype(total.dtype)).astype(total_dtype))

    # y = norm(total) * scale + offset  [* silu(z)]  [+ added]  [@ kernels + biases]
    y, y_dtype = norm(total, scale, offset), x.dtype
    if z is not None and norm_before_gate:
        y = y * jax.nn.silu(z.astype(y.dtype))
    if added is not None:
        wide, y_dtype = _promoted(y.dtype, added.dtype), _promoted(x.dtype, added.dtype)
        y = y.astype(wide) + added.astype(wide)
    y = y.astype(dtype or y_dtype) if linears is None else _linears(y, x.dtype, *linears)
    return (y, total) if adds or residual is not None else y


def _linears(z, x_dtype, kernel, bias, precision, dtype):
    if not isinstance(kernel, tuple):
        return _linear(z, _promoted(dtype or x_dtype, kernel.dtype), kernel, bias, precision)
    biases = (None,) * len(kernel) if bias is None else bias
    return tuple(_linears(z, x_dtype, k, b, precision, dtype) for k, b in zip(kernel, biases, strict=True))


def _linear(z, dtype, kernel, bias, precision):
    """The product of z and the kernel, operands in `dtype`, sum and bias in the compute dtype, rounded once."""
    compute = _promoted(dtype, jnp.float32)
    y = jnp.tensordot(z.astype(dtype), kernel.astype(dtype), 1, precision=precision, preferred_element_type=compute)
    if bias is not None:
        y = y + jnp.expand_dims(bias.astype(compute), range(y.ndim - bias.ndim))
    return y.astype(dtype)


def _promoted(a, b):
    """The dtype to which two promote, also where the user's mode is strict."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def _wide(a):
    """The array in the compute dtype."""
    return a.astype(_promoted(a.dtype, jnp.float32))


def _spread(parameter, a, axis):
    """A parameter in the compute dtype, so that it broadcasts with a: of the normalised axes' shape, or of a's rank."""
    axes = [i % a.ndim for i in (axis if isinstance(axis, tuple) else (axis,))]
    parameter = jnp.asarray(parameter, _promoted(a.dtype, jnp.float32))
    if parameter.shape != tuple(a.shape[i] for i in axes):
        return parameter
    parameter = parameter.transpose(sorted(range(len(axes)), key=axes.__getitem__))
    return jnp.expand_dims(parameter, [i for i in range(a.ndim) if i not in axes])
