"""How an operation's computation is spread over the devices of a mesh: each computes on its own part, and gradients of
what it shares with others are added up.

JAX's partitioner cannot look into a kernel, and would gather its operands on every device. `custom_partitioning` lets
it ask instead: a Shardy rule tells how shardings propagate, and a callback what to compute where they are known.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

MeshAxes = tuple[str, ...]


class Kind(enum.IntEnum):
    """What a dimension counts. Mesh axes are given out in this order: where one splits the rows and a parameter, it is
    the parameter that is gathered.
    """

    BATCH = 0  # vmap's axes
    ROW = 1
    FEATURE = 2
    HIDDEN = 3  # the normalised axis
    SHARE = 4  # those of a sum


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension that operands and results share. One of size 1 where others have more has no part in it.

    stored_as: the array whose dimension this is alone: it is computed as any other, but shardings do not propagate from
    it. So parameters that are only stored in parts (FSDP) are gathered, instead of splitting the rows.
    of: which of several products' features.
    """

    kind: Kind
    index: int = 0
    stored_as: str = ""
    of: int = 0

    @property
    def computed(self) -> Dim:
        return Dim(self.kind, self.index, of=self.of)

    def factor(self) -> str:
        """Its name in a Shardy rule."""
        return f"{self.kind.name.lower()}{self.index}of{self.of}{self.stored_as}"


Dims = tuple[Dim, ...]


def leaves_or_none(tree: Any) -> list[Any]:
    """The leaves of a tree, those that are None among them."""
    return jax.tree.leaves(tree, is_leaf=lambda a: a is None)


def _present(arrays: Any, described: Any) -> list[Any]:
    """Of what is described for each of the arrays, what describes one that is there."""
    given, tree = jax.tree.flatten(arrays, is_leaf=lambda a: a is None)
    return [d for a, d in zip(given, tree.flatten_up_to(described), strict=True) if a is not None]


@dataclasses.dataclass(frozen=True)
class Result:
    """summed: the kinds of dimension over which every device has only its share of a sum, in the order in which they
    are to be added up: by results that are to travel together. wide: added up in float32 at least.
    """

    dims: Dims
    summed: tuple[Kind, ...] = ()
    wide: bool = False


@dataclasses.dataclass(frozen=True)
class Term:
    """An operand that is added to a sum over features: where every device has a share of that, by one of them only."""

    dims: Dims


@dataclasses.dataclass(frozen=True)
class Layout:
    """Of an operation's operands, and of its results, those that are there, in order. terms: which are `Term`s."""

    given: list[Dims]
    terms: list[bool]
    written: list[Result]

    @classmethod
    def of(cls, operands: Any, dims: Any, dtypes: Any, results: Any) -> Layout:
        """`dims` and `results` describe everything: what `operands` and `dtypes`, beside them, say is absent goes."""
        given = _present(operands, dims)
        terms = [isinstance(d, Term) for d in given]
        return cls([d.dims if isinstance(d, Term) else d for d in given], terms, _present(dtypes, results))

    def widened(self, dtypes: Any) -> Any:
        """The results' dtypes with those that are added up wide made wide."""
        names, tree = jax.tree.flatten(dtypes)
        wide = [
            jnp.promote_types(d, jnp.float32).name if r.wide else d for d, r in zip(names, self.written, strict=True)
        ]
        return tree.unflatten(wide)

    def rule(self, operands: Sequence[Any], results: Sequence[Any]) -> str:
        """In Shardy's notation, for arrays of these shapes."""
        alone = iter(range(sum(a.ndim for a in (*operands, *results))))

        def factors(dims: Dims, shape: tuple[int, ...]) -> str:
            return " ".join(f"u{next(alone)}" if n == 1 else d.factor() for d, n in zip(dims, shape, strict=True))

        def side(dims: Sequence[Dims], arrays: Sequence[Any]) -> str:
            return ", ".join(factors(d, a.shape) for d, a in zip(dims, arrays, strict=True))

        return f"{side(self.given, operands)} -> {side([r.dims for r in self.written], results)}"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which mesh axes split which dimension."""

    mesh: Any
    axes: dict[Dim, MeshAxes]

    def sharding(self, dims: Dims, shape: tuple[int, ...]) -> NamedSharding:
        spec = [None if n == 1 else self.axes.get(d.computed) or None for d, n in zip(dims, shape, strict=True)]
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def over(self, kind: Kind) -> MeshAxes:
        """The mesh axes that split dimensions of this kind."""
        return tuple(dict.fromkeys(a for dim, axes in self.axes.items() if dim.kind == kind for a in axes))


def _spec(sharding: NamedSharding, ndim: int) -> list[MeshAxes]:
    """The mesh axes that split each dimension."""
    spec = [*sharding.spec, *[None] * ndim][:ndim]
    return [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]


def _with_prime_axes(mesh: Any) -> Any:
    """The same devices, every axis as axes of prime sizes. Shardy splits an axis where a reshape splits the dimension
    that it shards, and a part of an axis is what these are.
    """
    sizes, names = [], []
    for name, size in mesh.shape.items():
        for prime in _prime_factors(size):
            names.append(f"{name}.{len(names)}")
            sizes.append(prime)
    return jax.sharding.Mesh(mesh.devices.reshape(sizes), tuple(names))


def _prime_factors(n: int) -> Iterator[int]:
    prime = 2
    while n > 1:
        while n % prime == 0:
            yield prime
            n //= prime
        prime += 1


def _on_mesh(mesh: Any, a: Any) -> jax.ShapeDtypeStruct:
    """`a`, whose sharding XLA has written down as tiles, in terms of the mesh; or whole, where it has none."""
    whole = NamedSharding(mesh, PartitionSpec())
    given = getattr(a, "sharding", None) if isinstance(a, jax.ShapeDtypeStruct) else None
    if given is None:
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole)
    shape = (mesh.devices.size,) * a.ndim  # divides into any tiles
    # In terms of the mesh's devices: of those along manual axes XLA tells nothing.
    given = type(given)(tuple(mesh.devices.flat), given._to_xla_hlo_sharding(a.ndim))
    tiles = given.devices_indices_map(shape)
    starts = np.array([[index.start or 0 for index in tiles[device]] for device in mesh.devices.flat])
    starts = starts.reshape(*mesh.devices.shape, a.ndim)
    # Where the second device along each axis has its tile.
    steps = [starts[tuple(int(i == axis) for i in range(mesh.devices.ndim))] for axis in range(mesh.devices.ndim)]
    spec = [
        tuple(
            name
            for step, name in sorted(zip((s[dim] for s in steps), mesh.axis_names, strict=True), reverse=True)
            if step
        )
        for dim in range(a.ndim)
    ]
    sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
    known = sharding.devices_indices_map(shape) == tiles
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding if known else whole)


def place(
    mesh: Any, layout: Layout, operands: Sequence[Any], results: Sequence[Any], whole: Container[Kind] = ()
) -> Placement:
    """Which mesh axes split which dimension, for arrays of these shardings. whole: what none may split."""
    sizes: dict[Dim, int] = {}
    wanted: dict[Dim, MeshAxes] = {}
    described = (*layout.given, *(r.dims for r in layout.written))
    for dims, a in zip(described, (*operands, *results), strict=True):
        for dim, size, axes in zip(dims, a.shape, _spec(a.sharding, a.ndim), strict=True):
            if size > 1 and not dim.stored_as and dim.kind not in whole:
                sizes[dim] = size
                wanted[dim] = wanted.get(dim) or axes
    products = {dim.of for dims in described for dim in dims if dim.kind == Kind.FEATURE}
    chosen: dict[Dim, MeshAxes] = {}
    for dim in sorted(wanted, key=lambda dim: dim.kind):
        # The features of several products may be split by the same axes.
        rivals = [d for d in chosen if not d.kind == dim.kind == Kind.FEATURE or d.of == dim.of]
        axes = tuple(a for a in wanted[dim] if all(a not in chosen[d] for d in rivals))
        if axes and sizes[dim] % math.prod(mesh.shape[a] for a in axes) == 0:  # no device may have padding for rows
            chosen[dim] = axes
    # They must be: what is a sum over all features has a share of each product on every device.
    split = {
        of: {a for d, axes in chosen.items() if (d.kind, d.of) == (Kind.FEATURE, of) for a in axes} for of in products
    }
    by_all = set.intersection(*split.values()) if split else set()
    for dim in [d for d in chosen if d.kind == Kind.FEATURE]:
        chosen[dim] = tuple(a for a in chosen[dim] if a in by_all)
    return Placement(mesh, chosen)


def partitioned(
    compute: Callable[..., list[jax.Array]],
    compute_on_part_of_h: Callable[..., list[jax.Array]] | None,
    layout: Layout,
    accumulate: Callable[..., list[jax.Array]],
    context: Context,
) -> Callable[..., list[jax.Array]]:
    """`compute` of the operands that are present, on every device by itself.

    compute_on_part_of_h: takes the mesh axes that split H, and the operands; None where H must not be split.
    accumulate: as `compute`, with the results that are added up wide in a dtype for it.
    context: where the program runs.
    """

    def plan(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        mesh = _with_prime_axes(context.mesh if mesh.empty else mesh)
        operands, results = ([_on_mesh(mesh, a) for a in arrays] for arrays in (operands, results))
        placement = place(mesh, layout, operands, results, () if compute_on_part_of_h else (Kind.HIDDEN,))
        h_axes = placement.over(Kind.HIDDEN)
        summed = [tuple(placement.over(kind) for kind in r.summed) for r in layout.written]
        in_ = tuple(placement.sharding(d, a.shape) for d, a in zip(layout.given, operands, strict=True))
        out = [placement.sharding(r.dims, a.shape) for r, a in zip(layout.written, results, strict=True)]
        scattered = [_scatter(o, r, s) for o, r, s in zip(out, results, summed, strict=True)]

        feature_axes = placement.over(Kind.FEATURE)

        def on_each_device(*parts: jax.Array) -> tuple[jax.Array, ...]:
            if feature_axes and any(layout.terms):
                first = functools.reduce(jnp.logical_and, (jax.lax.axis_index(a) == 0 for a in feature_axes))
                parts = tuple(
                    jnp.where(first, a, 0) if is_term else a for a, is_term in zip(parts, layout.terms, strict=True)
                )
            if h_axes:
                assert compute_on_part_of_h is not None
                shares = compute_on_part_of_h(h_axes, *parts)
            else:
                shares = (accumulate if any(map(any, summed)) else compute)(*parts)
            totals = [_sum(a, axes, dims) for a, axes, dims in zip(shares, summed, scattered, strict=True)]
            return tuple(a.astype(r.dtype) for a, r in zip(totals, results, strict=True))

        return mesh, _apart_from_context(on_each_device), tuple(map(_with_scattered, out, scattered)), in_

    def call(*operands: jax.Array) -> list[jax.Array]:
        shapes = jax.eval_shape(compute, *operands)

        @custom_partitioning
        def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(compute(*operands))

        function.def_partition(
            partition=plan,
            infer_sharding_from_operands=lambda mesh, a, r: plan(mesh, a, r)[2],
            decode_shardings=False,  # JAX knows no parts of mesh axes
            sharding_rule=layout.rule(operands, shapes),
        )
        return list(function(*operands))

    return call


def partitioned_in_shares(
    compute: Callable[..., list[jax.Array]],
    layout: Layout,
    accumulate: Callable[..., list[jax.Array]],
    context: Context,
) -> Callable[..., list[jax.Array]]:
    """As `partitioned`, in a `shard_map` that leaves mesh axes to the compiler.

    XLA tells there how arrays are split, but not which device has which part, so that devices cannot be made to add
    anything up. What is a sum over rows leaves as shares, along an axis in front, and XLA adds them up. H is never
    split, nor are features over which a result is summed.
    """
    axes = {name: size for name, size in context.mesh.shape.items() if name not in context.manual}
    devices = math.prod(axes.values())
    some = context.mesh.devices[tuple(slice(None) if name in axes else 0 for name in context.mesh.shape)]
    mesh = _with_prime_axes(jax.sharding.Mesh(some, tuple(axes)))
    summed = [Kind.ROW in r.summed for r in layout.written]
    whole = {Kind.HIDDEN} | {kind for r in layout.written for kind in r.summed if kind != Kind.ROW}
    # The axis in front has no part in how anything else is split.
    of_shares = Dim(Kind.SHARE, stored_as="shares")
    dims = [(of_shares, *r.dims) if s else r.dims for r, s in zip(layout.written, summed, strict=True)]
    written = [Result(d) for d in dims]
    layout = dataclasses.replace(layout, written=written)

    def in_shares(results: Sequence[jax.Array], parts: int) -> tuple[jax.Array, ...]:
        """What is summed as the first of as many shares as a device has of `devices`, the others zeros."""
        left = [(0, devices // parts - 1)]
        pairs = zip(results, summed, strict=True)
        return tuple(jnp.pad(a[None], left + [(0, 0)] * a.ndim) if s else a for a, s in pairs)

    def plan(_: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        operands, results = ([_on_mesh(mesh, a) for a in arrays] for arrays in (operands, results))
        placement = place(mesh, layout, operands, results, whole)
        rows = placement.over(Kind.ROW)
        placement.axes[of_shares.computed] = rows
        parts = math.prod(mesh.shape[a] for a in rows)
        in_ = tuple(placement.sharding(d, a.shape) for d, a in zip(layout.given, operands, strict=True))
        out = tuple(placement.sharding(r.dims, a.shape) for r, a in zip(written, results, strict=True))
        on_each_device = _apart_from_context(lambda *operands: in_shares(accumulate(*operands), parts))
        return mesh, on_each_device, out, in_

    def call(*operands: jax.Array) -> list[jax.Array]:
        @custom_partitioning
        def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return in_shares(accumulate(*operands), 1)

        function.def_partition(
            partition=plan,
            infer_sharding_from_operands=lambda mesh, a, r: plan(mesh, a, r)[2],
            decode_shardings=False,
            sharding_rule=layout.rule(operands, jax.eval_shape(function.fun, *operands)),
        )
        made, wanted = function(*operands), jax.eval_shape(compute, *operands)
        # Each device its own share: of an axis that no sharding has reached XLA would gather them all first.
        spread = NamedSharding(jax.typeof(operands[0]).sharding.mesh, PartitionSpec(tuple(axes)))
        totals = [
            jnp.sum(jax.lax.with_sharding_constraint(a, spread), axis=0) if s else a
            for a, s in zip(made, summed, strict=True)
        ]
        return [a.astype(w.dtype) for a, w in zip(totals, wanted, strict=True)]

    return call


def _apart_from_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which sees one device, traced as if nobody had set a mesh: on one with explicit axes every value
    would be taken for an array that is spread over it.
    """

    def call(*operands: jax.Array) -> Any:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            jaxpr = jax.make_jaxpr(jax.jit(function))(*shapes)
        return tuple(jaxpr_as_fun(jaxpr)(*operands))

    return call


def _scatter(sharding: NamedSharding, result: Any, summed: tuple[MeshAxes, ...]) -> dict[int, MeshAxes]:
    """Dimensions of a result of which every device is asked for a part only, over axes of the mesh that it is summed
    over: a reduce-scatter does both.
    """
    scattered = {}
    have, wanted = _spec(sharding, result.ndim), _spec(result.sharding, result.ndim)
    for dim, (own, asked) in enumerate(zip(have, wanted, strict=True)):
        more = asked[len(own) :]
        parts = math.prod(sharding.mesh.shape[a] for a in (*own, *more))
        if (
            more
            and asked[: len(own)] == own
            and {*more} <= {a for axes in summed for a in axes}
            and result.shape[dim] % parts == 0
        ):
            scattered[dim] = more
    return scattered


def _with_scattered(sharding: NamedSharding, scattered: dict[int, MeshAxes]) -> NamedSharding:
    spec = [(*own, *scattered.get(dim, ())) or None for dim, own in enumerate(_spec(sharding, len(sharding.spec)))]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _sum(share: jax.Array, summed: tuple[MeshAxes, ...], scattered: dict[int, MeshAxes]) -> jax.Array:
    """Over one kind of dimension after the other, as XLA makes one all-reduce of those over the same devices."""
    for dim, axes in scattered.items():
        share = jax.lax.psum_scatter(share, axes, scatter_dimension=dim, tiled=True)
    done = {a for axes in scattered.values() for a in axes}
    for axes in summed:
        left = tuple(a for a in axes if a not in done)
        share = jax.lax.psum(share, left) if left else share
    return share


@functools.cache
def needs_devices() -> ClosedJaxpr:
    """As a parameter of a primitive: lowering it must know the devices. Before a program is lowered JAX looks for
    `custom_partitioning` in it, and in every jaxpr that it contains.
    """
    function = custom_partitioning(lambda a: a)
    function.def_partition(lambda *_: None, sharding_rule="i -> i")
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((1,), jnp.float32))


@dataclasses.dataclass(frozen=True)
class Context:
    """The devices for which a program is lowered.

    mesh: all of them, for where JAX knows no mesh, as under `jax.set_mesh` with nothing sharded. manual: axes of it
    over which `jax.shard_map` has spread the program already.
    """

    mesh: Any
    manual: frozenset[str] = frozenset()


def spreading(context: mlir.ModuleContext) -> tuple[Context | None, str | None]:
    """-> (over which devices JAX's partitioner will spread the program, None if it will not; why a kernel cannot run
    if it cannot)
    """
    axis_context: Any = context.axis_context
    manual = getattr(axis_context, "manual_axes", None)
    if manual is not None:  # inside shard_map
        spread = Context(axis_context.mesh, frozenset(manual))
        if all(size == 1 for name, size in spread.mesh.shape.items() if name not in manual):
            return None, None
    elif getattr(axis_context, "num_devices", 1) == 1:
        return None, None
    else:
        spread = Context(jax.sharding.Mesh(np.array(list(axis_context.device_assignment or ())), ("all",)))
    if context.lowering_parameters.for_export:
        return None, "in an export for several devices, except in a jax.shard_map over all of them"
    return spread, None
