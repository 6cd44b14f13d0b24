"""Norms in a program: of the regions' values those that equal the operators' formula on random rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jln._fuse.certificate import FLOATS, ROWS, Constants, agree, compute, drawn, silu, why_not_analytic
from jln._fuse.graph import Graph, Node, Value
from jln._fuse.regions import Parameter, Region, widens

FEWEST = 2  # features


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
        """True where the normalised axes are the last ones."""
        return self.features == tuple(range(self.x.ndim - len(self.features), self.x.ndim))


class Miss(NamedTuple):
    """A sum of squares that is no norm's. node: the sum. why: the reason, in a few words."""

    node: Node
    why: str


def norms_of(graph: Graph, constants: Constants) -> tuple[list[Norm], list[Miss]]:
    norms: list[Norm] = []
    misses: list[Miss] = []
    used: set[Node] = set()
    for node in graph.nodes:
        axes = _summed_axes(node)
        if not axes or node in used:
            continue
        why = None
        for x in _origins(node.inputs[0], constants):
            if x.dtype.name not in FLOATS or math.prod(x.shape[a] for a in axes) < FEWEST:
                continue
            region = Region(x, node, axes, constants)
            # Over other axes than the last, without a parameter on them, a norm is a batch's.
            found = _norms_in(region, graph)
            certified = [n for n in found if n.is_of_rows or n.scale or (n.centres and n.offset)]
            if certified:
                norms += certified
                used |= frozenset().union(*(n.nodes for n in certified))
                break
            why = why or region.why_none()
        else:
            if why is not None and _is_of_squares(node, constants):
                misses.append(Miss(node, why))
    return norms, [m for m in misses if m.node not in used]


def _summed_axes(node: Node) -> tuple[int, ...]:
    """The axes over which a node sums its operand, or its operand's square as a product with itself; else ()."""
    if node.operation == "reduce_sum":
        return tuple(int(a) for a in node.params["axes"])
    if node.operation == "dot_general" and node.inputs[0] is node.inputs[1]:
        (axes, same), (batch, batched) = node.params["dimension_numbers"]
        if (*axes, *batch) == (*same, *batched) and len(axes) + len(batch) == node.inputs[0].ndim:
            return tuple(int(a) for a in axes)
    return ()


def _is_of_squares(node: Node, constants: Constants) -> bool:
    """True of a sum of squares, perhaps of those that a mask selects."""
    values = _origins(node.inputs[0], constants)
    values += [
        v for value in values if value.maker and value.operation in ("select_n", "mul") for v in value.maker.inputs
    ]
    return node.operation == "dot_general" or any(_root(v, constants) is not None for v in values)


def _root(value: Value, constants: Constants) -> Value | None:
    """The array whose square, or other whole power, the value is; else None."""
    node = value.maker
    if node is None:
        return None
    is_power = (
        node.operation in ("square", "integer_pow")
        or (node.operation == "mul" and node.inputs[0] is node.inputs[1])
        or (node.operation == "pow" and constants.number(node.inputs[1]) == 2)
    )
    return node.inputs[0] if is_power else None


def _origins(value: Value, constants: Constants) -> list[Value]:
    """The values that a sum may be of: the furthest first, x in front of its float32 copy and of its square.

    Not in front of a float64 copy, as operators compute in float64 only what comes in it.
    """
    chain = [value]
    while True:
        source = _root(value, constants)
        if source is None and value.maker is not None and widens(value) and value.dtype != np.float64:
            source = value.maker.inputs[0]
        if source is None:
            return chain[::-1]
        chain.append(value := source)


def _norms_in(region: Region, graph: Graph) -> Iterator[Norm]:
    """The norms among a region's candidates: of those that are made of each other the last."""
    if not region.candidates:
        return
    order = {p: i for i, p in enumerate(dict.fromkeys(region.leaves.values()))}
    certificates = _certify(region, order)
    results = [region.nodes[c.place].output for c in certificates]
    chosen: list[Norm] = []
    for c, y in zip(certificates, results, strict=True):
        scale, offset, gate = (None if i is None else list(order)[i] for i in c.roles)
        z = None
        if gate is not None:
            z = _gate_of(gate.source, region.constants)
            if z is None or gate.source.shape != region.x.shape or z.shape != region.x.shape:
                continue
        if any(y is n.y or y.maker in n.nodes for n in chosen):
            continue
        nodes = region.makers(y)
        if (z is not None or c.factor != 1) and any(_is_read_outside(graph, other, nodes) for other in results):
            continue  # the norm in front of the gate, or of the factor, would be made twice
        before = y.maker.inputs[0] if y.maker is not None else y
        if y.operation == "convert_element_type" and before.maker in nodes and not graph.is_read_once(before):
            # Who else reads the wide result would have it made again: then all read it.
            wide = c._replace(place=region.nodes.index(before.maker))
            if wide in certificates and not widens(before):
                y, nodes = before, nodes - {y.maker}
        scale, offset = (None if p is None else p._replace(factor=c.factor) for p in (scale, offset))
        chosen.append(Norm(region.x, y, region.features, c.epsilon, c.centres, scale, offset, z, nodes))
    yield from chosen


def _is_read_outside(graph: Graph, value: Value, nodes: frozenset[Node]) -> bool:
    """True where one of these nodes makes the value for another one or for a result, and it is not the last."""
    readers = [r in nodes for r in value.readers]
    return value.maker in nodes and any(readers) and (graph.is_result(value) or not all(readers))


def _gate_of(value: Value, constants: Constants) -> Value | None:
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
    gate = compute(ordered, {z: probe}, constants, counted=counted).get(value)
    if not {*ordered} <= counted:
        return None
    return z if gate is not None and gate.shape == probe.shape and agree(gate, silu(probe)) else None


_OF_SILU = ("mul", "logistic", "convert_element_type", "div", "exp", "neg", "add")


class Roles(NamedTuple):
    """A norm's scale, offset and gate, each a number among the region's parameters; None where there is none."""

    scale: int | None
    offset: int | None
    gate: int | None


class Certificate(NamedTuple):
    """A certificate that a node of a region makes a norm, times a factor.

    place: the node's, among the region's nodes.
    """

    place: int
    epsilon: float
    centres: bool
    roles: Roles
    factor: float = 1.0


# What is certified of a region, by its structure: the layers of a model have one. It is forgotten when it is too much.
_remembered: dict[tuple, tuple[Certificate, ...]] = {}


def _certify(region: Region, order: dict[Parameter, int]) -> tuple[Certificate, ...]:
    """The certificates of a region's candidates, the last first. order: the number of each parameter."""
    structure = region.structure(order)
    if structure not in _remembered:
        if len(_remembered) >= 4096:
            _remembered.clear()
        certificates = tuple(_certificates(region, order))
        # What is a multiple of a norm alone, such as a row of length 1, is none.
        _remembered[structure] = certificates if any(c.factor == 1 for c in certificates) else ()
    return _remembered[structure]


# Of rows on which norms are compared. An epsilon counts beside variances of eight decades to either side, and so do a
# factor and a bound, of however many constants a program makes them: some of these sizes see each, with either sign.
SIZES = tuple((-1) ** i * 10.0 ** (3 * i) for i in range(-12, 13))


def _certificates(region: Region, order: dict[Parameter, int]) -> Iterator[Certificate]:
    x, features, parameters = region.x, region.features, list(order)
    shape = [n if a in features else min(n, ROWS) for a, n in enumerate(x.shape)]
    values = {
        i: drawn([1 if m == 1 else s for m, s in zip(p.shape, shape, strict=True)], i + 1)
        for i, p in enumerate(parameters)
        if len(p.shape) == x.ndim and all(m in (1, n) for m, n in zip(p.shape, x.shape, strict=True))
    }
    leaves = {v: values[order[p]] for v, p in region.leaves.items() if order[p] in values}
    h = math.prod(x.shape[a] for a in features)
    constants = {region.constants.number(v) for n in region.nodes for v in n.inputs}
    positive = sorted(c for c in constants if c is not None and 0 < c < math.inf)
    epsilons = dict.fromkeys((0.0, *positive, *(c / h for c in positive)))
    draws = [size * drawn(shape, 0) for size in SIZES]
    exact = (1 / h, math.sqrt(h), 1 / math.sqrt(h))
    counted: set[Node] = set()
    results = [
        compute(region.nodes, {x: rows, **leaves}, region.constants, _squares(rows, features), exact, counted)
        for rows in draws
    ]
    for y in reversed(region.candidates):
        numbers = [order[p] for p in region.parameters[y]]
        if widens(y) or any(y not in result for result in results):
            continue
        if not region.makers(y) <= counted:
            continue
        for centres, epsilon, roles in itertools.product((False, True), epsilons, _roles(numbers, region, parameters)):
            arrays = [None if i is None else values[i] for i in roles]
            if roles.gate is not None and (centres or roles.offset is not None):
                continue  # no operator has that gate, and its last steps are left to XLA
            wanted = (_formula(rows, features, epsilon, centres, *arrays) for rows in draws)
            if factor := _factor([result[y] for result in results], wanted, has_scale=roles.scale is not None):
                place = next(i for i, n in enumerate(region.nodes) if n is y.maker)
                yield Certificate(place, epsilon, centres, roles, factor)
                break


def _factor(got: Sequence[np.ndarray], wanted: Iterable[np.ndarray], *, has_scale: bool) -> float | None:
    """The one number by which all arrays are multiples of the wanted ones; None where there is none.

    has_scale: whether a scale could take another number than 1.
    """
    factor = None if has_scale else 1.0
    for a, b in zip(got, wanted, strict=True):
        if factor is None:
            largest = np.unravel_index(np.argmax(np.abs(b)), b.shape)
            ratio = float(a[largest] / b[largest]) if a.shape == b.shape and b[largest] else 1.0
            factor = 1.0 if abs(ratio - 1) < 1e-9 else ratio
        if factor == 0 or not np.isfinite(factor) or not agree(a, factor * b):
            return None
    return factor


def _squares(rows: np.ndarray, features: tuple[int, ...]) -> list[np.ndarray]:
    """The statistics of the rows that are never negative, as means and as sums."""
    means = [(rows * rows).mean(features), rows.var(features)]
    return means + [m * math.prod(rows.shape[a] for a in features) for m in means]


def _roles(numbers: Sequence[int], region: Region, parameters: Sequence[Parameter]) -> Iterator[Roles]:
    """The ways in which these may be scale, offset and gate: the gate has x's size, the others its features."""
    for places in itertools.permutations(range(3), len(numbers)):
        roles: list[int | None] = [None, None, None]
        for place, number in zip(places, numbers, strict=True):
            roles[place] = number
        *small, gate = roles
        fits = all(
            i is None
            or (
                parameters[i].size < region.x.size
                and all(parameters[i].shape[a] == region.x.shape[a] for a in region.features)
            )
            for i in small
        )
        if fits and (gate is None or parameters[gate].size == region.x.size):
            yield Roles(*roles)


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
