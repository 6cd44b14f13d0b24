"""LayerNorm and RMSNorm, alone and with a residual added first: one operator, four public functions."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.typing import DTypeLike

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
from jln._xla import layer_norm as xla

Axis = int | tuple[int, ...]

# The `jax.ad_checkpoint.checkpoint_name` of mean and rstd.
STATISTICS = "jln_statistics"


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> jax.Array:
    """Layer normalisation: `y = (x - mean) / sqrt(variance + epsilon) * scale + offset`.

    Mean and (biased, two-pass) variance are taken over `axis`, for each element of the other axes by itself.
    Ba, Kiros, Hinton, "Layer Normalization" (2016).

    All arithmetic is in float32, for float64 `x` in float64; the result is rounded once. Every gradient has its
    argument's dtype and shape. Gradients are bitwise the same from run to run. From the Triton kernels a row's `y` and
    `dx` do not depend, bit for bit, on the other rows or on their number (with rows that lie side by side: as long as
    the axes behind the normalised one keep their sizes).

    Args:
      x: array of at least one axis: float16, bfloat16, float32 or float64. `M` rows of `H` elements.
      scale: the normalised axes' shape, in the order in which `axis` gives them (`[H]` for one axis); any supported
        dtype. None: no scale.
      offset: as `scale`.
      axis: the axis or axes to normalise over. Adjacent ones are read in place, wherever they are; others are
        transposed.
      epsilon: added to the variance; not negative.
      zero_centered_scale: multiply by `1 + scale`.
      implementation: "triton" (kernels; on the CPU with TRITON_INTERPRET=1), "xla", or None: Triton where the program
        is compiled for an NVIDIA GPU and jax-triton is installed, else XLA. A named one runs or raises.
      forward_mode: support forward mode too (`jax.jvp`, `jax.jacfwd`, `jax.linearize`, `jax.hessian`), the same kernels
        serving reverse mode. Without it this is a `jax.custom_vjp` function, which has reverse mode only, and forward
        mode over it.

    Returns:
      y: `x`'s shape and dtype.

    Raises:
      TypeError: an argument has an unsupported type or dtype, or is traced where it must be static.
      ValueError: shapes do not match, an axis is out of range or twice there, the normalised axes are empty, epsilon is
        negative, or the implementation is unknown.
    """
    options = _Options(axis, epsilon, zero_centered_scale, implementation, forward_mode, subtract_mean=True)
    return _norm_of(x, scale, offset, options)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> jax.Array:
    """Root-mean-square normalisation: `y = x / sqrt(mean(x**2) + epsilon) * scale`.

    Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019). Arguments, dtypes, guarantees and errors are those
    of `layer_norm`.
    """
    options = _Options(axis, epsilon, zero_centered_scale, implementation, forward_mode, subtract_mean=False)
    return _norm_of(x, scale, None, options)


def add_layer_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`(layer_norm(x + residual, scale, offset), x + residual)`, the sum read and written once.

    The sum is in the promoted dtype of `x` and `residual`, and it is the rounded sum that is normalised. Guarantees and
    errors are those of `layer_norm`.

    Args:
      x: as in `layer_norm`.
      residual: `x`'s shape; any supported dtype.
      scale: as in `layer_norm`.
      offset: as in `layer_norm`.
      axis: as in `layer_norm`.
      epsilon: as in `layer_norm`.
      zero_centered_scale: as in `layer_norm`.
      implementation: as in `layer_norm`.
      forward_mode: as in `layer_norm`.

    Returns:
      y: `x`'s shape and dtype.
      total: `x + residual`, `x`'s shape and the promoted dtype.
    """
    options = _Options(axis, epsilon, zero_centered_scale, implementation, forward_mode, subtract_mean=True)
    return _norm_of_sum(x, residual, scale, offset, options)


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array | None = None,
    *,
    axis: Axis = -1,
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`(rms_norm(x + residual, scale), x + residual)`; arguments and results are those of `add_layer_norm`."""
    options = _Options(axis, epsilon, zero_centered_scale, implementation, forward_mode, subtract_mean=False)
    return _norm_of_sum(x, residual, scale, None, options)


class _Options(NamedTuple):
    """The static arguments, as given."""

    axis: Axis
    epsilon: float
    zero_centered_scale: bool
    implementation: str | None
    forward_mode: bool
    subtract_mean: bool


class _Norm(NamedTuple):
    """The static arguments of the operator: checked, and all that its rules must know without an array.

    axis: the only one, negative. *_dtype: of y, and of arguments that the backward rule has no other trace of; None if
    absent.
    """

    axis: int
    epsilon: float
    zero_centered_scale: bool
    implementation: str | None
    subtract_mean: bool
    forward_mode: bool
    y_dtype: jnp.dtype
    x_dtype: jnp.dtype
    residual_dtype: jnp.dtype | None
    offset_dtype: jnp.dtype | None

    def options(self) -> dict[str, Any]:
        """What the forward and the backward operation are told."""
        return {k: v for k, v in self._asdict().items() if k != "forward_mode" and not k.endswith("dtype")}


def _names(ndim: int, axis: int, batch_dims: int, h: str = "h") -> tuple[str, ...]:
    """Every array's dimensions: all have the same rank, with 1 where they have less than x."""
    names = [f"b{i}" if i < batch_dims else f"r{i}" for i in range(ndim)]
    names[axis] = h
    return tuple(names)


def _forward_layout(x, *_, axis: int, batch_dims: int, **options) -> Layout:
    rows, parameter = _names(x.ndim, axis, batch_dims), _names(x.ndim, axis, batch_dims, "h.parameter")
    return Layout((rows, rows, parameter, parameter), (rows,) * 4, ("",) * 4)


def _backward_layout(dy, *_, axis: int, batch_dims: int, **options) -> Layout:
    rows, parameter = _names(dy.ndim, axis, batch_dims), _names(dy.ndim, axis, batch_dims, "h.parameter")
    return Layout((rows, rows, rows, parameter, rows, rows), (rows, parameter, parameter), ("", "r", "r"))


_forward = Operation(
    "jln_norm_forward",
    xla=xla.forward,
    xla_cpu=xla.forward_cpu,
    triton=lambda: _kernels().forward,
    layout=_forward_layout,
    operands=("x", "residual", "scale", "offset"),
    made_of={
        "y": ("x", "residual", "scale", "offset"),
        **dict.fromkeys(("total", "mean", "rstd"), ("x", "residual")),
    },
)
_backward = Operation(
    "jln_norm_backward",
    xla=xla.backward,
    xla_cpu=xla.backward_cpu,
    triton=lambda: _kernels().backward,
    layout=_backward_layout,
    operands=("dy", "dtotal", "total", "scale", "mean", "rstd"),
    made_of={
        "dx": ("dy", "dtotal", "total", "scale", "mean", "rstd"),
        "dscale": ("dy", "total", "scale", "mean", "rstd"),
        "doffset": ("dy",),
    },
)


def _kernels():
    from jln._triton import layer_norm as triton

    return triton


def _tangent_transpose(cotangents, tangents, others, *, y_dtype, has_residual, batch_dims, **options):
    """Reverse mode after all, by the backward kernel."""
    del y_dtype, has_residual
    dy, dtotal = cotangents
    total, scale, mean, rstd = others[4:]
    offset = tangents[3]
    wanted = _wanted(*(a is not None for a in tangents[:4]))
    if only_rows_differ(batch_dims, (dy, dtotal, total, mean, rstd), (scale, offset)):
        batch_dims = 0
    doffset_dtype = None if offset is None else offset.dtype
    options |= {"doffset_dtype": doffset_dtype, "batch_dims": batch_dims, "wanted": wanted}
    dx, dscale, doffset = _gradients(dy, dtotal, total, scale, mean, rstd, **options)
    return dx, dx, dscale, doffset


_tangent = LinearOperation("jln_norm_tangent", xla=xla.tangent, transpose=_tangent_transpose)


def _wanted(x: bool, residual: bool, scale: bool, offset: bool) -> Wanted:
    """The gradients that the backward operation is to make, by the arguments whose gradients are wanted."""
    return _backward.wanted(dx=x or residual, dscale=scale, doffset=offset)


def _norm(norm: _Norm, x, residual, scale, offset):
    """-> (y, total); total is None without a residual."""
    wanted = ("y", "total")
    y, total, _, _ = _forward(x, residual, scale, offset, wanted=wanted, y_dtype=norm.y_dtype, **norm.options())
    return y, total


def _norm_saving(norm: _Norm, wanted: Wanted, x, residual, scale, offset):
    """-> ((y, total), what the derivatives need: total or x, scale, and mean and rstd where the wanted ones do)"""
    needed = _backward.needs(wanted)
    results = _forward.wanted(y=True, total=True, **{name: name in needed for name in ("mean", "rstd")})
    y, total, *statistics = _forward(x, residual, scale, offset, wanted=results, y_dtype=norm.y_dtype, **norm.options())
    mean, rstd = (None if a is None else checkpoint_name(a, STATISTICS) for a in statistics)
    return (y, total), (x if total is None else total, scale, mean, rstd)


def _gradients(dy, dtotal, total, scale, mean, rstd, *, wanted: Wanted, **options):
    """-> (dtotal_in, dscale, doffset); the cotangents of results that were not used are None."""
    if dy is None:
        return dtotal if "dx" in wanted else None, None, None
    return _backward(dy, dtotal, total, scale, mean, rstd, wanted=wanted, **options)


def _norm_forward(norm: _Norm, *arguments: CustomVJPPrimal | None):
    wanted = _wanted(*(is_differentiated(a) for a in arguments))
    results, saved = _norm_saving(norm, wanted, *(None if a is None else a.value for a in arguments))
    if "rstd" not in _backward.needs(wanted):
        (total, scale, *_), nothing = saved, nothing_of(results[0])
        saved = nothing_of(total), scale, nothing if norm.subtract_mean else None, nothing
    return results, (_backward.told(wanted), saved)


def _norm_backward(norm: _Norm, residuals, cotangents):
    """None is JAX's zero, as a SymbolicZero is that of a result that was not used."""
    told, saved = residuals
    dy, dtotal = (None if isinstance(a, SymbolicZero) else a for a in cotangents)
    options = {"wanted": _backward.heard(told), "doffset_dtype": norm.offset_dtype, **norm.options()}
    dx, dscale, doffset = _gradients(dy, dtotal, *saved, **options)
    if dx is None:
        return None, None, dscale, doffset
    dresidual = None if norm.residual_dtype is None else dx.astype(norm.residual_dtype)
    return dx.astype(norm.x_dtype), dresidual, dscale, doffset


_operator = jax.custom_vjp(_norm, nondiff_argnums=(0,))
_operator.defvjp(_norm_forward, _norm_backward, symbolic_zeros=True)


def _norm_jvp(norm: _Norm, primals, tangents):
    tangents = [None if isinstance(t, SymbolicZero) else t for t in tangents]
    wanted = _wanted(*(t is not None for t in tangents))
    results, saved = _norm_saving(norm, wanted, *primals)
    has_residual = norm.residual_dtype is not None
    if wanted == ("doffset",):  # (19) without x, of which nothing has to be kept
        return results, _constant_tangents(*results, tangents[3])
    dy, dtotal = _tangent(*tangents, *saved, y_dtype=norm.y_dtype, has_residual=has_residual, **norm.options())
    return results, (dy, dtotal)


def _constant_tangents(y, total, doffset):
    """What the tangent of the offset adds to every row of `y`, and to `total`."""
    doffset = doffset.astype(xla.sum_dtype(y.dtype, doffset.dtype))
    dy = jnp.broadcast_to(doffset, y.shape).astype(y.dtype)
    return dy, None if total is None else jnp.zeros_like(total)


_forward_mode_operator = jax.custom_jvp(_norm, nondiff_argnums=(0,))
_forward_mode_operator.defjvp(_norm_jvp, symbolic_zeros=True)


def normalised(
    x,
    scale,
    offset,
    *,
    axis: Axis,
    epsilon: float,
    subtract_mean: bool,
    y_dtype: DTypeLike,
    implementation: str | None = None,
) -> jax.Array:
    """What the modules call: `layer_norm` or `rms_norm`, this one with an offset too, its result in `y_dtype`.

    A module's dtype may be wider than x's (bfloat16 x, float32 parameters) or narrower; there is one rounding still.
    The frameworks' own layers can be differentiated in forward mode, so these can.
    """
    options = _Options(axis, epsilon, False, implementation, forward_mode=True, subtract_mean=subtract_mean)
    return _checked(_checks.array("x", x), None, scale, offset, options, jnp.dtype(y_dtype))[0]


def _norm_of(x, scale, offset, options: _Options) -> jax.Array:
    return _checked(_checks.array("x", x), None, scale, offset, options)[0]


def _norm_of_sum(x, residual, scale, offset, options: _Options) -> tuple[jax.Array, jax.Array]:
    return _checked(_checks.array("x", x), _checks.array("residual", residual), scale, offset, options)


def _checked(
    x: jax.Array, residual: jax.Array | None, scale, offset, options: _Options, y_dtype: jnp.dtype | None = None
):
    scale, offset = _checks.optional_array("scale", scale), _checks.optional_array("offset", offset)
    axes = _checks.axes(options.axis, x)
    normalised = tuple(x.shape[a] for a in axes)
    _checks.shape("residual", residual, x.shape, "that of x")
    _checks.shape("scale", scale, normalised, f"that of x's axes {axes}")
    _checks.shape("offset", offset, normalised, f"that of x's axes {axes}")
    norm = _Norm(
        _merged_axis(axes, x.ndim),
        _checks.epsilon(options.epsilon),
        _checks.flag("zero_centered_scale", options.zero_centered_scale),
        _checks.implementation(options.implementation),
        options.subtract_mean,
        _checks.flag("forward_mode", options.forward_mode),
        y_dtype or x.dtype,
        x.dtype,
        None if residual is None else residual.dtype,
        None if offset is None else offset.dtype,
    )
    if norm.zero_centered_scale and scale is None:
        raise ValueError("zero_centered_scale=True needs a scale; got scale=None")
    return _jitted(norm, axes, x, residual, scale, offset)


def _adjacent(order: list[int]) -> bool:
    return order == list(range(order[0], order[-1] + 1))


def _merged_axis(axes: tuple[int, ...], ndim: int) -> int:
    """Where the normalised axes are once they are one, counted from the end: in place if they are adjacent."""
    order = sorted(axes)
    return order[-1] - ndim if _adjacent(order) else -1


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _jitted(norm: _Norm, axes: tuple[int, ...], x, residual, scale, offset):
    def like_x(x, residual, *_):
        return x, None if residual is None else x

    return with_automatic_axes(functools.partial(_on_one_axis, norm, axes), like_x, x, residual, scale, offset)


def _on_one_axis(norm: _Norm, axes: tuple[int, ...], x, residual, scale, offset):
    """Make the normalised axes one, and several again."""
    order = sorted(axes)
    h = math.prod(x.shape[a] for a in order)
    ndim = x.ndim - len(order) + 1
    first = ndim + norm.axis
    last = range(first, first + len(order))

    def to_one_axis(a):
        if a is None:
            return None
        a = a if _adjacent(order) else jnp.moveaxis(a, order, last)
        return a.reshape(*a.shape[:first], h, *a.shape[first + len(order) :])

    def to_same_rank(parameter):
        if parameter is None:
            return None
        in_order = parameter.transpose([axes.index(a) for a in order])
        return in_order.reshape([h if i == first else 1 for i in range(ndim)])

    def from_one_axis(a):
        if a is None:
            return None
        if _adjacent(order):
            return a.reshape(x.shape)
        moved = a.reshape(*a.shape[:first], *(x.shape[i] for i in order))
        return jnp.moveaxis(moved, last, order)

    operands = vary_together(to_one_axis(x), to_one_axis(residual), to_same_rank(scale), to_same_rank(offset))
    if norm.forward_mode:
        y, total = _forward_mode_operator(norm, *operands)
    else:
        y, total = _operator(norm, *in_reverse_mode_only(*operands))
    return from_one_axis(y), from_one_axis(total)
