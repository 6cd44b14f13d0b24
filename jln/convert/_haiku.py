"""The description of Haiku for interceptors."""

from __future__ import annotations

from jln import haiku as ours
from jln.convert._interceptors import Framework

HAIKU = Framework(
    name="haiku",
    root="haiku",
    module=ours.hk.Module,
    intercept=ours.hk.intercept_methods,
    norms=(ours.HaikuLayerNorm, ours.HaikuRMSNorm),
    linears=(ours.HaikuLinear,),
    own=(ours.LayerNorm, ours.RMSNorm, ours.Linear),
    parameter='m.params_dict()[f"{m.module_name}/scale"]',
    call=ours.call,
    linear_call=ours.linear_call,
    defined_in=lambda context, cls: context.orig_class is cls,
    path=lambda layer: layer.module_name,
)
