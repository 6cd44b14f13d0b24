"""Equinox's LayerNorm and RMSNorm on jln's operators.

    from jln.equinox import LayerNorm, RMSNorm    # instead of: from equinox.nn import LayerNorm, RMSNorm

Constructors, fields, initial values and serialised leaves are Equinox's own: the classes are Equinox's with another
call. They work on one example and are vmapped, as Equinox's are. A call that the operators cannot compute (integer or
empty input, a shape of no axes, ...) runs Equinox's own code; `jln.explain(layer, x)` tells which of the two a call
takes, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jln import _explain, _modules

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError(_modules.missing("jln.equinox", "Equinox", "equinox")) from error

__all__ = ["LayerNorm", "RMSNorm"]

# Equinox's own classes, even where somebody puts ours in their place later.
EquinoxLayerNorm = eqx.nn.LayerNorm
EquinoxRMSNorm = eqx.nn.RMSNorm

_ABSENT: Any = object()


class LayerNorm(EquinoxLayerNorm):
    """`equinox.nn.LayerNorm` on `jln.layer_norm`: the same arguments, fields, results and errors."""

    def __call__(
        self,
        x: jax.Array,
        state: Any = _ABSENT,
        *,
        key: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `shape`, as of Equinox.
          state: as of Equinox; the result is then a tuple of the above and the state.
          key: ignored, as by Equinox.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        return _with_state(_EQUINOX.norm(self, x, residual), state)


class RMSNorm(EquinoxRMSNorm):
    """`equinox.nn.RMSNorm` on `jln.rms_norm`: the same arguments, fields, results and errors."""

    def __call__(
        self,
        x: jax.Array,
        state: Any = _ABSENT,
        *,
        key: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> Any:
        """Return `y` of `x`'s shape, the norm of `x`; with a residual `(y, total)`, the norm of the sum and the sum.

        Args:
          x: `shape`, as of Equinox.
          state: as of Equinox; the result is then a tuple of the above and the state.
          key: ignored, as by Equinox.
          residual: `x`'s shape. The norm is of `total = x + residual`, which is made and read once.
        """
        return _with_state(_EQUINOX.norm(self, x, residual), state)


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


_EQUINOX = _Equinox()


def _with_state(y: Any, state: Any) -> Any:
    return y if state is _ABSENT else (y, state)
