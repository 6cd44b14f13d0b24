"""The description of Flax Linen for interceptors."""

from __future__ import annotations

from typing import Any

from jln import linen as ours
from jln.convert._interceptors import Framework


def _defined_in(context: Any, cls: Any) -> bool:
    """True where the intercepted call is that of `cls`.

    Flax hands over the function that it wraps, and a class has the wrapper.
    """
    return context.orig_method.func is getattr(cls.__call__, "__wrapped__", None)


LINEN = Framework(
    name="linen",
    root="flax",
    module=ours.nn.Module,
    intercept=ours.nn.intercept_methods,
    norms=(ours.FlaxLayerNorm, ours.FlaxRMSNorm),
    linears=(ours.FlaxDense, ours.FlaxDenseGeneral, ours.FlaxEinsum),
    own=(ours.LayerNorm, ours.RMSNorm, ours.Dense, ours.DenseGeneral, ours.Einsum),
    parameter='m.get_variable("params", "scale")',
    call=ours.call,
    linear_call=ours.linear_call,
    defined_in=_defined_in,
    path=lambda layer: "/".join(layer.path),
)
