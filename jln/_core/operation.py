"""Operations: a JAX primitive with named operands that compiles for every platform, batches and differentiates.

An operation is bound with N-D operands and static settings, and stays a single equation until it is lowered. Only then,
for a known platform, is it decided what computes it: jnp, or Triton kernels.

`jax.interpreters` promises no stability: operators use it only through this room.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax._src import checkify, dispatch
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import NamedSharding, PartitionSpec

from jln._core.devices import find_context, needs_devices
from jln._core.identity import identity
from jln._core.layout import Layout, leaves_or_none
from jln._core.modes import own_modes
from jln._core.one_by_one import right_on_cpu
from jln._core.partition import partition

# NamedTuples of arrays and of tuples of arrays, or of what stands for them (shapes, dtypes); None where one is absent.
Operands = TypeVar("Operands")
Results = TypeVar("Results")


@dataclasses.dataclass(frozen=True)
class Request(Generic[Results]):
    """A request to an operation: what is static, beside its operands.

    settings: the operator's own static record.
    dtypes: the name of each result's dtype, None for a result that nobody wants, which then costs nothing. (Names,
      because `None == np.dtype("float64")` is True.)
    batch_dims: how many leading axes vmap has put in front of every operand; they have size 1 where it is shared.
    """

    settings: Hashable
    dtypes: Results
    batch_dims: int = 0

    def arguments(self) -> tuple[Any, Results, int]:
        """The parameters in the order in which formulas and launchers take them, behind the operands."""
        return self.settings, self.dtypes, self.batch_dims


class Operation(Generic[Operands, Results]):
    """A function from operands to results, as one primitive.

    formula: `formula(operands, settings, dtypes, batch_dims)` in jnp: results of `dtypes`, whose shapes it defines.
    formula_cpu, formula_tpu: the same function, written for XLA's CPU backend, and for its TPU backend. JAX
      differentiates the TPU's, which takes autodiff's own sums: the CPU backend gets derivatives of others wrong.
    kernels: `kernels(platform, asked, add)` returns the same function by kernels, or in words why they do not run where
      nobody asked for them by name, "" where that is nothing to tell users. Called when a program is lowered. add: for
      a program that JAX spreads over devices, makes a function one that the program calls on the host, and returns its
      number; else None.
    layout: from the formula's arguments to the `Layout` of its arrays, for `jln._core.partition`.
    reads: `reads(settings, dtypes)` -> the names of the operands that the wanted results, those with a dtype, are made
      of. For an operation of which not all results may be wanted: the others are not read.
    rows: from operands, or what stands for them, to those so large that they stay where an axis of vmap is in them.
    before_spread: from the operands to those of the same operation in a program that JAX spreads over devices: one sum
      in place of products, of which devices may have shares, so that these are added up once.
    """

    def __init__(
        self,
        name: str,
        formula: Callable[..., Results],
        *,
        formula_cpu: Callable[..., Results] | None = None,
        formula_tpu: Callable[..., Results] | None = None,
        kernels: Callable[[str | None, bool, Any], Callable[..., Results] | str] | None = None,
        layout: Callable[..., Layout] | None = None,
        reads: Callable[[Any, Results], Container[str]] | None = None,
        rows: Callable[[Operands], Any] = lambda operands: (),
        before_spread: Callable[[Operands], Operands] | None = None,
    ):
        self._formula, self._formula_cpu = formula, right_on_cpu(formula_cpu or formula)
        self._formula_tpu = formula_tpu or formula
        self._kernels, self._layout, self._reads = kernels, layout, reads
        self._rows, self._before_spread = rows, before_spread
        self._primitive = primitive = Primitive(name)
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
        primitive.def_abstract_eval(self._abstract)
        batching.primitive_batchers[primitive] = self._batch
        ad.primitive_jvps[primitive] = self._jvp
        watch_for_nan(primitive)
        if reads is not None:
            partial_eval.dce_rules[primitive] = self._drop_unused
        for platform in (None, "cpu", "tpu", "cuda", "rocm"):
            mlir.register_lowering(primitive, functools.partial(self._lower, platform), platform=platform)

    def __call__(
        self,
        operands: Operands,
        settings: Hashable,
        dtypes: Results,
        batch_dims: int = 0,
        *,
        implementation: str | None,
    ) -> Results:
        given, tree = jax.tree.flatten(self._drop_unread(operands, settings, dtypes))
        request = Request(settings, dtypes, batch_dims)
        written = self._primitive.bind(
            *given, tree=tree, request=request, implementation=implementation, contains=needs_devices()
        )
        return jax.tree.unflatten(jax.tree.structure(dtypes), written)

    def _drop_unread(self, operands: Any, settings: Hashable, dtypes: Results) -> Any:
        """The operands with None in place of those that no wanted result is made of."""
        if self._reads is None:
            return operands
        names = self._reads(settings, dtypes)
        fields = zip(operands._fields, operands, strict=True)
        return type(operands)(*[a if name in names else jax.tree.map(lambda _: None, a) for name, a in fields])

    def _drop_unused(self, used, *more):
        """Rule for JAX's removal of dead code: the equation without unused results, and without what only they need."""
        eqn = more[-1]  # from JAX 0.12 on a rule is also told which inputs are alive
        if not any(used) or all(used):
            return [any(used)] * len(eqn.invars), eqn if any(used) else None
        tree, request = eqn.params["tree"], eqn.params["request"]
        structure = jax.tree.structure(request.dtypes)
        is_used = structure.unflatten(used)
        dtypes = jax.tree.map(lambda dtype, is_used: dtype if is_used else None, request.dtypes, is_used)
        places = self._drop_unread(tree.unflatten(range(len(eqn.invars))), request.settings, dtypes)
        kept_places, request = set(jax.tree.leaves(places)), dataclasses.replace(request, dtypes=dtypes)
        outvars = [v for v, u in zip(eqn.outvars, used, strict=True) if u]

        def without(kept_places):
            invars = [v for i, v in enumerate(eqn.invars) if i in kept_places]
            flags = [i in kept_places or None for i in range(len(eqn.invars))]
            params = eqn.params | {"tree": jax.tree.structure(tree.unflatten(flags)), "request": request}
            return invars, params

        invars, params = without(kept_places)
        left = self._abstract(*(v.aval for v in invars), **params)
        if [a.shape for a in left] != [v.aval.shape for v in outvars]:  # an operand that brings vmap's axis
            kept_places = set(range(len(eqn.invars)))
            invars, params = without(kept_places)
        alive = [i in kept_places for i in range(len(eqn.invars))]
        return alive, eqn.replace(invars=invars, outvars=outvars, params=params)

    def _abstract(self, *avals, tree, request, **_):
        arrays = tuple([(a.shape, a.dtype) for a in avals])
        shapes = _result_shapes(self._formula, arrays, tree, request, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
        like = avals[0]  # all operands are on one mesh, and vary over the same axes of it

        def aval(shape, dtype):
            sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
            return ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=like.manual_axis_type)

        return [aval(s.shape, s.dtype) for s in shapes]

    def _batch(self, operands, dims, *, tree, request, implementation, **params):
        """The operation with one axis more of vmap in front; by XLA where that is behind rows, as results are then."""
        front = place = (jax.tree.leaves(self._rows(tree.unflatten(dims))) or [0])[0]  # x's decides, not a cotangent's
        if place > request.batch_dims:
            front, implementation = 0, behind_rows(implementation)

        def moved(a: Any, given: int | None) -> jax.Array:
            return jnp.expand_dims(a, front) if given is None else jnp.moveaxis(a, given, front)

        request = dataclasses.replace(request, batch_dims=request.batch_dims + 1)
        operands = [moved(a, d) for a, d in zip(vary_together(operands), dims, strict=True)]
        results = self._primitive.bind(*operands, tree=tree, request=request, implementation=implementation, **params)
        places = [min(place, a.ndim - 1) for a in results]
        return [jnp.moveaxis(a, front, to) for a, to in zip(results, places, strict=True)], places

    def _jvp(self, primals, tangents, *, tree, request, **params):
        """Results by the kernels, tangents by differentiating the formula for a TPU."""
        formula = _on_leaves(self._formula_tpu, tree, request)
        _, tangents_out = jvp_of_moved(formula, primals, tangents)
        results = self._primitive.bind(*primals, tree=tree, request=request, **params)
        return results, tangents_out

    def _lower(self, platform, ctx, *operands, tree, request, implementation, contains):
        del contains
        sizes = [n for aval in ctx.avals_in for n in aval.shape]
        if not all([isinstance(n, int) for n in sizes]):  # an export with symbolic shapes
            if implementation == "triton":
                raise ValueError("implementation='triton' needs static shapes; leave it to None for symbolic ones")
            implementation = "xla"
        elif 0 in sizes:  # never worth a kernel
            implementation = "xla"
        spread, reason = (None, None) if self._layout is None else find_context(ctx.module_context, platform)
        if reason is not None:
            if implementation == "triton":
                raise ValueError(f"implementation='triton' cannot run {reason}")
            implementation = "xla"
        if spread is not None and (change := self._before_spread) is not None:
            shapes = tree.unflatten([jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_in])
            if jax.tree.structure(jax.eval_shape(change, shapes)) != tree:

                def again(*operands):
                    given = change(tree.unflatten(operands))
                    return jax.tree.leaves(self(given, *request.arguments(), implementation=implementation))

                return mlir.lower_fun(again, multiple_results=True)(ctx, *operands)
        add = None if spread is None else functools.partial(_add_host_callback, ctx.module_context)
        formula = {"cpu": self._formula_cpu, "tpu": self._formula_tpu}.get(platform or "", self._formula)
        compute = formula if implementation == "xla" else self._by_kernels(platform, implementation, add) or formula
        function = _on_leaves(compute, tree, request)
        if spread is not None:
            assert self._layout is not None
            layout = self._layout(tree.unflatten(ctx.avals_in), *request.arguments())
            target = getattr(compute, "keywords", {}).get("target")  # of kernels alone
            arrays = [(a.shape, a.dtype) for a in ctx.avals_in]
            what = self._primitive.name, platform, implementation, target and target.made_of()
            name = identity(what, arrays, tree, request, spread)
            exact = dataclasses.replace(request, dtypes=layout.widen(request.dtypes))
            of_split_rows = right_on_cpu(self._formula) if platform == "cpu" else formula

            def shares(h_axes, gathered, *operands):
                how = {name: axes for name, axes in (("h_axes", h_axes), ("gathered", gathered)) if axes}
                share = functools.partial(of_split_rows if h_axes else compute, **how)
                return _on_leaves(share, tree, exact)(*operands)

            if not spread.manual or compute is not formula:
                function = partition(function, shares, layout, spread, implementation != "triton", name)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

    def _by_kernels(self, platform: str | None, implementation: str | None, add: Any) -> Callable[..., Results] | None:
        """The operation by its kernels; None where they do not run. add: as the operation's kernels take it."""
        found = "" if self._kernels is None else self._kernels(platform, implementation == "triton", add)
        if not isinstance(found, str):
            return found
        if found:
            warnings.warn(f"jln runs {self._primitive.name} without its Triton kernels: {found}", stacklevel=2)
        return None


class LinearOperation(Operation[Operands, Results]):
    """An operation linear in the first of its two operands, and the transpose of another that has kernels.

    The operands are a pair: the tangents, a NamedTuple with None for those that are zero; and whatever else the formula
    reads. It is computed by its formula, on every platform and however it is sharded.

    transpose: `transpose(cotangents, tangents, others, settings, batch_dims, implementation)` returns the cotangents of
      the tangents from the results' cotangents and the tangents' avals; None stands for one that is absent.
    """

    def __init__(self, name: str, formula: Callable[..., Results], *, transpose: Callable[..., Any], rows: Any):
        super().__init__(name, formula, rows=rows)
        self._transposed = transpose
        ad.primitive_transposes[self._primitive] = self._transpose

    def _transpose(self, cotangents, *operands, tree, request, implementation, contains):
        del contains
        cotangents = [None if type(c) is ad.Zero else c for c in cotangents]
        cotangents = jax.tree.unflatten(jax.tree.structure(request.dtypes), cotangents)
        tangents, _ = tree.unflatten([a.aval if ad.is_undefined_primal(a) else None for a in operands])
        _, others = tree.unflatten(operands)
        places, _ = tree.unflatten(range(len(operands)))
        with own_modes():  # JAX transposes once the rules have returned
            gradients = self._transposed(
                cotangents, tangents, others, request.settings, request.batch_dims, implementation
            )
        found: list[Any] = [None] * len(operands)
        for place, aval, gradient in zip(*map(leaves_or_none, (places, tangents, gradients)), strict=True):
            if aval is not None:
                found[place] = _like(aval, gradient)
        return found


def behind_rows(implementation: str | None) -> str:
    """The implementation for examples that a vmap has put behind rows: XLA reads them where they are."""
    if implementation == "triton":
        raise ValueError(
            "implementation='triton' takes the examples of this vmap in front of the rows, else x or a cotangent "
            "would be copied: write jnp.moveaxis and in_axes=0, or parameters [N, H] of heads next to H without a "
            "vmap; or leave the argument out, and XLA reads it where it is"
        )
    return "xla"


def jvp_of_moved(function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """`jax.jvp` along the tangents that are no symbolic zeros: some CPU backends make NaN of a product with zeros."""
    moved = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def call(*given: jax.Array) -> Any:
        return function(*(dict(enumerate(primals)) | dict(zip(moved, given, strict=True))).values())

    return jax.jvp(call, [primals[i] for i in moved], [tangents[i] for i in moved])


def watch_for_nan(primitive: Primitive) -> None:
    """Have `jax.experimental.checkify` look for NaN in a primitive's results, as in those of JAX's own primitives."""
    checkify.error_checks[primitive] = functools.partial(checkify.nan_error_check, primitive)


def vary_together(operands: Any) -> Any:
    """Cast the operands, inside shard_map, so that each varies over each mesh axis that any of them varies over.

    Where the cast is outside of the operator's custom_vjp, JAX adds up a shared parameter's gradient over these axes.
    A vmap with `spmd_axis_name` brings one in each operand that has its axis of examples.
    """
    union = frozenset().union(*[jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(operands)])
    if not union:
        return operands

    def cast(a: jax.Array) -> jax.Array:
        missing = union - jax.typeof(a).manual_axis_type.varying
        return jax.lax.pcast(a, tuple(sorted(missing)), to="varying") if missing else a

    return jax.tree.map(cast, operands)


def _add_host_callback(context: mlir.ModuleContext, function: Callable[..., Any]) -> int:
    context.add_host_callback(function)
    return len(context.host_callbacks) - 1


def _like(aval: ShapedArray, gradient: jax.Array | None) -> Any:
    """The gradient of an operand, summed over those of vmap's axes on which the operand was shared."""
    if gradient is None:
        return ad.Zero(aval)
    shared = [i for i, (n, of) in enumerate(zip(gradient.shape, aval.shape, strict=True)) if n != of]
    return jnp.sum(gradient, shared, keepdims=True).astype(aval.dtype)


def _on_leaves(function: Callable[..., Any], tree: Any, request: Request) -> Callable[..., list[jax.Array]]:
    """A function from the operands' leaves to the results' leaves, from `function` of trees; None is no leaf."""

    def call(*leaves):
        with own_modes():
            return jax.tree.leaves(function(tree.unflatten(leaves), *request.arguments()))

    return call


@functools.lru_cache(maxsize=1024)
def _result_shapes(formula, arrays, tree, request, x64: bool) -> list[jax.ShapeDtypeStruct]:
    del x64  # on which JAX's dtypes depend
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]
    return jax.eval_shape(_on_leaves(formula, tree, request), *operands)
