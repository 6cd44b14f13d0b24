"""Differentiation of an operator: its rules, wired into `jax.custom_vjp` and, for forward mode, `jax.custom_jvp`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType, NamedSharding

from jln._core.modes import own_modes
from jln._core.operation import vary_together
from jln._core.reverse_mode import Plain, Widen, in_reverse_mode

# The `jax.ad_checkpoint.checkpoint_name` of row statistics, and of products that one kernel makes with the norm.
STATISTICS = "jln_statistics"
PRODUCT = "jln_product"

# What `inline=True` of `jax.jit` means until JAX 0.11. From then on that leaves a call in the trace, and what reads a
# program equation by equation would find another one than with JAX 0.10.
_INTO_THE_TRACE = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # pyright: ignore[reportAttributeAccessIssue]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules that make an operator. Operands and results are NamedTuples of arrays, or of tuples of arrays.

    An array that is absent is None in them.

    fwd: `fwd(settings, operands, wanted)` -> (results, saved), a NamedTuple of what the derivatives may read; in the
      place of what the wanted derivatives do not read stands an `Unneeded`.
    bwd: `bwd(settings, saved, cotangents, wanted)` -> the operands' gradients. A cotangent is None where a result was
      not used, a gradient where it is zero or not wanted.
    jvp: `jvp(settings, operands, saved, tangents, results)` -> the results' tangents, linear in those of the operands,
      None where zero. Their transpose must be `bwd`. None of what forward mode never sees.

    `wanted` is a NamedTuple of the operands' dtypes by name, None for operands whose gradient nobody wants. In `saved`
    an `Unneeded` is an empty array for `bwd`, and None for `jvp`.
    """

    fwd: Callable[..., Any]
    bwd: Callable[..., Any]
    jvp: Callable[..., Any] | None = None

    def operator(self, widen: Widen, plain: Plain) -> Callable[..., Any]:
        """Return the differentiable function `operator(settings, operands, forward_mode)`."""
        reverse = jax.custom_vjp(self._value, nondiff_argnums=(0,))
        reverse.defvjp(self._fwd, self._bwd, symbolic_zeros=True)
        once = in_reverse_mode(self._value, reverse, widen, plain)
        forward = jax.custom_jvp(self._value, nondiff_argnums=(0,))
        forward.defjvp(self._jvp, symbolic_zeros=True)

        def operator(settings: Hashable, operands: Any, forward_mode: bool) -> Any:
            operands = vary_together(operands)
            return (forward if forward_mode else once)(settings, operands)

        return operator

    @own_modes()
    def _value(self, settings, operands):
        return _batch_together(self.fwd(settings, operands, jax.tree.map(lambda _: None, operands))[0])

    @own_modes()
    def _fwd(self, settings, operands):
        primals, tree = jax.tree.flatten(operands)  # each a CustomVJPPrimal
        dtypes = tree.unflatten([a.value.dtype.name for a in primals])
        flags = [a.perturbed for a in primals]
        results, saved = self.fwd(settings, tree.unflatten([a.value for a in primals]), _only(dtypes, flags))
        leaves, tree = jax.tree.flatten(saved)
        kept = tree.unflatten([a.nothing() if isinstance(a, Unneeded) else a for a in leaves])
        return _batch_together(results), (kept, _Static(dtypes), _residuals_of(flags))

    @own_modes()
    def _bwd(self, settings, residuals, cotangents):
        saved, dtypes, flags = residuals
        wanted = _only(dtypes.value, _flags_of(flags))
        is_used = [not isinstance(c, SymbolicZero) for c in jax.tree.leaves(cotangents)]
        return (self.bwd(settings, saved, _only(cotangents, is_used), wanted),)

    @own_modes()
    def _jvp(self, settings, primals, tangents):
        (operands,), (tangents,) = primals, tangents
        flags = [not isinstance(t, SymbolicZero) for t in jax.tree.leaves(tangents)]
        tangents = _only(tangents, flags)
        wanted = _only(jax.tree.map(lambda a: a.dtype.name, operands), flags)
        assert self.jvp is not None
        results, saved = self.fwd(settings, operands, wanted)
        saved = jax.tree.map(lambda a: None if isinstance(a, Unneeded) else a, saved)
        return _batch_together(results), self.jvp(settings, operands, saved, tangents, results)


@dataclasses.dataclass(frozen=True)
class Unneeded:
    """A stand-in for an array that no wanted gradient reads.

    like: an array that vmap batches as it would batch the one that is not needed.
    """

    like: jax.Array

    def nothing(self) -> jax.Array:
        return jax.lax.slice_in_dim(self.like, 0, 0)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    """A value that the forward rule hands to the backward rule, no array, and the same for every trace of a call."""

    value: Any


def _residuals_of(flags: list[bool]) -> list[np.ndarray]:
    """The flags of what is wanted as residuals: they are the shapes of arrays without elements.

    Residuals may differ in their shapes, and in nothing else: where a traced function is differentiated by one
    argument, then another, then the first again, JAX takes their structure (and under vmap, axes) from what it saw
    last. An array has at most 64 axes, and an operator of many Linears more operands: hence several arrays.
    """
    return [np.zeros((0, *map(int, flags[i : i + 32])), bool) for i in range(0, len(flags), 32)]


def _flags_of(residuals: Sequence[Any]) -> list[bool]:
    """The flags that `_residuals_of` wrote."""
    return [bool(n) for a in residuals for n in a.shape[1:]]


def _only(arrays: Any, flags: Sequence[bool]) -> Any:
    """The tree with None in place of each leaf whose flag is False."""
    leaves, tree = jax.tree.flatten(arrays)
    return tree.unflatten([a if flag else None for a, flag in zip(leaves, flags, strict=True)])


def _batching_primitive() -> Primitive:
    """A primitive of the identity; under vmap all its results have the axis of examples if any of them has it.

    The results of a custom_vjp function need this: where one of them lacks the axis, JAX gives the backward rule one
    cotangent for all examples together, and adds up the gradients that the rule makes of it for each (seen in JAX
    0.10.2 and 0.11.2).
    """
    together = Primitive("jln_batched_together")
    together.multiple_results = True
    together.def_impl(lambda *a: a)
    together.def_abstract_eval(lambda *a: a)
    mlir.register_lowering(together, lambda ctx, *a: a)
    ad.primitive_jvps[together] = lambda primals, tangents: (together.bind(*primals), tangents)
    ad.primitive_transposes[together] = lambda cotangents, *a: [
        c if ad.is_undefined_primal(v) else None for c, v in zip(cotangents, a, strict=True)
    ]

    def batch(operands, dims):
        size = next(a.shape[d] for a, d in zip(operands, dims, strict=True) if d is not None)
        grown = [jnp.broadcast_to(a, (size, *a.shape)) if d is None else a for a, d in zip(operands, dims, strict=True)]
        return together.bind(*grown), [d or 0 for d in dims]

    def drop_unused(used, *more):
        eqn = more[-1]
        if not any(used):
            return [False] * len(used), None
        invars, outvars = ([v for v, u in zip(vs, used, strict=True) if u] for vs in (eqn.invars, eqn.outvars))
        return list(used), eqn.replace(invars=invars, outvars=outvars)

    batching.primitive_batchers[together] = batch
    partial_eval.dce_rules[together] = drop_unused
    return together


_together = _batching_primitive()


def _batch_together(results: Any) -> Any:
    given, tree = jax.tree.flatten(results)
    once = {id(a): a for a in given}  # copies of a result are one array, which is kept once
    if len(once) < 2:
        return results
    made = dict(zip(once, _together.bind(*once.values()), strict=True))
    return tree.unflatten([made[id(a)] for a in given])


def with_automatic_axes(function: Callable[..., Any], specs: Callable[..., Any], operands: Any) -> Any:
    """Call `function(operands)`; on a mesh with explicit axes, as if these were automatic.

    specs: from the operands' PartitionSpecs to those that the results have on a mesh with explicit axes.

    In a `shard_map` that leaves axes explicit, JAX has no gradient of `auto_axes`: what is kept for it comes back on
    the mesh with explicit axes. So nothing is kept there, and the backward pass makes it again from the operands.
    """
    meshes = [jax.typeof(a).sharding.mesh for a in jax.tree.leaves(operands)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(a for a, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return function(operands)
    given = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, operands)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(given))
    call = jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)
    if AxisType.Manual in mesh.axis_types:
        # JAX takes a checkpoint apart where it differentiates the function. Then the jitted call holds together what
        # is computed first, and the checkpoint in it holds for second derivatives.
        call = jax.checkpoint(jax.jit(jax.checkpoint(call, prevent_cse=False)), prevent_cse=False)
        operands = jax.tree.map(functools.partial(_inside, mesh), operands)
    return call(operands)


def _inside(mesh: Any, a: jax.Array) -> jax.Array:
    """The array on the mesh in a `shard_map`, also where the function there closes over one from around it."""
    given = jax.typeof(a).sharding
    return a if given.mesh.empty or given.mesh == mesh else jax.sharding.reshard(a, NamedSharding(mesh, given.spec))


def in_one_program(static: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a function that calls an operator: where it is called eagerly it is compiled as one program.

    That takes 5 us a call; its equations one by one take 400. static: the number of static arguments, which come first.

    It is not compiled where mesh axes are explicit: what JAX keeps there for the derivative of `auto_axes` lies on the
    mesh with automatic axes, cotangents on that with explicit ones, and from 0.11 on JAX refuses both as arguments of
    one program that looks for its devices.

    Nor is it where JAX looks for NaN or inf: those that it finds in the linearised part of a compiled program it does
    not tell as a FloatingPointError (seen in JAX 0.11.2 and 0.12). In a `shard_map` that is called eagerly it is
    compiled all the same: JAX evaluates no custom_vjp function there.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(function, static_argnums=range(static), inline=_INTO_THE_TRACE)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            meshes = [jax.typeof(a).sharding.mesh for a in jax.tree.leaves(arguments[static:])]
            kinds = {kind for mesh in (jax.sharding.get_abstract_mesh(), *meshes) for kind in mesh.axis_types}
            watched = jax.config.jax_debug_nans or jax.config.jax_debug_infs  # pyright: ignore[reportAttributeAccessIssue]
            if AxisType.Explicit in kinds or (watched and AxisType.Manual not in kinds):
                return function(*arguments)
            return compiled(*arguments)

        return call

    return decorate
