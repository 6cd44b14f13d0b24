"""Readers of a value of a program: one walk, for all who ask what stands behind a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jln._fuse.graph import Graph, Node, Value


class Reader(NamedTuple):
    """An equation that reads a value, or what was made of it.

    value: what it reads. node: None where that is a result of the program. between: the nodes that make it of that.
    """

    value: Value
    node: Node | None
    between: tuple[Node, ...]


def spreads(node: Node) -> bool:
    """True of a constraint of shardings over several devices."""
    return node.operation == "sharding_constraint" and node.params["sharding"].num_devices > 1


def copies(node: Node) -> bool:
    """True of a node whose result is what it reads: a copy or a constraint of shardings."""
    return node.operation in ("copy", "copy_p", "sharding_constraint")


def hands_on(node: Node) -> bool:
    """True of a node whose result is what it reads: a copy, or a name for checkpoints.

    What reads a name reads what a checkpoint keeps: in front of an operator a name has to stay.
    """
    return copies(node) or node.operation == "name"


def casts(node: Node) -> bool:
    """True of a node whose result is what it reads, perhaps in another dtype."""
    return hands_on(node) or node.operation == "convert_element_type"


def shapes(node: Node) -> bool:
    """True of a node whose result has the elements of what it reads, perhaps in another dtype, shape or order."""
    is_same_size = node.operation == "broadcast_in_dim" and node.output.size == node.inputs[0].size
    return casts(node) or is_same_size or node.operation in ("reshape", "transpose", "squeeze", "expand_dims")


def readers(graph: Graph, value: Value, passes: Callable[[Node], bool]) -> list[Reader]:
    """The readers of a value behind the nodes that `passes`."""
    found: list[Reader] = []
    paths: dict[Value, tuple[Node, ...]] = {value: ()}
    values = [value]
    for v in values:
        if graph.is_result(v):
            found.append(Reader(v, None, paths[v]))
        for node in v.readers:
            if not passes(node):
                found.append(Reader(v, node, paths[v]))
            elif node.output not in paths:
                paths[node.output] = (*paths[v], node)
                values.append(node.output)
    return found
