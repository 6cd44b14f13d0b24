"""Launchers of LayerNorm+Linear: fused kernels for few features (`tiles`), else norm kernels around XLA's products.

N counts the features of all products together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jln._core.operation import only_rows_differ
from jln._junction import launches as norms
from jln._junction.arrays import TABLE, Arrays, Junction, Norm, Shape, total_dtype
from jln._junction.formulas import common_batch, with_batch
from jln._junction.gradients import made_again
from jln._junction.kernels import with_linear as kernels
from jln._junction.linears import formulas, tiles
from jln._triton.launch import launch
from jln._triton.target import Target
from jln._triton.tile import Tile, ceil_div


def forward(
    operands: Arrays,
    junction: Junction,
    dtypes: Arrays,
    batch_dims: int,
    target: Target,
    gathered: formulas.Gathered = (),
) -> Arrays:
    batch = common_batch(batch_dims, *jax.tree.leaves(operands))
    rows, parameters = ({}, {})
    for name, array in operands.present().items():
        (rows if TABLE[name].shape is Shape.ROW else parameters)[name] = array
    if batch_dims and only_rows_differ(batch_dims, list(rows.values()), jax.tree.leaves(parameters)):
        # Where every example has the same parameters, examples are rows like any other.
        of_linears = jax.tree.map(lambda p: p.reshape(p.shape[batch_dims:]), operands.only(("kernel", "bias")))
        operands, batch_dims = operands._replace(kernel=of_linears.kernel, bias=of_linears.bias), 0
    tile, x = None, operands.x
    if not (batch_dims or gathered) and (dtype := formulas.widest(dtypes.y)) is not None:
        n = sum(math.prod(k.shape[1:]) for k, d in zip(operands.kernel, dtypes.y, strict=True) if d is not None)
        adds = operands.residual is not None
        tile = tiles.forward(math.prod(x.shape[:-1]), x.shape[-1], n, dtype, target, adds=adds)
    if tile is not None:
        results = _fused_forward(operands, junction, dtypes, tile, target)
    else:
        results = formulas.forward(operands, junction, dtypes, batch_dims, norms=_norms(target), gathered=gathered)
    return jax.tree.map(lambda a: with_batch(a, batch), results)


def backward(
    operands: Arrays,
    junction: Junction,
    dtypes: Arrays,
    batch_dims: int,
    target: Target,
    gathered: formulas.Gathered = (),
) -> Arrays:
    plan = None
    if not (batch_dims or gathered) and jax.tree.leaves((dtypes.x, dtypes.scale, dtypes.kernel)):
        *lead, h = (operands.x if operands.total is None else operands.total).shape
        rows = math.prod(lead)
        dy = [d for d in operands.dy if d is not None]
        plan = tiles.backward(rows, h, sum(d.size for d in dy) // rows, dy[0].dtype.name, target)
    if plan is not None:
        if junction.norm.remat:
            again = functools.partial(norms.forward, target=target)
            operands, norm = made_again(operands, junction.norm, dtypes, batch_dims, again)
            junction = dataclasses.replace(junction, norm=norm)
        return _fused_backward(operands, junction, dtypes, plan, target)
    return formulas.backward(operands, junction, dtypes, batch_dims, norms=_norms(target), gathered=gathered)


def _norms(target: Target) -> formulas.Norms:
    """The norm's own kernels, to be called around XLA's products."""
    return formulas.Norms(
        functools.partial(norms.forward, target=target),
        functools.partial(norms.backward, target=target),
        functools.partial(column_sums, target=target),
    )


def column_sums(operands: Arrays, junction: Junction, dtypes: Arrays, batch_dims: int, target: Target) -> Arrays:
    """Sum one Linear's rows by XLA, in the kernel that makes the rows where that is XLA's own."""
    del target
    (dy,), (features,), (dtype,) = operands.dy, junction.features, dtypes.bias
    columns = dy.shape[dy.ndim - features :]
    rows = dy.reshape(*dy.shape[:batch_dims], -1, math.prod(columns))
    sums = norms.column_sums(rows, dtype)
    return Arrays(bias=(sums.reshape(*dy.shape[:batch_dims], *columns),))


# Several products in one kernel: to write their arrays side by side and to part the results costs a few features' bytes
# a row, and one more product by itself would cost a pass over x.


def _side_by_side(arrays: Sequence[jax.Array | None], features: Sequence[tuple[int, ...] | None]) -> jax.Array | None:
    """The arrays that are not None as one, whose last axis has the features of all products; None where all are None.

    features: for each product the sizes of its axes of features.
    """
    given = [(a, f) for a, f in zip(arrays, features, strict=True) if a is not None and f is not None]
    if not given:
        return None
    wide = jnp.result_type(*(a for a, _ in given))
    flat = [a.astype(wide).reshape(*a.shape[: a.ndim - len(f)], math.prod(f)) for a, f in given]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat, -1)


def _apart(
    a: jax.Array | None, features: Sequence[tuple[int, ...] | None], dtypes: Sequence[str | None]
) -> tuple[jax.Array | None, ...]:
    """Split an array's last axis into an array for each product, each in its dtype: the inverse of `_side_by_side`.

    features: for each product the sizes of its axes of features; None for a product that has no part in the array.
    """
    parts: list[jax.Array | None] = []
    start = 0
    for f, dtype in zip(features, dtypes, strict=True):
        n = 0 if f is None else math.prod(f)
        if f is None or a is None or dtype is None:
            parts.append(None)
        else:
            part = jax.lax.slice_in_dim(a, start, start + n, axis=-1)
            parts.append(part.reshape(*a.shape[:-1], *f).astype(dtype))
        start += n
    return tuple(parts)


def _fused_forward(operands: Arrays, junction: Junction, dtypes: Arrays, tile: Tile, target: Target) -> Arrays:
    """The forward operation without a batch, in one kernel."""
    x, kernel, bias = operands.x, operands.kernel, operands.bias
    features = [None if d is None else k.shape[1:] for k, d in zip(kernel, dtypes.y, strict=True)]
    rows, n = math.prod(x.shape[:-1]), sum(math.prod(f) for f in features if f is not None)

    def like_x(dtype: str | None, last: int) -> jax.ShapeDtypeStruct | None:
        return None if dtype is None else jax.ShapeDtypeStruct((*x.shape[:-1], last), dtype)

    if any(b is not None for b in bias):
        bias = [jnp.zeros(k.shape[1:], k.dtype) if b is None else b for k, b in zip(kernel, bias, strict=True)]
    y = like_x(formulas.widest(dtypes.y), n)
    assert y is not None
    written = launch(
        target,
        kernels.forward_kernel,
        {
            "x": x,
            "residual": operands.residual,
            "scale": operands.scale,
            "offset": operands.offset,
            "kernel": _side_by_side(kernel, features),
            "bias": _side_by_side(bias, features),
            "rows": rows,
        },
        {
            "y": y,
            "total": like_x(dtypes.total, x.shape[-1]),
            "mean": like_x(dtypes.mean, 1),
            "rstd": like_x(dtypes.rstd, 1),
        },
        programs=ceil_div(rows, tile.rows),
        tile=tile,
        BY_REGISTERS=target.chip.has_wgmma and y.dtype == jnp.float32,
        EPSILON=junction.norm.epsilon,
        TOTAL=jnp.dtype(total_dtype(operands)),
        **_constants(junction.norm, x.shape[-1], n),
    )
    return Arrays(**written | {"y": _apart(written["y"], features, dtypes.y)})


def _fused_backward(
    operands: Arrays, junction: Junction, dtypes: Arrays, plan: tiles.BackwardPlan, target: Target
) -> Arrays:
    """The backward operation without a batch, in up to three kernels.

    They compute the row sums and shares of dbias, where dx is wanted; then dx and shares of G and dscale; and then add
    up the shares.
    """
    total, offset = operands.total, operands.offset
    pairs = zip(operands.dy, junction.features, strict=True)
    features = [None if d is None else d.shape[d.ndim - axes :] for d, axes in pairs]
    dy, kernel = _side_by_side(operands.dy, features), _side_by_side(operands.kernel, features)
    assert dy is not None
    wants_dkernel, wants_dbias = (any(d is not None for d in of) for of in (dtypes.kernel, dtypes.bias))
    rows, h, n = math.prod(dy.shape[:-1]), total.shape[-1], dy.shape[-1]
    constants = _constants(junction.norm, h, n)

    def float32(wanted: object, *shape: int) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct(shape, jnp.float32) if wanted else None

    def like(dtype: str | None, *shape: int) -> jax.ShapeDtypeStruct | None:
        return None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)

    parameter = (*[1] * (total.ndim - 1), h)
    programs, parts, splits = plan.row_programs, plan.parts, plan.splits
    given = {
        "dy": dy,
        "total": total,
        "scale": operands.scale,
        "kernel": kernel,
        "mean": operands.mean,
        "rstd": operands.rstd,
    }
    needs_dbias = wants_dbias or dtypes.offset or (wants_dkernel and offset is not None)
    sums: dict[str, Any] = {"c1": None, "c2": None, "dbias": None}
    if dtypes.x:
        sums = launch(
            target,
            kernels.row_sums_kernel,
            {**given, "rows": rows, "programs": programs},
            {
                "c1": float32(junction.norm.switches.subtract_mean, parts, rows),
                "c2": float32(True, parts, rows),
                "dbias": float32(needs_dbias, programs, n),
            },
            programs=programs * parts,
            tile=plan.row_sums,
            PARTS=parts,
            **constants,
        )
    elif needs_dbias:
        sums["dbias"] = norms.column_shares(dy.reshape(rows, n), jnp.float32)
        programs = len(sums["dbias"])
    written = launch(
        target,
        kernels.backward_kernel,
        {
            **given,
            "dtotal": operands.dtotal if dtypes.x else None,
            "c1": sums["c1"],
            "c2": sums["c2"],
            "rows": rows,
            "splits": splits,
        },
        {
            "dx": like(dtypes.x, *total.shape),
            "g": float32(wants_dkernel, splits, h, n),
            "dscale": float32(dtypes.scale, splits, h),
        },
        programs=splits * ceil_div(h, plan.backward.columns),
        tile=plan.backward,
        PARTS=parts,
        **constants,
    )
    gradients: dict[str, Any] = {
        "dkernel": like(formulas.widest(dtypes.kernel), h, n),
        "dscale": like(dtypes.scale, *parameter),
        "doffset": like(dtypes.offset, *parameter),
        "dbias": like(formulas.widest(dtypes.bias), n),
    }
    if any(a is not None for a in gradients.values()):
        gradients = launch(
            target,
            kernels.parameters_kernel,
            {
                "g_partial": written["g"],
                "dscale_partial": written["dscale"],
                "dbias_partial": sums["dbias"],
                "scale": operands.scale if wants_dkernel else None,
                "offset": offset if wants_dkernel else None,
                "kernel": kernel if dtypes.offset else None,
                "splits": splits,
                "programs": programs,
            },
            gradients,
            programs=ceil_div(h, plan.parameters.columns),
            tile=plan.parameters,
            **constants,
        )
    return Arrays(
        x=written["dx"],
        scale=gradients["dscale"],
        offset=gradients["doffset"],
        kernel=_apart(gradients["dkernel"], features, dtypes.kernel),
        bias=_apart(gradients["dbias"], features, dtypes.bias),
    )


def _constants(norm: Norm, h: int, n: int) -> dict[str, Any]:
    """The constexprs that all fused kernels take."""
    return {
        "compute": jnp.dtype("float32"),
        "H": h,
        "N": n,
        "BLOCK_N": tiles.features(n),
        "NORM": norm.switches,
    }
