"""The sums in front of norms and behind them: `total = residual + gate * (x + x_bias)`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jln._checks import promote
from jln._fuse.certificate import Constants
from jln._fuse.graph import Graph, Value
from jln._fuse.norms import Norm
from jln._fuse.readers import copies, hands_on, readers
from jln._fuse.regions import Parameter, peel, widens
from jln._junction.arguments import groups_of

Gate = Parameter | float | None


class Junction(NamedTuple):
    """A sum that a norm reads: `total = residual + gate * (x + x_bias)`, or `residual + gate * in_front(x)`.

    total: of the norm's x, which may be a reshape of it. in_front: the RMSNorm of the branch, whose y it is.
    """

    total: Value
    x: Value
    residual: Value
    x_bias: Parameter | None = None
    gate: Gate = None
    in_front: Norm | None = None


class _Branch(NamedTuple):
    """One of the two arrays that a sum adds up, as `gate * (x + x_bias)` or `gate * in_front(x)`."""

    x: Value
    x_bias: Parameter | None = None
    gate: Gate = None
    in_front: Norm | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """A number for how well it does as the branch: by what it has, then by how late it is made."""
        return (self.x_bias is not None) + (self.gate is not None) + 2 * (self.in_front is not None), self.x.position


def junction_of(graph: Graph, norm: Norm, norms: Mapping[Value, Norm | None], constants: Constants) -> Junction | None:
    """The sum that the norm reads; None where it reads none that an operator takes.

    norms: by their results, None for one that no operator takes.
    """
    if norm.z is not None:
        return None
    finder = _Finder(graph, norm, norms, constants)
    return max(finder.junctions(), key=lambda j: j[0], default=(None, None))[1]


class _Finder:
    def __init__(self, graph: Graph, norm: Norm, norms: Mapping[Value, Norm | None], constants: Constants):
        self.graph, self.norm, self.norms, self.constants = graph, norm, norms, constants

    def junctions(self) -> Iterator[tuple[tuple[int, int], Junction]]:
        total = self._total()
        outer = None
        added = self._added(total)
        if added is not None and self.graph.is_read_once(added[0]):  # (residual + x) + bias
            total_of_two, outer = added
        else:
            total_of_two = total
        for branch, other, sign in self._ways(total_of_two):
            term = self._branch(branch)
            if outer is not None and (term._replace(x=branch) != _Branch(branch) or sign < 0):
                continue
            if sign < 0:
                if isinstance(term.gate, Parameter) or term.in_front is not None:
                    term = _Branch(branch)
                term = term._replace(gate=-(term.gate if isinstance(term.gate, float) else 1.0))
            residual = self._narrow(other)
            if promote(term.x.dtype, residual.dtype) == total.dtype:
                yield term.rank, Junction(total, term.x, residual, outer or term.x_bias, term.gate, term.in_front)

    def _total(self) -> Value:
        """The value that the norm's x is: behind a copy, a constraint of shardings and a reshape of rows."""
        value = self.norm.x
        while value.maker is not None and (value.operation in ("reshape", "reshard") or copies(value.maker)):
            source = value.maker.inputs[0]
            # A constraint is of axes that are Auto. Of others the type tells how they are split.
            is_same = value.operation != "reshard" or source.aval == value.aval
            if not (self._keeps_features(source) if value.operation == "reshape" else is_same):
                break
            value = source
        return value

    def _keeps_features(self, source: Value) -> bool:
        """True where a reshape to x keeps x's features as the last axis, and no parameter varies by row."""
        x, features = self.norm.x, self.norm.features
        parameters = [p for p in (self.norm.scale, self.norm.offset) if p is not None]
        return (
            features == (x.ndim - 1,)
            and source.ndim > 0
            and source.shape[-1] == x.shape[-1]
            and all(p.size == x.shape[-1] for p in parameters)
        )

    def _is_full(self, value: Value, total: Value) -> bool:
        return value.shape == total.shape and peel(value, self.constants).size == total.size

    def _ways(self, total: Value) -> Iterator[tuple[Value, Value, int]]:
        """The ways to see a sum of two arrays as a branch, what it is added to, and the branch's sign."""
        if total.operation not in ("add", "add_any", "sub") or total.maker is None:
            return
        a, b = total.maker.inputs
        if self._is_full(a, total) and self._is_full(b, total):
            if total.operation != "sub":
                yield a, b, 1
            yield b, a, -1 if total.operation == "sub" else 1

    def _added(self, value: Value) -> tuple[Value, Parameter] | None:
        """A sum's array, and the bias that is added to it: the same in every row."""
        if value.operation != "add" or value.maker is None:
            return None
        for a, b in (value.maker.inputs, value.maker.inputs[::-1]):
            if a.shape == value.shape and self.constants.number(b) is None:
                bias = peel(b, self.constants)
                if self._is_of_features(bias, value) and bias.size < value.size:
                    return a, bias
        return None

    def _is_of_features(self, parameter: Parameter, of: Value) -> bool:
        h = of.ndim - len(self.norm.features)
        return parameter.shape == (1,) * h + of.shape[h:]

    def _branch(self, value: Value) -> _Branch:
        """The value without bias and gate, as long as nobody else reads what they are added to and multiplied with."""
        gate: Gate = None
        v = value
        while self.graph.is_read_once(v) and v.maker is not None:
            if v in self.norms:  # its scale is no gate and its offset no bias, or it would be lost
                other = self.norms[v]
                if other is None or not self._is_in_front(other):
                    return _Branch(v, None, gate)
                return _Branch(other.x, None, gate, other)
            if widens(v) or copies(v.maker):
                v = v.maker.inputs[0]
            elif (split := self._gated(v)) is not None and (gate is None or split[1] == 1.0):
                v, gate = split[0], gate if split[1] == 1.0 else split[1]
            elif (added := self._added(v)) is not None:
                x, bias = added
                return _Branch(self._narrow(x), bias, gate)
            else:
                break
        return _Branch(v, None, gate)

    def _narrow(self, value: Value) -> Value:
        """The array of which the value is a wider copy that nobody else reads."""
        while widens(value) and self.graph.is_read_once(value) and value.maker is not None:
            value = value.maker.inputs[0]
        return value

    def _gated(self, value: Value) -> tuple[Value, Parameter | float] | None:
        """A product's array and its gate: a number, or an array that is smaller than the product."""
        if value.operation != "mul" or value.maker is None:
            return None
        for a, b in (value.maker.inputs, value.maker.inputs[::-1]):
            if a.shape != value.shape:
                continue
            number = self.constants.number(b)
            if number is not None:
                if not np.isfinite(np.float32(number)):  # no operator takes it
                    continue
                return a, number
            gate = peel(b, self.constants)
            if gate.size < value.size and len(gate.shape) == value.ndim and self._is_taken(gate, value):
                return a, gate
        return None

    def _is_taken(self, gate: Parameter, of: Value) -> bool:
        """True of a gate that has all features, and of one for all rows of an example: that of a row is XLA's."""
        h = of.ndim - len(self.norm.features)
        sizes = (*of.shape[:h], math.prod(of.shape[h:])), h, [(*gate.shape[:h], 1)]
        return gate.shape[h:] == of.shape[h:] or (math.prod(gate.shape[h:]) == 1 and groups_of(*sizes) is not None)

    def _is_in_front(self, other: Norm) -> bool:
        """True of a norm that can be that of the branch, in one operator with this one."""
        norm = self.norm
        return (
            not (other.centres or norm.centres)
            and other.z is None
            and (other.offset, norm.offset) == (None, None)
            and other.epsilon == norm.epsilon
            and other.features == norm.features
            and other.x.shape == norm.x.shape
        )


class Addition(NamedTuple):
    """A sum that alone reads a norm's result: y + residual."""

    y: Value
    residual: Value


def addition_of(graph: Graph, norm: Norm, constants: Constants) -> Addition | None:
    """The sum behind a norm of the branch alone; None where there is none that an operator takes."""
    found = readers(graph, norm.y, lambda node: hands_on(node) or widens(node.output))
    y, node = found[0][:2] if len(found) == 1 else (norm.y, None)
    if norm.z is not None or node is None or node.operation != "add":
        return None
    residual = next((v for v in node.inputs if v is not y), y)
    is_full = residual.shape == y.shape and peel(residual, constants).size == y.size
    if residual is y or not is_full or promote(norm.x.dtype, residual.dtype) != node.output.dtype:
        return None
    return None if graph.depends(residual, [norm.y]) else Addition(node.output, residual)
