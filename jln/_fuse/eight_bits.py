"""Readers of a norm's result in eight bits: they read those of the norm's kernel, and the result is made no more.

Who multiplies in eight bits quantises inside of a `jax.custom_vjp` function, for the derivative is that of a product.
Such a function stays what it is. Its own equations run, but for those that quantise; in backward its own rule runs, and
where that reads the norm's result it is made again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jln._fuse.certificate import Constants
from jln._fuse.graph import Graph, Node, Value, bound
from jln._fuse.norms import Norm
from jln._fuse.quantisations import Quantisation, keeps_order, quantisation_of
from jln._junction.arrays import BLOCK
from jln._operators.eight_bits import Float8, MXFloat8, Quantized


class EightBits(NamedTuple):
    """All that reads a norm's result, in eight bits.

    own: the quantisation among the norm's own equations, None where there is none. readers: functions that have one.
    quantize: the operator's argument, made of the arrays of `inputs`.
    """

    own: Quantisation | None
    readers: tuple[Reader, ...]
    inputs: tuple[Value, ...]
    quantize: Callable[..., Float8 | MXFloat8]

    def put_into(self, graph: Graph, y: Value, again: Callable[..., Array], arguments: Sequence[Value]) -> None:
        """Have what was found read y as an operator's `Quantized`. again: makes y itself of `arguments`."""
        if self.own is not None:
            self.own.put_into(graph, y)
        for group in _independent(graph, self.readers):
            others = [v for reader in group for v in reader.others]
            results = [v for reader in group for v in reader.node.outputs]
            graph.replace(results, [y, *others, *arguments], functools.partial(_read, group, again))


def eight_bits_of(graph: Graph, norm: Norm, constants: Constants) -> EightBits | str | None:
    """Return what reads a norm's result in eight bits, if nothing reads it in others; else why not, in a few words.

    None where nothing here is in eight bits.
    """
    y = norm.y
    own = quantisation_of(graph, y, constants)
    readers = tuple(_readers_of(y, constants))
    found = [q for q in (own, *(r.quantisation for r in readers)) if q is not None]
    why = next((q for q in found if isinstance(q, str)), None)
    if why is not None or not found:
        return why
    assert not isinstance(own, str)
    if any(r.reads_more for r in readers) or _is_read_otherwise(graph, y, own, readers):
        return "it is read in other bits, too"
    scales = [] if own is None else [_scale_of(own, lambda v: (v, (v,), lambda a: a))]
    scales += [r.scale() for r in readers if r.quantisation is not None]
    (_, inputs, quantize), *more = scales
    if any(s.key != scales[0].key for s in more):
        return "it is quantised in two ways"
    made = [*(() if own is None else own.made), *(v for r in readers for v in r.node.outputs)]
    if any(graph.depends(v, [norm.x, y, *made]) for v in inputs):
        return "its scale is made of what is normalised"
    if _is_split(y):
        return "its type says how it is sharded"
    in_blocks = any(q.scale is None for q in found if isinstance(q, Quantisation))
    if in_blocks and (norm.features != (y.ndim - 1,) or y.shape[-1] % BLOCK):
        return "its blocks are not along a last, normalised axis"
    return EightBits(own, readers, inputs, quantize)


def _is_split(value: Value) -> bool:
    sharding = getattr(value.aval, "sharding", None)
    return sharding is not None and any(axes is not None for axes in sharding.spec)


def _is_read_otherwise(graph: Graph, y: Value, own: Quantisation | None, readers: Sequence[Reader]) -> bool:
    """True where a result or an effect of the program reads y but by its quantisation and these readers."""
    made = () if own is None else own.made
    stack, seen = [y], set[Value]()
    while stack:
        value = stack.pop()
        if graph.is_result(value):
            return True
        for node in value.readers:
            reader = next((r for r in readers if r.node is node), None)
            if reader is not None and reader.copy is value and value not in reader.others:
                continue
            if reader is not None or node.equation.effects:
                return True
            new = [v for v in node.outputs if v not in made and v not in seen]
            seen.update(new)
            stack += new
    return False


class _Scale(NamedTuple):
    """The scales of a quantisation. key: equal ones are of one kernel. inputs, quantize: as of `EightBits`."""

    key: tuple
    inputs: tuple[Value, ...]
    quantize: Callable[..., Float8 | MXFloat8]


Source = tuple[Any, tuple[Value, ...], Callable[..., Array]]  # an array's key, the values it is made of, and how


def _scale_of(found: Quantisation, source: Callable[[Value], Source]) -> _Scale:
    dtype, scale, is_factor, of_largest = found.dtype, found.scale, found.is_factor, found.of_largest

    def divisor(scale: Any) -> Any:
        return 1 / scale if is_factor else scale

    def by_array(*arrays: Array) -> Float8:
        return Float8(divisor(of(*arrays).astype(jnp.float32).reshape(())), dtype)

    if scale is None:
        return _Scale((dtype,), (), lambda: MXFloat8(dtype))
    if not isinstance(scale, Value):
        return _Scale((dtype, is_factor, scale), (), lambda: Float8(divisor(scale), dtype))
    if of_largest is not None:
        by_largest = lambda amax: divisor(of_largest(amax).astype(jnp.float32).reshape(()))  # noqa: E731
        return _Scale((dtype, found.structure), (), lambda: Float8(by_largest, dtype))
    key, inputs, of = source(scale)
    return _Scale((dtype, is_factor, key), inputs, by_array)


class Reader:
    """A `jax.custom_vjp` function of a copy of a norm's result, of which it reads the eight bits.

    place: of the copy among the function's operands. chain: the equations that make the copy. quantisation: as of
      `quantisation_of`; None where backward alone reads the copy. reads_more: whether it reads it in other bits.
    """

    def __init__(self, node: Node, place: int, chain: Sequence[Node], constants: Constants):
        self.node, self.place, self.chain, self._constants = node, place, chain, constants
        program = node.params["call_jaxpr"]
        self._graph, self.quantisation = _cut(program, place, constants)
        self.reads_more = self._graph.inputs[place] in self._graph.needed(self._graph.outputs)[1]

    @property
    def copy(self) -> Value:
        return self.node.inputs[self.place]

    @property
    def others(self) -> list[Value]:
        return [v for i, v in enumerate(self.node.inputs) if i != self.place]

    def scale(self) -> _Scale:
        """The scales of the quantisation."""
        assert isinstance(self.quantisation, Quantisation)
        return _scale_of(self.quantisation, self._source)

    def _source(self, scale: Value) -> Source:
        """The scale as an array that is made of the function's other operands."""
        read = self._graph.needed([scale])[1]
        outer = dict(zip(self._graph.inputs, self.node.inputs, strict=False))

        def of(*arrays: Array) -> Array:
            return self._graph.run(dict(zip(read, arrays, strict=True)), outputs=[scale])[0]

        inputs = tuple(outer[v] for v in read)
        return inputs[0] if read == [scale] else self.node, inputs, of

    def results(self, quantized: Quantized, others: Sequence[Array]) -> list[Array]:
        return self._graph.run(self._arrays(self._graph, others, quantized))

    def saved(self, quantized: Quantized, others: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """Return what the function's own rule keeps, and what makes the rest of that with the copy."""
        rule = self._rule
        arrays = self._arrays(rule.forward, others, quantized)
        operands = dict(zip(rule.again.inputs, arrays.values(), strict=False))
        return rule.forward.run(arrays, outputs=rule.kept), [operands[v] for v in rule.read]

    def of_copy(self, saved: tuple[list[Array], list[Array]], y: Array | None, cotangents: Sequence[Any]) -> Array:
        """The cotangent of the copy. y: the norm's result; None if the rule does not read it for this."""
        return self._pulled_back(saved, y, cotangents, [self.place])[0]

    def of_others(self, saved: tuple[list[Array], list[Array]], y: Array | None, cotangents: Sequence[Any]) -> Any:
        """The cotangents of the others. y: the norm's result; None if the rule does not read it."""
        places = [i for i in range(len(self.node.inputs)) if i != self.place]
        return tuple(self._pulled_back(saved, y, cotangents, places))

    def _pulled_back(self, saved: Any, y: Array | None, cotangents: Sequence[Any], places: Sequence[int]) -> list[Any]:
        rule, (kept, read) = self._rule, saved
        arrays = dict(zip(rule.read, read, strict=True))
        again: list[Any] = [None] * len(rule.made)
        if y is not None:
            for node in self.chain:
                (y,) = bound(node.equation, [y])
            again = rule.again.run(arrays | {rule.again.inputs[self.place]: y}, outputs=rule.made)
        of_rule = dict(zip(rule.kept, kept, strict=True)) | dict(zip(rule.makes, again, strict=True))
        given = [of_rule[v] for v in rule.forward.outputs] + [d for d in cotangents if not _is_float0(d)]
        inputs = dict(zip(rule.backward.inputs, given, strict=True))
        outputs = [rule.of_operands[i] for i in places]
        made = iter(rule.backward.run(inputs, outputs=[v for v in outputs if v is not None]))
        return [None if v is None else next(made) for v in outputs]

    @property
    def reads_copy(self) -> bool:
        """True where backward reads the copy."""
        return bool(self._rule.made)

    @property
    def reads_copy_first(self) -> bool:
        """True where the copy's own cotangent is made of it."""
        rule = self._rule
        of_copy = rule.of_operands[self.place]
        read = [] if of_copy is None else rule.backward.needed([of_copy])[1]
        makes = {*rule.makes}
        return any(v in read for v, of in zip(rule.backward.inputs, rule.forward.outputs, strict=False) if of in makes)

    def _arrays(self, graph: Graph, others: Sequence[Any], quantized: Quantized) -> dict[Value, Any]:
        operands = [*others[: self.place], None, *others[self.place :]]
        return dict(zip(graph.inputs, [*operands, quantized], strict=True))

    @functools.cached_property
    def _rule(self) -> _Rule:
        avals = [v.aval for v in self.node.inputs]
        trees: list[Any] = []

        def kept(*operands: Any) -> list[Any]:
            _, pull = jax.vjp(lambda *a: tuple(bound(self.node.equation, a)), *operands)
            leaves, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return leaves

        def pulled(leaves: list[Any], cotangents: list[Any]) -> list[Any]:
            given = iter(cotangents)
            of_all = [np.zeros(v.shape, v.dtype) if _is_float0(v) else next(given) for v in cotangents]
            of_operands = jax.tree.unflatten(trees[0], leaves)(tuple(of_all))
            return [d for d, v in zip(of_operands, tangents, strict=True) if not _is_float0(v)]

        program = jax.make_jaxpr(kept)(*avals)
        tangents, cotangents = ([v.aval.to_tangent_aval() for v in of] for of in (self.node.inputs, self.node.outputs))
        given = [v for v in cotangents if not _is_float0(v)]
        backward = Graph(jax.make_jaxpr(pulled)(list(program.out_avals), given))
        forward, _ = _cut(program, self.place, self._constants)
        again = Graph(program)
        of_rule = zip(forward.outputs, again.outputs, strict=True)
        made = [(v, of) for v, of in of_rule if forward.inputs[self.place] in forward.needed([v])[1]]
        makes = [v for v, _ in made]
        read = [v for v in again.needed([of for _, of in made])[1] if v is not again.inputs[self.place]]
        of_operands = iter(backward.outputs)
        return _Rule(
            forward,
            kept=[v for v in forward.outputs if v not in makes],
            makes=makes,
            again=again,
            made=[of for _, of in made],
            read=read,
            backward=backward,
            of_operands=[None if _is_float0(v) else next(of_operands) for v in tangents],
        )


def _is_float0(aval: Any) -> bool:
    return aval.dtype == jax.dtypes.float0


class _Rule(NamedTuple):
    """The rule of a function's derivative, as programs.

    forward: makes what the rule keeps, of the operands and a `Quantized`. kept: those of its results that it makes
      without the copy. makes: the others, which `again` makes of the operands as `made`, the copy and `read`.
    backward: makes cotangents of what the rule keeps and those of the results. of_operands: each operand's; or None.
    """

    forward: Graph
    kept: list[Value]
    makes: list[Value]
    again: Graph
    made: list[Value]
    read: list[Value]
    backward: Graph
    of_operands: list[Value | None]


def _cut(program: Any, place: int, constants: Constants) -> tuple[Graph, Quantisation | str | None]:
    """A program's graph in which a last, added input is a `Quantized`, and what it quantises the operand by."""
    graph = Graph(program)
    copy = graph.inputs[place]
    found = quantisation_of(graph, copy, constants)
    quantized = Value(copy.aval)
    graph.inputs.append(quantized)
    if isinstance(found, Quantisation):
        found.put_into(graph, quantized)
    return graph, found


def _readers_of(y: Value, constants: Constants) -> Iterator[Reader]:
    stack: list[tuple[Value, tuple[Node, ...]]] = [(y, ())]
    while stack:
        copy, chain = stack.pop()
        for node in copy.readers:
            if node.operation == "custom_vjp_call" and not node.equation.effects:
                yield Reader(node, node.inputs.index(copy), chain, constants)
            elif len(node.inputs) == 1 and len(node.outputs) == 1 and keeps_order(node):
                stack.append((node.output, (*chain, node)))


def _independent(graph: Graph, readers: Sequence[Reader]) -> list[list[Reader]]:
    """The readers in groups in which none reads another's results."""
    groups: list[list[Reader]] = []
    for reader in sorted(readers, key=lambda r: r.node.position):
        before = [v for r in groups[-1] for v in r.node.outputs] if groups else []
        if before and not any(graph.depends(v, before) for v in reader.others):
            groups[-1].append(reader)
        else:
            groups.append([reader])
    return groups


def _read(readers: Sequence[Reader], again: Callable[..., Array], quantized: Quantized, *arrays: Array) -> list[Array]:
    """The readers' results. arrays: what each reads beside the norm's result, then the arguments of `again`."""
    counts = [len(r.others) for r in readers]
    ends = list(itertools.accumulate(counts, initial=0))
    others = [arrays[a:b] for a, b in itertools.pairwise(ends)]
    carrier = jax.typeof(quantized.carrier)

    def results(quantized: Quantized, others: Sequence[Sequence[Array]]) -> list[Any]:
        return [r.results(quantized, of) for r, of in zip(readers, others, strict=True)]

    @jax.custom_vjp
    def read(quantized: Quantized, others: Sequence[Sequence[Array]], arguments: Sequence[Array]) -> list[Any]:
        del arguments
        return results(quantized, others)

    def forward(quantized: Quantized, others: Sequence[Sequence[Array]], arguments: Sequence[Array]) -> Any:
        saved = [r.saved(quantized, of) for r, of in zip(readers, others, strict=True)]
        return results(quantized, others), (saved, arguments if any(r.reads_copy for r in readers) else None)

    def backward(kept: Any, cotangents: list[Any]) -> Any:
        saved, arguments = kept
        of_each, y = [*zip(readers, saved, cotangents, strict=True)], None

        def of_y() -> Array:
            of_copies = [r.of_copy(s, y if r.reads_copy_first else None, d) for r, s, d in of_each]
            return functools.reduce(jnp.add, (d.reshape(carrier.shape).astype(carrier.dtype) for d in of_copies))

        # Fences: without them XLA might make y again at once, and hold it. In front of the cotangents one would keep
        # XLA from making them in one kernel with what quantises them.
        if any(r.reads_copy_first for r in readers):
            arguments, cotangents = lax.optimization_barrier((arguments, cotangents))
            y = again(*arguments)
            d = of_y()
        else:
            d = of_y()
            if arguments is not None:
                arguments, d = lax.optimization_barrier((arguments, d))
                y = again(*arguments)
        of_others = [r.of_others(s, y if r.reads_copy else None, d) for r, s, d in of_each]
        no: Any = None
        return Quantized(no, no, no, d), of_others, None

    read.defvjp(forward, backward)
    return [a for of in read(quantized, others, arrays[ends[-1] :]) for a in of]
