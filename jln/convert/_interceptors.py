"""Linen and Haiku: calls are intercepted while a context is open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jln import _modules
from jln._modules import Route

# What JAX has traced and kept outside of a context must not be taken for what is traced inside, nor the reverse.
_swapping = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def linen() -> Iterator[list[Route]]:
    from jln import linen as ours
    from jln.linen import nn

    routes: list[Route] = []
    swap = _swap((ours.FlaxLayerNorm, ours.FlaxRMSNorm), (ours.LayerNorm, ours.RMSNorm), ours.call, routes)
    with nn.intercept_methods(swap), _swapping(True):
        yield routes


@contextlib.contextmanager
def haiku() -> Iterator[list[Route]]:
    from jln import haiku as ours
    from jln.haiku import hk

    routes: list[Route] = []
    swap = _swap((ours.HaikuLayerNorm, ours.HaikuRMSNorm), (ours.LayerNorm, ours.RMSNorm), ours.call, routes)
    with hk.intercept_methods(swap), _swapping(True):
        yield routes


def _swap(theirs: tuple[type, ...], own: tuple[type, ...], call: Callable, routes: list[Route]) -> Callable:
    """An interceptor, with Flax's signature and Haiku's. A route is listed once, however often it is taken."""

    def interceptor(next_fun: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        layer = context.module
        if context.method_name != "__call__" or not isinstance(layer, theirs) or isinstance(layer, own):
            return next_fun(*args, **kwargs)
        with _modules.noting() as taken:
            if type(layer) in theirs:
                result = call(layer, next_fun, *args, **kwargs)
            else:
                name = f"{type(layer).__module__}.{type(layer).__qualname__}"
                _modules.note(name, "plain", "not swapped: a subclass may compute something else")
                result = next_fun(*args, **kwargs)
        routes.extend(route for route in taken if route not in routes)
        return result

    return interceptor
