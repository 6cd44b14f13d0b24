"""The norms' backward kernels: row sums of wide rows, all gradients, and the sum of what programs share of them.

Records and rows are as in `jln._junction.kernels.forward`. `d` is the record of gradients: that of `a.x` is `d.x`.
The numbers in brackets are the equations of `jln._junction.formulas`.
"""

import triton
import triton.language as tl

from jln._junction.arrays import Arrays
from jln._junction.kernels.addresses import columns_from, first_of, group_of, rows_of, tile_from, tiles_of
from jln._junction.kernels.records import FIELDS, NAMES, contains, item, place, position
from jln._junction.kernels.row_terms import add_norm_terms, load_row_terms, pull_back, store_sum
from jln._junction.kernels.terms import apply_gate, load_branch, load_scale, load_total, load_vector, rstd_of


@triton.jit
def row_sums_kernel(
    a: Arrays,  # dy, total, x_z, z, scale, mean and rstd
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
    for i in tl.static_range(FIELDS):  # each pointer to its group's part
        if a[i] is not None:
            a = Arrays(*a[:i], place(a[i], i, group, rows, H, SHARED, HEADS), *a[i + 1 :])

    mean = load_vector(a.mean, row, valid, BLOCK_ROWS, COMPUTE)
    rstd = load_vector(a.rstd, row, valid, BLOCK_ROWS, COMPUTE)
    c1 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    c2 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        column, exists, at, mask = tile_from(first, start, valid, H, VECTOR, BLOCK_H)
        scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
        x = tl.load(a.total + base + at, mask=mask, other=0.0).to(COMPUTE)
        dy = tl.load(a.dy + base + at, mask=mask, other=0.0).to(COMPUTE)
        _, x_hat, scaled, _, _ = load_row_terms(a, dy, x, base, at, mask, exists, mean, rstd, scale, COMPUTE)
        c1 += scaled
        c2 = tl.fma(scaled, x_hat, c2)

    first_row = first_of(group, rows, 1, HEADS)
    if c1_ptr is not None:
        tl.store(c1_ptr + first_row + row, tl.sum(c1, axis=1) * (1.0 / H), mask=valid)  # (7)
    tl.store(c2_ptr + first_row + row, tl.sum(c2, axis=1) * (1.0 / H), mask=valid)  # (8)


@triton.jit
def backward_kernel(
    a: Arrays,  # the operands, what was kept of the forward pass, and cotangents
    c1_ptr,  # [G, rows]
    c2_ptr,  # [G, rows]
    rows,
    groups,
    d: Arrays,  # the gradients, and y once more; those that are SUMS are of a group's only program
    shares_ptr,  # [SUMS, G, programs, H]; the SUMS, where there are several
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

    The SUMS are over rows: the gradients of scale, offset, x_bias, gate and x_scale. PULLS: whether any gradient is
    made of total's cotangent. EPSILON and TOTAL, total's type, are None where total and its statistics are given. Where
    they are not, they are made again of what they are made of, and then a row fits in BLOCK_H. So it does where
    cotangents are added to dy.

    A program owns BLOCK_H columns and every `programs`-th tile of rows, and keeps its sums in registers. c1 and c2 come
    from the registers where a row fits in BLOCK_H, else from `row_sums_kernel`.
    """
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    chunk = tl.program_id(0) % chunks
    of_all = tl.num_programs(0) // chunks  # programs of all groups
    # No argument: given a 1, the compiler would know the loop's step, with which it spilled. A step of 0 had no end.
    programs = tl.maximum(of_all // groups, 1)
    group, program = group_of(tl.program_id(0) // chunks, programs, SHARED)
    for i in tl.static_range(FIELDS):  # each pointer to its group's part
        if a[i] is not None:
            a = Arrays(*a[:i], place(a[i], i, group, rows, H, SHARED, HEADS), *a[i + 1 :])
        if d[i] is not None:
            d = Arrays(*d[:i], place(d[i], i, group, rows, H, None, HEADS), *d[i + 1 :])

    # What the program keeps over all its tiles.
    column, exists = columns_from(chunk * BLOCK_H, H, VECTOR, BLOCK_H)
    if a.x_rstd is None:
        scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
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
        mean = load_vector(a.mean, row, valid, BLOCK_ROWS, COMPUTE)
        rstd = load_vector(a.rstd, row, valid, BLOCK_ROWS, COMPUTE)
        if PULLS and BLOCK_H < H:
            first_row = first_of(group, rows, 1, HEADS)
            c2 = load_vector(c2_ptr + first_row, row, valid, BLOCK_ROWS, COMPUTE)
            c1 = c2  # of RMSNorm nobody reads it
            if c1_ptr is not None:
                c1 = load_vector(c1_ptr + first_row, row, valid, BLOCK_ROWS, COMPUTE)

        # What y is made of, which dscale and doffset are made of, too.
        if a.x_rstd is not None:  # held beside two norms, it would spill
            scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
        if a.total is not None:
            x = tl.load(a.total + base + at, mask=mask, other=0.0).to(COMPUTE)
        else:
            x = load_total(a, base, at, mask, column, exists, TOTAL, COMPUTE)
        if a.rstd is None:  # as the forward kernel makes them
            if NORM.subtract_mean:
                mean = tl.sum(x, axis=1) * (1.0 / H)  # (1)
            rstd = rstd_of(tl.where(exists[None, :], x - mean[:, None], 0.0), H, EPSILON)  # (2)
        dy = tl.load(a.dy + base + at, mask=mask, other=0.0).to(COMPUTE)
        if a.dy2 is not None:
            dy += tl.load(a.dy2 + base + at, mask=mask, other=0.0).to(COMPUTE)
        if a.dy3 is not None:
            dy += tl.load(a.dy3 + base + at, mask=mask, other=0.0).to(COMPUTE)
        dy, x_hat, scaled, u, of_dz = load_row_terms(a, dy, x, base, at, mask, exists, mean, rstd, scale, COMPUTE)
        if d.z is not None:
            dz = of_dz * (x_hat * scale[None, :])  # (43)
            tl.store(d.z + base + at, dz.to(d.z.dtype.element_ty), mask=mask)
        if a.x_rstd is not None:  # dy and x_hat, held through the norm of x, would spill
            dscale, doffset = add_norm_terms(
                a, d, dy, x_hat, scale, dscale, doffset, base, at, mask, column, exists, SUMS, COMPUTE
            )

        # The cotangent of total, and through the gate that of x.
        if PULLS:
            if BLOCK_H >= H:
                c1 = tl.sum(scaled, axis=1) * (1.0 / H)  # (7)
                c2 = tl.sum(scaled * x_hat, axis=1) * (1.0 / H)  # (8)
            dx = pull_back(scaled, x_hat, c1, c2, rstd, NORM)
            if H == 1 and NORM.subtract_mean:  # c1 is g: rounded by itself its product with rstd does not cancel
                dx = (scaled - c1[:, None]) * rstd[:, None]
            if a.dtotal is not None:
                dx += tl.load(a.dtotal + base + at, mask=mask, other=0.0).to(COMPUTE)
            if a.x_z is not None:
                if d.x_z is not None:
                    tl.store(d.x_z + base + at, (dx * of_dz).to(d.x_z.dtype.element_ty), mask=mask)  # (44)
                dx *= u  # (44)
            if d.residual is not None:
                tl.store(d.residual + base + at, dx.to(d.residual.dtype.element_ty), mask=mask)  # (24), (34)
            if a.x_rstd is not None:
                x_rstd = load_vector(a.x_rstd, row, valid, BLOCK_ROWS, COMPUTE)
                u = tl.load(a.x + base + at, mask=mask, other=0.0).to(COMPUTE) * x_rstd[:, None]  # (32)
                if contains(SUMS, "gate"):
                    branch = u * load_scale(a.x_scale, column, exists, NORM, BLOCK_H, COMPUTE)[None, :]
            elif a.x is not None:
                branch = load_branch(a, base, at, mask, column, exists, COMPUTE)
            if contains(SUMS, "gate"):
                dgate = tl.fma(dx, branch, dgate)  # (27)
            dx = apply_gate(dx, a.gate, column, exists, COMPUTE)
            if contains(SUMS, "x_bias"):
                dx_bias += dx  # (26)

            # Through the norm of x.
            if a.x_rstd is not None:
                if contains(SUMS, "x_scale"):
                    dx_scale = tl.fma(dx, u, dx_scale)  # (35)
                if d.x is not None:
                    dx *= load_scale(a.x_scale, column, exists, NORM, BLOCK_H, COMPUTE)[None, :]
                    c = tl.sum(dx * u, axis=1) * (1.0 / H)
                    dx = tl.fma(dx, x_rstd[:, None], u * -(c * x_rstd)[:, None])  # (36)
            if d.x is not None:
                tl.store(d.x + base + at, dx.to(d.x.dtype.element_ty), mask=mask)

        if a.x_rstd is None:
            dscale, doffset = add_norm_terms(
                a, d, dy, x_hat, scale, dscale, doffset, base, at, mask, column, exists, SUMS, COMPUTE
            )

    # The program's shares, or where it is the only one of its group, the sums.
    at = (group * programs + program) * H + column
    store_sum(dscale, "scale", d.scale, shares_ptr, at, column, exists, of_all, SUMS, H)
    store_sum(doffset, "offset", d.offset, shares_ptr, at, column, exists, of_all, SUMS, H)
    store_sum(dx_bias, "x_bias", d.x_bias, shares_ptr, at, column, exists, of_all, SUMS, H)
    store_sum(dgate, "gate", d.gate, shares_ptr, at, column, exists, of_all, SUMS, H)
    store_sum(dx_scale, "x_scale", d.x_scale, shares_ptr, at, column, exists, of_all, SUMS, H)


@triton.jit
def reduce_kernel(
    shares_ptr,  # [SUMS, G, programs, H]
    groups,
    programs,
    d: Arrays,  # the gradients that are SUMS
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
    for i in tl.static_range(FIELDS):
        if d[i] is not None:  # noqa: SIM102, as one is known to the compiler
            if which == position(SUMS, item(NAMES, i)):
                tl.store(d[i] + at, total.to(d[i].dtype.element_ty), mask=exists)
