"""Fused LayerNorm+Linear for few output features, backward: row sums, all gradients, and the sums of their shares.

Rows, operands and numbers in brackets are as in `jln._junction.kernels.with_linear`.
"""

import triton
import triton.language as tl

from jln._junction.kernels.addresses import (
    columns_at,
    contains,
    first_of,
    group_of,
    numbers,
    rows_of,
    tiles_of,
)
from jln._junction.kernels.row_terms import count, position, store_sum
from jln._junction.kernels.terms import affine, gated, load_matrix, load_offset, load_scale, load_vector, with_bias


@triton.jit
def row_sums_kernel(
    dy_ptr,  # [M, N]
    total_ptr,  # [M, H]
    scale_ptr,  # [G, H]
    kernel_ptr,  # [H, N]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
    rows,
    groups,
    programs,
    c1_ptr,  # [PARTS, M]
    c2_ptr,  # [PARTS, M]
    dbias_ptr,  # [programs, N]
    H: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute one of PARTS shares of c1 and c2 of every `programs`-th tile of rows, and the program's share of dbias.

    They are the direct sums over dz, which never leaves the registers.
    """
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    feature = tl.arange(0, BLOCK_N)
    dbias = tl.zeros([BLOCK_N], COMPUTE)
    all_rows = tl.cast(rows, tl.int64) * groups
    tiles = tiles_of(rows, BLOCK_ROWS)
    for tile in range(program, tiles * groups, programs):
        group, tile_of_group = group_of(tile, tiles, SHARED)
        row, base, start, valid = rows_of(tile_of_group, rows, H, BLOCK_ROWS)
        row += first_of(group, rows, 1)
        base += first_of(group, rows, H)
        _, base_of_dy, start_of_dy, _ = rows_of(tile_of_group, rows, N, BLOCK_ROWS)
        base_of_dy += first_of(group, rows, N)
        scale_of_group = columns_at(scale_ptr, "scale", group, H, SHARED)
        mean = load_vector(mean_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        rstd = load_vector(rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        dy = load_matrix(dy_ptr + base_of_dy, start_of_dy, valid, 0, N, BLOCK_N)
        if dbias_ptr is not None:
            dbias += tl.sum(dy.to(COMPUTE), axis=0)
        c1 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
        c2 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
        for first in tl.range(part * BLOCK_H, H, PARTS * BLOCK_H, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_H)
            exists = column < H
            x = load_matrix(total_ptr + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
            kernel = load_matrix(kernel_ptr, column * N, exists, 0, N, BLOCK_N)
            scale = load_scale(scale_of_group, column, exists, NORM, BLOCK_H, COMPUTE)
            scaled = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision=PRECISION) * scale[None, :]
            c1 += scaled
            # Masked, since outside -mean * rstd might overflow, and 0 * inf is NaN.
            c2 = tl.fma(scaled, tl.where(exists[None, :], (x - mean[:, None]) * rstd[:, None], 0.0), c2)
        if c1_ptr is not None:
            tl.store(c1_ptr + part * all_rows + row, tl.sum(c1, axis=1) * (1.0 / H), mask=valid)  # (7)
        tl.store(c2_ptr + part * all_rows + row, tl.sum(c2, axis=1) * (1.0 / H), mask=valid)  # (8)
    if dbias_ptr is not None:  # noqa: SIM102, as one is known to the compiler
        if part == 0:
            tl.store(dbias_ptr + program * N + feature, dbias, mask=feature < N)


# The most shares in which each sum over the columns of the kernel comes.
WEIGHT_SHARES = tl.constexpr(32)


@triton.jit
def row_sums_of_product_kernel(
    dy_ptr,  # [M, N]
    product_ptr,  # [M, N]
    weight_ptr,  # [G, SHARES, N]; None where no mean is subtracted
    rows,
    groups,
    programs,
    c1_ptr,  # [1, M]
    c2_ptr,  # [1, M]
    dbias_ptr,  # [programs, N]
    H: tl.constexpr,
    N: tl.constexpr,
    SHARES: tl.constexpr,
    SHARED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute what `row_sums_kernel` does, from the product that was kept: no x is read."""
    program = tl.program_id(0)
    feature = numbers(BLOCK_N, 4)
    dbias = tl.zeros([BLOCK_N], COMPUTE)
    tiles = tiles_of(rows, BLOCK_ROWS)
    for tile in range(program, groups * tiles, programs):
        group, tile_of_group = group_of(tile, tiles, SHARED)
        row, base, start, valid = rows_of(tile_of_group, rows, N, BLOCK_ROWS)
        row += first_of(group, rows, 1)
        base += first_of(group, rows, N)
        at = start[:, None] + feature[None, :]
        mask = valid[:, None] & (feature < N)[None, :]
        dy = tl.load(dy_ptr + base + at, mask=mask, other=0.0).to(COMPUTE)
        product = tl.load(product_ptr + base + at, mask=mask, other=0.0)
        if c1_ptr is not None:
            share = tl.arange(0, WEIGHT_SHARES)
            weight_of_group = columns_at(weight_ptr, "scale", group, SHARES * N, SHARED)
            weight = tl.sum(load_matrix(weight_of_group, share * N, share < SHARES, 0, N, BLOCK_N), axis=0)
            tl.store(c1_ptr + row, tl.sum(dy * weight[None, :], axis=1) * (1.0 / H), mask=valid)  # (38)
        tl.store(c2_ptr + row, tl.sum(dy * product, axis=1) * (1.0 / H), mask=valid)  # (39)
        dbias += tl.sum(dy, axis=0)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program * N + feature, dbias, mask=feature < N)


@triton.jit
def _add(sum, a, b):
    """A sum over rows with a tile of `a * b` added; it is held as one row, or as many as the tile has."""
    if sum.shape[0] == 1:
        a = a if b is None else a * b
        return sum + tl.sum(a, axis=0)[None, :]
    else:
        return sum + a if b is None else tl.fma(a, b, sum)


@triton.jit
def backward_kernel(
    dy_ptr,  # [M, N]
    dtotal_ptr,  # [M, H]
    total_ptr,  # [M, H]
    x_ptr,  # [M, H]; for the gates' gradients
    x_bias_ptr,  # [G, H]; likewise
    gate_ptr,  # [G, H]
    row_gate_ptr,  # [M]
    scale_ptr,  # [G, H]
    offset_ptr,  # [G, H]; where there are several groups
    kernel_ptr,  # [H, N]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
    c1_ptr,  # [PARTS, M]
    c2_ptr,  # [PARTS, M]
    rows,
    groups,
    splits,
    programs,
    dx_ptr,  # [M, H]
    dresidual_ptr,  # [M, H]
    drow_gate_ptr,  # [chunks, M]
    g_ptr,  # [splits, H, N]
    dscale_ptr,  # [G, H]; of a group's only program
    doffset_ptr,  # [G, H]; likewise
    dx_bias_ptr,  # [G, H]; likewise
    dgate_ptr,  # [G, H]; likewise
    shares_ptr,  # [SUMS, G, programs, H]; otherwise
    H: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    SUMS: tl.constexpr,
    PULLS: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx, dresidual, and a program's shares of the SUMS, of a row's gate's gradient and of G.

    A program owns BLOCK_H columns. `splits` of them share the rows: `programs` each group, of which they take every
    `splits // programs`-th. G is (21) of one group. Of several it is dkernel's own sum (13), as each has another scale,
    and doffset is a sum like dscale.
    """
    # Rows of shares: with more than one sum those of a tile would spill, and are added up at once.
    HELD: tl.constexpr = BLOCK_ROWS if count(SUMS) == 1 else 1
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    split = tl.program_id(0) // chunks
    first = tl.program_id(0) % chunks * BLOCK_H
    column = first + tl.arange(0, BLOCK_H)
    exists = column < H
    if kernel_ptr is not None:
        kernel = load_matrix(kernel_ptr, column * N, exists, 0, N, BLOCK_N)
    g = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    all_rows = tl.cast(rows, tl.int64) * groups
    first_group, end, step = 0, 1, 1  # constants, of a loop that is none to the compiler
    if SHARED is not None:
        first_group, end, step = split // programs, groups, splits // programs
    for group in range(first_group, end, step):
        group = tl.cast(group, tl.int64)
        x_bias_of_group = columns_at(x_bias_ptr, "x_bias", group, H, SHARED)
        gate_of_group = columns_at(gate_ptr, "gate", group, H, SHARED)
        scale_of_group = columns_at(scale_ptr, "scale", group, H, SHARED)
        offset_of_group = columns_at(offset_ptr, "offset", group, H, SHARED)
        scale = load_scale(scale_of_group, column, exists, NORM, BLOCK_H, COMPUTE)
        dscale = tl.zeros([HELD, BLOCK_H], COMPUTE)
        doffset = tl.zeros([HELD, BLOCK_H], COMPUTE)
        dx_bias = tl.zeros([HELD, BLOCK_H], COMPUTE)
        dgate = tl.zeros([HELD, BLOCK_H], COMPUTE)
        for tile in tl.range(split % programs, tiles_of(rows, BLOCK_ROWS), programs, num_stages=STAGES):
            row, base, start, valid = rows_of(tile, rows, H, BLOCK_ROWS)
            base += first_of(group, rows, H)
            row += first_of(group, rows, 1)
            mean = load_vector(mean_ptr, row, valid, BLOCK_ROWS, COMPUTE)
            rstd = load_vector(rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
            if PULLS:
                c1 = load_vector(c1_ptr, row, valid, BLOCK_ROWS, COMPUTE)
                c2 = load_vector(c2_ptr, row, valid, BLOCK_ROWS, COMPUTE)
                for part in tl.static_range(1, PARTS):
                    c1 += load_vector(c1_ptr, part * all_rows + row, valid, BLOCK_ROWS, COMPUTE)
                    c2 += load_vector(c2_ptr, part * all_rows + row, valid, BLOCK_ROWS, COMPUTE)
            x = load_matrix(total_ptr + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
            _, base_of_dy, start_of_dy, _ = rows_of(tile, rows, N, BLOCK_ROWS)
            base_of_dy += first_of(group, rows, N)
            dy = load_matrix(dy_ptr + base_of_dy, start_of_dy, valid, 0, N, BLOCK_N)
            x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)
            if g_ptr is not None:
                z = x_hat
                if SHARED is not None:
                    offset = load_offset(offset_of_group, column, exists, COMPUTE)
                    z = affine(x_hat, scale, offset)  # (10)
                g = tl.dot(tl.trans(z.to(dy.dtype)), dy, g, input_precision=PRECISION)  # (13), (21)
            if PULLS or contains(SUMS, "dscale") or contains(SUMS, "doffset"):
                dz = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision=PRECISION)  # (14)
            if PULLS:
                dx = tl.fma(x_hat, -(c2 * rstd)[:, None], -(c1 * rstd)[:, None])  # (17), its factor rstd inside
                dx = tl.fma(dz * scale[None, :], rstd[:, None], dx)  # (17)
                if H == 1 and mean_ptr is not None:  # 0, as in the norm's kernel; c1 may be of another order of sums
                    dx = (dz - tl.sum(dz, axis=1)[:, None]) * scale[None, :] * rstd[:, None]
                if dtotal_ptr is not None:
                    dx += load_matrix(dtotal_ptr + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
                at = start[:, None] + column[None, :]
                mask = valid[:, None] & exists[None, :]
                if dresidual_ptr is not None:
                    tl.store(dresidual_ptr + base + at, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)  # (24)
                if x_ptr is not None:
                    branch = load_matrix(x_ptr + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
                    branch = with_bias(branch, x_bias_of_group, column, exists, COMPUTE)
                if contains(SUMS, "dgate"):
                    dgate = _add(dgate, dx, branch)  # (27)
                if drow_gate_ptr is not None:
                    share = tl.sum(tl.where(exists[None, :], dx * branch, 0.0), axis=1)
                    tl.store(drow_gate_ptr + first // BLOCK_H * all_rows + row, share, mask=valid)  # (27)
                row_gate = load_vector(row_gate_ptr, row, valid, BLOCK_ROWS, COMPUTE)
                dx = gated(dx, gate_of_group, row_gate_ptr, row_gate, column, exists, COMPUTE)
                if contains(SUMS, "dx_bias"):
                    dx_bias = _add(dx_bias, dx, None)  # (26)
                if dx_ptr is not None:
                    tl.store(dx_ptr + base + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if contains(SUMS, "dscale"):
                dscale = _add(dscale, dz, x_hat)  # (16), both factors in float32
            if contains(SUMS, "doffset"):
                doffset = _add(doffset, dz, None)  # (15)
        at = (group * programs + split % programs) * H + column
        of_all = tl.cast(groups * programs, tl.int64)
        store_sum(dscale, dscale_ptr, shares_ptr, at, exists, of_all, "dscale", SUMS, H)
        store_sum(doffset, doffset_ptr, shares_ptr, at, exists, of_all, "doffset", SUMS, H)
        store_sum(dx_bias, dx_bias_ptr, shares_ptr, at, exists, of_all, "dx_bias", SUMS, H)
        store_sum(dgate, dgate_ptr, shares_ptr, at, exists, of_all, "dgate", SUMS, H)
    if g_ptr is not None:
        feature = tl.arange(0, BLOCK_N)
        at = (split.to(tl.int64) * H + column)[:, None] * N + feature[None, :]
        tl.store(g_ptr + at, g, mask=exists[:, None] & (feature < N)[None, :])


@triton.jit
def _load_shares(
    shares_ptr, split, splits, NAME: tl.constexpr, SUMS: tl.constexpr, H: tl.constexpr, BLOCK_H: tl.constexpr
):  # fmt: skip
    """A tile of one sum's shares, [splits, H], in the columns of the program."""
    shares_ptr += position(SUMS, NAME) * tl.cast(splits, tl.int64) * H
    return load_matrix(shares_ptr, split * H, split < splits, tl.program_id(0) * BLOCK_H, H, BLOCK_H)


@triton.jit
def parameters_kernel(
    g_partial_ptr,  # [splits, H, N]
    shares_ptr,  # [SUMS, splits, H]
    dbias_partial_ptr,  # [programs, N]
    scale_ptr,  # [H]; of one group
    offset_ptr,  # [H]; likewise
    kernel_ptr,  # [H, N]
    splits,
    programs,
    dkernel_ptr,  # [H, N]
    dscale_ptr,  # [H]
    doffset_ptr,  # [H]
    dx_bias_ptr,  # [H]
    dgate_ptr,  # [H]
    dbias_ptr,  # [N]
    H: tl.constexpr,
    N: tl.constexpr,
    SUMS: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the parameters' gradients of BLOCK_H rows of the kernel.

    Shares are added in a fixed order, BLOCK_ROWS at a time.
    """
    column = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    exists = column < H
    feature = tl.arange(0, BLOCK_N)
    at = column[:, None] * N + feature[None, :]
    mask = exists[:, None] & (feature < N)[None, :]
    g = tl.zeros([BLOCK_ROWS, BLOCK_H, BLOCK_N], COMPUTE)
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    dx_bias = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    dgate = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for first in range(0, splits, BLOCK_ROWS):
        split = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        there = split < splits
        if dkernel_ptr is not None:
            g += tl.load(
                g_partial_ptr + split[:, None, None] * (H * N) + at[None, :, :],
                mask=there[:, None, None] & mask[None, :, :],
                other=0.0,
            )
        if dscale_ptr is not None:
            dscale += _load_shares(shares_ptr, split, splits, "dscale", SUMS, H, BLOCK_H)
        if dx_bias_ptr is not None:
            dx_bias += _load_shares(shares_ptr, split, splits, "dx_bias", SUMS, H, BLOCK_H)
        if dgate_ptr is not None:
            dgate += _load_shares(shares_ptr, split, splits, "dgate", SUMS, H, BLOCK_H)
    if dscale_ptr is not None:
        tl.store(dscale_ptr + column, tl.sum(dscale, axis=0).to(dscale_ptr.dtype.element_ty), mask=exists)
    if dx_bias_ptr is not None:
        tl.store(dx_bias_ptr + column, tl.sum(dx_bias, axis=0).to(dx_bias_ptr.dtype.element_ty), mask=exists)
    if dgate_ptr is not None:
        tl.store(dgate_ptr + column, tl.sum(dgate, axis=0).to(dgate_ptr.dtype.element_ty), mask=exists)
    if dkernel_ptr is not None:
        scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
        dkernel = tl.sum(g, axis=0) * scale[:, None]  # (22)
    if dbias_partial_ptr is not None:
        shares: tl.constexpr = BLOCK_ROWS * BLOCK_H  # as many elements as of g
        dbias = tl.zeros([shares, BLOCK_N], COMPUTE)
        for first in range(0, programs, shares):
            program = first + tl.arange(0, shares)
            dbias += load_matrix(dbias_partial_ptr, program * N, program < programs, 0, N, BLOCK_N)
        total = tl.sum(dbias, axis=0)  # (12)
        if dbias_ptr is not None:  # noqa: SIM102, as one is known to the compiler
            if tl.program_id(0) == 0:
                tl.store(dbias_ptr + feature, total.to(dbias_ptr.dtype.element_ty), mask=feature < N)
        if doffset_ptr is not None:
            kernel = tl.load(kernel_ptr + at, mask=mask, other=0.0).to(COMPUTE)
            doffset = tl.sum(kernel * total[None, :], axis=1)  # (15)
            tl.store(doffset_ptr + column, doffset.to(doffset_ptr.dtype.element_ty), mask=exists)

    if dkernel_ptr is not None:
        if offset_ptr is not None:
            offset = load_vector(offset_ptr, column, exists, BLOCK_H, COMPUTE)
            dkernel = tl.fma(offset[:, None], total[None, :], dkernel)  # (22)
        tl.store(dkernel_ptr + at, dkernel.to(dkernel_ptr.dtype.element_ty), mask=mask)
