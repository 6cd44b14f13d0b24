"""Flax Linen's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Denses behind it.

    from jln.linen import LayerNorm, RMSNorm    # instead of: from flax.linen import LayerNorm, RMSNorm

Fields, parameters, initial values, automatic names and checkpoints are Flax's own: the classes are Flax's with another
call. A call that the operators cannot compute (`mask`, `axis_name`, `force_float32_reductions=False`, parameters on
axes that are not normalised, ...) runs Flax's own code; `jln.explain(layer, x)` tells which of the two a call takes,
and why. Results differ by rounding, but where Flax's `use_fast_variance=True` loses the variance of a row whose mean is
large against its spread: here it is two-pass always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

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

Norm: TypeAlias = FlaxLayerNorm | FlaxRMSNorm


class LayerNorm(FlaxLayerNorm):
    """`flax.linen.LayerNorm` on `jln.layer_norm`: the same fields, parameters, results and errors.

    adaLN's scale and offset of each example are no parameters of a module: for them call `jln.add_layer_norm(x,
    residual, scale, offset, gate=gate, zero_centered_scale=True)` in its place, with arrays `[B, 1, H]`.
    """

    @nn.compact
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
          x: `[..., H]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.linen.LayerNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_layer_norm`.
          x_bias: as of `jln.add_layer_norm`; goes with a residual.
          gate: as of `jln.add_layer_norm`; goes with a residual.
          added_to: `x`'s shape. The norm's result is added to it, as of `jln.layer_norm_add`.

        Returns:
          `y` of `x`'s shape; with a residual `(y, total)`.
        """
        given = {"residual": residual, "x_bias": x_bias, "gate": gate, "added_to": added_to}
        return _call(self, super().__call__, x, mask=mask, **given)


class RMSNorm(FlaxRMSNorm):
    """`flax.linen.RMSNorm` on `jln.rms_norm`: the same fields, parameters, results and errors."""

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
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
          x: `[..., H]`, or as `reduction_axes` and `feature_axes` say.
          mask: as of `flax.linen.RMSNorm`, whose code then runs.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_rms_norm`.
          x_bias: as of `jln.add_rms_norm`; goes with a residual.
          gate: as of `jln.add_rms_norm`; goes with a residual.
          added_to: `x`'s shape. The norm's result is added to it, as of `jln.rms_norm_add`.
          x_norm: another RMSNorm. The norm is of `total = residual + x_norm(x)`, as of `jln.rms_norm_add_rms_norm`.
          z: `x`'s shape. The result is gated by `silu(z)`, as of `jln.rms_norm_gated`.
          norm_before_gate: as of `jln.rms_norm_gated`.

        Returns:
          `y` of `x`'s shape; with a residual `(y, total)`.

        Where the two norms are one operator, `x_norm` is not called: `nn.intercept_methods` and `capture_intermediates`
        see this layer's call alone. In `init` it is.
        """
        given = {"residual": residual, "x_bias": x_bias, "gate": gate, "added_to": added_to, "x_norm": x_norm}
        return _call(self, super().__call__, x, mask=mask, z=z, norm_before_gate=norm_before_gate, **given)


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

    @nn.nowrap
    def _norm(self, **options: Any) -> Norm:
        raise NotImplementedError

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
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
    ) -> Any:
        """Apply the norm and the Dense to `x`, or to its sum with a residual.

        Args:
          x: `[..., H]`.
          mask: as of the norm, which Flax's own code then computes.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_layer_norm`.
          x_bias: as of `jln.add_layer_norm`; goes with a residual.
          gate: as of `jln.add_layer_norm`; goes with a residual.

        Returns:
          `y` `[..., *features]`, of several Denses a tuple in their order; with a residual `(y, total)`.
        """
        given = _modules.summed(x, residual, x_bias, gate)
        norm = self._norm(**{field: getattr(self, field) for field in _OF_THE_NORM}, name="norm")
        options: dict[str, Any] = {field: getattr(self, field) for field in _OF_A_DENSE}
        several = isinstance(self.features, tuple) and any(isinstance(a, tuple) for a in self.features)
        named: Any = self.features if several else [("dense", {"features": self.features})]
        denses = [nn.DenseGeneral(**{**options, **own}, name=name) for name, own in named]
        products = _modules.compute_layers(
            f"jln.linen.{_kind(norm)}Dense {'/'.join(self.path)}".rstrip(),
            _fused(norm, denses, given, mask),
            lambda: norm(given.total, mask=mask),
            lambda z: (tuple(dense(z) for dense in denses), given.total),
        )
        return given.result(products, several)


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
      use_bias: of the Dense.
      dtype: of both layers.
      param_dtype: of both layers.
      precision: of the Dense.
      kernel_init: of the Dense.
      bias_init: of the Dense.
      promote_dtype: of the Dense.
      dot_general: of the Dense.
      dot_general_cls: of the Dense.
      epsilon: of the norm.
      use_scale: of the norm.
      scale_init: of the norm.
      use_offset: the norm's `use_bias`.
      offset_init: the norm's `bias_init`.
    """

    use_offset: bool = True
    offset_init: nn.initializers.Initializer = initializers.zeros

    @nn.nowrap
    def _norm(self, **options: Any) -> Norm:
        return LayerNorm(use_bias=self.use_offset, bias_init=self.offset_init, **options)


class RMSNormDense(_NormDense):
    """An `RMSNorm` and the Dense behind it, `dense(norm(x))`, as one operator that keeps only `x` for the backward.

    Names, parameters and attributes are those of `LayerNormDense` without `use_offset` and `offset_init`, which an
    RMSNorm does not have.
    """

    @nn.nowrap
    def _norm(self, **options: Any) -> Norm:
        return RMSNorm(**options)


def _call(
    layer: Norm,
    plain: Callable[..., jax.Array],
    x: Any,
    *,
    mask: Any = None,
    **of_x: Any,
) -> Any:
    """The call of a norm, from within it.

    plain: Flax's own code. of_x: the other arguments of `_modules.taken`.
    """

    def parameter(name: str, init: Any, shape: Sequence[int]) -> jax.Array:
        return layer.param(name, init, shape, layer.param_dtype)

    name = f"jln.linen.{_kind(layer)} {'/'.join(layer.path)}".rstrip()
    given = _modules.taken(x, layer.reduction_axes, **of_x)
    if given.x_norm is not None:

        def existing(norm: Norm, read: Any) -> _modules.Prepared | str:
            return _existing(norm, read, mask if norm is layer else None)

        return _modules.pair(name, given, layer, RMSNorm, existing, lambda total: _call(layer, plain, total, mask=mask))
    found = _prepared(layer, given.total, mask, parameter)
    return _modules.compute_norm(name, found, given, lambda total: plain(total, mask=mask))


def _kind(layer: Norm) -> str:
    return "LayerNorm" if isinstance(layer, FlaxLayerNorm) else "RMSNorm"


def _fused(norm: Norm, denses: Sequence[nn.DenseGeneral], given: _modules.Inputs, mask: Any) -> _modules.Fused | str:
    """A norm and Denses as one operator, or the reason why they must be called.

    No layer is called here: nobody sees half a result.
    """
    ready = _existing(norm, given.total, mask)
    if isinstance(ready, str):
        return ready
    return _modules.fused(ready, {str(dense.name): _described(dense, ready) for dense in denses}, given)


def _existing(norm: Norm, x: Any, mask: Any) -> _modules.Prepared | str:
    """The norm in the operators' terms, as of `_prepared`, with the parameters that a call of it has made."""
    if not isinstance(x, jax.Array | np.ndarray) or x.ndim == 0:
        return "x has no axes"
    shape = tuple(x.shape[a] for a in sorted({a % x.ndim for a in _modules.axes(norm.feature_axes)}))
    use_offset = isinstance(norm, FlaxLayerNorm) and norm.use_bias
    read = _read(norm, {"scale": (norm.use_scale, shape), "bias": (use_offset, shape)})
    return read if isinstance(read, str) else _prepared(norm, x, mask, lambda name, *_: read[name])


def _described(dense: nn.DenseGeneral, norm: _modules.Prepared) -> _modules.Linear | str:
    """A Dense in the operators' terms, or the reason why it cannot be."""
    if dense.promote_dtype is not dtypes.promote_dtype:
        return "the Dense has its own promote_dtype"
    if dense.dot_general is not None or dense.dot_general_cls is not None:
        return "the Dense has a product of its own"
    if _modules.axes(dense.axis) not in ((-1,), (norm.x.ndim - 1,)) or dense.batch_dims:
        return "the Dense is not over the last axis alone"
    features = _modules.axes(dense.features)
    read = _read(dense, {"kernel": (True, (norm.x.shape[-1], *features)), "bias": (dense.use_bias, features)})
    if isinstance(read, str):
        return read
    kernel, bias = read["kernel"], read.get("bias")
    dtype = dtypes.canonicalize_dtype(jnp.empty((), norm.dtype), kernel, bias, dtype=dense.dtype)
    return _modules.Linear(kernel, bias, dtype, dense.precision)


def _read(layer: nn.Module, wanted: Mapping[str, tuple[bool, tuple[int, ...]]]) -> dict[str, Any] | str:
    """The parameters of a layer by name, or the reason why the layer must make them.

    wanted: from each name to whether the parameter is used, and the shape that it must have.
    """
    found = {}
    for name, (used, shape) in wanted.items():
        if not used:
            continue
        if not layer.has_variable("params", name):
            return "Flax's own code makes the parameters"
        found[name] = nn.meta.unbox(layer.get_variable("params", name))
        if jnp.shape(found[name]) != shape:
            return "the parameters do not have the shapes that x and features ask for"
    return found


def _prepared(layer: Norm, x: Any, mask: Any, parameter: Callable[..., jax.Array]) -> _modules.Prepared | str:
    """The norm in the operators' terms, or the reason why they cannot compute it.

    parameter: (name, init, shape) -> a parameter, made or read as Flax does. It is not called where a reason is
      returned: then Flax's own code makes or reads the parameters.
    """
    if mask is not None:
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
    use_bias = isinstance(layer, FlaxLayerNorm) and layer.use_bias
    scale = _stand_in(layer, "scale", shape) if layer.use_scale else None
    bias = _stand_in(layer, "bias", shape) if use_bias else None
    like = (None if a is None else np.empty((), a.dtype) for a in (scale, bias))
    found = _modules.prepare(
        x,
        scale,
        bias,
        axes=_modules.axes(layer.reduction_axes),
        parameter_axes=features,
        epsilon=layer.epsilon,
        subtract_mean=isinstance(layer, FlaxLayerNorm),
        y_dtype=dtypes.canonicalize_dtype(x, *like, dtype=layer.dtype),
    )
    if isinstance(found, str):
        return found
    return found.with_parameters(
        parameter("scale", layer.scale_init, shape) if layer.use_scale else None,
        parameter("bias", layer.bias_init, shape) if use_bias else None,
    )


def _stand_in(layer: Norm, name: str, shape: Sequence[int]) -> jax.ShapeDtypeStruct:
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
