"""Gradient checking: tells whether the reverse-mode rule of a JAX function is the derivative of that function.

    from jln.testing import assert_vjp

    assert_vjp(my_operator, (x, scale), reference=my_operator_in_plain_jnp)

Gradients under a random cotangent are compared element by element with those that JAX makes of a reference. All is in
float64 unless another dtype is asked for, whose roundings hide small errors. `TOLERANCES` has the `Tolerance` for each
dtype that is taken where none is given. For a function without a reference, `jax.test_util.check_grads` compares with
central differences.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jln._explain import explain
from jln._fuse.transformation import fuse
from jln.testing.check import check, compare
from jln.testing.report import TOLERANCES, Report, Row, Tolerance

__all__ = [
    "TOLERANCES",
    "Report",
    "Row",
    "Tolerance",
    "assert_hvp",
    "assert_operators",
    "assert_vjp",
    "check_fuse",
    "check_hvp",
    "check_vjp",
]


def check_vjp(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    reference: Callable[..., Any] | None = None,
    dtype: Any = "float64",
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> Report:
    """Compare the results and the reverse-mode gradients of `f` with those of a reference.

    An element passes if `|got - expected| <= absolute + relative * |expected|`; a NaN never does. Gradients smaller
    than the absolute tolerance pass whatever they are: give arguments a size near 1, or a tolerance. A sum whose terms
    cancel, such as a norm's, has few digits in 16 bits, and is to be checked in float64.

    Args:
      f: any function of arrays, or pytrees of them, that JAX can trace; it returns an array or a pytree of them.
      args: its arguments; integers, booleans and random keys among them are held fixed.
      reference: the same function, for JAX to differentiate. It must be given.
      dtype: the dtype to which floating arguments are cast before `f` sees them. None: as given. The reference takes
        them in float64.
      tolerance: None: that of `TOLERANCES` for the coarsest dtype among the arguments (as cast) and results of `f`.
      seed: of the cotangent.

    Returns:
      A `Report`: `.ok`, and a row for each result and argument with its worst element. `str()` of it is a table.

    Raises:
      TypeError: there is no reference; `f` or it is no function, or does not return arrays; an argument is complex, or
        none is floating.
      ValueError: the dtype is unknown; the reference's results are not of the shapes of `f`'s; or the seed is no
        integer from 0 on.
    """
    return check(1, f, args, reference, dtype, tolerance, seed)


def check_hvp(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    reference: Callable[..., Any] | None = None,
    dtype: Any = "float64",
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> Report:
    """Compare Hessian-vector products of `sum(cotangent * f(*args))`, reverse over reverse, with a reference's.

    The vectors are random. The report and errors are those of `check_vjp`.

    Args:
      f, args, reference, dtype, tolerance: as of `check_vjp`.
      seed: of the cotangent and of the vectors.
    """
    return check(2, f, args, reference, dtype, tolerance, seed)


def check_fuse(
    f: Callable[..., Any],
    *args: Any,
    linears: bool = False,
    implementation: str | None = None,
    dtype: Any = "float64",
    seed: int = 0,
    **kwargs: Any,
) -> Report:
    """Compare the results and the gradients of `jln.fuse(f)` with those of `f`, element by element.

    An element passes if its error is a small part of its array's largest element: 1e-10 where all of `f` is in float64,
    1e-4 where some of it is in float32 whatever its arguments are, and as `TOLERANCES` has it where some is in 16 bits,
    as `f` rounds there what the operators do not. The report's title says how many operators there are, or that
    nothing was fused: then there was nothing to find. Errors are those of `check_vjp`.

    Args:
      f: as of `check_vjp`, untouched.
      *args, **kwargs: its arguments, as of `jln.explain`: arrays, objects of Flax NNX, and what stays as it is. No
        gradients are taken of those by name. One with the name of an option is for `functools.partial`.
      linears, implementation: as of `jln.fuse`.
      dtype, seed: as of `check_vjp`.
    """
    transform = functools.partial(fuse, linears=linears, implementation=implementation)
    own = functools.wraps(f)(functools.partial(f, **kwargs)) if kwargs else f
    return compare(transform, own, args, dtype=dtype, seed=seed)


def assert_operators(f: Callable[..., Any], *args: Any, expect: Mapping[str, int], **kwargs: Any) -> None:
    """Raise unless `f(*args)` calls so many of each operator: a model may lose one to a change, without a word.

    Args:
      f: any function that `jln.explain` takes, such as one that `jln.fuse` returned.
      *args, **kwargs: its arguments.
      expect: the number of calls by the operators' names, as in `{"add_rms_norm": 24, "rms_norm": 1}`. A call in a
        loop counts once.

    Raises:
      AssertionError: the calls are others; the message lists them, and what `jln.fuse` left, with its places.
    """
    routes = explain(f, *args, **kwargs)
    calls = collections.Counter(r.layer.removeprefix("jln.") for r in routes if r.path != "plain")
    if calls != collections.Counter(expect):
        raise AssertionError(f"expected the operators {dict(expect)}; found {dict(calls)}: {routes}")


def assert_vjp(f: Callable[..., Any], args: Sequence[Any], **options: Any) -> None:
    """Raise AssertionError with the table of the report of `check_vjp`, unless that is `ok`.

    Args:
      f, args: as of `check_vjp`.
      **options: the other arguments of `check_vjp`.
    """
    if not (report := check_vjp(f, args, **options)).ok:
        raise AssertionError(f"wrong gradients\n{report}")


def assert_hvp(f: Callable[..., Any], args: Sequence[Any], **options: Any) -> None:
    """Raise AssertionError with the table of the report of `check_hvp`, unless that is `ok`.

    Args:
      f, args: as of `check_hvp`.
      **options: the other arguments of `check_hvp`.
    """
    if not (report := check_hvp(f, args, **options)).ok:
        raise AssertionError(f"wrong gradients\n{report}")
