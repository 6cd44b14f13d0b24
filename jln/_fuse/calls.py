"""Calls of the public operators, in the place of what was found in a program."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jln import _operators
from jln._fuse.certificate import Constants
from jln._fuse.eight_bits import EightBits, eight_bits_of, made_again
from jln._fuse.graph import Graph, Node, Value
from jln._fuse.junctions import Addition, Junction, addition_of, junction_of
from jln._fuse.linears import Linear, keeping_nothing_of_y, linears_of, products_of
from jln._fuse.norms import Miss, Norm, norms_of
from jln._fuse.regions import Parameter, peeled, plus
from jln._junction.linears.tiles import FUSED_FEATURES
from jln._operators.eight_bits import Made, Quantized

OPERATORS = {name: getattr(_operators, name) for name in _operators.__all__}


class Options(NamedTuple):
    """Options of `fuse`, and where the program is.

    is_checkpointed: whether it is the body of a `jax.checkpoint`, of which backward makes again what is not kept.
    keeps_products: whether that keeps products. remat: whether that keeps them alone, so that Linears' operators make
      again what is normalised.
    """

    linears: bool = False
    implementation: str | None = None
    forward_mode: bool = False
    is_checkpointed: bool = False
    keeps_products: bool = False
    remat: bool = False


class Finding(NamedTuple):
    """A norm of a program: the operator that runs in its place, or why it is left as it is.

    operator: its name; None where the norm is left. operands: the names of the arrays that it is given. node: an
      equation of the norm's, which knows its place in the code. is_chosen: False where nothing was certified.
    """

    operator: str | None
    operands: tuple[str, ...]
    why: str
    node: Node
    x: Value
    is_chosen: bool = True


# Readers that XLA makes one kernel of with what they read.
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "neg", "max", "min", "pow", "integer_pow", "square", "sqrt", "rsqrt", "exp", "log"),
    *("tanh", "logistic", "erf", "sin", "cos", "abs", "sign", "select_n", "slice", "split", "concatenate", "pad"),
    *("broadcast_in_dim", "squeeze", "expand_dims", "reduce_sum", "reduce_max", "stop_gradient"),
}
# An RMSNorm that no product reads is better left to XLA, which makes one kernel of it and what is behind: 8192 x 4096
# with a sum in front and a square behind move 472 MB, with an operator 814. A LayerNorm's operator is better all the
# same, 823 MB for 1414 (`benchmarks/fuse_choices.py`). So it is with norms of queries and keys in front of a rotation:
# with operators there two blocks of a Llama would move 13.43 GB for 13.34, of Gemma 3 12.63 for 12.54.
_IS_READ_BY_NO_PRODUCT = "an RMSNorm that no product reads XLA makes better, with what is behind"
# In a checkpoint XLA makes an RMSNorm again inside of what reads it, where a kernel reads and writes. So operators are
# better where one hands on x to what else reads it, or has a sum; and if products are kept, with Linears behind whose
# backward kernel makes the norm again. Four scanned blocks of a Llama, [8, 2048, 2048], move 59.39 GB if nothing is
# kept, with operators 58.64, and if products are kept 64.39 and 63.31. Of a GPT, with LayerNorms, they move 50.17 and
# 45.96, and 56.38 and 51.00 (`benchmarks/fuse_choices.py`).
_IS_MADE_AGAIN = "in this jax.checkpoint XLA makes an RMSNorm better, inside of what reads it"


class _Operand(NamedTuple):
    """An array of the program as an operator takes it: reshaped to `shape`, or with one of its axes in front."""

    value: Value
    shape: tuple[int, ...] | None = None
    axis_in_front: int = 0

    def of(self, array: Any) -> Any:
        if self.axis_in_front:
            array = jnp.moveaxis(array, self.axis_in_front, 0)
        return array if self.shape is None or array.shape == self.shape else array.reshape(self.shape)


class _Call:
    """A call of an operator, from the values that it reads to those that it makes."""

    def __init__(self, name: str, **options: Any):
        self.name, self.options = name, options
        self._operands: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        operands = {name: a if _is_several(a) else (a,) for name, a in self._operands.items()}
        return tuple(name for name, several in operands.items() if any(a is not None for a in several))

    def give(self, **operands: Any) -> None:
        """Add operands: an `_Operand`, a number, None, or a tuple of these."""
        self._operands |= operands

    def inputs(self) -> list[Value]:
        return [a.value for a in self._leaves()]

    def _leaves(self) -> list[_Operand]:
        flat = [b for a in self._operands.values() for b in (a if _is_several(a) else (a,))]
        return [a for a in flat if isinstance(a, _Operand)]

    def __call__(self, *arrays: Any) -> Any:
        return OPERATORS[self.name](**self._given(arrays), **self.options)

    def again(self, made: Made, *arrays: Any) -> Any:
        """The norm's result, made again in backward: of the kept statistics, where it is over the last axis alone."""
        if self.options["axis"] == (-1,):
            return made_again(made, **self._given(arrays), **self.options)
        return self(*arrays)

    def _given(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """The operator's arguments, of the inputs' arrays."""
        ready = {id(a): a.of(array) for a, array in zip(self._leaves(), arrays, strict=True)}

        def read(a: Any) -> Any:
            return ready[id(a)] if isinstance(a, _Operand) else a

        return {n: tuple(map(read, a)) if _is_several(a) else read(a) for n, a in self._operands.items()}


def _is_several(a: Any) -> bool:
    return type(a) is tuple


def rewrite(graph: Graph, options: Options) -> list[Finding]:
    """Put calls of operators into the graph, and say what was found."""
    constants = Constants()
    norms, misses = norms_of(graph, constants)
    rewriting = _Rewriting(graph, norms, options, constants)
    return [*rewriting.findings(), *map(_missed, misses)]


def _missed(miss: Miss) -> Finding:
    return Finding(None, (), miss.why, miss.node, miss.node.inputs[0], is_chosen=False)


class _Rewriting:
    def __init__(self, graph: Graph, norms: Sequence[Norm], options: Options, constants: Constants):
        self.graph, self.options, self.constants = graph, options, constants
        self.in_front: set[Value] = set()
        self.junctions: dict[Value, Junction] = {}  # by their norm's y
        by_result = {n.y: n for n in norms}
        runs = [n for n in norms if n.centres or not options.is_checkpointed]
        additions = [addition_of(graph, norm, constants) for norm in runs]
        behind = {a.y for a in additions if a is not None}  # sums that are a part of the norm in front of them
        totals: set[Value] = set()
        for norm in norms:
            junction = junction_of(graph, norm, by_result, constants)
            if junction is None or junction.total in totals or self._reads_total(norm, junction):
                continue
            if junction.in_front is not None or junction.total not in behind:
                totals.add(junction.total)
                self.junctions[norm.y] = junction
        self.in_front = {j.in_front.y for j in self.junctions.values() if j.in_front is not None}
        self.eight_bits: dict[Value, EightBits] = {}
        self.why_not_in_eight_bits: dict[Value, str] = {}
        taken: set[Node] = set()  # functions that read another norm in eight bits, too
        may_be_read = not options.linears and not options.is_checkpointed
        for norm in () if options.forward_mode else norms:
            found = eight_bits_of(graph, norm, constants, may_be_read)
            functions = {r.node for r in found.readers if r.node is not None} if isinstance(found, EightBits) else set()
            if isinstance(found, EightBits) and not taken & functions:
                self.eight_bits[norm.y] = found
                taken |= functions
            elif isinstance(found, str):
                self.why_not_in_eight_bits[norm.y] = found
        self.norms = [n for n in norms if n.y not in self.in_front and self._why_left(n) is None]
        self.left = [n for n in norms if n.y not in self.in_front and self._why_left(n) is not None]

    def _why_left(self, norm: Norm) -> str | None:
        """The reason why a norm is better left to XLA, which the whole program tells; else None."""
        options, junction = self.options, self.junctions.get(norm.y)
        is_in_front = junction is not None and junction.in_front is not None
        if norm.centres or norm.z is not None or is_in_front or norm.y in self.eight_bits:
            return None
        if options.is_checkpointed:
            if options.keeps_products:
                is_better = options.remat and bool(self._linears(norm, junction, None)[0])
            else:
                is_better = junction is not None or self._hands_on(norm)
            if not is_better:
                return _IS_MADE_AGAIN
        if self.graph.is_result(norm.y) or self._is_read_by_a_product(norm.y):
            return None
        if junction is None and addition_of(self.graph, norm, self.constants) is not None:
            return None
        return _IS_READ_BY_NO_PRODUCT

    def _hands_on(self, norm: Norm) -> bool:
        """True where a norm without a sum hands on x, for those that read it behind: in a checkpoint's body."""
        is_alone = self.junctions.get(norm.y) is None and addition_of(self.graph, norm, self.constants) is None
        can = self.options.is_checkpointed and norm.z is None and norm.x.constant is None and is_alone
        return can and self.graph.is_read_beside(norm.x, norm.y)

    def _is_read_by_a_product(self, y: Value) -> bool:
        """True where a product reads the value, its copy or its reshape, or an equation of which nothing is known."""
        for node in y.readers:
            if node.operation in ("convert_element_type", "reshape", "transpose"):
                if self.graph.is_result(node.output) or self._is_read_by_a_product(node.output):
                    return True
            elif node.operation not in _ELEMENTWISE:
                return True
        return False

    def _reads_total(self, norm: Norm, junction: Junction) -> bool:
        """True where a parameter of the norm is made of the sum itself."""
        parameters = [p.source for p in (norm.scale, norm.offset, junction.x_bias) if p is not None]
        parameters += [junction.gate.source] if isinstance(junction.gate, Parameter) else []
        return any(self.graph.depends(p, [junction.total]) for p in parameters)

    def findings(self) -> list[Finding]:
        findings = [finding for norm in self.norms for finding in self._replaced(norm)]
        left = [(norm, self._remark(norm, self._why_left(norm) or ""), norm.y.maker) for norm in self.left]
        return findings + [Finding(None, (), why, node, norm.x) for norm, why, node in left if node is not None]

    def _remark(self, norm: Norm, why: str) -> str:
        """The remark, and why the norm's kernel makes no eight bits, where something near does."""
        why_not = self.why_not_in_eight_bits.get(norm.y)
        return "; ".join(filter(None, (why, why_not and f"not in eight bits: {why_not}")))

    def _replaced(self, norm: Norm) -> list[Finding]:
        junction = self.junctions.get(norm.y)
        findings = []
        if junction is not None and self._reads_total(norm, junction):  # since other calls have taken their places
            findings = [] if junction.in_front is None else self._replaced(junction.in_front)
            junction = None
        addition = None if junction is not None else addition_of(self.graph, norm, self.constants)
        linears, why = self._linears(norm, junction, addition)
        if why and addition is None and self._keeps_nothing_for_products(norm):
            why += ": the Linears behind it keep what the norm read"
        hands_on = junction is None and self._hands_on(norm)
        call = self._call(norm, junction, addition, bool(linears), hands_on)
        made = self._quantised(norm, junction, call)
        results = [norm.y] if addition is None else [addition.y]
        if made is not None:
            results = [made, norm.y] if self.eight_bits[norm.y].is_read else [made]
        if linears:
            kernels = tuple(_Operand(p.kernel, axis_in_front=p.axis) for p in linears)
            biases = tuple(None if p.bias is None else _Operand(p.bias.source, p.bias.shape) for p in linears)
            call.give(kernel=kernels, bias=biases)
            results = [p.y for p in linears]
        if junction is not None:
            results.append(junction.total)
        finish = functools.partial(_results, call, norm, junction, linears, hands_on)
        node = norm.y.maker
        assert node is not None
        finding = Finding(call.name, call.names, self._remark(norm, why), node, norm.x)
        self.graph.replace(results, call.inputs(), finish, finding, norm.x if hands_on else None)
        return [*findings, finding]

    def _quantised(self, norm: Norm, junction: Junction | None, call: _Call) -> Value | None:
        """The norm's result in eight bits, which the call is to make, and its readers are to read; None of no such."""
        found = self.eight_bits.get(norm.y)
        if found is None or any(v.dtype == jnp.float64 for v in call.inputs()):
            return None
        outputs = [norm.x, norm.y, *(v for r in found.readers for v in r.outputs)]
        outputs += [] if junction is None else [junction.total]
        if any(self.graph.depends(v, outputs) for v in found.inputs):  # since other calls have taken their places, too
            return None
        made = Value(norm.y.aval, norm.y.maker)  # a `Made` in the place of an array
        if found.is_read:
            found.put_into(self.graph, made, lambda _, y: y, [norm.y])
        else:
            again = self._call(norm, None, None, has_linears=False)
            found.put_into(self.graph, made, again.again, again.inputs())
            del call.options["dtype"]
        if found.inputs:
            argument = Value(found.inputs[0].aval)  # what `quantize=` takes, in the place of an array
            self.graph.replace([argument], found.inputs, lambda *arrays: [found.quantize(*arrays)])
            call.give(quantize=_Operand(argument))
        else:
            call.give(quantize=found.quantize())
        return made

    def _keeps_nothing_for_products(self, norm: Norm) -> bool:
        """Have the products of a norm that is kept make it again in backward, and say whether they do."""
        options = self.options
        if options.is_checkpointed or options.forward_mode or norm.y in self.eight_bits:
            return False
        if not (products := products_of(self.graph, norm.y)):
            return False
        again = self._call(norm, None, None, has_linears=False)
        inputs = [norm.y, *(p.other for p in products), *again.inputs()]
        self.graph.replace([p.node.output for p in products], inputs, keeping_nothing_of_y(products, again))
        return True

    def _linears(self, norm: Norm, junction: Junction | None, addition: Addition | None) -> tuple[list[Linear], str]:
        """The Linears that become a part of the norm's operator, and why there are none."""
        remat = self.options.remat and (junction is None or junction.in_front is None)
        if not (self.options.linears or remat) or norm.y in self.eight_bits:
            return [], ""
        if norm.z is not None or addition is not None:
            return [], "its operator has no Linears"
        linears = linears_of(self.graph, norm, self.constants)
        if isinstance(linears, str):
            return [], linears
        results = [norm.y] + ([junction.total] if junction is not None else [])
        parameters = [p.kernel for p in linears] + [p.bias.source for p in linears if p.bias is not None]
        if any(self.graph.depends(v, results) for v in parameters):
            return [], "a Linear's kernel is made of its result"
        features = sum(math.prod(p.features) for p in linears)
        if not self.options.linears and features <= FUSED_FEATURES.get(linears[0].y.dtype.name, (0,))[0]:
            return [], "few features are one kernel's, which the jax.checkpoint would not know as a product"
        return linears, ""

    def _call(
        self,
        norm: Norm,
        junction: Junction | None,
        addition: Addition | None,
        has_linears: bool,
        hands_on: bool = False,
    ) -> _Call:
        kind = "layer_norm" if norm.centres else "rms_norm"
        options: dict[str, Any] = {"epsilon": norm.epsilon}
        if self.options.implementation is not None:
            options["implementation"] = self.options.implementation
        if self.options.forward_mode:
            options["forward_mode"] = True
        in_front = None if junction is None else junction.in_front
        if has_linears and self.options.remat and in_front is None:
            options["remat"] = True
        if not has_linears:
            options |= {"axis": tuple(a - norm.x.ndim for a in norm.features), "dtype": norm.y.dtype}
        scales = {"scale": norm.scale}
        if in_front is not None:
            scales = {"x_scale": in_front.scale, "scale": norm.scale}
        around_zero = {n: self._around_zero(p, norm) for n, p in scales.items() if p is not None}
        if around_zero and all(p is not None for p in around_zero.values()):
            options["zero_centered_scale"] = True
            scales |= around_zero
        scale_operands = {n: self._parameter(p, norm) for n, p in scales.items()}
        offset = {"offset": self._parameter(norm.offset, norm)} if norm.centres else {}
        if junction is not None:
            name = f"{kind}_add_{kind}" if in_front is not None else f"add_{kind}"
            call = _Call(name + ("_linear" if has_linears else ""), **options)
            call.give(x=_Operand(junction.x), residual=_Operand(junction.residual), **scale_operands, **offset)
            x_bias = self._parameter(junction.x_bias, norm)
            if in_front is not None and norm.centres:
                call.give(x_offset=x_bias)
            elif x_bias is not None:
                call.give(x_bias=x_bias)
            gate = junction.gate
            if gate is not None:
                call.give(gate=self._gate(gate, junction.total, norm) if isinstance(gate, Parameter) else gate)
            return call
        if addition is not None:
            call = _Call(f"{kind}_add", **(options | {"dtype": addition.y.dtype}))
            call.give(x=_Operand(norm.x), residual=_Operand(addition.residual), **scale_operands, **offset)
            return call
        name = kind + ("_linear" if has_linears else "_gated" if norm.z is not None else "")
        call = _Call(f"add_{name}" if hands_on else name, **options)
        call.give(x=_Operand(norm.x), **scale_operands, **offset, **({"residual": None} if hands_on else {}))
        if norm.z is not None:
            call.give(z=_Operand(norm.z))
        return call

    def _parameter(self, parameter: Parameter | None, norm: Norm) -> _Operand | None:
        """The parameter as operators take it: of the features alone, or of x's rank where it varies by row."""
        if parameter is None:
            return None
        shape = tuple(parameter.shape[a - norm.x.ndim] for a in norm.features)
        is_shared = parameter.size == math.prod(shape)
        return _Operand(parameter.source, shape if is_shared else parameter.shape)

    def _gate(self, gate: Parameter, total: Value, norm: Norm) -> _Operand:
        if gate.size == math.prod(total.shape[a - norm.x.ndim] for a in norm.features):
            return self._parameter(gate, norm)  # pyright: ignore[reportReturnType]
        return _Operand(gate.source, gate.shape)

    def _around_zero(self, scale: Parameter, norm: Norm) -> Parameter | None:
        """The array a of a scale 1 + a; None of another one."""
        source = plus(scale.source, 1.0, self.constants)
        if source is None:
            return None
        inner = peeled(source, self.constants)
        if inner.shape == scale.shape or len(inner.shape) == len(scale.shape):
            return inner
        in_front = scale.shape[: len(scale.shape) - len(inner.shape)]
        is_tail = scale.shape[len(in_front) :] == inner.shape and all(n == 1 for n in in_front)
        return Parameter(inner.source, (*in_front, *inner.shape)) if is_tail else None


def _results(
    call: _Call, norm: Norm, junction: Junction | None, linears: Sequence[Linear], hands_on: bool, *arrays: Any
) -> Sequence[Any]:
    """The arrays that take the place of what was found: y or the products, and the sum, or x that is handed on."""
    results = call(*arrays)
    ys, total = results if junction is not None or hands_on else (results, None)
    if linears:
        ys = [_turned(y, p) for y, p in zip(ys, linears, strict=True)]
    else:
        is_reshaped = junction is not None and norm.x is not junction.total
        ys = [ys] if not isinstance(ys, Made) else [ys, *(y for y in ys.ways if not isinstance(y, Quantized))]
        ys = [y.reshape(norm.y.shape) if is_reshaped and not isinstance(y, Made) else y for y in ys]
    return ys if total is None else [*ys, total]


def _turned(y: Any, linear: Linear) -> Any:
    """The product as the program has it: features in front where the kernel stands in front, rows in its own shape."""
    if linear.is_kernel_first:
        features = len(linear.features)
        y = jnp.moveaxis(y, range(y.ndim - features, y.ndim), range(features))
    return y if y.shape == linear.y.shape else y.reshape(linear.y.shape)
