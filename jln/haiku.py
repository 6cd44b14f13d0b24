"""Haiku's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Linears behind it.

    from jln.haiku import LayerNorm, RMSNorm    # instead of: from haiku import LayerNorm, RMSNorm

Constructors, parameters, initial values, module names and checkpoints are Haiku's own: the classes are Haiku's with
another call. A call that the operators cannot compute (parameters on axes that are not normalised, ...) runs Haiku's
own code; `jln.explain` tells which of the two a call takes, and why. Haiku computes in the dtype of its inputs,
rounding every intermediate of a 16-bit input to 16 bits, and its `use_fast_variance=True` loses the variance of a row
whose mean is large against its spread; here all is in float32, rounded once, and the variance is two-pass.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jln import _explain, _modules

try:
    import haiku as hk
except ImportError as error:
    raise ImportError(_modules.missing("jln.haiku", "Haiku", "haiku")) from error

__all__ = ["LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear"]

# Haiku's own classes, even where somebody puts ours in their place later.
HaikuLayerNorm = hk.LayerNorm
HaikuRMSNorm = hk.RMSNorm

Norm: TypeAlias = HaikuLayerNorm | HaikuRMSNorm


class _Read(hk.Module):
    """A module whose parameters another module reads, under this one's name and through the user's getters."""

    def parameter(self, name: str, shape: Any, dtype: Any, init: Any) -> jax.Array:
        return _parameter(name, shape, dtype, init)


class LayerNorm(HaikuLayerNorm):
    """`haiku.LayerNorm` on `jln.layer_norm`: the same arguments, parameters, results and errors.

    adaLN's scale and offset of each example are no parameters of a module: for them call `jln.add_layer_norm(x,
    residual, scale, offset, gate=gate, zero_centered_scale=True)` in its place, with arrays `[B, 1, H]`.
    """

    def __call__(
        self,
        inputs: jax.Array,
        scale: jax.Array | None = None,
        offset: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
        added_to: jax.Array | None = None,
    ) -> Any:
        """Normalise `inputs`, or its sum with a residual.

        Args:
          inputs: `[..., H]`, or as `axis` says.
          scale: broadcasts against the inputs, as of `haiku.LayerNorm`.
          offset: broadcasts against the inputs, as of `haiku.LayerNorm`.
          residual: `inputs`' shape. The norm is of `total = residual + gate * (inputs + x_bias)`, as of
            `jln.add_layer_norm`.
          x_bias: as of `jln.add_layer_norm`; goes with a residual.
          gate: as of `jln.add_layer_norm`; goes with a residual.
          added_to: `inputs`' shape. The norm's result is added to it, as of `jln.layer_norm_add`.

        Returns:
          `y` of `inputs`' shape; with a residual `(y, total)`.
        """
        given = {"residual": residual, "x_bias": x_bias, "gate": gate, "added_to": added_to}
        return _call(self, super().__call__, inputs, scale, offset, **given)


class RMSNorm(_Read, HaikuRMSNorm):
    """`haiku.RMSNorm` on `jln.rms_norm`: the same arguments, parameters, results and errors."""

    def __call__(
        self,
        inputs: jax.Array,
        *,
        residual: jax.Array | None = None,
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
        added_to: jax.Array | None = None,
        x_norm: RMSNorm | None = None,
        z: jax.Array | None = None,
        norm_before_gate: bool = True,
    ) -> Any:
        """Normalise `inputs`, or its sum with a residual.

        Args:
          inputs: `[..., H]`, or as `axis` says.
          residual: `inputs`' shape. The norm is of `total = residual + gate * (inputs + x_bias)`, as of
            `jln.add_rms_norm`.
          x_bias: as of `jln.add_rms_norm`; goes with a residual.
          gate: as of `jln.add_rms_norm`; goes with a residual.
          added_to: `inputs`' shape. The norm's result is added to it, as of `jln.rms_norm_add`.
          x_norm: another RMSNorm. The norm is of `total = residual + x_norm(inputs)`, as of
            `jln.rms_norm_add_rms_norm`.
          z: `inputs`' shape. The result is gated by `silu(z)`, as of `jln.rms_norm_gated`.
          norm_before_gate: as of `jln.rms_norm_gated`.

        Returns:
          `y` of `inputs`' shape; with a residual `(y, total)`.

        Where the two norms are one operator, interceptors see of `x_norm` only how its parameters are read.
        """
        given = {"residual": residual, "x_bias": x_bias, "gate": gate, "added_to": added_to, "x_norm": x_norm}
        return _call(self, super().__call__, inputs, z=z, norm_before_gate=norm_before_gate, **given)


class _NormLinear(hk.Module):
    """A norm over the last axis, and behind it a Linear named "linear", or several by their own names."""

    _norm: Callable[..., Any]  # makes it
    _linears: Mapping[str, Callable[..., Any]]  # make them
    _several: bool

    def __call__(
        self,
        inputs: jax.Array,
        *,
        residual: jax.Array | None = None,
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
        precision: jax.lax.PrecisionLike = None,
    ) -> Any:
        """Apply the norm and the Linear to `inputs`, or to its sum with a residual.

        Args:
          inputs: `[..., H]`.
          residual: `inputs`' shape. The norm is of `total = residual + gate * (inputs + x_bias)`, as of
            `jln.add_layer_norm`.
          x_bias: as of `jln.add_layer_norm`; goes with a residual.
          gate: as of `jln.add_layer_norm`; goes with a residual.
          precision: of the Linears.

        Returns:
          `y` `[..., output_size]`, of several Linears a tuple in their order; with a residual `(y, total)`.
        """
        given = _modules.summed(inputs, residual, x_bias, gate)
        norm = self._norm()
        linears = {name: make() for name, make in self._linears.items()}
        products = _modules.compute_layers(
            f"jln.haiku.{_kind(norm)}Linear {self.module_name}",
            _fused(norm, linears, given, precision),
            lambda: norm(given.total),
            lambda z: (tuple(linear(z, precision=precision) for linear in linears.values()), given.total),
        )
        return given.result(products, self._several)


class LayerNormLinear(_NormLinear):
    """A LayerNorm over the last axis and the Linear behind it, as one operator that keeps only the inputs.

    Parameters and initial values are those of Haiku's two modules, "layer_norm" and "linear". Several Linears may read
    one norm, under names of their own:

        layer = LayerNormLinear({"q": 1024, "k": 256, "v": 256})  # modules "layer_norm", "q", "k" and "v"
        q, k, v = layer(x)
        (q, k, v), total = layer(x, residual=residual)  # of total = x + residual

    Where both are one operator the two modules are not called, and interceptors see only how their parameters are read.

    Args:
      output_size: as of `haiku.Linear`. For several Linears a mapping from each one's name to its size, or to a mapping
        of the arguments in which it differs from the others, as `{"output_size": 256, "with_bias": False}`.
      create_scale: as of `haiku.LayerNorm`.
      create_offset: as of `haiku.LayerNorm`.
      eps: as of `haiku.LayerNorm`.
      scale_init: as of `haiku.LayerNorm`.
      offset_init: as of `haiku.LayerNorm`.
      with_bias: as of `haiku.Linear`.
      w_init: as of `haiku.Linear`.
      b_init: as of `haiku.Linear`.
      name: of the module.
    """

    def __init__(
        self,
        output_size: int | Mapping[str, int | Mapping[str, Any]],
        create_scale: bool = True,
        create_offset: bool = True,
        eps: float = 1e-5,
        scale_init: hk.initializers.Initializer | None = None,
        offset_init: hk.initializers.Initializer | None = None,
        with_bias: bool = True,
        w_init: hk.initializers.Initializer | None = None,
        b_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        norm = (-1, create_scale, create_offset, eps, scale_init, offset_init)
        self._norm = functools.partial(_ReadLayerNorm, *norm, param_axis=-1, name="layer_norm")
        self._several = isinstance(output_size, Mapping)
        options = {"with_bias": with_bias, "w_init": w_init, "b_init": b_init}
        self._linears = _makers(output_size, LayerNormLinear, "layer_norm", options)


class RMSNormLinear(_NormLinear):
    """An RMSNorm over the last axis and the Linear behind it, as one operator that keeps only the inputs.

    Parameters and initial values are those of Haiku's two modules, "rms_norm" and "linear". Several Linears may read
    one norm, as of `LayerNormLinear`.

    Args:
      output_size: as of `LayerNormLinear`, also of several Linears.
      create_scale: as of `haiku.RMSNorm`.
      eps: as of `haiku.RMSNorm`.
      scale_init: as of `haiku.RMSNorm`.
      with_bias: as of `haiku.Linear`.
      w_init: as of `haiku.Linear`.
      b_init: as of `haiku.Linear`.
      name: of the module.
    """

    def __init__(
        self,
        output_size: int | Mapping[str, int | Mapping[str, Any]],
        create_scale: bool = True,
        eps: float = 1e-5,
        scale_init: hk.initializers.Initializer | None = None,
        with_bias: bool = True,
        w_init: hk.initializers.Initializer | None = None,
        b_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
    ):
        super().__init__(name=name)
        self._norm = functools.partial(RMSNorm, -1, eps, scale_init, "rms_norm", create_scale, param_axis=-1)
        self._several = isinstance(output_size, Mapping)
        options = {"with_bias": with_bias, "w_init": w_init, "b_init": b_init}
        self._linears = _makers(output_size, RMSNormLinear, "rms_norm", options)


class _ReadLayerNorm(_Read, LayerNorm):
    pass


class _ReadLinear(_Read, hk.Linear):
    pass


def _makers(output_size: Any, cls: type, norm: str, options: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The constructors of the Linears, by name; `options` are those of all.

    It is no method, which interceptors would see.
    """
    linears: dict[str, dict[str, Any]] = {"linear": {"output_size": output_size}}
    if isinstance(output_size, Mapping):
        linears = _modules.named("output_size", output_size, cls, (norm,))
    return {name: functools.partial(_ReadLinear, **{**options, **own}, name=name) for name, own in linears.items()}


def _fused(norm: Any, linears: Mapping[str, Any], given: _modules.Inputs, precision: Any) -> _modules.Fused | str:
    """A norm and Linears as one operator, or the reason why they must be called.

    No module is called here: nobody sees half a result.
    """
    if hk.running_init():
        return "Haiku's own code makes the parameters"
    ready = _prepared(norm, given.total, None, None, norm.parameter)
    if isinstance(ready, str):
        return ready
    described = {name: _described(a, ready, precision) for name, a in linears.items()}
    return _modules.fused(ready, described, given)


def _described(linear: _ReadLinear, norm: _modules.Prepared, precision: Any) -> _modules.Linear:
    """A Linear in the operators' terms."""
    dtype, shape = norm.dtype, [norm.x.shape[-1], linear.output_size]
    w = linear.parameter("w", shape, dtype, linear.w_init)
    b = linear.parameter("b", shape[1:], dtype, linear.b_init) if linear.with_bias else None
    return _modules.Linear(w, b, jnp.result_type(dtype, w, *([] if b is None else [b])), precision)


def _call(
    layer: Norm,
    plain: Callable[..., jax.Array],
    inputs: Any,
    scale: Any = None,
    offset: Any = None,
    **of_x: Any,
) -> Any:
    """The call of a norm, from within it.

    plain: Haiku's own code. of_x: the other arguments of `_modules.taken`.
    """
    own = (scale, offset) if isinstance(layer, HaikuLayerNorm) else ()
    adds = of_x.get("residual") is not None
    axes = _axes(layer.axis, np.ndim(inputs), wrap=isinstance(layer, HaikuLayerNorm)) if adds else ()
    given = _modules.taken(inputs, axes, **of_x)
    name = f"jln.haiku.{_kind(layer)} {layer.module_name}"
    if given.x_norm is not None:

        def existing(norm: Any, read: Any) -> _modules.Prepared | str:
            if hk.running_init():
                return "Haiku's own code makes the parameters"
            return _prepared(norm, read, None, None, _parameter if norm is layer else norm.parameter)

        return _modules.pair(name, given, layer, RMSNorm, existing, lambda total: _call(layer, plain, total, *own))
    found = _prepared(layer, given.total, scale, offset, _parameter)
    return _modules.compute_norm(name, found, given, lambda total: plain(total, *own))


def _kind(layer: Norm) -> str:
    return "LayerNorm" if isinstance(layer, HaikuLayerNorm) else "RMSNorm"


def _parameter(name: str, shape: Any, dtype: Any, init: Any) -> jax.Array:
    return hk.get_parameter(name, shape, dtype, init=init)


def _prepared(
    layer: Norm, inputs: Any, scale: Any, offset: Any, parameter: Callable[..., jax.Array]
) -> _modules.Prepared | str:
    """The norm in the operators' terms, or the reason why they cannot compute it.

    parameter: makes or reads one as Haiku does. It is not called where a reason is returned: then Haiku's own code
      makes or reads the parameters, or has.
    """
    if not all(a is None or isinstance(a, jax.Array | np.ndarray) for a in (inputs, scale, offset)):
        return "an argument is not an array"
    inputs = jnp.asarray(inputs)
    if inputs.ndim == 0 or not jnp.issubdtype(inputs.dtype, jnp.floating):
        return f"inputs are {inputs.dtype}{list(inputs.shape)}"
    is_layer_norm = isinstance(layer, HaikuLayerNorm)
    create_offset = isinstance(layer, HaikuLayerNorm) and layer.create_offset
    if (layer.create_scale and scale is not None) or (create_offset and offset is not None):
        return "scale or offset is given and created"
    axes = _axes(layer.axis, inputs.ndim, wrap=is_layer_norm)
    if len({a % inputs.ndim for a in axes}) != len(axes):
        return f"axes {axes} name one twice"
    if (layer.create_scale or create_offset) and axes != (inputs.ndim - 1,) and _must_name_param_axis(layer):
        return "Haiku asks for param_axis"
    if type(layer.eps) not in (int, float):  # numpy's, float64 too, promote what Haiku's RMSNorm adds them to
        return f"eps is a {type(layer.eps).__name__}"
    shape = _parameter_shape(_axes(layer.param_axis, inputs.ndim, wrap=True), inputs.shape)
    if layer.create_scale:
        scale = parameter("scale", shape, inputs.dtype, layer.scale_init)
    if isinstance(layer, HaikuLayerNorm) and layer.create_offset:
        offset = parameter("offset", shape, inputs.dtype, layer.offset_init)
    parameters = [None if a is None else jnp.asarray(a) for a in (scale, offset)]
    return _modules.prepare(
        inputs,
        *parameters,
        axes=axes,
        epsilon=float(np.asarray(layer.eps, inputs.dtype)),  # Haiku adds it in the dtype of the inputs
        subtract_mean=is_layer_norm,
        y_dtype=jnp.result_type(inputs, *(a for a in parameters if a is not None)),
    )


def _axes(axis: Any, ndim: int, wrap: bool) -> tuple[int, ...]:
    """The axes as a tuple. wrap: modulo ndim, and each axis once, as Haiku's LayerNorm takes them."""
    if isinstance(axis, slice):
        return tuple(range(ndim)[axis])
    return tuple(sorted({a % ndim for a in axis})) if wrap else tuple(axis)


def _parameter_shape(axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter: x's rank, but for the last axis alone `[H]`, the form of old checkpoints."""
    if axes == (len(shape) - 1,):
        return shape[-1:]
    return tuple(n if i in axes else 1 for i, n in enumerate(shape))


def _must_name_param_axis(layer: Norm) -> bool:
    """True where Haiku's switch that refuses to guess param_axis is on."""
    asks = getattr(sys.modules[HaikuLayerNorm.__module__], "ERROR_IF_PARAM_AXIS_NOT_EXPLICIT", False)
    return asks and isinstance(layer, HaikuLayerNorm) and not layer._param_axis_passed_explicitly


@_explain.traceable.register(hk.Transformed)
@_explain.traceable.register(hk.TransformedWithState)
@_explain.traceable.register(hk.MultiTransformed)
@_explain.traceable.register(hk.MultiTransformedWithState)
def _(model: Any) -> Callable[..., Any]:
    """Call every function of an `hk.multi_transform`, in the order of the tree, with the same arguments."""

    def traced(*args: Any, **kwargs: Any) -> None:
        key = jax.random.key(0)
        with _explain.unasked():  # of the call that makes the parameters, in which nothing is fused
            made = model.init(key, *args, **kwargs)
        made = made if isinstance(model, hk.TransformedWithState | hk.MultiTransformedWithState) else (made,)
        for apply in jax.tree.leaves(model.apply):
            # what hk.without_apply_rng returns has no rng
            rng = (key,) if "rng" in inspect.signature(apply).parameters else ()
            apply(*made, *rng, *args, **kwargs)

    return traced
