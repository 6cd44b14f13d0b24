"""`jln.nnx.fuse`: the transformation `fuse` of functions whose arguments are objects of Flax NNX, such as Modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jln._fuse.transformation import fuse as _fuse
from jln._fuse.transformation import join, part

# The name of Flax's context in which it knows a Module from its copies inside of a function.
_FUSE = "jln.fuse"


def fuse(
    function: Callable[..., Any] | None = None,
    *,
    linears: bool = False,
    implementation: str | None = None,
    forward_mode: bool = False,
) -> Callable[..., Any]:
    """Return what `jln.fuse` makes of a function whose arguments or results have Flax NNX objects in them.

    What a call changes in a Module, Rngs, Metric or Optimizer, such as counters, running statistics and the keys of
    random numbers, is changed in the caller's: `loss = jln.nnx.fuse(loss)`, then `nnx.jit(nnx.value_and_grad(loss))`.

    Args:
      function: as of `jln.fuse`; such objects may be anywhere in its arguments.
      linears, implementation, forward_mode: as of `jln.fuse`.

    Returns:
      A function with `function`'s arguments and results.

    Raises:
      TypeError: `function` is not callable.
      ValueError: the implementation is unknown.
    """
    options = {"linears": linears, "implementation": implementation, "forward_mode": forward_mode}
    if function is None:
        return functools.partial(fuse, **options)

    def pure(call: _Call, state: Any, others: list[Any]) -> tuple[Any, list[Any]]:
        with nnx.merge_context(_FUSE, inner=True) as context:
            modules = context.merge(call.graph, state)
        args, kwargs = _joined(call.structure, modules, others)
        result_modules, results, structure = _parted(function(*args, **kwargs))
        with nnx.split_context(_FUSE) as context:
            graph, state = context.split((modules, result_modules))
        call.results = _Call(graph, structure)
        return state, results

    pure.__name__ = getattr(function, "__name__", type(function).__name__)
    fused_pure = _fuse(pure, **options)

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        modules, others, structure = _parted((args, kwargs))
        with nnx.update_context(_FUSE):
            with nnx.split_context(_FUSE) as context:
                graph, state = context.split(modules)
            call = _Call(graph, structure)
            state, results = fused_pure(call, state, others)
            assert call.results is not None
            with nnx.merge_context(_FUSE, inner=False) as context:
                _, result_modules = context.merge(call.results.graph, state)
        return _joined(call.results.structure, result_modules, results)

    return fused


@dataclasses.dataclass
class _Call:
    """The static part of a call's arguments or results: the Modules' graph, and where Modules and other leaves are.

    It has no hash, so no program is kept for it: a Module's attributes may change without being unequal.
    """

    graph: Any
    structure: Any
    results: _Call | None = None


def _parted(tree: Any) -> tuple[list[nnx.Pytree], list[Any], Any]:
    """A tree's Modules and other objects of Flax NNX, its other leaves, and what `_joined` needs to put them back."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda a: isinstance(a, nnx.Pytree))
    is_module = tuple(isinstance(a, nnx.Pytree) for a in leaves)
    return *part(leaves, is_module), (structure, is_module)


def _joined(structure: Any, modules: Sequence[nnx.Pytree], others: Sequence[Any]) -> Any:
    tree, is_module = structure
    return tree.unflatten(join(modules, others, is_module))
