"""Equinox: a new tree, with other classes around the same leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jln import equinox as ours
from jln.convert._common import Change, Conversion, Pairs, attribute, check_fuse, checked_pair, named, pairs_of
from jln.equinox import eqx

SWAPPED = {ours.EquinoxLayerNorm: ours.LayerNorm, ours.EquinoxRMSNorm: ours.RMSNorm}


def convert(model: Any, fuse: bool | Mapping[type, Pairs]) -> Conversion:
    check_fuse(fuse, _nodes(model))
    changes: list[Change] = []
    swapped: dict[str, type] = {}
    fused: list[tuple[str, tuple[str, str]]] = []

    def swap(path: str, layer: Any) -> Any:
        before = type(layer)
        if before in SWAPPED:
            swapped[path] = before
            changes.append(Change(path, named(before), named(SWAPPED[before]), "swapped"))
            return _as(SWAPPED[before], layer)
        if not isinstance(layer, tuple(SWAPPED.values())):
            changes.append(Change(path, named(before), "", "a subclass may compute something else"))
        return layer

    def declared(node: Any) -> Pairs:
        return pairs_of(fuse, node, (ours.DeferredNorm,), (ours.FusedLayerNormLinear, ours.FusedRMSNormLinear))

    def fuse_in(path: str, node: Any) -> Any:
        for pair in declared(node):
            norm, linear = checked_pair(node, pair, tuple(SWAPPED.values()), (eqx.nn.Linear,))
            node = _with(node, pair, (ours.DeferredNorm(), _fused(norm, linear)))
            fused.append((path, pair))
            norm_name, linear_name = pair
            at, into = f"{path}.{norm_name}", f"{path}.{linear_name}"
            changes.append(Change(at, named(type(norm)), named(ours.DeferredNorm), f"moved into {into}"))
            changes.append(Change(into, named(type(linear)), named(_fused_class(norm)), f"fused with {norm_name}"))
        return node

    converted = _everywhere(model, lambda a: isinstance(a, tuple(SWAPPED)), swap)
    converted = _everywhere(converted, lambda a: bool(declared(a)), fuse_in)

    def undo(tree: Any = converted) -> Any:
        """`tree`, the converted model with whatever leaves it has by now, in its former classes."""

        def unfuse(path: str, node: Any) -> Any:
            for where, pair in fused:
                if where == path:
                    _, linear_name = pair
                    both = attribute(node, linear_name)
                    node = _with(node, pair, (both.norm, both.linear))
            return node

        places = {path for path, _ in fused}
        tree = _everywhere(tree, lambda a: isinstance(a, eqx.Module), lambda p, a: unfuse(p, a) if p in places else a)
        return _everywhere(
            tree,
            lambda a: type(a) in SWAPPED.values(),
            lambda path, layer: _as(swapped[path], layer) if path in swapped else layer,
        )

    return Conversion(converted, changes, undo)


def _nodes(tree: Any) -> list[Any]:
    """Every node of a tree, itself included."""
    nodes: list[Any] = []
    jax.tree.map(lambda a: None, tree, is_leaf=lambda a: bool(nodes.append(a)))  # None: all are entered
    return nodes


def _everywhere(node: Any, wanted: Callable[[Any], bool], change: Callable[[str, Any], Any], path: str = "") -> Any:
    """`node` with `change(path, a)` in place of every node `a` that is wanted, the inner ones first."""

    def inner(relative: Any, a: Any) -> Any:
        return _everywhere(a, wanted, change, path + jax.tree_util.keystr(relative)) if wanted(a) else a

    changed = jax.tree_util.tree_map_with_path(inner, node, is_leaf=lambda a: a is not node and wanted(a))
    return change(path, changed) if wanted(changed) else changed


def _as(cls: type, layer: Any) -> Any:
    """The layer's fields in another class, whose constructor would make new ones."""
    return _made(cls, {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)})


def _fused(norm: Any, linear: Any) -> Any:
    return _made(_fused_class(norm), {"norm": norm, "linear": linear})


def _fused_class(norm: Any) -> type:
    return ours.FusedLayerNormLinear if isinstance(norm, ours.LayerNorm) else ours.FusedRMSNormLinear


def _made(cls: type, fields: dict[str, Any]) -> Any:
    made = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _with(node: Any, names: tuple[str, str], values: tuple[Any, Any]) -> Any:
    return eqx.tree_at(lambda n: tuple(attribute(n, name) for name in names), node, values)
