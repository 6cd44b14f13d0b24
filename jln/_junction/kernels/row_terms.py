"""Terms and sums of rows that backward kernels share: the norms' and the fused operators'.

The numbers in brackets are the equations of `jln._junction.formulas`.
"""

import triton
import triton.language as tl

from jln._junction.kernels.records import contains, position
from jln._junction.kernels.terms import affine, load_offset, load_silu


@triton.jit
def load_row_terms(a, dy, x, base, at, mask, exists, mean, rstd, scale, COMPUTE):
    """The terms dy, x_hat and dy * scale of a tile, 0 outside: there -mean * rstd might overflow, and 0 * inf is NaN.

    With z or x_z also its silu, and the factor of its gradient in (43) or (44). With z dy is then the cotangent of the
    norm's result.
    """
    u, of_dz = x, x
    if a.z is not None:
        u, of_dz = load_silu(a.z + base, at, mask, COMPUTE)
        of_dz *= dy
        dy *= u  # (42)
    if a.x_z is not None:
        u, of_dz = load_silu(a.x_z + base, at, mask, COMPUTE)
        of_dz *= x
        x *= u  # (41)
    x_hat = tl.where(exists[None, :], (x - mean[:, None]) * rstd[:, None], 0.0)  # (3)
    return dy, x_hat, dy * scale[None, :], u, of_dz


@triton.jit
def pull_back(scaled, x_hat, c1, c2, rstd, NORM):
    """Term (9), of what `load_row_terms` returns, its factor rstd inside."""
    d = x_hat * -(c2 * rstd)[:, None]  # (9)
    if NORM.subtract_mean:
        d = tl.fma(x_hat, -(c2 * rstd)[:, None], -(c1 * rstd)[:, None])  # (9)
    return tl.fma(scaled, rstd[:, None], d)  # (9)


@triton.jit
def add_norm_terms(a, d, dy, x_hat, scale, dscale, doffset, base, at, mask, column, exists, SUMS, COMPUTE):
    """The norm's own sums over rows, and its output once more."""
    if d.y is not None:
        y = affine(x_hat, scale, load_offset(a.offset, column, exists, COMPUTE))  # (4)
        # Added to d.y first, `base` would have Triton 3.6 spill 8 bytes in float32 beside x_bias and a gate.
        tl.store(d.y + (base + at), y.to(d.y.dtype.element_ty), mask=mask)
    if contains(SUMS, "scale"):
        dscale = tl.fma(dy, x_hat, dscale)  # (6)
    if contains(SUMS, "offset"):
        doffset += dy  # (5)
    return dscale, doffset


@triton.jit
def store_sum(sum, NAME, sum_ptr, shares_ptr, at, column, exists, programs_of_all_groups, SUMS, H):
    """Store a program's sum over its rows, if it is of the SUMS: in the result where it is all, else as a share."""
    if contains(SUMS, NAME):
        total = tl.sum(sum, axis=0)
        if shares_ptr is None:
            tl.store(sum_ptr + column, total.to(sum_ptr.dtype.element_ty), mask=exists)
        else:
            first = position(SUMS, NAME) * programs_of_all_groups.to(tl.int64) * H
            tl.store(shares_ptr + first + at, total, mask=exists)
