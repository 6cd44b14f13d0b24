"""Flax NNX: a layer object gets another class, and keeps all the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jln import _routes
from jln import nnx as ours
from jln.convert._common import Change, Conversion, Pairs, check_fuse, checked_pair, named, pairs_of
from jln.nnx import nnx

SWAPPED = {ours.FlaxLayerNorm: ours.LayerNorm, ours.FlaxRMSNorm: ours.RMSNorm}
NORMS = {
    ours.FlaxLayerNorm: ours.DeferringLayerNorm,
    ours.LayerNorm: ours.DeferringLayerNorm,
    ours.FlaxRMSNorm: ours.DeferringRMSNorm,
    ours.RMSNorm: ours.DeferringRMSNorm,
}
LINEARS = {nnx.Linear: ours.FusedLinear, nnx.LinearGeneral: ours.FusedLinearGeneral}
FINAL = (*SWAPPED.values(), *NORMS.values())


def convert(model: Any, copy: bool, fuse: bool | Mapping[type, Pairs]) -> Conversion:
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be a flax.nnx.Module; got {type(model).__name__}")
    check_fuse(fuse, (module for _, module in nnx.iter_modules(model)))
    if copy:
        model = nnx.clone(model)
    modules = [(".".join(map(str, path)), module) for path, module in nnx.iter_modules(model)]
    classes: dict[int, tuple[type, str]] = {}  # by the identity of a layer: its class to be, and why
    for _, module in modules:
        for pair in pairs_of(fuse, module, NORMS.values(), LINEARS.values()):
            (norm_name, linear_name), (norm, linear) = pair, checked_pair(module, pair, tuple(NORMS), tuple(LINEARS))
            if id(norm) in classes:
                raise ValueError(f"{named(type(module))}: {norm_name!r} is in two pairs, and can feed only one Linear")
            classes[id(norm)] = NORMS[type(norm)], f"fused with {linear_name}"
            classes[id(linear)] = LINEARS[type(linear)], f"fused with {norm_name}"
    for _, module in modules:
        if type(module) in SWAPPED:
            classes.setdefault(id(module), (SWAPPED[type(module)], "swapped"))

    changes, former = [], []
    for path, module in modules:
        before = type(module)
        if id(module) in classes:
            after, why = classes[id(module)]
            object.__setattr__(module, "__class__", after)
            changes.append(Change(path, named(before), named(after), why))
            former.append((module, before, after))
        elif isinstance(module, tuple(SWAPPED)) and not isinstance(module, FINAL):
            changes.append(Change(path, named(before), "", "a subclass may compute something else"))
    _routes.converted()

    def undo() -> Any:
        """-> the model"""
        for module, before, after in former:
            if type(module) is after:
                object.__setattr__(module, "__class__", before)
        _routes.converted()
        return model

    return Conversion(model, changes, undo)
