"""Terms of a tile that several kernels load or make: forward and backward, of the norms and of the fused operators.

The numbers in brackets are the equations of `jln._junction.formulas`.
"""

import triton
import triton.language as tl


@triton.jit
def widen(a, COMPUTE):
    """`a` in the compute dtype.

    By bits, two elements of bfloat16 in a register take an instruction each, where conversions take three; but not
    those that come from shared memory, as what a loop reads ahead.
    """
    if a.dtype == tl.bfloat16:
        a = (a.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return a.to(COMPUTE)


@triton.jit
def load_scale(scale_ptr, column, exists, NORM, BLOCK_H, COMPUTE):
    """The factor of every column; 1 where there is no scale."""
    scale = tl.full([BLOCK_H], 1.0, COMPUTE)
    if scale_ptr is not None:
        given = tl.load(scale_ptr + column, mask=exists, other=0.0).to(COMPUTE)
        scale = scale + given if NORM.zero_centered_scale else given
    return scale


@triton.jit
def load_vector(vector_ptr, at, exists, BLOCK, COMPUTE):
    """The elements of a vector at `at`, in the compute dtype; zeros where there is no vector."""
    vector = tl.zeros([BLOCK], COMPUTE)
    if vector_ptr is not None:
        vector = tl.load(vector_ptr + at, mask=exists, other=0.0).to(COMPUTE)
    return vector


@triton.jit
def load_matrix(matrix_ptr, start, row_exists, first, COLUMNS, BLOCK_COLUMNS):
    """A tile of a matrix with COLUMNS columns, from the column `first` on; 0 outside. start: where its rows start."""
    column = first + tl.arange(0, BLOCK_COLUMNS)
    mask = row_exists[:, None] & (column < COLUMNS)[None, :]
    return tl.load(matrix_ptr + start[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_branch(a, base, at, mask, column, exists, COMPUTE):
    """The branch that is gated: a tile of x plus its bias."""
    x = widen(tl.load(a.x + base + at, mask=mask, other=0.0), COMPUTE)
    if a.x_bias is not None:
        x += tl.load(a.x_bias + column, mask=exists, other=0.0).to(COMPUTE)[None, :]
    return x


@triton.jit
def apply_gate(a, gate_ptr, column, exists, COMPUTE):
    """Term (25): `a` times the gate."""
    if gate_ptr is not None:
        a *= tl.load(gate_ptr + column, mask=exists, other=0.0).to(COMPUTE)[None, :]  # (25)
    return a


@triton.jit
def load_silu(z_ptr, at, mask, COMPUTE):
    """Term (40): silu of z, and its derivative."""
    z = widen(tl.load(z_ptr + at, mask=mask, other=0.0), COMPUTE)
    share = 1.0 / (1.0 + tl.exp(-z))
    u = z * share
    return u, tl.fma(u, 1.0 - share, share)  # (40)


@triton.jit
def load_total(a, base, at, mask, column, exists, TOTAL, COMPUTE):
    """The rows that are normalised: x, or (41), or (23) rounded to the type in which it is returned."""
    x = load_branch(a, base, at, mask, column, exists, COMPUTE)
    if a.residual is not None:
        x = apply_gate(x, a.gate, column, exists, COMPUTE)
        residual = widen(tl.load(a.residual + base + at, mask=mask, other=0.0), COMPUTE)
        x = (x + residual).to(TOTAL).to(COMPUTE)  # (23)
    if a.x_z is not None:
        u, _ = load_silu(a.x_z + base, at, mask, COMPUTE)
        x *= u  # (41)
    return x


@triton.jit
def rstd_of(centred, H, EPSILON):
    """The rstd of rows in a tile, of what the mean leaves of them: 0 where there is no column."""
    return tl.rsqrt(tl.sum(centred * centred, axis=1) * (1.0 / H) + EPSILON)  # (2), (31)


@triton.jit
def load_total_of_normed(a, base, at, mask, column, exists, H, NORM, EPSILON, TOTAL, COMPUTE, BLOCK_H):
    """The rows that are normalised where x is so before it is added, and the rstd of x."""
    x = widen(tl.load(a.x + base + at, mask=mask, other=0.0), COMPUTE)
    x_rstd = rstd_of(x, H, EPSILON)  # (31)
    x_scale = load_scale(a.x_scale, column, exists, NORM, BLOCK_H, COMPUTE)
    residual = widen(tl.load(a.residual + base + at, mask=mask, other=0.0), COMPUTE)
    u = x * x_rstd[:, None]  # (32)
    if a.gate is None:
        total = tl.fma(u, x_scale[None, :], residual)  # (33)
    else:
        branch = u * x_scale[None, :]
        total = apply_gate(branch, a.gate, column, exists, COMPUTE) + residual  # (33)
    return total.to(TOTAL).to(COMPUTE), x_rstd


@triton.jit
def load_offset(offset_ptr, column, exists, COMPUTE):
    """The offset of every column, [1, BLOCK_H]; None where there is no offset."""
    if offset_ptr is not None:
        offset = tl.load(offset_ptr + column, mask=exists, other=0.0).to(COMPUTE)[None, :]
        return offset


@triton.jit
def affine(x_hat, scale, offset):
    """Term (4), of an offset as `load_offset` returns it."""
    if offset is None:
        return x_hat * scale[None, :]
    else:
        return tl.fma(x_hat, scale[None, :], offset)  # (4)


@triton.jit
def normed(a, x_hat, scale, offset, base, at, mask, COMPUTE):
    """The norm's result y, of a tile of x_hat: (4), with (42) and (30)."""
    y = affine(x_hat, scale, offset)
    if a.z is not None:
        u, _ = load_silu(a.z + base, at, mask, COMPUTE)
        y *= u  # (42)
    if a.added is not None:
        added = tl.load(a.added + base + at, mask=mask, other=0.0)
        y = y + (widen(added, COMPUTE) if added.dtype == tl.bfloat16 else added)  # (30), in the wider type
    return y
