"""Derivatives of any traceable function: by its rules, in reverse mode, and by central differences.

Functions here take a list of floating arrays, and return a list of floating results. `Problem` makes such a function of
any other. A program is compiled anew for each check: a rule, or what the function reads, may have changed since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln.testing.report import SURE, TOLERANCES

# The first step, as a part of an element's size: no more than a function may be expected to look like a polynomial on,
# and no power of 2, or steps could be whole periods of sin(2 pi x), which agree that its slope is 0.
FIRST_STEP = 0.057
RATIO = 4.0  # of one step to the next
STEPS = 17  # the smallest is 1.3e-11 of an element: near enough for 1/x at 1e-8 of the others' size

Call = Callable[[Sequence[Any]], list[jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A function at its arguments, as a function of the floating ones of their leaves. The others are held fixed."""

    f: Callable[..., Any]
    args: Sequence[Any]
    names: tuple[str, ...]  # of the floating leaves
    title: str  # of `f` in errors

    @classmethod
    def make(cls, f: Callable[..., Any], args: Sequence[Any], dtype: Any) -> Problem:
        """Cast the floating leaves of arguments to a dtype; None for no cast."""
        if not callable(f):
            raise TypeError(f"f must be a function; got {type(f).__name__}")
        if not isinstance(args, tuple | list):
            raise TypeError(f"args must be a tuple of f's arguments; got {type(args).__name__}")
        name = _name(dtype)
        args = jax.tree.map(lambda leaf: _array(leaf, name), tuple(args))
        try:
            by_name = inspect.signature(f).bind(*args).arguments
        except (TypeError, ValueError):  # a builtin, or arguments that `f` itself will complain of
            by_name = {f"argument {i}": a for i, a in enumerate(args)}
        paths = [(n, *leaf) for n, arg in by_name.items() for leaf in jax.tree.leaves_with_path(arg)]
        names = tuple(name + jax.tree_util.keystr(path) for name, path, a in paths if is_floating(a))
        if not names:
            raise TypeError("args must have a floating array among them, or there is nothing to differentiate")
        return cls(f, args, names, "f")

    @property
    def floats(self) -> list[np.ndarray]:
        return [a for a in jax.tree.leaves(self.args) if is_floating(a)]

    def results(self, floats: Sequence[Any]) -> Any:
        """The results of `f`, as it returns them."""
        values = iter(floats)
        results = self.f(*jax.tree.map(lambda a: next(values) if is_floating(a) else jnp.asarray(a), self.args))
        for leaf in jax.tree.leaves(results):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                raise TypeError(f"{self.title} must return arrays; got {type(leaf).__name__}")
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
                raise TypeError(f"{self.title} must return real arrays; got {leaf.dtype.name}")
        return jax.tree.map(jnp.asarray, results)

    def __call__(self, floats: Sequence[Any]) -> list[jax.Array]:
        return [a for a in jax.tree.leaves(self.results(floats)) if is_floating(a)]

    def shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of the floating results by name."""
        paths = jax.tree.leaves_with_path(jax.eval_shape(lambda floats: self.results(floats), self.floats))
        found = {f"result{jax.tree_util.keystr(path)}": a for path, a in paths if is_floating(a)}
        if not found:
            raise TypeError(f"{self.title} must return an array of a floating dtype, or there is no gradient")
        return found

    def context(self) -> contextlib.AbstractContextManager:
        """A context in which float64 stays float64."""
        return jax.enable_x64(True) if any(a.dtype == np.float64 for a in self.floats) else contextlib.nullcontext()


def is_floating(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating)


def _array(leaf: Any, name: str | None) -> Any:
    """A leaf of arguments: of NumPy in a dtype of this name, if there is one, where it is floating; else as it is."""
    if not isinstance(leaf, jax.typing.ArrayLike):
        raise TypeError(f"args must hold arrays; got {type(leaf).__name__}")
    array: Any = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"args must be real; got {array.dtype.name}")
    return np.asarray(array).astype(name or array.dtype) if is_floating(array) else array


def _name(dtype: Any) -> str | None:
    """The name of a dtype, however NumPy takes it; None for None."""
    try:
        name = None if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = "unknown"
    if name not in (None, *TOLERANCES):
        raise ValueError(f"dtype must be None or one of {', '.join(TOLERANCES)}; got {dtype!r}")
    return name


def gradients(call: Call, floats: Sequence[Any], cotangent: Sequence[Any]) -> list[jax.Array]:
    """The gradients of `sum(cotangent * call(floats))` by reverse mode."""
    results, pullback = jax.vjp(call, list(floats))
    # Results of a function that computes in float32 inside are float32, whatever its arguments are cast to.
    return pullback([jnp.asarray(c, r.dtype) for c, r in zip(cotangent, results, strict=True)])[0]


def slope(call: Call, cotangent: Sequence[Any], direction: Sequence[Any]) -> Call:
    """The slope of `sum(cotangent * call(floats))` along a direction. Its gradients are the Hessian times that."""

    def along(floats: Sequence[Any]) -> list[jax.Array]:
        found = gradients(call, floats, cotangent)
        dtype = np.result_type(np.float32, *(g.dtype for g in found if g.dtype == np.float64))
        parts = [jnp.vdot(g, d.astype(g.dtype)).astype(dtype) for g, d in zip(found, direction, strict=True)]
        return [sum(parts, jnp.zeros((), dtype))]

    return along


def sizes(a: np.ndarray) -> np.ndarray:
    """The sizes of elements, by which steps are chosen: at least the median one, or one near 0 would have no step."""
    found = np.maximum(np.abs(a), np.median(np.abs(a)) if a.size else 0.0)
    return np.where((found > 0) & (found < np.inf), found, 1.0)


def differences(
    call: Call, floats: Sequence[np.ndarray], cotangent: Sequence[np.ndarray], indices: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The derivatives of `sum(cotangent * call(floats))` by some elements, and how far off each may be: [2, n] a float.

    indices: of the elements in each of the flattened floats, which are float64.
    """
    program, held, scales = jax.jit(call), [jnp.asarray(a) for a in floats], [sizes(a) for a in floats]

    def slope(which: int, i: int) -> tuple[float, float]:
        a = floats[which]

        def move(step: float) -> tuple[float, list[Any]]:
            point = a.copy()
            point.flat[i] += step
            return point.flat[i], program([*held[:which], point, *held[which + 1 :]])

        return _slope(move, a.flat[i], scales[which].flat[i], cotangent)

    with jax.debug_nans(False), jax.debug_infs(False):  # a step may leave the domain of a function
        slopes = [[slope(which, i) for i in chosen] for which, chosen in enumerate(indices)]
    return [np.reshape(many, (-1, 2)).T for many in slopes]


def _slope(move: Callable, x: float, size: float, cotangent: Sequence[np.ndarray]) -> tuple[float, float]:
    """The derivative by one element, extrapolated from ever smaller steps, and how far off it may be.

    The best extrapolation is Ridders' choice: the one least different from those that it is made of.

    move: returns the element `x` moved by a step, and the results there.
    """
    best, least, previous = np.nan, np.inf, []
    quotient, rounding, least_seen = np.nan, np.inf, np.inf
    changed = [np.zeros(c.shape, bool) for c in cotangent]
    with np.errstate(all="ignore"):  # a step out of a function's domain gives NaN, which is never chosen
        for step in size * FIRST_STEP / RATIO ** np.arange(STEPS):
            (up, highs), (down, lows) = move(step), move(-step)
            change = rounding = 0.0
            for seen, c, high, low in zip(changed, cotangent, highs, lows, strict=True):
                eps = float(jnp.finfo(high.dtype).eps)
                high, low = np.asarray(high, "float64"), np.asarray(low, "float64")
                # Results that no step so far has changed are not counted as rounded.
                seen |= high != low
                change += np.sum(c * (high - low))
                rounding += eps * np.sum(np.abs(c) * np.maximum(np.abs(high), np.abs(low)), where=seen)
            quotient = change / (up - down)
            # The function may round the element first, as sin(3 * x) does.
            rounding = (rounding + abs(quotient * x) * np.finfo("float64").eps) / (up - down)
            row = [quotient]
            for j, former in enumerate(previous, 1):
                row.append(row[-1] + (row[-1] - former) / (RATIO ** (2 * j) - 1))
                error = max(abs(row[j] - row[j - 1]), abs(row[j] - former)) + rounding
                if error < least:
                    best, least = row[j], error
            previous = row
            least_seen = min(least_seen, abs(quotient) or np.inf)
    # Nothing is known where the finest quotient is far from the best: larger steps agreed by chance, or the function
    # rounds to another dtype inside.
    if not abs(quotient - best) <= abs(quotient) / 2 + SURE * rounding:
        least = np.inf
    # Such a function may have a slope of 0 at all finer steps, which is known no better than what larger ones saw.
    return best, max(least, least_seen) if best == 0 and least_seen < np.inf else least
