"""A program as a graph of equations, in which calls of operators take the place of what makes a value.

Plain jits are inlined, and of equal equations there is one, so that what is looked for is there once. Nothing is ever
taken out: what a replacement leaves without a reader is not run, and what someone else reads still is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

# Of these equal ones are merged: cheap, pure, and the same wherever they stand.
MERGED = {
    *("add", "sub", "mul", "div", "neg", "square", "sqrt", "rsqrt", "integer_pow", "pow", "exp", "logistic", "max"),
    *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "reduce_sum"),
}


class Value:
    """A value of a program. maker: the node that makes it; None for an argument or a constant."""

    __slots__ = ("aval", "constant", "maker", "readers")

    def __init__(self, aval: Any, maker: Node | None = None, constant: Any = None):
        self.aval, self.maker, self.constant = aval, maker, constant
        self.readers: list[Node] = []

    shape = property(lambda self: self.aval.shape)
    ndim = property(lambda self: len(self.aval.shape))
    size = property(lambda self: self.aval.size)
    dtype = property(lambda self: self.aval.dtype)

    @property
    def operation(self) -> str:
        """The name of the primitive that makes the value; "" for an argument or a constant."""
        return "" if self.maker is None else self.maker.operation

    @property
    def position(self) -> int:
        """The place of the value's maker in the program; -1 for an argument or a constant."""
        return -1 if self.maker is None else self.maker.position


class Node:
    """An equation, or a call that takes the place of equations.

    equation: None for a call. call: a function from the inputs' arrays to the outputs'. remark: what the call's maker
      wants to be known of it. position: the place in the program as it was written. before: of a node with effects the
      last one in front of it, behind which it has to stay. within: the equations of the inlined jits around it, the
      outermost first. hands_on: an input of a call that is the last of its results, too, which is no output: what runs
      behind the call reads it from there.
    """

    __slots__ = ("before", "call", "equation", "hands_on", "inputs", "outputs", "position", "remark", "within")

    def __init__(self, equation: Any, inputs: list[Value], position: int, within: tuple[Any, ...] = ()):
        self.equation, self.inputs, self.position, self.within = equation, inputs, position, within
        self.outputs: list[Value] = []
        self.before: Node | None = None
        self.call: Callable[..., Any] | None = None
        self.remark: Any = None
        self.hands_on: Value | None = None

    @property
    def operation(self) -> str:
        return "" if self.equation is None else self.equation.primitive.name

    @property
    def words(self) -> str:
        """The operation in words, as reasons name it."""
        return _WORDS.get(self.operation, f"{'an' if self.operation[:1] in 'aeiou' else 'a'} {self.operation}")

    @property
    def params(self) -> dict[str, Any]:
        return self.equation.params

    @property
    def output(self) -> Value:
        """The first of the outputs; of a node without any, such as a callback, a value that nobody reads."""
        return self.outputs[0] if self.outputs else Value(jax.ShapeDtypeStruct((), "bool"), self)


_WORDS = {"add": "an addition", "sub": "a subtraction", "mul": "a multiplication", "div": "a division"}
_WORDS |= {"max": "a maximum", "abs": "an absolute value", "select_n": "a selection by a value"}
_WORDS |= dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne"), "a comparison")
_WORDS |= dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "a function with derivatives of its own")


class Graph:
    """A program's values and nodes.

    nodes: the equations in the program's order. inputs, outputs: the values that are its arguments and results.
    """

    def __init__(self, program: ClosedJaxpr):
        self.nodes: list[Node] = []
        self.inputs = [Value(v.aval) for v in program.jaxpr.invars]
        self._numbers: dict[Any, Value] = {}
        self._known: dict[Any, Node] = {}
        self._replaced: dict[Value, Node] = {}
        self._last_effect: Node | None = None
        self._reads_ahead = False  # whether a call reads what the program makes behind what the call replaces
        self.outputs = self._added(program.jaxpr, program.consts, self.inputs)
        self._results = {*self.outputs}

    def _added(
        self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Value], within: tuple[Any, ...] = ()
    ) -> list[Value]:
        """Add the equations of a jaxpr, and return its results."""
        values = dict(zip(jaxpr.invars, inputs, strict=True))
        values |= {v: Value(v.aval, constant=c) for v, c in zip(jaxpr.constvars, constants, strict=True)}

        def read(v: Any) -> Value:
            return self._number(v) if isinstance(v, Literal) else values[v]

        for equation in jaxpr.eqns:
            operands = [read(v) for v in equation.invars]
            if is_plain_jit(equation):
                inner = equation.params["jaxpr"]
                results = self._added(inner.jaxpr, inner.consts, operands, (*within, equation))
            elif (steps := _multiplication(equation)) is not None:
                results = self._added(steps.jaxpr, steps.consts, operands, within)
                # Looked at as a multiplication, and run as it was written where nothing takes its place.
                self.replace(results, operands, lambda *arrays, equation=equation: bind(equation, arrays))
            else:
                results = self._node(equation, operands, within).outputs
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _number(self, literal: Any) -> Value:
        """The value of a literal; equal ones are one value."""
        key = (literal.aval, np.asarray(literal.val).tobytes()) if np.ndim(literal.val) == 0 else id(literal)
        return self._numbers.setdefault(key, Value(literal.aval, constant=literal.val))

    def _node(self, equation: Any, inputs: list[Value], within: tuple[Any, ...]) -> Node:
        key = None
        # Cotangents of casts out of eight bits are in eight bits: those of two are not those of one.
        is_of_eight = any(v.dtype.name.startswith("float8") for v in inputs if hasattr(v.aval, "dtype"))
        is_merged = equation.primitive.name in MERGED and not is_of_eight
        if is_merged and not equation.effects and equation.ctx.compute_type is None:
            key = (equation.primitive.name, *map(id, inputs), str(equation.params), equation.outvars[0].aval)
            if key in self._known:
                return self._known[key]
        node = Node(equation, inputs, len(self.nodes), within)
        node.outputs = [Value(v.aval, node) for v in equation.outvars]
        self.nodes.append(node)
        if equation.effects:
            node.before, self._last_effect = self._last_effect, node
        for v in dict.fromkeys(inputs):
            v.readers.append(node)
        if key is not None:
            self._known[key] = node
        return node

    def is_read_once(self, value: Value) -> bool:
        """True where one node reads the value, and it is no result of the program."""
        return len(value.readers) == 1 and value not in self._results

    def is_result(self, value: Value) -> bool:
        return value in self._results

    def is_read_beside(self, value: Value, other: Value) -> bool:
        """True where a reader of the value is none of the equations that make the other of it; or it is a result."""
        own, stack = set(), [other]
        while stack:
            v = stack.pop()
            if v is not value and v.maker is not None and v.maker not in own:
                own.add(v.maker)
                stack += v.maker.inputs
        return value in self._results or any(node not in own for node in value.readers)

    def maker(self, value: Value) -> Node | None:
        """The node that makes the value as the program stands now."""
        return self._replaced.get(value, value.maker)

    def replace(
        self,
        values: Sequence[Value],
        inputs: Sequence[Value],
        call: Callable[..., Any],
        remark: Any = None,
        hands_on: Value | None = None,
    ) -> None:
        """Have the values be the results of `call` of the inputs' arrays from now on. hands_on: as of `Node`."""
        node = Node(None, list(inputs), -1)
        node.outputs, node.call, node.remark, node.hands_on = list(values), call, remark, hands_on
        self._replaced |= dict.fromkeys(values, node)
        self._reads_ahead |= max(v.position for v in inputs) > min(v.position for v in values)

    def depends(self, value: Value, others: Sequence[Value]) -> bool:
        """True where the value, or an effect in front of it, needs any of the others as the program stands now."""
        first = -1 if self._reads_ahead else min(other.position for other in others)
        seen, stack = set(), [value]
        while stack:
            v = stack.pop()
            if v in others:
                return True
            node = self.maker(v)
            if node is None or node in seen or (node.equation is not None and node.position < first):
                continue
            while node is not None and node not in seen:
                seen.add(node)
                stack += node.inputs
                node = node.before
        return False

    def run(self, arrays: Mapping[Value, Any], results_of: Callable[[Node, list[Any]], Sequence[Any]]) -> list[Any]:
        """The program's results.

        arrays: those of its inputs. results_of: a function from a node and its operands to the node's results.
        """
        values = {**arrays}

        def read(v: Value) -> Any:
            return v.constant if v.constant is not None else values[v]

        for node in self.schedule():
            results = results_of(node, [read(v) for v in node.inputs])
            if node.hands_on is not None:
                *results, values[node.hands_on] = results
            for v, a in zip(node.outputs, results, strict=True):
                values.setdefault(v, a)
        return [read(v) for v in self.outputs]

    def schedule(self) -> list[Node]:
        """The nodes that the results and the effects need, each behind what it reads, else in the program's order.

        A call may read what is made later than what it replaces, such as a parameter.
        """
        needed = {n for n in self.nodes if n.equation.effects}
        stack = [*self.outputs, *(v for n in needed for v in n.inputs)]
        while stack:
            node = self.maker(stack.pop())
            if node is not None and node not in needed:
                needed.add(node)
                stack += node.inputs
        order: dict[Node, None] = {}
        for written in self.nodes:
            for node in (written, *(self._replaced[v] for v in written.outputs if v in self._replaced)):
                if node in needed:
                    self._schedule(node, order)
        return list(order)

    def _schedule(self, first: Node, order: dict[Node, None]) -> None:
        """Append a node to the order, behind what it reads that is not there yet."""
        stack, entered = [first], set()
        while stack:
            node = stack[-1]
            read = [node.before, *map(self.maker, node.inputs)]
            missing = [m for m in read if m is not None and m not in order]
            if node in order or not missing:
                order.setdefault(node)
                stack.pop()
            else:
                assert node not in entered, "the rewritten program has a circle"
                entered.add(node)
                stack += missing


def _multiplication(equation: Any) -> ClosedJaxpr | None:
    """A product without a sum, of an array with one that has no other axes than it, as a multiplication; else None.

    So is a scale in `einsum("...k,k->...k", y, scale)`.
    """
    if equation.primitive.name != "dot_general":
        return None
    (contracted, _), batch = equation.params["dimension_numbers"]
    avals = [v.aval for v in equation.invars]
    small = next((i for i in (1, 0) if len(batch[i]) == avals[i].ndim), None)
    if contracted or small is None or not all(jnp.issubdtype(a.dtype, jnp.floating) for a in avals):
        return None
    (result,) = (v.aval for v in equation.outvars)
    axes = batch[1 - small]  # those of the other array along which the small one lies

    def multiply(*arrays: Any) -> Any:
        full, factor = (lax.convert_element_type(arrays[i], result.dtype) for i in (1 - small, small))
        ascending = [i for _, i in sorted(zip(axes, batch[small], strict=True))]
        factor = lax.broadcast_in_dim(lax.transpose(factor, ascending), full.shape, sorted(axes))
        return lax.transpose(full * factor, [*axes, *(a for a in range(full.ndim) if a not in axes)])

    steps = jax.make_jaxpr(multiply)(*avals)
    eqns = [e.replace(source_info=equation.source_info, ctx=equation.ctx) for e in steps.jaxpr.eqns]
    return ClosedJaxpr(steps.jaxpr.replace(eqns=eqns), steps.consts)


def is_plain_jit(equation: Any) -> bool:
    """True for a jit that can be inlined: it says nothing of shardings, layouts, donation or the compiler."""
    if equation.primitive.name not in ("jit", "pjit"):
        return False
    params = equation.params
    settings = [
        s for of in ("in_shardings", "out_shardings", "in_layouts", "out_layouts") for s in params.get(of) or ()
    ]
    return (
        all(s is None or "Unspecified" in type(s).__name__ for s in settings)
        and not any(params["donated_invars"])
        and not params.get("compiler_options_kvs")
    )


def bind(equation: Any, operands: Sequence[Any], params: dict[str, Any] | None = None) -> Sequence[Any]:
    """The results of an equation. params: its own by default."""
    primitive = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params if params is None else params))
    return results if primitive.multiple_results else [results]
