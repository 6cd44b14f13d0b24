"""What reads a value of a program: one walk, for all who ask what stands behind a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jln._fuse.graph import Graph, Node, Value


class Reader(NamedTuple):
    """An equation that reads a value, or what was made of it. node: None where that is a result of the program."""

    value: Value
    node: Node | None


class Readers(NamedTuple):
    """The readers of a value, and the nodes between."""

    ends: list[Reader]
    between: list[Node]


CAST = "convert_element_type"


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
    return hands_on(node) or node.operation == CAST


def shapes(node: Node) -> bool:
    """True of a node whose result has the elements of what it reads, perhaps in another dtype, shape or order."""
    is_same_size = node.operation == "broadcast_in_dim" and node.output.size == node.inputs[0].size
    return casts(node) or is_same_size or node.operation in ("reshape", "transpose", "squeeze", "expand_dims")


def readers(graph: Graph, value: Value, passes: Callable[[Node], bool]) -> Readers:
    """The readers of a value behind the nodes that `passes`."""
    found = Readers([], [])
    values = [value]
    for v in values:
        if graph.is_result(v):
            found.ends.append(Reader(v, None))
        for node in v.readers:
            if passes(node):
                found.between.append(node)
                values.append(node.output)
            else:
                found.ends.append(Reader(v, node))
    return found
