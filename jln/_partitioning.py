"""How an operation's computation is spread over the devices of a mesh: each computes on its own part, and gradients of
what it shares with others are added up.

JAX's partitioner cannot look into a kernel, and would gather its operands on every device. `custom_partitioning` lets
it ask instead: a Shardy rule tells how shardings propagate, and a callback what to compute where they are known.

An operation describes its arrays by the names of their dimensions, operands and results alike:

    "b0", "b1", ...    vmap's axes
    "r0", "r1", ...    rows
    "h"                the normalised axis
    "n"                features

A dimension of size 1 where others have more is shared, and has no part in this. Behind a dot may stand whose dimension
it is: "h.kernel" is computed as "h" is, but shardings do not propagate from the one to the other. So parameters that
are only stored in parts (FSDP) are gathered, instead of splitting the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

Names = tuple[str, ...]
MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dimensions of an operation's operands and results, those that are absent left out.

    partial: of each result, the kinds of dimension ("n", "r") over which every device has only its share of the sum, in
        the order in which they are to be added up: by results that are to travel together.
    """

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    partial: tuple[str, ...]

    def only(self, operands: Sequence[bool], results: Sequence[bool]) -> Layout:
        """Without those that are absent."""
        pick = itertools.compress
        return Layout(
            tuple(pick(self.operands, operands)), tuple(pick(self.results, results)), tuple(pick(self.partial, results))
        )

    def rule(self, operands: Sequence[Any], results: Sequence[Any]) -> str:
        """In Shardy's notation, for arrays of these shapes."""
        alone = iter(range(sum(a.ndim for a in (*operands, *results))))

        def factors(names: Names, shape: tuple[int, ...]) -> str:
            named = (f"u{next(alone)}" if n == 1 else f.replace(".", "_") for f, n in zip(names, shape, strict=True))
            return " ".join(named)

        def side(layouts: tuple[Names, ...], arrays: Sequence[Any]) -> str:
            return ", ".join(factors(names, a.shape) for names, a in zip(layouts, arrays, strict=True))

        return f"{side(self.operands, operands)} -> {side(self.results, results)}"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which mesh axes split which dimension."""

    mesh: Any
    axes: dict[str, MeshAxes]

    def sharding(self, names: Names, shape: tuple[int, ...]) -> NamedSharding:
        spec = [None if n == 1 else self.axes.get(_kind(f)) or None for f, n in zip(names, shape, strict=True)]
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def over(self, kind: str) -> MeshAxes:
        """The mesh axes that split dimensions of this kind."""
        return tuple(a for name, axes in self.axes.items() if name[0] == kind for a in axes)


def _kind(name: str) -> str:
    return name.split(".")[0]


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


def place(mesh: Any, layout: Layout, operands: Sequence[Any], results: Sequence[Any], split_h: bool) -> Placement:
    """Rows first: where one mesh axis splits the rows and a parameter, it is the parameter that is gathered."""
    sizes: dict[str, int] = {}
    wanted: dict[str, MeshAxes] = {}
    for names, a in zip((*layout.operands, *layout.results), (*operands, *results), strict=True):
        for name, size, axes in zip(names, a.shape, _spec(a.sharding, a.ndim), strict=True):
            if size > 1 and "." not in name:
                sizes[name] = size
                wanted[name] = wanted.get(name) or axes
    if not split_h:
        wanted.pop("h", None)
    taken: set[str] = set()
    chosen: dict[str, MeshAxes] = {}
    for name in sorted(wanted, key=lambda name: "brnh".index(name[0])):
        axes = tuple(a for a in wanted[name] if a not in taken)
        if axes and sizes[name] % math.prod(mesh.shape[a] for a in axes) == 0:  # no device may have padding for rows
            chosen[name] = axes
            taken.update(axes)
    return Placement(mesh, chosen)


def partitioned(
    compute: Callable[..., list[jax.Array]],
    compute_on_part_of_h: Callable[..., list[jax.Array]] | None,
    layout: Layout,
    accumulate: Callable[..., list[jax.Array]],
) -> Callable[..., list[jax.Array]]:
    """`compute` of the operands that are present, on every device by itself.

    compute_on_part_of_h: takes the mesh axes that split H, and the operands; None where H must not be split.
    accumulate: as `compute`, with the gradients of vectors in a dtype to add shares up in; those of x and of the kernel
        are added up in their own.
    """

    def plan(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        mesh = _with_prime_axes(mesh)
        operands, results = ([_on_mesh(mesh, a) for a in arrays] for arrays in (operands, results))
        placement = place(mesh, layout, operands, results, compute_on_part_of_h is not None)
        h_axes = placement.axes.get("h", ())
        summed = [tuple(placement.over(kind) for kind in kinds) for kinds in layout.partial]
        in_ = tuple(placement.sharding(f, a.shape) for f, a in zip(layout.operands, operands, strict=True))
        out = [placement.sharding(f, a.shape) for f, a in zip(layout.results, results, strict=True)]
        scattered = [_scatter(o, r, s) for o, r, s in zip(out, results, summed, strict=True)]

        def on_each_device(*parts: jax.Array) -> tuple[jax.Array, ...]:
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
