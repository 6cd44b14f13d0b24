"""Fused LayerNorm+Linear for few output features, forward: the norm never reaches memory.

A tile of rows is normalised in registers and multiplied on the tensor cores. N is at most BLOCK_N, so one program sees
all features of its rows. Operands of the product have the promoted dtype of `x` and `kernel`, that of y; float32 ones
are multiplied as XLA's are by default, in TF32. Sums are float32.

The numbers in brackets are the equations of `jln._junction.formulas`, with dz [M, H] = dy @ kernel^T in place of dy,
and of `jln._junction.linears.formulas`. An array that is not there, and a result that nobody wants, is None for the
compiler.
"""

import triton
import triton.language as tl

from jln._junction.arrays import Arrays
from jln._junction.kernels.addresses import rows_of
from jln._junction.kernels.terms import load_matrix, load_scale, load_vector


@triton.jit
def forward_kernel(
    a: Arrays,  # x, residual, scale, offset, kernel and bias
    rows,
    r: Arrays,  # y, total, mean and rstd
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
    """Compute y, total, mean and rstd, one tile of rows a program, from one read of x and residual.

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
    row, base, start, valid = rows_of(tl.program_id(0), rows, H, BLOCK_ROWS)
    feature = tl.arange(0, BLOCK_N)
    mean = tl.zeros([BLOCK_ROWS], COMPUTE)
    squares = tl.zeros([BLOCK_ROWS], COMPUTE)
    unit = tl.full([BLOCK_ROWS], 1.0, COMPUTE)
    product = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
    weight = tl.zeros([BLOCK_N], COMPUTE)
    constant = load_vector(a.bias, feature, feature < N, BLOCK_N, COMPUTE)
    for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK_H)
        exists = column < H
        seen = tl.minimum(first + BLOCK_H, H).to(COMPUTE)
        x = load_matrix(a.x + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
        if a.residual is not None:
            x += load_matrix(a.residual + base, start, valid, first, H, BLOCK_H).to(COMPUTE)
            total = x.to(TOTAL)  # (23)
            if r.total is not None:
                mask = valid[:, None] & exists[None, :]
                tl.store(r.total + base + start[:, None] + column[None, :], total, mask=mask)
            x = total.to(COMPUTE)
        kernel = load_matrix(a.kernel, column * N, exists, 0, N, BLOCK_N)
        scale = load_scale(a.scale, column, exists, NORM, BLOCK_H, COMPUTE)
        if NORM.subtract_mean:
            count = seen - first
            step = (tl.sum(x, axis=1) / count - mean) * (count / seen)
            mean += step  # (1)
            squares += first * step * step
            x = tl.where(exists[None, :], x - mean[:, None], 0.0)  # else -mean, which might overflow: 0 * inf is NaN
            product = tl.fma(-(unit * step)[:, None], weight[None, :], product)
            weight += tl.sum(kernel.to(COMPUTE) * scale[:, None], axis=0)
        if a.offset is not None:
            offset = load_vector(a.offset, column, exists, BLOCK_H, COMPUTE)
            constant += tl.sum(kernel.to(COMPUTE) * offset[:, None], axis=0)
        squares += tl.sum(x * x, axis=1)
        before = unit
        unit = tl.rsqrt(tl.clamp(squares / seen + EPSILON, 1e-30, 1e30))
        product *= (unit / before)[:, None]
        z = x * unit[:, None] * scale[None, :]  # (10), of the columns so far
        operand: tl.constexpr = r.y.dtype.element_ty
        kernel = kernel.to(operand)
        if BY_REGISTERS:
            kernel += 0.0
        product = tl.dot(z.to(operand), kernel, product, input_precision=PRECISION)  # (11)

    rstd = tl.rsqrt(squares * (1.0 / H) + EPSILON)  # (2)
    y = tl.fma(product, (rstd / unit)[:, None], constant[None, :])  # (11)
    _, base, start, _ = rows_of(tl.program_id(0), rows, N, BLOCK_ROWS)
    mask = valid[:, None] & (feature < N)[None, :]
    tl.store(r.y + base + start[:, None] + feature[None, :], y.to(r.y.dtype.element_ty), mask=mask)
    if r.rstd is not None:
        tl.store(r.rstd + row, rstd, mask=valid)
    if r.mean is not None:
        tl.store(r.mean + row, mean, mask=valid)
