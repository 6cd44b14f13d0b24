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
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jln
from jln._tools.catalogue import flat_names
from jln._tools.workload import Block, Workload

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
    """The true results of a workload's step, and how far from them a program may be."""

    def __init__(self, workload: Workload, arguments: Sequence[Any], cotangents: Sequence[Any], *, mild: bool = False):
        """Compute the truth, in float64, and what sets the limits.

        mild: judge as programs of other libraries are, of which a gradient that is another's, too, is not asked for.
          Otherwise all gradients are judged, of products in the full precision of their dtype.
        """
        self._workload, self._mild, dtype = workload, mild, workload.dtype
        self._operands = jax.device_put([*arguments, *(cotangents if "backward" in workload.directions else ())])
        self.names = workload.names(every=not mild)
        # Plain jnp's sum may stay unrounded, as in what XLA makes of a peer's sum; our reference rounds it.
        plain = self._results(reference(workload) if mild else exact(workload, plain=True))
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: a.astype("float64"), self._operands)
            truth = reference(workload, rounded=True, **({} if mild else _exactly(workload)))
            true, off = (self._results(truth, operands) for operands in (wide, nudged(wide, dtype)))
        self.true, sums = dict(zip(self.names, true, strict=True)), _sums(workload) if mild else {}
        self._known = {}
        with jax.enable_x64(True):
            for (name, t), a, b in zip(self.true.items(), plain, off, strict=True):
                size, error, nudge = deviation(t, jnp.zeros_like(t)), deviation(a, t), deviation(b, t)
                summed = rounding(dtype) * math.sqrt(sums.get(name, 0))
                limit = [2 * e + ROUNDINGS * n + summed * v for e, n, v in zip(error, nudge, size, strict=True)]
                self._known[name] = jnp.dtype(a.dtype), size, error, limit

    def _results(self, function: Callable[..., Any], operands: Any = None) -> list[jax.Array]:
        return _step(self._workload, function, not self._mild, self._operands if operands is None else operands)

    def accuracies(self, function: Callable[..., Any]) -> list[Accuracy]:
        """The accuracy of every result of the step with a function of the workload's arguments in order."""
        return list(map(self.accuracy, self.names, self._results(function)))

    def worst(self, direction: str, got: Sequence[jax.Array]) -> Accuracy:
        """The accuracy of that result of a direction which is nearest to its limit, or furthest beyond it."""
        names = self._workload.names(direction, every=not self._mild)
        accuracies = itertools.starmap(self.accuracy, zip(names, got, strict=True))
        return max(accuracies, key=lambda a: math.inf if math.isnan(a.part) else a.part)

    def accuracy(self, name: str, got: Any) -> Accuracy:
        """The accuracy of `got`, a program's result of that name."""
        dtype, (largest, rms), (plain, rms_plain), (limit, rms_limit) = self._known[name]
        true = self.true[name]
        if got.shape != true.shape:
            return Accuracy(f"{name}, of shape {got.shape}", largest, math.inf, plain, 0.0, math.inf, rms_plain, 0.0)
        # A unit in the last place is at most eps times the value; errors spread evenly over one unit deviate by
        # 1 / sqrt(12) of it.
        unit = float(jnp.finfo(got.dtype if self._mild else dtype).eps)
        most = limit + unit * largest
        rms_most = math.inf if self._mild else rms_limit + unit * rms / math.sqrt(12)
        with jax.enable_x64(True):
            error, rms_error = deviation(got, true)
        return Accuracy(name, largest, error, plain, most, rms_error, rms_plain, rms_most)


# A program is compiled once for equal workloads and one function, whatever the data.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(workload: Workload, function: Callable[..., Any], every: bool, operands: list[Any]) -> list[jax.Array]:
    return jax.tree.leaves(workload.step(function, every=every)(*operands))


def _sums(workload: Workload) -> dict[str, int]:
    """The number of rows of each gradient that is a sum over them."""
    examples = math.prod(workload.sizes().get("examples", ()))
    sums: dict[str, Any] = {}
    for a in workload.signature.parameters:
        rows = workload.rows // (examples if "examples" in a.dimensions else 1)
        sums |= dict.fromkeys(flat_names([(f"d{a.name}", workload.arrays()[a.name])]), rows)
    return sums


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


def _exactly(workload: Workload) -> dict[str, Any]:
    # A GPU's own default precision multiplies float32 with ten bits.
    return {"precision": "highest"} if workload.is_linear else {}


# Equal calls give the same object, so that its programs are compiled once.
@functools.cache
def exact(workload: Workload, *, plain: bool = False, **options: Any) -> Callable[..., Any]:
    """The operator as a function of a workload's arguments, with products in full precision.

    plain: that of `jln.reference`.
    """
    return workload.function(jln.reference if plain else jln, **_exactly(workload), **options)


@functools.cache
def reference(workload: Workload, *, rounded: bool = False, **options: Any) -> Callable[..., Any]:
    """A workload's function in plain jnp.

    rounded: round the sum with the residual to the workload's dtype, while it and its gradient stay in the wider dtype
      of the arrays. Otherwise it may stay unrounded, as XLA leaves the sum of a program written so.
    """
    if isinstance(workload, Block):
        return workload.of(*(reference(part, rounded=rounded) for part in workload.parts()))
    operator = workload.entry
    if not operator.adds:
        return workload.function(jln.reference, **options)
    options = options | workload.axis_option
    in_front, behind = operator.norm.of_total.reference, operator.of_total.reference

    def of_sum(
        *, x: jax.Array, residual: jax.Array, x_bias: Any = None, gate: Any = None, **parameters: Any
    ) -> tuple[jax.Array, jax.Array]:
        if operator.both_sides:
            of_x = {n.removeprefix("x_"): parameters.pop(n) for n in ("x_scale", "x_offset") if n in operator.takes}
            x = in_front(x, **of_x, **workload.axis_option)
        branch = x if x_bias is None else x + x_bias
        total = (branch if gate is None else gate * branch) + residual
        if rounded:
            # The barrier keeps XLA from leaving the rounding out. (`reduce_precision` would flush float16's denormals.)
            cast = jax.lax.optimization_barrier(total.astype(workload.dtype)).astype(total.dtype)
            total = total + jax.lax.stop_gradient(cast - total)
        return behind(total, **parameters, **options), total

    return operator.in_order(of_sum)
