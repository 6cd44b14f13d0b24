"""Conversion of Equinox models: a new tree, with other classes around the same leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jln import _modules
from jln import equinox as ours
from jln.convert._common import Change, Classes, Conversion, Fuse, fused_linears, named
from jln.equinox import eqx

CLASSES = Classes(
    "equinox",
    {ours.EquinoxLayerNorm: ours.LayerNorm, ours.EquinoxRMSNorm: ours.RMSNorm},
    {ours.EquinoxLinear: ours.Linear},
    ours.placed,
)


def convert(model: Any, fuse: Fuse, norms: Mapping[type, _modules.Recipe] | None) -> Conversion:
    recipes = _modules.checked_recipes(norms, eqx.Module, tuple(CLASSES.norms))
    linears = fused_linears(fuse, _nodes(model), (*CLASSES.norms, *recipes), tuple(CLASSES.linears))
    fused = {id(linear) for linear in linears}
    changes: list[Change] = []
    former: dict[str, type] = {}

    def change(path: str, layer: Any, changed: Any) -> Any:
        swap = CLASSES.of(layer, recipes, id(layer) in fused)
        if swap.why:
            changes.append(Change(path, named(type(layer)), swap.name, swap.why))
        if swap.cls is None:
            return changed
        former[path] = type(layer)
        return _as(swap.cls, changed)

    converted = _everywhere(model, change)

    def undo(tree: Any = converted) -> Any:
        """Give `tree`, the converted model with whatever leaves it has by now, its former classes back."""

        def back(path: str, _: Any, changed: Any) -> Any:
            return _as(former[path], changed) if path in former else changed

        return _everywhere(tree, back)

    return Conversion(converted, changes, undo)


def _nodes(tree: Any) -> list[Any]:
    """Every node of a tree, itself included."""
    nodes: list[Any] = []
    jax.tree.map(lambda a: None, tree, is_leaf=lambda a: bool(nodes.append(a)))  # None: all are entered
    return nodes


def _everywhere(node: Any, change: Callable[[str, Any, Any], Any], path: str = "") -> Any:
    """Rebuild `node` with `change(path, a, b)` in place of every module `a`; `b` is `a` with changed inner modules."""

    def inner(relative: Any, a: Any) -> Any:
        return _everywhere(a, change, path + jax.tree_util.keystr(relative)) if isinstance(a, eqx.Module) else a

    changed = jax.tree_util.tree_map_with_path(
        inner, node, is_leaf=lambda a: a is not node and isinstance(a, eqx.Module)
    )
    return change(path, node, changed) if isinstance(node, eqx.Module) else changed


def _as(cls: type, layer: Any) -> Any:
    """The layer's fields in another class, without its constructor, which would make new ones."""
    return _made(cls, {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)})


def _made(cls: type, fields: dict[str, Any]) -> Any:
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
