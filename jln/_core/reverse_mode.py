"""Calls of operators in reverse mode: an equation each until they are differentiated, which notes the vmaps around it.

JAX adds up gradients of what the examples of a vmap share behind the backward rule of a custom_vjp function, which so
has to make them for each example. A vmap inside of the derivative gets to the equation first. Where that is
differentiated, one call with the examples as rows of its own takes the place of the vmap, and adds up in its backward
kernels. A vmap around the derivative never sees the equation, only what the custom_vjp function makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from jln._core.operation import varying_together, watched_by_checkify

# From settings, operands, and the place of vmap's axis in each operand, None in one that is shared, to the settings and
# the operands of one call, and to the place of the axis in each of its results. None where no one call is the same.
Widen = Callable[[Any, Any, Any], tuple[Any, Any, Any] | None]
# From settings to the function of (settings, operands) that JAX differentiates itself where no one call is the same: it
# adds up where it multiplies. None where each example is to have its own derivative.
Plain = Callable[[Any], Callable[..., Any] | None]


def in_reverse_mode(
    function: Callable[..., Any], derivative: Callable[..., Any], widen: Widen, plain: Plain
) -> Callable[[Hashable, Any], Any]:
    """Return `function(settings, operands)`, whose derivatives are those of `derivative`, a custom_vjp function."""
    noted, widened, tangent = Primitive("jln_reverse_mode"), Primitive("jln_one_call"), _tangent_primitive()
    noted.multiple_results = widened.multiple_results = True

    def under(vmaps, function, settings, tree):
        """`function` of leaves under vmaps, each as the places of its axis in the leaves, the innermost first."""
        return functools.reduce(jax.vmap, vmaps, lambda *leaves: function(settings, tree.unflatten(leaves)))

    # The call until it is differentiated.

    def call(settings: Hashable, operands: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        return bind(leaves, settings=settings, tree=tree, vmaps=())

    def bind(leaves, **how):
        jaxpr, shapes = jax.make_jaxpr(under(function=function, **how), return_shape=True)(*leaves)
        results = noted.bind(*leaves, jaxpr=jaxpr, used=(True,) * len(jaxpr.out_avals), **how)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def note(leaves, dims, *, jaxpr, used, vmaps, **how):
        del jaxpr
        results = jax.tree.leaves(bind(varying_together(leaves), vmaps=(*vmaps, tuple(dims)), **how))
        return _only(results, used), [0] * sum(used)

    def evaluate(*leaves, jaxpr, used, **how):
        del jaxpr  # in which JAX would look for no NaN
        return _only(jax.tree.leaves(under(function=function, **how)(*leaves)), used)

    def of_jaxpr(*leaves, jaxpr, used, **_):
        return _only(jaxpr_as_fun(jaxpr)(*leaves), used)

    def without_unused(used, *more):
        eqn = more[-1]  # from JAX 0.12 on a rule is also told which inputs are alive
        if not any(used):
            return [False] * len(eqn.invars), None
        asked = iter(used)
        still = tuple([was_used and next(asked) for was_used in eqn.params["used"]])
        outvars = _only(eqn.outvars, used)
        return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=eqn.params | {"used": still})

    # Differentiated it is, under the same vmaps, a call that each of them may widen.

    def differentiate(primals, tangents, *, jaxpr, used, **how):
        del jaxpr
        tangents = [t if isinstance(t, ad.Zero) else tangent.bind(t) for t in tangents]
        wanted = under(function=bind_widened, **how)
        return _jvp(lambda *leaves: _only(jax.tree.leaves(wanted(*leaves)), used), primals, tangents)

    def bind_widened(settings, operands):
        leaves, tree = jax.tree.flatten(operands)
        shapes = jax.eval_shape(functools.partial(function, settings), operands)
        results = widened.bind(*leaves, settings=settings, tree=tree)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def widen_call(leaves, dims, *, settings, tree):
        leaves = varying_together(leaves)
        wider = widen(settings, tree.unflatten(leaves), tree.unflatten(dims))
        if wider is None:
            results = jax.tree.leaves(under((tuple(dims),), plain(settings) or derivative, settings, tree)(*leaves))
            return results, [0] * len(results)
        settings, operands, places = wider
        results = bind_widened(settings, operands)
        return jax.tree.leaves(results), jax.tree.structure(results).flatten_up_to(places)

    def differentiate_widened(primals, tangents, *, settings, tree):
        of_leaves = under((), derivative, settings, tree)
        return _jvp(lambda *leaves: jax.tree.leaves(of_leaves(*leaves)), primals, tangents)

    noted.def_impl(evaluate)
    noted.def_abstract_eval(lambda *_, jaxpr, used, **__: _only(jaxpr.out_avals, used))
    ad.primitive_jvps[noted] = differentiate
    watched_by_checkify(noted)
    batching.primitive_batchers[noted] = note
    partial_eval.dce_rules[noted] = without_unused
    mlir.register_lowering(noted, mlir.lower_fun(of_jaxpr, multiple_results=True))
    batching.primitive_batchers[widened] = widen_call
    ad.primitive_jvps[widened] = differentiate_widened
    return call


def _only(given: Any, used: tuple[bool, ...]) -> list[Any]:
    return [a for a, is_used in zip(given, used, strict=True) if is_used]


def _jvp(function: Callable[..., Any], primals: Any, tangents: Any) -> tuple[Any, Any]:
    """`jax.jvp` of leaves, of which some have no tangent."""
    moved = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of_moved(*given):
        leaves = list(primals)
        for i, a in zip(moved, given, strict=True):
            leaves[i] = a
        return function(*leaves)

    return jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])


def _refuse_forward_mode(*_, **__):
    raise TypeError(
        "this operator was asked for its derivative in forward mode (jax.jvp, jax.jacfwd, jax.linearize), which a "
        "custom_vjp function has not: call it with forward_mode=True (with quantize= there is none), or, where "
        "jln.fuse has put it into a loss, write jln.fuse(loss, forward_mode=True)"
    )


@functools.cache
def _tangent_primitive() -> Primitive:
    """A primitive of the identity, for tangents: reverse mode transposes it, and forward mode evaluates it and raises.

    JAX's own error does not tell what to do.
    """
    tangent = Primitive("jln_reverse_mode_tangent")
    tangent.def_impl(_refuse_forward_mode)
    tangent.def_abstract_eval(lambda a: a)
    batching.primitive_batchers[tangent] = _refuse_forward_mode
    mlir.register_lowering(tangent, _refuse_forward_mode)
    ad.deflinear2(tangent, lambda ct, a: [ct])
    return tangent
