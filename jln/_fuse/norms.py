"""Norms in a program, found by what they compute.

From each sum over features a region grows through what `certificate` can compute. Of its values of x's shape those are
norms that equal the operators' formula on random rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jln._fuse.certificate import (
    FLOATS,
    ROWS,
    Constants,
    agree,
    computed,
    drawn,
    only_ones_differ,
    silu,
    why_not_analytic,
)
from jln._fuse.graph import Graph, Node, Value

FEWEST = 2  # features
# What a region may have: so much of a network is looked at for one norm.
MOST_RESULTS, MOST_PARAMETERS, MOST_STEPS_BACK = 16, 3, 48


class Parameter(NamedTuple):
    """An array that a value repeats. shape: of the value's rank, with 1 on the axes along which it is repeated."""

    source: Value
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Norm(NamedTuple):
    """A norm that was found: y is the norm of x over the axes `features`, [* silu(z)].

    nodes: those that make y of x.
    """

    x: Value
    y: Value
    features: tuple[int, ...]
    epsilon: float
    centres: bool
    scale: Parameter | None
    offset: Parameter | None
    z: Value | None
    nodes: frozenset[Node]

    @property
    def is_of_rows(self) -> bool:
        """True where the normalised axes are the last ones, or have a parameter: those of a batch norm have none."""
        first = self.x.ndim - len(self.features)
        return self.features == tuple(range(first, self.x.ndim)) or (self.scale, self.offset) != (None, None)


class Miss(NamedTuple):
    """A sum of squares that is no norm's. node: the sum. why: the reason, in a few words."""

    node: Node
    why: str


def norms_of(graph: Graph, constants: Constants) -> tuple[list[Norm], list[Miss]]:
    found: list[Norm] = []
    misses: list[Miss] = []
    used: set[Node] = set()
    for node in graph.nodes:
        axes = _summed_axes(node)
        if not axes or node in used:
            continue
        why = None
        for x in _origins(node.inputs[0]):
            if x.dtype.name not in FLOATS or math.prod(x.shape[a] for a in axes) < FEWEST:
                continue
            region = _Region(x, node, axes, constants)
            certified = [n for n in region.norms(graph) if n.is_of_rows]
            if certified:
                found += certified
                used |= frozenset().union(*(n.nodes for n in certified))
                break
            why = why or region.why_none()
        else:
            if why is not None and _is_of_squares(node):
                misses.append(Miss(node, why))
    return found, [m for m in misses if m.node not in used]


def _summed_axes(node: Node) -> tuple[int, ...]:
    """The axes over which a node sums its operand, or its operand's square as a product with itself; else ()."""
    if node.operation == "reduce_sum":
        return tuple(int(a) for a in node.params["axes"])
    if node.operation == "dot_general" and node.inputs[0] is node.inputs[1]:
        (axes, same), (batch, batched) = node.params["dimension_numbers"]
        if (*axes, *batch) == (*same, *batched) and len(axes) + len(batch) == node.inputs[0].ndim:
            return tuple(int(a) for a in axes)
    return ()


def _is_of_squares(node: Node) -> bool:
    return node.operation == "dot_general" or any(v.operation in _SQUARES for v in _origins(node.inputs[0]))


_SQUARES = ("square", "integer_pow", "mul")


def _origins(value: Value) -> list[Value]:
    """The values that a sum may be of: the furthest first, x in front of its float32 copy and of its square.

    Not in front of a float64 copy, as operators compute in float64 only what comes in it.
    """
    chain = [value]
    while True:
        node = value.maker
        if node is None or node.operation not in ("square", "integer_pow", "mul", "convert_element_type"):
            return chain[::-1]
        if node.operation == "mul" and node.inputs[0] is not node.inputs[1]:
            return chain[::-1]
        if node.operation == "convert_element_type" and (not widens(value) or value.dtype == np.float64):
            return chain[::-1]
        chain.append(value := node.inputs[0])


def widens(value: Value) -> bool:
    """True of a copy in a dtype that holds all of what it is a copy of."""
    if value.operation != "convert_element_type" or value.maker is None:
        return False
    of = value.maker.inputs[0]
    is_float = {value.dtype.name, of.dtype.name} <= FLOATS
    return is_float and promoted(of.dtype, value.dtype) == value.dtype


def promoted(a: Any, b: Any) -> Any:
    """The dtype of a sum of the two, however strict the user has JAX be."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def peeled(value: Value, constants: Constants) -> Parameter:
    """The array that the value repeats, behind broadcasts, reshapes, wider copies and sums with 0."""
    best = Parameter(value, value.shape)
    axes: list[int | None] = [i if n != 1 else None for i, n in enumerate(value.shape)]  # of `v`, for each of value's
    v = value
    while (node := v.maker) is not None and node.inputs:
        of = node.inputs[0]
        if node.operation == "broadcast_in_dim":
            dims = list(node.params["broadcast_dimensions"])
            axes = [dims.index(a) if a in dims and of.shape[dims.index(a)] != 1 else None for a in axes]
        elif node.operation in ("reshape", "squeeze", "expand_dims"):
            if not only_ones_differ(of.shape, v.shape):
                break
            olds, news = ([i for i, n in enumerate(s) if n != 1] for s in (of.shape, v.shape))
            places = dict(zip(news, olds, strict=True))
            axes = [None if a is None else places[a] for a in axes]
        elif (same := plus(v, 0.0, constants)) is not None:
            of = same
        elif not widens(v):
            break
        v = of
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


def gate_of(value: Value, constants: Constants) -> Value | None:
    """The array z of which the value is silu(z), perhaps in a wider copy; else None."""
    nodes: dict[Node, None] = {}
    sources: set[Value] = set()
    stack = [value]
    while stack:  # elementwise nodes of the value's shape, back to what they are made of
        v = stack.pop()
        node = v.maker
        if node is None or len(nodes) > 8 or node.operation not in _OF_SILU or v.shape != value.shape:
            if constants.number(v) is None:
                sources.add(v)
        elif node not in nodes:
            nodes[node] = None
            stack += node.inputs
    ordered = sorted(nodes, key=lambda n: n.position)
    if len(sources) != 1 or not ordered or any(why_not_analytic(n, value.size, constants) for n in ordered):
        return None
    (z,) = sources
    probe = drawn((64,), 1) * 3
    counted: set[Node] = set()
    made = computed(ordered, {z: probe}, constants, counted=counted).get(value)
    if not {*ordered} <= counted:
        return None
    return z if made is not None and made.shape == probe.shape and agree(made, silu(probe)) else None


_OF_SILU = ("mul", "logistic", "convert_element_type", "div", "exp", "neg", "add")


class _Region:
    """The part of a program that it makes of x through a sum over its features, as far as `certificate` can compute it.

    parameters: the arrays beside x that each value is made of.
    candidates: values of x's shape that are made through the sum.
    blocks: the nodes at which the region ends, with the reason.
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
        queue: list[tuple[int, Node]] = []
        seen: set[Node] = set()

        def follow(value: Value) -> None:
            for reader in value.readers:
                if reader not in seen:
                    seen.add(reader)
                    heapq.heappush(queue, (reader.position, reader))

        if not self._made_of_x(self.statistic.output):
            return
        follow(self.statistic.output)
        while queue and len(self.candidates) < MOST_RESULTS:
            _, node = heapq.heappop(queue)
            why = why_not_analytic(node, self.x.size, self.constants)
            if why is not None:
                self.blocks.append((node, why))
                continue
            for v in node.inputs:
                self._made_of_x(v)
            self._add(node)
            of = self.parameters[node.output]
            if len(of) <= MOST_PARAMETERS and sum(p.size == self.x.size for p in of) <= 1:
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
        of: set[Parameter] = set()
        for v in node.inputs:
            if v in self.parameters:
                of |= self.parameters[v]
            elif self.constants.number(v) is None:
                self.leaves[v] = self.leaves.get(v) or peeled(v, self.constants)
                of.add(self.leaves[v])
        self.parameters[node.output] = frozenset(of)

    def norms(self, graph: Graph) -> Iterator[Norm]:
        """The norms among the candidates: of those that are made of each other the last."""
        if not self.candidates:
            return
        order = {p: i for i, p in enumerate(dict.fromkeys(self.leaves.values()))}
        found = _certified(self, order)
        chosen: list[Norm] = []
        for place, epsilon, centres, *roles in found:
            y = self.nodes[place].output
            scale, offset, gate = (None if r is None else list(order)[r] for r in roles)
            z = None
            if gate is not None:
                z = gate_of(gate.source, self.constants)
                if z is None or gate.source.shape != self.x.shape or z.shape != self.x.shape:
                    continue
            if any(y is n.y or y.maker in n.nodes for n in chosen):
                continue
            nodes = self.makers(y)
            if z is not None and any(_is_read_outside(graph, self.nodes[at].output, nodes) for at, *_ in found):
                continue  # the norm in front of the gate would be made twice
            before = y.maker.inputs[0] if y.maker is not None else y
            if y.operation == "convert_element_type" and not graph.is_read_once(before):
                # Who else reads the wide result would have it made again: then all read it.
                is_norm = [self.nodes.index(before.maker), epsilon, centres, *roles] if before.maker in nodes else None
                if is_norm is not None and tuple(is_norm) in found and not widens(before):
                    y, nodes = before, nodes - {y.maker}
            chosen.append(Norm(self.x, y, self.features, epsilon, centres, scale, offset, z, nodes))
        yield from chosen

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
        roots = [n for n in self.nodes if n.operation in ("rsqrt", "sqrt", "pow")]
        # Where the root is of something else than a row's statistic there is no norm to miss.
        if not any(n.output.size * math.prod(self.x.shape[a] for a in self.features) == self.x.size for n in roots):
            reasons = [why for n, why in self.blocks if why in _NEARLY and n.output.size < self.x.size]
            return f"{reasons[0]} in the statistics" if reasons and not roots else None
        if any(p.size == 1 for of in self.parameters.values() for p in of):
            return "epsilon is an argument"
        if not self.candidates:
            return None
        return "it is no layer_norm or rms_norm of its rows"

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


def _is_read_outside(graph: Graph, value: Value, nodes: frozenset[Node]) -> bool:
    """True where one of these nodes makes the value for another one or for a result, and it is not the last."""
    readers = [r in nodes for r in value.readers]
    return value.maker in nodes and any(readers) and (graph.is_result(value) or not all(readers))


# What is certified of a region, by its structure: the layers of a model have one. It is forgotten when it is too much.
_remembered: dict[tuple, tuple[tuple, ...]] = {}


def _certified(region: _Region, order: dict[Parameter, int]) -> tuple[tuple, ...]:
    """The certificates of a region's candidates, the last first.

    Each is (its node's place, epsilon, whether the mean is subtracted, and the numbers of the parameters that are
    scale, offset and gate, None where there is none).
    """
    structure = region.structure(order)
    if structure not in _remembered:
        if len(_remembered) >= 4096:
            _remembered.clear()
        _remembered[structure] = tuple(_certificates(region, order))
    return _remembered[structure]


def _certificates(region: _Region, order: dict[Parameter, int]) -> Iterator[tuple]:
    x, features, parameters = region.x, region.features, list(order)
    shape = [n if a in features else min(n, ROWS) for a, n in enumerate(x.shape)]
    values = {
        i: drawn([1 if m == 1 else s for m, s in zip(p.shape, shape, strict=True)], i + 1)
        for i, p in enumerate(parameters)
        if len(p.shape) == x.ndim and all(m in (1, n) for m, n in zip(p.shape, x.shape, strict=True))
    }
    given = {v: values[order[p]] for v, p in region.leaves.items() if order[p] in values}
    h = math.prod(x.shape[a] for a in features)
    read = {region.constants.number(v) for n in region.nodes for v in n.inputs}
    added = sorted(c for c in read if c is not None and 0 < c < 0.1)
    epsilons = dict.fromkeys((0.0, *added, *(c / h for c in added)))
    draws = [size * drawn(shape, 0) for size in _sizes(read)]
    exact = (1 / h, math.sqrt(h), 1 / math.sqrt(h))
    counted: set[Node] = set()
    made = [
        computed(region.nodes, {x: rows, **given}, region.constants, _squares(rows, features), exact, counted)
        for rows in draws
    ]
    for y in reversed(region.candidates):
        numbers = [order[p] for p in region.parameters[y]]
        if widens(y) or any(y not in m for m in made):
            continue
        if not region.makers(y) <= counted:
            continue
        for centres, epsilon, roles in itertools.product((False, True), epsilons, _roles(numbers, region, parameters)):
            arrays = [None if i is None else values[i] for i in roles]
            if _has_operator(centres, *roles) and all(
                agree(m[y], _formula(rows, features, epsilon, centres, *arrays))
                for m, rows in zip(made, draws, strict=True)
            ):
                yield next(i for i, n in enumerate(region.nodes) if n is y.maker), epsilon, centres, *roles
                break


def _sizes(numbers: Iterable[float | None]) -> list[float]:
    """Sizes of rows at which each of a region's numbers counts, be it an epsilon, a factor or a bound."""
    sizes = [1.0, -0.03]
    for c in sorted({abs(c) for c in numbers if c is not None and 1e-60 < abs(c) < 1e60}):
        for size in (math.sqrt(c), c, 1 / c, 1 / math.sqrt(c)):
            if all(not 0.4 < abs(size / other) < 2.5 for other in sizes):
                sizes.append(size)
    return sizes


def _squares(rows: np.ndarray, features: tuple[int, ...]) -> list[np.ndarray]:
    """The statistics of the rows that are never negative, as means and as sums."""
    means = [(rows * rows).mean(features), rows.var(features)]
    return means + [m * math.prod(rows.shape[a] for a in features) for m in means]


Role = int | None


def _roles(
    numbers: Sequence[int], region: _Region, parameters: Sequence[Parameter]
) -> Iterator[tuple[Role, Role, Role]]:
    """The ways in which these may be scale, offset and gate: the gate has x's size, the others its features."""
    for places in itertools.permutations(range(3), len(numbers)):
        roles: list[Role] = [None, None, None]
        for place, number in zip(places, numbers, strict=True):
            roles[place] = number
        *small, gate = roles
        of_features = all(
            i is None
            or (
                parameters[i].size < region.x.size
                and all(parameters[i].shape[a] == region.x.shape[a] for a in region.features)
            )
            for i in small
        )
        if of_features and (gate is None or parameters[gate].size == region.x.size):
            yield roles[0], roles[1], roles[2]


def _has_operator(centres: bool, scale: Role, offset: Role, gate: Role) -> bool:
    """False for an RMSNorm with an offset and for a gated LayerNorm, whose last steps are left to XLA."""
    del scale
    return (centres and gate is None) or (not centres and offset is None)


def _formula(
    x: np.ndarray,
    features: tuple[int, ...],
    epsilon: float,
    centres: bool,
    scale: np.ndarray | None,
    offset: np.ndarray | None,
    gate: np.ndarray | None,
) -> np.ndarray:
    """The operators' own formula."""
    d = x - x.mean(features, keepdims=True) if centres else x
    y = d / np.sqrt((d * d).mean(features, keepdims=True) + epsilon)
    y = y if scale is None else y * scale
    y = y if offset is None else y + offset
    return y if gate is None else y * gate


_NEARLY = ("a maximum", "a selection by a value", "psum", "psum_invariant", "clamp", "abs", "custom_jvp_call")
