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
from typing import Any

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


class _Read(hk.Module):
    """A module whose parameters another module reads, under this one's name and through the user's getters."""

    def parameter(self, name: str, shape: Any, dtype: Any, init: Any) -> jax.Array:
        return _parameter(name, shape, dtype, init)


class LayerNorm(HaikuLayerNorm):
    """`haiku.LayerNorm` on `jln.layer_norm`: the same arguments, parameters, results and errors."""

    def __call__(
        self,
        inputs: jax.Array,
        scale: jax.Array | None = None,
        offset: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> Any:
        """Return `y` of the inputs' shape, their norm; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          inputs: `[..., H]`, or as `axis` says.
          scale: broadcasts against the inputs, as of `haiku.LayerNorm`.
          offset: broadcasts against the inputs, as of `haiku.LayerNorm`.
          residual: the inputs' shape. The norm is of `total = inputs + residual`, which is made and read once.
        """
        return _HAIKU.norm(self, inputs, residual, scale=scale, offset=offset)


class RMSNorm(HaikuRMSNorm):
    """`haiku.RMSNorm` on `jln.rms_norm`: the same arguments, parameters, results and errors."""

    def __call__(self, inputs: jax.Array, *, residual: jax.Array | None = None) -> Any:
        """Return `y` of the inputs' shape, their norm; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          inputs: `[..., H]`, or as `axis` says.
          residual: the inputs' shape. The norm is of `total = inputs + residual`, which is made and read once.
        """
        return _HAIKU.norm(self, inputs, residual)


class _NormLinear(hk.Module):
    """A norm over the last axis, and behind it a Linear named "linear", or several by their own names."""

    _norm: Callable[..., Any]  # makes it
    _linears: Mapping[str, Callable[..., Any]]  # make them
    _several: bool
    _quantize: Any

    def __call__(
        self,
        inputs: jax.Array,
        *,
        precision: jax.lax.PrecisionLike = None,
        residual: jax.Array | None = None,
        quantize: Any = None,
    ) -> Any:
        """Return `y` `[..., output_size]`, of several Linears a tuple in their order; with a residual `(y, total)`.

        Args:
          inputs: `[..., H]`.
          precision: of the Linears.
          residual: as of the norm.
          quantize: `jln.MXFloat8()` or `jln.Float8()`, as of `jln.layer_norm_linear`: the products are in eight bits,
            and with a given scale `y` is a `jln.Scaled`. An error where the operators cannot compute the call.
        """
        linears = {name: make() for name, make in self._linears.items()}
        several, of_linears = self._several, {"precision": precision}
        quantize = self._quantize if quantize is None else quantize
        return _HAIKU.linears(
            self, self._norm(), linears, inputs, residual, quantize, several=several, of_linears=of_linears
        )


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
      create_scale, create_offset, eps, scale_init, offset_init: as of `haiku.LayerNorm`.
      with_bias, w_init, b_init: as of `haiku.Linear`.
      name: of the module.
      quantize: of calls that give none: `jln.MXFloat8()` or `jln.Float8()`, as of `jln.layer_norm_linear`.
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
        *,
        quantize: Any = None,
    ):
        super().__init__(name=name)
        self._quantize = quantize
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
      create_scale, eps, scale_init: as of `haiku.RMSNorm`.
      output_size, with_bias, w_init, b_init, name, quantize: as of `LayerNormLinear`.
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
        *,
        quantize: Any = None,
    ):
        super().__init__(name=name)
        self._quantize = quantize
        self._norm = functools.partial(_ReadRMSNorm, -1, eps, scale_init, "rms_norm", create_scale, param_axis=-1)
        self._several = isinstance(output_size, Mapping)
        options = {"with_bias": with_bias, "w_init": w_init, "b_init": b_init}
        self._linears = _makers(output_size, RMSNormLinear, "rms_norm", options)


class _ReadLayerNorm(_Read, LayerNorm):
    pass


class _ReadRMSNorm(_Read, RMSNorm):
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


class _Haiku(_modules.Adapter):
    module = "jln.haiku"
    theirs, ours = (HaikuLayerNorm, HaikuRMSNorm), (LayerNorm, RMSNorm)

    def place(self, layer: hk.Module) -> str:
        return layer.module_name

    def obstacle(self, norm: Any) -> str | None:
        return "Haiku's own code makes the parameters" if hk.running_init() else None

    def prepared(self, layer: Any, x: Any, own: Mapping[str, Any]) -> _modules.Prepared | str:
        return self._with_parameters(layer, x, own, _parameter)

    def existing(self, layer: Any, x: Any, own: Mapping[str, Any]) -> _modules.Prepared | str:
        return self._with_parameters(layer, x, own, layer.parameter)

    def _with_parameters(
        self, layer: Any, x: Any, own: Mapping[str, Any], parameter: Callable[..., jax.Array]
    ) -> _modules.Prepared | str:
        """A norm as of `prepared`. parameter: makes or reads one."""
        is_layer_norm, scale, offset = self.is_layer_norm(layer), own.get("scale"), own.get("offset")
        if not all(a is None or isinstance(a, jax.Array | np.ndarray) for a in (x, scale, offset)):
            return "an argument is not an array"
        x = jnp.asarray(x)
        if x.ndim == 0 or not jnp.issubdtype(x.dtype, jnp.floating):
            return f"inputs are {x.dtype}{list(x.shape)}"
        create_offset = is_layer_norm and layer.create_offset
        if (layer.create_scale and scale is not None) or (create_offset and offset is not None):
            return "scale or offset is given and created"
        axes = _axes(layer.axis, x.ndim, wrap=is_layer_norm)
        if len({a % x.ndim for a in axes}) != len(axes):
            return f"axes {axes} name one twice"
        if (layer.create_scale or create_offset) and axes != (x.ndim - 1,) and _must_name_param_axis(layer):
            return "Haiku asks for param_axis"
        if type(layer.eps) not in (int, float):  # numpy's, float64 too, promote what Haiku's RMSNorm adds them to
            return f"eps is a {type(layer.eps).__name__}"
        shape = _parameter_shape(_axes(layer.param_axis, x.ndim, wrap=True), x.shape)
        if layer.create_scale:
            scale = parameter("scale", shape, x.dtype, layer.scale_init)
        if create_offset:
            offset = parameter("offset", shape, x.dtype, layer.offset_init)
        parameters = [None if a is None else jnp.asarray(a) for a in (scale, offset)]
        return _modules.prepare(
            x,
            *parameters,
            axes=axes,
            epsilon=float(np.asarray(layer.eps, x.dtype)),  # Haiku adds it in the dtype of the inputs
            subtract_mean=is_layer_norm,
            y_dtype=jnp.result_type(x, *(a for a in parameters if a is not None)),
        )

    def linear(self, layer: _ReadLinear, norm: _modules.Prepared, own: Mapping[str, Any]) -> _modules.Linear:
        dtype, shape = norm.dtype, [norm.x.shape[-1], layer.output_size]
        w = layer.parameter("w", shape, dtype, layer.w_init)
        b = layer.parameter("b", shape[1:], dtype, layer.b_init) if layer.with_bias else None
        return _modules.Linear(w, b, jnp.result_type(dtype, w, *([] if b is None else [b])), own["precision"])


_HAIKU = _Haiku()


def _parameter(name: str, shape: Any, dtype: Any, init: Any) -> jax.Array:
    return hk.get_parameter(name, shape, dtype, init=init)


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


def _must_name_param_axis(layer: Any) -> bool:
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
            variables = model.init(key, *args, **kwargs)
        with_state = isinstance(model, hk.TransformedWithState | hk.MultiTransformedWithState)
        variables = variables if with_state else (variables,)
        for apply in jax.tree.leaves(model.apply):
            # what hk.without_apply_rng returns has no rng
            rng = (key,) if "rng" in inspect.signature(apply).parameters else ()
            apply(*variables, *rng, *args, **kwargs)

    return traced
