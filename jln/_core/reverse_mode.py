"""Calls of operators in reverse mode: one equation each until they are differentiated, which `vmap` may widen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from jln._core.operation import varying_together, watched_by_checkify

# From settings, operands, and the place of vmap's axis in each operand, None in one that is shared, to the settings and
# the operands of one wider call, and to the place of the axis in each result, None where examples share that too.
# None where no call of the operator is the same.
Widen = Callable[[Any, Any, Any], tuple[Any, Any, Any] | None]
# From settings to a function of a call, of operands, and of which of them move, as a tree of bools. It computes the
# results by smaller calls, `call(settings, operands, moving)`, to each of which vmap gets by itself. None where there
# are none.
Parts = Callable[[Any], Callable[..., Any] | None]

Places = tuple[int | None, ...]  # of one axis in each leaf, None in one that has it not


def in_reverse_mode(
    function: Callable[..., Any], derivative: Callable[..., Any], widen: Widen, parts: Parts | None = None
) -> Callable[[Hashable, Any], Any]:
    """Return `function(settings, operands)`, whose derivatives are those of `derivative`, a custom_vjp function.

    JAX adds up gradients of what the examples of a vmap share behind the backward rule of a custom_vjp function, which
    so has to make them for each example. A vmap inside of the derivative gets to the equation made here first, which
    notes it. Where it is differentiated, it tries the one call that has the examples as rows of its own, say, and adds
    up in its backward kernels; nothing else needs that call. Any of several vmaps may be the innermost, for they
    commute. Where no call is the same, smaller ones are tried, by `parts`. A vmap around the derivative never sees this
    equation, only what `derivative` makes.
    """
    primitive, tangent = Primitive("jln_reverse_mode"), _tangent_primitive()
    primitive.multiple_results = True

    def call(settings: Hashable, operands: Any, moving: Any = True) -> Any:
        if not any(jax.tree.leaves(moving)):  # in this derivative. In one around it, in forward mode, it may
            return function(settings, operands)
        leaves, tree = jax.tree.flatten(operands)
        return bind(leaves, settings=settings, tree=tree, vmaps=(), moving=None)

    def bind(leaves, **static):
        jaxpr, shapes = jax.make_jaxpr(of(function, **static), return_shape=True)(*leaves)
        results = primitive.bind(*leaves, jaxpr=jaxpr, used=(True,) * len(jaxpr.out_avals), **static)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def of(function, *, settings, tree, vmaps, moving=None):
        """A function of leaves. vmaps: the places of examples in the leaves, for each vmap that no one call is.

        moving: in a derivative, where the call may be widened, for each leaf whether it has a tangent; else None.
        """
        del moving

        def of_leaves(*leaves):
            return function(settings, tree.unflatten(leaves))

        return functools.reduce(jax.vmap, vmaps, of_leaves)

    def widening(moving):
        def call(settings, operands):
            leaves, tree = jax.tree.flatten(operands)
            return bind(leaves, settings=settings, tree=tree, vmaps=(), moving=moving)

        return call

    def is_widened(leaves, dims, around, *, settings, tree):
        """Return whether there is one call for an axis of the leaves under other vmaps."""
        found = []

        def of_leaves(*leaves):
            found.append(widen(settings, tree.unflatten(leaves), tree.unflatten(dims)) is not None)

        jax.eval_shape(functools.reduce(jax.vmap, around, of_leaves), *leaves)
        return found[-1]

    def only(given: Any, used: tuple[bool, ...]) -> list[Any]:
        return [a for a, is_used in zip(given, used, strict=True) if is_used]

    def evaluate(*leaves, jaxpr, used, **static):
        del jaxpr  # in which JAX would look for no NaN
        return only(jax.tree.leaves(of(function, **static)(*leaves)), used)

    def of_jaxpr(*leaves, jaxpr, used, **_):
        return only(jaxpr_as_fun(jaxpr)(*leaves), used)

    def jvp(primals, tangents, *, jaxpr, used, moving, **static):
        del jaxpr
        moves = tuple([not isinstance(t, ad.Zero) for t in tangents])
        moved = [i for i, moves_here in enumerate(moves) if moves_here]
        tangents = [tangents[i] for i in moved]
        if moving is not None:
            wanted = of(derivative, **static)
        else:  # under each of the vmaps again, now as one call if there is one
            tangents = [tangent.bind(t) for t in tangents]
            wanted = of(widening(moves), **static)

        def of_moved(*given):
            leaves = list(primals)
            for i, a in zip(moved, given, strict=True):
                leaves[i] = a
            return only(jax.tree.leaves(wanted(*leaves)), used)

        return jax.jvp(of_moved, [primals[i] for i in moved], tangents)

    def batch(leaves, dims, *, jaxpr, used, settings, tree, vmaps, moving):
        del jaxpr
        leaves, dims, widens = varying_together(leaves), tuple(dims), moving is not None
        if (
            widens
            and not vmaps
            and (wider := widen(settings, tree.unflatten(leaves), tree.unflatten(dims))) is not None
        ):
            settings, operands, places = wider
            results = widening(moving)(settings, operands)
            places = jax.tree.structure(results).flatten_up_to(places)
            return only(jax.tree.leaves(results), used), only(places, used)
        how, place = {"settings": settings, "tree": tree}, 0
        inside, around = _inside(dims, vmaps)
        if widens and vmaps and is_widened(leaves, inside, around, **how):
            results, place = of(widening(moving), vmaps=(inside, *around), **how)(*leaves), len(vmaps)
        elif widens and parts is not None and (in_parts := parts(settings)) is not None:
            moving = tree.unflatten(moving)
            results = of(lambda _, a: in_parts(call, a, moving), vmaps=(*vmaps, dims), **how)(*leaves)
        else:
            results = bind(leaves, vmaps=(*vmaps, dims), moving=moving, **how)
        return only(jax.tree.leaves(results), used), [place] * sum(used)

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
    watched_by_checkify(primitive)
    batching.primitive_batchers[primitive] = batch
    partial_eval.dce_rules[primitive] = without_unused
    mlir.register_lowering(primitive, mlir.lower_fun(of_jaxpr, multiple_results=True))
    return call


def _inside(outer: Places, vmaps: tuple[Places, ...]) -> tuple[Places, tuple[Places, ...]]:
    """The places in the leaves of a vmap's axis around others, when it is inside of them; and those of the others."""
    around = []
    for inner in reversed(vmaps):
        both = [*zip(outer, inner, strict=True)]
        outer = tuple([a if a is None or b is None else a - (a > b) for a, b in both])
        around.append(tuple([b if a is None or b is None else b + (b >= a) for a, b in both]))
    return outer, tuple(reversed(around))


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
