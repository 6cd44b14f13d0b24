"""Calls of operators in reverse mode: one equation each until they are differentiated, which `vmap` may widen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

# From settings, operands, and the place of vmap's axis in each operand, None in one that is shared, to the settings and
# the operands of one wider call, and to the place of the axis in each result, None where examples share that too.
# None where no call of the operator is the same.
Widen = Callable[[Any, Any, Any], tuple[Any, Any, Any] | None]


def in_reverse_mode(
    function: Callable[..., Any], derivative: Callable[..., Any], widen: Widen
) -> Callable[[Hashable, Any], Any]:
    """Return `function(settings, operands)`, whose derivatives are those of `derivative`, a custom_vjp function.

    JAX adds up gradients of what the examples of a vmap share behind the backward rule of a custom_vjp function, which
    so has to make them for each example. A vmap inside of the derivative gets to the equation made here first, which
    notes it. Where it is differentiated, it tries the one call that has the examples as rows of its own, or as
    features, and adds up in its backward kernels; nothing else needs that call. A vmap around the derivative never sees
    this equation, only what `derivative` makes.
    """
    primitive, tangent = Primitive("jln_reverse_mode"), _tangent_primitive()
    primitive.multiple_results = True

    def call(settings: Hashable, operands: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        return bind(leaves, settings=settings, tree=tree, vmaps=(), widens=False)

    def bind(leaves, **static):
        jaxpr, shapes = jax.make_jaxpr(of(function, **static), return_shape=True)(*leaves)
        results = primitive.bind(*leaves, jaxpr=jaxpr, used=(True,) * len(jaxpr.out_avals), **static)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def of(function, *, settings, tree, vmaps, widens=None):
        """A function of leaves. vmaps: the places of examples in the leaves, for each vmap that no one call is."""
        del widens

        def of_leaves(*leaves):
            return function(settings, tree.unflatten(leaves))

        return functools.reduce(jax.vmap, vmaps, of_leaves)

    def only(given: Any, used: tuple[bool, ...]) -> list[Any]:
        return [a for a, is_used in zip(given, used, strict=True) if is_used]

    def evaluate(*leaves, jaxpr, used, **static):
        del jaxpr  # in which JAX would look for no NaN
        return only(jax.tree.leaves(of(function, **static)(*leaves)), used)

    def of_jaxpr(*leaves, jaxpr, used, **_):
        return only(jaxpr_as_fun(jaxpr)(*leaves), used)

    def jvp(primals, tangents, *, jaxpr, used, settings, widens, **static):
        del jaxpr
        moved = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
        tangents = [tangents[i] for i in moved]
        if widens:
            wanted = of(derivative, settings=settings, **static)
        else:  # under each of the vmaps again, now as one call if there is one
            tangents = [tangent.bind(t) for t in tangents]

            def widening(settings, operands):
                return bind(jax.tree.leaves(operands), settings=settings, tree=static["tree"], vmaps=(), widens=True)

            wanted = of(widening, settings=settings, **static)

        def of_moved(*given):
            leaves = list(primals)
            for i, a in zip(moved, given, strict=True):
                leaves[i] = a
            return only(jax.tree.leaves(wanted(*leaves)), used)

        return jax.jvp(of_moved, [primals[i] for i in moved], tangents)

    def batch(leaves, dims, *, jaxpr, used, settings, tree, vmaps, widens):
        del jaxpr
        wider = widen(settings, tree.unflatten(leaves), tree.unflatten(dims)) if widens and not vmaps else None
        if wider is None:
            results = bind(leaves, settings=settings, tree=tree, vmaps=(*vmaps, tuple(dims)), widens=widens)
            return only(jax.tree.leaves(results), used), [0] * sum(used)
        settings, operands, places = wider
        leaves, tree = jax.tree.flatten(operands)
        results = bind(leaves, settings=settings, tree=tree, vmaps=(), widens=True)
        places = jax.tree.structure(results).flatten_up_to(places)
        return only(jax.tree.leaves(results), used), only(places, used)

    def without_unused(used, *more):
        eqn = more[-1]  # from JAX 0.12 on a rule is also told which inputs are alive
        if not any(used):
            return [False] * len(eqn.invars), None
        asked = iter(used)
        still = tuple([was_used and next(asked) for was_used in eqn.params["used"]])
        outvars = [v for v, is_used in zip(eqn.outvars, used, strict=True) if is_used]
        return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=eqn.params | {"used": still})

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(lambda *_, jaxpr, used, **__: only(jaxpr.out_avals, used))
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    partial_eval.dce_rules[primitive] = without_unused
    mlir.register_lowering(primitive, mlir.lower_fun(of_jaxpr, multiple_results=True))
    return call


def _refuse_forward_mode(*_, **__):
    raise TypeError(
        "this operator was asked for its derivative in forward mode (jax.jvp, jax.jacfwd, jax.linearize), which a "
        "custom_vjp function has not: call it with forward_mode=True"
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
