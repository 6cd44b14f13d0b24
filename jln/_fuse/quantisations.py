"""Quantisations in a program: what it makes of an array in eight bits, and of their scales.

A quantisation is no analytic function, so random rows prove little of it. All that may be in one is elementwise, but
for the largest magnitude of blocks or of all; and what it makes is compared, to the bit, with the operators' own on
numbers of every size beside scales of every size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jln._core.operation import varying_together
from jln._fuse.certificate import FLOATS, Constants
from jln._fuse.graph import Frontier, Graph, Node, Value, bound
from jln._fuse.probes import ELEMENTWISE, LAYOUT, equal, probes, quantised
from jln._fuse.regions import peeled
from jln._junction.arrays import BLOCK

EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
MOST_NODES = 64  # that a quantisation may have


class Quantisation(NamedTuple):
    """An array z in eight bits, as a program makes it.

    dtype: the name of the eight bits' dtype. scale: of all, a value of one element or a number; None where each block
      of 32 has its own. is_factor: whether z is multiplied by it, and not divided.
    values: those that are z in eight bits. scales: those that are the blocks' scales or their bits. maxima: those that
      are the largest |z| of all. They have z's order.
    of_largest: a function from the largest |z| to the scale; None where that is not made of it.
    part: the equations. structure: a key of what they compute, whatever the names.
    """

    dtype: str
    scale: Value | float | None
    is_factor: bool
    values: tuple[Value, ...]
    scales: tuple[Value, ...]
    maxima: tuple[Value, ...]
    of_largest: Callable[[Array], Array] | None
    part: _Part
    structure: tuple

    @property
    def made(self) -> tuple[Value, ...]:
        return *self.values, *self.scales, *self.maxima

    def put_into(self, graph: Graph, quantized: Value) -> None:
        """Have the values be made of a `jln.Quantized`, each when it is read."""
        for v in self.made:
            graph.replace([v], [quantized], functools.partial(self._read, v))

    def _read(self, value: Value, quantized: Any) -> list[Any]:
        """The array that the value is."""
        if value in self.values:
            return [quantized.values.reshape(value.shape)]
        array = quantized.scale if value in self.scales else quantized.amax
        if jnp.issubdtype(value.dtype, jnp.integer):
            array = array.view(jnp.uint8)
        return [array.astype(value.dtype).reshape(value.shape)]


def quantisation_of(graph: Graph, z: Value, constants: Constants) -> Quantisation | str | None:
    """The quantisation of a value; why there is none, in a few words; None where nothing here is in eight bits."""
    part = _Part(z, constants)
    eight = [i for i, n in enumerate(part.nodes) if n.output.dtype.name in EIGHT_BITS]
    if not eight:
        return None
    structure = part.structure()
    if structure not in _remembered:
        if len(_remembered) >= 1024:
            _remembered.clear()
        _remembered[structure] = _certified(part, eight)
    found = _remembered[structure]
    if isinstance(found, str):
        return found
    outputs = [n.output for n in part.nodes]
    values, scales = (tuple(outputs[i] for i in places) for places in (found.values, found.scales))
    scale = next(iter(part.leaves.values())) if part.leaves else found.scale
    maxima = () if scale is None else tuple(v for v in outputs if v in part.maxima)  # of blocks there is none
    of_largest = None
    if isinstance(scale, Value) and scale in part.kinds:
        of_largest = functools.partial(_of_largest, part, scale)
    structure = part.structure(values)
    return Quantisation(found.dtype, scale, found.is_factor, values, scales, maxima, of_largest, part, structure)


def _of_largest(part: _Part, scale: Value, largest: Array) -> Array:
    """The scale of all that a part makes of the largest magnitude."""
    given = {v: largest.astype(v.dtype).reshape(v.shape) for v in part.maxima}
    return part.computed(given, [n for n in part.nodes if part.kinds[n.output] == ONE])[scale]


FULL, BLOCKS, ONE = "full", "blocks", "one"  # what a value has a number for: each element, each block, all of them


class _Part:
    """The part of a program behind z that may be a quantisation.

    nodes: in the program's order. kinds: of what each of their values has a number. leaves: the values of one number
      that elements or blocks are computed with, and the smallest array that each repeats. maxima: the values that are
      the largest |z| of all.
    """

    def __init__(self, z: Value, constants: Constants):
        self.z, self.constants = z, constants
        self.nodes: list[Node] = []
        self.kinds: dict[Value, str] = {z: FULL}
        self.leaves: dict[Value, Value] = {}
        self.maxima: set[Value] = set()
        self._same, self._magnitudes = {z}, set[Value]()
        frontier = Frontier()
        frontier.follow(z)
        while frontier and len(self.nodes) < MOST_NODES:
            node = frontier.pop()
            kind = self._kind(node)
            if kind is None:
                continue
            self.nodes.append(node)
            self.kinds[node.output] = kind
            self._note(node)
            if node.output.dtype.name not in EIGHT_BITS:
                frontier.follow(node.output)

    def _note(self, node: Node) -> None:
        """Note what the node reads, and whether its result is z, |z| or the largest of that."""
        source, output = node.inputs[0], node.output
        for v in node.inputs:
            if self.kinds.get(v, ONE) == ONE != self.kinds[output] and self.constants.number(v) is None:
                self.leaves[v] = self._repeated(v)
        is_copy = keeps_order(node) or node.operation == "stop_gradient"  # what is made of it keeps its own derivative
        if source in self._same and is_copy:
            self._same.add(output)
        elif source in self._magnitudes | self.maxima and (is_copy or node.operation == "reduce_max"):
            (self.maxima if output.size == 1 else self._magnitudes).add(output)
        elif source in self._same and node.operation == "abs":
            self._magnitudes.add(output)

    def _repeated(self, value: Value) -> Value:
        return value if value.size == 1 else peeled(value, self.constants).source

    def _is_one_number(self, value: Value) -> bool:
        return self.constants.number(value) is not None or (
            self._repeated(value).size == 1 and value.dtype.name in FLOATS
        )

    def _kind(self, node: Node) -> str | None:
        """The kind of the node's result; None where the node is of no quantisation, or of none known."""
        name, source = node.operation, node.inputs[0] if node.inputs else None
        if source is None or len(node.outputs) != 1:
            return None
        output, kinds = node.output, [self.kinds.get(v, ONE) for v in node.inputs]
        if any(v not in self.kinds and not self._is_one_number(v) for v in node.inputs):
            return None
        if name == "reduce_max":
            if kinds[0] == FULL and tuple(node.params["axes"]) == (source.ndim - 1,) and source.shape[-1] == BLOCK:
                return BLOCKS if output.size > 1 else None
            return ONE if output.size == 1 and source in self._magnitudes else None
        if name in LAYOUT:
            return self._laid_out(node, kinds[0])
        if name not in ELEMENTWISE or self._is_unseen(node):
            return None
        if FULL in kinds:
            fits = all(
                v.shape == output.shape if kind == FULL else kind == ONE or _is_of_blocks(v.shape, output.shape)
                for v, kind in zip(node.inputs, kinds, strict=True)
            )
            return FULL if fits and output.size == self.z.size else None
        if BLOCKS in kinds:
            fits = all(v.shape == output.shape or kind == ONE for v, kind in zip(node.inputs, kinds, strict=True))
            return BLOCKS if fits else None
        is_of_z = all(v in self.kinds or self.constants.number(v) is not None for v in node.inputs)
        return ONE if is_of_z and output.size == 1 else None

    def _is_unseen(self, node: Node) -> bool:
        """True for what probes would not see: a number that is too large for float16, and one that is compared with."""
        numbers = [self.constants.number(v) for v in node.inputs if node.operation in ("eq", "ne")]
        is_of_elements = any(self.kinds.get(v) == FULL and v.dtype.name in FLOATS for v in node.inputs)
        is_compared = is_of_elements and any(n and abs(n) < float("inf") for n in numbers)
        return is_compared or (node.output.dtype == jnp.float16 and node.operation not in _KEEP_SIZE)

    def _laid_out(self, node: Node, kind: str) -> str | None:
        """The kind of what has the elements of another value in their order, or each of them for a block."""
        source, output = node.inputs[0], node.output
        if keeps_order(node):
            return kind
        if kind != BLOCKS or node.operation != "broadcast_in_dim" or output.size != self.z.size:
            return None
        dims, last = node.params["broadcast_dimensions"], output.ndim - 1
        is_repeated = last not in dims or source.shape[dims.index(last)] == 1
        return FULL if is_repeated and output.shape[-1] == BLOCK else None

    def numbers(self) -> set[float]:
        numbers = {self.constants.number(v) for n in self.nodes for v in n.inputs if v not in self.kinds}
        return {n for n in numbers if n is not None}

    def sizes(self) -> tuple[float, ...]:
        """Sizes of z at which the part's numbers may count."""
        sizes = {s for n in self.numbers() if 1e-35 < abs(n) < 1e35 for s in (abs(n), 1 / abs(n))}
        return tuple(sorted(sizes))

    @property
    def sources(self) -> list[Value]:
        """The arrays of one number that the part reads."""
        return [v for v in dict.fromkeys(self.leaves.values()) if v not in self.kinds]

    def computed(self, given: Mapping[Value, Array], nodes: Sequence[Node]) -> dict[Value, Array]:
        """The arrays that the nodes make of these."""
        arrays, like = {**given}, next(iter(given.values()))

        def read(v: Value) -> Array:
            if v in arrays:
                return arrays[v]
            number: Any = self.constants.number(v)
            one = arrays[self.leaves[v]].astype(v.dtype).reshape(()) if v in self.leaves else number
            return varying_together((jnp.broadcast_to(jnp.asarray(one, v.dtype), v.shape), like))[0]

        for node in nodes:
            if node.output not in arrays:
                (arrays[node.output],) = bound(node.equation, [*map(read, node.inputs)])
        return arrays

    def structure(self, values: Sequence[Value] | None = None) -> tuple:
        """A key of what the part is, whatever the names: equal ones compute the same. values: what else it is for."""
        made = {n.output for n in self.nodes} if values is None else self._makers(values)
        of_nodes = [n for n in self.nodes if n.output in made]
        places: dict[Value, Any] = {self.z: "z"} | {n.output: i for i, n in enumerate(of_nodes)}
        sources = [*dict.fromkeys(self.leaves.values())]

        def read(v: Value) -> Any:
            if v in self.leaves:
                return "leaf", sources.index(self.leaves[v]), places.get(self.leaves[v])
            return places[v] if v in places else ("number", self.constants.number(v))

        nodes = tuple((n.operation, str(n.params), n.output.aval.str_short(), *map(read, n.inputs)) for n in of_nodes)
        return self.z.aval.str_short(), nodes

    def _makers(self, values: Sequence[Value]) -> set[Value]:
        """The part's values that these are made of."""
        made, stack = set[Value](), [*values]
        while stack:
            v = self.leaves.get(value := stack.pop(), value)
            if v in self.kinds and v is not self.z and v not in made and v.maker is not None:
                made.add(v)
                stack += v.maker.inputs
        return made


_KEEP_SIZE = ("abs", "neg", "max", "min", "clamp", "copy")


def keeps_order(node: Node) -> bool:
    """True for a copy with the same elements in the same order, in whatever shape and dtype."""
    source, output = node.inputs[0], node.output
    if node.operation == "transpose":
        moved = [a for a in node.params["permutation"] if source.shape[a] != 1]
        return moved == sorted(moved)
    is_cast = node.operation == "convert_element_type" and {source.dtype.name, output.dtype.name} <= FLOATS
    return is_cast or (node.operation in LAYOUT and source.size == output.size)


def _is_of_blocks(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return full[-1:] == (BLOCK,) and shape == (*full[:-1], 1)


class _Certificate(NamedTuple):
    """A certificate that a part is a quantisation. values, scales: the places of the nodes that make them."""

    dtype: str
    scale: float | None
    is_factor: bool
    values: tuple[int, ...]
    scales: tuple[int, ...]


_remembered: dict[tuple, _Certificate | str] = {}


def _certified(part: _Part, eight: list[int]) -> _Certificate | str:
    outputs = [n.output for n in part.nodes]
    dtypes = {outputs[i].dtype.name for i in eight}
    if len(dtypes) > 1 or len({*part.leaves.values()}) > 1:
        return "it is quantised in two ways"
    (dtype,) = dtypes
    drawn = probes(part.sizes())
    runs = [_computed(part, z, scale) for z, scale in drawn]

    def are(places: Iterable[int], wanted: Sequence[np.ndarray]) -> tuple[int, ...]:
        """The places of the values that are these in all runs."""
        return tuple(i for i in places if all(equal(run[outputs[i]], w) for run, w in zip(runs, wanted, strict=True)))

    for number, is_factor in _ways(part):
        has_blocks = number is None and not part.leaves
        wanted = []
        for (z, scale), run in zip(drawn, runs, strict=True):
            scales = [run[source].item() for source in part.leaves.values() if source in run]
            scale = next(iter(scales), scale) if number is None else number
            wanted.append(quantised(dtype, z, None if has_blocks else scale, is_factor))
        values = are(eight, [w for w, _ in wanted])
        if len(values) == len(eight):
            of_blocks = [i for i, v in enumerate(outputs) if has_blocks and part.kinds[v] == BLOCKS]
            return _Certificate(dtype, number, is_factor, values, are(of_blocks, [scales for _, scales in wanted]))
    return "its eight bits or their scales are none of jln.Float8 and jln.MXFloat8"


def _ways(part: _Part) -> list[tuple[float | None, bool]]:
    """The ways in which a part may quantise: a scale that is a number, and whether the scale is a factor."""
    if part.leaves:
        return [(None, False), (None, True)]
    if BLOCKS in part.kinds.values():
        return [(None, False)]
    return [(c, f) for c in sorted({1.0, *part.numbers()}) if c > 0 for f in (False, True)]


def _computed(part: _Part, z: np.ndarray, scale: float) -> dict[Value, np.ndarray]:
    """The part's values, with floats of 16 bits and more in float64."""
    values: dict[Value, np.ndarray] = {part.z: z}

    def read(v: Value) -> np.ndarray:
        if v in values:
            return values[v]
        if v in part.leaves:
            return values.get(part.leaves[v], np.full((1, 1), scale))
        number = part.constants.number(v)
        return np.full((1, 1), number, np.float64 if v.dtype.name in FLOATS else v.dtype)

    with np.errstate(all="ignore"):
        for node in part.nodes:
            kind = part.kinds[node.output]
            result, *others = map(read, node.inputs)
            if node.operation == "reduce_max":
                result = result.max(-1 if kind == BLOCKS else None, keepdims=True)
            elif node.operation not in LAYOUT:
                result = ELEMENTWISE[node.operation](node, result, *others)
            values[node.output] = np.broadcast_to(result, {FULL: z.shape, BLOCKS: (len(z), 1), ONE: (1, 1)}[kind])
    return values
