"""Gradient checking: is the reverse-mode rule of a JAX function the derivative of that function?

    from jln.testing import assert_vjp

    assert_vjp(my_operator, (x, scale), reference=my_operator_in_plain_jnp)

Gradients under a random cotangent (a rule that ignores its cotangent is right under one of ones) are compared element
by element with a reference's autodiff and with central differences of the function itself. All of it happens in float64
unless another dtype is asked for: differences of a float32 function have three digits, and miss real bugs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jln._testing import derivatives
from jln._testing.derivatives import FlatCall, Problem
from jln._testing.report import Report, Row, Tolerance

__all__ = [
    "TOLERANCES",
    "Report",
    "Row",
    "Tolerance",
    "assert_hvp",
    "assert_vjp",
    "check_hvp",
    "check_vjp",
    "numerical_gradient",
]

# By the coarsest dtype among a function's arguments and results. The relative tolerance of the 16-bit types is some ten
# roundings, which is what a chain of elementwise operations gathers; that of the others leaves room for long sums.
# bfloat16 has three bits fewer than float16, so each of its three numbers is 2^3 times float16's.
TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        "float16": Tolerance(relative=1e-2, absolute=1e-4, step=1e-3),
        "bfloat16": Tolerance(relative=8e-2, absolute=8e-4, step=8e-3),
        "float32": Tolerance(relative=1e-4, absolute=1e-7, step=1e-5),
        "float64": Tolerance(relative=1e-7, absolute=1e-10, step=1e-7),
    }
)
# Of steps, each a quarter of the one before, that `check_vjp` extrapolates from: the smallest is 1.5e-11 of the size of
# an element, near enough for 1/x at 1e-8 of the other elements' size.
_EXTRAPOLATIONS = 16
_STREAM = int.from_bytes(b"jln")
# Of arguments: a tuple of them, or a function that draws one.
Args = Sequence[Any] | Callable[[np.random.Generator], Sequence[Any]]


def numerical_gradient(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    cotangent: Any = None,
    step: float | None = None,
    richardson: int = 0,
    dtype: Any = "float64",
) -> tuple[Any, ...]:
    """The gradient of `sum(cotangent * f(*args))`, element by element, by central differences.

    Args:
      f: any function of arrays, or pytrees of them, that JAX can trace; it returns an array or a pytree of them.
      args: its arguments. Integers and booleans among them are held fixed.
      cotangent: of the results' structure and shapes. None: ones.
      step: the first step, relative to the size of an element: its own, or the median of its array where that is
        larger. None: that of `TOLERANCES` for the dtype of `f`'s arguments as given; with `richardson`, 2^-4.
      richardson: how many times to extrapolate, each from a step a quarter of the last; the estimate of least error is
        taken, for each element by itself. 0: central differences of one step. Richardson, "The approximate arithmetical
        solution by finite differences" (1911); Ridders, "Accurate computation of F'(x) and F'(x)F''(x)" (1982).
      dtype: to evaluate `f` in: its name, or whatever NumPy takes for it. None: as given, and the differences then have
        few digits.

    Returns:
      A tuple like `args` of NumPy float64 arrays of each argument's shape; None in place of what was held fixed.

    Raises:
      TypeError: `f` is no function, or does not return arrays; an argument is complex, or none is floating.
      ValueError: the dtype is unknown, the step not positive and finite, `richardson` negative, or the cotangent not
        like the results.
    """
    _check_steps(step, richardson)
    problem = Problem.of(f, args, dtype=dtype)
    with problem.context():
        weights = problem.ones() if cotangent is None else problem.given_cotangent(cotangent)
        indices = [np.arange(a.size) for a in problem.floats]
        if step is None:
            given = TOLERANCES[derivatives.coarsest(Problem.of(f, args, dtype=None).floats)].step
            step = derivatives.FIRST_STEP if richardson else given
        run = derivatives.differences(problem.call)
        found = run(problem.floats, problem.rest, weights, indices, step, richardson)
    shaped = [q.reshape(a.shape) for (q, _), a in zip(found, problem.floats, strict=True)]
    return problem.like_arguments(shaped)


def check_vjp(
    f: Callable[..., Any],
    args: Args,
    *,
    reference: Callable[..., Any] | None = None,
    differences: bool = True,
    dtype: Any = "float64",
    tolerance: Tolerance | None = None,
    step: float | None = None,
    richardson: int = _EXTRAPOLATIONS,
    elements: int | None = 256,
    seed: int | Sequence[int] = 0,
) -> Report:
    """Compare the reverse-mode gradients of `f` with a reference's and with central differences.

    An element passes if `|got - expected| <= absolute + relative * |expected|`; a NaN never does. Every element is
    compared with the reference, `elements` of each argument with the differences. Gradients smaller than the absolute
    tolerance pass whatever they are, as a note below the table says: give arguments a size near 1, or a tolerance. A
    sum whose terms cancel is known to few digits in the dtype of its terms, and may fail there though no program could
    do better. The 16-bit tolerances are for single operations and chains of them: a norm computed in 16 bits, whose
    sums cancel, fails them, and is to be checked in float64. Where the
    differences themselves lack the digits, as those of a function that computes in float32 inside, or of a sigmoid at
    1e-30, which no step of such a size changes, a row is "unsure": not `ok`, unless a reference says that it is. At a
    kink (relu at exactly 0) central differences are the mean of both slopes, which a right rule need not give.

    Args:
      f: any function of arrays, or pytrees of them, that JAX can trace; it returns an array or a pytree of them.
      args: its arguments; integers, booleans and random keys among them are held fixed, and traced: what must be static
        is for `functools.partial`. Or a function that draws them, all of one
        structure and shape, from a NumPy generator of each seed.
      reference: the same function, for JAX to differentiate; its results are compared too. None: the differences
        alone decide.
      differences: whether to compare with central differences of `f`.
      dtype: what floating arguments are cast to before `f` sees them. None: as given; then what they are compared with
        is still computed in float64, so that `f` is held to the truth and not to another's roundings.
      tolerance: None: that of `TOLERANCES` for the coarsest dtype among the arguments (as cast) and results of `f`.
      step: as in `numerical_gradient`; None: that of `tolerance`, if it is given.
      richardson: as in `numerical_gradient`.
      elements: how many of an argument's elements to take differences of, chosen at random. None: all. Where these are
        fewer than there are, and there is no reference, one that is not finite is among them if there is any, and all
        of them together are compared along one random direction: a row "direction", if that is what fails.
      seed: of the cotangent and of that choice, and of `args` where it is a function. Several of them share programs
        that are compiled once.

    Returns:
      A report: `.ok`, and a row for each argument with its worst element. `str()` of it is a table. With several seeds
      it is of the worst, and `.by_seed` has a report of each.

    Raises:
      TypeError: as `numerical_gradient`.
      ValueError: as `numerical_gradient`; the reference's results are not of the shapes of `f`'s; there is nothing to
        compare with; a seed is no integer from 0 on; or what `args` draws differs in shape from seed to seed.
    """
    return _check(
        f,
        args,
        order=1,
        derivative=derivatives.reverse,
        reference=reference,
        differences=differences,
        dtype=dtype,
        tolerance=tolerance,
        step=step,
        richardson=richardson,
        elements=elements,
        seed=seed,
    )


def check_hvp(
    f: Callable[..., Any],
    args: Args,
    *,
    reference: Callable[..., Any] | None = None,
    mode: str = "reverse",
    differences: bool = True,
    dtype: Any = "float64",
    tolerance: Tolerance | None = None,
    step: float | None = None,
    richardson: int = _EXTRAPOLATIONS,
    elements: int | None = 256,
    seed: int | Sequence[int] = 0,
) -> Report:
    """`check_vjp` for second order: Hessian-vector products of `sum(cotangent * f(*args))`, both vectors random.

    The differences are those of the gradient of `f` along the vector, so they tell whether the rule is differentiated
    rightly, not whether it is right: that is `check_vjp`'s.

    Args:
      f: as in `check_vjp`.
      args: as in `check_vjp`.
      reference: as in `check_vjp`.
      mode: "reverse" over reverse, or "forward" over reverse.
      differences: as in `check_vjp`.
      dtype: as in `check_vjp`.
      tolerance: as in `check_vjp`.
      step: as in `check_vjp`.
      richardson: as in `check_vjp`.
      elements: as in `check_vjp`.
      seed: as in `check_vjp`.

    Returns:
      A report, as `check_vjp`.

    Raises:
      TypeError: as `check_vjp`.
      ValueError: as `check_vjp`, or the mode is unknown.
    """
    modes = {"reverse": derivatives.reverse, "forward": derivatives.forward_over_reverse}
    if mode not in modes:
        raise ValueError(f"mode must be 'reverse' or 'forward'; got {mode!r}")
    return _check(
        f,
        args,
        order=2,
        derivative=modes[mode],
        reference=reference,
        differences=differences,
        dtype=dtype,
        tolerance=tolerance,
        step=step,
        richardson=richardson,
        elements=elements,
        seed=seed,
    )


def assert_vjp(f: Callable[..., Any], args: Args, **options: Any) -> None:
    """`check_vjp`, raising AssertionError with the report's table unless it is `ok`."""
    _assert(check_vjp(f, args, **options))


def assert_hvp(f: Callable[..., Any], args: Args, **options: Any) -> None:
    """`check_hvp`, raising AssertionError with the report's table unless it is `ok`."""
    _assert(check_hvp(f, args, **options))


def _assert(report: Report) -> None:
    if not report.ok:
        what = "wrong" if any(row.verdict == "WRONG" for row in report.rows) else "unsure"
        raise AssertionError(f"{what} gradients\n{report}")


def _check_steps(step: float | None, richardson: int) -> None:
    if step is not None and not 0 < step < math.inf:
        raise ValueError(f"step must be positive and finite; got {step}")
    if richardson < 0:
        raise ValueError(f"richardson must not be negative; got {richardson}")


def _seeds(seed: int | Sequence[int]) -> list[int]:
    seeds: list[Any] = list(seed) if isinstance(seed, Iterable) else [seed]
    if not seeds or not all(isinstance(s, Integral) and int(s) >= 0 for s in seeds):
        raise ValueError(f"seed must be an integer from 0 on, or several of them; got {seed!r}")
    return [int(s) for s in seeds]


def _tolerance(label: str) -> Tolerance:
    if label not in TOLERANCES:
        raise ValueError(f"dtypes must be among {', '.join(TOLERANCES)}, unless a tolerance is given; got {label}")
    return TOLERANCES[label]


def _check(f, args, *, order, derivative, reference, differences, dtype, tolerance, step, richardson, elements, seed):
    """Each program is made once, for the shapes of the first seed, and run with the numbers of all."""
    _check_steps(step, richardson)
    seeds = _seeds(seed)
    if reference is None and not differences:
        raise ValueError("there is nothing to compare with: give a reference, or leave differences=True")
    if elements is not None and elements < 1:
        raise ValueError(f"elements must be positive or None; got {elements}")
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a Tolerance; got {type(tolerance).__name__}")

    def problems(seed):
        """`f` as asked for, and in float64; the reference."""
        given: Any = args(np.random.default_rng(seed)) if callable(args) else args
        yield Problem.of(f, given, dtype=dtype)
        yield Problem.of(f, given, dtype="float64", after=dtype)
        yield Problem.of(reference or f, given, dtype="float64", after=dtype, name="reference")

    ours, exact, truth = firsts = list(problems(seeds[0]))
    with ours.context():
        results = ours.results()
        label, result_names = derivatives.coarsest([*ours.floats, *results]), ours.result_names()
    allowed = tolerance or _tolerance(label)
    step = step if step is not None or tolerance is None else tolerance.step
    _check_steps(step, richardson)
    first_step = step or (derivatives.FIRST_STEP if richardson else _tolerance(label).step)
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
                found = quotients(floats, rest, weights, chosen, first_step, richardson)
                whole = all(np.isfinite(np.asarray(a, "float64")).all() for a in got) or not all(
                    np.isfinite(np.asarray(a, "float64")).all() for a in values(ours.floats, ours.rest)
                )
                rows = [
                    Row.worst(name, "differences", a, t, allowed, indices, doubt(t, off, whole), seed)
                    for name, a, indices, (t, off) in zip(ours.names, got, chosen, found, strict=True)
                ]
                if reference is None and any(row.compared < row.size for row in rows):
                    directions = [derivatives.random_direction(random, a) for a in floats]
                    start, first = [np.zeros(()) for _ in floats], [np.arange(row.compared < row.size) for row in rows]
                    found = quotients_along(start, (rest, floats, directions), weights, first, first_step, richardson)
                    along = [
                        row if not len(t) else Row.along(row, a, d, t, allowed, doubt(t, off, whole))
                        for row, a, d, (t, off) in zip(rows, got, directions, found, strict=True)
                    ]
                    rows = [
                        max(both, key=lambda row: (not row.ok, not row.unsure))
                        for both in zip(rows, along, strict=True)
                    ]
                yield from rows

    def doubt(expected: np.ndarray, off: np.ndarray, defined: bool) -> np.ndarray:
        """How far off differences may be. Without extrapolation nothing is known, and the tolerance alone decides.

        defined: no gradient is infinite or NaN where all values are finite. Differences that overflow tell nothing.
        """
        return np.where(np.isfinite(expected), off if richardson else 0.0, np.inf if defined else 0.0)

    kind = "reverse-mode gradients" if order == 1 else "Hessian-vector products"
    title = f"{getattr(f, '__name__', type(f).__name__)}: {kind} in {label}, random cotangent"
    by_seed = {seed: Report(f"{title} (seed {seed})", Row.of_one_seed(rows_of(seed))) for seed in seeds}
    if len(by_seed) == 1:
        return by_seed[seeds[0]]
    rows = Row.of_seeds(row for report in by_seed.values() for row in report.rows)
    return Report(f"{title}s ({len(by_seed)} seeds, from {min(seeds)} to {max(seeds)})", rows, by_seed)


def _of_order(order: int, call: FlatCall) -> Any:
    """What is differentiated."""
    return call if order == 1 else derivatives.Slope(call)


def _operands(order: int, problem: Problem, cotangent: Sequence[Any], direction: Sequence[Any]) -> tuple[Any, Any, Any]:
    """-> (floats, rest, cotangent) of what is differentiated."""
    if order == 1:
        return problem.floats, problem.rest, cotangent
    one = [np.ones((), derivatives.slope_dtype(problem.floats))]
    return problem.floats, (list(problem.rest), list(cotangent), list(direction)), one


def _with_what_is_not_finite(indices: np.ndarray, got: np.ndarray) -> np.ndarray:
    """One of those that are not, if there are any, among as many indices as before: a sample could miss it."""
    lost = np.flatnonzero(~np.isfinite(got.astype("float64")))
    return np.sort(np.append(indices[1:], lost[0])) if len(lost) and lost[0] not in indices else indices


def _some(random: np.random.Generator, size: int, elements: int | None) -> np.ndarray:
    if elements is None or elements >= size:
        return np.arange(size)
    return np.sort(random.choice(size, elements, replace=False))
