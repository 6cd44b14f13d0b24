"""Fused LayerNorm+Linear kernels for few output features: the norm never reaches memory.

A tile of rows is normalised in registers and multiplied on the tensor cores. N is at most BLOCK_N, so one program sees
all features of its rows. Operands of products have the dtype that `x` and `kernel` share, sums are float32.

The numbers in brackets are the equations of `jln._xla.layer_norm`, with dz [M, H] = dy @ kernel^T in place of dy, and
of DESIGN section 3: dkernel = scale * G + offset * dbias with G [H, N] = x_hat^T @ dy, and doffset = kernel @ dbias.
"""

import triton
import triton.language as tl

from jln._triton.layer_norm_kernels import _load_scale


@triton.jit
def _rows(tile, rows, BLOCK_ROWS: tl.constexpr):
    """The row numbers of one tile, and which of them exist."""
    row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return row, row < rows


@triton.jit
def _load_matrix(
    matrix_ptr, row, row_exists, first, COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """A tile of a matrix with COLUMNS columns, those from `first` on; 0 outside."""
    column = first + tl.arange(0, BLOCK_COLUMNS)
    mask = row_exists[:, None] & (column < COLUMNS)[None, :]
    return tl.load(matrix_ptr + row[:, None] * COLUMNS + column[None, :], mask=mask, other=0.0)


@triton.jit
def _load_vector(vector_ptr, at, exists, IS_GIVEN: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr):
    """Zeros where it is not given."""
    vector = tl.zeros([BLOCK], COMPUTE)
    if IS_GIVEN:
        vector = tl.load(vector_ptr + at, mask=exists, other=0.0).to(COMPUTE)
    return vector


@triton.jit
def forward_kernel(
    x_ptr,  # [M, H]
    scale_ptr,  # [H]
    offset_ptr,  # [H]
    kernel_ptr,  # [H, N]
    bias_ptr,  # [N]
    rows,
    y_ptr,  # [M, N]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
    H: tl.constexpr,
    N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    SAVE_STATISTICS: tl.constexpr,
    EPSILON: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y, mean and rstd of one tile of rows a program.

    The statistics take a pass of their own, as in the norms' kernel: shifting x by a guess and mending the product
    afterwards would save it, at the price of cancellation where the guess is bad. The second pass walks back, so
    that it meets first what L2 took in last.
    """
    row, valid = _rows(tl.program_id(0), rows, BLOCK_ROWS)
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    mean = tl.zeros([BLOCK_ROWS], COMPUTE)
    squares = tl.zeros([BLOCK_ROWS], COMPUTE)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        first = chunk * BLOCK_H
        x = _load_matrix(x_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
        if SUBTRACT_MEAN:
            count = tl.minimum(BLOCK_H, H - first).to(COMPUTE)
            chunk_mean = tl.sum(x, axis=1) / count
            exists = first + tl.arange(0, BLOCK_H) < H
            x = tl.where(exists[None, :], x - chunk_mean[:, None], 0.0)
            ahead = chunk_mean - mean
            share = count / (first + count)
            mean += ahead * share  # (1)
            squares += ahead * (ahead * (share * first))  # 0 in the first chunk, whatever its mean squared is
        squares += tl.sum(x * x, axis=1)
    rstd = tl.rsqrt(squares * (1.0 / H) + EPSILON)  # (2)

    product = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        first = (chunks - 1 - chunk) * BLOCK_H
        column = first + tl.arange(0, BLOCK_H)
        exists = column < H
        x = _load_matrix(x_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
        kernel = _load_matrix(kernel_ptr, column, exists, 0, N, BLOCK_N, BLOCK_H)
        scale = _load_scale(scale_ptr, column, exists, HAS_SCALE, ZERO_CENTERED, BLOCK_H, COMPUTE)
        offset = _load_vector(offset_ptr, column, exists, HAS_OFFSET, BLOCK_H, COMPUTE)
        z = (x - mean[:, None]) * rstd[:, None] * scale[None, :] + offset[None, :]  # (3), (4)
        product = tl.dot(z.to(kernel.dtype), kernel, product)

    feature = tl.arange(0, BLOCK_N)
    y = product + _load_vector(bias_ptr, feature, feature < N, HAS_BIAS, BLOCK_N, COMPUTE)[None, :]
    mask = valid[:, None] & (feature < N)[None, :]
    tl.store(y_ptr + row[:, None] * N + feature[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    if SAVE_STATISTICS:
        tl.store(rstd_ptr + row, rstd, mask=valid)
        if SUBTRACT_MEAN:
            tl.store(mean_ptr + row, mean, mask=valid)


@triton.jit
def row_sums_kernel(
    dy_ptr,  # [M, N]
    x_ptr,  # [M, H]
    scale_ptr,  # [H]
    kernel_ptr,  # [H, N]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
    rows,
    programs,
    c1_ptr,  # [M]
    c2_ptr,  # [M]
    dbias_ptr,  # [programs, N]
    H: tl.constexpr,
    N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WANTS_DBIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """c1 and c2 of every `programs`-th tile of rows, and the program's share of dbias.

    The direct sums over dz, which never leaves the registers. Those over dy and y need y without bias and offset: in
    the rounded y of a large bias they drown, and another residual [M, N] would have to be kept.
    """
    feature = tl.arange(0, BLOCK_N)
    dbias = tl.zeros([BLOCK_N], COMPUTE)
    for tile in range(tl.program_id(0), (rows + BLOCK_ROWS - 1) // BLOCK_ROWS, programs):
        row, valid = _rows(tile, rows, BLOCK_ROWS)
        mean = _load_vector(mean_ptr, row, valid, SUBTRACT_MEAN, BLOCK_ROWS, COMPUTE)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        dy = _load_matrix(dy_ptr, row, valid, 0, N, BLOCK_N, BLOCK_ROWS)
        if WANTS_DBIAS:
            dbias += tl.sum(dy.to(COMPUTE), axis=0)
        c1 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
        c2 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
        for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
            column = first + tl.arange(0, BLOCK_H)
            exists = column < H
            x = _load_matrix(x_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
            kernel = _load_matrix(kernel_ptr, column, exists, 0, N, BLOCK_N, BLOCK_H)
            scale = _load_scale(scale_ptr, column, exists, HAS_SCALE, ZERO_CENTERED, BLOCK_H, COMPUTE)
            scaled = tl.dot(dy, tl.trans(kernel)) * scale[None, :]
            c1 += scaled
            c2 += scaled * ((x - mean[:, None]) * rstd[:, None])
        if SUBTRACT_MEAN:
            tl.store(c1_ptr + row, tl.sum(c1, axis=1) * (1.0 / H), mask=valid)  # (7)
        tl.store(c2_ptr + row, tl.sum(c2, axis=1) * (1.0 / H), mask=valid)  # (8)
    if WANTS_DBIAS:
        tl.store(dbias_ptr + tl.program_id(0) * N + feature, dbias, mask=feature < N)


@triton.jit
def backward_kernel(
    dy_ptr,  # [M, N]
    x_ptr,  # [M, H]
    scale_ptr,  # [H]
    kernel_ptr,  # [H, N]
    mean_ptr,  # [M]
    rstd_ptr,  # [M]
    c1_ptr,  # [M]
    c2_ptr,  # [M]
    rows,
    splits,
    dx_ptr,  # [M, H]
    g_ptr,  # [splits, H, N]
    dscale_ptr,  # [splits, H]
    H: tl.constexpr,
    N: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx, and the program's share of G and dscale: it owns BLOCK_H columns and every `splits`-th tile of rows."""
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    first = tl.program_id(0) % chunks * BLOCK_H
    split = tl.program_id(0) // chunks
    column = first + tl.arange(0, BLOCK_H)
    exists = column < H
    kernel = _load_matrix(kernel_ptr, column, exists, 0, N, BLOCK_N, BLOCK_H)
    scale = _load_scale(scale_ptr, column, exists, HAS_SCALE, ZERO_CENTERED, BLOCK_H, COMPUTE)
    g = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for tile in tl.range(split, (rows + BLOCK_ROWS - 1) // BLOCK_ROWS, splits, num_stages=STAGES):
        row, valid = _rows(tile, rows, BLOCK_ROWS)
        mean = _load_vector(mean_ptr, row, valid, SUBTRACT_MEAN, BLOCK_ROWS, COMPUTE)
        rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
        c1 = _load_vector(c1_ptr, row, valid, SUBTRACT_MEAN, BLOCK_ROWS, COMPUTE)
        c2 = tl.load(c2_ptr + row, mask=valid, other=0.0)
        x = _load_matrix(x_ptr, row, valid, first, H, BLOCK_H, BLOCK_ROWS).to(COMPUTE)
        dy = _load_matrix(dy_ptr, row, valid, 0, N, BLOCK_N, BLOCK_ROWS)
        x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)
        g = tl.dot(tl.trans(x_hat.to(dy.dtype)), dy, g)
        dz = tl.dot(dy, tl.trans(kernel))
        dx = rstd[:, None] * (dz * scale[None, :] - c1[:, None] - x_hat * c2[:, None])  # (9)
        mask = valid[:, None] & exists[None, :]
        tl.store(dx_ptr + row[:, None] * H + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if HAS_SCALE:
            dscale += dz * x_hat  # (6), both factors in float32
    feature = tl.arange(0, BLOCK_N)
    at = (split.to(tl.int64) * H + column)[:, None] * N + feature[None, :]
    tl.store(g_ptr + at, g, mask=exists[:, None] & (feature < N)[None, :])
    if HAS_SCALE:
        tl.store(dscale_ptr + split * H + column, tl.sum(dscale, axis=0), mask=exists)


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
    HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The parameters' gradients of BLOCK_H rows of the kernel, all shares added in a fixed order."""
    column = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    exists = column < H
    feature = tl.arange(0, BLOCK_N)
    at = column[:, None] * N + feature[None, :]
    mask = exists[:, None] & (feature < N)[None, :]
    g = tl.zeros([BLOCK_H, BLOCK_N], COMPUTE)
    dscale = tl.zeros([BLOCK_H], COMPUTE)
    for split in range(splits):
        g += tl.load(g_partial_ptr + tl.cast(split, tl.int64) * (H * N) + at, mask=mask, other=0.0)
        if HAS_SCALE:
            dscale += tl.load(dscale_partial_ptr + split * H + column, mask=exists, other=0.0)
    scale = _load_scale(scale_ptr, column, exists, HAS_SCALE, ZERO_CENTERED, BLOCK_H, COMPUTE)
    g *= scale[:, None]
    if HAS_OFFSET or HAS_BIAS:
        dbias = tl.zeros([BLOCK_ROWS, BLOCK_N], COMPUTE)
        for first in range(0, programs, BLOCK_ROWS):
            program = first + tl.arange(0, BLOCK_ROWS)
            dbias += _load_matrix(dbias_partial_ptr, program, program < programs, 0, N, BLOCK_N, BLOCK_ROWS)
        total = tl.sum(dbias, axis=0)
        if HAS_BIAS:  # noqa: SIM102, as one is known to the compiler
            if tl.program_id(0) == 0:
                tl.store(dbias_ptr + feature, total.to(dbias_ptr.dtype.element_ty), mask=feature < N)
        if HAS_OFFSET:
            offset = tl.load(offset_ptr + column, mask=exists, other=0.0).to(COMPUTE)
            g += offset[:, None] * total[None, :]
            kernel = tl.load(kernel_ptr + at, mask=mask, other=0.0).to(COMPUTE)
            doffset = tl.sum(kernel * total[None, :], axis=1)
            tl.store(doffset_ptr + column, doffset.to(doffset_ptr.dtype.element_ty), mask=exists)
    tl.store(dkernel_ptr + at, g.to(dkernel_ptr.dtype.element_ty), mask=mask)
    if HAS_SCALE:
        tl.store(dscale_ptr + column, dscale.to(dscale_ptr.dtype.element_ty), mask=exists)
