"""How functions of arrays become one operation that compiles for every platform, batches and differentiates again.

An operation is a JAX primitive. It is bound with N-D operands and static options, and stays a single equation until it
is lowered; only then, for a known platform, is it decided what computes it: jnp, or Triton kernels.

`jax.interpreters` promises no stability, so all that is used of it is used here.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.custom_derivatives import CustomVJPPrimal
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jln._partitioning import Layout, needs_devices, partitioned
from jln._triton import config
from jln._triton import launch as triton_launch

Results = tuple[jax.Array | None, ...]


# The names of those results of an operation that somebody wants, in the operation's order.
Wanted = tuple[str, ...]


class Operation:
    """`operation(*operands, implementation=..., **options) -> results`, as one primitive.

    xla: the jnp formula, which defines the results' shapes and is what JAX differentiates.
    xla_cpu: the same, written for XLA's CPU backend.
    triton: returns the launcher; called when a program is first lowered for CUDA, so that Triton is imported then. The
        launcher has the formula's signature and a `chip`.
    layout: what `jln._partitioning` must know of the arrays, from the operands (as anything that has a rank) and the
        options.
    operands, made_of: names of the operands; and of each result, by its name, which of them it is made of. The option
        `wanted` says what to make. The other results are None, and what only they are made of is neither
        read nor kept for them.

    Operands and results may be None. Options are static; `batch_dims`, the number of leading axes that vmap has put
    in front of every operand (of size 1 where an operand is shared), is kept here.
    """

    def __init__(
        self,
        name: str,
        *,
        xla: Callable[..., Results],
        xla_cpu: Callable[..., Results] | None = None,
        triton: Callable[[], Callable[..., Results]] | None = None,
        layout: Callable[..., Layout] | None = None,
        operands: Sequence[str] = (),
        made_of: Mapping[str, Sequence[str]] | None = None,
    ):
        self._operands, self._made_of = operands, made_of
        self._xla, self._xla_cpu, self._triton, self._layout = xla, xla_cpu or xla, triton, layout
        self._primitive = primitive = Primitive(name)
        primitive.multiple_results = True
        primitive.def_impl(self._evaluate)
        primitive.def_abstract_eval(self._abstract)
        batching.primitive_batchers[primitive] = self._batch
        ad.primitive_jvps[primitive] = self._jvp
        if made_of is not None:
            partial_eval.dce_rules[primitive] = self._without_unused
        for platform in (None, "cpu", "cuda"):
            mlir.register_lowering(primitive, functools.partial(self._lower, platform), platform=platform)

    def wanted(self, **asked: bool) -> Wanted:
        """Of the results those that are asked for."""
        assert self._made_of is not None
        return tuple(name for name in self._made_of if asked[name])

    def needs(self, wanted: Sequence[str]) -> frozenset[str]:
        """The names of the operands that these results are made of."""
        assert self._made_of is not None
        return frozenset(operand for name in wanted for operand in self._made_of[name])

    def told(self, wanted: Wanted) -> np.ndarray:
        """`wanted` as a residual of a forward rule: the shape of an array without elements. Residuals may differ with
        what is wanted in their shapes, and in nothing else: where a traced function is differentiated by one argument,
        then another, then the first again, JAX takes their structure (and under vmap, axes) from what it saw last.
        """
        assert self._made_of is not None
        return np.zeros((0, *(int(name in wanted) for name in self._made_of)), bool)

    def heard(self, told: Any) -> Wanted:
        """What `told` was given."""
        assert self._made_of is not None
        return tuple(itertools.compress(self._made_of, told.shape[1:]))

    def __call__(self, *operands: jax.Array | None, implementation: str | None, **options: Hashable) -> Results:
        if self._made_of is not None:
            needed = self.needs(options["wanted"])  # pyright: ignore[reportArgumentType]
            operands = tuple(a if n in needed else None for n, a in zip(self._operands, operands, strict=True))
        present = tuple(a is not None for a in operands)
        given = [a for a in operands if a is not None]
        static = tuple(sorted({"batch_dims": 0, **options}.items()))
        params = {"present": present, "implementation": implementation, "options": static, "mark": needs_devices()}
        written = iter(self._primitive.bind(*given, **params))
        return tuple(None if s is None else next(written) for s in self._shapes(given, present, static))

    def _shapes(self, operands, present, options) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        arrays = tuple((a.shape, a.dtype) for a in operands)
        return _result_shapes(self._xla, arrays, present, options, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]

    def _abstract(self, *avals, present, options, **_):
        shapes = self._shapes(avals, present, options)
        like = avals[0]  # all operands are on one mesh, and vary over the same axes of it

        def aval(shape, dtype):
            sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
            return ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=like.manual_axis_type)

        return [aval(s.shape, s.dtype) for s in shapes if s is not None]

    def _evaluate(self, *operands, **params):
        with jax.disable_jit(False):  # under disable_jit the call below would come back here
            return _jitted(self._primitive, tuple(sorted(params.items())))(*operands)

    def _batch(self, operands, dims, *, options, **params):
        in_front = [
            jnp.expand_dims(a, 0) if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims, strict=True)
        ]
        options = tuple((k, v + 1 if k == "batch_dims" else v) for k, v in options)
        results = self._primitive.bind(*in_front, options=options, **params)
        return results, [0] * len(results)

    def _without_unused(self, used, *more):
        """For JAX's removal of dead code, which from 0.12 on also tells which inputs are alive: the equation without
        the results that are not used, and without the operands that only they need.
        """
        assert self._made_of is not None
        eqn = more[-1]
        if not any(used) or all(used):
            return [any(used)] * len(eqn.invars), eqn if any(used) else None
        present, options = eqn.params["present"], dict(eqn.params["options"])
        avals = [v.aval for v in eqn.invars]
        shapes = zip(self._made_of, self._shapes(avals, present, eqn.params["options"]), strict=True)
        is_used = dict(zip((name for name, s in shapes if s is not None), used, strict=True))
        options["wanted"] = self.wanted(**{name: is_used.get(name, False) for name in self._made_of})
        static, needed = tuple(sorted(options.items())), self.needs(options["wanted"])
        names = [name for name, p in zip(self._operands, present, strict=True) if p]
        keep = [name in needed for name in names]
        outvars = list(itertools.compress(eqn.outvars, used))
        remaining = tuple(p and name in needed for name, p in zip(self._operands, present, strict=True))
        left = self._shapes(list(itertools.compress(avals, keep)), remaining, static)
        if [s.shape for s in left if s is not None] != [v.aval.shape for v in outvars]:
            keep, remaining = [True] * len(names), present  # an operand that brings vmap's axis
        params = eqn.params | {"present": remaining, "options": static}
        return keep, eqn.replace(invars=list(itertools.compress(eqn.invars, keep)), outvars=outvars, params=params)

    def _jvp(self, primals, tangents, *, present, options, **params):
        """The kernels' results, with the formula's tangents."""
        formula = _flat(_on_present(self._xla, present, options))
        tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
        _, tangents_out = jax.jvp(formula, tuple(primals), tangents)
        results = self._primitive.bind(*primals, present=present, options=options, **params)
        return results, tangents_out

    def _lower(self, platform, ctx, *operands, present, implementation, options, mark):
        del mark
        sizes = [n for aval in ctx.avals_in for n in aval.shape]
        if not all(isinstance(n, int) for n in sizes):  # an export with symbolic shapes
            if implementation == "triton":
                raise ValueError("implementation='triton' needs static shapes; leave it to None for symbolic ones")
            implementation = "xla"
        elif 0 in sizes:  # never worth a kernel
            implementation = "xla"
        spread, reason = (False, None) if self._layout is None else _spread(ctx.module_context)
        if reason is not None:
            if implementation == "triton":
                raise ValueError(f"implementation='triton' cannot run {reason}")
            implementation = "xla"
        compute = self._choose(platform, implementation)
        function = _flat(_on_present(compute, present, options))
        if spread:
            function = self._spread_over_devices(function, compute, ctx, present, implementation, options)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

    def _spread_over_devices(self, function, compute, ctx, present, implementation, options) -> Callable[..., Any]:
        assert self._layout is not None
        if getattr(compute, "keywords", {}).get("chip") is config.INTERPRETER:
            raise ValueError(
                "implementation='triton' is interpreted on one CPU device at a time: use jax.shard_map on several"
            )
        given = iter(ctx.avals_in)
        layout = self._layout(*(next(given) if p else None for p in present), **dict(options))
        written = [s is not None for s in self._shapes(ctx.avals_in, present, options)]
        layout = layout.only(present, written)
        in_parameters = [any(name.endswith(".parameter") for name in names) for names in layout.operands]
        exact = tuple((k, _accumulator(v) if k.endswith("_dtype") and v is not None else v) for k, v in options)

        def with_exact_parameters(compute, *operands):
            operands = (
                a.astype(_accumulator(a.dtype)) if p else a for a, p in zip(operands, in_parameters, strict=True)
            )
            return _flat(_on_present(compute, present, exact))(*operands)

        def on_part_of_h(h_axes, *operands):
            return with_exact_parameters(functools.partial(self._xla, h_axes=h_axes), *operands)

        return partitioned(
            function,
            None if implementation == "triton" else on_part_of_h,
            layout,
            functools.partial(with_exact_parameters, compute),
        )

    def _choose(self, platform: str | None, implementation: str | None) -> Callable[..., Results]:
        """What computes the operation on `platform`."""
        xla = self._xla_cpu if platform == "cpu" else self._xla
        if implementation == "xla" or self._triton is None:
            return xla
        if platform == "cuda":
            reason = triton_launch.missing()
            if reason is None:
                return functools.partial(self._triton(), chip=config.target_chip())
            if implementation == "triton":
                raise RuntimeError(f"implementation='triton' cannot run: {reason}")
            warnings.warn(f"jln runs {self._primitive.name} without its Triton kernels: {reason}", stacklevel=2)
            return xla
        if implementation is None:
            return xla
        if platform != "cpu":
            raise RuntimeError("implementation='triton' runs on NVIDIA GPUs; this program is for another platform")
        if not triton_launch.interpreting():
            raise RuntimeError(
                "implementation='triton' runs on NVIDIA GPUs. To run the kernels on the CPU, by Triton's interpreter "
                "(slowly), install triton and set the environment variable TRITON_INTERPRET=1 before Python starts"
            )
        return functools.partial(self._triton(), chip=config.INTERPRETER)


class LinearOperation(Operation):
    """An operation that is linear in its first operands, and the transpose of another that has kernels.

    transpose: called with the cotangents of the results, the avals of the first operands and the other operands, each
        None where there is none, and the options; returns the cotangents of the first operands.

    It is computed by its formula, on every platform and however it is sharded.
    """

    def __init__(self, name: str, *, xla: Callable[..., Results], transpose: Callable[..., Results]):
        super().__init__(name, xla=xla)
        self._transposed = transpose
        ad.primitive_transposes[self._primitive] = self._transpose

    def _transpose(self, cotangents, *operands, present, implementation, options, mark):
        del mark
        avals = [a.aval if ad.is_undefined_primal(a) else a for a in operands]
        written = iter(cotangents)
        complete = [None if s is None else next(written) for s in self._shapes(avals, present, options)]
        given = iter(operands)
        tangents, others = [], []
        for operand in (next(given) if p else None for p in present):
            linear = operand is not None and ad.is_undefined_primal(operand)
            tangents.append(operand.aval if linear else None)  # pyright: ignore[reportOptionalMemberAccess]
            others.append(None if linear else operand)
        gradients = self._transposed(
            [None if type(c) is ad.Zero else c for c in complete],
            tangents,
            others,
            implementation=implementation,
            **dict(options),
        )
        found = itertools.chain(gradients, itertools.repeat(None))
        return [_like(aval, g) for aval, g, p in zip(tangents, found, present, strict=False) if p]


def nothing_of(a: Any) -> jax.Array:
    """In the place of a residual like `a` that is not needed (see `Operation.told`)."""
    return jax.lax.slice_in_dim(a, 0, 0)


def is_differentiated(*primals: CustomVJPPrimal | None) -> bool:
    """Whether the gradient of one of these arguments of a custom_vjp function's forward rule is wanted."""
    return any(a is not None and a.perturbed for a in primals)


def only_rows_differ(batch_dims: int, rows: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """Whether vmap's axes are axes of rows like any other: on all of them every array of rows differs from example to
    example, and no parameter does. Each is an array, an aval or None.
    """
    batches = {a.shape[:batch_dims] for a in rows if a is not None}
    return len(batches) == 1 and all(p is None or math.prod(p.shape[:batch_dims]) == 1 for p in parameters)


def _like(aval: ShapedArray | None, gradient: jax.Array | None) -> Any:
    """The gradient of an operand, summed over those of vmap's axes on which it was shared."""
    if aval is None:
        return None
    if gradient is None:
        return ad.Zero(aval)
    shared = [i for i, (n, of) in enumerate(zip(gradient.shape, aval.shape, strict=True)) if n != of]
    return jnp.sum(gradient, shared, keepdims=True).astype(aval.dtype)


def _accumulator(dtype):
    """What shares of a gradient are added up in."""
    return jnp.promote_types(dtype, jnp.float32)


def _spread(context: mlir.ModuleContext) -> tuple[bool, str | None]:
    """Whether JAX's partitioner will spread the program over devices, and why a kernel cannot run if it cannot."""
    axis_context: Any = context.axis_context
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:  # inside shard_map
        automatic = [a for a, size in axis_context.mesh.shape.items() if a not in manual and size > 1]
        if automatic:
            return False, f"in a shard_map that leaves mesh axes {automatic} to the compiler: name all axes"
        return False, None
    if getattr(axis_context, "num_devices", 1) == 1:
        return False, None
    if context.lowering_parameters.for_export:
        return False, "in an export for several devices, except inside jax.shard_map"
    return True, None


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


def in_reverse_mode_only(*operands: jax.Array | None) -> list[jax.Array | None]:
    """The operands, with an error for who differentiates in forward mode."""
    through = iter(_reverse_mode.bind(*(a for a in operands if a is not None)))
    return [None if a is None else next(through) for a in operands]


def vary_together(*operands: jax.Array | None) -> list[jax.Array | None]:
    """Inside shard_map: every operand as one that varies over each mesh axis that any of them varies over.

    Outside of the operator's custom_vjp, so that it is JAX that adds up a shared parameter's gradient over these axes.
    """
    over = [frozenset() if a is None else jax.typeof(a).manual_axis_type.varying for a in operands]
    union = frozenset().union(*over)
    return [
        a if a is None or axes == union else jax.lax.pcast(a, tuple(sorted(union - axes)), to="varying")
        for a, axes in zip(operands, over, strict=True)
    ]


def with_automatic_axes(function: Callable[..., Any], specs: Callable[..., Any], *operands: jax.Array | None) -> Any:
    """`function(*operands)`; on a mesh with explicit axes as if they were automatic, with results sharded as `specs`,
    called with the operands' PartitionSpecs, says.
    """
    mesh = next(jax.typeof(a).sharding.mesh for a in operands if a is not None)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(a for a, kind in kinds if kind == AxisType.Explicit)
    if not explicit:
        return function(*operands)
    given = specs(*(None if a is None else jax.typeof(a).sharding.spec for a in operands))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), given)
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)(*operands)


def _on_present(function: Callable, present: tuple[bool, ...], options: tuple) -> Callable[..., Any]:
    """`function` of the operands that are present; None for the others."""

    def call(*operands):
        given = iter(operands)
        with jax.numpy_dtype_promotion("standard"):  # every dtype is chosen on purpose, whatever the user's mode
            return function(*(next(given) if p else None for p in present), **dict(options))

    return call


def _flat(function: Callable) -> Callable[..., list[jax.Array]]:
    return lambda *operands: [r for r in function(*operands) if r is not None]


@functools.lru_cache(maxsize=1024)
def _result_shapes(formula, arrays, present, options, x64: bool) -> tuple[jax.ShapeDtypeStruct | None, ...]:
    del x64  # on which JAX's dtypes depend
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]
    return jax.eval_shape(_on_present(formula, present, options), *operands)


@functools.lru_cache(maxsize=1024)
def _jitted(primitive: Primitive, params: tuple) -> Callable:
    """For the rare case that an operation is evaluated outside of jit."""
    return jax.jit(functools.partial(primitive.bind, **dict(params)))
