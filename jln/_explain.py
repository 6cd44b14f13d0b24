"""The function `explain`: the routes of a function's calls, counted and printed."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jln._fuse.bodies import evaluate
from jln._fuse.calls import Options
from jln._fuse.transformation import differentiates
from jln._routes import POSSIBLE, Route, listen, routes_of, write, write_possible


class Explanation(tuple[Route, ...]):
    """The routes that `jln.explain` returns, a tuple; it prints itself.

    Attributes:
      summary: the first line that it prints: how many norms run as jln's operators. Below, equal calls are one line.
    """

    summary: str

    def __new__(cls, routes: Iterable[Route], summary: str = "") -> Explanation:
        made = super().__new__(cls, routes)
        made.summary = summary
        return made

    def __str__(self) -> str:
        equal = collections.defaultdict(list)  # layers alike differ in the numbers of their scopes
        for route in self:
            equal[route._replace(scope=re.sub(r"\d+", "*", route.scope))].append(route)
        lines = [self.summary]
        for routes in equal.values():
            names = [{*name} for name in zip(*(route.scope.split("/") for route in routes), strict=True)]
            scope = "/".join(name.pop() if len(name) == 1 else re.sub(r"\d+", "*", name.pop()) for name in names)
            lines.append(f"{len(routes)} x {routes[0]._replace(scope=scope)}")
        return "\n".join(lines)

    __repr__ = __str__


def _count(routes: Sequence[Route]) -> str:
    """The norms by jln's operators among all, in words."""

    def norms(some: Iterable[Route]) -> int:
        return sum(2 if "norm_add_rms" in r.layer else 1 for r in some)

    own = [r for r in routes if r.path != "plain"]
    around = {"their sum": [r for r in own if "residual" in r.why], "Linears": [r for r in own if r.path == "fused"]}
    parts = ", ".join(f"{norms(some)} with {what}" for what, some in around.items() if some)
    return f"{norms(own)} of {norms(routes)} norms" + (f"; {parts}" if parts else "")


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Trace `function(*args, **kwargs)` and list how each jln layer and operator that it calls is computed, and why.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`s. A "norm" or "fused" call reaches jln's operators, and
    runs what their `implementation` says. Of a function that `jln.fuse` has made, the operators that it put in are
    listed, and the norms that it left; of another one the norms that `jln.fuse` would take.

    JAX does not trace again what is under `jax.jit`: of an object that it has closed over, you see the state at the
    first call. A Flax NNX model that is changed, or that Flax transforms, is an argument:
    `jln.explain(lambda model, x: ..., model, x)`.

    Args:
      function: any function, such as a loss, a model of Flax NNX or Equinox, or `model.apply` of Flax Linen and Haiku.
      *args, **kwargs: the arguments of `function`.

    Returns:
      A tuple that prints itself, with a `jln.Route` for each call, in the order of the calls. A call in a loop or a
        scan is listed once, with the number of turns where that is known; a call inside of a `jax.checkpoint` with
        what that keeps.

    Raises:
      TypeError: `function` is not callable, as what `hk.transform` returns is not.
    """
    if not callable(function):
        raise TypeError(f"explain takes a function, as a model's apply is; got {type(function).__name__}")
    leaves, tree = jax.tree.flatten((function, args, kwargs))  # a model of Flax NNX or Equinox is a tree, too
    arrays = {i: a for i, a in enumerate(leaves) if hasattr(a, "shape") and hasattr(a, "dtype")}

    def trace(arrays: dict[int, Any]) -> list[Any]:
        call, args, kwargs = tree.unflatten([arrays.get(i, a) for i, a in enumerate(leaves)])
        return [a for a in jax.tree.leaves(call(*args, **kwargs)) if isinstance(a, jax.Array | np.ndarray)]

    with listen(write):
        program = jax.make_jaxpr(trace)(arrays)
    own = [*routes_of(program)]
    if differentiates(program):
        told = "not fused, and it differentiates inside: explain its loss, or jln.fuse(loss)"
        return Explanation(own, _count(own) if own else told)
    with listen(write_possible):
        program = jax.make_jaxpr(lambda *arrays: evaluate(program, arrays, Options(), []))(*program.in_avals)
    left = [route for route in own if route.path == "plain"]  # of which the norms are found once more
    routes, possible = [], []
    for route in routes_of(program):
        path = route.path.removeprefix(POSSIBLE)
        if path == route.path:
            routes.append(route)
        elif any(route.line == known.line and route.scope.startswith(known.scope) for known in left):
            continue
        elif path != "plain":
            why = f"jln.fuse makes it {route.layer} of {route.why}"
            routes.append(route._replace(layer="norm", path="plain", why=why))
            possible.append(route._replace(path=path))
        elif not own:
            routes.append(route._replace(path=path))
            possible.append(routes[-1])
    if own:
        return Explanation(routes, _count(routes) + (f"; jln.fuse takes {len(possible)} more" if possible else ""))
    return Explanation(routes, f"not fused; jln.fuse takes {_count(possible)}" if possible else "no norm was found")
