"""Flax NNX's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Linears behind it.

    from jln.nnx import LayerNorm, RMSNorm    # instead of: from flax.nnx import LayerNorm, RMSNorm

Constructors, parameters, initial values, metadata and checkpoints are Flax's own: the classes are Flax's with another
call. A call that the operators cannot compute (`mask`, `axis_name`, parameters on axes that are not normalised, ...)
runs Flax's own code, as `jln.explain` tells. Results differ by rounding, but where Flax's `use_fast_variance=True`
loses the variance of a row whose mean is large against its spread: here it is two-pass always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln import _explain, _modules

try:
    from flax import nnx
    from flax.nnx.nn import dtypes
except ImportError as error:
    raise ImportError(_modules.missing("jln.nnx", "Flax", "flax")) from error
from jln._modules.nnx_functions import fuse

__all__ = ["LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear", "fuse"]

FlaxLayerNorm = nnx.LayerNorm  # Flax's own, even where somebody puts ours in their place later
FlaxRMSNorm = nnx.RMSNorm
FlaxLinear, FlaxLinearGeneral = nnx.Linear, nnx.LinearGeneral


class LayerNorm(FlaxLayerNorm):
    """`flax.nnx.LayerNorm` on `jln.layer_norm`: the same arguments, parameters, results and errors."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None, residual: jax.Array | None = None) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `[..., num_features]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.nnx.LayerNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        return _NNX.norm(self, x, residual, mask=mask)


class RMSNorm(FlaxRMSNorm):
    """`flax.nnx.RMSNorm` on `jln.rms_norm`: the same arguments, parameters, results and errors."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None, *, residual: jax.Array | None = None) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `[..., num_features]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.nnx.RMSNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        return _NNX.norm(self, x, residual, mask=mask)


# out_features of one Linear, or by the name of each of several; or a mapping of all arguments that are its own.
Features = int | Sequence[int] | Mapping[str, int | Sequence[int] | Mapping[str, Any]]


class _NormLinear(nnx.Module):
    """A norm, and behind it a Linear named "linear", or several whose names `names` has."""

    norm: LayerNorm | RMSNorm
    names: tuple[str, ...] = ()
    quantize: Any = None

    def _make_linears(
        self, in_features: int, out_features: Features, quantize: Any, options: Mapping[str, Any]
    ) -> None:
        if quantize is not None:
            self.quantize = quantize
        linears: dict[str, dict[str, Any]] = {"linear": {"out_features": out_features}}
        if isinstance(out_features, Mapping):
            linears = _modules.named("out_features", out_features, type(self), ("norm",))
            self.names = tuple(linears)
        for name, own in linears.items():
            setattr(self, name, _linear(in_features, **{**options, **own}))

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        quantize: Any = None,
    ) -> Any:
        """Return `y` `[..., *features]`, of several Linears a tuple in their order; with a residual `(y, total)`.

        Args:
          x: `[..., H]`.
          mask: as of the norm, which Flax's own code then computes.
          residual: as of the norm.
          quantize: `jln.MXFloat8()` or `jln.Float8()`, as of `jln.layer_norm_linear`: the products are in eight bits,
            and with a given scale `y` is a `jln.Scaled`. An error where the operators cannot compute the call.
        """
        linears = {name: getattr(self, name) for name in self.names or ("linear",)}
        quantize = self.quantize if quantize is None else quantize
        return _NNX.linears(self, self.norm, linears, x, residual, quantize, several=bool(self.names), mask=mask)


class LayerNormLinear(_NormLinear):
    """A `LayerNorm` and the Linear behind it, `linear(norm(x))`, as one operator that keeps only `x` for the backward.

    Its parameters are those of the two layers, `norm.scale`, `norm.bias`, `linear.kernel` and `linear.bias`, with the
    initial values that Flax's layers, made in this order, get from the same `rngs`. Several Linears may read one norm:

        layer = LayerNormLinear(1024, {"q": 1024, "k": 256, "v": 256}, rngs=rngs)  # norm.scale, q.kernel, k.kernel ...
        q, k, v = layer(x)
        (q, k, v), total = layer(x, residual=residual)  # of total = x + residual

    Args:
      in_features: H.
      out_features: N, or a tuple: then the Linear is a `flax.nnx.LinearGeneral`. For several Linears a mapping from
        each one's attribute name to either of these, or to a mapping of the arguments in which it differs from the
        others, as `{"out_features": 256, "use_bias": False}`.
      epsilon, use_scale, scale_init, scale_metadata: as of `flax.nnx.LayerNorm`.
      use_offset, offset_init, offset_metadata: `flax.nnx.LayerNorm`'s `use_bias`, `bias_init` and `bias_metadata`.
      dtype, param_dtype, promote_dtype, rngs: of both layers.
      quantize: of calls that give none: `jln.MXFloat8()` or `jln.Float8()`, as of `jln.layer_norm_linear`.
      **linear_options: every other argument of the Linear, or of each.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Features,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        use_offset: bool = True,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        offset_init: nnx.Initializer = nnx.initializers.zeros,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        offset_metadata: Mapping[str, Any] = MappingProxyType({}),
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        promote_dtype: Any = dtypes.promote_dtype,
        quantize: Any = None,
        rngs: nnx.Rngs,
        **linear_options: Any,
    ):
        of_scale = {"use_scale": use_scale, "scale_init": scale_init, "scale_metadata": scale_metadata}
        of_bias = {"use_bias": use_offset, "bias_init": offset_init, "bias_metadata": offset_metadata}
        both = {"dtype": dtype, "param_dtype": param_dtype, "promote_dtype": promote_dtype, "rngs": rngs}
        self.norm = LayerNorm(in_features, epsilon=epsilon, **of_scale, **of_bias, **both)
        self._make_linears(in_features, out_features, quantize, {**linear_options, **both})

    __call__ = _NormLinear.__call__  # nnx.capture sees a class's own methods only


class RMSNormLinear(_NormLinear):
    """An `RMSNorm` and the Linear behind it, `linear(norm(x))`, as one operator that keeps only `x` for the backward.

    Its parameters are `norm.scale`, `linear.kernel` and `linear.bias`. Several Linears may read one norm, as of
    `LayerNormLinear`.

    Args:
      epsilon, use_scale, scale_init, scale_metadata: as of `flax.nnx.RMSNorm`.
      in_features, out_features, dtype, param_dtype, promote_dtype, quantize, rngs, **linear_options: as of
        `LayerNormLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Features,
        *,
        epsilon: float = 1e-6,
        use_scale: bool = True,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        promote_dtype: Any = dtypes.promote_dtype,
        quantize: Any = None,
        rngs: nnx.Rngs,
        **linear_options: Any,
    ):
        of_scale = {"use_scale": use_scale, "scale_init": scale_init, "scale_metadata": scale_metadata}
        both = {"dtype": dtype, "param_dtype": param_dtype, "promote_dtype": promote_dtype, "rngs": rngs}
        self.norm = RMSNorm(in_features, epsilon=epsilon, **of_scale, **both)
        self._make_linears(in_features, out_features, quantize, {**linear_options, **both})

    __call__ = _NormLinear.__call__


def _linear(in_features: int, out_features: int | Sequence[int], **options: Any) -> Any:
    cls: Any = FlaxLinear if isinstance(out_features, int) else FlaxLinearGeneral
    return cls(in_features, out_features, **options)


class _Nnx(_modules.Adapter):
    module = "jln.nnx"
    theirs, ours = (FlaxLayerNorm, FlaxRMSNorm), (LayerNorm, RMSNorm)

    def place(self, layer: nnx.Module) -> str:
        return getattr(layer, _PATH, "")

    def obstacle(self, norm: Any) -> str | None:
        return "nnx.capture watches the norm" if hasattr(norm, "__captures__") else None

    def reads_as_given(self, layer: Any) -> bool:
        return layer.promote_dtype is dtypes.promote_dtype

    def prepared(self, layer: Any, x: Any, own: Mapping[str, Any]) -> _modules.Prepared | str:
        if own.get("mask") is not None:
            return "mask is given"
        if layer.axis_name is not None:
            return f"statistics are averaged over the mesh axis {layer.axis_name!r}"
        names = ("scale", "bias") if self.is_layer_norm(layer) else ("scale",)
        parameters = [None if getattr(layer, name) is None else getattr(layer, name)[...] for name in names]
        promoted = layer.promote_dtype((x, *parameters), dtype=layer.dtype)
        read, scale, offset = (*promoted, None)[:3]  # an RMSNorm has no offset
        assert read is not None
        y_dtype = dtypes.canonicalize_dtype(*promoted, dtype=layer.dtype)
        is_narrow = isinstance(x, jax.Array | np.ndarray) and x.dtype in (jnp.bfloat16, jnp.float16)
        if is_narrow and read.dtype == jnp.float32 and self.reads_as_given(layer):
            read = x  # the kernels read 16 bits and compute in float32 as well
        return _modules.prepare(
            read,
            scale,
            offset,
            axes=_modules.axes(layer.reduction_axes),
            parameter_axes=_modules.axes(layer.feature_axes),
            epsilon=layer.epsilon,
            subtract_mean=self.is_layer_norm(layer),
            y_dtype=y_dtype,
        )

    def linear(self, layer: Any, norm: _modules.Prepared, own: Mapping[str, Any]) -> _modules.Linear | str:
        if type(layer).__call__ not in (FlaxLinear.__call__, FlaxLinearGeneral.__call__):
            return "the Linear has a call of its own"
        if isinstance(layer, FlaxLinearGeneral):
            if tuple(layer.axis) not in ((-1,), (norm.x.ndim - 1,)) or layer.batch_axis:
                return "the Linear is not over the last axis alone"
            own_product = layer.dot_general is not None or layer.dot_general_cls is not None
        else:
            own_product = layer.dot_general is not jax.lax.dot_general
        if own_product or layer.preferred_element_type is not None:
            return "the Linear has a product or an element type of its own"
        if layer.promote_dtype is not dtypes.promote_dtype:
            return "the Linear has its own promote_dtype"
        kernel, bias = layer.kernel[...], None if layer.bias is None else layer.bias[...]
        dtype = dtypes.canonicalize_dtype(jnp.empty((), norm.dtype), kernel, bias, dtype=layer.dtype)
        return _modules.Linear(kernel, bias, dtype, layer.precision)


_NNX = _Nnx()


@_explain.traceable.register(nnx.Module)
def _(model: nnx.Module) -> Callable[..., Any]:
    return _traceable(model, type(model).__call__)  # pyright: ignore[reportAttributeAccessIssue]


@_explain.traceable.register(MethodType)
def _(method: MethodType) -> Callable[..., Any]:
    return _traceable(method.__self__, method.__func__) if isinstance(method.__self__, nnx.Module) else method


def _traceable(model: nnx.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a copy of the model, for a trace must not write into the model's own counts and statistics."""
    graphdef, state = nnx.split(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        copy = nnx.merge(graphdef, state, copy=True)
        for path, module in list(nnx.iter_modules(copy)):
            setattr(module, _PATH, ".".join(map(str, path)))
        return function(copy, *args, **kwargs)

    return call


_PATH = "_jln_path"  # of layers where `explain` traces them: Flax's transformations keep this, and no object
