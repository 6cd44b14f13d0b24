"""How far an operator's results and gradients are from float64, and how far they may be.

The limit is twice the largest error of plain jnp in the same dtype, plus one rounding to the dtype of the result, plus
what one rounding of every operand, to the dtype of the arithmetic, would change: where a result is badly conditioned
(a row without spread, where rstd is 1000) no program can be better than its inputs are known.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln._cli.devices import Device
from jln._cli.operators import Case, value_and_gradients

# Of every operand. One is enough for random data; the roundings of a sum of equal terms all go one way, and of 1000
# ones they come to 4.1 in dx.
ROUNDINGS = 8


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Of one result. largest: of the true values; error, plain_error: the largest, of ours and of plain jnp's."""

    name: str
    largest: float
    error: float
    plain_error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # a NaN is not

    @property
    def part(self) -> float:
        return 0.0 if self.error == 0 else self.error / self.limit if self.limit else float("inf")


class Truth:
    """The float64 results of a case on a device, and those of plain jnp in its dtype: shared by all implementations."""

    def __init__(self, case: Case, device: Device):
        self.case, self.device = case, device
        self._arrays = case.arrays()
        reference = case.operator.reference(case.dtype)
        self.values = self._run(reference, _mapped(self._arrays, lambda a: a.astype("float64")))
        compute = jnp.promote_types(case.dtype, jnp.float32)
        nudged = self._run(reference, _nudged(self._arrays, float(jnp.finfo(compute).eps), case.seed))
        plain = self._run(reference, self._arrays)
        self.plain_errors = [_error(a, t) for a, t in zip(plain, self.values, strict=True)]
        self.limits = [
            2 * error + np.max(np.abs(t), initial=0.0) * float(jnp.finfo(a.dtype).eps) + ROUNDINGS * _error(b, t)
            for error, t, a, b in zip(self.plain_errors, self.values, plain, nudged, strict=True)
        ]

    def _run(self, f: Any, arrays: Any) -> list[np.ndarray]:
        return [np.asarray(a) for a in value_and_gradients(f, *jax.device_put(arrays, self.device))]

    def accuracies(self, implementation: str) -> list[Accuracy]:
        """Of every result of an implementation."""
        operator = self.case.operator
        names = [*operator.results, *(f"d{name}" for name in operator.arguments)]
        got = self._run(operator.ours(implementation), self._arrays)
        return [
            Accuracy(name, float(np.max(np.abs(t), initial=0.0)), _error(a, t), plain, float(limit))
            for name, a, t, plain, limit in zip(names, got, self.values, self.plain_errors, self.limits, strict=True)
        ]


def _mapped(arrays: Any, function: Any) -> Any:
    return jax.tree.map(function, arrays)


def _nudged(arrays: Any, eps: float, seed: int) -> Any:
    """In float64, each element off by at most a rounding."""
    random = np.random.default_rng([seed, 1])
    return _mapped(arrays, lambda a: a.astype("float64") * (1 + eps * random.uniform(-1, 1, a.shape)))


def _error(got: np.ndarray, true: np.ndarray) -> float:
    """The largest; none where the true value overflows to the infinity that was got."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = np.abs(got.astype("float64") - true)
        error = np.where(np.isinf(got) & (got == true.astype(got.dtype)), 0.0, error)
    return float(np.max(error, initial=0.0))
