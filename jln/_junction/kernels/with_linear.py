"""Fused LayerNorm+Linear kernels for few output features: the norm never reaches memory.

A tile of rows is normalised in registers and multiplied on the tensor cores. N is at most BLOCK_N, so one program sees
all features of its rows. Operands of products have the promoted dtype of `x` and `kernel`, that of y; float32 ones are
multiplied as XLA's are by default, in TF32. Sums are float32.

The numbers in brackets are the equations of `jln._junction.formulas`, with dz [M, H] = dy @ kernel^T in place of
dy, and of `jln._junction.linears.formulas`. An array that is not there, and a result that
nobody wants, is None for the compiler.
"""

import triton
import triton.language as tl

from jln._junction.kernels.addresses import tiles_of
from jln._junction.kernels.terms import load_scale, load_vector


@triton.jit
def _rows(tile, rows, BLOCK_ROWS: tl.constexpr):
    """The row numbers of one tile, and which of the rows exist."""
    row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, row < rows


@triton.jit
def _load_matrix(
    matrix_ptr, row, row_exists, first, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """A tile of a matrix with COLUMNS columns, from the column `first` on; 0 outside."""
    column = first + tl.arange(0, BLOCK_COLUMNS)
    mask = row_exists[:, None] & (column < COLUMNS)[None, :]
    return tl.load(matrix_ptr + row[:, None] * COLUMNS + column[None, :], mask=mask, other=0.0)


@triton.jit
def forward_kernel(
    x_ptr,  # [M, H]
    residual_ptr,  # [M, H]
    scale_ptr,  # [H]
    offset_ptr,  # [H]
    kernel_ptr,  # [H, N]
    bias_ptr,  # [N]
    rows,
    y_ptr,  # [M, N]
    total_ptr,  # [M, H]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
    H: tl.constexpr,
    N: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
    TOTAL: tl.constexpr,
    BY_REGISTERS: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute y, total, mean and rstd, one tile of rows a program, from one read of x and of the residual.

    Chunk by chunk, x is normalised by the statistics of what has been seen of its row, this chunk included, and where
    they move the product so far is moved with them: for x_c and kernel_c the columns seen,

        product = unit * ((x_c - mean) * scale) @ kernel_c,    moved by -unit * step * weight when the mean steps,

    with weight = scale^T kernel_c. Nothing cancels, however large the mean or bad the first chunks' guess: the sum over
    all chunks of the squares that are rounded, (x - mean)^2, is at most the row's final one, since `squares` gains it
    and more. So the rounding is no worse than that of the normalised row. offset @ kernel stays out of the product, in
    float32, as a large one would take its digits. `unit` is rstd but for its limits, which keep it finite and not zero
    before a chunk of another size; it bounds an operand by sqrt(H) * |scale|, as in the reference.

    BY_REGISTERS: wgmma takes float32 operands along H only, so that a copy of the kernel straight from memory into that
      order is one of 4 bytes at a time, of a sector each. An addition in between, which the compiler cannot leave out
      as it turns -0 into 0, has it copied as it lies, 16 bytes at a time, and turned round in registers.
    """
    row, valid = _rows(tl.program_id(0), rows, BLOCK_ROWS)
    feature = tl.arange(0, BLOCK_N)
    mean = tl.zeros([BLOCK_ROWS], COMPUTE)
    squares = tl.zeros([BLOCK_ROWS], COMPUTE)
    unit = tl.full([BLOCK_ROWS], 1.0, COMPUTE)
    product = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
    weight = tl.zeros([BLOCK_N], COMPUTE)
    constant = load_vector(bias_ptr, feature, feature < N, BLOCK_N, COMPUTE)
    for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK_H)
        exists = column < H
        seen = tl.minimum(first + BLOCK_H, H).to(COMPUTE)
        x = _load_matrix(x_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
        if residual_ptr is not None:
            x += _load_matrix(residual_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
            total = x.to(TOTAL)  # the rounded sum is what is normalised
            if total_ptr is not None:
                mask = valid[:, None] & exists[None, :]
                tl.store(total_ptr + row[:, None] * H + column[None, :], total, mask=mask)
            x = total.to(COMPUTE)
        kernel = _load_matrix(kernel_ptr, column, exists, 0, N, BLOCK_N, BLOCK_H)
        scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
        if NORM.subtract_mean:
            count = seen - first
            step = (tl.sum(x, axis=1) / count - mean) * (count / seen)
            mean += step  # (1)
            squares += first * step * step
            x = tl.where(exists[None, :], x - mean[:, None], 0.0)  # else -mean, which might overflow: 0 * inf is NaN
            product = tl.fma(-(unit * step)[:, None], weight[None, :], product)
            weight += tl.sum(kernel.to(COMPUTE) * scale[:, None], axis=0)
        if offset_ptr is not None:
            offset = load_vector(offset_ptr, column, exists, BLOCK_H, COMPUTE)
            constant += tl.sum(kernel.to(COMPUTE) * offset[:, None], axis=0)
        squares += tl.sum(x * x, axis=1)
        before = unit
        unit = tl.rsqrt(tl.clamp(squares / seen + EPSILON, 1e-30, 1e30))
        product *= (unit / before)[:, None]
        z = x * unit[:, None] * scale[None, :]  # (10), of the columns so far
        operand: tl.constexpr = y_ptr.dtype.element_ty
        kernel = kernel.to(operand)
        if BY_REGISTERS:
            kernel += 0.0
        product = tl.dot(z.to(operand), kernel, product, input_precision=PRECISION)  # (11)

    rstd = tl.rsqrt(squares * (1.0 / H) + EPSILON)  # (2)
    y = tl.fma(product, (rstd / unit)[:, None], constant[None, :])  # (11)
    mask = valid[:, None] & (feature < N)[None, :]
    tl.store(y_ptr + row[:, None] * N + feature[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=valid)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, mask=valid)


@triton.jit
def row_sums_kernel(
    dy_ptr,  # [M, N]
    total_ptr,  # [M, H]
    scale_ptr,  # [H]
    kernel_ptr,  # [H, N]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
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

    They are the direct sums over dz, which never leaves the registers. Sums over dy and y would need y without bias and
    offset: in the rounded y of a large bias they drown, and another residual [M, N] would have to be kept.
    """
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    feature = tl.arange(0, BLOCK_N)
    dbias = tl.zeros([BLOCK_N], COMPUTE)
    for tile in range(program, tiles_of(rows, 1, BLOCK_ROWS), programs):
        row, valid = _rows(tile, rows, BLOCK_ROWS)
        mean = load_vector(mean_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        rstd = load_vector(rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        dy = _load_matrix(dy_ptr, row, valid, 0, N, BLOCK_N, BLOCK_ROWS)
        if dbias_ptr is not None:
            dbias += tl.sum(dy.to(COMPUTE), axis=0)
        c1 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
        c2 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
        for first in tl.range(part * BLOCK_H, H, PARTS * BLOCK_H, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_H)
            exists = column < H
            x = _load_matrix(total_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
            kernel = _load_matrix(kernel_ptr, column, exists, 0, N, BLOCK_N, BLOCK_H)
            scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
            scaled = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision=PRECISION) * scale[None, :]
            c1 += scaled
            # Masked, since outside -mean * rstd might overflow, and 0 * inf is NaN.
            c2 = tl.fma(scaled, tl.where(exists[None, :], (x - mean[:, None]) * rstd[:, None], 0.0), c2)
        if c1_ptr is not None:
            tl.store(c1_ptr + part * rows + row, tl.sum(c1, axis=1) * (1.0 / H), mask=valid)  # (7)
        tl.store(c2_ptr + part * rows + row, tl.sum(c2, axis=1) * (1.0 / H), mask=valid)  # (8)
    if dbias_ptr is not None:  # noqa: SIM102, as one is known to the compiler
        if part == 0:
            tl.store(dbias_ptr + program * N + feature, dbias, mask=feature < N)


@triton.jit
def backward_kernel(
    dy_ptr,  # [M, N]
    dtotal_ptr,  # [M, H]
    total_ptr,  # [M, H]
    scale_ptr,  # [H]
    kernel_ptr,  # [H, N]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
    c1_ptr,  # [PARTS, M]
    c2_ptr,  # [PARTS, M]
    rows,
    splits,
    dx_ptr,  # [M, H]
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
    """Compute dx, and a program's shares of G and dscale: of BLOCK_H columns and every `splits`-th tile of rows."""
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    first = tl.program_id(0) % chunks * BLOCK_H
    split = tl.program_id(0) // chunks
    column = first + tl.arange(0, BLOCK_H)
    exists = column < H
    if kernel_ptr is not None:
        kernel = _load_matrix(kernel_ptr, column, exists, 0, N, BLOCK_N, BLOCK_H)
    scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
    g = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for tile in tl.range(split, tiles_of(rows, 1, BLOCK_ROWS), splits, num_stages=STAGES):
        row, valid = _rows(tile, rows, BLOCK_ROWS)
        mean = load_vector(mean_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        rstd = load_vector(rstd_ptr, row, valid, BLOCK_ROWS, COMPUTE)
        if dx_ptr is not None:
            c1 = load_vector(c1_ptr, row, valid, BLOCK_ROWS, COMPUTE)
            c2 = load_vector(c2_ptr, row, valid, BLOCK_ROWS, COMPUTE)
            for part in tl.static_range(1, PARTS):
                c1 += load_vector(c1_ptr, part * rows + row, valid, BLOCK_ROWS, COMPUTE)
                c2 += load_vector(c2_ptr, part * rows + row, valid, BLOCK_ROWS, COMPUTE)
        x = _load_matrix(total_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
        dy = _load_matrix(dy_ptr, row, valid, 0, N, BLOCK_N, BLOCK_ROWS)
        x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)
        if g_ptr is not None:
            g = tl.dot(tl.trans(x_hat.to(dy.dtype)), dy, g, input_precision=PRECISION)  # (21)
        if dx_ptr is not None or dscale_ptr is not None:
            dz = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision=PRECISION)  # (14)
        if dx_ptr is not None:
            dx = tl.fma(x_hat, -(c2 * rstd)[:, None], -(c1 * rstd)[:, None])  # (17), its factor rstd inside
            dx = tl.fma(dz * scale[None, :], rstd[:, None], dx)  # (17)
            if H == 1 and mean_ptr is not None:  # 0, as in the norm's kernel; c1 may be of another order of sums
                dx = (dz - tl.sum(dz, axis=1)[:, None]) * scale[None, :] * rstd[:, None]
            if dtotal_ptr is not None:
                dx += _load_matrix(dtotal_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
            mask = valid[:, None] & exists[None, :]
            tl.store(dx_ptr + row[:, None] * H + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dscale_ptr is not None:
            dscale = tl.fma(dz, x_hat, dscale)  # (16), both factors in float32
    if g_ptr is not None:
        feature = tl.arange(0, BLOCK_N)
        at = (split.to(tl.int64) * H + column)[:, None] * N + feature[None, :]
        tl.store(g_ptr + at, g, mask=exists[:, None] & (feature < N)[None, :])
    if dscale_ptr is not None:
        tl.store(dscale_ptr + split.to(tl.int64) * H + column, tl.sum(dscale, axis=0), mask=exists)


@triton.jit
def parameters_kernel(
    g_partial_ptr,  # [splits, H, N]
    dscale_partial_ptr,  # [splits, H]
    dbias_partial_ptr,  # [programs, N]
    scale_ptr,  # [H]
    offset_ptr,  # [H]
    kernel_ptr,  # [H, N]
    splits,
    programs,
    dkernel_ptr,  # [H, N]
    dscale_ptr,  # [H]
    doffset_ptr,  # [H]
    dbias_ptr,  # [N]
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
    column = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    exists = column < H
    feature = tl.arange(0, BLOCK_N)
    at = column[:, None] * N + feature[None, :]
    mask = exists[:, None] & (feature < N)[None, :]
    g = tl.zeros([BLOCK_ROWS, BLOCK_H, BLOCK_N], COMPUTE)
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
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
            dscale += _load_matrix(dscale_partial_ptr, split, there, tl.program_id(0) * BLOCK_H, H, BLOCK_H, BLOCK_ROWS)
    if dscale_ptr is not None:
        tl.store(dscale_ptr + column, tl.sum(dscale, axis=0).to(dscale_ptr.dtype.element_ty), mask=exists)
    if dkernel_ptr is not None:
        scale = load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE)
        dkernel = tl.sum(g, axis=0) * scale[:, None]  # (22)
    if dbias_partial_ptr is not None:
        shares: tl.constexpr = BLOCK_ROWS * BLOCK_H  # as many elements as of g
        dbias = tl.zeros([shares, BLOCK_N], COMPUTE)
        for first in range(0, programs, shares):
            program = first + tl.arange(0, shares)
            dbias += _load_matrix(dbias_partial_ptr, program, program < programs, 0, N, BLOCK_N, shares)
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
