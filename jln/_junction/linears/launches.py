"""Launchers of LayerNorm+Linear: fused kernels for few features (`tiles`), else norm kernels around XLA's products."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jln._junction import launches as norms
from jln._junction.arrays import Arrays, Junction, Norm, Shape, total_dtype
from jln._junction.kernels import with_linear
from jln._junction.kernels import with_linear_backward as kernels
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
    (dtype,), (kernel,) = dtypes.y, operands.kernel
    if dtype is not None and not (batch_dims or gathered):
        *lead, h = operands.x.shape
        n, adds = math.prod(kernel.shape[1:]), operands.residual is not None
        tile = tiles.forward_tile(math.prod(lead), h, n, dtype, target.chip, adds)
        if tile is not None:
            return _fused_forward(operands, junction, dtypes, tile, target)
    return formulas.forward(operands, junction, dtypes, batch_dims, norms=_norms(target), gathered=gathered)


def backward(
    operands: Arrays,
    junction: Junction,
    dtypes: Arrays,
    batch_dims: int,
    target: Target,
    gathered: formulas.Gathered = (),
) -> Arrays:
    reads_rows = jax.tree.leaves(dtypes._replace(offset=None, bias=None))
    if reads_rows and not (batch_dims or gathered):
        (dy,) = operands.dy
        *lead, h = operands.total.shape
        rows = math.prod(lead)
        plan = tiles.backward_plan(rows, h, dy.size // rows, dy.dtype.name, target.chip)
        if plan is not None:
            return _fused_backward(operands, junction.norm, dtypes, plan, target)
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
    rows = dy.reshape(*dy.shape[: dy.ndim - features], math.prod(columns))
    sums = norms.column_sums(rows, dtype, batch_dims)
    return Arrays(bias=(sums.reshape(*dy.shape[:batch_dims], *columns),))


def _fused_forward(operands: Arrays, junction: Junction, dtypes: Arrays, tile: Tile, target: Target) -> Arrays:
    """The forward operation in one kernel."""
    x, (kernel,), (bias,), (dtype,) = operands.x, operands.kernel, operands.bias, dtypes.y
    *lead, h = x.shape
    rows, n = math.prod(lead), math.prod(kernel.shape[1:])

    def like_x(dtype: str | None, last: int) -> jax.ShapeDtypeStruct | None:
        return None if dtype is None else jax.ShapeDtypeStruct((*lead, last), dtype)

    made = launch(
        target,
        with_linear.forward_kernel,
        {"a": operands._replace(kernel=kernel, bias=bias), "rows": rows},
        {
            "r": Arrays(
                y=like_x(dtype, n),
                total=like_x(dtypes.total, h),
                mean=like_x(dtypes.mean, 1),
                rstd=like_x(dtypes.rstd, 1),
            )
        },
        programs=ceil_div(rows, tile.rows),
        tile=tile,
        BY_REGISTERS=target.chip.has_wgmma and dtype == "float32",
        EPSILON=junction.norm.epsilon,
        TOTAL=jnp.dtype(total_dtype(operands)),
        **_constants(junction.norm, h, n),
    )["r"]
    return made._replace(y=(made.y.reshape(*lead, *kernel.shape[1:]),))


def _fused_backward(operands: Arrays, norm: Norm, dtypes: Arrays, plan: tiles.BackwardPlan, target: Target) -> Arrays:
    """The backward operation in up to three kernels.

    They compute the row sums and shares of dbias, where a cotangent of total is wanted; then that and shares of G and
    of dscale; and then add up the shares of the parameters' gradients.
    """
    (dy,), (kernel,), total = operands.dy, operands.kernel, operands.total
    (dkernel,), (dbias,) = dtypes.kernel, dtypes.bias
    *lead, h = total.shape
    rows = math.prod(lead)
    n = dy.size // rows
    constants = _constants(norm, h, n)
    needs_dbias = dbias or dtypes.offset or (dkernel and operands.offset is not None)

    def result(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct(shape, dtype) if dtype else None

    read = operands.only(("total", "scale", "mean", "rstd"))._replace(dy=dy, kernel=kernel)
    row_sums: dict[str, Any] = {"c1": None, "c2": None, "dbias": None}
    programs = plan.row_programs
    if dtypes.x is not None:
        row_sums = launch(
            target,
            kernels.row_sums_kernel,
            {"a": read, "rows": rows, "programs": programs},
            {
                "c1": result(norm.switches.subtract_mean and "float32", plan.parts, rows),
                "c2": result("float32", plan.parts, rows),
                "dbias": result(needs_dbias and "float32", programs, n),
            },
            programs=programs * plan.parts,
            tile=plan.row_sums,
            PARTS=plan.parts,
            **constants,
        )
    elif needs_dbias:
        row_sums["dbias"] = norms.column_shares(dy.reshape(rows, n), jnp.float32)
        programs = len(row_sums["dbias"])
    shares = launch(
        target,
        kernels.backward_kernel,
        {
            "a": read._replace(dtotal=None if dtypes.x is None else operands.dtotal),
            "c1": row_sums["c1"],
            "c2": row_sums["c2"],
            "rows": rows,
            "splits": plan.splits,
        },
        {
            "d": Arrays(x=result(dtypes.x, *lead, h)),
            "g": result(dkernel and "float32", plan.splits, h, n),
            "dscale": result(dtypes.scale and "float32", plan.splits, h),
        },
        programs=plan.splits * ceil_div(h, plan.backward.columns),
        tile=plan.backward,
        PARTS=plan.parts,
        **constants,
    )
    of_x = norm.sizes(Shape.COLUMN, total.shape, 0)
    made = Arrays(
        kernel=result(dkernel, h, *dy.shape[len(lead) :]),
        scale=result(dtypes.scale, *of_x),
        offset=result(dtypes.offset, *of_x),
        bias=result(dbias, *dy.shape[len(lead) :]),
    )
    if made.present():
        made = launch(
            target,
            kernels.parameters_kernel,
            {
                "g_partial": shares["g"],
                "dscale_partial": shares["dscale"],
                "dbias_partial": row_sums["dbias"],
                "a": Arrays(
                    scale=operands.scale if dkernel else None,
                    offset=operands.offset if dkernel else None,
                    kernel=kernel if dtypes.offset else None,
                ),
                "splits": plan.splits,
                "programs": programs,
            },
            {"d": made},
            programs=ceil_div(h, plan.parameters.columns),
            tile=plan.parameters,
            **constants,
        )["d"]
    return made._replace(x=shares["d"].x, kernel=(made.kernel,), bias=(made.bias,))


def _constants(norm: Norm, h: int, n: int) -> dict[str, Any]:
    """The constexprs that all of the kernels take."""
    constants = {"H": h, "N": n, "BLOCK_N": tiles.features(n), "NORM": norm.switches}
    return {"compute": jnp.dtype("float32"), **constants}
