"""An operation on every device's part of its operands: the devices, or XLA, add up their shares of sums.

JAX's partitioner cannot look into a kernel, and would gather its operands on every device. `custom_partitioning` lets
it ask instead: a Shardy rule tells how shardings propagate, and a callback what to compute where they are known.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jln._core.devices import Context, on_one_device
from jln._core.identity import call_by_name
from jln._core.layout import Dim, Kind, Layout, Result
from jln._core.placement import MeshAxes, on_mesh, place, split_by, with_prime_axes


def partition(
    compute: Callable[..., list[jax.Array]],
    shares: Callable[..., list[jax.Array]],
    layout: Layout,
    context: Context,
    may_split_h: bool,
    name: str,
) -> Callable[..., list[jax.Array]]:
    """Partition `compute`, a function of the operands that are present: every device computes its part by itself.

    shares: as `compute`, for a device that has a share of a sum: results that are added up wide are in a dtype for it.
      It takes the mesh axes that split H, and `Placement.gathered`, in front of the operands.
    layout: the dimensions of operands and results.
    context: the devices of the program.
    may_split_h: whether H may stay split.
    name: the `jln._core.identity.identity` of what is computed.
    """
    if context.manual:
        return _partition_for_xla(compute, functools.partial(shares, (), ()), layout, context, name)
    whole = layout.whole if may_split_h else (*layout.whole, Kind.HIDDEN)

    def plan(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        mesh = with_prime_axes(context.mesh if mesh.empty else mesh)
        operands, results = ([on_mesh(mesh, a) for a in arrays] for arrays in (operands, results))
        placement = place(mesh, layout, operands, results, whole, may_gather=True)
        h_axes, gathered = placement.over(Kind.HIDDEN), placement.gather_axes()
        summed = [placement.sum_axes(r) for r in layout.written]
        out = placement.shardings([r.dims for r in layout.written], results)
        scattered = [_scatter(o, r, s) for o, r, s in zip(out, results, summed, strict=True)]
        shared = {a for _, axes in gathered for a in axes}
        feature_axes = [a for a in placement.over(Kind.FEATURE) if a not in shared]

        def on_each_device(*parts: jax.Array) -> tuple[jax.Array, ...]:
            if feature_axes and any(layout.terms):
                first = functools.reduce(jnp.logical_and, (jax.lax.axis_index(a) == 0 for a in feature_axes))
                parts = tuple(
                    jnp.where(first, a, 0) if is_term else a for a, is_term in zip(parts, layout.terms, strict=True)
                )
            is_whole = not (h_axes or gathered or any(map(any, summed)))
            made = compute(*parts) if is_whole else shares(h_axes, gathered, *parts)
            totals = [_sum(a, axes, dims) for a, axes, dims in zip(made, summed, scattered, strict=True)]
            return tuple(a.astype(r.dtype) for a, r in zip(totals, results, strict=True))

        out = tuple(map(_with_scattered, out, scattered))
        return mesh, on_one_device(on_each_device), out, placement.shardings(layout.given, operands)

    def call(*operands: jax.Array) -> list[jax.Array]:
        rule = layout.rule(operands, jax.eval_shape(compute, *operands))
        return call_by_name(name, compute, plan, rule, operands)

    return call


def _partition_for_xla(
    compute: Callable[..., list[jax.Array]],
    shares: Callable[..., list[jax.Array]],
    layout: Layout,
    context: Context,
    name: str,
) -> Callable[..., list[jax.Array]]:
    """Partition `compute` in a `shard_map` that leaves mesh axes to the compiler.

    XLA tells there how arrays are split, but not which device has which part, so devices cannot be made to add anything
    up. A result that is a sum over rows leaves each device as a share, along an axis in front, and XLA adds the shares
    up. H is never split, nor are features over which a result is summed.
    """
    of_rows = (Kind.ROW, Kind.BATCH)
    axes = {name: size for name, size in context.mesh.shape.items() if name not in context.manual}
    devices = math.prod(axes.values())
    some = context.mesh.devices[tuple(slice(None) if name in axes else 0 for name in context.mesh.shape)]
    mesh = with_prime_axes(jax.sharding.Mesh(some, tuple(axes)))
    sums = [dataclasses.replace(r, summed=tuple(k for k in r.summed if k in of_rows)) for r in layout.written]
    whole = {Kind.HIDDEN} | {kind for r in layout.written for kind in r.summed if kind not in of_rows}
    # The axis in front has no part in how anything else is split.
    in_front = [Dim(Kind.SHARE, i, stored_as="shares") for i, _ in enumerate(sums)]
    written = [Result((d, *r.dims) if r.summed else r.dims) for r, d in zip(sums, in_front, strict=True)]
    layout = dataclasses.replace(layout, written=written)

    def in_shares(results: Sequence[jax.Array], parts: Sequence[int]) -> tuple[jax.Array, ...]:
        """The results, each sum in them as the first of `devices / parts` shares, of which the others are zeros.

        parts: of each result, how many devices have a share of their own.
        """
        of_each = zip(results, sums, parts, strict=True)
        return tuple(
            jnp.pad(a[None], [(0, devices // n - 1)] + [(0, 0)] * a.ndim) if r.summed else a for a, r, n in of_each
        )

    def plan(_: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        operands, results = ([on_mesh(mesh, a) for a in arrays] for arrays in (operands, results))
        placement = place(mesh, layout, operands, results, whole)
        over = [tuple(a for axes in placement.sum_axes(r) for a in axes) for r in sums]
        placement.axes.update({d.computed: axes for d, axes in zip(in_front, over, strict=True)})
        parts = [math.prod(mesh.shape[a] for a in axes) for axes in over]
        on_each_device = on_one_device(lambda *operands: in_shares(shares(*operands), parts))
        out = placement.shardings([r.dims for r in written], results)
        return mesh, on_each_device, out, placement.shardings(layout.given, operands)

    def call(*operands: jax.Array) -> list[jax.Array]:
        def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return in_shares(shares(*operands), [1] * len(sums))

        rule = layout.rule(operands, jax.eval_shape(function, *operands))
        made, wanted = call_by_name(name, function, plan, rule, operands), jax.eval_shape(compute, *operands)
        # Each device its own share: of an axis that no sharding has reached XLA would gather them all first.
        spread = NamedSharding(jax.typeof(operands[0]).sharding.mesh, PartitionSpec(tuple(axes)))
        totals = [
            jnp.sum(jax.lax.with_sharding_constraint(a, spread), axis=0) if r.summed else a
            for a, r in zip(made, sums, strict=True)
        ]
        return [a.astype(w.dtype) for a, w in zip(totals, wanted, strict=True)]

    return call


def _scatter(sharding: NamedSharding, result: Any, summed: Sequence[MeshAxes]) -> dict[int, MeshAxes]:
    """The dimensions of a result that a reduce-scatter may split, each with its mesh axes.

    On these dimensions every device is asked for a part only, over mesh axes over which the result is also summed.
    """
    scattered = {}
    have, wanted = split_by(sharding, result.ndim), split_by(result.sharding, result.ndim)
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
    spec = [(*own, *scattered.get(dim, ())) or None for dim, own in enumerate(split_by(sharding, len(sharding.spec)))]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _sum(share: jax.Array, summed: Sequence[MeshAxes], scattered: dict[int, MeshAxes]) -> jax.Array:
    """Add up a device's share over the mesh axes of one kind of dimension after the other.

    XLA makes one all-reduce of the sums over the same devices.
    """
    for dim, axes in scattered.items():
        share = jax.lax.psum_scatter(share, axes, scatter_dimension=dim, tiled=True)
    done = {a for axes in scattered.values() for a in axes}
    for axes in summed:
        left = tuple(a for a in axes if a not in done)
        share = jax.lax.psum(share, left) if left else share
    return share
