"""A check of gradients, from its arguments to its report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import jax
import numpy as np

from jln.testing import derivatives
from jln.testing.derivatives import FlatCall, Problem
from jln.testing.report import TOLERANCES, Report, Row, Tolerance

_STREAM = int.from_bytes(b"jln")


def _seeds(seed: int | Sequence[int]) -> list[int]:
    seeds: list[Any] = list(seed) if isinstance(seed, Iterable) else [seed]
    if not seeds or not all(isinstance(s, Integral) and int(s) >= 0 for s in seeds):
        raise ValueError(f"seed must be an integer from 0 on, or several of them; got {seed!r}")
    return [int(s) for s in seeds]


def _tolerance(label: str) -> Tolerance:
    if label not in TOLERANCES:
        raise ValueError(f"dtypes must be among {', '.join(TOLERANCES)}, unless a tolerance is given; got {label}")
    return TOLERANCES[label]


def check(f, args, *, order, derivative, reference, differences, dtype, tolerance, elements, seed):
    """Check the gradients of a function, for each seed, and report.

    Each program is made once, for the shapes of the first seed, and run with the numbers of all.
    """
    seeds = _seeds(seed)
    if reference is None and not differences:
        raise ValueError("there is nothing to compare with: give a reference, or leave differences=True")
    if elements is not None and elements < 1:
        raise ValueError(f"elements must be positive or None; got {elements}")
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a Tolerance; got {type(tolerance).__name__}")

    def problems(seed):
        """Three problems: `f` as asked for, `f` in float64, and the reference in float64."""
        arguments: Any = args(np.random.default_rng(seed)) if callable(args) else args
        yield Problem.of(f, arguments, dtype=dtype)
        yield Problem.of(f, arguments, dtype="float64", after=dtype)
        yield Problem.of(reference or f, arguments, dtype="float64", after=dtype, name="reference")

    ours, exact, truth = firsts = list(problems(seeds[0]))
    with ours.context():
        results = ours.results()
        label, result_names = derivatives.coarsest([*ours.floats, *results]), ours.result_names()
    allowed = tolerance or _tolerance(label)
    gradients, true_gradients = (derivative(_of_order(order, p.call)) for p in (ours, truth))
    values, true_values = jax.jit(ours.call), jax.jit(truth.call)
    quotients = derivatives.differences(_of_order(order, exact.call))
    quotients_along = derivatives.differences(derivatives.Along(_of_order(order, exact.call)))

    def rows_of(seed: int) -> Iterator[Row]:
        ours, exact, truth = (new.like(first) for new, first in zip(problems(seed), firsts, strict=True))
        # A stream of its own: arguments are often drawn from that of the seed, and would be equal to the cotangent.
        random = np.random.default_rng([seed, _STREAM])
        cotangent, direction = (derivatives.random_like(random, many) for many in (results, ours.floats))
        wide = [[a.astype("float64") for a in many] for many in (cotangent, direction)]
        with ours.context():
            got = gradients(*_operands(order, ours, cotangent, direction))
            got_values = [] if reference is None else values(ours.floats, ours.rest)
        with exact.context():
            if reference is not None:
                expected_values = true_values(truth.floats, truth.rest)
                derivatives.check_alike(got_values, expected_values)
                for name, a, t in zip(result_names, got_values, expected_values, strict=True):
                    yield Row.worst(name, "reference", a, t, allowed, seed=seed)
                expected = true_gradients(*_operands(order, truth, *wide))
                for name, a, t in zip(ours.names, got, expected, strict=True):
                    yield Row.worst(name, "reference", a, t, allowed, seed=seed)
            if differences:
                floats, rest, weights = _operands(order, exact, *wide)
                chosen = [_some(random, a.size, elements) for a in exact.floats]
                if reference is None:
                    chosen = [_with_what_is_not_finite(c, np.asarray(a)) for c, a in zip(chosen, got, strict=True)]
                slopes = quotients(floats, rest, weights, chosen)
                whole = all(np.isfinite(np.asarray(a, "float64")).all() for a in got) or not all(
                    np.isfinite(np.asarray(a, "float64")).all() for a in values(ours.floats, ours.rest)
                )
                rows = [
                    Row.worst(name, "differences", a, t, allowed, indices, doubt(t, off, whole), seed)
                    for name, a, indices, (t, off) in zip(ours.names, got, chosen, slopes, strict=True)
                ]
                if reference is None and any(row.compared < row.size for row in rows):
                    directions = [derivatives.random_direction(random, a) for a in floats]
                    start, first = [np.zeros(()) for _ in floats], [np.arange(row.compared < row.size) for row in rows]
                    slopes = quotients_along(start, (rest, floats, directions), weights, first)
                    along = [
                        row if not len(t) else Row.along(row, a, d, t, allowed, doubt(t, off, whole))
                        for row, a, d, (t, off) in zip(rows, got, directions, slopes, strict=True)
                    ]
                    rows = [
                        max(both, key=lambda row: (not row.ok, not row.unsure))
                        for both in zip(rows, along, strict=True)
                    ]
                yield from rows

    def doubt(expected: np.ndarray, off: np.ndarray, defined: bool) -> np.ndarray:
        """The uncertainty of differences.

        defined: no gradient is infinite or NaN where all values are finite. Differences that overflow tell nothing.
        """
        return np.where(np.isfinite(expected), off, np.inf if defined else 0.0)

    kind = "reverse-mode gradients" if order == 1 else "Hessian-vector products"
    title = f"{getattr(f, '__name__', type(f).__name__)}: {kind} in {label}, random cotangent"
    by_seed = {seed: Report(f"{title} (seed {seed})", Row.of_one_seed(rows_of(seed))) for seed in seeds}
    if len(by_seed) == 1:
        return by_seed[seeds[0]]
    rows = Row.of_seeds(row for report in by_seed.values() for row in report.rows)
    return Report(f"{title}s ({len(by_seed)} seeds, from {min(seeds)} to {max(seeds)})", rows, by_seed)


def _of_order(order: int, call: FlatCall) -> Any:
    """The function that is differentiated: `call` itself, or for second order its derivative along a direction."""
    return call if order == 1 else derivatives.Slope(call)


def _operands(order: int, problem: Problem, cotangent: Sequence[Any], direction: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return (floats, rest, cotangent) of the function that is differentiated."""
    if order == 1:
        return problem.floats, problem.rest, cotangent
    one = [np.ones((), derivatives.slope_dtype(problem.floats))]
    return problem.floats, (list(problem.rest), list(cotangent), list(direction)), one


def _with_what_is_not_finite(indices: np.ndarray, got: np.ndarray) -> np.ndarray:
    """The indices with one of an element that is not finite among them, if there is any: a sample could miss it."""
    lost = np.flatnonzero(~np.isfinite(got.astype("float64")))
    return np.sort(np.append(indices[1:], lost[0])) if len(lost) and lost[0] not in indices else indices


def _some(random: np.random.Generator, size: int, elements: int | None) -> np.ndarray:
    if elements is None or elements >= size:
        return np.arange(size)
    return np.sort(random.choice(size, elements, replace=False))
