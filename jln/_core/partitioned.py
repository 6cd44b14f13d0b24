"""An operation on every device's part of its operands, where the devices add up their shares of sums by themselves.

JAX's partitioner cannot look into a kernel, and would gather its operands on every device. `custom_partitioning` lets
it ask instead: a Shardy rule tells how shardings propagate, and a callback what to compute where they are known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jln._core.devices import Context, on_one_device
from jln._core.identity import call_by_name
from jln._core.layout import Kind, Layout
from jln._core.placement import MeshAxes, on_mesh, place, split_by, with_prime_axes


def partitioned(
    compute: Callable[..., list[jax.Array]],
    layout: Layout,
    shares: Callable[..., list[jax.Array]],
    context: Context,
    may_split_h: bool,
    name: str,
) -> Callable[..., list[jax.Array]]:
    """Partition `compute`, a function of the operands that are present: every device computes its part by itself.

    layout: the dimensions of operands and results.
    shares: as `compute`, for a device that has a share of a sum: results that are added up wide are in a dtype for it.
      It takes the mesh axes that split H, and `Placement.gathered`, in front of the operands.
    context: the devices of the program.
    may_split_h: whether H may stay split.
    name: the `jln._core.identity.identity` of what is computed.
    """
    whole = layout.whole if may_split_h else (*layout.whole, Kind.HIDDEN)

    def plan(mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        mesh = with_prime_axes(context.mesh if mesh.empty else mesh)
        operands, results = ([on_mesh(mesh, a) for a in arrays] for arrays in (operands, results))
        placement = place(mesh, layout, operands, results, whole, may_gather=True)
        h_axes, gathered = placement.over(Kind.HIDDEN), placement.gathered()
        summed = [placement.summed(r) for r in layout.written]
        in_ = tuple(placement.sharding(d, a.shape) for d, a in zip(layout.given, operands, strict=True))
        out = [placement.sharding(r.dims, a.shape) for r, a in zip(layout.written, results, strict=True)]
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

        return mesh, on_one_device(on_each_device), tuple(map(_with_scattered, out, scattered)), in_

    def call(*operands: jax.Array) -> list[jax.Array]:
        rule = layout.rule(operands, jax.eval_shape(compute, *operands))
        return call_by_name(name, compute, plan, rule, operands)

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
