"""Equinox's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Linears behind it.

    from jln.equinox import LayerNorm, RMSNorm    # instead of: from equinox.nn import LayerNorm, RMSNorm

Constructors, fields, initial values and serialised leaves are Equinox's own: the classes are Equinox's with another
call. They work on one example and are vmapped, as Equinox's are. A call that the operators cannot compute (integer or
empty input, a shape of no axes, ...) runs Equinox's own code; `jln.explain(layer, x)` tells which of the two a call
takes, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

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


def _computed(self: Any, x: Any, **of_x: Any) -> Any:
    """The call of a norm, from within it. of_x: the other arguments of `_modules.taken`."""
    given, name = _modules.taken(x, range(-len(self.shape), 0), **of_x), _name(self, _kind(self))
    if given.x_norm is not None:
        return _modules.pair(name, given, self, RMSNorm, _prepared, lambda total: _computed(self, total))
    return _modules.compute_norm(name, _prepared(self, given.total), given, lambda total: _plain(self, total))


class LayerNorm(EquinoxLayerNorm):
    """`equinox.nn.LayerNorm` on `jln.layer_norm`: the same arguments, fields, results and errors.

    adaLN's scale and offset of each example are no parameters of a module: for them call `jln.add_layer_norm(x,
    residual, scale, offset, gate=gate, zero_centered_scale=True)` in its place, with arrays `[B, 1, H]` and without a
    vmap.
    """

    def __call__(
        self,
        x: jax.Array,
        state: Any = _ABSENT,
        *,
        key: jax.Array | None = None,
        residual: jax.Array | None = None,
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
        added_to: jax.Array | None = None,
    ) -> Any:
        """Normalise `x`, or its sum with a residual.

        Args:
          x: `shape`, as of Equinox.
          state: as of Equinox; given back beside the result.
          key: ignored, as by Equinox.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_layer_norm`.
          x_bias: as of `jln.add_layer_norm`; goes with a residual.
          gate: as of `jln.add_layer_norm`; goes with a residual.
          added_to: `x`'s shape. The norm's result is added to it, as of `jln.layer_norm_add`.

        Returns:
          `y` of `x`'s shape; with a residual `(y, total)`. With a state a tuple of that and the state.
        """
        return _with_state(_computed(self, x, residual=residual, x_bias=x_bias, gate=gate, added_to=added_to), state)


class RMSNorm(EquinoxRMSNorm):
    """`equinox.nn.RMSNorm` on `jln.rms_norm`: the same arguments, fields, results and errors."""

    def __call__(
        self,
        x: jax.Array,
        state: Any = _ABSENT,
        *,
        key: jax.Array | None = None,
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
          x: `shape`, as of Equinox.
          state: as of Equinox; given back beside the result.
          key: ignored, as by Equinox.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_rms_norm`.
          x_bias: as of `jln.add_rms_norm`; goes with a residual.
          gate: as of `jln.add_rms_norm`; goes with a residual.
          added_to: `x`'s shape. The norm's result is added to it, as of `jln.rms_norm_add`.
          x_norm: another RMSNorm. The norm is of `total = residual + x_norm(x)`, as of `jln.rms_norm_add_rms_norm`.
          z: `x`'s shape. The result is gated by `silu(z)`, as of `jln.rms_norm_gated`.
          norm_before_gate: as of `jln.rms_norm_gated`.

        Returns:
          `y` of `x`'s shape; with a residual `(y, total)`. With a state a tuple of that and the state.
        """
        given = {"residual": residual, "x_bias": x_bias, "gate": gate, "added_to": added_to, "x_norm": x_norm}
        return _with_state(_computed(self, x, z=z, norm_before_gate=norm_before_gate, **given), state)


_NORMS = (LayerNorm, RMSNorm, EquinoxLayerNorm, EquinoxRMSNorm)


class _NormLinear(eqx.Module):
    """A norm of the class `_norm_class` and the Linear behind it, or a tuple of Linears with names."""

    norm: EquinoxLayerNorm | EquinoxRMSNorm
    linear: Any  # an equinox.nn.Linear, or a tuple of them
    names: tuple[str, ...] = eqx.field(static=True, default=())
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
        key: jax.Array,
    ):
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

    def __call__(
        self,
        x: jax.Array,
        *,
        residual: jax.Array | None = None,
        x_bias: jax.Array | None = None,
        gate: _modules.Gate = None,
        key: jax.Array | None = None,
    ) -> Any:
        """Apply the norm and the Linear to `x`, or to its sum with a residual.

        Args:
          x: `[H]`.
          residual: `x`'s shape. The norm is of `total = residual + gate * (x + x_bias)`, as of `jln.add_layer_norm`.
          x_bias: as of `jln.add_layer_norm`; goes with a residual.
          gate: as of `jln.add_layer_norm`; goes with a residual.
          key: ignored, as by Equinox.

        Returns:
          `y` `[N]`, of several Linears a tuple in their order; with a residual `(y, total)`.
        """
        given = _modules.summed(x, residual, x_bias, gate)
        linears = self.linear if isinstance(self.linear, tuple) else (self.linear,)
        norm = "the norm has a call of its own"
        if type(self.norm).__call__ in (cls.__call__ for cls in _NORMS):
            norm = _prepared(self.norm, given.total)
        if isinstance(norm, str):
            found = norm
        else:
            described = zip(self.names or ("linear",), (_described(a, norm) for a in linears), strict=True)
            found = _modules.fused(norm, dict(described), given)
        products = _modules.compute_layers(
            _name(self, f"{_kind(self.norm)}Linear"),
            found,
            lambda: self.norm(given.total),
            lambda z: (tuple(linear(z) for linear in linears), given.total),
        )
        return given.result(products, several=isinstance(self.linear, tuple))


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
      eps: as of `equinox.nn.LayerNorm`.
      use_weight: of the norm.
      use_offset: the norm's `use_bias`.
      use_bias: of the Linear.
      dtype: of all parameters.
      key: as of `equinox.nn.Linear`.
    """

    _norm_class: ClassVar[Any] = LayerNorm


class RMSNormLinear(_NormLinear):
    """An `RMSNorm` and the Linear behind it, `linear(norm(x))`, as one operator that keeps only `x` for the backward.

    The arguments are those of `LayerNormLinear`: in Equinox an RMSNorm has an offset too.
    """

    _norm_class: ClassVar[Any] = RMSNorm


@_explain.places.register(eqx.Module)
def _(model: eqx.Module) -> Mapping[int, str]:
    found: dict[int, str] = {}

    def enter(path: str, node: Any) -> None:
        def inner(relative: Any, a: Any) -> None:
            if isinstance(a, eqx.Module):
                enter(path + jax.tree_util.keystr(relative), a)

        found[id(node)] = path
        jax.tree_util.tree_map_with_path(inner, node, is_leaf=lambda a: a is not node and isinstance(a, eqx.Module))

    enter("", model)
    return found


def _name(layer: Any, kind: str) -> str:
    """The name under which `explain` lists a layer: its class, and its place where that is known."""
    return f"jln.equinox.{kind} {_explain.place(layer)}".rstrip()


def _kind(layer: EquinoxLayerNorm | EquinoxRMSNorm) -> str:
    return "LayerNorm" if isinstance(layer, EquinoxLayerNorm) else "RMSNorm"


def _plain(layer: EquinoxLayerNorm | EquinoxRMSNorm, x: Any) -> jax.Array:
    cls: Any = EquinoxLayerNorm if isinstance(layer, EquinoxLayerNorm) else EquinoxRMSNorm
    return cls.__call__(layer, x)


def _prepared(layer: EquinoxLayerNorm | EquinoxRMSNorm, x: Any) -> _modules.Prepared | str:
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
        subtract_mean=isinstance(layer, EquinoxLayerNorm),
        y_dtype=x.dtype,
    )


def _described(linear: eqx.nn.Linear, norm: _modules.Prepared) -> _modules.Linear | str:
    """A Linear in the operators' terms, or the reason why it cannot be."""
    if type(linear).__call__ is not EquinoxLinear.__call__:
        return "the Linear has a call of its own"
    if "scalar" in (linear.in_features, linear.out_features):
        return "the Linear has a scalar side"
    kernel, bias = linear.weight.T, linear.bias
    dtype = jnp.result_type(norm.dtype, kernel, *([] if bias is None else [bias]))
    return _modules.Linear(kernel, bias, dtype, None)


def _with_state(y: Any, state: Any) -> Any:
    return y if state is _ABSENT else (y, state)
