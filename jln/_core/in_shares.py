"""An operation on every device's part of its operands, where the compiler owns mesh axes and adds up the shares."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jln._core.devices import Context, on_one_device
from jln._core.identity import call_by_name
from jln._core.layout import Dim, Kind, Layout, Result
from jln._core.placement import on_mesh, place, with_prime_axes

# The kinds of dimension over which devices have shares of a sum over rows.
_OF_ROWS = (Kind.ROW, Kind.BATCH)


def partitioned_in_shares(
    compute: Callable[..., list[jax.Array]],
    layout: Layout,
    accumulate: Callable[..., list[jax.Array]],
    context: Context,
    name: str,
) -> Callable[..., list[jax.Array]]:
    """Partition `compute` in a `shard_map` that leaves mesh axes to the compiler.

    XLA tells there how arrays are split, but not which device has which part, so devices cannot be made to add anything
    up. A result that is a sum over rows leaves each device as a share, along an axis in front, and XLA adds the shares
    up. H is never split, nor are features over which a result is summed.

    compute: the operation of the operands that are present.
    layout: the dimensions of operands and results.
    accumulate: as `compute`, with the results that are added up wide in a dtype for it.
    context: the devices of the program.
    name: the `jln._core.identity.identity` of what is computed.
    """
    axes = {name: size for name, size in context.mesh.shape.items() if name not in context.manual}
    devices = math.prod(axes.values())
    some = context.mesh.devices[tuple(slice(None) if name in axes else 0 for name in context.mesh.shape)]
    mesh = with_prime_axes(jax.sharding.Mesh(some, tuple(axes)))
    sums = [dataclasses.replace(r, summed=tuple(k for k in r.summed if k in _OF_ROWS)) for r in layout.written]
    summed = [bool(r.summed) for r in sums]
    whole = {Kind.HIDDEN} | {kind for r in layout.written for kind in r.summed if kind not in _OF_ROWS}
    # The axis in front has no part in how anything else is split.
    of_shares = [Dim(Kind.SHARE, i, stored_as="shares") for i, _ in enumerate(sums)]
    dims = [(d, *r.dims) if r.summed else r.dims for r, d in zip(sums, of_shares, strict=True)]
    written = [Result(d) for d in dims]
    layout = dataclasses.replace(layout, written=written)

    def in_shares(results: Sequence[jax.Array], parts: Sequence[int]) -> tuple[jax.Array, ...]:
        """The results, each sum in them as the first of `devices / parts` shares, of which the others are zeros.

        parts: of each result, how many devices have a share of their own.
        """
        of_each = zip(results, summed, parts, strict=True)
        return tuple(jnp.pad(a[None], [(0, devices // n - 1)] + [(0, 0)] * a.ndim) if s else a for a, s, n in of_each)

    def plan(_: Any, operands: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        operands, results = ([on_mesh(mesh, a) for a in arrays] for arrays in (operands, results))
        placement = place(mesh, layout, operands, results, whole)
        over = [tuple(a for axes in placement.summed(r) for a in axes) for r in sums]
        placement.axes.update({d.computed: axes for d, axes in zip(of_shares, over, strict=True)})
        parts = [math.prod(mesh.shape[a] for a in axes) for axes in over]
        in_ = tuple(placement.sharding(d, a.shape) for d, a in zip(layout.given, operands, strict=True))
        out = tuple(placement.sharding(r.dims, a.shape) for r, a in zip(written, results, strict=True))
        on_each_device = on_one_device(lambda *operands: in_shares(accumulate(*operands), parts))
        return mesh, on_each_device, out, in_

    def call(*operands: jax.Array) -> list[jax.Array]:
        def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return in_shares(accumulate(*operands), [1] * len(sums))

        rule = layout.rule(operands, jax.eval_shape(function, *operands))
        made, wanted = call_by_name(name, function, plan, rule, operands), jax.eval_shape(compute, *operands)
        # Each device its own share: of an axis that no sharding has reached XLA would gather them all first.
        spread = NamedSharding(jax.typeof(operands[0]).sharding.mesh, PartitionSpec(tuple(axes)))
        totals = [
            jnp.sum(jax.lax.with_sharding_constraint(a, spread), axis=0) if s else a
            for a, s in zip(made, summed, strict=True)
        ]
        return [a.astype(w.dtype) for a, w in zip(totals, wanted, strict=True)]

    return call
