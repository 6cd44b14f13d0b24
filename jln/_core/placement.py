"""Placement: which axes of a mesh split which dimension of an operation, from how its arrays are split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jln._core.layout import Dim, Dims, Kind, Layout, Result

MeshAxes = tuple[str, ...]
Gathered = tuple[tuple[int, MeshAxes], ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh axes that split each dimension.

    One mesh axis may split both the rows of arrays without features and the features of arrays that have them; it does
    not split the rows of the latter.
    """

    mesh: Any
    axes: dict[Dim, MeshAxes]

    def sharding(self, dims: Dims, shape: tuple[int, ...]) -> NamedSharding:
        of_features = self._feature_axes(dims)

        def split(dim: Dim) -> MeshAxes | None:
            axes = self.axes.get(dim.computed, ())
            return (tuple(a for a in axes if a not in of_features) if dim.kind == Kind.ROW else axes) or None

        return NamedSharding(
            self.mesh, PartitionSpec(*(None if n == 1 else split(d) for d, n in zip(dims, shape, strict=True)))
        )

    def shardings(self, dims: Sequence[Dims], arrays: Sequence[Any]) -> tuple[NamedSharding, ...]:
        return tuple(self.sharding(d, a.shape) for d, a in zip(dims, arrays, strict=True))

    def over(self, kind: Kind) -> MeshAxes:
        """The mesh axes that split dimensions of this kind."""
        return tuple(dict.fromkeys(a for dim, axes in self.axes.items() if dim.kind == kind for a in axes))

    def gather_axes(self) -> Gathered:
        """The axes of x whose rows a product needs of all devices along some mesh axes, each with these mesh axes."""
        of_features = self.over(Kind.FEATURE)
        rows = {d.index: axes for d, axes in self.axes.items() if d.kind == Kind.ROW}
        shared = ((i, tuple(a for a in axes if a in of_features)) for i, axes in rows.items())
        return tuple((i, axes) for i, axes in shared if axes)

    def sum_axes(self, result: Result) -> list[MeshAxes]:
        """The mesh axes over which devices have shares of a result, for each kind of dimension it is summed over.

        A dimension of examples that the result has itself is none of these.
        """
        gathered = {a for _, axes in self.gather_axes() for a in axes}
        own = {a for d in result.dims if d.kind == Kind.BATCH for a in self.axes.get(d.computed, ())}
        left_out = {Kind.FEATURE: gathered, Kind.ROW: self._feature_axes(result.dims), Kind.BATCH: own}
        return [tuple(a for a in self.over(kind) if a not in left_out.get(kind, ())) for kind in result.summed]

    def _feature_axes(self, dims: Dims) -> set[str]:
        return {a for d in dims if d.kind == Kind.FEATURE for a in self.axes.get(d.computed, ())}


def split_by(sharding: NamedSharding, ndim: int) -> list[MeshAxes]:
    """The mesh axes that split each dimension."""
    spec = [*sharding.spec, *[None] * ndim][:ndim]
    return [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]


def with_prime_axes(mesh: Any) -> Any:
    """The mesh with every axis as several axes of prime sizes.

    Where a reshape splits a dimension, Shardy splits the mesh axis that shards it: the part of the axis is then one of
    these.
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


def on_mesh(mesh: Any, a: Any) -> jax.ShapeDtypeStruct:
    """The shape of `a` with its sharding, which XLA has written down as tiles, in terms of the mesh.

    An array without a sharding, or with one that the mesh cannot express, is whole on every device.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    given = getattr(a, "sharding", None) if isinstance(a, jax.ShapeDtypeStruct) else None
    if given is None:
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole)
    shape = (mesh.devices.size,) * a.ndim  # divides into any tiles
    # A sharding of the mesh's devices alone: XLA tells nothing of the devices along manual axes.
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
    mesh: Any,
    layout: Layout,
    operands: Sequence[Any],
    results: Sequence[Any],
    whole: Container[Kind] = (),
    may_gather: bool = False,
) -> Placement:
    """Choose the mesh axes that split each dimension, for arrays of these shardings.

    Where an axis splits rows of one array and features of another, the arrays that have both tell whether its devices
    share the features (Megatron's sequence parallelism) or only store them in parts (FSDP).

    whole: the kinds of dimension that no axis may split.
    may_gather: whether rows of some arrays may stay split over axes that split features.
    """
    sizes: dict[Dim, int] = {}
    wanted: dict[Dim, MeshAxes] = {}
    asked: set[str] = set()
    described = (*layout.given, *(r.dims for r in layout.written))
    for dims, a in zip(described, (*operands, *results), strict=True):
        has_rows = any(dim.kind == Kind.ROW for dim in dims)
        for dim, size, axes in zip(dims, a.shape, split_by(a.sharding, a.ndim), strict=True):
            if size > 1 and not dim.stored_as and dim.kind not in whole:
                sizes[dim] = size
                wanted[dim] = wanted.get(dim) or axes
                asked |= {*axes} if has_rows and dim.kind == Kind.FEATURE else set()

    def chosen(of_features: set[str]) -> Placement:
        """The placement in which the axes `of_features` split features, whatever else they split."""

        def may_share(axis: str, one: Dim, other: Dim) -> bool:
            return (one.kind, other.kind) == (Kind.ROW, Kind.FEATURE) and axis in of_features

        split: dict[Dim, MeshAxes] = {}
        for dim in sorted(wanted, key=lambda dim: dim.kind):
            axes = wanted[dim]
            if dim.kind == Kind.ROW:
                # Rows that are gathered lie side by side only if they are split by the last axes.
                last = len(axes)
                while may_gather and last and axes[last - 1] in of_features:
                    last -= 1
                axes = (*(a for a in axes[:last] if a not in of_features), *axes[last:])
            taken = {a for d, others in split.items() for a in others if not may_share(a, d, dim)}
            axes = tuple(a for a in axes if a not in taken)
            if axes and sizes[dim] % math.prod(mesh.shape[a] for a in axes) == 0:  # no device may have padding for rows
                split[dim] = axes
        return Placement(mesh, split)

    placement = chosen(asked)
    return placement if asked <= {*placement.over(Kind.FEATURE)} else chosen(asked & {*placement.over(Kind.FEATURE)})
