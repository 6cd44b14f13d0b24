"""A check of gradients, from its arguments to its report, and a comparison of two functions that are to be the same."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jln._explain import explain
from jln._routes import inner_programs
from jln.testing.report import TOLERANCES, Report, Row, Tolerance

# Of the numbers that are drawn here: arguments often come from the stream of the seed itself, and would be equal.
_STREAM = int.from_bytes(b"jln")
# The error that a fused function may have, as a part of an array's largest element, by the coarsest dtype that it has
# inside. That of float64 is for a model of some layers.
_ALLOWED = {name: t.relative for name, t in TOLERANCES.items()} | {"float64": 1e-10}


def check(order: int, f, args, reference, dtype, tolerance: Any, seed: int) -> Report:
    """Compare a function's results, and its derivatives of first or of second order, with a reference's in float64."""
    if reference is None:
        raise TypeError(
            "give reference=, the same function for JAX to differentiate; for differences use jax.test_util.check_grads"
        )
    if tolerance is not None and not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a Tolerance; got {type(tolerance).__name__}")
    ours = Problem.make("f", f, args, dtype)
    truth = Problem.make("reference", reference, ours.args, "float64")
    shapes = ours.shapes()
    known, theirs = ([a.shape for a in some.values()] for some in (shapes, truth.shapes()))
    if theirs != known:
        raise ValueError(f"the reference must return arrays of f's shapes {known}; got {theirs}")
    label = _coarsest(a.dtype.name for a in (*ours.floats, *shapes.values()))
    if tolerance is None and label not in TOLERANCES:
        raise ValueError(f"dtypes must be among {', '.join(TOLERANCES)}, unless a tolerance is given; got {label}")
    weights = _draw(seed, shapes.values(), ours.floats)[:order]
    got, expected = ([*values, *slopes] for values, slopes in (p.outcome(weights) for p in (ours, truth)))
    both, allowed = zip([*shapes, *ours.names], got, expected, strict=True), tolerance or TOLERANCES[label]
    kind = "reverse-mode gradients" if order == 1 else "Hessian-vector products"
    title = f"{getattr(f, '__name__', type(f).__name__)}: {kind} in {label}, random cotangent (seed {seed})"
    return Report(title, tuple(Row.worst(name, a, t, allowed) for name, a, t in both))


NOTHING = "NOTHING WAS FUSED (dtype=None compares what runs without a cast)"


def compare(transform: Callable[..., Any], own: Callable[..., Any], args: Any, *, dtype: Any, seed: int) -> Report:
    """Compare the results and gradients of a function with those of what `transform`, a form of `fuse`, makes of it."""
    truth = Problem.make("f", own, args, dtype, may_be_static=True)
    shapes = truth.shapes()
    weights = _draw(seed, shapes.values())
    leaves, tree = jax.tree.flatten(truth.args)  # of objects of Flax NNX, too

    def flat(*leaves: Any) -> Any:
        return own(*tree.unflatten(leaves))

    flat.__name__ = title = getattr(own, "__name__", type(own).__name__)
    fused = transform(flat)
    ours = dataclasses.replace(truth, f=lambda *args: fused(*jax.tree.leaves(args)))
    got, expected = (p.outcome(weights) for p in (ours, truth))
    with truth.context():
        program = jax.make_jaxpr(truth)(truth.floats)
        operators = sum(route.path != "plain" for route in explain(fused, *leaves))
    coarsest = _coarsest(_dtypes(program) & {*TOLERANCES} or {"float64"})
    part, rows = _ALLOWED[coarsest], []
    least, largest = max(part * part, min(16 * float(jnp.finfo(coarsest).eps), part / 10)), 0.0
    for names, ours, theirs in reversed([*zip((shapes, truth.names), got, expected, strict=True)]):
        sizes = [float(np.max(np.abs(np.asarray(t, "float64")), initial=0.0)) for t in theirs]
        # What is zero but for roundings, as the gradient of a bias of keys, has those of the other gradients, and a
        # result, such as a mean of norms, those of all.
        largest = max(largest, *sizes)
        allowed = [Tolerance(0.0, part * size + least * largest) for size in sizes]
        rows[:0] = map(Row.worst, names, ours, theirs, allowed)
    what = f"fused ({operators} operator{'s' * (operators > 1)}) and as it is" if operators else NOTHING
    return Report(f"{title}: {what}, in {coarsest}, random cotangent (seed {seed})", tuple(rows))


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A function at its arguments, as a function of the floating ones of their leaves. The others are held fixed.

    It is traced and compiled anew each time: a rule, or what the function reads, may have changed since.
    """

    title: str  # of `f` in errors
    f: Callable[..., Any]
    args: tuple[Any, ...]
    floats: list[np.ndarray]  # of the leaves of `args`

    @classmethod
    def make(cls, title: str, f: Any, args: Any, dtype: Any, may_be_static: bool = False) -> Problem:
        """Cast the floating leaves of arguments to a dtype; None for no cast.

        may_be_static: whether leaves that are no arrays stay what they are, as for `fuse`.
        """
        if not callable(f):
            raise TypeError(f"{title} must be a function; got {type(f).__name__}")
        if not isinstance(args, tuple | list):
            raise TypeError(f"args must be a tuple of f's arguments; got {type(args).__name__}")
        args = jax.tree.map(functools.partial(_cast, name=_known(dtype), may_be_static=may_be_static), tuple(args))
        floats = [a for a in jax.tree.leaves(args) if _is_floating(a)]
        if not floats:
            raise TypeError("args must have a floating array among them, or there is nothing to differentiate")
        return cls(title, f, args, floats)

    @property
    def names(self) -> list[str]:
        """The floats' names, by the function's signature."""
        try:
            named = inspect.signature(self.f).bind_partial(*self.args).arguments
        except (TypeError, ValueError):  # a builtin, or arguments that `f` itself will complain of
            named = {f"argument {i}": a for i, a in enumerate(self.args)}
        return [name for arg in named for name in _by_name(arg, named[arg])]

    def context(self) -> contextlib.AbstractContextManager:
        """A context in which float64 stays float64."""
        return jax.enable_x64(True) if any(a.dtype == np.float64 for a in self.floats) else contextlib.nullcontext()

    def results(self, floats: Sequence[Any]) -> Any:
        """The results of `f`, as it returns them."""
        values = iter(floats)
        as_array = lambda a: jnp.asarray(a) if hasattr(a, "dtype") else a  # noqa: E731
        results = self.f(*jax.tree.map(lambda a: next(values) if _is_floating(a) else as_array(a), self.args))
        return jax.tree.map(lambda leaf: jnp.asarray(_real(f"{self.title} must return", leaf)), results)

    def __call__(self, floats: Sequence[Any]) -> list[jax.Array]:
        return [a for a in jax.tree.leaves(self.results(floats)) if _is_floating(a)]

    def shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of the floating results by name."""
        with self.context():
            found = _by_name("result", jax.eval_shape(lambda floats: self.results(floats), self.floats))
        if not found:
            raise TypeError(f"{self.title} must return an array of a floating dtype, or there is no gradient")
        return found

    def outcome(self, weights: Sequence[Sequence[Any]]) -> tuple[list[jax.Array], list[jax.Array]]:
        """The floating results, and their gradients under the first weights, those under the second, and so on."""
        differentiated: Callable[..., Any] = self
        for each in weights:
            differentiated = functools.partial(_gradients, differentiated, each)
        with self.context():
            return jax.jit(lambda floats: (self(floats), differentiated(floats)))(self.floats)


def _gradients(call: Callable[..., Any], cotangent: Sequence[Any], floats: Sequence[Any]) -> list[jax.Array]:
    """The gradients of `sum(cotangent * call(floats))` by reverse mode."""
    results, pullback = jax.vjp(call, list(floats))
    # Results of a function that computes in float32 inside are float32, whatever its arguments are cast to.
    return pullback([jnp.asarray(c, r.dtype) for c, r in zip(cotangent, results, strict=True)])[0]


def _is_floating(a: Any) -> bool:
    return hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.floating)


def _by_name(name: str, tree: Any) -> dict[str, Any]:
    """The floating leaves of a tree that has this name."""
    return {name + jax.tree_util.keystr(path): a for path, a in jax.tree.leaves_with_path(tree) if _is_floating(a)}


def _real(where: str, leaf: Any) -> Any:
    """The leaf itself, which is to be a real array."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{where} arrays; got {type(leaf).__name__}")
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise TypeError(f"{where} real arrays; got {leaf.dtype.name}")
    return leaf


def _cast(leaf: Any, name: str | None, may_be_static: bool) -> Any:
    """A leaf of arguments: of NumPy in a dtype of this name, if there is one, where it is floating; else as it is."""
    if may_be_static and not hasattr(leaf, "dtype"):
        return leaf
    array = _real("args must hold", jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex) else leaf)
    return np.asarray(array).astype(name or array.dtype) if _is_floating(array) else array


def _known(dtype: Any) -> str | None:
    """The name of a dtype, however NumPy takes it; None for None."""
    try:
        name = None if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = "unknown"
    if name not in (None, *TOLERANCES):
        raise ValueError(f"dtype must be None or one of {', '.join(TOLERANCES)}; got {dtype!r}")
    return name


def _draw(seed: int, *groups: Iterable[Any]) -> list[list[np.ndarray]]:
    """Random arrays, of the shapes and dtypes of those in each group."""
    if not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed must be an integer from 0 on; got {seed!r}")
    random = np.random.default_rng([int(seed), _STREAM])
    return [[random.standard_normal(a.shape).astype(a.dtype) for a in arrays] for arrays in groups]


def _coarsest(names: Iterable[str]) -> str:
    """The floating dtype that has the fewest digits."""
    return max(names, key=lambda name: float(jnp.finfo(name).eps))


def _dtypes(program: Any) -> set[str]:
    """The dtypes of a program's values, those inside of its equations included."""
    avals = [v.aval for equation in program.eqns for v in equation.outvars]
    inner = [_dtypes(inner) for equation in program.eqns for inner in inner_programs(equation)]
    return {a.dtype.name for a in avals if hasattr(a, "dtype")}.union(*inner)
