"""How a call of a layer was computed, for who wants to know: noted at every call, listed by `explain`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir


class Route(NamedTuple):
    """How one call of a layer was computed.

    layer: its class, and its name where the framework knows one.
    path: "fused" (norm and Linear as one operator), "norm" (jln's norm; what is behind it is the framework's own) or
      "plain" (the framework's own code).
    why: a few words.
    """

    layer: str
    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.path} ({self.why})"


class _Listener(Protocol):
    def append(self, route: Route, /) -> None: ...


_listeners: contextvars.ContextVar[tuple[_Listener, ...]] = contextvars.ContextVar("jln_listeners", default=())


@contextlib.contextmanager
def listening(listeners: tuple[_Listener, ...]) -> Iterator[None]:
    """Tell these of the calls made in the context, and no others."""
    token = _listeners.set(listeners)
    try:
        yield
    finally:
        _listeners.reset(token)


@contextlib.contextmanager
def noting() -> Iterator[list[Route]]:
    """Collect the routes of the calls made in the context."""
    routes: list[Route] = []
    with listening((*_listeners.get(), routes)):
        yield routes


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """A context whose calls are not collected."""
    with listening(()), _asked(0):
        yield


def note(layer: str, path: str, why: str) -> None:
    for listener in _listeners.get():
        listener.append(Route(layer, path, why))


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Route, ...]:
    """The path, and why, of every jln layer that `function(*args, **kwargs)` calls, in the order of the calls.

    Nothing is computed: the call is traced as by `jax.eval_shape`, so arrays may be `jax.ShapeDtypeStruct`s. A "norm"
    or "fused" call reaches jln's operators, which run Triton kernels where the program is compiled for an NVIDIA GPU
    with jax-triton installed, and XLA elsewhere. The framework's own layers are not listed: convert the model first, or
    call inside of `jln.convert.linen()` or `jln.convert.haiku()`.

    What is under `jax.jit` JAX does not trace again, so of an object that it has closed over you hear what was so when
    you first asked, as JAX runs what was so when it first ran. Conversions by `jln.convert` are an exception.

    Args:
      function: a layer or a model of Flax NNX or Equinox; a Linen module or what `hk.transform` returns, whose
        parameters are made up; or any function of arrays.
      *args: what it is called with.
      **kwargs: likewise.

    Raises:
      ValueError: `function` has closed over a Flax NNX model that Flax lets it use only as an argument.
      Whatever else the call raises.
    """
    call = traceable(function)
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(a, "shape") and hasattr(a, "dtype") for a in leaves]

    def traced(arrays):
        given = iter(arrays)
        args, kwargs = tree.unflatten([next(given) if known else a for a, known in zip(leaves, is_array, strict=True)])
        call(*args, **kwargs)

    arrays = [a for a, known in zip(leaves, is_array, strict=True) if known]
    with listening((*_listeners.get(), _Program())), _asked(_conversions):
        try:
            program = jax.make_jaxpr(traced)(arrays)
        except Exception as error:
            if "trace level" not in str(error):  # of Flax, in errors of several classes
                raise
            raise ValueError(
                "explain traces the function, and in a trace Flax NNX neither transforms (nnx.scan, nnx.jit, ...) nor "
                "changes a model that the function has closed over: call jln.explain(model, x) or "
                "jln.explain(model.method, x), or make it an argument, jln.explain(lambda model, x: ..., model, x)"
            ) from error
    return tuple(_routes_of(program.jaxpr))


@functools.singledispatch
def traceable(function: Any) -> Callable[..., Any]:
    """`function` as one that JAX can trace; a framework's module registers what its models need."""
    return function


# What JAX has traced and kept for the user has no such equations, and the reverse. The value is the same in every
# question, for JAX keeps what it has traced under each: but another one as soon as models that JAX has seen are others.
_asked = jax.make_user_context(default_value=0)
_conversions = 1


def converted() -> None:
    """Have `explain` forget what it has seen: a layer has changed its class under JAX's caches."""
    global _conversions
    _conversions += 1


class _Program:
    """Writes what is noted into the program that is traced, where JAX keeps it with all else of a cached trace."""

    def append(self, route: Route) -> None:
        _primitive().bind(route=route)


@functools.cache
def _primitive() -> Primitive:
    """An equation without operands and results, but with the effect of `jax.debug.callback`: so JAX keeps it and allows
    it in every transformation. It does nothing.
    """
    primitive = Primitive("jln_route")
    primitive.multiple_results = True
    effects = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects
    primitive.def_impl(lambda **_: [])
    primitive.def_effectful_abstract_eval(lambda **_: ([], effects))
    mlir.register_lowering(primitive, lambda ctx, **_: [])
    return primitive


def _routes_of(jaxpr: Any) -> Iterator[Route]:
    """In the order of the program, those inside of an equation in its place."""
    for equation in jaxpr.eqns:
        if equation.primitive is _primitive():
            yield equation.params["route"]
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _routes_of(value)


def _is_jaxpr(value: Any) -> bool:
    """Of either kind, closed or not."""
    return hasattr(value, "eqns")
