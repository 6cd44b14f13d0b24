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
def swapping(framework: str, theirs: tuple[type, ...], ours: Any, intercept: Callable[..., Any]) -> Iterator[Routes]:
    """A context in which the norms `theirs` are called as those of the module `ours`.

    intercept: the framework's own context for an interceptor of calls.
    """
    own, routes = (ours.LayerNorm, ours.RMSNorm), Routes(_traced[framework])

    def interceptor(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        """With Flax's signature and Haiku's. A route is listed once, however often it is taken."""
        layer = context.module
        if context.method_name != "__call__" or not isinstance(layer, theirs) or isinstance(layer, own):
            return next_fun(*args, **kwargs)
        with _routes.noting() as taken:
            if type(layer) in theirs:
                result = ours.call(layer, next_fun, *args, **kwargs)
            else:
                name = f"{type(layer).__module__}.{type(layer).__qualname__}"
                _routes.note(name, "plain", "not swapped: a subclass may compute something else")
                result = next_fun(*args, **kwargs)
        routes.extend(route for route in dict.fromkeys(taken) if route not in routes)
        if isinstance(result, Tracer):
            _traced[framework].update(dict.fromkeys(taken))
        return result

    with intercept(interceptor), _swapping(True):
        yield routes
