"""Gradient checking: is the reverse-mode rule of a JAX function the derivative of that function?

    from jln.testing import assert_vjp

    assert_vjp(my_operator, (x, scale), reference=my_operator_in_plain_jnp)

Gradients under a random cotangent (a rule that ignores its cotangent is right under one of ones) are compared element
by element with a reference's autodiff and with central differences of the function itself. All of it happens in float64
unless another dtype is asked for: differences of a float32 function have three digits, and miss real bugs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jln._testing import derivatives
from jln._testing.derivatives import Call, Problem
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


def numerical_gradient(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    cotangent: Any = None,
    step: float | None = None,
    richardson: int = 0,
    dtype: str | None = "float64",
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
      dtype: to evaluate `f` in. None: as given, and the differences then have few digits.

    Returns:
      A tuple like `args` of NumPy float64 arrays of each argument's shape; None in place of what was held fixed.

    Raises:
      TypeError: `f` is no function, or does not return arrays; an argument is complex, or none is floating.
      ValueError: the dtype is unknown, `richardson` is negative, or the cotangent is not like the results.
    """
    _check_steps(step, richardson)
    problem = Problem.of(f, args, dtype=dtype)
    with problem.context():
        weights = problem.ones() if cotangent is None else problem.given_cotangent(cotangent)
        indices = [np.arange(a.size) for a in problem.floats]
        if step is None:
            given = TOLERANCES[derivatives.coarsest(Problem.of(f, args, dtype=None).floats)].step
            step = derivatives.FIRST_STEP if richardson else given
        found = derivatives.differences(problem.call, problem.floats, problem.rest, weights, indices, step, richardson)
    shaped = [q.reshape(a.shape) for (q, _), a in zip(found, problem.floats, strict=True)]
    return problem.like_arguments(shaped)


def check_vjp(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    reference: Callable[..., Any] | None = None,
    differences: bool = True,
    dtype: str | None = "float64",
    tolerance: Tolerance | None = None,
    step: float | None = None,
    richardson: int = _EXTRAPOLATIONS,
    elements: int | None = 256,
    seed: int = 0,
) -> Report:
    """Compare the reverse-mode gradients of `f` with a reference's and with central differences.

    An element passes if `|got - expected| <= absolute + relative * |expected|`; a NaN never does. Every element is
    compared with the reference, `elements` of each argument with the differences. Gradients much smaller than the
    absolute tolerance pass whatever they are: give arguments a size near 1, or a tolerance. A sum whose terms cancel is
    known to few digits in the dtype of its terms, and may fail there though no program could do better. Where the
    differences themselves lack the digits, as those of a function that computes in float32 inside, a row is "unsure":
    not `ok`, unless a reference says that it is. At a kink (relu at exactly 0) central differences are the mean of both
    slopes, which a right rule need not give.

    Args:
      f: any function of arrays, or pytrees of them, that JAX can trace; it returns an array or a pytree of them.
      args: its arguments. Integers and booleans among them are held fixed.
      reference: the same function, for JAX to differentiate; its results are compared too. None: the differences
        alone decide.
      differences: whether to compare with central differences of `f`.
      dtype: what floating arguments are cast to before `f` sees them. None: as given; then what they are compared with
        is still computed in float64, so that `f` is held to the truth and not to another's roundings.
      tolerance: None: that of `TOLERANCES` for the coarsest dtype among the arguments (as cast) and results of `f`.
      step: as in `numerical_gradient`.
      richardson: as in `numerical_gradient`.
      elements: how many of an argument's elements to take differences of, chosen at random. None: all.
      seed: of the cotangent and of that choice.

    Returns:
      A report: `.ok`, and a row for each argument with its worst element. `str()` of it is a table.

    Raises:
      TypeError: as `numerical_gradient`.
      ValueError: as `numerical_gradient`; the reference's results are not of the shapes of `f`'s, or there is nothing
        to compare with.
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
    args: Sequence[Any],
    *,
    reference: Callable[..., Any] | None = None,
    mode: str = "reverse",
    differences: bool = True,
    dtype: str | None = "float64",
    tolerance: Tolerance | None = None,
    step: float | None = None,
    richardson: int = _EXTRAPOLATIONS,
    elements: int | None = 256,
    seed: int = 0,
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


def assert_vjp(f: Callable[..., Any], args: Sequence[Any], **options: Any) -> None:
    """`check_vjp`, raising AssertionError with the report's table unless it is `ok`."""
    _assert(check_vjp(f, args, **options))


def assert_hvp(f: Callable[..., Any], args: Sequence[Any], **options: Any) -> None:
    """`check_hvp`, raising AssertionError with the report's table unless it is `ok`."""
    _assert(check_hvp(f, args, **options))


def _assert(report: Report) -> None:
    if not report.ok:
        what = "wrong" if any(row.verdict == "WRONG" for row in report.rows) else "unsure"
        raise AssertionError(f"{what} gradients\n{report}")


def _check_steps(step: float | None, richardson: int) -> None:
    if step is not None and not step > 0:
        raise ValueError(f"step must be positive; got {step}")
    if richardson < 0:
        raise ValueError(f"richardson must not be negative; got {richardson}")


def _check(f, args, *, order, derivative, reference, differences, dtype, tolerance, step, richardson, elements, seed):
    _check_steps(step, richardson)
    if reference is None and not differences:
        raise ValueError("there is nothing to compare with: give a reference, or leave differences=True")
    if elements is not None and elements < 1:
        raise ValueError(f"elements must be positive or None; got {elements}")
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a Tolerance; got {type(tolerance).__name__}")
    random = np.random.default_rng(seed)
    ours = Problem.of(f, args, dtype=dtype)
    with ours.context():
        cotangent = ours.random_cotangent(random)
        direction = [random.standard_normal(a.shape).astype(a.dtype) for a in ours.floats]
        got = derivative(*_of_order(order, ours.call, ours.rest, cotangent, direction, ours.floats))
        values = None if reference is None else ours.values()
        label = derivatives.coarsest([*ours.floats, *ours.results()])
    tolerance = tolerance or TOLERANCES[label]

    exact = Problem.of(f, args, dtype="float64", after=dtype)
    rows = []
    with exact.context():
        wide_cotangent, wide_direction = ([a.astype("float64") for a in many] for many in (cotangent, direction))
        if reference is not None and values is not None:
            truth = Problem.of(reference, args, dtype="float64", after=dtype, name="reference")
            true_values = truth.values()
            derivatives.check_alike(values, true_values)
            arguments = _of_order(order, truth.call, truth.rest, wide_cotangent, wide_direction, truth.floats)
            expected = [np.asarray(a, "float64") for a in derivative(*arguments)]
            for name, a, t in zip(ours.result_names(), values, true_values, strict=True):
                rows.append(Row.worst(name, "reference", a, t, tolerance))
            for name, a, t in zip(ours.names, got, expected, strict=True):
                rows.append(Row.worst(name, "reference", a, t, tolerance))
        if differences:
            chosen = [_some(random, a.size, elements) for a in exact.floats]
            slope, rest, weights, _ = _of_order(
                order, exact.call, exact.rest, wide_cotangent, wide_direction, exact.floats
            )
            first = step or (derivatives.FIRST_STEP if richardson else TOLERANCES[label].step)
            found = derivatives.differences(slope, exact.floats, rest, weights, chosen, first, richardson)
            for name, a, indices, (t, off) in zip(ours.names, got, chosen, found, strict=True):
                # Without extrapolation nothing is known of `off`, and the tolerance alone decides.
                rows.append(Row.worst(name, "differences", a, t, tolerance, indices, off if richardson else 0.0))
    kind = "reverse-mode gradients" if order == 1 else "Hessian-vector products"
    title = f"{getattr(f, '__name__', type(f).__name__)}: {kind} in {label}, random cotangent (seed {seed})"
    return Report(title, Row.merged(rows))


def _of_order(
    order: int, call: Call, rest: Any, cotangent: Sequence[Any], direction: Sequence[Any], floats: Sequence[Any]
) -> tuple[Any, Any, Any, Sequence[Any]]:
    """-> (function, rest, cotangent, floats): what is differentiated, its fixed operands, and the others."""
    if order == 1:
        return call, rest, cotangent, floats
    one = [np.ones((), derivatives.slope_dtype(floats))]
    return derivatives.Slope(call), (rest, list(cotangent), list(direction)), one, floats


def _some(random: np.random.Generator, size: int, elements: int | None) -> np.ndarray:
    if elements is None or elements >= size:
        return np.arange(size)
    return np.sort(random.choice(size, elements, replace=False))
