"""The Linears behind a norm: products of its result with arrays that are not made of it.

They become a part of the norm's operator, which then keeps no result for backward.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from jln._checks import promote
from jln._core.policies import keeps
from jln._fuse.certificate import FLOATS, Constants
from jln._fuse.graph import Graph, Node, Value
from jln._fuse.norms import Norm
from jln._fuse.readers import casts, hands_on, readers
from jln._fuse.regions import Parameter, peel


class Linear(NamedTuple):
    """A product that reads a norm's result over its last axis, and the bias behind.

    y: the product's result, with the bias if there is one. z: the norm's result as the product reads it. kernel:
      [.., H, ..], with H at `axis`. bias: of the shape of the features. is_kernel_first: whether features stand in
      front of rows in y. precision: the product's own; None for JAX's default. constraint: the node of a constraint of
      shardings between norm and product.
    """

    y: Value
    z: Value
    kernel: Value
    axis: int
    bias: Parameter | None
    is_kernel_first: bool
    precision: Any
    constraint: Node | None = None

    @property
    def features(self) -> tuple[int, ...]:
        return tuple(n for a, n in enumerate(self.kernel.shape) if a != self.axis)


def linears_of(graph: Graph, norm: Norm, constants: Constants, biased: Container[Value]) -> list[Linear] | str:
    """The Linears that read the norm's result; or why it is kept all the same, in a few words.

    biased: products whose bias is the next norm's, which reads the product in front of it.
    """
    if norm.features != (norm.y.ndim - 1,):
        return "another axis than the last is normalised"
    linears: list[Linear] = []
    for z, node, between in readers(graph, norm.y, casts):
        if node is None:
            return "its result is one of the function's"
        linear = _linear(graph, z, node, constants, biased)
        if isinstance(linear, str):
            return linear
        constraints = [n for n in between if n.operation == "sharding_constraint"]
        linears.append(linear._replace(constraint=constraints[0] if constraints else None))
    if len({(p.precision, p.z.dtype) for p in linears}) > 1:
        return "its products are in several dtypes or precisions"
    return linears or "nothing reads its result"


def _linear(graph: Graph, z: Value, node: Node, constants: Constants, biased: Container[Value]) -> Linear | str:
    last = z.ndim - 1
    if node.operation != "dot_general":
        return f"{node.words} reads its result"
    if graph.maker(node.output) is not node:
        return "a product of another norm's result reads it"
    if node.inputs[0] is node.inputs[1]:
        return "a product of its result with itself reads it"
    is_first = node.inputs[0] is z
    kernel = node.inputs[1] if is_first else node.inputs[0]
    axes, batch = node.params["dimension_numbers"]
    (mine, its), is_batched = axes if is_first else axes[::-1], bool(batch[0])
    if is_batched or tuple(mine) != (last,) or kernel.ndim < 2:
        return "a product reads its result that is no Linear's"
    precision = node.params["precision"]
    if isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return "a product has an algorithm"
    if {precision} <= {None, (lax.Precision.DEFAULT,) * 2}:
        precision = None
    if node.params.get("out_sharding") is not None:
        return "a product says how its result is sharded"
    if kernel.dtype.name not in FLOATS:
        return f"a Linear's kernel is in {kernel.dtype.name}"
    if z.dtype.name not in FLOATS or not node.output.dtype == z.dtype == promote(z.dtype, kernel.dtype):
        return f"a Linear of {z.dtype.name} and {kernel.dtype.name} is in {node.output.dtype.name}"
    result, bias = node.output, None
    if (
        is_first
        and result not in biased
        and graph.is_read_once(result)
        and (adding := result.readers[0]).operation == "add"
    ):
        other = adding.inputs[1] if adding.inputs[0] is result else adding.inputs[0]
        parameter = peel(other, constants)
        features = result.shape[last:]
        if (
            other is not result
            and constants.number(other) is None
            and adding.output.shape == result.shape
            and adding.output.dtype == result.dtype
            and parameter.shape[-len(features) :] == features
            and parameter.size == math.prod(features)
        ):
            result, bias = adding.output, Parameter(parameter.source, features)
    return Linear(result, z, kernel, int(its[0]), bias, not is_first, precision)


# Equations of which backward needs nothing that they read.
_LINEAR = {
    *("add", "add_any", "sub", "neg", "convert_element_type", "reshape", "transpose", "reduce_sum", "broadcast_in_dim"),
    *("slice", "concatenate", "squeeze", "split"),
}


def is_product(node: Node) -> bool:
    """True of a product of two arrays."""
    return node.operation == "dot_general" and node.inputs[0] is not node.inputs[1]


def keeps_by_name(policy: Any, graph: Graph, value: Value) -> bool:
    """True where a policy of `jax.checkpoint` keeps by name what is made of a value, so that it is not made again."""
    values, floats = [value], [a for a in graph.inputs if getattr(a.aval, "dtype", np.dtype(int)).name in FLOATS]
    for v in values:
        if graph.is_result(v) or not v.readers:
            return False
        for node in v.readers:
            if node.operation == "name" and keeps(policy, node.equation):
                continue
            others = [a for a in node.inputs if a is not v]
            # By what no derivative is taken, as a rotation's angles are not: theirs would read the value.
            is_scaled = node.operation == "mul" and not (floats and any(graph.depends(a, floats) for a in others))
            if not (is_scaled or hands_on(node) or node.operation in _LINEAR):
                return False
            values += [a for a in node.outputs if a not in values]
    return True
