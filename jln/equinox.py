"""Equinox's LayerNorm and RMSNorm on jln's operators.

    from jln.equinox import LayerNorm, RMSNorm    # instead of: from equinox.nn import LayerNorm, RMSNorm

Constructors, fields, initial values and serialised leaves are Equinox's own: the classes are Equinox's with another
call, of one example. A call that the operators cannot compute, such as one of a `shape` of several axes, runs Equinox's
own code. `jln.explain(layer, x)` tells which of the two a call takes, and why.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax

from jln import _modules

__all__ = ["LayerNorm", "RMSNorm"]

_ABSENT: Any = object()


class LayerNorm(eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm` on `jln.layer_norm`: the same arguments, fields, results and errors."""

    def __call__(
        self, x: jax.Array, state: Any = _ABSENT, *, key: jax.Array | None = None, residual: jax.Array | None = None
    ) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `shape`, as of Equinox.
          state: as of Equinox. The result is then a tuple of the above and the state.
          key: ignored, as by Equinox.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        own = super().__call__
        y = _modules.Layer(self, own, lambda x: _read(self, x)).call(x, residual)
        return y if state is _ABSENT else (y, state)


class RMSNorm(eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm` on `jln.rms_norm`: the same arguments, fields, results and errors."""

    def __call__(
        self, x: jax.Array, state: Any = _ABSENT, *, key: jax.Array | None = None, residual: jax.Array | None = None
    ) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x, state, key, residual: those of a call of `LayerNorm`.
        """
        own = super().__call__
        y = _modules.Layer(self, own, lambda x: _read(self, x)).call(x, residual)
        return y if state is _ABSENT else (y, state)


def _read(layer: LayerNorm | RMSNorm, x: jax.Array) -> _modules.Norm | str:
    if len(layer.shape) != 1 or x.shape != layer.shape:
        return f"x of shape {x.shape} in a norm of shape {layer.shape}"
    if (layer.weight is None) == layer.use_weight or (layer.bias is None) == layer.use_bias:
        return "a parameter is missing"
    return _modules.Norm(layer.weight, layer.bias, layer.eps, isinstance(layer, LayerNorm), x.dtype)
