"""Routes: a note of how each call of a layer was computed, made at every call."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, ParamSpec, TypeVar


class Route(NamedTuple):
    """The way in which one call of a layer was computed, as `jln.explain` lists it.

    Attributes:
      layer: the layer's class, and its place in the model where that is known; or the name of an operator that is
        called as a function.
      path: "norm" (jln's norm by itself), "fused" (norm and Linear as one operator) or "plain" (the framework's own
        code, or a norm that `jln.fuse` left as it is).
      why: the reason, in a few words.
    """

    layer: str
    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.path} ({self.why})"


# A function that is told of each route, with the array that the layer reads.
Listener = Callable[[Route, Any], None]
_listeners: contextvars.ContextVar[tuple[Listener, ...]] = contextvars.ContextVar("jln_listeners", default=())


@contextlib.contextmanager
def listening(*listeners: Listener) -> Iterator[None]:
    """Tell these listeners of the calls made in the context, and no others."""
    token = _listeners.set(listeners)
    try:
        yield
    finally:
        _listeners.reset(token)


def heard_by(listener: Listener) -> contextlib.AbstractContextManager[None]:
    """Tell this listener too of the calls made in the context."""
    return listening(*_listeners.get(), listener)


def into(routes: list[Route]) -> Listener:
    return lambda route, _: routes.append(route)


def note(layer: str, path: str, why: str, read: Any = None) -> None:
    """Tell the listeners of a call of a layer. read: the array that the layer reads."""
    for listener in _listeners.get():
        listener(Route(layer, path, why), read)


P = ParamSpec("P")
R = TypeVar("R")


def listed(path: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of a public operator, which has its calls listed."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            read = args[0] if args else kwargs.get("x")
            note(f"jln.{function.__name__}", path, "called as a function", read)
            return function(*args, **kwargs)

        return call

    return decorate


# The places of layers in the model that a question is about, by the layers' identity.
places_known: contextvars.ContextVar[Mapping[int, str]] = contextvars.ContextVar(
    "jln_places", default=MappingProxyType({})
)


def place(layer: Any) -> str:
    """The place of a layer in the model that a question is about; "" where it is not known."""
    return places_known.get().get(id(layer), "")
