"""Whether a peer's numbers are right, before anybody times them: by the rule of `_accuracy`, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jln
from jln import _accuracy, _catalogue
from jln._accuracy import Accuracy, Judge
from jln._bench.blocks import Block
from jln._bench.workloads import Workload


def arrays(workload: Workload, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """-> (arguments, cotangents), arrays or tuples of them, normal: scales around 1, kernels that keep a result as
    large as what it is made of. All are numbers of the workload's dtype, for peers whose parameters have it.
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
    def made(key):
        keys = iter(jax.random.split(key, len(jax.tree.leaves([a for _, a in described]))))
        return [jax.tree.map(lambda a, role=array.role: one(role, a, next(keys)), tree) for array, tree in described]

    found = made(jax.random.key(seed))
    count = len(workload.signature.arguments)
    return found[:count], found[count:]


def names(workload: Workload, direction: str = "both") -> list[str]:
    """Of what a program of a direction returns, "gradient" being both, less the results; of a step by default."""
    found, signature = workload.arrays(), workload.signature
    results = [(a.name, found[a.name]) for a in signature.results if direction in ("forward", "both")]
    wanted = direction != "forward" and "backward" in workload.directions
    return _catalogue.flat_names(results + [(f"d{a.name}", found[a.name]) for a in signature.gradients if wanted])


def reference(workload: Workload, rounded: bool) -> Callable[..., jax.Array]:
    """Plain jnp. rounded: a sum with the residual is rounded to the workload's dtype, whatever the arguments' is; else
    it may be left unrounded, as XLA does with what peers write.
    """
    if isinstance(workload, Block):
        qkv, add = workload.parts()
        return workload.of(reference(qkv, rounded), reference(add, rounded))
    if not workload.entry.adds:
        return workload.function(jln.reference)
    total_dtype = workload.dtype if rounded else None
    return workload.in_order(_accuracy.of_sum(workload.entry, total_dtype, **workload.axis_option))


def judge(workload: Workload, arguments: Sequence[Any], cotangents: Sequence[Any]) -> Judge:
    """Of a step's results."""
    given = [*arguments, *(cotangents if "backward" in workload.directions else ())]
    plain = jax.tree.leaves(jax.jit(workload.step(reference(workload, rounded=False)))(*given))
    with jax.enable_x64(True):
        step = jax.jit(workload.step(reference(workload, rounded=True)))
        wide = jax.tree.map(lambda a: a.astype("float64"), given)
        true, nudged = (jax.tree.leaves(step(*a)) for a in (wide, _accuracy.nudged(wide, workload.dtype)))
    examples = math.prod(workload.sizes().get("examples", ()))
    sums: dict[str, int] = {}
    for a in workload.signature.parameters:
        rows = workload.rows // (examples if "examples" in a.dimensions else 1)
        sums |= {name: rows for name in _catalogue.flat_names([(f"d{a.name}", workload.arrays()[a.name])])}
    return Judge(names(workload), true, nudged, plain, workload.dtype, sums)


def worst(judge: Judge, workload: Workload, direction: str, got: Sequence[jax.Array]) -> Accuracy:
    """Of what a program of that direction returned, what is the nearest to its limit, or beyond."""
    found = [judge.accuracy(name, a) for name, a in zip(names(workload, direction), got, strict=True)]
    return max(found, key=lambda a: math.inf if math.isnan(a.part) else a.part)
