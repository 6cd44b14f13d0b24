"""The one rule by which `check` and `bench` judge how far a program's results may be from float64.

An error may be twice that of plain jnp in the same dtype, plus one rounding to the dtype of the result, plus what some
roundings of every operand, to the dtype of the arithmetic, would change. The last term is for results that are badly
conditioned: in a row without spread, where rstd is 1000, no program can be better than its inputs are known.

The rule holds for two measures. The largest error finds an element that is off. The root mean square finds a result
that is off a little everywhere: in bfloat16 the largest rounding of a large element hides a percent of all the others.

Programs of other libraries are judged more mildly. They may round a result to another dtype. They may add up a
parameter's gradient, a sum over M rows, in any order: that is M more roundings of partial sums at most about as large
as the largest result, each independent of the others, so sqrt(M) times one rounding. And only their largest error is
judged: a dbias that XLA adds up in bfloat16, as it does for users who write `z @ kernel + bias`, is at 1.4 of the limit
in the root mean square (256 rows), and is what users have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jln._tools.catalogue import Operator

# The roundings of every operand that an error may be worth. One is enough for random data. The roundings of a sum of
# terms near each other all go one way: the most that was seen in dx is 4.1 for 1000 ones, and 9.2 for a mean of 1000 in
# float64, where plain jnp's error, being the truth's own, counts for nothing.
ROUNDINGS = 16


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """The accuracy of one result of a program.

    largest: the largest of the true values.
    error, plain_error: the largest error of the program, and of plain jnp.
    limit: what `error` may be at most.
    rms_error, rms_plain_error, rms_limit: the root mean squares of the same.
    """

    name: str
    largest: float
    error: float
    plain_error: float
    limit: float
    rms_error: float
    rms_plain_error: float
    rms_limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit and self.rms_error <= self.rms_limit  # a NaN is not

    @property
    def part(self) -> float:
        """The error as a part of its limit, of the two measures the one that is nearer to its limit or beyond."""
        parts = (_part(self.error, self.limit), _part(self.rms_error, self.rms_limit))
        return max(parts) if not any(map(math.isnan, parts)) else math.nan


def _part(error: float, limit: float) -> float:
    return 0.0 if error == 0 else error / limit if limit else math.inf


class Judge:
    """The true results of a computation, and how far from them a program may be."""

    def __init__(
        self,
        names: Sequence[str],
        true: Iterable[Any],
        nudged: Iterable[Any],
        plain: Iterable[Any],
        dtype: Any,
        sums: Mapping[str, int] | None = None,
    ):
        """Take the true results and what sets their limits.

        names: the results' names, in the order of the three iterables of arrays.
        true: the results in float64.
        nudged: the results, in float64, of operands each of which is off by at most a rounding of the arithmetic.
        plain: the results of plain jnp in `dtype`.
        dtype: the operands' dtype.
        sums: for each gradient that is a sum over rows, the number of rows. Given where programs of other libraries are
          judged.
        """
        self.true = dict(zip(names, true, strict=True))
        self._others = sums is not None
        self._known = {}
        with jax.enable_x64(True):
            for (name, t), a, b in zip(self.true.items(), plain, nudged, strict=True):
                size, error, nudge = _measured(t), deviation(a, t), deviation(b, t)
                summed = rounding(dtype) * math.sqrt((sums or {}).get(name, 0))
                limit = [2 * e + ROUNDINGS * n + summed * v for e, n, v in zip(error, nudge, size, strict=True)]
                self._known[name] = jnp.dtype(a.dtype), size, error, limit

    def accuracy(self, name: str, got: Any) -> Accuracy:
        """The accuracy of `got`, a program's result of that name."""
        dtype, (largest, rms), (plain, rms_plain), (limit, rms_limit) = self._known[name]
        true = self.true[name]
        if got.shape != true.shape:
            return Accuracy(f"{name}, of shape {got.shape}", largest, math.inf, plain, 0.0, math.inf, rms_plain, 0.0)
        # A unit in the last place is at most eps times the value; errors spread evenly over one unit deviate by
        # 1 / sqrt(12) of it.
        unit = float(jnp.finfo(got.dtype if self._others else dtype).eps)
        most = limit + unit * largest
        rms_most = math.inf if self._others else rms_limit + unit * rms / math.sqrt(12)
        with jax.enable_x64(True):
            error, rms_error = deviation(got, true)
        return Accuracy(name, largest, error, plain, most, rms_error, rms_plain, rms_most)


def rounding(dtype: Any) -> float:
    """The relative size of one rounding in the arithmetic on arrays of a dtype."""
    return float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps)


def nudged(wide: Any, dtype: Any) -> Any:
    """Float64 arrays with each element off by at most a rounding of the arithmetic on arrays of `dtype`."""
    leaves, tree = jax.tree.flatten(wide)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    eps = rounding(dtype)
    return tree.unflatten(
        a * (1 + eps * jax.random.uniform(k, a.shape, jnp.float64, -1, 1)) for a, k in zip(leaves, keys, strict=True)
    )


@jax.jit
def _largest_and_rms(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = jnp.max(jnp.abs(a), initial=0)
    usual = (largest > 0) & jnp.isfinite(largest)
    unit = jnp.where(usual, largest, 1)  # the squares of 1e200 overflow
    return largest, jnp.where(usual, unit * jnp.sqrt(jnp.mean((a / unit) ** 2)), largest)


def _measured(a: jax.Array) -> tuple[float, float]:
    largest, rms = _largest_and_rms(a)
    return float(largest), float(rms)


@jax.jit
def _difference(got: jax.Array, true: jax.Array) -> tuple[jax.Array, jax.Array]:
    same = jnp.isinf(got) & (got == true.astype(got.dtype))
    return _largest_and_rms(jnp.where(same, 0, got.astype(true.dtype) - true))


def deviation(got: Any, true: Any) -> tuple[float, float]:
    """The largest error of `got` and its root mean square error; call it where 64 bits are switched on.

    An infinity is no error where the true value overflows to it.
    """
    largest, rms = _difference(got, true)
    return float(largest), float(rms)


def of_sum(operator: Operator, rounded_to: str | None, **options: Any) -> Callable[..., Any]:
    """The reference of an operator that adds a residual, as a function of named arrays; extras are over the last axis.

    rounded_to: the dtype to which the sum is rounded, while it and its gradient stay in the wider dtype of the arrays.
      None: the sum may stay unrounded, as XLA leaves the sum of a program written so.
    """
    in_front, behind = operator.norm.of_total.reference, operator.of_total.reference

    def reference(
        *, x: jax.Array, residual: jax.Array, x_bias: Any = None, gate: Any = None, **parameters: Any
    ) -> tuple[jax.Array, jax.Array]:
        if operator.both_sides:
            of_x = {n: parameters.pop(f"x_{n}", None) for n in ("scale", "offset")[: 1 + operator.centres]}
            x = in_front(x, **of_x, **options)
        branch = x if x_bias is None else x + x_bias
        total = (branch if gate is None else gate * branch) + residual
        if rounded_to is not None:
            # The barrier keeps XLA from leaving the rounding out. (`reduce_precision` would flush float16's denormals.)
            rounded = jax.lax.optimization_barrier(total.astype(rounded_to)).astype(total.dtype)
            total = total + jax.lax.stop_gradient(rounded - total)
        return behind(total, **parameters, **options), total

    return reference
