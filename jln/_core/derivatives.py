"""How an operator is differentiated: its rules, wired into `jax.custom_vjp` and, for forward mode, `jax.custom_jvp`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType, NamedSharding

from jln._core.mesh import leaves_or_none

# The `jax.ad_checkpoint.checkpoint_name` of row statistics, and of products that one kernel makes with the norm.
STATISTICS = "jln_statistics"
PRODUCT = "jln_product"


@dataclasses.dataclass(frozen=True)
class Rules:
    """An operator by its rules. Operands and results are NamedTuples of arrays and of tuples of arrays, None where one
    is absent.

    value: `value(settings, operands)` -> results.
    saving: `saving(settings, operands, wanted)` -> (results, saved), a NamedTuple of what the derivatives may read;
        what the wanted ones do not is `Unneeded`.
    gradients: `gradients(settings, saved, cotangents, wanted)` -> the operands' gradients; a cotangent is None where a
        result was not used, a gradient where it is zero or not wanted.
    tangents: `tangents(settings, saved, tangents, results)` -> the results' tangents, linear in those of the operands,
        None where zero, and transposed to `gradients` by its own means.

    `wanted` is a NamedTuple of the operands' dtypes by name, None for those whose gradient nobody wants. In `saved`
    what is unneeded is an empty array for `gradients`, and None for `tangents`.
    """

    value: Callable[..., Any]
    saving: Callable[..., Any]
    gradients: Callable[..., Any]
    tangents: Callable[..., Any]

    def operator(self) -> Callable[..., Any]:
        """`operator(settings, operands, forward_mode)`, the differentiable function."""
        value, saving, gradients, tangents = map(
            _with_standard_promotion, (self._value, self._saving, self._gradients, self._tangents)
        )
        reverse = jax.custom_vjp(value, nondiff_argnums=(0,))
        reverse.defvjp(saving, gradients, symbolic_zeros=True)
        forward = jax.custom_jvp(value, nondiff_argnums=(0,))
        forward.defjvp(tangents, symbolic_zeros=True)

        def operator(settings: Hashable, operands: Any, forward_mode: bool) -> Any:
            operands = _varying_together(operands)
            if forward_mode:
                return forward(settings, operands)
            return reverse(settings, _in_reverse_mode_only(operands))

        return operator

    def _value(self, settings, operands):
        return _batched_together(self.value(settings, operands))

    def _saving(self, settings, operands):
        is_primal = lambda a: isinstance(a, CustomVJPPrimal)  # noqa: E731
        values = jax.tree.map(lambda a: a.value, operands, is_leaf=is_primal)
        dtypes = jax.tree.map(lambda a: a.dtype.name, values)
        is_wanted = [a is not None and a.perturbed for a in leaves_or_none(operands)]
        results, saved = self.saving(settings, values, _only(dtypes, is_wanted))
        kept = jax.tree.map(lambda a: a.nothing() if isinstance(a, Unneeded) else a, saved)
        return _batched_together(results), (kept, _Static(dtypes), _told(is_wanted))

    def _gradients(self, settings, residuals, cotangents):
        saved, dtypes, told = residuals
        wanted = _only(dtypes.value, _heard(told))
        return (self.gradients(settings, saved, _without_zeros(cotangents), wanted),)

    def _tangents(self, settings, primals, tangents):
        (operands,), (tangents,) = primals, tangents
        tangents = _without_zeros(tangents)
        wanted = jax.tree.map(lambda a: a.dtype.name, operands)
        wanted = _only(wanted, [t is not None for t in leaves_or_none(tangents)])
        results, saved = self.saving(settings, operands, wanted)
        saved = jax.tree.map(lambda a: None if isinstance(a, Unneeded) else a, saved)
        return _batched_together(results), self.tangents(settings, saved, tangents, results)


def _with_standard_promotion(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule in JAX's own mode of promotion: every dtype is chosen on purpose, whatever the user's mode."""

    @functools.wraps(rule)
    def call(*arguments: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return rule(*arguments)

    return call


def named_statistics(*statistics: jax.Array | None) -> tuple[jax.Array | None, ...]:
    """Row statistics under the name by which policies of `jax.checkpoint` find them."""
    return tuple(None if a is None else checkpoint_name(a, STATISTICS) for a in statistics)


@dataclasses.dataclass(frozen=True)
class Unneeded:
    """In the place of what no wanted gradient reads. like: an array that vmap batches as it would batch that."""

    like: jax.Array

    def nothing(self) -> jax.Array:
        return jax.lax.slice_in_dim(self.like, 0, 0)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """What goes from the forward to the backward rule without being an array, the same for every trace of a call."""

    value: Any


def _told(flags: list[bool]) -> list[np.ndarray]:
    """What differs with what is wanted, as residuals: the shapes of arrays without elements.

    Residuals may differ in their shapes, and in nothing else: where a traced function is differentiated by one
    argument, then another, then the first again, JAX takes their structure (and under vmap, axes) from what it saw
    last. An array has at most 64 axes, and an operator of many Linears more operands.
    """
    return [np.zeros((0, *map(int, flags[i : i + 32])), bool) for i in range(0, len(flags), 32)]


def _heard(told: Sequence[Any]) -> list[bool]:
    return [bool(n) for a in told for n in a.shape[1:]]


def _only(arrays: Any, flags: Sequence[bool]) -> Any:
    """The same tree, with None for what has no flag."""
    leaves, tree = jax.tree.flatten(arrays, is_leaf=lambda a: a is None)
    return tree.unflatten([a if flag else None for a, flag in zip(leaves, flags, strict=True)])


def _without_zeros(tree: Any) -> Any:
    """None where JAX says that a value is zero."""
    zero = lambda a: isinstance(a, SymbolicZero)  # noqa: E731
    return jax.tree.map(lambda a: None if zero(a) else a, tree, is_leaf=zero)


def _batching_primitive() -> Primitive:
    """The identity; under vmap all its results have the axis of examples if any has it.

    Results of a custom_vjp function must: where one has not, JAX gives the backward rule its cotangent for all examples
    together, and adds up what the rule makes of it for each (seen in JAX 0.10.2 and 0.11.2).
    """
    together = Primitive("jln_batched_together")
    together.multiple_results = True
    together.def_impl(lambda *a: a)
    together.def_abstract_eval(lambda *a: a)
    mlir.register_lowering(together, lambda ctx, *a: a)
    ad.primitive_jvps[together] = lambda primals, tangents: (together.bind(*primals), tangents)

    def batch(operands, dims):
        size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
        grown = [
            jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
            for a, d in zip(operands, dims, strict=True)
        ]
        return together.bind(*grown), [0] * len(grown)

    def without_unused(used, *more):
        eqn = more[-1]
        if not any(used):
            return [False] * len(used), None
        invars, outvars = ([v for v, u in zip(vs, used, strict=True) if u] for vs in (eqn.invars, eqn.outvars))
        return list(used), eqn.replace(invars=invars, outvars=outvars)

    batching.primitive_batchers[together] = batch
    partial_eval.dce_rules[together] = without_unused
    return together


_together = _batching_primitive()


def _batched_together(results: Any) -> Any:
    given, tree = jax.tree.flatten(results)
    return tree.unflatten(_together.bind(*given)) if len(given) > 1 else results


def _refuse_forward_mode(*_, **__):
    raise TypeError(
        "this operator was asked for its derivative in forward mode (jax.jvp, jax.jacfwd, jax.linearize), which a "
        "custom_vjp function has not: call it with forward_mode=True"
    )


def _reverse_mode_primitive() -> Primitive:
    """The identity, on the way of arguments into a custom_vjp function. JAX's own error does not tell what to do.

    Its tangents pass through another identity, which reverse mode transposes and never evaluates. It takes all
    arguments together: where one is differentiated in reverse mode, forward mode over it is right for the others.
    """
    through, tangent = Primitive("jln_reverse_mode"), Primitive("jln_reverse_mode_tangent")
    through.multiple_results = True
    through.def_impl(lambda *a: a)
    through.def_abstract_eval(lambda *a: a)
    batching.primitive_batchers[through] = lambda operands, dims: (through.bind(*operands), dims)
    mlir.register_lowering(through, lambda ctx, *a: a)
    ad.primitive_jvps[through] = lambda primals, tangents: (
        primals,
        [t if isinstance(t, ad.Zero) else tangent.bind(t) for t in tangents],
    )
    tangent.def_impl(_refuse_forward_mode)
    tangent.def_abstract_eval(lambda a: a)
    batching.primitive_batchers[tangent] = _refuse_forward_mode
    mlir.register_lowering(tangent, _refuse_forward_mode)
    ad.deflinear2(tangent, lambda ct, a: [ct])
    return through


_reverse_mode = _reverse_mode_primitive()


def _in_reverse_mode_only(operands: Any) -> Any:
    """The operands, with an error for who differentiates in forward mode."""
    given, tree = jax.tree.flatten(operands)
    return tree.unflatten(_reverse_mode.bind(*given))


def _varying_together(operands: Any) -> Any:
    """Inside shard_map: every operand as one that varies over each mesh axis that any of them varies over.

    Outside of the operator's custom_vjp, so that it is JAX that adds up a shared parameter's gradient over these axes.
    """
    over = jax.tree.map(lambda a: jax.typeof(a).manual_axis_type.varying, operands)
    union = frozenset().union(*jax.tree.leaves(over, is_leaf=lambda axes: isinstance(axes, frozenset)))

    def cast(a: jax.Array) -> jax.Array:
        missing = union - jax.typeof(a).manual_axis_type.varying
        return jax.lax.pcast(a, tuple(sorted(missing)), to="varying") if missing else a

    return jax.tree.map(cast, operands)


def with_automatic_axes(function: Callable[..., Any], specs: Callable[..., Any], operands: Any) -> Any:
    """`function(operands)`; on a mesh with explicit axes as if they were automatic, with results sharded as `specs`,
    called with the operands' PartitionSpecs, says.
    """
    meshes = [jax.typeof(a).sharding.mesh for a in jax.tree.leaves(operands)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(a for a, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return function(operands)
    given = specs(jax.tree.map(lambda a: jax.typeof(a).sharding.spec, operands))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), given)
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)(operands)
