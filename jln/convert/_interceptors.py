"""Conversion in Linen and Haiku: calls are intercepted while a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from jln import _modules, _routes
from jln._routes import Route
from jln.convert._common import hint_for

# A part of the key of JAX's caches: a program traced outside of a context is not that of the inside, nor the reverse,
# nor is that of one context that of another which converts otherwise.
_swapping = jax.make_user_context(default_value=None)


# The routes traced so far, by framework: programs that a context may run without a trace of its own.
_traced: dict[str, dict[Route, None]] = {"linen": {}, "haiku": {}}


class Routes(list[Route]):
    """The routes of a context, without repetition.

    Attributes:
      earlier: the routes traced in earlier contexts. JAX keeps such a program and does not trace it again, so one that
        this context runs has its layers here and not in the list.
    """

    def __init__(self, earlier: Iterable[Route] = ()):
        super().__init__()
        self.earlier = tuple(earlier)


class Framework(NamedTuple):
    """A framework as a context of intercepted calls needs to know it.

    name: that of jln's module for it.
    root: the package of its own classes.
    module: the class of all modules.
    intercept: its own context for an interceptor of calls.
    norms, linears: its layers that jln has too.
    own: jln's layers.
    parameter: how a recipe finds a parameter named scale.
    call, linear_call: `call(layer, plain, *args, **kwargs)`, jln's call in place of the framework's, `plain`.
    defined_in: from what an interceptor is told, and a class, to whether the call is this class's.
    path: from a layer to its place in the model.
    """

    name: str
    root: str
    module: type
    intercept: Callable[..., Any]
    norms: tuple[type, ...]
    linears: tuple[type, ...]
    own: tuple[type, ...]
    parameter: str
    call: Callable[..., Any]
    linear_call: Callable[..., Any]
    defined_in: Callable[[Any, type], bool]
    path: Callable[[Any], str]


@contextlib.contextmanager
def swapping(of: Framework, fuse: bool, norms: Mapping[type, _modules.Recipe] | None) -> Iterator[Routes]:
    """A context in which a framework's norms, and with `fuse` its Linears, are called as jln's."""
    if not isinstance(fuse, bool):
        raise TypeError(f"fuse must be a bool; got {fuse!r}")
    recipes = _modules.checked_recipes(norms, of.module, of.norms)
    routes = Routes(_traced[of.name])

    def called(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        layer, cls = context.module, type(context.module)
        name = f"{cls.__module__}.{cls.__qualname__} {of.path(layer)}".rstrip()
        if isinstance(layer, of.own):
            return next_fun(*args, **kwargs)
        for c in recipes:
            if isinstance(layer, c) and of.defined_in(context, c):
                return _modules.computed_by_recipe(name, recipes[c], layer, next_fun, args, kwargs)
        for classes, call in ((of.norms, of.call), (of.linears if fuse else (), of.linear_call)):
            if any(of.defined_in(context, c) for c in classes if isinstance(layer, c)):
                return call(layer, next_fun, *args, **kwargs)
        if isinstance(layer, of.norms):
            with _routes.noting() as inner:
                result = next_fun(*args, **kwargs)
            if not inner:
                _routes.note(name, "plain", "a subclass of the framework's norm, whose call it does not make", result)
            return result
        if hint := hint_for(cls, of.root, of.parameter):
            _routes.note(name, "plain", hint, args[0] if args else None)
        return next_fun(*args, **kwargs)

    def interceptor(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        """Intercept a call, with Flax's signature and Haiku's. A route is listed once, however often it is taken."""
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        with _routes.noting() as taken:
            result = called(next_fun, args, kwargs, context)
        routes.extend(route for route in dict.fromkeys(taken) if route not in routes)
        if any(isinstance(a, Tracer) for a in jax.tree.leaves(result)):
            _traced[of.name].update(dict.fromkeys(taken))
        return result

    with of.intercept(interceptor), _swapping((fuse, tuple(recipes.items()))):
        yield routes
