"""A check of gradients, from its arguments to its report, and a comparison of two functions that are to be the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln._explain import inner_programs
from jln.testing import derivatives
from jln.testing.derivatives import Problem, gradients, slope
from jln.testing.report import TOLERANCES, Report, Row, Tolerance

# Of the numbers that are drawn here: arguments often come from the stream of the seed itself, and would be equal.
_STREAM = int.from_bytes(b"jln")
# The error that a fused function may have, as a part of an array's largest element, by the coarsest dtype that it has
# inside. That of float64 is for a model of some layers.
_ALLOWED = {name: t.relative for name, t in TOLERANCES.items()} | {"float64": 1e-10}


def check(order: int, f, args, reference, dtype, tolerance: Any, elements: int | None, seed: int) -> Report:
    """Check the derivatives of a function, of first or of second order, and report."""
    if elements is not None and elements < 1:
        raise ValueError(f"elements must be positive or None; got {elements}")
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a Tolerance; got {type(tolerance).__name__}")
    ours = Problem.make(f, args, dtype)
    random = _generator(seed)
    with ours.context():
        shapes = ours.shapes()
        cotangent, direction = _draw(random, shapes.values()), _draw(random, ours.floats)
        values, got = _outcome(ours, order, cotangent, direction)
    label = _coarsest(a.dtype.name for a in (*ours.floats, *shapes.values()))
    if tolerance is None and label not in TOLERANCES:
        raise ValueError(f"dtypes must be among {', '.join(TOLERANCES)}, unless a tolerance is given; got {label}")
    allowed = tolerance or TOLERANCES[label]
    exact = Problem.make(f, ours.args, "float64")
    with jax.enable_x64(True):
        if reference is not None:
            truth = dataclasses.replace(exact, f=reference, title="reference")
            known, theirs = ([a.shape for a in some.values()] for some in (shapes, truth.shapes()))
            if theirs != known:
                raise ValueError(f"the reference must return arrays of f's shapes {known}; got {theirs}")
            true_values, expected = _outcome(truth, order, cotangent, direction)
            both = zip([*shapes, *ours.names], [*values, *got], [*true_values, *expected], strict=True)
            rows = [Row.worst(name, "reference", a, t, allowed) for name, a, t in both]
        else:
            indices = [_sample(random, a, elements) for a in got]
            call, weights = _differentiable(exact, order, cotangent, direction)
            slopes = derivatives.differences(call, exact.floats, weights, indices)
            found = zip(ours.names, got, indices, slopes, strict=True)
            rows = [Row.worst(name, "differences", a, t, allowed, chosen, off) for name, a, chosen, (t, off) in found]
            # Elements beside a sample are compared together: each moves by its size, up or down.
            directions = [derivatives.sizes(a) * random.choice([-1.0, 1.0], a.shape) for a in exact.floats]
            starts, rest = [np.zeros(()) for _ in rows], [np.arange(row.compared < row.size) for row in rows]

            def along(steps: Sequence[Any]) -> list[jax.Array]:
                return call([a + t * d for a, t, d in zip(exact.floats, steps, directions, strict=True)])

            slopes = derivatives.differences(along, starts, weights, rest)
            beside = zip(rows, got, directions, slopes, strict=True)
            rows = [row.beside(a, d, s, allowed) if s.size else row for row, a, d, s in beside]
    kind = "reverse-mode gradients" if order == 1 else "Hessian-vector products"
    name = getattr(f, "__name__", type(f).__name__)
    return Report(f"{name}: {kind} in {label}, random cotangent (seed {seed})", tuple(rows))


def compare(f: Callable[..., Any], own: Callable[..., Any], args: Sequence[Any], *, dtype: Any, seed: int) -> Report:
    """Compare the results and gradients of `f` with those of `own`, the function that it is to be."""
    truth = Problem.make(own, args, dtype)
    with truth.context():
        shapes = truth.shapes()
        cotangent = _draw(_generator(seed), shapes.values())
        coarsest = _coarsest(_dtypes(jax.make_jaxpr(truth)(truth.floats)) & {*TOLERANCES} or {"float64"})
        got, expected = (_outcome(p, 1, cotangent, []) for p in (dataclasses.replace(truth, f=f), truth))
    part, rows = _ALLOWED[coarsest], []
    for names, ours, theirs in zip((shapes, truth.names), got, expected, strict=True):
        sizes = [float(np.max(np.abs(np.asarray(t, "float64")), initial=0.0)) for t in theirs]
        for name, a, t, size in zip(names, ours, theirs, sizes, strict=True):
            # What is zero but for roundings, as the gradient of a bias of keys, has those of its neighbours.
            rows.append(Row.worst(name, "untouched", a, t, Tolerance(0.0, part * (size + part * max(sizes)))))
    name = getattr(own, "__name__", type(own).__name__)
    return Report(f"{name}: fused and untouched, in {coarsest}, random cotangent (seed {seed})", tuple(rows))


def _differentiable(problem: Problem, order: int, cotangent: Sequence[Any], direction: Sequence[Any]) -> Any:
    """The function whose gradients are asked for, and its cotangent: of second order the slope along a direction."""
    return (problem, cotangent) if order == 1 else (slope(problem, cotangent, direction), [np.ones(())])


def _outcome(problem: Problem, order: int, cotangent: Sequence[Any], direction: Sequence[Any]) -> Any:
    """The results of a problem, and its gradients of an order."""
    call, weights = _differentiable(problem, order, cotangent, direction)
    return jax.jit(lambda floats: (problem(floats), gradients(call, floats, weights)))(problem.floats)


def _generator(seed: int) -> np.random.Generator:
    if not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed must be an integer from 0 on; got {seed!r}")
    return np.random.default_rng([int(seed), _STREAM])


def _draw(random: np.random.Generator, arrays: Any) -> list[np.ndarray]:
    return [random.standard_normal(a.shape).astype(a.dtype) for a in arrays]


def _sample(random: np.random.Generator, got: Any, elements: int | None) -> np.ndarray:
    """Indices of some elements of a gradient, those that are not finite first."""
    drawn = random.permutation(np.size(got))
    finite = np.isfinite(np.asarray(got, "float64")).reshape(-1)[drawn]
    return np.sort(drawn[np.argsort(finite, kind="stable")][:elements])


def _coarsest(names: Any) -> str:
    """The floating dtype that has the fewest digits."""
    return max(names, key=lambda name: float(jnp.finfo(name).eps))


def _dtypes(program: Any) -> set[str]:
    """The dtypes of a program's values, those inside of its equations included."""
    avals = [v.aval for equation in program.eqns for v in equation.outvars]
    inner = [_dtypes(inner) for equation in program.eqns for inner in inner_programs(equation)]
    return {a.dtype.name for a in avals if hasattr(a, "dtype")}.union(*inner)
