"""Regions of a program that may have a norm: what it makes of an array through a sum over features.

From the sum a region grows along what reads it, and back from there to the array, through what `certificate` can
compute.
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from jln._checks import promote
from jln._fuse.certificate import FLOATS, Constants, only_ones_differ, why_not_analytic
from jln._fuse.graph import Node, Value

# What a region may have: so much of a network is looked at for one norm.
MOST_RESULTS, MOST_PARAMETERS, MOST_STEPS_BACK = 16, 3, 48


class Parameter(NamedTuple):
    """An array that a value repeats, times a factor.

    shape: of the value's rank, with 1 on the axes along which it is repeated.
    """

    source: Value
    shape: tuple[int, ...]
    factor: float = 1.0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Region:
    """The part of a program that it makes of x through a sum over its features, as far as `certificate` can compute it.

    parameters: the arrays beside x that each value is made of.
    candidates: values of x's shape that are made through the sum.
    blocks: the nodes at which the region ends, with the reason.
    leaves: what the region reads that is neither x nor a number, and the parameters that these values repeat.
    nodes: those that make the region's values, in the program's order.
    """

    def __init__(self, x: Value, statistic: Node, features: tuple[int, ...], constants: Constants):
        self.x, self.statistic, self.features, self.constants = x, statistic, features, constants
        self.parameters: dict[Value, frozenset[Parameter]] = {x: frozenset()}
        self.candidates: list[Value] = []
        self.blocks: list[tuple[Node, str]] = []
        self.leaves: dict[Value, Parameter] = {}
        self._nodes: dict[Node, None] = {}
        self._is_made_of_x: dict[Value, bool] = {x: True}
        self._steps_back = 0
        self._grow()
        self.nodes = sorted(self._nodes, key=lambda n: n.position)

    def _grow(self) -> None:
        if not self._made_of_x(self.statistic.output):
            return
        queue: list[tuple[int, Node]] = []  # in the program's order
        seen: set[Node] = set()

        def follow(value: Value) -> None:
            for reader in {*value.readers} - seen:
                seen.add(reader)
                heapq.heappush(queue, (reader.position, reader))

        follow(self.statistic.output)
        while queue and len(self.candidates) < MOST_RESULTS:
            node = heapq.heappop(queue)[1]
            why = why_not_analytic(node, self.x.size, self.constants)
            if why is not None:
                self.blocks.append((node, why))
                continue
            for v in node.inputs:
                self._made_of_x(v)
            self._add(node)
            parameters = self.parameters[node.output]
            if len(parameters) <= MOST_PARAMETERS and sum(p.size == self.x.size for p in parameters) <= 1:
                if node.output.shape == self.x.shape and node.output.dtype.name in FLOATS:
                    self.candidates.append(node.output)
                follow(node.output)

    def _made_of_x(self, value: Value) -> bool:
        """True where the region can compute the value from x; its nodes are then in the region."""
        if value not in self._is_made_of_x:
            self._is_made_of_x[value] = False
            node = value.maker
            if (
                node is not None
                and node.position > self.x.position
                and self._steps_back < MOST_STEPS_BACK
                and (node.operation != "reduce_sum" or node.inputs[0].shape == self.x.shape)
                and why_not_analytic(node, self.x.size, self.constants) is None
            ):
                self._steps_back += 1
                # All inputs are looked at: each adds its own nodes.
                if any([self._made_of_x(v) for v in node.inputs]):
                    self._add(node)
        return self._is_made_of_x[value]

    def _add(self, node: Node) -> None:
        if node in self._nodes:
            return
        self._nodes[node] = None
        self._is_made_of_x[node.output] = True
        parameters: set[Parameter] = set()
        for v in node.inputs:
            if v in self.parameters:
                parameters |= self.parameters[v]
            elif self.constants.number(v) is None:
                self.leaves[v] = self.leaves.get(v) or peel(v, self.constants)
                parameters.add(self.leaves[v])
        self.parameters[node.output] = frozenset(parameters)

    def makers(self, value: Value) -> frozenset[Node]:
        """The region's nodes that the value is made by."""
        makers: set[Node] = set()
        stack = [value]
        while stack:
            node = stack.pop().maker
            if node in self._nodes and node not in makers:
                makers.add(node)
                stack += node.inputs
        return frozenset(makers)

    def why_none(self) -> str | None:
        """The reason why there is no norm, in a few words; None where nothing here looks like one."""
        if self.x.operation == "stop_gradient" or any(n.operation == "stop_gradient" for n, _ in self.blocks):
            return "statistics are read through stop_gradient"
        rows = self.x.size // math.prod(self.x.shape[a] for a in self.features)
        if not self._scales_rows():
            return None
        reasons = [self.x.maker.words] if self.x.maker is not None and self.x.operation == "select_n" else []
        if not self.candidates:
            reasons += [why for n, why in self.blocks if n.output.size == rows and why != "a comparison"]
        if reasons:
            return f"{reasons[0]} in the statistics"
        if any(p.size == 1 for of in self.parameters.values() for p in of):
            return "a number in it is an argument, as epsilon may be"
        return "nothing here equals layer_norm or rms_norm on random rows"

    def _scales_rows(self) -> bool:
        """True where a root of the statistic multiplies or divides an array of x's size, behind smaller ones."""
        queue = [(self.statistic.output, False)]
        for value, has_root in queue:
            for node in value.readers:
                is_rooted = has_root or node.operation in ("rsqrt", "sqrt", "pow")
                for made in node.outputs:
                    if is_rooted and node.operation in ("mul", "div") and made.size == self.x.size:
                        return True
                    is_small = getattr(made.aval, "size", 0) < self.x.size or node.operation == "broadcast_in_dim"
                    if is_small and (made, is_rooted) not in queue and len(queue) < MOST_STEPS_BACK:
                        queue.append((made, is_rooted))
        return False

    def structure(self, order: dict[Parameter, int]) -> tuple:
        """A key of what the region is, whatever the names: equal ones compute the same."""
        places = {n.output: i for i, n in enumerate(self.nodes)}

        def read(v: Value) -> tuple:
            if v is self.x:
                return ("x",)
            if v in places:
                return ("node", places[v])
            number = self.constants.number(v)
            return ("parameter", order[self.leaves[v]]) if number is None else ("number", number)

        nodes = tuple((n.operation, str(n.params), n.output.aval.str_short(), *map(read, n.inputs)) for n in self.nodes)
        candidates = tuple(places[y] for y in self.candidates)
        return self.x.shape, self.features, nodes, tuple(p.shape for p in order), candidates


def widens(value: Value) -> bool:
    """True of a copy in a dtype that holds all of what it is a copy of."""
    if value.operation != "convert_element_type" or value.maker is None:
        return False
    source = value.maker.inputs[0]
    is_float = {value.dtype.name, source.dtype.name} <= FLOATS
    return is_float and promote(source.dtype, value.dtype) == value.dtype


def peel(value: Value, constants: Constants) -> Parameter:
    """The array that the value repeats, behind broadcasts, reshapes, wider copies and sums with 0."""
    best = Parameter(value, value.shape)
    axes: list[int | None] = [i if n != 1 else None for i, n in enumerate(value.shape)]  # of `v`, for each of value's
    v = value
    while (node := v.maker) is not None and node.inputs:
        source = node.inputs[0]
        if node.operation == "broadcast_in_dim":
            dims = list(node.params["broadcast_dimensions"])
            axes = [dims.index(a) if a in dims and source.shape[dims.index(a)] != 1 else None for a in axes]
        elif node.operation in ("reshape", "squeeze", "expand_dims"):
            if not only_ones_differ(source.shape, v.shape):
                break
            olds, news = ([i for i, n in enumerate(s) if n != 1] for s in (source.shape, v.shape))
            places = dict(zip(news, olds, strict=True))
            axes = [None if a is None else places[a] for a in axes]
        elif (same := plus(v, 0.0, constants)) is not None:
            source = same
        elif not widens(v):
            break
        v = source
        kept = [a for a in axes if a is not None]
        if kept == sorted(kept) and {*kept} == {i for i, n in enumerate(v.shape) if n != 1}:
            best = Parameter(v, tuple(1 if a is None else v.shape[a] for a in axes))
    return best


def plus(value: Value, number: float, constants: Constants) -> Value | None:
    """The value a of which this one is a + number, and of whose shape it is; else None."""
    if value.operation != "add" or value.maker is None:
        return None
    a, b = value.maker.inputs
    for this, other in ((a, b), (b, a)):
        if this.shape == value.shape and constants.number(other) == number:
            return this
    return None
