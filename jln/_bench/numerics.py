"""Whether a peer's numbers are right, before anybody times them: the rule of `python -m jln check`, on the device.

An error, against float64, may be twice that of plain jnp in the same dtype, plus a rounding to the dtype of the result,
plus what roundings of the operands would change. A parameter's gradient is a sum over M rows, in whatever order a peer
adds: M more roundings of partial sums that are at most about as large as the largest result, each independent of the
others, so sqrt(M) times as much as one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jln
from jln._bench.blocks import Block
from jln._bench.workloads import ARGUMENTS, Workload
from jln._cli.accuracy import ROUNDINGS


@dataclass(frozen=True)
class Worst:
    """Of the results of a program, the one whose error is the largest part of its limit."""

    result: str
    error: float
    limit: float

    part = property(lambda self: 0.0 if self.error == 0 else self.error / self.limit if self.limit else math.inf)
    ok = property(lambda self: self.error <= self.limit)  # a NaN is not


def arrays(workload: Workload, seed: int = 0) -> tuple[list[jax.Array], list[jax.Array]]:
    """-> (arguments, cotangents), normal: scales around 1, kernels that keep a result as large as what it is made of.

    All are numbers of the workload's dtype, for peers whose parameters have it.
    """
    shapes = workload.arrays()

    @jax.jit
    def made(key):
        found = []
        for (name, a), k in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
            values = jax.random.normal(k, a.shape, jnp.float32)
            if name.startswith("scale"):
                values = values / 4 + 1
            elif name.startswith("kernel"):
                values = values / math.sqrt(a.shape[0])
            found.append(values.astype(workload.dtype).astype(a.dtype))
        return found

    found = made(jax.random.key(seed))
    count = len(workload.arguments())
    return found[:count], found[count:]


def names(workload: Workload) -> list[str]:
    """Of what a step returns."""
    arguments = list(workload.arrays())[: len(workload.arguments())]
    gradients = [f"d{name}" for name in arguments if name != "residual"]
    return [*workload.results, *(gradients if "backward" in workload.directions else ())]


def reference(workload: Workload, rounded: bool) -> Callable[..., Any]:
    """Plain jnp. rounded: a sum with the residual is rounded to the workload's dtype, whatever the arguments' is; else
    it may be left unrounded, as XLA does with what peers write.
    """
    if isinstance(workload, Block):
        qkv, add = workload.parts()
        return workload.of(reference(qkv, rounded), reference(add, rounded))
    if not workload.adds:
        return workload.function(jln.reference)
    norm = getattr(jln.reference, workload.operator.removeprefix("add_"))

    def function(x, residual, *parameters):
        total = x + residual
        if rounded:  # the barrier keeps XLA from leaving the rounding out
            nearest = jax.lax.optimization_barrier(total.astype(workload.dtype)).astype(total.dtype)
            total = total + jax.lax.stop_gradient(nearest - total)
        return norm(total, *parameters, axis=workload.axis), total

    assert len(ARGUMENTS[workload.operator]) > 2
    return function


class Truth:
    """A step's results in float64, and how far from them a program in the workload's dtype may be."""

    def __init__(self, workload: Workload, arguments: Sequence[jax.Array], cotangents: Sequence[jax.Array]):
        self.names = names(workload)
        given = [*arguments, *(cotangents if "backward" in workload.directions else ())]
        plain = jax.tree.leaves(jax.jit(workload.step(reference(workload, rounded=False)))(*given))
        with jax.enable_x64(True):
            step = jax.jit(workload.step(reference(workload, rounded=True)))
            wide = [a.astype("float64") for a in given]
            self.values = jax.tree.leaves(step(*wide))
            compute = jnp.promote_types(workload.dtype, jnp.float32)
            nudged = jax.tree.leaves(step(*_nudged(wide, float(jnp.finfo(compute).eps))))
            self.limits = [
                2 * _error(p, t) + ROUNDINGS * _error(n, t) for p, n, t in zip(plain, nudged, self.values, strict=True)
            ]
            summed = float(jnp.finfo(compute).eps) * math.sqrt(workload.rows)
            self.largest = [float(jnp.max(jnp.abs(t), initial=0.0)) for t in self.values]
            parameters = {f"d{n}" for n in list(workload.arrays())[: len(workload.arguments())]} - {"dx"}
            self.limits = [
                limit + (summed * largest if name in parameters else 0.0)
                for name, limit, largest in zip(self.names, self.limits, self.largest, strict=True)
            ]

    def worst(self, got: Sequence[jax.Array], direction: str, count: int) -> Worst:
        """got: what a program of that direction returned, the first `count` of a step's being its results."""
        gradients = slice(count, None)
        chosen = {"forward": slice(count), "backward": gradients, "gradient": gradients, "both": slice(None)}[direction]
        found = []
        with jax.enable_x64(True):
            parts = zip(
                got, self.names[chosen], self.values[chosen], self.limits[chosen], self.largest[chosen], strict=True
            )
            for array, name, true, limit, largest in parts:
                if array.shape != true.shape:
                    found.append(Worst(f"{name}, of shape {array.shape}", math.inf, 0.0))
                    continue
                rounding = largest * float(jnp.finfo(array.dtype).eps)
                found.append(Worst(name, _error(array, true), limit + rounding))
        return max(found, key=lambda w: math.inf if math.isnan(w.error) else w.part)


def _nudged(wide: Sequence[jax.Array], eps: float) -> list[jax.Array]:
    """Each element off by at most a rounding."""
    keys = jax.random.split(jax.random.key(1), len(wide))
    pairs = zip(wide, keys, strict=True)
    return [a * (1 + eps * jax.random.uniform(k, a.shape, jnp.float64, -1, 1)) for a, k in pairs]


@jax.jit
def _largest_error(got: jax.Array, true: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(got.astype("float64") - true), initial=0.0)


def _error(got: jax.Array, true: jax.Array) -> float:
    return float(_largest_error(got, true))
