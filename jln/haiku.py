"""Haiku's LayerNorm and RMSNorm on jln's operators, and a LayerNorm fused with the Linear behind it.

    from jln.haiku import LayerNorm, RMSNorm    # instead of: from haiku import LayerNorm, RMSNorm

Constructors, parameters, initial values, module names and checkpoints are Haiku's own: the classes are Haiku's with
another call. What the operators cannot do (parameters on axes that are not normalised, ...) Haiku's own code does;
`jln.explain` tells which of them a call takes, and why. Haiku computes in the dtype of its inputs, rounding every
intermediate of a 16-bit input to 16 bits, and its `use_fast_variance=True` loses the variance of a row whose mean is
large against its spread; here all is in float32, rounded once, and the variance is two-pass.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jln import _modules

try:
    import haiku as hk
except ImportError as error:
    raise ImportError(_modules.missing("jln.haiku", "Haiku", "haiku")) from error

__all__ = ["LayerNorm", "LayerNormLinear", "RMSNorm"]

# As they are now, should somebody put ours in their place.
HaikuLayerNorm = hk.LayerNorm
HaikuRMSNorm = hk.RMSNorm

Norm: TypeAlias = HaikuLayerNorm | HaikuRMSNorm


class LayerNorm(HaikuLayerNorm):
    """`haiku.LayerNorm` on `jln.layer_norm`: the same arguments, parameters, results and errors."""

    def __call__(self, inputs: jax.Array, scale: jax.Array | None = None, offset: jax.Array | None = None) -> jax.Array:
        """inputs: `[..., H]`, or as `axis` says; scale, offset: broadcast against it."""
        return call(self, super().__call__, inputs, scale, offset)


class RMSNorm(HaikuRMSNorm):
    """`haiku.RMSNorm` on `jln.rms_norm`: the same arguments, parameters, results and errors."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """inputs: `[..., H]`, or as `axis` says."""
        return call(self, super().__call__, inputs)


class LayerNormLinear(hk.Module):
    """A `haiku.LayerNorm` over the last axis and the `haiku.Linear` behind it as one operator that keeps only the
    inputs for the backward. Parameters and initial values are those of Haiku's two modules, "layer_norm" and "linear".

    Args:
      output_size: as of `haiku.Linear`.
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
        output_size: int,
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
        self._norm = (-1, create_scale, create_offset, eps, scale_init, offset_init)
        self._linear = (output_size, with_bias, w_init, b_init)

    def __call__(self, inputs: jax.Array, *, precision: jax.lax.PrecisionLike = None) -> jax.Array:
        """inputs `[..., H]` -> `[..., output_size]`; `precision` is the Linear's."""
        norm = _DeferringLayerNorm(*self._norm, param_axis=-1, name="layer_norm")
        return _FusedLinear(*self._linear, name="linear")(norm(inputs), precision=precision)


class _DeferringLayerNorm(HaikuLayerNorm):
    """A LayerNorm that leaves its work to the Linear behind it."""

    def __call__(self, inputs: Any, scale: Any = None, offset: Any = None) -> Any:
        plain = super().__call__
        return _modules.deferred(_name(self), _prepared(self, inputs, scale, offset), lambda: plain(inputs))


class _FusedLinear(hk.Linear):
    """`haiku.Linear` which does the work of a norm that was left to it."""

    def __call__(self, inputs: Any, *, precision: Any = None) -> jax.Array:
        plain = super().__call__
        if not isinstance(inputs, _modules.Deferred):
            return plain(inputs, precision=precision)
        found: Any
        if hk.running_init():
            found = "Haiku's own code makes the parameters"
        else:
            dtype = inputs.norm.y_dtype
            shape = [inputs.x.shape[-1], self.output_size]
            w = hk.get_parameter("w", shape, dtype, init=self.w_init)
            b = hk.get_parameter("b", shape[1:], dtype, init=self.b_init) if self.with_bias else None
            found = inputs.linear_obstacle(w.shape, jnp.result_type(dtype, w, *([] if b is None else [b])))
            if found is None:
                found = lambda: inputs.linear(w, b, precision)  # noqa: E731
        name = f"jln.haiku.LayerNormLinear {self.module_name.rpartition('/')[0]}"
        return _modules.linear_computed(name, inputs, found, lambda z: plain(z, precision=precision))


def call(layer: Norm, plain: Callable[..., jax.Array], inputs: Any, scale: Any = None, offset: Any = None) -> jax.Array:
    """The call of a norm, from within it; `plain` is Haiku's own."""
    if not isinstance(layer, HaikuLayerNorm) and (scale is not None or offset is not None):
        return plain(inputs, scale, offset)  # which takes no such arguments, and says so
    given = (scale, offset) if isinstance(layer, HaikuLayerNorm) else ()
    return _modules.computed(_name(layer), _prepared(layer, inputs, scale, offset), lambda: plain(inputs, *given))


def _name(layer: Norm) -> str:
    return f"jln.haiku.{'LayerNorm' if isinstance(layer, HaikuLayerNorm) else 'RMSNorm'} {layer.module_name}"


def _prepared(layer: Norm, inputs: Any, scale: Any, offset: Any) -> _modules.Deferred | str:
    """Makes or reads the parameters as Haiku does, unless it returns a reason: then Haiku's own code does, or has."""
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
    if not isinstance(layer.eps, int | float):
        return f"eps is a {type(layer.eps).__name__}"
    shape = _parameter_shape(_axes(layer.param_axis, inputs.ndim, wrap=True), inputs.shape)
    if layer.create_scale:
        scale = hk.get_parameter("scale", shape, inputs.dtype, init=layer.scale_init)
    if isinstance(layer, HaikuLayerNorm) and layer.create_offset:
        offset = hk.get_parameter("offset", shape, inputs.dtype, init=layer.offset_init)
    parameters = [None if a is None else jnp.asarray(a) for a in (scale, offset)]
    return _modules.prepared(
        inputs,
        *parameters,
        axes=axes,
        epsilon=float(np.asarray(layer.eps, inputs.dtype)),  # Haiku adds it in the dtype of the inputs
        subtract_mean=is_layer_norm,
        y_dtype=jnp.result_type(inputs, *(a for a in parameters if a is not None)),
    )


def _axes(axis: Any, ndim: int, wrap: bool) -> tuple[int, ...]:
    """wrap: as Haiku's LayerNorm does, beyond ndim too, and each axis once."""
    if isinstance(axis, slice):
        return tuple(range(ndim)[axis])
    return tuple(sorted({a % ndim for a in axis})) if wrap else tuple(axis)


def _parameter_shape(axes: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of x's rank, but for the last axis alone, which keeps the form of old checkpoints."""
    if axes == (len(shape) - 1,):
        return shape[-1:]
    return tuple(n if i in axes else 1 for i, n in enumerate(shape))


def _must_name_param_axis(layer: Norm) -> bool:
    """Haiku has a switch in the making that refuses to guess param_axis."""
    asks = getattr(sys.modules[HaikuLayerNorm.__module__], "ERROR_IF_PARAM_AXIS_NOT_EXPLICIT", False)
    return asks and isinstance(layer, HaikuLayerNorm) and not layer._param_axis_passed_explicitly


@_modules.traceable.register(hk.Transformed)
@_modules.traceable.register(hk.TransformedWithState)
def _(model: Any) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        key = jax.random.key(0)
        with _modules.unnoted():  # of the call that makes the parameters, in which nothing is fused
            made = model.init(key, *args, **kwargs)
        made = made if isinstance(model, hk.TransformedWithState) else (made,)
        # what hk.without_apply_rng returns has no rng
        rng = (key,) if "rng" in inspect.signature(model.apply).parameters else ()
        return model.apply(*made, *rng, *args, **kwargs)

    return traced
