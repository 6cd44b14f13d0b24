"""The norms' backward kernels: row sums of wide rows, all gradients, and the sum of what programs share of them.

Rows lie as in `jln._junction.kernels.forward`. The numbers in brackets are the equations of `jln._junction.formulas`.
"""

import triton
import triton.language as tl

from jln._junction.kernels.addresses import (
    columns_at,
    columns_from,
    contains,
    group_of,
    rows_at,
    rows_of,
    tile_from,
    tiles_of,
)
from jln._junction.kernels.row_terms import load_row_terms, position, pull_back, store_sum
from jln._junction.kernels.terms import (
    affine,
    apply_gate,
    load_branch,
    load_offset,
    load_scale,
    load_total,
    load_vector,
    rstd_of,
)


@triton.jit
def row_sums_kernel(
    dy_ptr,  # [G, rows, H]
    total_ptr,  # [G, rows, H]
    x_z_ptr,  # [G, rows, H]
    z_ptr,  # [G, rows, H]
    scale_ptr,  # [G, H]
    mean_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]
    rows,
    c1_ptr,  # [G, rows]
    c2_ptr,  # [G, rows]
    H: tl.constexpr,
    HEADS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHARED: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute c1 and c2, one tile of rows a program, for rows too wide for `backward_kernel` to add up itself."""
    group, tile = group_of(tl.program_id(0), tiles_of(rows, BLOCK_ROWS), SHARED, HEADS)
    row, base, start, valid = rows_of(tile, rows, H, BLOCK_ROWS, HEADS)
    dy_ptr = rows_at(dy_ptr, "dy", group, rows, H, SHARED, HEADS)
    total_ptr = rows_at(total_ptr, "total", group, rows, H, SHARED, HEADS)
    x_z_ptr = rows_at(x_z_ptr, "x_z", group, rows, H, SHARED, HEADS)
    z_ptr = rows_at(z_ptr, "z", group, rows, H, SHARED, HEADS)
    scale_ptr = columns_at(scale_ptr, "scale", group, H, SHARED, HEADS)
    mean_ptr = rows_at(mean_ptr, "mean", group, rows, 1, SHARED, HEADS)
    rstd_ptr = rows_at(rstd_ptr, "rstd", group, rows, 1, SHARED, HEADS)

    mean = load_vector(mean_ptr, row, valid, BLOCK_ROWS, COMPUTE)
    rstd = load_vector(rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
    c1 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    c2 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        column, exists, at, mask = tile_from(first, start, valid, H, VECTOR, BLOCK_H)
        scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
        x = tl.load(total_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        dy = tl.load(dy_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        _, x_hat, scaled, _, _ = load_row_terms(
            dy, x, x_z_ptr, z_ptr, base, at, mask, exists, mean, rstd, scale, COMPUTE
        )
        c1 += scaled
        c2 = tl.fma(scaled, x_hat, c2)
    c1 = tl.sum(c1, axis=1) * (1.0 / H)  # (7)
    c2 = tl.sum(c2, axis=1) * (1.0 / H)  # (8)

    c1_ptr = rows_at(c1_ptr, "c1", group, rows, 1, SHARED, HEADS)
    if c1_ptr is not None:
        tl.store(c1_ptr + row, c1, mask=valid)
    c2_ptr = rows_at(c2_ptr, "c2", group, rows, 1, SHARED, HEADS)
    tl.store(c2_ptr + row, c2, mask=valid)


@triton.jit
def _add_norm_terms(
    dy, x_hat, scale, dscale, doffset, y_ptr, offset_ptr, at, mask, column, exists,
    SUMS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The norm's own sums over rows, and its output once more."""
    if y_ptr is not None:
        offset = load_offset(offset_ptr, column, exists, COMPUTE)
        y = affine(x_hat, scale, offset)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if contains(SUMS, "dscale"):
        dscale = tl.fma(dy, x_hat, dscale)  # (6)
    if contains(SUMS, "doffset"):
        doffset += dy  # (5)
    return dscale, doffset


@triton.jit
def backward_kernel(
    dy_ptr,  # [G, rows, H]
    dy2_ptr,  # [G, rows, H]; what is added to dy, where a row fits in BLOCK_H
    dy3_ptr,  # [G, rows, H]; likewise
    dtotal_ptr,  # [G, rows, H]
    total_ptr,  # [G, rows, H]; where there is none it is made of x, the residual, x_bias and the gate
    x_z_ptr,  # [G, rows, H]
    z_ptr,  # [G, rows, H]
    scale_ptr,  # [G, H]
    mean_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]; where there is none it is made again, as is mean: then a row fits in BLOCK_H
    offset_ptr,  # [G, H]; for y alone
    x_ptr,  # [G, rows, H]; for total, for the gate's gradient, and through a norm of x
    residual_ptr,  # [G, rows, H]; for total alone
    x_bias_ptr,  # [G, H]; for total, and for the gate's gradient
    gate_ptr,  # [G, H]
    x_scale_ptr,  # [G, H]
    x_rstd_ptr,  # [G, rows]; where x is normalised before it is added
    c1_ptr,  # [G, rows]
    c2_ptr,  # [G, rows]
    rows,
    groups,
    dx_ptr,  # [G, rows, H]
    dz_ptr,  # [G, rows, H]
    dx_z_ptr,  # [G, rows, H]
    dresidual_ptr,  # [G, rows, H]
    dscale_ptr,  # [G, H]; of a group's only program
    doffset_ptr,  # [G, H]; likewise
    dx_bias_ptr,  # [G, H]; likewise
    dgate_ptr,  # [G, H]; likewise
    dx_scale_ptr,  # [G, H]; likewise
    shares_ptr,  # [SUMS, G, programs, H]; where there are several
    y_ptr,  # [G, rows, H]
    H: tl.constexpr,
    HEADS: tl.constexpr,
    VECTOR: tl.constexpr,
    SHARED: tl.constexpr,
    SUMS: tl.constexpr,
    PULLS: tl.constexpr,
    EPSILON: tl.constexpr,
    TOTAL: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the wanted gradients of the operands, each program's shares of the SUMS, and the norm's output once more.

    The gradients are dx, dz and dresidual, the SUMS dscale, doffset, dx_bias, dgate and dx_scale; each is left out
    unless it is wanted. PULLS: whether any of them is made of total's cotangent. EPSILON and
    TOTAL, total's type, are None where total and its statistics are given.

    A program owns BLOCK_H columns and every `programs`-th tile of rows, and keeps its sums in registers. c1 and c2 come
    from the registers where a row fits in BLOCK_H, else from `row_sums_kernel`.
    """
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    chunk = tl.program_id(0) % chunks
    of_all = tl.num_programs(0) // chunks  # programs of all groups
    # No argument: given a 1, the compiler would know the loop's step, with which it spilled. A step of 0 had no end.
    programs = tl.maximum(of_all // groups, 1)
    group, program = group_of(tl.program_id(0) // chunks, programs, SHARED)
    dy_ptr = rows_at(dy_ptr, "dy", group, rows, H, SHARED, HEADS)
    dy2_ptr = rows_at(dy2_ptr, "dy2", group, rows, H, SHARED, HEADS)
    dy3_ptr = rows_at(dy3_ptr, "dy3", group, rows, H, SHARED, HEADS)
    total_ptr = rows_at(total_ptr, "total", group, rows, H, SHARED, HEADS)
    rstd_ptr = rows_at(rstd_ptr, "rstd", group, rows, 1, SHARED, HEADS)
    x_z_ptr = rows_at(x_z_ptr, "x_z", group, rows, H, SHARED, HEADS)
    z_ptr = rows_at(z_ptr, "z", group, rows, H, SHARED, HEADS)
    dtotal_ptr = rows_at(dtotal_ptr, "dtotal", group, rows, H, SHARED, HEADS)
    scale_ptr = columns_at(scale_ptr, "scale", group, H, SHARED, HEADS)
    mean_ptr = rows_at(mean_ptr, "mean", group, rows, 1, SHARED, HEADS)
    offset_ptr = columns_at(offset_ptr, "offset", group, H, SHARED, HEADS)
    c1_ptr = rows_at(c1_ptr, "c1", group, rows, 1, SHARED, HEADS)
    c2_ptr = rows_at(c2_ptr, "c2", group, rows, 1, SHARED, HEADS)
    x_ptr = rows_at(x_ptr, "x", group, rows, H, SHARED, HEADS)
    residual_ptr = rows_at(residual_ptr, "residual", group, rows, H, SHARED, HEADS)
    x_bias_ptr = columns_at(x_bias_ptr, "x_bias", group, H, SHARED, HEADS)
    gate_ptr = columns_at(gate_ptr, "gate", group, H, SHARED, HEADS)
    x_scale_ptr = columns_at(x_scale_ptr, "x_scale", group, H, SHARED, HEADS)
    x_rstd_ptr = rows_at(x_rstd_ptr, "x_rstd", group, rows, 1, SHARED, HEADS)
    dx_ptr = rows_at(dx_ptr, "dx", group, rows, H, SHARED, HEADS)
    dz_ptr = rows_at(dz_ptr, "dz", group, rows, H, SHARED, HEADS)
    dx_z_ptr = rows_at(dx_z_ptr, "dx_z", group, rows, H, SHARED, HEADS)
    dresidual_ptr = rows_at(dresidual_ptr, "dresidual", group, rows, H, SHARED, HEADS)
    y_ptr = rows_at(y_ptr, "y", group, rows, H, SHARED, HEADS)

    # What the program keeps over all its tiles.
    column, exists = columns_from(chunk * BLOCK_H, H, VECTOR, BLOCK_H)
    if x_rstd_ptr is None:
        scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    doffset = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    dx_bias = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    dgate = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    dx_scale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)

    for tile in tl.range(program, tiles_of(rows, BLOCK_ROWS), programs, num_stages=STAGES):
        row, base, start, valid = rows_of(tile, rows, H, BLOCK_ROWS, HEADS)
        at = start[:, None] + column[None, :]
        mask = valid[:, None] & exists[None, :]

        # The rows' statistics, and their sums where the tile does not hold all that they are of.
        mean = load_vector(mean_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        rstd = load_vector(rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        if PULLS and BLOCK_H < H:
            c1 = load_vector(c1_ptr, row, valid, BLOCK_ROWS, COMPUTE)
            c2 = load_vector(c2_ptr, row, valid, BLOCK_ROWS, COMPUTE)

        # What y is made of, which dscale and doffset are made of, too.
        if x_rstd_ptr is not None:  # held beside two norms, it would spill
            scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
        if total_ptr is not None:
            x = tl.load(total_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        else:
            x = load_total(
                x_ptr + base, x_z_ptr, residual_ptr + base, x_bias_ptr, gate_ptr, at, mask, column, exists,
                TOTAL, COMPUTE,
            )  # fmt: skip
        if rstd_ptr is None:  # as the forward kernel makes them
            if NORM.subtract_mean:
                mean = tl.sum(x, axis=1) * (1.0 / H)  # (1)
            rstd = rstd_of(tl.where(exists[None, :], x - mean[:, None], 0.0), H, EPSILON)  # (2)
        dy = tl.load(dy_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        if dy2_ptr is not None:
            dy += tl.load(dy2_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        if dy3_ptr is not None:
            dy += tl.load(dy3_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        dy, x_hat, scaled, u, of_dz = load_row_terms(
            dy, x, x_z_ptr, z_ptr, base, at, mask, exists, mean, rstd, scale, COMPUTE
        )
        if dz_ptr is not None:
            dz = of_dz * (x_hat * scale[None, :])  # (43)
            tl.store(dz_ptr + base + at, dz.to(dz_ptr.dtype.element_ty), mask=mask)

        if x_rstd_ptr is not None:  # dy and x_hat, held through the norm of x, would spill
            dscale, doffset = _add_norm_terms(
                dy, x_hat, scale, dscale, doffset, y_ptr, offset_ptr, base + at, mask, column, exists,
                SUMS, COMPUTE,
            )  # fmt: skip

        # The cotangent of total, and through the gate that of x.
        if PULLS:
            if BLOCK_H >= H:
                c1 = tl.sum(scaled, axis=1) * (1.0 / H)  # (7)
                c2 = tl.sum(scaled * x_hat, axis=1) * (1.0 / H)  # (8)
            dx = pull_back(scaled, x_hat, c1, c2, rstd, NORM)
            if H == 1 and NORM.subtract_mean:  # c1 is g: rounded by itself its product with rstd does not cancel
                dx = (scaled - c1[:, None]) * rstd[:, None]
            if dtotal_ptr is not None:
                dx += tl.load(dtotal_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
            if x_z_ptr is not None:
                if dx_z_ptr is not None:
                    tl.store(dx_z_ptr + base + at, (dx * of_dz).to(dx_z_ptr.dtype.element_ty), mask=mask)  # (44)
                dx *= u  # (44)
            if dresidual_ptr is not None:
                tl.store(dresidual_ptr + base + at, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)  # (24), (34)
            if x_rstd_ptr is not None:
                x_rstd = load_vector(x_rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
                u = tl.load(x_ptr + base + at, mask=mask, other=0.0).to(COMPUTE) * x_rstd[:, None]  # (32)
                if contains(SUMS, "dgate"):
                    branch = u * load_scale(x_scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)[None, :]
            elif x_ptr is not None:
                branch = load_branch(x_ptr + base, x_bias_ptr, at, mask, column, exists, COMPUTE)
            if contains(SUMS, "dgate"):
                dgate = tl.fma(dx, branch, dgate)  # (27)
            dx = apply_gate(dx, gate_ptr, column, exists, COMPUTE)
            if contains(SUMS, "dx_bias"):
                dx_bias += dx  # (26)

            # Through the norm of x.
            if x_rstd_ptr is not None:
                if contains(SUMS, "dx_scale"):
                    dx_scale = tl.fma(dx, u, dx_scale)  # (35)
                if dx_ptr is not None:
                    dx *= load_scale(x_scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)[None, :]
                    c = tl.sum(dx * u, axis=1) * (1.0 / H)
                    dx = tl.fma(dx, x_rstd[:, None], u * -(c * x_rstd)[:, None])  # (36)
            if dx_ptr is not None:
                tl.store(dx_ptr + base + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)

        if x_rstd_ptr is None:
            dscale, doffset = _add_norm_terms(
                dy, x_hat, scale, dscale, doffset, y_ptr, offset_ptr, base + at, mask, column, exists,
                SUMS, COMPUTE,
            )  # fmt: skip

    # The program's shares.
    at = (group * programs + program) * H + column
    store_sum(dscale, dscale_ptr, shares_ptr, at, exists, of_all, "dscale", SUMS, H)
    store_sum(doffset, doffset_ptr, shares_ptr, at, exists, of_all, "doffset", SUMS, H)
    store_sum(dx_bias, dx_bias_ptr, shares_ptr, at, exists, of_all, "dx_bias", SUMS, H)
    store_sum(dgate, dgate_ptr, shares_ptr, at, exists, of_all, "dgate", SUMS, H)
    store_sum(dx_scale, dx_scale_ptr, shares_ptr, at, exists, of_all, "dx_scale", SUMS, H)


@triton.jit
def _store_if(which, sum_ptr, at, total, exists, NAME: tl.constexpr, SUMS: tl.constexpr):
    if sum_ptr is not None:  # noqa: SIM102, as one is known to the compiler
        if which == position(SUMS, NAME):
            tl.store(sum_ptr + at, total.to(sum_ptr.dtype.element_ty), mask=exists)


@triton.jit
def reduce_kernel(
    shares_ptr,  # [SUMS, G, programs, H]
    groups,
    programs,
    dscale_ptr,  # [G, H]
    doffset_ptr,  # [G, H]
    dx_bias_ptr,  # [G, H]
    dgate_ptr,  # [G, H]
    dx_scale_ptr,  # [G, H]
    H: tl.constexpr,
    SUMS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add up the programs' shares of the sums in a fixed order; a sum, a group and BLOCK_H columns a program."""
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    which = (tl.program_id(0) // chunks // groups).to(tl.int64)
    group = (tl.program_id(0) // chunks % groups).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK_H + tl.arange(0, BLOCK_H)
    exists = column < H
    shares_ptr += (which * groups + group) * programs * H
    sum = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for first in range(0, programs, BLOCK_ROWS):
        program = first + tl.arange(0, BLOCK_ROWS)
        mask = (program < programs)[:, None] & exists[None, :]
        sum += tl.load(shares_ptr + program[:, None] * H + column[None, :], mask=mask, other=0.0)
    total = tl.sum(sum, axis=0)
    at = group * H + column
    _store_if(which, dscale_ptr, at, total, exists, "dscale", SUMS)
    _store_if(which, doffset_ptr, at, total, exists, "doffset", SUMS)
    _store_if(which, dx_bias_ptr, at, total, exists, "dx_bias", SUMS)
    _store_if(which, dgate_ptr, at, total, exists, "dgate", SUMS)
    _store_if(which, dx_scale_ptr, at, total, exists, "dx_scale", SUMS)
