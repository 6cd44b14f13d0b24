"""Linen and Haiku: calls are intercepted while a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.core import Tracer

from jln import _routes
from jln._routes import Route

# What JAX has traced and kept outside of a context must not be taken for what is traced inside, nor the reverse.
_swapping = jax.make_user_context(default_value=False)


# Per framework, without repetition: what a context may run without a trace of its own.
_traced: dict[str, dict[Route, None]] = {"linen": {}, "haiku": {}}


class Routes(list[Route]):
    """The routes of a context, without repetition.

    earlier: what was traced in earlier contexts. JAX keeps such a program and does not trace it again, so one that this
      context runs has its layers here and not in the list.
    """

    def __init__(self, earlier: Iterable[Route] = ()):
        super().__init__()
        self.earlier = tuple(earlier)


@contextlib.contextmanager
def linen() -> Iterator[Routes]:
    from jln import linen as ours
    from jln.linen import nn

    routes = Routes(_traced["linen"])
    swap = _swap((ours.FlaxLayerNorm, ours.FlaxRMSNorm), (ours.LayerNorm, ours.RMSNorm), ours.call, routes, "linen")
    with nn.intercept_methods(swap), _swapping(True):
        yield routes


@contextlib.contextmanager
def haiku() -> Iterator[Routes]:
    from jln import haiku as ours
    from jln.haiku import hk

    routes = Routes(_traced["haiku"])
    swap = _swap((ours.HaikuLayerNorm, ours.HaikuRMSNorm), (ours.LayerNorm, ours.RMSNorm), ours.call, routes, "haiku")
    with hk.intercept_methods(swap), _swapping(True):
        yield routes


def _swap(
    theirs: tuple[type, ...], own: tuple[type, ...], call: Callable, routes: list[Route], framework: str
) -> Callable:
    """An interceptor, with Flax's signature and Haiku's. A route is listed once, however often it is taken."""

    def interceptor(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        layer = context.module
        if context.method_name != "__call__" or not isinstance(layer, theirs) or isinstance(layer, own):
            return next_fun(*args, **kwargs)
        with _routes.noting() as taken:
            if type(layer) in theirs:
                result = call(layer, next_fun, *args, **kwargs)
            else:
                name = f"{type(layer).__module__}.{type(layer).__qualname__}"
                _routes.note(name, "plain", "not swapped: a subclass may compute something else")
                result = next_fun(*args, **kwargs)
        routes.extend(route for route in dict.fromkeys(taken) if route not in routes)
        if isinstance(result, Tracer):
            _traced[framework].update(dict.fromkeys(taken))
        return result

    return interceptor
