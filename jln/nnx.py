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
    """`flax.nnx.LayerNorm` on `jln.layer_norm`: the same arguments, parameters, results and errors.

    adaLN's scale and offset of each example are no parameters of a module: for them call `jln.add_layer_norm(x,
    residual, scale, offset, gate=gate, zero_centered_scale=True)` in its place, with arrays `[B, 1, H]`.
    """

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
        added_to: jax.Array | None = None,
    ) -> Any:
        """Normalise `x`, or its sum with a residual.

        Args:
          x: `[..., num_features]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.nnx.LayerNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_layer_norm`.
          x_bias: as of `jln.add_layer_norm`; goes with a residual.
          gate: as of `jln.add_layer_norm`; goes with a residual.
          added_to: `x`'s shape. The norm's result is added to it, as of `jln.layer_norm_add`.

        Returns:
          `y` of `x`'s shape; with a residual `(y, total)`.
        """
        return _computed(self, x, mask, residual=residual, x_bias=x_bias, gate=gate, added_to=added_to)


class RMSNorm(FlaxRMSNorm):
    """`flax.nnx.RMSNorm` on `jln.rms_norm`: the same arguments, parameters, results and errors."""

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        residual: jax.Array | None = None,
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
        added_to: jax.Array | None = None,
        x_norm: RMSNorm | None = None,
        z: jax.Array | None = None,
        norm_before_gate: bool = True,
    ) -> Any:
        """Normalise `x`, or its sum with a residual.

        Args:
          x: `[..., num_features]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.nnx.RMSNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_rms_norm`.
          x_bias: as of `jln.add_rms_norm`; goes with a residual.
          gate: as of `jln.add_rms_norm`; goes with a residual.
          added_to: `x`'s shape. The norm's result is added to it, as of `jln.rms_norm_add`.
          x_norm: another RMSNorm. The norm is of `total = residual + x_norm(x)`, as of `jln.rms_norm_add_rms_norm`.
          z: `x`'s shape. The result is gated by `silu(z)`, as of `jln.rms_norm_gated`.
          norm_before_gate: as of `jln.rms_norm_gated`.

        Returns:
          `y` of `x`'s shape; with a residual `(y, total)`.
        """
        given = {"residual": residual, "x_bias": x_bias, "gate": gate, "added_to": added_to, "x_norm": x_norm}
        return _computed(self, x, mask, z=z, norm_before_gate=norm_before_gate, **given)


# out_features of one Linear, or by the name of each of several; or a mapping of all arguments that are its own.
Features = int | Sequence[int] | Mapping[str, int | Sequence[int] | Mapping[str, Any]]


class _NormLinear(nnx.Module):
    """A norm, and behind it a Linear named "linear", or several whose names `names` has."""

    norm: LayerNorm | RMSNorm
    names: tuple[str, ...] = ()

    def _make_linears(self, in_features: int, out_features: Features, options: Mapping[str, Any]) -> None:
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
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
    ) -> Any:
        """Apply the norm and the Linear to `x`, or to its sum with a residual.

        Args:
          x: `[..., H]`.
          mask: as of the norm, which Flax's own code then computes.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_layer_norm`.
          x_bias: as of `jln.add_layer_norm`; goes with a residual.
          gate: as of `jln.add_layer_norm`; goes with a residual.

        Returns:
          `y` `[..., *features]`, of several Linears a tuple in their order; with a residual `(y, total)`.
        """
        given = _modules.summed(x, residual, x_bias, gate)
        linears = {name: getattr(self, name) for name in self.names or ("linear",)}
        products = _modules.compute_layers(
            _name(self, f"{_kind(self.norm)}Linear"),
            _fused(self.norm, linears, given, mask),
            lambda: self.norm(given.total, mask=mask),
            lambda z: (tuple(linear(z) for linear in linears.values()), given.total),
        )
        return given.result(products, several=bool(self.names))


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
      epsilon: as of `flax.nnx.LayerNorm`.
      use_scale: as of `flax.nnx.LayerNorm`.
      use_offset: `flax.nnx.LayerNorm`'s `use_bias`.
      scale_init: as of `flax.nnx.LayerNorm`.
      offset_init: `flax.nnx.LayerNorm`'s `bias_init`.
      scale_metadata: as of `flax.nnx.LayerNorm`.
      offset_metadata: `flax.nnx.LayerNorm`'s `bias_metadata`.
      dtype: of both layers.
      param_dtype: of both layers.
      promote_dtype: of both layers.
      rngs: as of Flax's layers.
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
        rngs: nnx.Rngs,
        **linear_options: Any,
    ):
        both = {"dtype": dtype, "param_dtype": param_dtype, "promote_dtype": promote_dtype, "rngs": rngs}
        self.norm = LayerNorm(
            in_features,
            epsilon=epsilon,
            use_scale=use_scale,
            use_bias=use_offset,
            scale_init=scale_init,
            bias_init=offset_init,
            scale_metadata=scale_metadata,
            bias_metadata=offset_metadata,
            **both,
        )
        self._make_linears(in_features, out_features, {**linear_options, **both})

    __call__ = _NormLinear.__call__  # nnx.capture sees a class's own methods only


class RMSNormLinear(_NormLinear):
    """An `RMSNorm` and the Linear behind it, `linear(norm(x))`, as one operator that keeps only `x` for the backward.

    Its parameters are `norm.scale`, `linear.kernel` and `linear.bias`. Several Linears may read one norm, as of
    `LayerNormLinear`.

    Args:
      in_features: H.
      out_features: as of `LayerNormLinear`, also of several Linears.
      epsilon: as of `flax.nnx.RMSNorm`.
      use_scale: as of `flax.nnx.RMSNorm`.
      scale_init: as of `flax.nnx.RMSNorm`.
      scale_metadata: as of `flax.nnx.RMSNorm`.
      dtype: of both layers.
      param_dtype: of both layers.
      promote_dtype: of both layers.
      rngs: as of Flax's layers.
      **linear_options: every other argument of the Linear, or of each.
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
        rngs: nnx.Rngs,
        **linear_options: Any,
    ):
        both = {"dtype": dtype, "param_dtype": param_dtype, "promote_dtype": promote_dtype, "rngs": rngs}
        self.norm = RMSNorm(
            in_features,
            epsilon=epsilon,
            use_scale=use_scale,
            scale_init=scale_init,
            scale_metadata=scale_metadata,
            **both,
        )
        self._make_linears(in_features, out_features, {**linear_options, **both})

    __call__ = _NormLinear.__call__


def _is_captured(layer: nnx.Module) -> bool:
    return hasattr(layer, "__captures__")


def _linear(in_features: int, out_features: int | Sequence[int], **options: Any) -> Any:
    cls: Any = FlaxLinear if isinstance(out_features, int) else FlaxLinearGeneral
    return cls(in_features, out_features, **options)


def _prepared(layer: FlaxLayerNorm | FlaxRMSNorm, x: Any, mask: Any) -> _modules.Prepared | str:
    if mask is not None:
        return "mask is given"
    if layer.axis_name is not None:
        return f"statistics are averaged over the mesh axis {layer.axis_name!r}"
    scale, bias = None if layer.scale is None else layer.scale[...], None
    if isinstance(layer, FlaxLayerNorm):
        bias = None if layer.bias is None else layer.bias[...]
        z, scale, bias = layer.promote_dtype((x, scale, bias), dtype=layer.dtype)
    else:
        z, scale = layer.promote_dtype((x, scale), dtype=layer.dtype)
    y_dtype = dtypes.canonicalize_dtype(z, scale, bias, dtype=layer.dtype)
    if _reads_as_given(layer) and _is_narrower(x, z):
        z = x  # the kernels read 16 bits and compute in float32 as well
    return _modules.prepare(
        z,
        scale,
        bias,
        axes=_modules.axes(layer.reduction_axes),
        parameter_axes=_modules.axes(layer.feature_axes),
        epsilon=layer.epsilon,
        subtract_mean=isinstance(layer, FlaxLayerNorm),
        y_dtype=y_dtype,
    )


def _reads_as_given(layer: FlaxLayerNorm | FlaxRMSNorm) -> bool:
    return layer.promote_dtype is dtypes.promote_dtype


def _is_narrower(x: Any, promoted: Any) -> bool:
    if not isinstance(x, jax.Array | np.ndarray):
        return False
    return x.dtype in (jnp.bfloat16, jnp.float16) and promoted.dtype == jnp.float32


def _plain(layer: FlaxLayerNorm | FlaxRMSNorm, x: Any, mask: Any) -> jax.Array:
    cls: Any = FlaxLayerNorm if isinstance(layer, FlaxLayerNorm) else FlaxRMSNorm
    return cls.__call__(layer, x, mask=mask)


def _kind(layer: FlaxLayerNorm | FlaxRMSNorm) -> str:
    return "LayerNorm" if isinstance(layer, FlaxLayerNorm) else "RMSNorm"


def _computed(norm: LayerNorm | RMSNorm, x: Any, mask: Any, **of_x: Any) -> Any:
    """The call of a norm, from within it. of_x: the other arguments of `_modules.taken`."""
    given, name = _modules.taken(x, norm.reduction_axes, **of_x), _name(norm, _kind(norm))
    if given.x_norm is not None:

        def prepare(a: Any, read: Any) -> _modules.Prepared | str:
            return "nnx.capture watches x_norm" if _is_captured(a) else _prepared(a, read, mask if a is norm else None)

        apart, reads_as_given = lambda total: _computed(norm, total, mask), _reads_as_given(norm)
        return _modules.pair(name, given, norm, RMSNorm, prepare, apart, reads_as_given)
    found, plain = _prepared(norm, given.total, mask), lambda total: _plain(norm, total, mask)
    return _modules.compute_norm(name, found, given, plain, _reads_as_given(norm))


def _fused(norm: Any, linears: Mapping[str, Any], given: _modules.Inputs, mask: Any) -> _modules.Fused | str:
    """A norm and Linears as one operator, or the reason why they must be called.

    No layer is called here: nobody sees half a result.
    """
    if _is_captured(norm):
        return "nnx.capture watches the norm"
    if type(norm).__call__ not in (LayerNorm.__call__, RMSNorm.__call__, FlaxLayerNorm.__call__, FlaxRMSNorm.__call__):
        return "the norm has a call of its own"
    found = _prepared(norm, given.total, mask)
    if isinstance(found, str):
        return found
    described = {name: _described(linear, found) for name, linear in linears.items()}
    return _modules.fused(found, described, given, _reads_as_given(norm))


def _described(layer: Any, norm: _modules.Prepared) -> _modules.Linear | str:
    """A Linear in the operators' terms, or the reason why it cannot be."""
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


def _name(layer: nnx.Module, kind: str) -> str:
    """The name under which `explain` lists a layer: its class, and its place where that is known."""
    return f"jln.nnx.{kind} {getattr(layer, _PATH, '')}".rstrip()
