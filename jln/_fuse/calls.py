"""Calls of the public operators, in the place of what was found in a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jln._checks import promote
from jln._fuse.certificate import Constants
from jln._fuse.graph import Node, Value, bind
from jln._fuse.junctions import Addition, Junction
from jln._fuse.linears import Linear
from jln._fuse.norms import Norm
from jln._fuse.regions import Parameter, peel, plus
from jln._junction.arguments import NormArguments
from jln._junction.arrays import Arrays
from jln._operators.call import call


class Options(NamedTuple):
    """Options of `fuse`, and where the program is.

    is_checkpointed: whether it is the body of a `jax.checkpoint`, of which backward makes again what its policy does
      not keep. is_scanned: whether it is the body of a scan.
    """

    linears: bool = False
    implementation: str | None = None
    forward_mode: bool = False
    is_checkpointed: bool = False
    policy: Any = None
    is_scanned: bool = False


class Operand(NamedTuple):
    """An array of the program as an operator takes it: reshaped to `shape`, or with one of its axes in front.

    factor: a number of NumPy to multiply it with. constraint: a sharding constraint that it is given.
    """

    value: Value
    shape: tuple[int, ...] | None = None
    axis_in_front: int = 0
    factor: Any = np.float32(1)
    constraint: Node | None = None

    def of(self, array: Any) -> Any:
        if self.constraint is not None:
            (array,) = bind(self.constraint.equation, [array])
        if self.factor != 1:
            array = array.astype(promote(array.dtype, self.factor.dtype)) * self.factor
        if self.axis_in_front:
            array = jnp.moveaxis(array, self.axis_in_front, 0)
        return array if self.shape is None or array.shape == self.shape else array.reshape(self.shape)


class Call(NamedTuple):
    """A call of an operator, from the values that it reads to those that it makes.

    operator: its public name. operands: by the name in `Arrays` an `Operand`, a number, None, or a tuple of these.
    options: of `jln._operators.call.call`.
    """

    operator: str
    operands: dict[str, Any]
    norm: NormArguments
    options: dict[str, Any]

    def words(self) -> tuple[str, ...]:
        """The arrays that the operator is given, in words."""
        counts = {name: sum(b is not None for b in _several(a)) for name, a in self.operands.items()}
        several = {"kernel": "kernels", "bias": "biases"}
        return tuple(_WORDS.get(a, a) if n == 1 else f"{n} {several[a]}" for a, n in counts.items() if n)

    def inputs(self) -> list[Value]:
        return [b.value for a in self.operands.values() for b in _several(a) if isinstance(b, Operand)]

    def __call__(self, *arrays: Any) -> Arrays:
        rest = iter(arrays)

        def read(a: Any) -> Any:
            return jnp.asarray(a.of(next(rest))) if isinstance(a, Operand) else a

        given = {n: tuple(map(read, a)) if type(a) is tuple else read(a) for n, a in self.operands.items()}
        return call(Arrays(**given), self.norm, **self.options)


# What an array is to the reader, where that is not its name.
_WORDS = {"x_scale": "scale of x", "x_bias": "bias of x", "added": "residual"}


def _several(a: Any) -> tuple[Any, ...]:
    return a if type(a) is tuple else (a,)


def call_of(
    norm: Norm,
    junction: Junction | None,
    addition: Addition | None,
    program: Options,
    constants: Constants,
    *,
    linears: Sequence[Linear] = (),
    remat: bool = False,
    hands_on: bool = False,
    copies: int = 1,
) -> Call:
    """The call of the operator for a norm, the sum in front of it or behind it, and what `fuse` was told.

    linears: the products behind it. remat: of an operator with these, as of `layer_norm_linear`. hands_on: whether x is
      a result, too. copies: of y.
    """
    in_front = None if junction is None else junction.in_front
    scales = {"scale": norm.scale} if in_front is None else {"x_scale": in_front.scale, "scale": norm.scale}
    around_zero = {n: _around_zero(p, constants) for n, p in scales.items() if p is not None}
    is_around_zero = bool(around_zero) and all(p is not None for p in around_zero.values())
    constraint = linears[0].constraint if linears else None

    def rows(value: Value) -> Operand:
        """An operand of rows, with the constraint of the norm's result, which no operator with Linears has."""
        is_free = value.operation != "sharding_constraint" and value.shape == norm.y.shape
        return Operand(value, constraint=constraint if is_free else None)

    x = norm.x if junction is None else junction.x
    operands: dict[str, Any] = {"x": rows(x)}
    name = kind = "layer_norm" if norm.centres else "rms_norm"
    if junction is not None:
        name = f"add_{kind}" if in_front is None else f"{kind}_add_{kind}"
        operands["residual"] = rows(junction.residual)
    elif addition is not None:
        name = f"{kind}_add"
        operands["added"] = Operand(addition.residual)
    elif hands_on:
        name = f"add_{kind}"
    elif norm.z is not None:
        name = f"{kind}_gated"
    operands |= {n: _parameter(p, norm) for n, p in (scales | around_zero if is_around_zero else scales).items()}
    operands["offset"] = _parameter(norm.offset, norm)
    if norm.z is not None:
        operands["z"] = Operand(norm.z)
    if junction is not None:
        operands["x_bias"] = _parameter(junction.x_bias, norm)
        gate = junction.gate
        operands["gate"] = _parameter(gate, norm) if isinstance(gate, Parameter) else gate
    options: dict[str, Any] = {"gives_total": junction is not None or hands_on, "copies": copies}
    options |= {"implementation": program.implementation, "forward_mode": program.forward_mode}
    if linears:
        name += "_linear"
        operands["kernel"] = tuple(Operand(p.kernel, axis_in_front=p.axis) for p in linears)
        operands["bias"] = tuple(None if p.bias is None else Operand(p.bias.source, p.bias.shape) for p in linears)
        options |= {"precision": linears[0].precision, "remat": remat}
    dtype = (linears[0].z if linears else norm.y if addition is None else addition.y).dtype
    axes = tuple(a - norm.x.ndim for a in norm.features)
    both_sides = in_front is not None
    arguments = NormArguments(norm.centres, axes, norm.epsilon, is_around_zero, dtype, both_sides)
    return Call(name, operands, arguments, options)


def _parameter(parameter: Parameter | None, norm: Norm) -> Operand | None:
    """The parameter as operators take it: of the features alone, or of x's rank where it varies by row."""
    if parameter is None:
        return None
    features = [a - norm.x.ndim for a in norm.features]
    is_shared = parameter.size == math.prod(norm.x.shape[a] for a in features)
    shape = tuple(parameter.shape[a] for a in features) if is_shared else parameter.shape
    factor = promote(norm.x.dtype, jnp.float32).type(parameter.factor)  # as wide as the arithmetic
    return Operand(parameter.source, shape, factor=factor)


def _around_zero(scale: Parameter, constants: Constants) -> Parameter | None:
    """The array a of a scale 1 + a; None of another one."""
    source = plus(scale.source, 1.0, constants)
    if source is None or scale.factor != 1:
        return None
    inner = peel(source, constants)
    if inner.shape == scale.shape or len(inner.shape) == len(scale.shape):
        return inner
    in_front = scale.shape[: len(scale.shape) - len(inner.shape)]
    is_tail = scale.shape[len(in_front) :] == inner.shape and all(n == 1 for n in in_front)
    return Parameter(inner.source, (*in_front, *inner.shape)) if is_tail else None


def results_of(call: Call, norm: Norm, junction: Junction | None, linears: Sequence[Linear], *arrays: Any) -> list[Any]:
    """The arrays that take the place of what was found: y, its copies or the products, and the sum, or x handed on."""
    made = call(*arrays)
    ys = list(made.y) if isinstance(made.y, tuple) else [made.y]
    if linears:
        ys = [_turn(y, p) for y, p in zip(ys, linears, strict=True)]
    elif junction is not None and norm.x is not junction.total:
        ys = [y.reshape(norm.y.shape) for y in ys]
    return ys if made.total is None else [*ys, made.total]


def _turn(y: Any, linear: Linear) -> Any:
    """The product as the program has it: features in front where the kernel stands in front, rows in its own shape."""
    if linear.is_kernel_first:
        features = len(linear.features)
        y = jnp.moveaxis(y, range(y.ndim - features, y.ndim), range(features))
    return y if y.shape == linear.y.shape else y.reshape(linear.y.shape)
