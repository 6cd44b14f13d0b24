"""An operation on every device's part of its operands, where mesh axes are left to the compiler, which adds up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jln._core.devices import Context, on_one_device
from jln._core.layout import Dim, Kind, Layout, Result
from jln._core.placement import on_mesh, place, with_prime_axes


def partitioned_in_shares(
    compute: Callable[..., list[jax.Array]],
    layout: Layout,
    accumulate: Callable[..., list[jax.Array]],
    context: Context,
) -> Callable[..., list[jax.Array]]:
    """As `jln._core.partitioned.partitioned`, in a `shard_map` that leaves mesh axes to the compiler.

    XLA tells there how arrays are split, but not which device has which part, so that devices cannot be made to add
    anything up. What is a sum over rows leaves as shares, along an axis in front, and XLA adds them up. H is never
    split, nor are features over which a result is summed.
    """
    axes = {name: size for name, size in context.mesh.shape.items() if name not in context.manual}
    devices = math.prod(axes.values())
    some = context.mesh.devices[tuple(slice(None) if name in axes else 0 for name in context.mesh.shape)]
    mesh = with_prime_axes(jax.sharding.Mesh(some, tuple(axes)))
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
        operands, results = ([on_mesh(mesh, a) for a in arrays] for arrays in (operands, results))
        placement = place(mesh, layout, operands, results, whole)
        rows = placement.over(Kind.ROW)
        placement.axes[of_shares.computed] = rows
        parts = math.prod(mesh.shape[a] for a in rows)
        in_ = tuple(placement.sharding(d, a.shape) for d, a in zip(layout.given, operands, strict=True))
        out = tuple(placement.sharding(r.dims, a.shape) for r, a in zip(written, results, strict=True))
        on_each_device = on_one_device(lambda *operands: in_shares(accumulate(*operands), parts))
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
