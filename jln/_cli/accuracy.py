"""How far an operator's results and gradients are from float64, and how far they may be.

The limit is twice the error of plain jnp in the same dtype, plus one rounding to the dtype of the result, plus what
some roundings of every operand, to the dtype of the arithmetic, would change: where a result is badly conditioned (a
row without spread, where rstd is 1000) no program can be better than its inputs are known.

It holds for the largest error, which finds an element that is off, and for the root mean square, which finds what is
off a little everywhere: in bfloat16 the largest rounding of a large element hides a percent of all the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln._cli.devices import Device
from jln._cli.operators import Case, value_and_gradients

# Of every operand. One is enough for random data. The roundings of a sum of terms near each other all go one way: the
# most that was seen in dx is 4.1 for 1000 ones, and 9.2 for a mean of 1000 in float64, where plain jnp's error, being
# the truth's own, counts for nothing.
ROUNDINGS = 16


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Of one result. largest: of the true values; error, plain_error: the largest, of ours and of plain jnp's; those
    called rms: their root mean squares.
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
        """Of the limit that is nearer."""
        parts = (_part(self.error, self.limit), _part(self.rms_error, self.rms_limit))
        return max(parts) if not any(map(math.isnan, parts)) else math.nan


def _part(error: float, limit: float) -> float:
    return 0.0 if error == 0 else error / limit if limit else math.inf


class Truth:
    """The float64 results of a case on a device, and those of plain jnp in its dtype: shared by all implementations."""

    def __init__(self, case: Case, device: Device):
        self.case, self.device = case, device
        self._arrays = case.arrays()
        reference = case.operator.reference(case.dtype)
        self.values = self._run(reference, _mapped(self._arrays, lambda a: a.astype("float64")))
        compute = jnp.promote_types(case.dtype, jnp.float32)
        nudged = self._run(reference, _nudged(self._arrays, float(jnp.finfo(compute).eps), case.seed))
        plain = self._run(case.operator.reference(), self._arrays)
        self.plain_errors = [_errors(a, t) for a, t in zip(plain, self.values, strict=True)]
        self.limits = [
            tuple(
                2 * error + rounding + ROUNDINGS * nudge for error, rounding, nudge in zip(errors, *more, strict=True)
            )
            for errors, *more in zip(
                self.plain_errors,
                map(_rounding, plain, self.values),
                map(_errors, nudged, self.values),
                strict=True,
            )
        ]

    def _run(self, f: Any, arrays: Any) -> list[np.ndarray]:
        return [np.asarray(a) for a in value_and_gradients(f, *jax.device_put(arrays, self.device))]

    def accuracies(self, implementation: str) -> list[Accuracy]:
        """Of every result of an implementation."""
        return list(self.judged(self.case.operator.ours(implementation)))

    def judged(self, operator: Callable[..., Any]) -> Iterator[Accuracy]:
        """Of every result of a function with the arguments and results of the case's operator."""
        names = [*self.case.operator.results, *(f"d{name}" for name in self.case.operator.arguments)]
        got = self._run(operator, self._arrays)
        for name, a, t, plain, limit in zip(names, got, self.values, self.plain_errors, self.limits, strict=True):
            largest = float(np.max(np.abs(t), initial=0.0))
            (error, rms_error), (plain_error, rms_plain_error), (most, rms_most) = _errors(a, t), plain, limit
            yield Accuracy(name, largest, error, plain_error, most, rms_error, rms_plain_error, rms_most)


def _mapped(arrays: Any, function: Any) -> Any:
    return jax.tree.map(function, arrays)


def _nudged(arrays: Any, eps: float, seed: int) -> Any:
    """In float64, each element off by at most a rounding."""
    random = np.random.default_rng([seed, 1])
    return _mapped(arrays, lambda a: a.astype("float64") * (1 + eps * random.uniform(-1, 1, a.shape)))


def _errors(got: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """The largest and the root mean square; none where the true value overflows to the infinity that was got."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(got.astype("float64") - true)
        error = np.where(np.isinf(got) & (got == true.astype(got.dtype)), 0.0, error)
    return _largest_and_rms(error)


def _rounding(like: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """What rounding `true` to the dtype of `like` may do: a unit in the last place, at most eps times the value, and
    that over sqrt(12), the deviation of an error spread evenly over a unit.
    """
    eps = float(jnp.finfo(like.dtype).eps)
    largest, rms = _largest_and_rms(np.abs(true))
    return eps * largest, eps * rms / math.sqrt(12)


def _largest_and_rms(a: np.ndarray) -> tuple[float, float]:
    largest = float(np.max(a, initial=0.0))
    if not a.size or largest == 0 or not math.isfinite(largest):
        return largest, largest
    return largest, largest * math.sqrt(np.mean((a / largest) ** 2))  # the squares of 1e200 overflow
