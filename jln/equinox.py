"""Equinox's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Linears behind it.

    from jln.equinox import LayerNorm, RMSNorm    # instead of: from equinox.nn import LayerNorm, RMSNorm

Constructors, fields, initial values and serialised leaves are Equinox's own: the classes are Equinox's with another
call. They work on one example and are vmapped, as Equinox's are. A call that the operators cannot compute (integer or
empty input, a shape of no axes, ...) runs Equinox's own code; `jln.explain(layer, x)` tells which of the two a call
takes, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jln import _explain, _modules

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError(_modules.missing("jln.equinox", "Equinox", "equinox")) from error

__all__ = ["LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear"]

# Equinox's own classes, even where somebody puts ours in their place later.
EquinoxLayerNorm = eqx.nn.LayerNorm
EquinoxRMSNorm = eqx.nn.RMSNorm
EquinoxLinear = eqx.nn.Linear

_ABSENT: Any = object()


class LayerNorm(EquinoxLayerNorm):
    """`equinox.nn.LayerNorm` on `jln.layer_norm`: the same arguments, fields, results and errors."""

    @_modules.listing(_modules.OfLayerNorm)
    def __call__(
        self,
        x: jax.Array,
        state: Any = _ABSENT,
        *,
        key: jax.Array | None = None,
        **beside: Unpack[_modules.OfLayerNorm],
    ) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `shape`, as of Equinox.
          state: as of Equinox; the result is then a tuple of the above and the state.
          key: ignored, as by Equinox.
          **beside: as of every LayerNorm of jln.
        """
        return _with_state(_EQUINOX.norm(self, x, beside), state)


class RMSNorm(EquinoxRMSNorm):
    """`equinox.nn.RMSNorm` on `jln.rms_norm`: the same arguments, fields, results and errors."""

    @_modules.listing(_modules.OfRMSNorm)
    def __call__(
        self,
        x: jax.Array,
        state: Any = _ABSENT,
        *,
        key: jax.Array | None = None,
        **beside: Unpack[_modules.OfRMSNorm],
    ) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `shape`, as of Equinox.
          state: as of Equinox; the result is then a tuple of the above and the state.
          key: ignored, as by Equinox.
          **beside: as of every RMSNorm of jln.
        """
        return _with_state(_EQUINOX.norm(self, x, beside), state)


class _NormLinear(eqx.Module):
    """A norm of the class `_norm_class` and the Linear behind it, or a tuple of Linears with names."""

    norm: EquinoxLayerNorm | EquinoxRMSNorm
    linear: Any  # an equinox.nn.Linear, or a tuple of them
    names: tuple[str, ...] = eqx.field(static=True, default=())
    quantize: Any = eqx.field(static=True, default=None)
    _norm_class: ClassVar[Any]

    def __init__(
        self,
        in_features: int,
        out_features: Any,
        eps: float = 1e-5,
        use_weight: bool = True,
        use_offset: bool = True,
        use_bias: bool = True,
        dtype: Any = None,
        *,
        quantize: Any = None,
        key: jax.Array,
    ):
        self.quantize = quantize
        self.norm = self._norm_class(in_features, eps, use_weight, use_offset, dtype)
        if not isinstance(out_features, Mapping):
            self.linear = eqx.nn.Linear(in_features, out_features, use_bias, dtype, key=key)
            return
        linears = _modules.named("out_features", out_features, type(self), ("norm", "linear"))
        options = {"use_bias": use_bias, "dtype": dtype}
        keys = jax.random.split(key, len(linears))
        self.linear = tuple(
            eqx.nn.Linear(in_features, **{**options, "key": k, **own})
            for k, own in zip(keys, linears.values(), strict=True)
        )
        self.names = tuple(linears)

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__.get("names", ())
        if name not in names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return self.linear[names.index(name)]

    @_modules.listing(_modules.OfSum)
    def __call__(self, x: jax.Array, *, key: jax.Array | None = None, **beside: Unpack[_modules.OfSum]) -> Any:
        """Return `y` `[N]`, of several Linears a tuple in their order; with a residual `(y, total)`.

        Args:
          x: `[H]`.
          key: ignored, as by Equinox.
          **beside: as of every norm of jln.
        """
        several = isinstance(self.linear, tuple)
        layers = self.linear if several else (self.linear,)
        linears = dict(zip(self.names or ("linear",), layers, strict=True))
        return _EQUINOX.linears(self, self.norm, linears, x, {"quantize": self.quantize, **beside}, several=several)


class LayerNormLinear(_NormLinear):
    """A `LayerNorm` and the Linear behind it, `linear(norm(x))`, as one operator that keeps only `x` for the backward.

    Its fields are the two layers, `norm` and an `equinox.nn.Linear`, `linear`, the second with the initial values that
    `key` gives it in Equinox. Several Linears may read one norm:

        layer = LayerNormLinear(1024, {"q": 1024, "k": 256, "v": 256}, key=key)  # layer.q.weight, layer.k.weight ...
        q, k, v = layer(x)
        (q, k, v), total = layer(x, residual=residual)  # of total = x + residual

    Several Linears are a tuple in their order, with which leaves are serialised as those of fields `norm`, `q`, `k` and
    `v` are.

    Args:
      in_features: H.
      out_features: N, or "scalar". For several Linears a mapping from each one's name to either of these, or to a
        mapping of the arguments in which it differs from the others, as `{"out_features": 256, "use_bias": False}`;
        they take the keys `jax.random.split(key, len(out_features))`.
      eps, use_weight: as of `equinox.nn.LayerNorm`.
      use_offset: the norm's `use_bias`.
      use_bias, key: as of `equinox.nn.Linear`.
      dtype: of all parameters.
      quantize: of calls that give none: `jln.MXFloat8()`, as of `jln.layer_norm_linear`. Each example of a vmap has
        scales of its own, so that a `jln.Float8` has one for each row, and kernels' gradients for each row.
    """

    _norm_class: ClassVar[Any] = LayerNorm


class RMSNormLinear(_NormLinear):
    """An `RMSNorm` and the Linear behind it, `linear(norm(x))`, as one operator that keeps only `x` for the backward.

    In Equinox an RMSNorm has an offset too.

    Args:
      in_features, out_features, eps, use_weight, use_offset, use_bias, dtype, quantize, key: as of `LayerNormLinear`.
    """

    _norm_class: ClassVar[Any] = RMSNorm


@_explain.places.register(eqx.Module)
def _(model: eqx.Module) -> Mapping[int, str]:
    paths: dict[int, str] = {}

    def enter(path: str, node: Any) -> None:
        def inner(relative: Any, a: Any) -> None:
            if isinstance(a, eqx.Module):
                enter(path + jax.tree_util.keystr(relative), a)

        paths[id(node)] = path
        jax.tree_util.tree_map_with_path(inner, node, is_leaf=lambda a: a is not node and isinstance(a, eqx.Module))

    enter("", model)
    return paths


class _Equinox(_modules.Adapter):
    module = "jln.equinox"
    theirs, ours = (EquinoxLayerNorm, EquinoxRMSNorm), (LayerNorm, RMSNorm)

    def place(self, layer: Any) -> str:
        return _explain.place(layer)

    def axes(self, layer: Any, x: Any) -> range:
        return range(-len(layer.shape), 0)

    def prepared(self, layer: Any, x: Any, own: Mapping[str, Any]) -> _modules.Prepared | str:
        if not isinstance(x, jax.Array | np.ndarray) or x.shape != layer.shape:
            return f"x does not have the shape {layer.shape}"
        parameters = []
        for a, used in ((layer.weight, layer.use_weight), (layer.bias, layer.use_bias)):
            if used and not isinstance(a, jax.Array | np.ndarray):
                return "a parameter is missing" if a is None else f"a parameter is a {type(a).__name__}, not an array"
            parameters.append(a if used else None)
        return _modules.prepare(
            x,
            *parameters,
            axes=range(x.ndim),
            epsilon=layer.eps,
            subtract_mean=self.is_layer_norm(layer),
            y_dtype=x.dtype,
        )

    def linear(self, layer: eqx.nn.Linear, norm: _modules.Prepared, own: Mapping[str, Any]) -> _modules.Linear | str:
        if type(layer).__call__ is not EquinoxLinear.__call__:
            return "the Linear has a call of its own"
        if "scalar" in (layer.in_features, layer.out_features):
            return "the Linear has a scalar side"
        kernel, bias = layer.weight.T, layer.bias
        dtype = jnp.result_type(norm.dtype, kernel, *([] if bias is None else [bias]))
        return _modules.Linear(kernel, bias, dtype, None)


_EQUINOX = _Equinox()


def _with_state(y: Any, state: Any) -> Any:
    return y if state is _ABSENT else (y, state)
