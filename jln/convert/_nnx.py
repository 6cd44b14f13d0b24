"""Conversion of Flax NNX models: a layer object gets another class, and keeps all the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jln import _explain, _modules
from jln import nnx as ours
from jln.convert._common import Change, Classes, Conversion, Fuse, fused_linears, named
from jln.nnx import nnx

CLASSES = Classes(
    "flax",
    {ours.FlaxLayerNorm: ours.LayerNorm, ours.FlaxRMSNorm: ours.RMSNorm},
    {ours.FlaxLinear: ours.Linear, ours.FlaxLinearGeneral: ours.LinearGeneral, ours.FlaxEinsum: ours.Einsum},
    ours.placed,
)


def convert(model: Any, copy: bool, fuse: Fuse, norms: Mapping[type, _modules.Recipe] | None) -> Conversion:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be a flax.nnx.Module; got {type(model).__name__}")
    recipes = _modules.checked_recipes(norms, nnx.Module, tuple(CLASSES.norms))
    if copy:
        model = nnx.clone(model)
    modules = [(".".join(map(str, path)), module) for path, module in nnx.iter_modules(model)]
    norms_known, linears_known = (*CLASSES.norms, *recipes), tuple(CLASSES.linears)
    wanted = {id(a) for a in fused_linears(fuse, [module for _, module in modules], norms_known, linears_known)}

    changes, former = [], []
    swaps = [CLASSES.of(module, recipes, id(module) in wanted) for _, module in modules]  # any may raise
    for (path, module), swap in zip(modules, swaps, strict=True):
        before = type(module)
        if swap.cls is not None:
            object.__setattr__(module, "__class__", swap.cls)
            former.append((module, before, swap.cls))
        if swap.why:
            changes.append(Change(path, named(before), swap.name, swap.why))
    _explain.converted()

    def undo() -> Any:
        """Give the layers their former classes back, and return the model."""
        for module, before, after in former:
            if type(module) is after:
                object.__setattr__(module, "__class__", before)
        _explain.converted()
        return model

    return Conversion(model, changes, undo)
