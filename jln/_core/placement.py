"""Which axes of a mesh split which dimension of an operation, from how its arrays are split."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jln._core.layout import Dim, Dims, Kind, Layout

MeshAxes = tuple[str, ...]


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


def split_by(sharding: NamedSharding, ndim: int) -> list[MeshAxes]:
    """The mesh axes that split each dimension."""
    spec = [*sharding.spec, *[None] * ndim][:ndim]
    return [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]


def with_prime_axes(mesh: Any) -> Any:
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


def on_mesh(mesh: Any, a: Any) -> jax.ShapeDtypeStruct:
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
        for dim, size, axes in zip(dims, a.shape, split_by(a.sharding, a.ndim), strict=True):
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
