"""Equinox's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Linear behind it.

    from jln.equinox import LayerNorm, RMSNorm    # instead of: from equinox.nn import LayerNorm, RMSNorm

Constructors, fields, initial values and serialised leaves are Equinox's own: the classes are Equinox's with another
call. They work on one example and are vmapped, as Equinox's are. What the operators cannot do (integer or empty input,
a shape of no axes, ...) Equinox's own code does; `jln.explain(layer, x)` tells which of them a call takes, and why.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jln import _modules

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError(_modules.missing("jln.equinox", "Equinox", "equinox")) from error

__all__ = ["LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear"]

# As they are now, should somebody put ours in their place.
EquinoxLayerNorm = eqx.nn.LayerNorm
EquinoxRMSNorm = eqx.nn.RMSNorm

_ABSENT: Any = object()


def _call(self: Any, x: jax.Array, state: Any = _ABSENT, *, key: jax.Array | None = None) -> Any:
    """x: of `shape`. With `state` the result is `(y, state)`; `key` is ignored, as by Equinox."""
    y = _modules.computed(f"jln.equinox.{_kind(self)}", _prepared(self, x), lambda: _plain(self, x))
    return _with_state(y, state)


class LayerNorm(EquinoxLayerNorm):
    """`equinox.nn.LayerNorm` on `jln.layer_norm`: the same arguments, fields, results and errors."""

    __call__ = _call


class RMSNorm(EquinoxRMSNorm):
    """`equinox.nn.RMSNorm` on `jln.rms_norm`: the same arguments, fields, results and errors."""

    __call__ = _call


class _NormLinear(eqx.Module):
    """A norm of `_norm_class` and the Linear behind it."""

    norm: EquinoxLayerNorm | EquinoxRMSNorm
    linear: eqx.nn.Linear
    _norm_class: ClassVar[Any]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        use_weight: bool = True,
        use_offset: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        key: jax.Array,
    ):
        self.norm = self._norm_class(in_features, eps, use_weight, use_offset, dtype)
        self.linear = eqx.nn.Linear(in_features, out_features, use_bias, dtype, key=key)

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x `[H]` -> `[N]`; `key` is ignored, as by Equinox."""
        name = f"jln.equinox.{_kind(self.norm)}Linear"
        norm = _prepared(self.norm, x)
        if isinstance(norm, str):
            return self.linear(_modules.computed(name, norm, lambda: _plain(self.norm, x)))
        kernel, bias = self.linear.weight.T, self.linear.bias
        dtype = jnp.result_type(norm.dtype, kernel, *([] if bias is None else [bias]))
        found: Any = norm.linear_obstacle(kernel.shape, dtype)
        if "scalar" in (self.linear.in_features, self.linear.out_features):
            found = "the Linear has a scalar side"
        if found is None:
            found = lambda: norm.linear(kernel, bias, None)  # noqa: E731
        return _modules.linear_computed(name, norm, found, self.linear)


class LayerNormLinear(_NormLinear):
    """A `LayerNorm` and the `equinox.nn.Linear` behind it, `linear(norm(x))`, as one operator that keeps only `x` for
    the backward. Its fields are the two layers, the second with the initial values that `key` gives it in Equinox.

    Args:
      in_features: H.
      out_features: N.
      eps: as of `equinox.nn.LayerNorm`.
      use_weight: of the norm.
      use_offset: the norm's `use_bias`.
      use_bias: of the Linear.
      dtype: of all parameters.
      key: as of `equinox.nn.Linear`.
    """

    _norm_class: ClassVar[Any] = LayerNorm


class RMSNormLinear(_NormLinear):
    """Likewise with an `RMSNorm`, which in Equinox has an offset too; the arguments are those of `LayerNormLinear`."""

    _norm_class: ClassVar[Any] = RMSNorm


class DeferredInput(_modules.NoArray, eqx.Module):
    """What the placeholder of a fused norm returns, for the one `FusedLayerNormLinear` that reads it. The norm's result
    has the shape and the dtype of its input; who wants its numbers gets a TypeError.
    """

    x: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype


def _fused_call(self: Any, x: Any, *, key: jax.Array | None = None) -> jax.Array:
    """x: a `DeferredInput` or `[H]` -> `[N]`; `key` is ignored, as by Equinox."""
    return _NormLinear.__call__(self, x.x) if isinstance(x, DeferredInput) else self.linear(x)


class FusedLayerNormLinear(LayerNormLinear):
    """Stands where a Linear was that `jln.convert.equinox` fused with the norm before it: it applies the norm to what
    the norm's placeholder returns, and to an array the Linear alone.
    """

    __call__ = _fused_call


class FusedRMSNormLinear(RMSNormLinear):
    """Likewise."""

    __call__ = _fused_call


class DeferredNorm(eqx.Module):
    """Stands where a norm was that `jln.convert.equinox` fused with the Linear behind it."""

    def __call__(self, x: jax.Array, state: Any = _ABSENT, *, key: jax.Array | None = None) -> Any:
        return _with_state(DeferredInput(x), state)


def _kind(layer: EquinoxLayerNorm | EquinoxRMSNorm) -> str:
    return "LayerNorm" if isinstance(layer, EquinoxLayerNorm) else "RMSNorm"


def _plain(layer: EquinoxLayerNorm | EquinoxRMSNorm, x: Any) -> jax.Array:
    cls: Any = EquinoxLayerNorm if isinstance(layer, EquinoxLayerNorm) else EquinoxRMSNorm
    return cls.__call__(layer, x)


def _prepared(layer: EquinoxLayerNorm | EquinoxRMSNorm, x: Any) -> _modules.Deferred | str:
    if not isinstance(x, jax.Array | np.ndarray) or x.shape != layer.shape:
        return f"x does not have the shape {layer.shape}"
    parameters = [a if used else None for a, used in ((layer.weight, layer.use_weight), (layer.bias, layer.use_bias))]
    for a, used in zip(parameters, (layer.use_weight, layer.use_bias), strict=True):
        if used and not isinstance(a, jax.Array | np.ndarray):
            return "a parameter is missing" if a is None else f"a parameter is a {type(a).__name__}, not an array"
    return _modules.prepared(
        x,
        *parameters,
        axes=range(x.ndim),
        epsilon=layer.eps,
        subtract_mean=isinstance(layer, EquinoxLayerNorm),
        y_dtype=x.dtype,
    )


def _with_state(y: Any, state: Any) -> Any:
    return y if state is _ABSENT else (y, state)
