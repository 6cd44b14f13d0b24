"""Certificates: what a region of a program computes, in float64 on a few random rows.

Functions that are analytic and agree on random rows agree everywhere. So of what is not analytic, as a maximum, a
selection or an absolute value, nothing counts but a selection by a constant, and the maximum of 0 and what is a row's
variance or mean square, which a program's roundings may need. A cast counts as nothing, but for one to fewer bits than
16.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jln._fuse.graph import Node, Value

FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))
ROWS = 2  # of each axis that is not normalised
Arrays = Mapping[Value, np.ndarray]


def _broadcast(node: Node, a: np.ndarray) -> np.ndarray:
    """The array with its axes where they go; new ones stay 1, which numpy broadcasts by itself."""
    shape = [1] * len(node.params["shape"])
    for source, target in enumerate(node.params["broadcast_dimensions"]):
        shape[target] = a.shape[source]
    return a.reshape(shape)


def _reshape(node: Node, a: np.ndarray) -> np.ndarray:
    """The array reshaped, where only axes of 1 come or go."""
    before, after = node.inputs[0].shape, node.output.shape
    if not only_ones_differ(before, after):
        raise NotImplementedError
    sizes = iter([n for n, of in zip(a.shape, before, strict=True) if of != 1])
    return a.reshape([1 if n == 1 else next(sizes) for n in after])


def only_ones_differ(a: Sequence[int], b: Sequence[int]) -> bool:
    return [n for n in a if n != 1] == [n for n in b if n != 1]


def _sum(node: Node, a: np.ndarray) -> np.ndarray:
    axes = node.params["axes"]
    return _all_of(node.inputs[0], a, axes).sum(tuple(axes))


def _all_of(value: Value, a: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """The array with all elements along these axes; raises where a probe has fewer rows than the program."""
    shape = [value.shape[i] if i in axes else n for i, n in enumerate(a.shape)]
    if any(a.shape[i] not in (1, value.shape[i]) for i in axes):
        raise NotImplementedError
    return np.broadcast_to(a, shape)


def _dot(node: Node, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (of_a, of_b), (batch_a, batch_b) = node.params["dimension_numbers"]
    a, b = _all_of(node.inputs[0], a, of_a), _all_of(node.inputs[-1], b, of_b)
    letters = iter(string.ascii_letters)
    names_a = [next(letters) for _ in range(a.ndim)]
    names_b = [next(letters) for _ in range(b.ndim)]
    for i, j in zip((*of_a, *batch_a), (*of_b, *batch_b), strict=True):
        names_b[j] = names_a[i]
    batch = [names_a[i] for i in batch_a]
    left = [n for i, n in enumerate(names_a) if i not in (*of_a, *batch_a)]
    right = [n for i, n in enumerate(names_b) if i not in (*of_b, *batch_b)]
    return np.einsum(f"{''.join(names_a)},{''.join(names_b)}->{''.join(batch + left + right)}", a, b)


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, *arrays: function(*arrays)


def _sigmoid(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a))


ANALYTIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "add_any"), _elementwise(np.add)),
    "sub": _elementwise(np.subtract),
    "mul": _elementwise(np.multiply),
    "div": _elementwise(np.divide),
    "neg": _elementwise(np.negative),
    "square": _elementwise(np.square),
    "sqrt": _elementwise(np.sqrt),
    "rsqrt": _elementwise(lambda a: 1 / np.sqrt(a)),
    "integer_pow": lambda node, a: a ** float(node.params["y"]),
    "pow": _elementwise(np.power),
    "exp": _elementwise(np.exp),
    "log": _elementwise(np.log),
    "logistic": _elementwise(_sigmoid),
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "transpose": lambda node, a: np.transpose(a, node.params["permutation"]),
    "reduce_sum": _sum,
    "dot_general": _dot,
    **dict.fromkeys(("convert_element_type", "copy", "copy_p"), _elementwise(lambda a: a)),
}
_OF_CONSTANTS = ANALYTIC | {  # what varies over more axes of a shard_map than its norm is no result of an operator
    **dict.fromkeys(("pvary", "pcast"), _elementwise(lambda a: a)),
    "max": _elementwise(np.maximum),
    "min": _elementwise(np.minimum),
    "gt": _elementwise(np.greater),
    "ge": _elementwise(np.greater_equal),
    "lt": _elementwise(np.less),
    "eq": _elementwise(np.equal),
}
_SHAPES_ONLY = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "copy_p", "pvary", "pcast")


class Constants:
    """The numbers that values are whatever the arguments, computed once."""

    def __init__(self) -> None:
        self._numbers: dict[Value, float | None] = {}

    def number(self, value: Value) -> float | None:
        """The number that every element of the value is; None where that is not known."""
        stack = [value]  # no recursion: a program may be deeper than Python
        while stack:
            v = stack[-1]
            missing = [] if v in self._numbers else [i for i in _read(v) if i not in self._numbers]
            stack += missing
            if not missing:
                stack.pop()
                self._numbers.setdefault(v, self._compute(v))
        return self._numbers[value]

    def _compute(self, value: Value) -> float | None:
        if value.constant is not None:
            is_known = np.ndim(value.constant) == 0 and not isinstance(value.constant, Tracer)
            return float(value.constant) if is_known and _is_real(value.dtype) else None
        node = value.maker
        numbers = [self._numbers[v] for v in _read(value)]
        if node is None or not numbers or not _is_real(value.dtype) or any(n is None for n in numbers):
            return None
        if node.operation in _SHAPES_ONLY:
            return numbers[0]
        if node.operation in ("reduce_sum", "dot_general", "transpose", "pow"):
            return None
        with np.errstate(all="ignore"):
            return _round(_OF_CONSTANTS[node.operation](node, *map(np.float64, numbers)), value.dtype)


def _read(value: Value) -> Sequence[Value]:
    """The values of whose numbers the value's is computed."""
    node = None if value.constant is not None else value.maker
    return () if node is None or node.operation not in _OF_CONSTANTS or len(node.inputs) > 3 else node.inputs


def _is_real(dtype: Any) -> bool:
    return dtype.name in (*FLOATS, "bool") or jnp.issubdtype(dtype, np.integer)


def _round(number: np.float64, dtype: Any) -> float | None:
    """The number as the dtype holds it; None of one that no integer of the dtype is near to."""
    if np.issubdtype(dtype, np.integer) and not np.iinfo(dtype).min <= number <= np.iinfo(dtype).max:
        return None
    return float(np.asarray(number).astype(dtype))


def why_not_analytic(node: Node, full: int, constants: Constants) -> str | None:
    """The reason why random rows would prove nothing of the node, in a few words; None where they would.

    full: the number of elements of what is normalised.
    """
    name = node.operation
    if name == "select_n":
        return None if constants.number(node.inputs[0]) is not None else node.words
    if name == "max":
        is_zero = any(constants.number(v) == 0 for v in node.inputs)
        return None if is_zero and node.output.size < full else node.words
    if name == "convert_element_type":
        dtypes = {node.inputs[0].dtype.name, node.output.dtype.name}
        return None if dtypes <= FLOATS else f"a cast to {node.output.dtype.name}"
    if name in ("reshape", "squeeze", "expand_dims"):
        return None if only_ones_differ(node.inputs[0].shape, node.output.shape) else "a reshape"
    return None if name in ANALYTIC else node.words


def compute(
    nodes: Sequence[Node],
    arrays: Mapping[Value, np.ndarray],
    constants: Constants,
    squares: Sequence[np.ndarray] = (),
    exact: Sequence[float] = (),
    counted: set[Node] | None = None,
) -> dict[Value, np.ndarray]:
    """The values that the nodes make of these arrays, in float64. What cannot be computed is left out.

    squares: the rows' statistics that are never negative, so that a maximum of 0 and one of them is that one.
    exact: the numbers that a program may have as float32 rounds them, such as 1/768, and means exactly.
    counted: where those nodes are added all of whose operands count in what they make.
    """
    values = dict(arrays)
    nothing: set[Value] = set()  # zero by cancellation, as the mean of what is centred, and what that makes zero

    def read(v: Value) -> np.ndarray:
        if v in values:
            return values[v]
        number = constants.number(v)
        if number is None:
            raise KeyError
        if v.dtype == np.float32:
            number = next((e for e in exact if np.float32(e) == number), number)
        return np.full((1,) * v.ndim, number)

    with np.errstate(all="ignore"):
        for node in nodes:
            is_counted = True
            try:
                if node.operation == "select_n":
                    result = read(node.inputs[1 + int(read(node.inputs[0]).item())])
                elif node.operation == "max":
                    (result,) = (read(v) for v in node.inputs if constants.number(v) != 0)
                    if not any(agree(result.ravel(), s.ravel()) for s in squares):
                        continue
                else:
                    operands = [*map(read, node.inputs)]
                    result = ANALYTIC[node.operation](node, *operands)
                    if _is_nothing(node, result, operands) or (
                        node.operation in _KEEP_ZERO and node.inputs[0] in nothing
                    ):
                        nothing.add(node.output)
                    is_counted = bool(nothing.intersection(node.inputs)) or _counts(node, operands, constants)
            except (KeyError, NotImplementedError, ValueError):
                continue
            values[node.output] = np.asarray(result, np.float64)
            if counted is not None and is_counted:
                counted.add(node)
    return values


_KEEP_ZERO = (*_SHAPES_ONLY, "convert_element_type", "mul", "div", "neg", "square", "integer_pow")


def _is_nothing(node: Node, result: np.ndarray, operands: Sequence[np.ndarray]) -> bool:
    """True for a sum whose terms cancel out."""
    if node.operation != "reduce_sum":
        return False
    terms = ANALYTIC["reduce_sum"](node, np.abs(operands[0]))
    return bool(np.all(np.abs(result) <= 1e-12 * terms) and np.all(terms > 0))


def _counts(node: Node, operands: Sequence[np.ndarray], constants: Constants) -> bool:
    """False where float64 hides an operand in all elements: 1 + exp(-99) is 1, whatever is in front of the 99.

    What all probes hide may be all that there is on the row that matters.
    """
    if node.operation in ("add", "add_any", "sub") and not any(constants.number(v) == 0 for v in node.inputs):
        a, b = map(np.abs, operands)
        return bool(np.any(np.minimum(a, b) > 1e-8 * np.maximum(a, b)))
    if node.operation == "logistic":  # of 0 it is a half, and from 18 on 1
        return bool(np.any((np.abs(operands[0]) > 1e-8) & (operands[0] < 18)))
    if node.operation in ("exp", "pow"):
        exponent = operands[0] if node.operation == "exp" else operands[1] * np.log(np.abs(operands[0]))
        return bool(np.any(np.abs(exponent) > 1e-8))
    return True


def silu(a: np.ndarray) -> np.ndarray:
    return a * _sigmoid(a)


def agree(got: np.ndarray, wanted: np.ndarray) -> bool:
    """True where two arrays are the same function's values in float64, but for roundings."""
    fits = got.ndim <= wanted.ndim and all(
        n in (1, m) for n, m in zip(got.shape[::-1], wanted.shape[::-1], strict=False)
    )
    if not fits or wanted.size == 0 or not np.isfinite(wanted).all():
        return False
    return bool(np.max(np.abs(got - wanted)) <= 1e-9 * np.max(np.abs(wanted)))


def drawn(shape: Sequence[int], seed: int) -> np.ndarray:
    """Random numbers whose mean is not 0, so that a norm that subtracts it is seen to."""
    return np.random.default_rng([seed, math.prod(shape)]).normal(0.3, 1.0, tuple(shape))
