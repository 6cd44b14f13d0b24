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

from jln._junction import launches as norms
from jln._junction.arrays import COLUMNS, Arrays, Junction, total_dtype
from jln._junction.formulas import effective_scale
from jln._junction.geometry import Geometry, geometry_of, pointed, pointed_gradients
from jln._junction.gradients import made_again
from jln._junction.kernels import with_linear
from jln._junction.kernels import with_linear_backward as kernels
from jln._junction.linears import formulas, tiles
from jln._triton.launch import launch
from jln._triton.target import Target
from jln._triton.tile import Tile, ceil_div, next_power_of_2


def forward(
    operands: Arrays,
    junction: Junction,
    dtypes: Arrays,
    batch_dims: int,
    target: Target,
    gathered: formulas.Gathered = (),
) -> Arrays:
    tile = None
    wanted, keeps = dtypes, bool(jax.tree.leaves(dtypes.product))
    if keeps:  # by the kernel that makes y, too
        dtypes = dtypes._replace(y=formulas.product_dtypes(operands))
    if not (batch_dims or gathered) and (dtype := formulas.widest(dtypes.y)) is not None:
        n = sum(math.prod(k.shape[1:]) for k, d in zip(operands.kernel, dtypes.y, strict=True) if d is not None)
        g = geometry_of(_of_norm(operands), junction.norm, 0)
        gated = operands.gated or operands.x_bias is not None
        of_sum = {"adds": operands.residual is not None, "gated": gated, "keeps": keeps}
        tile = tiles.forward(g.groups * g.rows, g.h, n, dtype, target, groups=g.groups, **of_sum)
        tile = tile if tile is not None and tiles.fills(tile, g) else None
    if tile is not None:
        results = _fused_forward(operands, junction, dtypes, tile, target)
        return results._replace(y=tuple(a if d else None for a, d in zip(results.y, wanted.y, strict=True)))
    return formulas.forward(operands, junction, wanted, batch_dims, norms=_norms(target), gathered=gathered)


def backward(
    operands: Arrays,
    junction: Junction,
    dtypes: Arrays,
    batch_dims: int,
    target: Target,
    gathered: formulas.Gathered = (),
) -> Arrays:
    plan = None
    if not (batch_dims or gathered) and jax.tree.leaves(dtypes._replace(offset=None, bias=None)):
        g = _geometry_of_gradients(operands, junction, dtypes)
        dy = [d for d in operands.dy if d is not None]
        rows = g.groups * g.rows
        n = sum(d.size for d in dy) // rows
        gated = operands.gated or dtypes.x_bias is not None
        plan = tiles.backward(rows, g.h, n, dy[0].dtype.name, target, groups=g.groups, gated=gated)
        plan = plan if plan is not None and tiles.fills(plan.backward, g) else None
    if plan is not None:
        if junction.norm.remat:
            again = functools.partial(norms.forward, target=target)
            operands, norm = made_again(operands, junction.norm, dtypes, batch_dims, again)
            junction = dataclasses.replace(junction, norm=norm)
        return _fused_backward(operands, junction, dtypes, plan, target)
    return formulas.backward(operands, junction, dtypes, batch_dims, norms=_norms(target), gathered=gathered)


def _of_norm(operands: Arrays) -> Arrays:
    return operands._replace(kernel=None, bias=None, dy=None, product=None)


def _geometry_of_gradients(operands: Arrays, junction: Junction, dtypes: Arrays) -> Geometry:
    has_sums = any(getattr(dtypes, name) is not None for name in COLUMNS)
    return geometry_of(_of_norm(operands), junction.norm, 0, has_sums)


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
    n = sum(math.prod(f) for f in features if f is not None)
    of_norm = _of_norm(operands)
    g = geometry_of(of_norm, junction.norm, 0)

    def like_x(dtype: str | None, last: int) -> jax.ShapeDtypeStruct | None:
        return None if dtype is None else jax.ShapeDtypeStruct((*x.shape[:-1], last), dtype)

    if any(b is not None for b in bias):
        bias = [jnp.zeros(k.shape[1:], k.dtype) if b is None else b for k, b in zip(kernel, bias, strict=True)]
    y = like_x(formulas.widest(dtypes.y), n)
    assert y is not None
    written = launch(
        target,
        with_linear.forward_kernel,
        {
            **pointed(with_linear.forward_kernel, of_norm),
            "kernel": _side_by_side(kernel, features),
            "bias": _side_by_side(bias, features),
            "rows": g.rows,
        },
        {
            "y": y,
            "total": like_x(dtypes.total, x.shape[-1]),
            "mean": like_x(dtypes.mean, 1),
            "rstd": like_x(dtypes.rstd, 1),
            "product": like_x(formulas.widest(dtypes.product or ()), n),
        },
        programs=g.programs(tile),
        tile=tile,
        BY_REGISTERS=target.chip.has_wgmma and y.dtype == jnp.float32,
        EPSILON=junction.norm.epsilon,
        TOTAL=jnp.dtype(total_dtype(operands)),
        **_constants(g, n),
    )
    of_each = {"y": _apart(written["y"], features, dtypes.y)}
    if dtypes.product is not None:
        of_each["product"] = _apart(written["product"], features, dtypes.product)
    return Arrays(**written | of_each)


def _fused_backward(
    operands: Arrays, junction: Junction, dtypes: Arrays, plan: tiles.BackwardPlan, target: Target
) -> Arrays:
    """The backward operation without a batch, in up to four kernels.

    They compute the row sums and shares of dbias, where a cotangent of total is wanted; then the rows' gradients and
    shares of G and of sums over a group's rows; and then add up the shares of the parameters' gradients.
    """
    g = _geometry_of_gradients(operands, junction, dtypes)
    pairs = zip(operands.dy, junction.features, strict=True)
    features = [None if d is None else d.shape[d.ndim - axes :] for d, axes in pairs]
    dy, kernel = _side_by_side(operands.dy, features), _side_by_side(operands.kernel, features)
    assert dy is not None
    n = dy.shape[-1]
    wants_dkernel, wants_dbias = (any(d is not None for d in of) for of in (dtypes.kernel, dtypes.bias))
    pulls = any(d is not None for d in dtypes._replace(scale=None, offset=None, kernel=None, bias=None))
    # Of one group doffset is made of dbias, and so is the part of dkernel that the offset has.
    one_group = g.groups == 1
    sums = [name for name in COLUMNS if getattr(dtypes, name) is not None and not (one_group and name == "offset")]
    named_sums = tuple(f"d{name}" for name in sums)
    constants = _constants(g, n)

    def float32(wanted: object, *shape: int) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct(shape, jnp.float32) if wanted else None

    def like(dtype: str | None, *shape: int) -> jax.ShapeDtypeStruct | None:
        return None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)

    results = g.results(dtypes._replace(kernel=None, bias=None))
    row_programs, parts = plan.row_programs, plan.parts
    splits, programs = plan.splits, plan.programs
    given = {**pointed(kernels.backward_kernel, _of_norm(operands)), "dy": dy, "kernel": kernel}
    needs_dbias = wants_dbias or (one_group and (dtypes.offset or (wants_dkernel and operands.offset is not None)))
    rows = g.groups * g.rows
    row_sums: dict[str, Any] = {"c1": None, "c2": None, "dbias": None}
    if pulls:
        centres = junction.norm.switches.subtract_mean
        parts = plan.parts if operands.product is None else 1
        of_rows = {"dy": dy, "rows": g.rows, "groups": g.groups, "programs": row_programs}
        of_sums: dict[str, Any] = {
            "c1": float32(centres, parts, rows),
            "c2": float32(True, parts, rows),
            "dbias": float32(needs_dbias, row_programs, n),
        }
        how: dict[str, Any] = {"programs": row_programs * parts, "tile": plan.row_sums}
        if operands.product is None:
            read = {name: given[name] for name in ("total", "scale", "kernel", "mean", "rstd")}
            row_sums = launch(target, kernels.row_sums_kernel, of_rows | read, of_sums, PARTS=parts, **constants, **how)
        else:
            assert kernel is not None
            weight = _weight(operands.scale, kernel, g) if centres else None
            read = {"product": _side_by_side(operands.product, features), "weight": weight}
            of_weight = {name: a for name, a in constants.items() if name != "NORM"}
            of_weight["SHARES"] = None if weight is None else weight.shape[1]
            if operands.scale is None and g.groups > 1:
                of_weight["SHARED"] = ("scale",)
            row_sums = launch(target, kernels.row_sums_of_product_kernel, of_rows | read, of_sums, **of_weight, **how)
    elif needs_dbias:
        row_sums["dbias"] = norms.column_shares(dy.reshape(rows, n), jnp.float32)
        row_programs = len(row_sums["dbias"])
    has_shares = bool(sums) and (one_group or programs > 1)
    by_program = results._replace(offset=None) if one_group else results
    if has_shares:
        by_program = by_program._replace(**dict.fromkeys(sums))
    chunks = g.chunks(plan.backward)
    if results.row_gate is not None:
        by_program = by_program._replace(row_gate=float32(True, chunks, *results.row_gate.shape))
    if one_group:
        given["offset"] = None
    written = launch(
        target,
        kernels.backward_kernel,
        {
            **given,
            "dtotal": operands.dtotal if pulls else None,
            **{name: row_sums[name] for name in ("c1", "c2")},
            "rows": g.rows,
            "groups": g.groups,
            "splits": splits,
            "programs": programs,
        },
        {
            **pointed_gradients(kernels.backward_kernel, by_program),
            "g": float32(wants_dkernel, splits, g.h, n),
            "shares": float32(has_shares, len(sums), g.groups, programs, g.h),
        },
        programs=splits * chunks,
        tile=plan.backward,
        PARTS=parts,
        SUMS=named_sums,
        PULLS=pulls,
        **constants,
    )
    gradients = {name: written[f"d{name}"] for name in dtypes.present() if f"d{name}" in written}
    if results.row_gate is not None:
        gradients["row_gate"] = jnp.sum(gradients["row_gate"], axis=0).astype(dtypes.row_gate)
    if has_shares and not one_group:
        gradients |= norms.sums_of_shares(written["shares"], tuple(sums), results, target)
    of_parameters = {
        **pointed_gradients(kernels.parameters_kernel, results if one_group else Arrays()),
        "dkernel": like(formulas.widest(dtypes.kernel), g.h, n),
        "dbias": like(formulas.widest(dtypes.bias), n),
    }
    if any(a is not None for a in of_parameters.values()):
        made = launch(
            target,
            kernels.parameters_kernel,
            {
                "g_partial": written["g"],
                "shares": written["shares"] if one_group else None,
                "dbias_partial": row_sums["dbias"],
                "scale": operands.scale if wants_dkernel and one_group else None,
                "offset": operands.offset if wants_dkernel and one_group else None,
                "kernel": kernel if one_group and dtypes.offset else None,
                "splits": splits,
                "programs": row_programs,
            },
            of_parameters,
            programs=ceil_div(g.h, plan.parameters.columns),
            tile=plan.parameters,
            SUMS=named_sums,
            **{name: a for name, a in constants.items() if name != "SHARED"},
        )
        gradients |= {name.removeprefix("d"): a for name, a in made.items() if a is not None}
    return Arrays(**gradients)._replace(
        kernel=_apart(gradients.get("kernel"), features, dtypes.kernel),
        bias=_apart(gradients.get("bias"), features, dtypes.bias),
    )


def _weight(scale: jax.Array | None, kernel: jax.Array, g: Geometry) -> jax.Array:
    """Shares of the sums in (38), [G, shares, N], of the scales as the kernels find them.

    All of a sum at once is two launches to XLA: the first writes what it adds up, twice the bytes of the kernel.
    """
    s = jnp.asarray(effective_scale(scale, jnp.float32, g.norm), jnp.float32)
    s = jnp.broadcast_to(s, (1, g.h)) if scale is None else s.reshape(-1, g.h)
    size = next_power_of_2(ceil_div(g.h, kernels.WEIGHT_SHARES.value))
    scaled = jnp.pad(s[:, :, None] * kernel.astype(jnp.float32)[None], [(0, 0), (0, -g.h % size), (0, 0)])
    return jnp.sum(scaled.reshape(len(s), -1, size, kernel.shape[1]), axis=2)  # (38)


def _constants(g: Geometry, n: int) -> dict[str, Any]:
    """The constexprs that the fused kernels take."""
    return {
        "compute": jnp.dtype("float32"),
        "H": g.h,
        "N": n,
        "SHARED": None if g.groups == 1 else (),
        "BLOCK_N": tiles.features(n),
        "NORM": g.norm.switches,
    }
