"""Calls of operators in reverse mode: an equation each until they are differentiated, which a vmap may widen.

JAX adds up gradients of what the examples of a vmap share behind the backward rule of a custom_vjp function, which so
has to make them for each example. A vmap inside of the derivative gets to the equation first: one call with the
examples as rows of its own takes its place, which adds up in its backward kernels. A vmap around the derivative never
sees the equation, only what the custom_vjp function makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from jln._core.modes import own_modes
from jln._core.operation import jvp_of_moved, vary_together, watch_for_nan

# From settings, operands, and the place of vmap's axis in each operand, None in one that is shared, to the settings and
# the operands of one call, and to the place of the axis in all of its results. None where no one call is the same.
Widen = Callable[[Any, Any, Any], tuple[Any, Any, int] | None]
# From settings and these places to the function of (settings, operands) that JAX differentiates itself where no one
# call is the same: it adds up where it multiplies. None where each example is to have its own derivative.
Plain = Callable[[Any, Any], Callable[..., Any] | None]


def in_reverse_mode(
    function: Callable[..., Any], derivative: Callable[..., Any], widen: Widen, plain: Plain
) -> Callable[[Hashable, Any], Any]:
    """Return `function(settings, operands)`, whose derivatives are those of `derivative`, a custom_vjp function."""
    primitive, tangent = Primitive("jln_reverse_mode"), _tangent_primitive()
    primitive.multiple_results = True

    def call(settings: Hashable, operands: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        traced = functools.partial(function, settings)
        jaxpr, shapes = jax.make_jaxpr(traced, return_shape=True)(operands)
        used = (True,) * len(jaxpr.out_avals)
        results = primitive.bind(*leaves, jaxpr=jaxpr, used=used, settings=settings, tree=tree)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def evaluate(*leaves, jaxpr, used, settings, tree):
        del jaxpr  # in which JAX would look for no NaN
        return _only(jax.tree.leaves(function(settings, tree.unflatten(leaves))), used)

    def evaluate_jaxpr(*leaves, jaxpr, used, **_):
        return _only(jaxpr_as_fun(jaxpr)(*leaves), used)

    def batch(leaves, dims, *, jaxpr, used, settings, tree):
        del jaxpr
        leaves = vary_together(leaves)
        with own_modes():
            wider = widen(settings, tree.unflatten(leaves), tree.unflatten(dims))
        if wider is None:
            each = functools.partial(plain(settings, tree.unflatten(dims)) or derivative, settings)
            results = jax.tree.leaves(jax.vmap(lambda *a: each(tree.unflatten(a)), tuple(dims))(*leaves))
            return _only(results, used), [0] * sum(used)
        settings, operands, place = wider
        return _only(jax.tree.leaves(call(settings, operands)), used), [place] * sum(used)

    def differentiate(primals, tangents, *, jaxpr, used, settings, tree):
        del jaxpr

        def of_used(*leaves):
            return _only(jax.tree.leaves(derivative(settings, tree.unflatten(leaves))), used)

        return jvp_of_moved(of_used, primals, [t if isinstance(t, ad.Zero) else tangent.bind(t) for t in tangents])

    def drop_unused(used, *more):
        eqn = more[-1]  # from JAX 0.12 on a rule is also told which inputs are alive
        if not any(used):
            return [False] * len(eqn.invars), None
        asked = iter(used)
        still = tuple([was_used and next(asked) for was_used in eqn.params["used"]])
        return [True] * len(eqn.invars), eqn.replace(
            outvars=_only(eqn.outvars, used), params=eqn.params | {"used": still}
        )

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(lambda *_, jaxpr, used, **__: _only(jaxpr.out_avals, used))
    ad.primitive_jvps[primitive] = differentiate
    watch_for_nan(primitive)
    batching.primitive_batchers[primitive] = batch
    partial_eval.dce_rules[primitive] = drop_unused
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate_jaxpr, multiple_results=True))
    return call


def _only(given: Any, used: tuple[bool, ...]) -> list[Any]:
    return [a for a, is_used in zip(given, used, strict=True) if is_used]


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
