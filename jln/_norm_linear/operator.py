"""LayerNorm or RMSNorm and the Linear behind it as one operator, which keeps nothing of the size of x but x."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec

from jln import _checks
from jln._core.derivatives import Rules, Unneeded, named_statistics, with_automatic_axes
from jln._core.mesh import Dim, Dims, Kind, Layout, Result
from jln._core.operation import LinearOperation, Operation, only_rows_differ
from jln._norm.signature import Norm
from jln._norm_linear import formulas
from jln._norm_linear.signature import (
    Cotangents,
    Gradients,
    NormLinear,
    Operands,
    Outcome,
    Results,
    Saved,
    Settings,
    on_matrix,
)


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
      epsilon: as of `layer_norm`.
      zero_centered_scale: multiply by `1 + scale`.
      precision: of the products, forward and backward, as in `jax.lax.dot_general`.
      implementation: "triton" (kernels; on the CPU with TRITON_INTERPRET=1), "xla", or None: Triton where the program
        is compiled for an NVIDIA GPU and jax-triton is installed, else XLA. A named one runs or raises.
      forward_mode: support forward mode too, as in `layer_norm`.

    Returns:
      y: `[..., *features]`, in the promoted dtype of `x` and `kernel`.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, the last axis of `x` is empty, epsilon is negative or too large, or the
        precision or the implementation is unknown.
    """
    static = epsilon, zero_centered_scale, precision, implementation, forward_mode
    return _checked(x, scale, offset, kernel, bias, *static, subtract_mean=True)


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
    static = epsilon, zero_centered_scale, precision, implementation, forward_mode
    return _checked(x, scale, None, kernel, bias, *static, subtract_mean=False)


def normalised_linear(
    x, scale, offset, kernel, bias, *, epsilon: float, subtract_mean: bool, precision: PrecisionLike
) -> jax.Array:
    """What the modules call: `layer_norm_linear` or `rms_norm_linear`, this one with an offset too."""
    return _checked(x, scale, offset, kernel, bias, epsilon, False, precision, None, True, subtract_mean=subtract_mean)


# The operations


class _Dims:
    """Every array's dimensions."""

    def __init__(self, ndim: int, settings: NormLinear, batch_dims: int):
        """ndim: of y or dy, x's and the axes of features but for one."""
        batch = tuple(Dim(Kind.BATCH, i) for i in range(batch_dims))
        lead = ndim - settings.features
        rows: Dims = (*batch, *(Dim(Kind.ROW, i) for i in range(batch_dims, lead)))
        features = tuple(Dim(Kind.FEATURE, i) for i in range(settings.features))
        self.x: Dims = (*rows, Dim(Kind.HIDDEN))
        self.parameter: Dims = (*batch, Dim(Kind.HIDDEN, stored_as="parameter"))
        self.kernel: Dims = (*batch, Dim(Kind.HIDDEN, stored_as="kernel"), *features)
        self.bias: Dims = (*batch, *features)
        self.y: Dims = (*rows, *features)


def _forward_layout(operands: Operands, settings: NormLinear, dtypes: Outcome, batch_dims: int) -> Layout:
    of = _Dims(operands.x.ndim - 1 + settings.features, settings, batch_dims)
    given = Operands(x=of.x, scale=of.parameter, offset=of.parameter, kernel=of.kernel, bias=of.bias)
    return Layout.of(operands, given, dtypes, Outcome(y=Result(of.y), mean=Result(of.x), rstd=Result(of.x)))


def _backward_layout(operands: Cotangents, settings: NormLinear, dtypes: Gradients, batch_dims: int) -> Layout:
    """All is linear in dy, so a device that has a part of the features has a share of what is not split by features."""
    of = _Dims(operands.dy.ndim, settings, batch_dims)
    given = Cotangents(dy=of.y, x=of.x, scale=of.parameter, offset=of.parameter, kernel=of.kernel, mean=of.x, rstd=of.x)
    over_both = Result(of.parameter, summed=(Kind.FEATURE, Kind.ROW), wide=True)
    gradients = Gradients(
        dx=Result(of.x, summed=(Kind.FEATURE,)),
        dscale=over_both,
        doffset=over_both,
        dkernel=Result(of.kernel, summed=(Kind.ROW,)),
        dbias=Result(of.bias, summed=(Kind.ROW,), wide=True),
    )
    return Layout.of(operands, given, dtypes, gradients)


def _launcher():
    from jln._norm_linear import launcher

    return launcher


_forward: Operation[Operands, Outcome] = Operation(
    "jln_norm_linear_forward",
    on_matrix(formulas.forward),
    formula_cpu=on_matrix(formulas.forward_cpu),
    launcher=lambda: on_matrix(_launcher().forward),
    layout=_forward_layout,
    made_of=Outcome(y=("x", "scale", "offset", "kernel", "bias"), mean=("x",), rstd=("x",)),
)
_backward: Operation[Cotangents, Gradients] = Operation(
    "jln_norm_linear_backward",
    on_matrix(formulas.backward),
    formula_cpu=on_matrix(formulas.backward_cpu),
    launcher=lambda: on_matrix(_launcher().backward),
    layout=_backward_layout,
    made_of=Gradients(
        dx=("dy", "x", "scale", "kernel", "mean", "rstd"),
        dscale=("dy", "x", "kernel", "mean", "rstd"),
        doffset=("dy", "kernel"),
        dkernel=("dy", "x", "scale", "offset", "mean", "rstd"),
        dbias=("dy",),
    ),
)


# The rules


def _outcome(settings: Settings, operands: Operands, keep: bool) -> Outcome:
    norm_linear, x = settings.norm_linear, operands.x
    statistic = jnp.promote_types(x.dtype, jnp.float32).name if keep else None
    dtypes = Outcome(
        y=jnp.promote_types(x.dtype, operands.kernel.dtype).name,
        mean=statistic if norm_linear.norm.subtract_mean else None,
        rstd=statistic,
    )
    return _forward(operands, norm_linear, dtypes, implementation=settings.implementation)


def _value(settings: Settings, operands: Operands) -> Results:
    return Results(_outcome(settings, operands, keep=False).y)


def _saving(settings: Settings, operands: Operands, wanted: Operands) -> tuple[Results, Saved]:
    """Keep what the wanted gradients are made of: that of the bias is made of dy alone, that of the offset of dy and
    the kernel.
    """
    needed = _backward.needs(Gradients(*wanted))
    y, *statistics = _outcome(settings, operands, keep="rstd" in needed)
    x, scale, offset, kernel, _ = operands
    saved = Saved(x, scale, offset, kernel, *named_statistics(*statistics))
    if "rstd" not in needed:
        nothing = Unneeded(y)
        mean = nothing if settings.norm_linear.norm.subtract_mean else None
        saved = saved._replace(x=Unneeded(x), mean=mean, rstd=nothing)
    return Results(y), saved


def _gradients(settings: Settings, saved: Saved, cotangents: Results, wanted: Operands) -> Operands:
    return _pulled_back(cotangents, saved, settings.norm_linear, wanted, 0, settings.implementation)


def _pulled_back(
    cotangents: Results,
    saved: Saved,
    norm_linear: NormLinear,
    wanted: Operands,
    batch_dims: int,
    implementation: str | None,
) -> Operands:
    if cotangents.y is None:
        return Operands(None, None, None, None, None)
    operands = Cotangents(cotangents.y, *saved)
    dtypes = Gradients(*wanted)
    gradients = _backward(operands, norm_linear, dtypes, implementation=implementation, batch_dims=batch_dims)
    return Operands(*gradients)


def _transposed(
    cotangents: Results, tangents: Operands, saved: Saved, norm_linear: NormLinear, batch_dims: int, implementation
) -> Operands:
    """Reverse mode after all, by the backward kernels."""
    x, scale, offset, kernel, mean, rstd = saved
    parameters = scale, offset, kernel, *tangents[1:]
    shared = only_rows_differ(batch_dims, (cotangents.y, x, mean, rstd), parameters)
    if shared:
        scale, offset, kernel = (
            None if a is None else a.reshape(a.shape[batch_dims:]) for a in (scale, offset, kernel)
        )
        saved = Saved(x, scale, offset, kernel, mean, rstd)
    wanted = Operands(*(None if a is None else a.dtype.name for a in tangents))
    left = 0 if shared else batch_dims
    dx, *gradients = _pulled_back(cotangents, saved, norm_linear, wanted, left, implementation)
    if shared:
        gradients = [None if a is None else jnp.expand_dims(a, range(batch_dims)) for a in gradients]
    return Operands(dx, *gradients)


_tangent: LinearOperation[tuple[Operands, Saved], Results] = LinearOperation(
    "jln_norm_linear_tangent", on_matrix(formulas.tangent), transpose=_transposed
)


def _tangents(settings: Settings, saved: Saved, tangents: Operands, results: Results) -> Results:
    y = results.y
    if saved.rstd is None:  # (20) of the offset and the bias alone, which reads the kernel
        dtype = formulas.norms.compute_dtype(y.dtype)
        row = jnp.zeros(y.shape[y.ndim - settings.norm_linear.features :], dtype)
        if tangents.offset is not None:
            row = row + jnp.tensordot(tangents.offset.astype(dtype), saved.kernel.astype(dtype), 1, precision="highest")
        if tangents.bias is not None:
            row = row + tangents.bias.astype(dtype)
        return Results(jnp.broadcast_to(row, y.shape).astype(y.dtype))
    dtypes = Results(y.dtype.name)
    return _tangent((tangents, saved), settings.norm_linear, dtypes, implementation=settings.implementation)


_operator = Rules(_value, _saving, _gradients, _tangents).operator()


# From the public functions to the operator


def _checked(
    x,
    scale,
    offset,
    kernel,
    bias,
    epsilon: float,
    zero_centered_scale: bool,
    precision: Any,
    implementation: str | None,
    forward_mode: bool,
    *,
    subtract_mean: bool,
) -> jax.Array:
    x, kernel = _checks.array("x", x), _checks.array("kernel", kernel)
    scale, offset = _checks.optional_array("scale", scale), _checks.optional_array("offset", offset)
    bias = _checks.optional_array("bias", bias)
    _checks.axes(-1, x)
    _checks.shape("scale", scale, x.shape[-1:], "that of x's last axis")
    _checks.shape("offset", offset, x.shape[-1:], "that of x's last axis")
    _checks.kernel(kernel, x)
    _checks.shape("bias", bias, kernel.shape[1:], "that of kernel's axes after the first")
    norm = Norm(
        -1, _checks.epsilon(epsilon, x.dtype), subtract_mean, _checks.zero_centered_scale(zero_centered_scale, scale)
    )
    norm_linear = NormLinear(norm, _checks.precision(precision), kernel.ndim - 1)
    settings = Settings(norm_linear, _checks.implementation(implementation))
    forward_mode = _checks.flag("forward_mode", forward_mode)
    return _jitted(settings, forward_mode, Operands(x, scale, offset, kernel, bias)).y


def _uses_any_of(axes, others) -> bool:
    """Whether an entry of a PartitionSpec names mesh axes that other entries do."""
    names = [set(a if isinstance(a, tuple) else (a,)) for a in (axes, *others) if a is not None]
    return axes is not None and any(names[0] & other for other in names[1:])


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _jitted(settings: Settings, forward_mode: bool, operands: Operands) -> Results:
    def like_y(specs: Operands) -> Results:
        rows, features = specs.x[:-1], specs.kernel[1:]
        return Results(PartitionSpec(*rows, *(None if _uses_any_of(axes, rows) else axes for axes in features)))

    return with_automatic_axes(lambda operands: _operator(settings, operands, forward_mode), like_y, operands)
