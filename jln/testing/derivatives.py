"""Derivatives of any traceable function: reverse mode, forward over reverse, and central differences.

Functions here take `(floats, rest)`, the leaves of their arguments that are differentiated and those that are not, and
return a list of their floating results. `FlatCall` and `Slope` make such functions. The programs made here are those of
one check, which compiles them once for all its seeds and keeps none: a program kept from an earlier check would not
know that a rule, or what `f` reads, has changed since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

RATIO = 4  # of one step to the next
EXTRAPOLATIONS = 16  # the smallest step is 1.5e-11 of an element: near enough for 1/x at 1e-8 of the others' size
Program = Callable[[Sequence[Any], Any, Sequence[Any]], list[jax.Array]]  # floats, rest, cotangent -> gradients
CONTRADICTED = 1e4  # times nearer each other are finer quotients than they are to an estimate that they refute
FIRST_STEP = 2.0**-4  # of an extrapolation: no more than a function may be expected to look like a polynomial on
LARGE = 1e-3  # a part of a result by which the finest step should not move it, unless as the estimate says
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, eq=False)  # JAX takes equal functions for one, and keeps what it traced of them
class FlatCall:
    """The function `f(*args)` as a function of the leaves of `args`."""

    f: Callable[..., Any]
    tree: Any
    floating: tuple[bool, ...]
    name: str = "f"

    def __call__(self, floats: Sequence[Any], rest: Sequence[Any]) -> list[jax.Array]:
        return [a for a in jax.tree.leaves(self.results(floats, rest)) if jnp.issubdtype(a.dtype, jnp.floating)]

    def results(self, floats: Sequence[Any], rest: Sequence[Any]) -> Any:
        parts = iter(floats), iter(rest)
        args = jax.tree.unflatten(self.tree, [next(parts[0] if is_float else parts[1]) for is_float in self.floating])
        results = self.f(*args)
        for leaf in jax.tree.leaves(results):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                raise TypeError(f"{self.name} must return arrays; got {type(leaf).__name__}")
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise TypeError(f"{self.name} must return real arrays; got {leaf.dtype.name}")
        return jax.tree.map(jnp.asarray, results)


@dataclasses.dataclass(frozen=True, eq=False)
class Slope:
    """The derivative of `sum(cotangent * call)` along a direction.

    Its fixed arguments are `(rest, cotangent, direction)`.
    """

    call: FlatCall

    def __call__(self, floats: Sequence[Any], rest: tuple) -> list[jax.Array]:
        rest, cotangent, direction = rest
        gradients = _pulled_back(self.call, floats, rest, cotangent)
        dtype = slope_dtype(floats)
        return [
            sum((jnp.vdot(g, d).astype(dtype) for g, d in zip(gradients, direction, strict=True)), jnp.zeros((), dtype))
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Along:
    """`call` as a function of how far its floats are moved, each along a direction: one number for each of the floats.

    Its fixed arguments are `(rest, floats, directions)`.
    """

    call: FlatCall | Slope

    def __call__(self, floats: Sequence[Any], rest: tuple) -> list[jax.Array]:
        rest, origin, directions = rest
        return self.call([a + t * d for a, t, d in zip(origin, floats, directions, strict=True)], rest)


def slope_dtype(floats: Sequence[Any]) -> Any:
    return np.dtype("float64" if any(a.dtype == np.float64 for a in floats) else "float32")


def _pulled_back(call: Any, floats: Sequence[Any], rest: Any, cotangent: Sequence[Any]) -> list[jax.Array]:
    results, pullback = jax.vjp(lambda floats: call(floats, rest), list(floats))
    # Results of a function that computes in float32 inside are float32, whatever its arguments are cast to.
    return pullback([c.astype(r.dtype) for c, r in zip(cotangent, results, strict=True)])[0]


def reverse(call: FlatCall | Slope) -> Program:
    """A program for the gradients of `sum(cotangent * call(floats, rest))`."""
    return _program(functools.partial(_pulled_back, call))


def forward_over_reverse(slope: Slope) -> Program:
    """A program for the gradient of a slope, by forward over reverse mode.

    The gradient of a slope is the Hessian times the direction, since the Hessian is symmetric.
    """

    def product(floats, rest, cotangent):
        del cotangent  # of a slope: one
        inner, weights, direction = rest
        return jax.jvp(lambda a: _pulled_back(slope.call, a, inner, weights), (floats,), (direction,))[1]

    return _program(product)


def _program(function: Callable[..., Any]) -> Program:
    program = jax.jit(function)
    return lambda floats, rest, cotangent: program(list(floats), rest, list(cotangent))


def differences(call: FlatCall | Slope | Along) -> Callable[..., list[tuple[np.ndarray, np.ndarray]]]:
    """A program for the derivatives of `sum(cotangent * call(floats, rest))` by some elements of the floats.

    It takes floats, rest, cotangent and the indices of those elements in each of the flattened floats, and returns for
    each of the floats the derivatives and an estimate of how far off each is.
    """
    program = jax.jit(functools.partial(_quotients, call))

    def run(floats, rest, cotangent, indices):
        steps = [_steps(a, chosen) for a, chosen in zip(floats, indices, strict=True)]
        with jax.debug_nans(False), jax.debug_infs(False):  # a step may leave the domain of a function
            quotients = program(rest, list(cotangent), list(map(jnp.asarray, floats)), list(indices), steps)
        return [_extrapolated(*(np.asarray(a, "float64") for a in four)) for four in quotients]

    return run


def _steps(a: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The steps [n, K] of each chosen element, each a part of the one before."""
    return FIRST_STEP * _sizes(a)[chosen][:, None] * float(RATIO) ** -np.arange(EXTRAPOLATIONS + 1)


def _sizes(a: np.ndarray) -> np.ndarray:
    """The sizes of the flattened elements: their own, or the median where that is larger."""
    size = np.abs(np.asarray(a, "float64").reshape(-1))
    size = np.maximum(size, np.median(size)) if size.size else size
    return np.where((size > 0) & np.isfinite(size), size, 1.0)


def _quotients(call, rest, cotangent, floats, indices, steps):
    """The difference quotients of each of `floats`, from indices [n] and steps [n, K].

    Returns, all [n, K]: the quotients, how much of them is rounding, how much rounding may hide of a result that no
    step changes, and what part of the results changes.

    One evaluation follows another, which any function bears. The results are subtracted before they are summed, so that
    large ones that do not change take no digits, and are not counted as rounded.
    """

    def quotients(which, indices, steps):
        a = floats[which]
        if not len(indices):
            return steps, steps, steps, steps

        def evaluated(flat):
            return call([*floats[:which], flat.reshape(a.shape), *floats[which + 1 :]], rest)

        def element(point):
            i, steps = point
            flat = a.reshape(-1)

            def quotient(moving, step):
                up, down = flat.at[i].add(step.astype(a.dtype)), flat.at[i].add(-step.astype(a.dtype))
                change = rounding = hidden = moves = total = 0.0
                moved = []
                for c, m, high, low in zip(cotangent, moving, evaluated(up), evaluated(down), strict=True):
                    eps = float(jnp.finfo(high.dtype).eps)
                    c, high, low = (jnp.asarray(a, c.dtype) for a in (c, high, low))
                    change += jnp.sum(c * (high - low))
                    # A step may be too small for a result to show it, which a larger one told.
                    moved.append(m | (high != low))
                    moves += jnp.sum(jnp.abs(c * (high - low)))
                    size = jnp.abs(c) * jnp.maximum(jnp.abs(high), jnp.abs(low)) * eps
                    total += jnp.sum(jnp.where(moved[-1], size, 0)) / eps
                    rounding += jnp.sum(jnp.where(moved[-1], size, 0))
                    hidden += jnp.sum(size)
                width = up[i] - down[i]  # what the step became in this dtype
                # `f` may round the element first, as sin(3 * x) does, which a small result does not show.
                rounding += jnp.abs(change / width * flat[i]) * float(jnp.finfo(a.dtype).eps)
                return moved, (change / width, rounding / width, hidden / width, moves / total)

            return jax.lax.scan(quotient, [jnp.zeros(jnp.shape(c), bool) for c in cotangent], steps)[1]

        return jax.lax.map(element, (indices, steps))

    return [quotients(which, i, s) for which, (i, s) in enumerate(zip(indices, steps, strict=True))]


def _extrapolated(
    quotients: np.ndarray, roundings: np.ndarray, hidden: np.ndarray, moves: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The best extrapolation of [n, K] quotients, by Ridders' choice: the one least different from those it is made of.

    Large steps may agree by chance, as those of whole periods of a sine do: three finer quotients that agree refute it.
    Where even the finest step is one of many periods, which changes the results by much that the estimate knows nothing
    of, nothing is known.

    Returns the extrapolation, and that difference with the rounding.
    """
    best = quotients[:, 0]
    least = np.full(best.shape, np.inf)
    previous = [best]
    with np.errstate(all="ignore"):  # a step out of a function's domain gives NaN, which is never chosen
        for k in range(1, quotients.shape[1]):
            row = [quotients[:, k]]
            if k >= 2:
                spread = np.ptp(quotients[:, k - 2 : k + 1], axis=1) + roundings[:, k]
                refuted = (row[0] != 0) & (np.abs(row[0] - best) > CONTRADICTED * spread)
                best, least = np.where(refuted, row[0], best), np.where(refuted, np.inf, least)
            for j in range(1, k + 1):
                factor = float(RATIO) ** (2 * j)
                row.append((factor * row[-1] - previous[j - 1]) / (factor - 1))
                error = np.maximum(np.abs(row[j] - row[j - 1]), np.abs(row[j] - previous[j - 1])) + roundings[:, k]
                better = error < least
                best, least = np.where(better, row[j], best), np.where(better, error, least)
            previous = row
    # None at all, where larger steps had one, may be the function's rounding to another dtype inside.
    seen = np.min(np.abs(quotients), axis=1, initial=np.inf, where=quotients != 0)
    unseen = np.where(np.isfinite(seen), seen, hidden[:, 0])
    with np.errstate(all="ignore"):
        wild = (moves[:, -1] > LARGE) & (np.abs(quotients[:, -1] - best) > np.abs(quotients[:, -1]) / 2)
    least = np.where(wild, np.inf, least)
    return best, np.where(best == 0, np.maximum(least, unseen), least)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A function and its arguments, ready to be differentiated. names: those of the floating leaves."""

    call: FlatCall
    floats: tuple[np.ndarray, ...]
    rest: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        f: Callable[..., Any],
        args: Sequence[Any],
        *,
        dtype: Any,
        after: Any = None,
        name: str = "f",
    ) -> Problem:
        """The problem of `f` at `args`.

        dtype: the dtype to which floating leaves are cast, after a first cast to `after`; None for no cast. name: that
          of `f` in errors.
        """
        dtype, after = dtype_name(dtype), dtype_name(after)
        if not callable(f):
            raise TypeError(f"{name} must be a function; got {type(f).__name__}")
        if not isinstance(args, tuple | list):
            raise TypeError(f"args must be a tuple of f's arguments; got {type(args).__name__}")
        if not _hashable(f):  # such as an Equinox module, whose arrays are fields
            f = functools.partial(lambda g, *a: g(*a), f)
        paths, tree = jax.tree.flatten_with_path(tuple(args))
        leaves = [_array(leaf) for _, leaf in paths]
        floating = tuple(jnp.issubdtype(a.dtype, jnp.floating) for a in leaves)
        if not any(floating):
            raise TypeError("args must have a floating array among them, or there is nothing to differentiate")
        floats = [a for a, is_float in zip(leaves, floating, strict=True) if is_float]
        for d in (after, dtype):
            floats = [a if d is None else a.astype(jnp.dtype(d)) for a in floats]
        rest = [a for a, is_float in zip(leaves, floating, strict=True) if not is_float]
        names = _names(f, [path for (path, _), is_float in zip(paths, floating, strict=True) if is_float])
        return cls(FlatCall(f, tree, floating, name), tuple(floats), tuple(rest), names)

    def like(self, other: Problem) -> Problem:
        """A problem of this one's arguments and the other's function, whose programs were compiled for their shapes."""
        kinds = [
            (p.call.tree, p.call.floating, *((a.shape, a.dtype) for a in (*p.floats, *p.rest))) for p in (self, other)
        ]
        if kinds[0] != kinds[1]:
            raise ValueError("args must have one structure, and its arrays one shape and dtype, with every seed")
        return dataclasses.replace(other, floats=self.floats, rest=self.rest)

    def context(self) -> contextlib.AbstractContextManager:
        """A context in which float64 stays float64."""
        return jax.enable_x64(True) if any(a.dtype == np.float64 for a in self.floats) else contextlib.nullcontext()

    def results(self) -> list[Any]:
        """Shapes and dtypes of the floating results."""
        shapes = jax.eval_shape(self.call, self.floats, self.rest)
        if not shapes:
            raise TypeError(f"{self.call.name} must return an array of a floating dtype, or there is no gradient")
        return shapes

    def result_names(self) -> list[str]:
        paths, _ = jax.tree.flatten_with_path(jax.eval_shape(self.call.results, self.floats, self.rest))
        return [f"result{jax.tree_util.keystr(p)}" for p, a in paths if jnp.issubdtype(a.dtype, jnp.floating)]


def random_direction(random: np.random.Generator, a: np.ndarray) -> np.ndarray:
    """A direction in which every element moves, up or down, by its size.

    The signs are independent, so that errors do not add up but by chance.
    """
    return (_sizes(a) * random.choice([-1.0, 1.0], a.size)).reshape(a.shape)


def random_like(random: np.random.Generator, arrays: Sequence[Any]) -> list[np.ndarray]:
    return [random.standard_normal(a.shape).astype(a.dtype) for a in arrays]


def dtype_name(dtype: Any) -> str | None:
    """The name of a dtype, however NumPy takes it; None for None. Raises ValueError unless it is one of `DTYPES`."""
    if dtype is None:
        return None
    try:
        name = np.dtype(dtype).name
    except (TypeError, ValueError):
        name = None
    if name not in DTYPES:
        raise ValueError(f"dtype must be None or one of {', '.join(DTYPES)}; got {dtype!r}")
    return name


def coarsest(arrays: Sequence[Any]) -> str:
    """The name of the floating dtype among these that has the fewest digits."""
    return min((a.dtype for a in arrays), key=lambda d: -float(jnp.finfo(d).eps)).name


def check_alike(results: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> None:
    ours, theirs = ([a.shape for a in many] for many in (results, reference))
    if ours != theirs:
        raise ValueError(f"the reference must return arrays of f's shapes {ours}; got {theirs}")


def _array(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        raise TypeError(f"args must hold arrays; got {type(leaf).__name__}")
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf  # a typed key of random numbers, which NumPy does not have
    array = np.asarray(leaf if isinstance(leaf, jax.Array | np.ndarray | np.generic) else jnp.asarray(leaf))
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"args must be real; got {array.dtype.name}")
    return array


def _hashable(f: Any) -> bool:
    try:
        hash(f)
    except TypeError:
        return False
    return True


def _names(f: Callable[..., Any], paths: Sequence[Any]) -> tuple[str, ...]:
    """The names of the leaves of arguments, `x` or `params['w']`, by the parameters' names where `f` tells them."""
    try:
        declared = inspect.signature(f).parameters.values()
        parameters = [p.name for p in declared if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    except (TypeError, ValueError):  # a builtin
        parameters = []
    result = []
    for first, *others in paths:
        name = parameters[first.idx] if first.idx < len(parameters) else f"argument {first.idx}"
        result.append(name + jax.tree_util.keystr(tuple(others)))
    return tuple(result)
