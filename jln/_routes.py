"""Routes: how each call of a layer is computed, noted at the call and read from a traced program."""

from __future__ import annotations

import functools
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jln._core.policies import kept_by


class Route(NamedTuple):
    """The way in which one call of a layer was computed, as `jln.explain` lists it.

    Attributes:
      layer: the layer's class, the name of an operator, or the norm that is left, by its dtype and shape.
      path: "norm" (jln's norm by itself), "fused" (norm and Linear as one operator) or "plain" (the framework's own
        code, or a norm that `jln.fuse` left as it is, or would take).
      why: the operator's arrays, or the reason, in a few words.
      line: the model's line, `file:line (function)`.
      scope: the name scope around it, which Flax Linen and Haiku make of a layer's place in the model.
    """

    layer: str
    path: str
    why: str
    line: str = ""
    scope: str = ""

    def __str__(self) -> str:
        by = ", not by jln" if self.path == "plain" else ""
        return f"{self.layer}{by}: {'; '.join(filter(None, self[2:]))}"


P = ParamSpec("P")
R = TypeVar("R")
# In `with listen(listener):` it is told of each route, with the array that the layer reads, and no other listener is.
# It is a part of the key of JAX's caches: only programs that are traced for `explain` have equations of `_primitive`.
listen = jax.make_user_context(default_value=None)


def note(layer: str, path: str, why: str, read: Any = None) -> None:
    """Tell the listener of a call of a layer. read: the array that the layer reads."""
    if (listener := listen.value) is not None:
        listener(Route(layer, path, why), read)


def write(route: Route, read: Any) -> None:
    """Write a route into the program that is traced, where JAX keeps it with a cached trace."""
    _primitive().bind(*([read] if isinstance(read, jax.Array) else []), route=route)


POSSIBLE = "possible "


def write_possible(route: Route, read: Any) -> None:
    """Write a route that a program could have, which its path says, and has not."""
    write(route._replace(path=POSSIBLE + route.path), read)


def note_calls(path: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decorator of public operators, which notes their calls."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            note(f"jln.{function.__name__}", path, "called as a function", args[0] if args else kwargs.get("x"))
            return function(*args, **kwargs)

        return call

    return decorate


@functools.cache
def _primitive() -> Primitive:
    """A primitive that carries a route, and does nothing.

    JAX keeps its equation for the effect of `jax.debug.callback`, which every transformation allows. Its operand, the
    array that the layer reads, keeps it in its place: Flax traces a scan's body twice, first for what does not depend
    on the carry.
    """
    primitive = Primitive("jln_route")
    primitive.multiple_results = True
    effects = jax.make_jaxpr(lambda: jax.debug.callback(lambda: None))().effects
    primitive.def_impl(lambda *_, **__: [])
    primitive.def_effectful_abstract_eval(lambda *_, **__: ([], effects))
    mlir.register_lowering(primitive, lambda ctx, *_, **__: [])
    batching.primitive_batchers[primitive] = lambda operands, dims, **of: (primitive.bind(*operands, **of), [])
    ad.primitive_jvps[primitive] = lambda primals, tangents, **of: (primitive.bind(*primals, **of), [])
    return primitive


def routes_of(program: Any) -> Iterator[Route]:
    """The routes in a program, in its order, those inside of an equation at that equation's place."""
    for equation in program.eqns:
        if equation.primitive is _primitive():
            route, info = equation.params["route"], equation.source_info
            scope = re.sub(r"jit\([^)]*\)/?|\w+\(|\)", "", str(info.name_stack)).strip("/")
            yield route._replace(line=_line(info, has_scope=bool(scope)), scope=scope)
        for inner in inner_programs(equation):
            for route in routes_of(inner):
                yield route._replace(why=route.why + _remark(equation))


def inner_programs(equation: Any) -> Iterator[Any]:
    """The jaxprs inside of an equation, closed or not."""
    values = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda value: hasattr(value, "eqns"))
    return (value for value in values if hasattr(value, "eqns"))


def _remark(equation: Any) -> str:
    """A remark on the calls inside of an equation: in a loop, in a `jax.shard_map`, in a `jax.checkpoint`; else ""."""
    name, params = equation.primitive.name, equation.params
    if name in ("scan", "while"):
        return f"; in a loop of {params['length']}" if name == "scan" else "; in a loop"
    if name == "shard_map":
        axes = params.get("newly_manual_axes") or params.get("manual_axes") or params["mesh"].axis_names
        return f"; in a jax.shard_map over {', '.join(sorted(axes))}"
    if "prevent_cse" in params and "policy" in params:  # a jax.checkpoint
        kept = [what for what, is_kept in kept_by(params["policy"]).items() if is_kept]
        return f"; in a jax.checkpoint that keeps {' and '.join(kept) or 'nothing of it'}"
    return ""


_FRAMEWORKS = ("jax", "flax", "haiku", "equinox", "haliax", "penzai", "keras", "optax", "numpy", "jln")
_PLACES = os.path.dirname(__file__), sysconfig.get_path("stdlib"), "<frozen "


def is_of_framework(file: str) -> bool:
    """True of a file of jln's, of a framework's or of Python's own."""
    if "-packages/" in file:
        return file.split("-packages/")[-1].startswith(tuple(f"{name}/" for name in _FRAMEWORKS))
    return file.startswith(_PLACES)


def _line(info: Any, *, has_scope: bool) -> str:
    """The model's line, `file:line (function)`: the innermost that is no framework's; "" where there is none.

    has_scope: whether a name scope tells the layer. Else a package has the line, if the model is one.
    """
    frames = info.traceback.frames if info.traceback is not None else []
    theirs = [f for f in frames if not is_of_framework(f.file_name)]
    own = [f for f in theirs if "-packages/" not in f.file_name]
    for frame in own if has_scope and own else theirs:
        is_near = frame.file_name.startswith(os.getcwd() + os.sep)
        file = os.path.relpath(frame.file_name) if is_near else frame.file_name
        return f"{file}:{frame.line_num} ({frame.function_name})"
    return ""
