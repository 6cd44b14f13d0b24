"""Flax Linen's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Denses behind it.

    from jln.linen import LayerNorm, RMSNorm    # instead of: from flax.linen import LayerNorm, RMSNorm

Fields, parameters, initial values, automatic names and checkpoints are Flax's own: the classes are Flax's with another
call. A call that the operators cannot compute (`mask`, `axis_name`, `force_float32_reductions=False`, parameters on
axes that are not normalised, ...) runs Flax's own code; `jln.explain(layer, x)` tells which of the two a call takes,
and why. Results differ by rounding, but where Flax's `use_fast_variance=True` loses the variance of a row whose mean is
large against its spread: here it is two-pass always.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln import _explain, _modules

try:
    from flax import linen as nn
    from flax.core import FrozenDict
    from flax.linen import dtypes, initializers
except ImportError as error:
    raise ImportError(_modules.missing("jln.linen", "Flax", "flax")) from error

__all__ = ["LayerNorm", "LayerNormDense", "RMSNorm", "RMSNormDense"]

# Flax's own classes, even where somebody puts ours in their place later.
FlaxLayerNorm = nn.LayerNorm
FlaxRMSNorm = nn.RMSNorm


class LayerNorm(FlaxLayerNorm):
    """`flax.linen.LayerNorm` on `jln.layer_norm`: the same fields, parameters, results and errors."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `[..., H]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.linen.LayerNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        return _LINEN.norm(self, x, residual, mask=mask)


class RMSNorm(FlaxRMSNorm):
    """`flax.linen.RMSNorm` on `jln.rms_norm`: the same fields, parameters, results and errors."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `[..., H]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.linen.RMSNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        return _LINEN.norm(self, x, residual, mask=mask)


# The fields below that those of the two layers are given, under the same names.
_OF_THE_NORM = ("epsilon", "dtype", "param_dtype", "use_scale", "scale_init")
_OF_A_DENSE = (
    *("use_bias", "dtype", "param_dtype", "precision", "kernel_init", "bias_init", "promote_dtype"),
    *("dot_general", "dot_general_cls"),
)


class _NormDense(nn.Module):
    """A norm named "norm", and behind it a `flax.linen.DenseGeneral` named "dense", or several by their own names."""

    features: int | Sequence[int] | Mapping[str, int | Sequence[int] | Mapping[str, Any]]
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
    bias_init: nn.initializers.Initializer = initializers.zeros_init()
    promote_dtype: Any = dtypes.promote_dtype
    dot_general: Any = None
    dot_general_cls: Any = None
    epsilon: float = 1e-6
    use_scale: bool = True
    scale_init: nn.initializers.Initializer = initializers.ones
    quantize: Any = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.features, Mapping):  # of mappings Flax and JAX would compare and hash no order
            named = _modules.named("features", self.features, type(self), ("norm",))
            object.__setattr__(self, "features", tuple((name, FrozenDict(own)) for name, own in named.items()))
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        quantize: Any = None,
    ) -> Any:
        """Return `y` `[..., *features]`, of several Denses a tuple in their order; with a residual `(y, total)`.

        Args:
          x: `[..., H]`.
          mask: as of the norm, which Flax's own code then computes.
          residual: as of the norm.
          quantize: `jln.MXFloat8()` or `jln.Float8()`, as of `jln.layer_norm_linear`: the products are in eight bits,
            and with a given scale `y` is a `jln.Scaled`. An error where the operators cannot compute the call.
        """
        norm = self._norm(**{field: getattr(self, field) for field in _OF_THE_NORM}, name="norm")
        options: dict[str, Any] = {field: getattr(self, field) for field in _OF_A_DENSE}
        several = isinstance(self.features, tuple) and any(isinstance(a, tuple) for a in self.features)
        named: Any = self.features if several else [("dense", {"features": self.features})]
        denses = {name: nn.DenseGeneral(**{**options, **own}, name=name) for name, own in named}
        quantize = self.quantize if quantize is None else quantize
        return _LINEN.linears(self, norm, denses, x, residual, quantize, several=several, mask=mask)


class LayerNormDense(_NormDense):
    """A `LayerNorm` and the Dense behind it, `dense(norm(x))`, as one operator that keeps only `x` for the backward.

    The layers are named "norm" and, a `flax.linen.DenseGeneral`, "dense". Parameters and initial values are those of
    Flax's two layers. Several Denses may read one norm, under names of their own:

        layer = LayerNormDense({"q": 1024, "k": 256, "v": 256})  # parameters norm/scale, q/kernel, k/kernel ...
        q, k, v = layer.apply(variables, x)
        (q, k, v), total = layer.apply(variables, x, residual=residual)  # of total = x + residual

    Where both are one operator the two layers are not called: `nn.intercept_methods` and `capture_intermediates` see
    this layer's call alone. Where they are not, and in `init`, each is called.

    Attributes:
      features: int or tuple, the number of output features. For several Denses a mapping from each one's name to either
        of these, or to a mapping of the attributes in which it differs from the others, as `{"features": 256,
        "use_bias": False}`.
      use_bias, precision, kernel_init, bias_init, promote_dtype, dot_general, dot_general_cls: of the Dense.
      epsilon, use_scale, scale_init: of the norm.
      use_offset, offset_init: the norm's `use_bias` and `bias_init`.
      dtype, param_dtype: of both layers.
      quantize: of calls that give none: `jln.MXFloat8()` or `jln.Float8()`, as of `jln.layer_norm_linear`.
    """

    use_offset: bool = True
    offset_init: nn.initializers.Initializer = initializers.zeros

    @nn.nowrap
    def _norm(self, **options: Any) -> FlaxLayerNorm:
        return LayerNorm(use_bias=self.use_offset, bias_init=self.offset_init, **options)


class RMSNormDense(_NormDense):
    """An `RMSNorm` and the Dense behind it, `dense(norm(x))`, as one operator that keeps only `x` for the backward.

    Names, parameters and attributes are those of `LayerNormDense` without `use_offset` and `offset_init`, which an
    RMSNorm does not have.
    """

    @nn.nowrap
    def _norm(self, **options: Any) -> FlaxRMSNorm:
        return RMSNorm(**options)


class _Linen(_modules.Adapter):
    module, linear_name = "jln.linen", "Dense"
    theirs, ours = (FlaxLayerNorm, FlaxRMSNorm), (LayerNorm, RMSNorm)

    def place(self, layer: nn.Module) -> str:
        return "/".join(layer.path)

    def prepared(self, layer: Any, x: Any, own: Mapping[str, Any]) -> _modules.Prepared | str:
        def parameter(name: str, shape: Sequence[int]) -> jax.Array:
            return layer.param(name, getattr(layer, f"{name}_init"), shape, layer.param_dtype)

        return self._with_parameters(layer, x, own, parameter)

    def existing(self, layer: Any, x: Any, own: Mapping[str, Any]) -> _modules.Prepared | str:
        if not isinstance(x, jax.Array | np.ndarray) or x.ndim == 0:
            return "x has no axes"
        shape = tuple(x.shape[a] for a in sorted({a % x.ndim for a in _modules.axes(layer.feature_axes)}))
        use_bias = self.is_layer_norm(layer) and layer.use_bias
        parameters = _read(layer, {"scale": (layer.use_scale, shape), "bias": (use_bias, shape)})
        if isinstance(parameters, str):
            return parameters
        return self._with_parameters(layer, x, own, lambda name, _: parameters[name])

    def _with_parameters(
        self, layer: Any, x: Any, own: Mapping[str, Any], parameter: Callable[[str, Sequence[int]], jax.Array]
    ) -> _modules.Prepared | str:
        """A norm as of `prepared`. parameter: (name, shape) -> a parameter, made or read."""
        if own.get("mask") is not None:
            return "mask is given"
        if layer.axis_name is not None:
            return f"statistics are averaged over the mesh axis {layer.axis_name!r}"
        if not layer.force_float32_reductions:
            return "force_float32_reductions=False: statistics in x's own dtype"
        if not isinstance(x, jax.Array | np.ndarray):
            return f"x is a {type(x).__name__}, not an array"
        features = sorted({a + x.ndim if a < 0 else a for a in _modules.axes(layer.feature_axes)})
        if not all(0 <= a < x.ndim for a in features):
            return f"x of shape {x.shape} has no axes {layer.feature_axes}"
        shape = [x.shape[a] for a in features]
        used = {"scale": layer.use_scale, "bias": self.is_layer_norm(layer) and layer.use_bias}
        stand_ins = [_stand_in(layer, name, shape) if is_used else None for name, is_used in used.items()]
        like = (None if a is None else np.empty((), a.dtype) for a in stand_ins)
        norm = _modules.prepare(
            x,
            *stand_ins,
            axes=_modules.axes(layer.reduction_axes),
            parameter_axes=features,
            epsilon=layer.epsilon,
            subtract_mean=self.is_layer_norm(layer),
            y_dtype=dtypes.canonicalize_dtype(x, *like, dtype=layer.dtype),
        )
        if isinstance(norm, str):
            return norm
        return norm.with_parameters(*(parameter(name, shape) if is_used else None for name, is_used in used.items()))

    def linear(self, layer: nn.DenseGeneral, norm: _modules.Prepared, own: Mapping[str, Any]) -> _modules.Linear | str:
        if layer.promote_dtype is not dtypes.promote_dtype:
            return "the Dense has its own promote_dtype"
        if layer.dot_general is not None or layer.dot_general_cls is not None:
            return "the Dense has a product of its own"
        if _modules.axes(layer.axis) not in ((-1,), (norm.x.ndim - 1,)) or layer.batch_dims:
            return "the Dense is not over the last axis alone"
        features = _modules.axes(layer.features)
        parameters = _read(layer, {"kernel": (True, (norm.x.shape[-1], *features)), "bias": (layer.use_bias, features)})
        if isinstance(parameters, str):
            return parameters
        kernel, bias = parameters["kernel"], parameters.get("bias")
        is_array = isinstance(parameters["kernel"], jax.Array | np.ndarray)
        if {*layer.variables["params"]} - {"kernel", "bias"} or not is_array:
            return "the Dense has parameters that another library made, as of LoRA or in eight bits"
        dtype = dtypes.canonicalize_dtype(jnp.empty((), norm.dtype), kernel, bias, dtype=layer.dtype)
        return _modules.Linear(kernel, bias, dtype, layer.precision)


_LINEN = _Linen()


def _read(layer: nn.Module, wanted: Mapping[str, tuple[bool, tuple[int, ...]]]) -> dict[str, Any] | str:
    """The parameters of a layer by name, or the reason why the layer must make them.

    wanted: from each name to whether the parameter is used, and the shape that it must have.
    """
    parameters = {}
    for name, (used, shape) in wanted.items():
        if not used:
            continue
        if not layer.has_variable("params", name):
            return "Flax's own code makes the parameters"
        parameters[name] = nn.meta.unbox(layer.get_variable("params", name))
        if jnp.shape(parameters[name]) != shape:
            return "the parameters do not have the shapes that x and features ask for"
    return parameters


def _stand_in(layer: Any, name: str, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
    """A stand-in for a parameter that Flax's own code would find unmade."""
    dtype = layer.param_dtype
    if layer.has_variable("params", name):
        dtype = nn.meta.unbox(layer.get_variable("params", name)).dtype
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


@_explain.traceable.register(nn.Module)
def _(model: nn.Module) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        key = jax.random.key(0)
        rngs = {"params": key, "dropout": key}
        with _explain.unasked():  # of the call that makes the variables, in which nothing is fused
            variables = model.init(rngs, *args, **kwargs)
        return model.apply(variables, *args, rngs=rngs, mutable=True, **kwargs)

    return traced
