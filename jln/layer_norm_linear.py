"""LayerNorm or RMSNorm and the Linear behind it as one operator, which keeps nothing of the size of x but x."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec

from jln import _checks
from jln._partitioning import Layout
from jln._transforms import (
    LinearOperation,
    Operation,
    Wanted,
    in_reverse_mode_only,
    is_differentiated,
    nothing_of,
    only_rows_differ,
    vary_together,
    with_automatic_axes,
)
from jln._xla import layer_norm_linear as xla
from jln.layer_norm import STATISTICS


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
    forward_mode: bool = False,
) -> jax.Array:
    """`layer_norm(x, scale, offset) @ kernel + bias`, normalising the last axis of `x`.

    The norm's result `z` is not kept for the backward pass, which makes it again: between the two are held `x`, the
    parameters and two numbers a row. Ba, Kiros, Hinton, "Layer Normalization" (2016).

    `z` is rounded once, to the dtype of `y`, in which it is multiplied. The products add up in float32, and the bias is
    added before the one rounding of `y`; for float64 all is in float64. One case has two roundings: where XLA
    multiplies on a GPU, a bfloat16 product is rounded before a bfloat16 bias is added, as in `x @ kernel + bias`.

    Every gradient has its argument's dtype and shape. Gradients are bitwise the same in every run of one compiled
    program; where XLA multiplies on a GPU, a program compiled again may multiply otherwise, as its autotuner found.

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
      forward_mode: support forward mode too, as in `layer_norm`.

    Returns:
      y: `[..., *features]`, in the promoted dtype of `x` and `kernel`.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, the last axis of `x` is empty, epsilon is negative, or the precision or the
        implementation is unknown.
    """
    norm = _NormLinear(epsilon, zero_centered_scale, precision, implementation, forward_mode, subtract_mean=True)
    return _checked(norm, x, scale, offset, kernel, bias)


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
    forward_mode: bool = False,
) -> jax.Array:
    """`rms_norm(x, scale) @ kernel + bias`, normalising the last axis of `x`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Arguments, dtypes, guarantees and errors are those
    of `layer_norm_linear`.
    """
    norm = _NormLinear(epsilon, zero_centered_scale, precision, implementation, forward_mode, subtract_mean=False)
    return _checked(norm, x, scale, None, kernel, bias)


def normalised_linear(
    x, scale, offset, kernel, bias, *, epsilon: float, subtract_mean: bool, precision: PrecisionLike
) -> jax.Array:
    """What the modules call: `layer_norm_linear` or `rms_norm_linear`, this one with an offset too."""
    norm = _NormLinear(epsilon, False, precision, None, forward_mode=True, subtract_mean=subtract_mean)
    return _checked(norm, x, scale, offset, kernel, bias)


class _NormLinear(NamedTuple):
    """The static arguments: as given, until `_checked` makes them canonical, so hashable, and adds the last.

    bias_dtype: the backward rule has no other trace of the bias; None if absent.
    """

    epsilon: float
    zero_centered_scale: bool
    precision: Any
    implementation: str | None
    forward_mode: bool
    subtract_mean: bool
    bias_dtype: jnp.dtype | None = None

    def options(self) -> dict[str, Any]:
        """What the forward and the backward operation are told."""
        return {k: v for k, v in self._asdict().items() if k not in ("forward_mode", "bias_dtype")}


class _Names(NamedTuple):
    """Of an array's dimensions, as `jln._partitioning` explains them."""

    x: tuple[str, ...]
    parameter: tuple[str, ...]
    kernel: tuple[str, ...]
    bias: tuple[str, ...]
    y: tuple[str, ...]

    @classmethod
    def of(cls, ndim: int, kernel, batch_dims: int) -> _Names:
        """For an x of rank `ndim`."""
        batch = tuple(f"b{i}" for i in range(batch_dims))
        rows = (*batch, *(f"r{i}" for i in range(batch_dims, ndim - 1)))
        features = tuple(f"n{i}" for i in range(kernel.ndim - batch_dims - 1))
        return cls(
            (*rows, "h"),
            (*batch, "h.parameter"),
            (*batch, "h.kernel", *features),
            (*batch, *features),
            (*rows, *features),
        )


def _forward_layout(x, scale, offset, kernel, bias, *, batch_dims: int, **_) -> Layout:
    of = _Names.of(x.ndim, kernel, batch_dims)
    return Layout((of.x, of.parameter, of.parameter, of.kernel, of.bias), (of.y, of.x, of.x), ("", "", ""))


def _backward_layout(dy, x, scale, offset, kernel, *_, batch_dims: int, **options) -> Layout:
    """All is linear in dy, so a device that has a part of the features has a share of what is not split by features."""
    of = _Names.of(dy.ndim - kernel.ndim + batch_dims + 2, kernel, batch_dims)
    operands = (of.y, of.x, of.parameter, of.parameter, of.kernel, of.x, of.x)
    results = (of.x, of.parameter, of.parameter, of.kernel, of.bias)
    return Layout(operands, results, ("n", "nr", "nr", "r", "r"))


def _on_matrix(compute: Callable, *, kernel: int, operands: set[int], results: set[int]) -> Callable:
    """`compute`, which knows one axis of features, for several: where operand `kernel`, these others and these results
    have them. Only here, since they may be split over devices one by one.
    """

    def call(*arrays, batch_dims: int, **options):
        features = arrays[kernel].shape[batch_dims + 1 :]

        def merged(a):
            return a.reshape(*a.shape[: a.ndim - len(features)], math.prod(features))

        arrays = [merged(a) if a is not None and i in {kernel, *operands} else a for i, a in enumerate(arrays)]
        written = compute(*arrays, batch_dims=batch_dims, **options)
        return tuple(
            a.reshape(*a.shape[:-1], *features) if a is not None and i in results else a for i, a in enumerate(written)
        )

    return call


_forward_on_matrix = functools.partial(_on_matrix, kernel=3, operands={4}, results={0})
_backward_on_matrix = functools.partial(_on_matrix, kernel=4, operands={0}, results={3, 4})
_tangent_on_matrix = functools.partial(_on_matrix, kernel=8, operands={3, 4}, results={0})


def _kernels():
    from jln._triton import layer_norm_linear as triton

    return triton


_forward = Operation(
    "jln_norm_linear_forward",
    xla=_forward_on_matrix(xla.forward),
    xla_cpu=_forward_on_matrix(xla.forward_cpu),
    triton=lambda: _forward_on_matrix(_kernels().forward),
    layout=_forward_layout,
    operands=("x", "scale", "offset", "kernel", "bias"),
    made_of={
        "y": ("x", "scale", "offset", "kernel", "bias"),
        **dict.fromkeys(("mean", "rstd"), ("x", "kernel")),
    },
)
_backward = Operation(
    "jln_norm_linear_backward",
    xla=_backward_on_matrix(xla.backward),
    xla_cpu=_backward_on_matrix(xla.backward_cpu),
    triton=lambda: _backward_on_matrix(_kernels().backward),
    layout=_backward_layout,
    operands=("dy", "x", "scale", "offset", "kernel", "mean", "rstd"),
    made_of={  # of the kernel some are no more than the shape or the dtype
        "dx": ("dy", "x", "scale", "kernel", "mean", "rstd"),
        "dscale": ("dy", "x", "scale", "kernel", "mean", "rstd"),
        "doffset": ("dy", "offset", "kernel"),
        "dkernel": ("dy", "x", "scale", "offset", "kernel", "mean", "rstd"),
        "dbias": ("dy", "kernel"),
    },
)


def _tangent_transpose(cotangents, tangents, others, *, batch_dims, **options):
    """Reverse mode after all, by the backward kernels."""
    (dy,) = cotangents
    bias = tangents[4]
    x, scale, offset, kernel, mean, rstd = others[5:]
    wanted = _wanted(*(a is not None for a in tangents[:5]))
    dbias_dtype = None if bias is None else bias.dtype
    shared = only_rows_differ(batch_dims, (dy, x, mean, rstd), (scale, offset, kernel, bias))
    if shared:
        scale, offset, kernel = (
            None if a is None else a.reshape(a.shape[batch_dims:]) for a in (scale, offset, kernel)
        )
    dx, *gradients = _backward(
        dy,
        x,
        scale,
        offset,
        kernel,
        mean,
        rstd,
        dbias_dtype=dbias_dtype,
        wanted=wanted,
        batch_dims=0 if shared else batch_dims,
        **options,
    )
    if shared:
        gradients = [None if a is None else jnp.expand_dims(a, range(batch_dims)) for a in gradients]
    return dx, *gradients


_tangent = LinearOperation("jln_norm_linear_tangent", xla=_tangent_on_matrix(xla.tangent), transpose=_tangent_transpose)


def _wanted(x: bool, scale: bool, offset: bool, kernel: bool, bias: bool) -> Wanted:
    """The gradients of these arguments."""
    return _backward.wanted(dx=x, dscale=scale, doffset=offset, dkernel=kernel, dbias=bias)


def _norm_linear(norm: _NormLinear, x, scale, offset, kernel, bias):
    return _forward(x, scale, offset, kernel, bias, wanted=("y",), **norm.options())[0]


def _norm_linear_saving(norm: _NormLinear, wanted: Wanted, x, scale, offset, kernel, bias):
    """-> (y, what the derivatives need: x, scale, offset, kernel, and mean and rstd where the wanted ones do)"""
    needed = _backward.needs(wanted)
    results = _forward.wanted(y=True, **{name: name in needed for name in ("mean", "rstd")})
    y, *statistics = _forward(x, scale, offset, kernel, bias, wanted=results, **norm.options())
    mean, rstd = (None if a is None else checkpoint_name(a, STATISTICS) for a in statistics)
    return y, (x, scale, offset, kernel, mean, rstd)


def _norm_linear_forward(norm: _NormLinear, *arguments: CustomVJPPrimal | None):
    wanted = _wanted(*(is_differentiated(a) for a in arguments))
    y, saved = _norm_linear_saving(norm, wanted, *(None if a is None else a.value for a in arguments))
    if "rstd" not in _backward.needs(wanted):
        (x, *parameters, _, _), nothing = saved, nothing_of(y)
        saved = nothing_of(x), *parameters, nothing if norm.subtract_mean else None, nothing
    return y, (_backward.told(wanted), saved)


def _norm_linear_backward(norm: _NormLinear, residuals, dy):
    told, saved = residuals
    if isinstance(dy, SymbolicZero):
        return (None,) * 5
    return _backward(dy, *saved, wanted=_backward.heard(told), dbias_dtype=norm.bias_dtype, **norm.options())


_operator = jax.custom_vjp(_norm_linear, nondiff_argnums=(0,))
_operator.defvjp(_norm_linear_forward, _norm_linear_backward, symbolic_zeros=True)


def _norm_linear_jvp(norm: _NormLinear, primals, tangents):
    tangents = [None if isinstance(t, SymbolicZero) else t for t in tangents]
    wanted = _wanted(*(t is not None for t in tangents))
    y, saved = _norm_linear_saving(norm, wanted, *primals)
    if {*wanted} <= {"doffset", "dbias"}:  # (20) without x, of which nothing has to be kept
        return y, _constant_tangent(y, primals[3], *tangents[2::2])
    (dy,) = _tangent(*tangents, *saved, **norm.options())
    return y, dy


def _constant_tangent(y, kernel, doffset, dbias):
    """What the tangents of offset and bias add to every row of `y`."""
    dtype = xla.norm.compute_dtype(y.dtype)
    dy = jnp.zeros(kernel.shape[1:], dtype) if dbias is None else dbias.astype(dtype)
    if doffset is not None:
        factor = doffset.astype(dtype).reshape(-1, *[1] * (kernel.ndim - 1))
        dy = dy + jnp.sum(kernel.astype(dtype) * factor, axis=0)
    return jnp.broadcast_to(dy, y.shape).astype(y.dtype)


_forward_mode_operator = jax.custom_jvp(_norm_linear, nondiff_argnums=(0,))
_forward_mode_operator.defjvp(_norm_linear_jvp, symbolic_zeros=True)


def _checked(norm: _NormLinear, x, scale, offset, kernel, bias) -> jax.Array:
    x, kernel = _checks.array("x", x), _checks.array("kernel", kernel)
    scale, offset = _checks.optional_array("scale", scale), _checks.optional_array("offset", offset)
    bias = _checks.optional_array("bias", bias)
    _checks.axes(-1, x)
    _checks.shape("scale", scale, x.shape[-1:], "that of x's last axis")
    _checks.shape("offset", offset, x.shape[-1:], "that of x's last axis")
    _checks.kernel(kernel, x)
    _checks.shape("bias", bias, kernel.shape[1:], "that of kernel's axes after the first")
    norm = norm._replace(
        epsilon=_checks.epsilon(norm.epsilon),
        zero_centered_scale=_checks.flag("zero_centered_scale", norm.zero_centered_scale),
        precision=_checks.precision(norm.precision),
        implementation=_checks.implementation(norm.implementation),
        forward_mode=_checks.flag("forward_mode", norm.forward_mode),
        bias_dtype=None if bias is None else bias.dtype,
    )
    if norm.zero_centered_scale and scale is None:
        raise ValueError("zero_centered_scale=True needs a scale; got scale=None")
    return _jitted(norm, x, scale, offset, kernel, bias)


def _uses_any_of(axes, others) -> bool:
    """Whether an entry of a PartitionSpec names mesh axes that other entries do."""
    names = [set(a if isinstance(a, tuple) else (a,)) for a in (axes, *others) if a is not None]
    return axes is not None and any(names[0] & other for other in names[1:])


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _jitted(norm: _NormLinear, *arguments: jax.Array | None) -> jax.Array:
    def like_y(x, scale, offset, kernel, bias):
        return PartitionSpec(*x[:-1], *(None if _uses_any_of(axes, x[:-1]) else axes for axes in kernel[1:]))

    return with_automatic_axes(functools.partial(_operate, norm), like_y, *arguments)


def _operate(norm: _NormLinear, *arguments: jax.Array | None) -> jax.Array | None:
    operands = vary_together(*arguments)
    if norm.forward_mode:
        return _forward_mode_operator(norm, *operands)
    return _operator(norm, *in_reverse_mode_only(*operands))
