"""The function `explain`: how each call of a layer was computed, noted at the call, read from a traced program."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jln._core.policies import kept_by


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


P = ParamSpec("P")
R = TypeVar("R")
# In `with listen(listener):` it is told of each route, with the array that the layer reads, and no other listener is.
# It is a part of the key of JAX's caches: only programs that are traced for `explain` have equations of `_primitive`.
listen = jax.make_user_context(default_value=None)


def note(layer: str, path: str, why: str, read: Any = None) -> None:
    """Tell the listener of a call of a layer. read: the array that the layer reads."""
    if (listener := listen.value) is not None:
        listener(Route(layer, path, why), read)


def note_calls(path: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a decorator of public operators, which notes their calls."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            note(f"jln.{function.__name__}", path, "called as a function", args[0] if args else kwargs.get("x"))
            return function(*args, **kwargs)

        return call

    return decorate


@functools.singledispatch
def places(model: Any) -> Mapping[int, str]:
    """The places of a model's layers by their identity; a framework's module registers its own."""
    return {}


@dataclasses.dataclass(frozen=True)
class _Question:
    """A listener that writes routes into the program that is traced, where JAX keeps them with a cached trace."""

    # Not compared: all questions are equal, as JAX keeps what it has traced for each that differs.
    places: dict[int, str] = dataclasses.field(default_factory=dict, compare=False)

    def __call__(self, route: Route, read: Any) -> None:
        _primitive().bind(*([read] if isinstance(read, jax.Array) else []), route=route)


def place(layer: Any) -> str:
    """The place of a layer in the models that a question is about; "" where it is not known."""
    return getattr(listen.value, "places", {}).get(id(layer), "")


@functools.singledispatch
def traceable(function: Any) -> Callable[..., Any]:
    """`function` as one that JAX can trace; a framework's module registers what its models need."""
    return function


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Route, ...]:
    """Trace `function(*args, **kwargs)` and list how each jln layer and operator that it calls is computed, and why.

    Nothing is computed: arrays may be `jax.ShapeDtypeStruct`s. A "norm" or "fused" call reaches jln's operators, and
    runs what their `implementation` says. A framework's own layers are not listed; of a function that `jln.fuse` has
    made, the operators in their place are, and the norms that it left.

    JAX does not trace again what is under `jax.jit`: of an object that it has closed over, you see the state at the
    first call. A Flax NNX model that is changed, or that Flax transforms, is an argument:
    `jln.explain(lambda model, x: ..., model, x)`.

    Args:
      function: a layer or a model of Flax NNX or Equinox; a Linen module or what `hk.transform` returns, whose
        parameters are made up; or any function of arrays.
      *args, **kwargs: the arguments of `function`.

    Returns:
      A `jln.Route` for each call, in the order of the calls. A call in a loop or a scan is listed once, with the number
        of turns where that is known; a call inside of a `jax.checkpoint` with what that keeps.
    """
    for framework, module in (("flax.linen", "jln.linen"), ("haiku", "jln.haiku")):  # which register with `traceable`
        if framework in sys.modules:
            importlib.import_module(module)
    call = traceable(function)
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = {i: a for i, a in enumerate(leaves) if hasattr(a, "shape") and hasattr(a, "dtype")}
    own, question = inspect.unwrap(function), _Question()

    def trace(arrays):
        args, kwargs = tree.unflatten([arrays.get(i, a) for i, a in enumerate(leaves)])
        for model in (getattr(own, "__self__", own), *args, *kwargs.values()):  # arguments are made again by the trace
            question.places.update(places(model))
        call(*args, **kwargs)

    with listen(question):
        program = jax.make_jaxpr(trace)(arrays)
    return tuple(_routes(program))


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


def _routes(program: Any) -> Iterator[Route]:
    """The routes in a program, in its order, those inside of an equation at that equation's place."""
    for equation in program.eqns:
        if equation.primitive is _primitive():
            yield equation.params["route"]
        for inner in inner_programs(equation):
            for route in _routes(inner):
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
