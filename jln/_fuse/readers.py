"""Functions in a program that read a norm's result in eight bits, and the rules of their derivatives, as programs.

Their own equations run, but for those that quantise. In backward their own rule runs, and where that reads the norm's
result it is given that again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.interpreters import ad

from jln._fuse.certificate import Constants
from jln._fuse.graph import Graph, Node, Value, bound
from jln._fuse.quantisations import Quantisation, quantisation_of
from jln._operators.eight_bits import Float8, MXFloat8, Quantized


class Scale(NamedTuple):
    """The scales of a quantisation.

    key: equal ones are one way of a kernel's. inputs: the values that a given scale is made of. quantize: the
      operator's argument, of their arrays. is_given: whether the scale is none of what is quantised.
    """

    key: tuple
    inputs: tuple[Value, ...]
    quantize: Callable[..., Float8 | MXFloat8]
    is_given: bool


Source = tuple[Any, tuple[Value, ...], Callable[..., Array]]  # an array's key, the values it is made of, and how


def _scale_of(found: Quantisation, source: Callable[[Value], Source]) -> Scale:
    dtype, scale, is_factor, of_largest = found.dtype, found.scale, found.is_factor, found.of_largest

    def divisor(scale: Any) -> Any:
        return 1 / scale if is_factor else scale

    def by_array(*arrays: Array) -> Float8:
        return Float8(divisor(of(*arrays).astype(jnp.float32).reshape(())), dtype)

    if scale is None:
        return Scale((dtype,), (), lambda: MXFloat8(dtype), is_given=False)
    if not isinstance(scale, Value):
        return Scale((dtype, is_factor, scale), (), lambda: Float8(divisor(scale), dtype), is_given=True)
    if of_largest is not None:
        by_largest = lambda amax: divisor(of_largest(amax).astype(jnp.float32).reshape(()))  # noqa: E731
        return Scale((dtype, found.structure), (), lambda: Float8(by_largest, dtype), is_given=False)
    key, inputs, of = source(scale)
    return Scale((dtype, is_factor, key), inputs, by_array, is_given=True)


class Reader:
    """A function in the program of a copy of a norm's result, of which it reads the eight bits.

    function: of arrays, with its derivative. program: its equations. inputs, outputs: the values that it is given and
      makes. place: of the copy among the inputs. chain: the equations that make the copy. closed_over: how many of the
      inputs come first that it closes over, and is no function of. node: of a `jax.custom_vjp` function.
    quantisation: as of `quantisation_of`; None where backward alone reads the copy. reads_more: whether it reads it in
      other bits.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Array]],
        program: Any,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        constants: Constants,
        place: int = 0,
        chain: Sequence[Node] = (),
        closed_over: int = 0,
        node: Node | None = None,
    ):
        self.inputs, self.outputs, self.place, self.chain, self.node = inputs, outputs, place, chain, node
        self._function, self._closed_over, self._constants = function, closed_over, constants
        self._graph, self.quantisation = _cut(program, place, constants)
        self.reads_more = self._graph.inputs[place] in self._graph.needed(self._graph.outputs)[1]

    @property
    def copy(self) -> Value:
        return self.inputs[self.place]

    @property
    def others(self) -> list[Value]:
        return [v for i, v in enumerate(self.inputs) if i != self.place]

    @property
    def position(self) -> int:
        return min(v.position for v in self.outputs)

    def scale(self) -> Scale:
        """The scales of the quantisation."""
        assert isinstance(self.quantisation, Quantisation)
        return _scale_of(self.quantisation, self._source)

    def _source(self, scale: Value) -> Source:
        """The scale as an array that is made of the function's other operands."""
        read = self._graph.needed([scale])[1]
        outer = dict(zip(self._graph.inputs, [*self.inputs, self.copy], strict=True))  # the last is the `Quantized`

        def of(*arrays: Array) -> Array:
            return self._graph.run(dict(zip(read, arrays, strict=True)), outputs=[scale])[0]

        inputs = tuple(outer[v] for v in read)
        return inputs[0] if read == [scale] else self, inputs, of

    def results(self, quantized: Quantized, others: Sequence[Array]) -> list[Array]:
        return self._graph.run(self._arrays(self._graph, None, others, quantized))

    def saving(self, quantized: Quantized, y: Array | None, others: Sequence[Array]) -> tuple[list[Array], _Saved]:
        """Return the results, and what backward reads: what the function's own rule keeps, and what makes the rest.

        y: the norm's result, where the rule reads it at once.
        """
        rule = self._rule
        arrays = self._arrays(rule.forward, None if y is None else self._copied(y), others, quantized)
        operands = dict(zip(rule.again.inputs, arrays.values(), strict=False))
        made = rule.forward.run(arrays, outputs=[*rule.results, *rule.kept])
        count = len(rule.results)
        return made[:count], (made[count:], [operands[v] for v in rule.read])

    def of_copy(self, saved: _Saved, y: Array | None, cotangents: Sequence[Any]) -> Array | None:
        """The cotangent of the copy. y: the norm's result; None if the rule does not read it for this.

        cotangents: of the results, None where zero.
        """
        return self._pulled_back(saved, y, cotangents, [self.place])[0]

    def of_others(self, saved: _Saved, y: Array | None, cotangents: Sequence[Any]) -> Any:
        """The cotangents of the others. y: the norm's result; None if the rule does not read it."""
        places = [i for i in range(len(self.inputs)) if i != self.place]
        return tuple(self._pulled_back(saved, y, cotangents, places))

    def _pulled_back(self, saved: _Saved, y: Array | None, cotangents: Sequence[Any], places: Sequence[int]) -> Any:
        rule, (kept, read) = self._rule, saved
        arrays = dict(zip(rule.read, read, strict=True))
        again: list[Any] = [None] * len(rule.made)
        if y is not None:
            again = rule.again.run(arrays | {rule.again.inputs[self.place]: self._copied(y)}, outputs=rule.made)
        of_rule = dict(zip(rule.kept, kept, strict=True)) | dict(zip(rule.makes, again, strict=True))
        backward, of_operands = rule.backward(tuple(d is None for d in cotangents))
        given = [of_rule[v] for v in rule.leaves] + [d for d in cotangents if d is not None]
        inputs = dict(zip(backward.inputs, given, strict=True))
        outputs = [of_operands[i] for i in places]
        made = iter(backward.run(inputs, outputs=[v for v in outputs if v is not None]))
        return [None if v is None else next(made) for v in outputs]

    def _copied(self, y: Array) -> Array:
        for node in self.chain:
            (y,) = bound(node.equation, [y])
        return y

    @property
    def reads_copy_at_once(self) -> bool:
        """True where the rule's own results are made of the copy."""
        rule = self._rule
        return rule.forward.inputs[self.place] in rule.forward.needed(rule.results)[1]

    @property
    def reads_copy(self) -> bool:
        """True where backward reads the copy."""
        return bool(self._rule.made)

    def reads_copy_first(self, cotangents: Sequence[Any]) -> bool:
        """True where the copy's own cotangent is made of it."""
        rule = self._rule
        backward, of_operands = rule.backward(tuple(d is None for d in cotangents))
        of_copy = of_operands[self.place]
        read = [] if of_copy is None else backward.needed([of_copy])[1]
        makes = {*rule.makes}
        return any(v in read for v, of in zip(backward.inputs, rule.leaves, strict=False) if of in makes)

    def _arrays(self, graph: Graph, copy: Any, others: Sequence[Any], quantized: Quantized) -> dict[Value, Any]:
        operands = [*others[: self.place], copy, *others[self.place :]]
        return dict(zip(graph.inputs, [*operands, quantized], strict=True))

    @functools.cached_property
    def _rule(self) -> _Rule:
        n = self._closed_over
        trees: list[Any] = []
        tangents, cotangents = ([v.aval.to_tangent_aval() for v in of] for of in (self.inputs[n:], self.outputs))

        def kept(*operands: Any) -> list[Any]:
            closed_over, operands = operands[:n], operands[n:]
            results, pull = jax.vjp(lambda *a: tuple(self._function(*closed_over, *a)), *operands)
            leaves, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return [*results, *leaves]

        @functools.cache
        def backward(is_zero: tuple[bool, ...]) -> tuple[Graph, list[Value | None]]:
            def pulled(leaves: list[Any], given: list[Any]) -> list[Any]:
                rest = iter(given)
                of_all = tuple(ad.Zero(v) if zero else next(rest) for v, zero in zip(cotangents, is_zero, strict=True))
                of_operands = jax.tree.unflatten(trees[0], leaves)(of_all)
                return [d for d, v in zip(of_operands, tangents, strict=True) if not is_float0(v)]

            given = [v for v, zero in zip(cotangents, is_zero, strict=True) if not zero]
            graph = Graph(jax.make_jaxpr(pulled)(list(program.out_avals[count:]), given))
            made = (None if self._constants.number(d) == 0 else d for d in graph.outputs)
            return graph, [None] * n + [None if is_float0(v) else next(made) for v in tangents]

        count = len(self.outputs)
        program = jax.make_jaxpr(kept)(*(v.aval for v in self.inputs))
        forward, _ = _cut(program, self.place, self._constants, self._is_like)
        again = Graph(program, with_functions=True)
        results, leaves = forward.outputs[:count], forward.outputs[count:]
        of_rule = zip(leaves, again.outputs[count:], strict=True)
        made = [(v, of) for v, of in of_rule if forward.inputs[self.place] in forward.needed([v])[1]]
        makes = [v for v, _ in made]
        read = [v for v in again.needed([of for _, of in made])[1] if v is not again.inputs[self.place]]
        return _Rule(
            forward,
            results=results,
            leaves=leaves,
            kept=[v for v in dict.fromkeys(leaves) if v not in makes],
            makes=makes,
            again=again,
            made=[of for _, of in made],
            read=read,
            backward=backward,
        )

    def _is_like(self, graph: Graph, found: Quantisation) -> bool:
        """True where the rule quantises as the function does, so that one kernel's eight bits are both."""
        own = self.quantisation
        if not isinstance(own, Quantisation) or (found.dtype, found.is_factor) != (own.dtype, own.is_factor):
            return False
        if own.of_largest is not None or found.of_largest is not None:
            return own.structure == found.structure
        if isinstance(own.scale, Value) and isinstance(found.scale, Value):
            return _structure(self._graph, own.scale) == _structure(graph, found.scale)
        return own.scale == found.scale


def _structure(graph: Graph, value: Value) -> tuple:
    """A key of how a value is made of a graph's inputs: equal ones are the same."""
    nodes = sorted(graph.needed([value])[0], key=lambda n: n.position)
    places: dict[Value, Any] = {v: ("input", i) for i, v in enumerate(graph.inputs)}
    places |= {v: (i, j) for i, n in enumerate(nodes) for j, v in enumerate(n.outputs)}

    def read(v: Value) -> Any:
        if v.constant is None:
            return places[v]
        return id(v.constant) if v.ndim or isinstance(v.constant, Tracer) else np.asarray(v.constant).tobytes()

    return tuple((n.operation, str(n.params), *map(read, n.inputs)) for n in nodes), read(value)


_Saved = tuple[list[Array], list[Array]]


def is_float0(aval: Any) -> bool:
    return aval.dtype == jax.dtypes.float0


class _Rule(NamedTuple):
    """The rule of a function's derivative, as programs.

    forward: makes the function's results and the leaves that the rule keeps, of the operands and a `Quantized`. kept:
      the leaves that it makes without the copy. makes: the others, which `again` makes of the operands as `made`, of
      the copy and `read`.
    backward: of which cotangents of the results are zero, the program that makes the operands' of the leaves and of the
      others, and each operand's in it; or None, for zero. From JAX 0.12 on a rule under a `vmap` must be told of zeros.
    """

    forward: Graph
    results: list[Value]
    leaves: list[Value]
    kept: list[Value]
    makes: list[Value]
    again: Graph
    made: list[Value]
    read: list[Value]
    backward: Callable[[tuple[bool, ...]], tuple[Graph, list[Value | None]]]


def _cut(
    program: Any, place: int, constants: Constants, takes: Callable[[Graph, Quantisation], bool] = lambda *_: True
) -> tuple[Graph, Quantisation | str | None]:
    """A program's graph in which a last, added input is a `Quantized`, and what it quantises the operand by.

    takes: whether the `Quantized` is that.
    """
    graph = Graph(program, with_functions=True)
    copy = graph.inputs[place]
    found = quantisation_of(graph, copy, constants)
    quantized = Value(copy.aval)
    graph.inputs.append(quantized)
    if isinstance(found, Quantisation) and takes(graph, found):
        found.put_into(graph, quantized)
    return graph, found
