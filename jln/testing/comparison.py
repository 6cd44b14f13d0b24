"""A comparison of two functions that are to be the same: their results and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln.testing import derivatives
from jln.testing.derivatives import Problem
from jln.testing.report import TOLERANCES, Report, Row, Tolerance

# The error that is allowed, as a part of an array's largest element, by the coarsest dtype in which anything is
# computed: roundings of float64, gathered by a model of some layers, and what `TOLERANCES` allows otherwise.
_ALLOWED = {name: t.relative for name, t in TOLERANCES.items()} | {"float64": 1e-10}


def compared(f: Callable[..., Any], own: Callable[..., Any], args: Sequence[Any], *, dtype: Any, seed: int) -> Report:
    """Compare `f` with `own`, the function that it is to be."""
    ours, truth = Problem.of(f, args, dtype=dtype), Problem.of(own, args, dtype=dtype, name="the function itself")
    with ours.context():
        results = truth.results()
        coarsest = _coarsest(jax.make_jaxpr(truth.call)(truth.floats, truth.rest).jaxpr)
        cotangent = derivatives.random_like(np.random.default_rng(seed), results)
        outcomes = []
        for problem in (ours, truth):
            values = jax.jit(problem.call)(problem.floats, problem.rest)
            outcomes.append([values, derivatives.reverse(problem.call)(problem.floats, problem.rest, cotangent)])
        names = (truth.result_names(), truth.names)
        rows = tuple(
            row
            for name, own, true in zip(names, *outcomes, strict=True)
            for row in _rows(name, own, true, _ALLOWED[coarsest])
        )
    name = getattr(own, "__name__", type(own).__name__)
    return Report(f"{name}: fused and untouched, in {coarsest}, random cotangent (seed {seed})", rows)


def _rows(names: Sequence[str], got: Sequence[Any], expected: Sequence[Any], part: float) -> Iterator[Row]:
    sizes = [float(np.max(np.abs(np.asarray(t, "float64")), initial=0.0)) for t in expected]
    for name, a, t, size in zip(names, got, expected, sizes, strict=True):
        # What is zero but for roundings, as the gradient of a bias of keys, has those of its neighbours.
        absolute = part * (size + part * max(sizes))
        yield Row.worst(name, "untouched", a, t, Tolerance(0.0, absolute))


def _coarsest(jaxpr: Any) -> str:
    """The coarsest floating dtype of a program's values, those inside of its equations included."""
    names = {"float64"}  # of a program without equations
    for equation in jaxpr.eqns:
        names |= {v.aval.dtype.name for v in equation.outvars if hasattr(v.aval, "dtype")}
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda a: hasattr(a, "eqns"))
        names |= {_coarsest(getattr(j, "jaxpr", j)) for j in inner if hasattr(j, "eqns")}
    floats = [name for name in TOLERANCES if name in names]
    return max(floats, key=lambda name: float(jnp.finfo(name).eps))
