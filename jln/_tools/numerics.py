"""The check of a peer's numbers before it is timed: on its device, by the rule of `jln._tools.accuracy`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jln
from jln._tools import accuracy, catalogue
from jln._tools.accuracy import Accuracy, Judge
from jln._tools.blocks import Block
from jln._tools.workloads import Workload


def arrays(workload: Workload, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Return a workload's arguments and cotangents, filled with normal random numbers.

    Each is an array or a tuple of arrays. Scales are around 1, and kernels are small enough to keep a result as large
    as what it is made of. All numbers fit the workload's dtype, for peers whose parameters have it.
    """
    described = list(zip(workload.signature.arrays, workload.arrays().values(), strict=True))

    def one(role, a, key):
        values = jax.random.normal(key, a.shape, jnp.float32)
        if role == "scale":
            values = values / 4 + 1
        elif role == "kernel":
            values = values / math.sqrt(a.shape[0])
        return values.astype(workload.dtype).astype(a.dtype)

    @jax.jit
    def draw(key):
        keys = iter(jax.random.split(key, len(jax.tree.leaves([a for _, a in described]))))
        return [jax.tree.map(lambda a, role=array.role: one(role, a, next(keys)), tree) for array, tree in described]

    numbers = draw(jax.random.key(seed))
    count = len(workload.signature.arguments)
    return numbers[:count], numbers[count:]


def names(workload: Workload, direction: str = "both") -> list[str]:
    """The names of what a program returns, by default of a whole step. "gradient" is "both" without the results."""
    shapes, signature = workload.arrays(), workload.signature
    results = [(a.name, shapes[a.name]) for a in signature.results if direction in ("forward", "both")]
    wanted = direction != "forward" and "backward" in workload.directions
    return catalogue.flat_names(results + [(f"d{a.name}", shapes[a.name]) for a in signature.gradients if wanted])


def reference(workload: Workload, rounded: bool) -> Callable[..., jax.Array]:
    """The workload's function in plain jnp.

    rounded: round the sum with the residual to the workload's dtype, whatever the arguments' dtype. Otherwise the sum
      may stay unrounded, as in what XLA makes of a peer's sum.
    """
    if isinstance(workload, Block):
        qkv, add = workload.parts()
        return workload.of(reference(qkv, rounded), reference(add, rounded))
    if not workload.entry.adds:
        return workload.function(jln.reference)
    total_dtype = workload.dtype if rounded else None
    return workload.in_order(accuracy.of_sum(workload.entry, total_dtype, **workload.axis_option))


def judge(workload: Workload, arguments: Sequence[Any], cotangents: Sequence[Any]) -> Judge:
    """The judge of a workload's training step at these arguments."""
    operands = [*arguments, *(cotangents if "backward" in workload.directions else ())]
    plain = jax.tree.leaves(jax.jit(workload.step(reference(workload, rounded=False)))(*operands))
    with jax.enable_x64(True):
        step = jax.jit(workload.step(reference(workload, rounded=True)))
        wide = jax.tree.map(lambda a: a.astype("float64"), operands)
        true, nudged = (jax.tree.leaves(step(*a)) for a in (wide, accuracy.nudged(wide, workload.dtype)))
    examples = math.prod(workload.sizes().get("examples", ()))
    sums: dict[str, int] = {}
    for a in workload.signature.parameters:
        rows = workload.rows // (examples if "examples" in a.dimensions else 1)
        sums |= {name: rows for name in catalogue.flat_names([(f"d{a.name}", workload.arrays()[a.name])])}
    return Judge(names(workload), true, nudged, plain, workload.dtype, sums)


def worst(judge: Judge, workload: Workload, direction: str, got: Sequence[jax.Array]) -> Accuracy:
    """The accuracy of that result of a program which is nearest to its limit, or furthest beyond it."""
    accuracies = [judge.accuracy(name, a) for name, a in zip(names(workload, direction), got, strict=True)]
    return max(accuracies, key=lambda a: math.inf if math.isnan(a.part) else a.part)
