"""Equinox's LayerNorm and RMSNorm on jln's operators, and either of them fused with the Linears behind it.

    from jln.equinox import LayerNorm, RMSNorm    # instead of: from equinox.nn import LayerNorm, RMSNorm

Constructors, fields, initial values and serialised leaves are Equinox's own: the classes are Equinox's with another
call. They work on one example and are vmapped, as Equinox's are. What the operators cannot do (integer or empty input,
a shape of no axes, ...) Equinox's own code does; `jln.explain(layer, x)` tells which of them a call takes, and why.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jln import _explain, _modules, _routes

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError(_modules.missing("jln.equinox", "Equinox", "equinox")) from error

__all__ = ["LayerNorm", "LayerNormLinear", "Linear", "RMSNorm", "RMSNormLinear"]

# As they are now, should somebody put ours in their place.
EquinoxLayerNorm = eqx.nn.LayerNorm
EquinoxRMSNorm = eqx.nn.RMSNorm
EquinoxLinear = eqx.nn.Linear

_ABSENT: Any = object()


def _call(
    self: Any,
    x: jax.Array,
    state: Any = _ABSENT,
    *,
    key: jax.Array | None = None,
    residual: jax.Array | None = None,
    x_bias: jax.Array | None = None,
    gate: _modules.Gate = None,
    added_to: jax.Array | None = None,
) -> Any:
    """x: of `shape`. With `state` the result is `(y, state)`; `key` is ignored, as by Equinox. With a residual y is
    `(y, total)`, as of `jln.add_layer_norm` or `jln.add_rms_norm`, with `x_bias` and `gate` as there. With added_to, of
    x's shape, y is `added_to + norm(x)`, as of `jln.layer_norm_add` or `jln.rms_norm_add`.
    """
    return _with_state(_computed(self, x, residual=residual, x_bias=x_bias, gate=gate, added_to=added_to), state)


def _computed(self: Any, x: Any, **of_x: Any) -> Any:
    """of_x: the other arguments of `_modules.taken`."""
    given, name = _modules.taken(x, range(-len(self.shape), 0), **of_x), _name(self, _kind(self))
    if given.x_norm is not None:
        return _modules.pair(name, given, self, RMSNorm, _prepared, lambda total: _computed(self, total))
    return _modules.computed(name, _prepared(self, given.total), given, lambda total: _plain(self, total))


class LayerNorm(EquinoxLayerNorm):
    """`equinox.nn.LayerNorm` on `jln.layer_norm`: the same arguments, fields, results and errors.

    adaLN's scale and offset of each example are not a module's to hold: for them call `jln.add_layer_norm(x,
    residual, scale, offset, gate=gate, zero_centered_scale=True)` in its place: without a vmap with arrays `[B, 1, H]`.
    """

    __call__ = _call


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
        """As `LayerNorm`'s. With a residual and `x_norm`, another RMSNorm, y is `(y, total)` of `total = residual +
        x_norm(x)`, and without offsets they are one operator, `jln.rms_norm_add_rms_norm`. With z, of x's shape, y is
        `rms_norm(x) * silu(z)`, or without `norm_before_gate` `rms_norm(x * silu(z))`, as of `jln.rms_norm_gated`.
        """
        given = {"residual": residual, "x_bias": x_bias, "gate": gate, "added_to": added_to, "x_norm": x_norm}
        return _with_state(_computed(self, x, z=z, norm_before_gate=norm_before_gate, **given), state)


class _NormLinear(eqx.Module):
    """A norm of `_norm_class` and the Linear behind it, or a tuple of Linears, whose names `names` has."""

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
        """x `[H]` -> `[N]`, of several Linears a tuple in their order; `key` is ignored, as by Equinox. With a
        residual, of x's shape, both are of `residual + gate * (x + x_bias)`, and the result is followed by this sum;
        `x_bias` and `gate` are as of `jln.add_layer_norm`.
        """
        given = _modules.summed(x, residual, x_bias, gate)
        linears = self.linear if isinstance(self.linear, tuple) else (self.linear,)
        norm = _prepared(self.norm, given.total)
        if isinstance(norm, str):
            found = norm
        else:
            described = zip(self.names or ("linear",), (_described(a, norm) for a in linears), strict=True)
            found = _modules.fused(norm, dict(described), given)
        products = _modules.layers_computed(
            _name(self, f"{_kind(self.norm)}Linear"),
            found,
            lambda: self.norm(given.total),
            lambda z: (tuple(linear(z) for linear in linears), given.total),
        )
        return given.result(products, several=isinstance(self.linear, tuple))


class LayerNormLinear(_NormLinear):
    """A `LayerNorm` and the `equinox.nn.Linear` behind it, `linear(norm(x))`, as one operator that keeps only `x` for
    the backward. Its fields are the two layers, the second with the initial values that `key` gives it in Equinox.
    Several Linears may read one norm:

        layer = LayerNormLinear(1024, {"q": 1024, "k": 256, "v": 256}, key=key)  # layer.q.weight, layer.k.weight ...
        q, k, v = layer(x)
        (q, k, v), total = layer(x, residual=residual)  # of total = x + residual

    They are a tuple in their order, with which leaves are serialised as those of fields `norm`, `q`, `k` and `v` are.

    Args:
      in_features: H.
      out_features: N, or "scalar". Or a mapping with the name and either of these for each of several Linears, which
        take the keys `jax.random.split(key, len(out_features))`; or in place of them a mapping of the arguments in
        which it differs from the others, as `{"out_features": 256, "use_bias": False}`.
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


class Linear(EquinoxLinear):
    """`equinox.nn.Linear`, which keeps for the backward pass, where it reads the result of a norm of this module, not
    that but what the norm read; so it does where each of the two is vmapped over the first axis of a batch. Few
    features (up to 256 in 16 bits, 128 in float32) one kernel makes with the norm.
    """

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """x `[H]` -> `[N]`; `key` is ignored, as by Equinox."""
        described = functools.partial(_described, self)
        plain = functools.partial(super().__call__, x, key=key)
        return _modules.linear_computed(_name(self, "Linear"), x, described, plain)


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
    return f"jln.equinox.{kind} {_routes.place(layer)}".rstrip()


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
    return _modules.prepared(
        x,
        *parameters,
        axes=range(x.ndim),
        epsilon=layer.eps,
        subtract_mean=isinstance(layer, EquinoxLayerNorm),
        y_dtype=x.dtype,
    )


def _described(linear: eqx.nn.Linear, norm: _modules.Prepared) -> _modules.Linear | str:
    """A Linear in the operators' terms, or why it cannot be."""
    if "scalar" in (linear.in_features, linear.out_features):
        return "the Linear has a scalar side"
    kernel, bias = linear.weight.T, linear.bias
    dtype = jnp.result_type(norm.dtype, kernel, *([] if bias is None else [bias]))
    return _modules.Linear(kernel, bias, dtype, None)


def _with_state(y: Any, state: Any) -> Any:
    return y if state is _ABSENT else (y, state)
