"""The rewriting of a program: which norms operators take the place of, with what around them, and which are left."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jln._core.policies import keeps_products_alone, kept_by
from jln._fuse.calls import Options, call_of, results_of
from jln._fuse.certificate import Constants
from jln._fuse.graph import Graph, Node, Value, bind
from jln._fuse.junctions import Addition, Junction, addition_of, junction_of
from jln._fuse.linears import Linear, is_product, keeps_by_name, linears_of
from jln._fuse.norms import Miss, Norm, norms_of
from jln._fuse.readers import Reader, hands_on, readers, shapes, spreads
from jln._fuse.regions import Parameter, peel
from jln._junction.arguments import groups_of
from jln._junction.arrays import DY
from jln._junction.linears.tiles import FUSED_FEATURES


class Finding(NamedTuple):
    """A norm of a program: the operator that runs in its place, or why it is left as it is.

    operator: its name; None where the norm is left. operands: the arrays that it is given, in words. node: an
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
# with a sum in front and a square behind move 472 MB, with an operator 810. A LayerNorm's operator is better all the
# same, 823 MB for 1414 (`benchmarks/fuse_choices.py`). So it is in front of a rotation (two blocks of a Llama 13.34 GB,
# for 13.43), and of products in eight bits: with Flax's a Llama's move 19.8 and would 20.3, a GPT's 20.9, for 21.8.
_IS_READ_BY_NO_PRODUCT = "an RMSNorm that no product reads in its own dtype XLA makes better, with what is behind"
_IS_READ_FAR_FROM_A_PRODUCT = "{} stands between the norm and its product: an RMSNorm XLA makes better, with that"
# In a checkpoint XLA makes an RMSNorm again inside of what reads it, where a kernel reads and writes. So operators are
# better where one hands on x to what else reads it, or has a sum; and if products are kept, with Linears behind whose
# backward kernel makes the norm again. Four scanned blocks of a Llama, [8, 2048, 2048], move 59.39 GB if nothing is
# kept, with operators 57.56, and if products are kept 64.39 and 62.29; of a GPT 50.17 and 45.42, 56.38 and 50.54
# (`benchmarks/fuse_choices.py`). Of products that are kept and in eight bits a GPT may move more than as it is.
# A scan keeps what backward reads in arrays of all its turns, into which it is copied, and out of them. So there the
# Linears keep what the norm reads: without a checkpoint the blocks of a Llama move 80.06 GB, and with them 77.91, those
# of a GPT 71.68 and 69.52, and they hold less.
_IS_MADE_AGAIN = "in this jax.checkpoint XLA makes the norm better, inside of what reads it"
# Kernels take rows whose elements lie side by side: a ConvNeXt norm, channels first, moves 514 MB by the operator, and
# 457 as Flax writes it (`python benchmarks/report.py convnext-768`). With other parameters the operator is plain jnp.
_IS_OVER_OTHER_AXES = "a norm over other axes than the last XLA makes better"
_VARIES_ALONG_OTHER_AXES = "no kernel reads parameters along these axes, or for so few rows each"


def rewrite(graph: Graph, options: Options) -> list[Finding]:
    """Put calls of operators into the graph, and say what was found."""
    constants = Constants()
    norms, misses = norms_of(graph, constants)
    misses += [
        Miss(node, "it is in a function with derivatives of its own")
        for node in graph.nodes
        if node.operation in ("custom_vjp_call", "custom_jvp_call")
        and norms_of(Graph(node.params["call_jaxpr"]), constants)[0]
    ]
    left = [Finding(None, (), miss.why, miss.node, miss.node.inputs[0], is_chosen=False) for miss in misses]
    return [*_Rewriting(graph, norms, options, constants).findings(), *left]


def _without_kernels(norm: Norm, junction: Junction | None = None) -> str | None:
    """The reason why no kernel takes the norm, or with the junction the sum that it reads; None where one does."""
    if not norm.is_of_rows:
        return _IS_OVER_OTHER_AXES
    x = norm.x if junction is None else junction.total
    h = x.ndim - len(norm.features)
    parameters = _parameters(norm, junction)
    # In front of a norm that reads a reshape of the sum all rows share its own parameters.
    rows = [p.shape[:h] if len(p.shape) == x.ndim else (1,) * h for p in parameters]
    sizes = [(*of, math.prod(p.shape[-len(norm.features) :])) for of, p in zip(rows, parameters, strict=True)]
    is_taken = groups_of((*x.shape[:h], math.prod(norm.features)), h, sizes) is not None
    return None if is_taken else _VARIES_ALONG_OTHER_AXES


def _parameters(norm: Norm, junction: Junction | None) -> list[Parameter]:
    """The arrays of the norm and of the sum that it reads which are smaller than x."""
    parameters: list[Any] = [norm.scale, norm.offset]
    if junction is not None:
        parameters += [junction.x_bias, junction.gate, junction.in_front and junction.in_front.scale]
    return [p for p in parameters if isinstance(p, Parameter)]


def _is_read_by_a_product(graph: Graph, y: Value) -> bool:
    """True of a result, and where a product reads the value, its copy or its reshape, or what is not known."""
    found = readers(graph, y, _keeps_dtype)
    return any(
        node is None or not (node.operation in _ELEMENTWISE or _is_quantised(node.output) or _quantises(node))
        for value, node, _ in found
    )


def _keeps_dtype(node: Node) -> bool:
    """True of a node whose result has the elements of what it reads, and is not in eight bits or fewer."""
    return shapes(node) and not _is_quantised(node.output)


def _why_no_product(graph: Graph, y: Value, constants: Constants) -> str:
    """The reason why an RMSNorm that no product reads is left."""
    behind = readers(graph, y, lambda node: _keeps_dtype(node) or node.operation in _ELEMENTWISE)
    for _, node, between in behind:
        steps = [n for n in between if not shapes(n)]
        if node is not None and is_product(node) and steps:
            is_bias = steps[0].operation == "add" and any(peel(v, constants).size < y.size for v in steps[0].inputs)
            return _IS_READ_FAR_FROM_A_PRODUCT.format(steps[0].words + " of a bias" * is_bias)
    return _IS_READ_BY_NO_PRODUCT


def _is_read_in_eight_bits(graph: Graph, y: Value) -> bool:
    """True where functions read the value, scaled or reshaped, in eight bits, and no product in its own dtype."""
    found = readers(graph, y, lambda node: shapes(node) or node.operation in ("mul", "div", "broadcast_in_dim"))
    quantised = any(node is not None and _quantises(node) for value, node, _ in found)
    return quantised and not _is_read_by_a_product(graph, y)


def _quantises(node: Node) -> bool:
    """True of a function with its own derivative that has eight bits or fewer inside, as products in these are."""
    if node.operation != "custom_vjp_call":
        return False
    body = Graph(node.params["call_jaxpr"])
    return any(map(_is_quantised, [*body.inputs, *(v for n in body.nodes for v in n.outputs)]))


def _is_quantised(value: Value) -> bool:
    return str(getattr(value.aval, "dtype", "")).startswith(("float8", "float4", "int8", "int4"))


class _Rewriting:
    def __init__(self, graph: Graph, norms: Sequence[Norm], options: Options, constants: Constants):
        self.graph, self.options, self.constants = graph, options, constants
        # On several devices Linears may gather once more what they make again.
        self.is_kept_in_turns = options.is_scanned and not (options.is_checkpointed or any(map(spreads, graph.nodes)))
        self.keeps_products = options.is_checkpointed and kept_by(options.policy)["products"]
        self.keeps_products_alone = options.is_checkpointed and keeps_products_alone(options.policy)
        self.junctions: dict[Value, Junction] = {}  # by their norm's y
        by_kernels = [n for n in norms if _without_kernels(n) is None]
        by_result = {n.y: n if n in by_kernels else None for n in norms}
        runs = [n for n in by_kernels if n.centres or not self.keeps_products]
        additions = [addition_of(graph, norm, constants) for norm in runs]
        behind = {a.y for a in additions if a is not None}  # sums that are a part of the norm in front of them
        totals: set[Value] = set()
        for norm in by_kernels:
            junction = junction_of(graph, norm, by_result, constants)
            if junction is None or junction.total in totals or self._reads_total(norm, junction):
                continue
            if _without_kernels(norm, junction) is not None:
                continue
            if junction.in_front is not None or junction.total not in behind:
                totals.add(junction.total)
                self.junctions[norm.y] = junction
        whys = {n.y: self._why_left(n) for n in norms}
        in_front = {j.in_front.y for y, j in self.junctions.items() if j.in_front is not None and whys[y] is None}
        self.decided = [(n, whys[n.y]) for n in norms if n.y not in in_front]

    def _why_left(self, norm: Norm) -> str | None:
        """The reason why a norm is better left to XLA, which the whole program tells; else None."""
        options, junction = self.options, self.junctions.get(norm.y)
        is_in_front = junction is not None and junction.in_front is not None
        if why := _without_kernels(norm):
            return why
        if self.keeps_products and _is_read_in_eight_bits(self.graph, norm.y):
            return _IS_MADE_AGAIN
        if norm.centres or norm.z is not None or is_in_front:
            return None
        addition = addition_of(self.graph, norm, self.constants) if junction is None else None
        if options.is_checkpointed:
            if self.keeps_products or self._keeps_by_name(norm):
                is_better = bool(self._linears(norm, junction, None)[0])
            else:
                is_better = junction is not None or addition is not None or self._hands_on(norm)
            if not is_better:
                return _IS_MADE_AGAIN
        if _is_read_by_a_product(self.graph, norm.y):
            return None
        is_taken = addition is not None and not _is_read_in_eight_bits(self.graph, addition.y)
        return None if is_taken else _why_no_product(self.graph, norm.y, self.constants)

    def _hands_on(self, norm: Norm) -> bool:
        """True where a norm without a sum hands on x, for those that read it behind: in a checkpoint's body."""
        is_alone = self.junctions.get(norm.y) is None and addition_of(self.graph, norm, self.constants) is None
        can = self.options.is_checkpointed and norm.z is None and norm.x.constant is None and is_alone
        return can and self.graph.is_read_beside(norm.x, norm.y)

    def _reads_total(self, norm: Norm, junction: Junction) -> bool:
        """True where a parameter is made of the sum itself."""
        return any(self.graph.depends(p.source, [junction.total]) for p in _parameters(norm, junction))

    def findings(self) -> list[Finding]:
        taken = [finding for norm, why in self.decided if why is None for finding in self._replace(norm)]
        left = [(norm, why, norm.y.maker) for norm, why in self.decided if why is not None]
        return [*taken, *(Finding(None, (), why, maker, n.x) for n, why, maker in left if maker is not None)]

    def _replace(self, norm: Norm) -> list[Finding]:
        junction = self.junctions.get(norm.y)
        findings = []
        if junction is not None and self._reads_total(norm, junction):  # since other calls have taken their places
            findings = [] if junction.in_front is None else self._replace(junction.in_front)
            junction = None
        addition = None if junction is not None else addition_of(self.graph, norm, self.constants)
        linears, why = self._linears(norm, junction, addition)
        hands_on = junction is None and self._hands_on(norm)
        own = [] if linears or addition is not None or norm.z is not None else self._products(norm)
        how: Any = {"linears": linears, "remat": self._remakes(norm, junction), "hands_on": hands_on}
        call = call_of(norm, junction, addition, self.options, self.constants, **how, copies=1 + len(own))
        results = [p.y for p in linears] or [norm.y if addition is None else addition.y]
        for reader in own:
            copy = Value(norm.y.aval, norm.y.maker)
            results.append(copy)
            self._have_read(reader, copy)
        if junction is not None:
            results.append(junction.total)
        finish = functools.partial(results_of, call, norm, junction, linears)
        node = norm.y.maker
        assert node is not None
        finding = Finding(call.operator, call.words(), why, node, norm.x)
        self.graph.replace(results, call.inputs(), finish, finding, norm.x if hands_on else None)
        return [*findings, finding]

    def _products(self, norm: Norm) -> list[Reader]:
        """The products that are to read a copy of a norm's result of their own; what is left reads the result itself.

        So the backward kernel adds up what they pull back, which XLA would write and read once more.
        """
        if self.options.forward_mode:
            return []
        found = readers(self.graph, norm.y, hands_on)
        # With a constraint of its own each copy would be gathered; on several devices XLA adds up all the same.
        free = (r for r in found if not any(map(spreads, r.between)))
        products = [r for r in free if r.node and is_product(r.node) and self.graph.maker(r.node.output) is r.node]
        return products[: min(len(found), len(DY)) - 1]

    def _have_read(self, reader: Reader, copy: Value) -> None:
        """Have a product read a copy of what it reads, by the nodes between."""
        value, product, between = reader
        assert product is not None
        others = [v for v in product.inputs if v is not value]

        def multiply(array: Any, *others: Any) -> Sequence[Any]:
            for node in between:
                (array,) = bind(node.equation, [array])
            rest = iter(others)
            return bind(product.equation, [array if v is value else next(rest) for v in product.inputs])

        self.graph.replace(product.outputs, [copy, *others], multiply)

    def _linears(self, norm: Norm, junction: Junction | None, addition: Addition | None) -> tuple[list[Linear], str]:
        """The Linears that become a part of the norm's operator, and why there are none."""
        wanted = self.options.linears or self.is_kept_in_turns
        if not (wanted or self._remakes(norm, junction)):
            return [], ""
        if norm.z is not None or addition is not None:
            return [], "its operator has no Linears"
        biased = {j.x for j in self.junctions.values() if j.x_bias is not None}
        linears = linears_of(self.graph, norm, self.constants, biased)
        if isinstance(linears, str):
            return [], linears
        results = [norm.y] + ([junction.total] if junction is not None else [])
        parameters = [p.kernel for p in linears] + [p.bias.source for p in linears if p.bias is not None]
        if any(self.graph.depends(v, results) for v in parameters):
            return [], "a Linear's kernel is made of its result"
        is_spread = any(p.constraint is not None and spreads(p.constraint) for p in linears)
        if is_spread and not self._remakes(norm, junction):
            return [], "several devices would gather its result once more"
        if wanted:
            return linears, ""
        features = sum(math.prod(p.features) for p in linears)
        if self.keeps_products_alone and features <= FUSED_FEATURES.get(linears[0].y.dtype.name, (0,))[0]:
            return [], "few features are one kernel's, which the jax.checkpoint would not know as a product"
        return linears, ""

    def _remakes(self, norm: Norm, junction: Junction | None) -> bool:
        """True where Linears' operator is to make again what is normalised: a checkpoint keeps their products alone."""
        is_taken = not self.options.forward_mode and (junction is None or junction.in_front is None)
        return is_taken and (self.keeps_products_alone or self._keeps_by_name(norm))

    def _keeps_by_name(self, norm: Norm) -> bool:
        """True in a checkpoint that keeps the products of a norm by names behind them."""
        policy = self.options.policy
        if not self.options.is_checkpointed or policy is None:
            return False
        nodes = [r.node for r in readers(self.graph, norm.y, shapes) if r.node is not None and is_product(r.node)]
        return bool(nodes) and all(keeps_by_name(policy, self.graph, node.output) for node in nodes)
