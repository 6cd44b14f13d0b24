"""Launchers of a norm on both sides of a sum: a norm's kernels, once, or twice where one does not take the rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jln._junction import launches as norms
from jln._junction import tiles as norm_tiles
from jln._junction.both_sides import tiles
from jln._junction.both_sides.formulas import composed_backward, composed_forward
from jln._junction.both_sides.signature import Cotangents, Gradients, Operands, Outcome
from jln._junction.kernels import backward as backward_kernels
from jln._junction.kernels import forward as forward_kernels
from jln._junction.launches import _Geometry, _geometry, _moved, _shared
from jln._junction.signature import Norm
from jln._triton.launch import launch
from jln._triton.target import Target

_SUMS = ("dx_scale", "dscale")
# What the norm's kernels can do besides, by the names of their arrays.
_OTHER_SUMMANDS = dict.fromkeys(("z", "x_bias", "gate", "row_gate", "offset"))
_OTHER_SUMS = dict.fromkeys(("doffset", "dx_bias", "dgate"))


def _in_rows(geometry: _Geometry) -> bool:
    """True where a group's rows follow each other in memory, and a row's elements do."""
    return geometry.inner == 1 and not geometry.interleaved


def forward(operands: Operands, norm: Norm, dtypes: Outcome, batch_dims: int, target: Target) -> Outcome:
    x, residual, x_scale, scale = operands
    g = _geometry((x, residual), (x_scale, scale), norm, batch_dims, False)
    results = Outcome(
        y=g.like_rows(dtypes.y),
        total=g.like_rows(dtypes.total),
        x_rstd=g.like_statistics(dtypes.x_rstd),
        rstd=g.like_statistics(dtypes.rstd),
    )
    total = jnp.promote_types(x.dtype, residual.dtype)
    tile = None
    if _in_rows(g):
        tile = tiles.forward(g.h, *_moved(x, residual, results.y, results.total), target)
    if tile is None:
        one = functools.partial(norms.forward, target=target)
        return composed_forward(operands, norm, dtypes, batch_dims, one)
    shared, ready = _shared(operands._asdict(), g)
    written = launch(
        target,
        forward_kernels.forward_kernel,
        {**_OTHER_SUMMANDS, "added": None, **ready, "rows": g.rows},
        {**results._asdict(), "mean": None},
        programs=g.programs(tile),
        tile=tile,
        compute=jnp.promote_types(total, jnp.float32),
        **g.constants,
        SHARED=shared,
        NORM=norm.switches,
        BOTH_SIDES=True,
        EPSILON=norm.epsilon,
        TOTAL=total,
    )
    return Outcome(**{name: written[name] for name in Outcome._fields})


def backward(operands: Cotangents, norm: Norm, dtypes: Gradients, batch_dims: int, target: Target) -> Gradients:
    dy, dtotal, total, scale, rstd, x, x_scale, x_rstd = operands
    sums = tuple(name for name in _SUMS if getattr(dtypes, name) is not None)
    g = _geometry((dy, dtotal, total, rstd, x, x_rstd), (scale, x_scale), norm, batch_dims, bool(sums))
    dx, dresidual = g.like_rows(dtypes.dx), g.like_rows(dtypes.dresidual)
    tile = None
    if _in_rows(g) and not (dtypes.dx is None and dtypes.dx_scale is None):  # else the norm's kernel is all
        tile = tiles.backward(g.h, *_moved(dy, dtotal, total, x, dx, dresidual), target.chip)
    if tile is None:
        one = functools.partial(norms.backward, target=target)
        return composed_backward(operands, norm, dtypes, batch_dims, one)
    programs = max(1, min(target.chip.cores * tile.programs_per_core // g.groups, g.tiles(tile)))
    compute = rstd.dtype
    gradients = {name: g.like_parameters(getattr(dtypes, name)) for name in _SUMS}
    shares = jax.ShapeDtypeStruct((len(sums), g.groups, programs, g.h), compute) if sums and programs > 1 else None
    shared, ready = _shared(operands._asdict(), g)
    written = launch(
        target,
        backward_kernels.backward_kernel,
        {**_OTHER_SUMMANDS, "mean": None, "c1": None, "c2": None, **ready, "rows": g.rows, "programs": programs},
        {
            **dict.fromkeys(("dz", "drow_gate", "y")),
            **_OTHER_SUMS,
            "dx": dx,
            "dresidual": dresidual,
            **(gradients if shares is None else dict.fromkeys(gradients)),
            "shares": shares,
        },
        programs=g.groups * programs,
        tile=tile,
        compute=compute,
        **g.constants,
        SHARED=shared,
        SUMS=sums,
        PULLS=True,
        NORM=norm.switches,
    )
    if shares is not None:
        tile = norm_tiles.reduce_tile(g.h)
        written |= launch(
            target,
            backward_kernels.reduce_kernel,
            {"shares": written["shares"], "groups": g.groups, "programs": programs},
            {**_OTHER_SUMS, **gradients},
            programs=len(sums) * g.groups * g.chunks(tile),
            tile=tile,
            compute=compute,
            H=g.h,
            SUMS=sums,
        )
    return Gradients(**{name: written[name] for name in Gradients._fields})
