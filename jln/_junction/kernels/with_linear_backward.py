"""Fused LayerNorm+Linear for few output features, backward: row sums, all gradients, and the sums of their shares.

Operands and numbers in brackets are as in `jln._junction.kernels.with_linear`.
"""

import triton
import triton.language as tl

from jln._junction.arrays import Arrays
from jln._junction.kernels.addresses import rows_of, tiles_of
from jln._junction.kernels.terms import load_matrix, load_scale, load_vector


@triton.jit
def row_sums_kernel(
    a: Arrays,  # dy, total, scale, kernel, mean and rstd
    rows,
    programs,
    c1_ptr,  # [PARTS, M]
    c2_ptr,  # [PARTS, M]
    dbias_ptr,  # [programs, N]
    H: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
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
    of_part = part * tl.cast(rows, tl.int64)
    for tile in range(program, tiles_of(rows, BLOCK_ROWS), programs):
        row, base, start, valid = rows_of(tile, rows, H, BLOCK_ROWS)
        _, base_of_dy, start_of_dy, _ = rows_of(tile, rows, N, BLOCK_ROWS)
        mean = load_vector(a.mean, row, valid, BLOCK_ROWS, COMPUTE)
        rstd = load_vector(a.rstd, row, valid, BLOCK_ROWS, COMPUTE)
        dy = load_matrix(a.dy + base_of_dy, start_of_dy, valid, 0, N, BLOCK_N)
        if dbias_ptr is not None:
            dbias += tl.sum(dy.to(COMPUTE), axis=0)
        c1 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
        c2 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
        for first in tl.range(part * BLOCK_H, H, PARTS * BLOCK_H, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_H)
            exists = column < H
            x = load_matrix(a.total + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
            kernel = load_matrix(a.kernel, column * N, exists, 0, N, BLOCK_N)
            scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
            scaled = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision=PRECISION) * scale[None, :]
            c1 += scaled
            # Masked, since outside -mean * rstd might overflow, and 0 * inf is NaN.
            c2 = tl.fma(scaled, tl.where(exists[None, :], (x - mean[:, None]) * rstd[:, None], 0.0), c2)
        if c1_ptr is not None:
            tl.store(c1_ptr + of_part + row, tl.sum(c1, axis=1) * (1.0 / H), mask=valid)  # (7)
        tl.store(c2_ptr + of_part + row, tl.sum(c2, axis=1) * (1.0 / H), mask=valid)  # (8)
    if dbias_ptr is not None:  # noqa: SIM102, as one is known to the compiler
        if part == 0:
            tl.store(dbias_ptr + program * N + feature, dbias, mask=feature < N)


@triton.jit
def backward_kernel(
    a: Arrays,  # dy, dtotal, total, scale, kernel, mean and rstd
    c1_ptr,  # [PARTS, M]
    c2_ptr,  # [PARTS, M]
    rows,
    splits,
    d: Arrays,  # of x
    g_ptr,  # [splits, H, N]
    dscale_ptr,  # [splits, H]
    H: tl.constexpr,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute dx, and a program's shares of dscale and of G, each where it is wanted.

    A program owns BLOCK_H columns. `splits` of them share the rows.
    """
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    split = tl.program_id(0) // chunks
    first = tl.program_id(0) % chunks * BLOCK_H
    column = first + tl.arange(0, BLOCK_H)
    exists = column < H
    if a.kernel is not None:
        kernel = load_matrix(a.kernel, column * N, exists, 0, N, BLOCK_N)
    scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
    g = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for tile in tl.range(split, tiles_of(rows, BLOCK_ROWS), splits, num_stages=STAGES):
        row, base, start, valid = rows_of(tile, rows, H, BLOCK_ROWS)
        _, base_of_dy, start_of_dy, _ = rows_of(tile, rows, N, BLOCK_ROWS)
        mean = load_vector(a.mean, row, valid, BLOCK_ROWS, COMPUTE)
        rstd = load_vector(a.rstd, row, valid, BLOCK_ROWS, COMPUTE)
        x = load_matrix(a.total + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
        dy = load_matrix(a.dy + base_of_dy, start_of_dy, valid, 0, N, BLOCK_N)
        x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)
        if g_ptr is not None:
            g = tl.dot(tl.trans(x_hat.to(dy.dtype)), dy, g, input_precision=PRECISION)  # (21)
        if d.x is not None or dscale_ptr is not None:
            dz = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision=PRECISION)  # (14)
        if dscale_ptr is not None:
            dscale = tl.fma(dz, x_hat, dscale)  # (16), both factors in float32
        if d.x is not None:
            c1 = load_vector(c1_ptr, row, valid, BLOCK_ROWS, COMPUTE)
            c2 = load_vector(c2_ptr, row, valid, BLOCK_ROWS, COMPUTE)
            for part in tl.static_range(1, PARTS):
                of_part = part * tl.cast(rows, tl.int64)
                c1 += load_vector(c1_ptr, of_part + row, valid, BLOCK_ROWS, COMPUTE)
                c2 += load_vector(c2_ptr, of_part + row, valid, BLOCK_ROWS, COMPUTE)
            dx = tl.fma(x_hat, -(c2 * rstd)[:, None], -(c1 * rstd)[:, None])  # (17), its factor rstd inside
            dx = tl.fma(dz * scale[None, :], rstd[:, None], dx)  # (17)
            if H == 1 and a.mean is not None:  # 0, as in the norm's kernel; c1 may be of another order of sums
                dx = (dz - tl.sum(dz, axis=1)[:, None]) * scale[None, :] * rstd[:, None]
            if a.dtotal is not None:
                dx += load_matrix(a.dtotal + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
            mask = valid[:, None] & exists[None, :]
            tl.store(d.x + base + start[:, None] + column[None, :], dx.to(d.x.dtype.element_ty), mask=mask)
    if dscale_ptr is not None:
        tl.store(dscale_ptr + split * H + column, tl.sum(dscale, axis=0), mask=exists)
    if g_ptr is not None:
        feature = tl.arange(0, BLOCK_N)
        at = (split.to(tl.int64) * H + column)[:, None] * N + feature[None, :]
        tl.store(g_ptr + at, g, mask=exists[:, None] & (feature < N)[None, :])


@triton.jit
def parameters_kernel(
    g_partial_ptr,  # [splits, H, N]
    dscale_partial_ptr,  # [splits, H]
    dbias_partial_ptr,  # [programs, N]
    a: Arrays,  # scale, offset and kernel
    splits,
    programs,
    d: Arrays,  # of kernel, scale, offset and bias
    H: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute the parameters' gradients of BLOCK_H rows of the kernel.

    Shares are added in a fixed order, BLOCK_ROWS at a time.
    """
    first_column = tl.program_id(0) * BLOCK_H
    column = first_column + tl.arange(0, BLOCK_H)
    exists = column < H
    feature = tl.arange(0, BLOCK_N)
    at = column[:, None] * N + feature[None, :]
    mask = exists[:, None] & (feature < N)[None, :]
    g = tl.zeros([BLOCK_ROWS, BLOCK_H, BLOCK_N], COMPUTE)
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for first in range(0, splits, BLOCK_ROWS):
        split = first + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        there = split < splits
        if d.kernel is not None:
            g += tl.load(
                g_partial_ptr + split[:, None, None] * (H * N) + at[None, :, :],
                mask=there[:, None, None] & mask[None, :, :],
                other=0.0,
            )
        if d.scale is not None:
            dscale += load_matrix(dscale_partial_ptr, split * H, there, first_column, H, BLOCK_H)
    if d.scale is not None:
        tl.store(d.scale + column, tl.sum(dscale, axis=0).to(d.scale.dtype.element_ty), mask=exists)
    if d.kernel is not None:
        scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
        dkernel = tl.sum(g, axis=0) * scale[:, None]  # (22)
    if dbias_partial_ptr is not None:
        shares: tl.constexpr = BLOCK_ROWS * BLOCK_H  # as many elements as of g
        dbias = tl.zeros([shares, BLOCK_N], COMPUTE)
        for first in range(0, programs, shares):
            program = first + tl.arange(0, shares)
            dbias += load_matrix(dbias_partial_ptr, program * N, program < programs, 0, N, BLOCK_N)
        total = tl.sum(dbias, axis=0)  # (12)
        if d.bias is not None:  # noqa: SIM102, as one is known to the compiler
            if tl.program_id(0) == 0:
                tl.store(d.bias + feature, total.to(d.bias.dtype.element_ty), mask=feature < N)
        if d.offset is not None:
            kernel = tl.load(a.kernel + at, mask=mask, other=0.0).to(COMPUTE)
            doffset = tl.sum(kernel * total[None, :], axis=1)  # (15)
            tl.store(d.offset + column, doffset.to(d.offset.dtype.element_ty), mask=exists)
    if d.kernel is not None:
        if a.offset is not None:
            offset = load_vector(a.offset, column, exists, BLOCK_H, COMPUTE)
            dkernel = tl.fma(offset[:, None], total[None, :], dkernel)  # (22)
        tl.store(d.kernel + at, dkernel.to(d.kernel.dtype.element_ty), mask=mask)
