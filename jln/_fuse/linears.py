"""The Linears behind a norm: products of its result with arrays that are not made of it.

They become a part of the norm's operator, which then keeps no result for backward, or, where others read the result
too, one function that makes it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array, lax

from jln._checks import promote
from jln._fuse.certificate import FLOATS, Constants
from jln._fuse.graph import Graph, Node, Value, bind
from jln._fuse.norms import Norm
from jln._fuse.regions import Parameter, peel


class Linear(NamedTuple):
    """A product that reads a norm's result over its last axis, and the bias behind.

    y: the product's result, with the bias if there is one. kernel: [.., H, ..], with H at `axis`. bias: of the shape of
      the features. is_kernel_first: whether features stand in front of rows in y.
    """

    y: Value
    kernel: Value
    axis: int
    bias: Parameter | None
    is_kernel_first: bool

    @property
    def features(self) -> tuple[int, ...]:
        return tuple(n for a, n in enumerate(self.kernel.shape) if a != self.axis)


def linears_of(graph: Graph, norm: Norm, constants: Constants) -> list[Linear] | str:
    """The Linears that read the norm's result; or why it is kept all the same, in a few words."""
    y = norm.y
    if norm.features != (y.ndim - 1,):
        return "another axis than the last is normalised"
    if graph.is_result(y) or not y.readers:
        return "its result is one of the function's"
    linears = []
    for node in y.readers:
        linear = _linear(graph, norm, node, constants)
        if isinstance(linear, str):
            return linear
        linears.append(linear)
    return linears


def _linear(graph: Graph, norm: Norm, node: Node, constants: Constants) -> Linear | str:
    y, last = norm.y, norm.y.ndim - 1
    if node.operation != "dot_general":
        return f"{node.operation} reads its result"
    if node.inputs[0] is node.inputs[1]:
        return "a product of its result with itself reads it"
    is_first = node.inputs[0] is y
    kernel = node.inputs[1] if is_first else node.inputs[0]
    axes, batch = node.params["dimension_numbers"]
    (mine, its), is_batched = axes if is_first else axes[::-1], bool(batch[0])
    if is_batched or tuple(mine) != (last,) or kernel.ndim < 2:
        return "a product reads its result that is no Linear's"
    if node.params["precision"] is not None:
        return "a product has a precision"
    if node.params.get("out_sharding") is not None:
        return "a product says how its result is sharded"
    if kernel.dtype.name not in FLOATS:
        return f"a Linear's kernel is in {kernel.dtype.name}"
    product = promote(norm.x.dtype, kernel.dtype)
    if not node.output.dtype == y.dtype == product:
        return f"a Linear is in {node.output.dtype.name}, of {y.dtype.name}; jln's would be in {product.name}"
    result, bias = node.output, None
    if is_first and graph.is_read_once(result) and (adding := result.readers[0]).operation == "add":
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
    return Linear(result, kernel, int(its[0]), bias, not is_first)


# Equations of which backward needs nothing that they read.
_LINEAR = {
    *("add", "add_any", "sub", "neg", "convert_element_type", "reshape", "transpose", "reduce_sum", "broadcast_in_dim"),
    *("slice", "concatenate", "squeeze", "split", "copy", "sharding_constraint"),
}


class Product(NamedTuple):
    """A product that reads a norm's result, or that in another dtype, and something else.

    other: what else. is_first: whether the norm's result stands in front.
    """

    node: Node
    other: Value
    is_first: bool

    def of(self, y: Array, other: Array) -> Array:
        y = y.astype(self.node.inputs[0 if self.is_first else 1].dtype)
        return bind(self.node.equation, (y, other) if self.is_first else (other, y))[0]


def products_of(graph: Graph, y: Value) -> list[Product]:
    """The products of a norm's result; none where something else needs the result in backward, too."""
    products, values = [], [y]
    for v in values:
        if graph.is_result(v):
            return []
        for node in v.readers:
            if node.operation == "dot_general" and node.inputs[0] is not node.inputs[1]:
                is_first = node.inputs[0] is v
                products.append(Product(node, node.inputs[1 if is_first else 0], is_first))
            elif node.operation not in _LINEAR:
                return []
            elif node.operation == "convert_element_type":
                values.append(node.output)
    return [] if any(graph.depends(p.other, [y]) for p in products) else products


def make_again(products: Sequence[Product], again: Callable[..., Array]) -> Callable[..., list[Array]]:
    """Return a function of (y, *others, *arguments of `again`) that multiplies y with each of the others.

    Backward makes y by `again`, so forward keeps none. A fence stands in front, as in `jax.checkpoint`: without it XLA
    could find that this is the y of forward, and keep that.
    """

    def results(y: Array, others: tuple[Array, ...]) -> list[Array]:
        return [p.of(y, other) for p, other in zip(products, others, strict=True)]

    @jax.custom_vjp
    def multiply(y: Array, others: tuple[Array, ...], arguments: tuple[Array, ...]) -> list[Array]:
        del arguments
        return results(y, others)

    def forward(y: Array, others: tuple[Array, ...], arguments: tuple[Array, ...]) -> Any:
        return results(y, others), (others, arguments)

    def backward(kept: Any, cotangents: list[Array]) -> Any:
        others, arguments = kept
        arguments, cotangents = lax.optimization_barrier((arguments, cotangents))
        _, transposed = jax.vjp(results, again(*arguments), others)
        return *transposed(cotangents), None

    multiply.defvjp(forward, backward)
    return lambda y, *more: multiply(y, more[: len(products)], more[len(products) :])
