"""Proof that a function and what `jln.fuse` makes of it are the same: operators, value and every gradient."""

import collections
import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jln
from jln._fuse import rewriting
from jln._routes import inner_programs

H = 512


class Case(NamedTuple):
    """A function, its arguments, the operators that fuse is to find in it, and fuse's options."""

    function: Callable[..., Any]
    args: Sequence[Any]
    finds: dict[str, int]
    options: dict[str, Any]


def normal(*shape: int, dtype: Any = None, size: float = 1.0) -> np.ndarray:
    """Return normal numbers around 0.2, so that a mean that is not subtracted is seen; the same for equal shapes."""
    drawn = np.random.default_rng([len(shape), *shape]).normal(0.2, 1.0, shape)
    return (size * drawn).astype(dtype or np.float64)


@contextlib.contextmanager
def every_norm_taken() -> Iterator[None]:
    """Have fuse take norms that it would leave to XLA for their bytes: what is proven here is what it finds."""
    with warnings.catch_warnings(), mock.patch.object(rewriting._Rewriting, "_why_left", lambda *_: None):
        warnings.filterwarnings("ignore", "jln.fuse found no norm")
        yield


def equations(program: Any) -> Iterator[Any]:
    """Yield the equations of a program and of all that are inside of them, as often as they run."""
    for equation in program.eqns:
        yield equation
        for inner in inner_programs(equation):
            yield from equations(inner)


def operators(function: Callable[..., Any], *args: Any, **options: Any) -> dict[str, int]:
    """Return how many calls of each operator fuse puts into the function."""
    with every_norm_taken():
        routes = jln.explain(jln.fuse(function, **options), *args)
    return dict(collections.Counter(r.layer.removeprefix("jln.") for r in routes if r.path != "plain"))


def difference(function: Callable[..., Any], *args: Any, by_choice: bool = False, **options: Any) -> float:
    """Return the largest difference of value and gradients, fused and not, relative to an array's largest element.

    by_choice: leave the norms that fuse leaves to XLA.
    """
    with contextlib.nullcontext() if by_choice else every_norm_taken():
        both = [_everything(f, args) for f in (function, jln.fuse(function, **options))]
        made = jax.jit(lambda a: [f(a) for f in both])(args)
    wanted, got = map(jax.tree.leaves, made)
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in wanted]
    return max((parted(a, b) for a, b in zip(got, wanted, strict=True)), default=0.0)


def prove(case: Case) -> None:
    """Raise where fuse does not find a case's operators and no other, or where more changes than roundings."""
    function, args, finds, options = case
    found, changed = operators(function, *args, **options), difference(function, *args, **options)
    assert found == finds and changed <= rounding_of(case), f"found {found}, differs by {changed:.1e}"


def rounding_of(case: Case) -> float:
    """Return the difference by roundings of a case.

    What was rounded more often than the operator rounds differs by that; what is computed in float64 of float32 by the
    rounding of its gradient alone.
    """
    dtypes = {np.dtype(a.dtype).name for a in jax.tree.leaves(case.args)}
    is_wider = any(a.dtype == np.float64 for a in jax.tree.leaves(jax.eval_shape(case.function, *case.args)))
    return 1e-12 if "float64" in dtypes else 4e-2 if "bfloat16" in dtypes else 2e-7 if is_wider else 2e-6


def parted(got: Any, wanted: Any) -> float:
    """Return the largest difference relative to the largest element, or infinity where one alone is not finite."""
    got, wanted = (np.asarray(a, np.complex128 if jnp.iscomplexobj(a) else np.float64) for a in (got, wanted))
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.max(np.abs(got - wanted)[finite]) / max(np.max(np.abs(wanted)[finite]), 1e-300))


def _everything(function: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """A function of the arguments that returns the function's results, and gradients for every array of floats."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, a in enumerate(leaves) if jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating)]

    def loss(floats: list[Any], leaves: list[Any]) -> tuple[Any, Any]:
        leaves = [floats[places.index(i)] if i in places else a for i, a in enumerate(leaves)]
        made = function(*jax.tree.unflatten(tree, leaves))
        return sum(map(_weighed, jax.tree.leaves(made))), made

    def everything(args: Sequence[Any]) -> Any:
        leaves = jax.tree.leaves(args)
        return jax.value_and_grad(loss, has_aux=True)([leaves[i] for i in places], leaves)

    return everything


def _weighed(a: Any) -> Any:
    """A number that depends on each element in its own way."""
    a = jnp.asarray(a)
    a = jnp.real(a) if jnp.iscomplexobj(a) else a.astype(jnp.promote_types(a.dtype, jnp.float32))
    return jnp.sum(jnp.sin(a) * jnp.asarray(1 + np.arange(a.size).reshape(a.shape) % 7, a.dtype))


def apart(got: Any, wanted: Any) -> float:
    """Return the largest difference of two trees' arrays, relative to an array's largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    return max(parted(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
