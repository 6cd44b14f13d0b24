"""LayerNorm and RMSNorm kernels, with or without a residual: one text for the family, switched by constexprs.

Every kernel sees `x` as `[G, rows, H]`. A row's elements lie `INNER` apart: 1 when the normalised axis is the last
one; otherwise rows that differ in the axes behind it are neighbours in memory, and a tile takes `BLOCK_ROWS` of these.
`G` counts the groups that vmap put in front; bit i of SHARED is set where operand i has one copy for all groups.

The numbers in brackets are the equations of `jln._xla.layer_norm`.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(tile, rows, H: tl.constexpr, INNER: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The rows of one tile: their numbers, the offsets of their first elements, and which of them exist."""
    if INNER == 1:
        row = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        return row, row * H, row < rows
    else:
        tiles: tl.constexpr = (INNER + BLOCK_ROWS - 1) // BLOCK_ROWS
        outer = tl.cast(tile // tiles, tl.int64)
        inner = tl.cast(tile % tiles, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        return outer * INNER + inner, outer * (H * INNER) + inner, inner < INNER


@triton.jit
def _tiles(rows, INNER: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """How many tiles a group has. A tile never crosses the axes in front of the normalised one.

    A grid has less than 2**31 programs, whatever the number of rows, which comes as uint32 or int64 from 2**31 on.
    """
    if INNER == 1:
        return tl.cast((rows - 1) // BLOCK_ROWS + 1, tl.int32)
    else:
        return tl.cast(rows // INNER * ((INNER + BLOCK_ROWS - 1) // BLOCK_ROWS), tl.int32)


@triton.jit
def _size(rows, H: tl.constexpr, INNER: tl.constexpr):
    """The elements of a group, as a product from which the compiler sees what they are a multiple of: it loads no wider
    than that allows.
    """
    return tl.cast(rows // INNER, tl.int64) * (H * INNER)


@triton.jit
def _columns(first, H: tl.constexpr, INNER: tl.constexpr, BLOCK_H: tl.constexpr):
    """Column numbers from `first` on, their offsets in a row, and which of them exist."""
    column = first + tl.arange(0, BLOCK_H)
    if H * INNER >= 2**31:
        return column, column.to(tl.int64) * INNER, column < H
    else:
        return column, column * INNER, column < H


@triton.jit
def _group(group, SHARED: tl.constexpr, OPERAND: tl.constexpr):
    """The group whose copy of an operand to read."""
    if (SHARED >> OPERAND) & 1:
        return group * 0
    else:
        return group


@triton.jit
def _load_scale(
    scale_ptr, column, exists,
    HAS_SCALE: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The factor of every column; 1 where there is no scale."""
    scale = tl.full([BLOCK_H], 1.0, COMPUTE)
    if HAS_SCALE:
        given = tl.load(scale_ptr + column, mask=exists, other=0.0).to(COMPUTE)
        scale = scale + given if ZERO_CENTERED else given
    return scale


@triton.jit
def _load_total(x_ptr, residual_ptr, total_ptr, at, mask, HAS_RESIDUAL: tl.constexpr, COMPUTE: tl.constexpr):
    """What is normalised: x, or x + residual rounded to the type in which it is returned."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + at, mask=mask, other=0.0).to(COMPUTE)
        x = (x + residual).to(total_ptr.dtype.element_ty).to(COMPUTE)
    return x


@triton.jit
def _normalise(
    x, mean, rstd, scale_ptr, offset_ptr, column, exists,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    scale = _load_scale(scale_ptr, column, exists, HAS_SCALE, ZERO_CENTERED, BLOCK_H, COMPUTE)
    x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)
    return _affine(x_hat, scale, offset_ptr, column, exists, HAS_OFFSET, COMPUTE)


@triton.jit
def _affine(x_hat, scale, offset_ptr, column, exists, HAS_OFFSET: tl.constexpr, COMPUTE: tl.constexpr):
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + column, mask=exists, other=0.0).to(COMPUTE)
        return tl.fma(x_hat, scale[None, :], offset[None, :])  # (4)
    else:
        return x_hat * scale[None, :]


@triton.jit
def _add(total, excess, term):
    """total + term, and by how much it is too large, which the next term takes along (Kahan, 1965)."""
    term -= excess
    new = total + term
    return new, (new - total) - term


@triton.jit
def forward_kernel(
    x_ptr,  # [G, rows, H]
    residual_ptr,  # [G, rows, H]
    scale_ptr,  # [G, H]
    offset_ptr,  # [G, H]
    rows,
    y_ptr,  # [G, rows, H]
    total_ptr,  # [G, rows, H]
    mean_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]
    H: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WANTS_Y: tl.constexpr,
    WANTS_TOTAL: tl.constexpr,
    SAVE_STATISTICS: tl.constexpr,
    EPSILON: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """y, total, mean and rstd of one tile of rows a program.

    A row that fits in BLOCK_H stays in registers and is read once. A wider one is taken chunk by chunk, twice, the
    second read being served by L2; every chunk has its own two-pass mean and sum of squares, and the chunks' are
    merged by the formula of Chan, Golub and LeVeque (1979), which loses nothing when the mean is large; nor do the
    thousands of chunks that rows side by side may have, by compensated sums.
    """
    tiles = _tiles(rows, INNER, BLOCK_ROWS)
    group = (tl.program_id(0) // tiles).to(tl.int64)
    row, start, valid = _tile(tl.program_id(0) % tiles, rows, H, INNER, BLOCK_ROWS)
    size = _size(rows, H, INNER)
    x_ptr += _group(group, SHARED, 0) * size
    residual_ptr += _group(group, SHARED, 1) * size
    scale_ptr += _group(group, SHARED, 2) * H
    offset_ptr += _group(group, SHARED, 3) * H
    y_ptr += group * size
    total_ptr += group * size

    mean = tl.zeros([BLOCK_ROWS], COMPUTE)
    if BLOCK_H >= H:
        column, step, exists = _columns(0, H, INNER, BLOCK_H)
        at = start[:, None] + step[None, :]
        mask = valid[:, None] & exists[None, :]
        x = _load_total(x_ptr, residual_ptr, total_ptr, at, mask, HAS_RESIDUAL, COMPUTE)
        if SUBTRACT_MEAN:
            mean = tl.sum(x, axis=1) * (1.0 / H)  # (1)
        centred = tl.where(mask, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) * (1.0 / H) + EPSILON)  # (2)
        if WANTS_TOTAL:
            tl.store(total_ptr + at, x.to(total_ptr.dtype.element_ty), mask=mask)
        if WANTS_Y:
            y = _normalise(
                x, mean, rstd, scale_ptr, offset_ptr, column, exists,
                HAS_SCALE, HAS_OFFSET, ZERO_CENTERED, BLOCK_H, COMPUTE,
            )  # fmt: skip
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([BLOCK_ROWS], COMPUTE)
        mean_excess, squares_excess = squares, squares
        for first in range(0, H, BLOCK_H):
            column, step, exists = _columns(first, H, INNER, BLOCK_H)
            at = start[:, None] + step[None, :]
            mask = valid[:, None] & exists[None, :]
            x = _load_total(x_ptr, residual_ptr, total_ptr, at, mask, HAS_RESIDUAL, COMPUTE)
            more = tl.zeros([BLOCK_ROWS], COMPUTE)
            if SUBTRACT_MEAN:
                count = tl.minimum(BLOCK_H, H - first).to(COMPUTE)
                chunk_mean = tl.sum(x, axis=1) / count
                x = tl.where(mask, x - chunk_mean[:, None], 0.0)
                ahead = chunk_mean - mean + mean_excess
                share = count / (first + count)
                mean, mean_excess = _add(mean, mean_excess, ahead * share)
                more = ahead * (ahead * (share * first))  # 0 in the first chunk, whatever its mean squared is
            squares, squares_excess = _add(squares, squares_excess, more + tl.sum(x * x, axis=1))
        rstd = tl.rsqrt(squares * (1.0 / H) + EPSILON)
        for first in range(0, H, BLOCK_H):
            column, step, exists = _columns(first, H, INNER, BLOCK_H)
            at = start[:, None] + step[None, :]
            mask = valid[:, None] & exists[None, :]
            x = _load_total(x_ptr, residual_ptr, total_ptr, at, mask, HAS_RESIDUAL, COMPUTE)
            if WANTS_TOTAL:
                tl.store(total_ptr + at, x.to(total_ptr.dtype.element_ty), mask=mask)
            if WANTS_Y:
                y = _normalise(
                    x, mean, rstd, scale_ptr, offset_ptr, column, exists,
                    HAS_SCALE, HAS_OFFSET, ZERO_CENTERED, BLOCK_H, COMPUTE,
                )  # fmt: skip
                tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)

    if SAVE_STATISTICS:
        tl.store(rstd_ptr + group * rows + row, rstd, mask=valid)
        if SUBTRACT_MEAN:
            tl.store(mean_ptr + group * rows + row, mean, mask=valid)


@triton.jit
def _load_row_terms(dy_ptr, total_ptr, at, mask, mean, rstd, scale, COMPUTE: tl.constexpr):
    """dy, x_hat and dy * scale of a tile, 0 outside: there -mean * rstd might overflow, and 0 * inf is NaN."""
    x = tl.load(total_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(COMPUTE)
    return dy, tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0), dy * scale[None, :]


@triton.jit
def _load_statistics(
    mean_ptr, rstd_ptr, row, valid, SUBTRACT_MEAN: tl.constexpr, BLOCK_ROWS: tl.constexpr, COMPUTE: tl.constexpr
):
    mean = tl.zeros([BLOCK_ROWS], COMPUTE)
    if SUBTRACT_MEAN:
        mean = tl.load(mean_ptr + row, mask=valid, other=0.0)
    return mean, tl.load(rstd_ptr + row, mask=valid, other=0.0)


@triton.jit
def _row_sums(
    dy_ptr, total_ptr, scale_ptr, start, valid, mean, rstd,
    H: tl.constexpr, INNER: tl.constexpr, HAS_SCALE: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """c1 and c2 of rows wider than BLOCK_H."""
    c1 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    c2 = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for first in range(0, H, BLOCK_H):
        column, step, exists = _columns(first, H, INNER, BLOCK_H)
        at = start[:, None] + step[None, :]
        mask = valid[:, None] & exists[None, :]
        scale = _load_scale(scale_ptr, column, exists, HAS_SCALE, ZERO_CENTERED, BLOCK_H, COMPUTE)
        _, x_hat, scaled = _load_row_terms(dy_ptr, total_ptr, at, mask, mean, rstd, scale, COMPUTE)
        c1 += scaled
        c2 = tl.fma(scaled, x_hat, c2)
    return tl.sum(c1, axis=1) * (1.0 / H), tl.sum(c2, axis=1) * (1.0 / H)  # (7), (8)


@triton.jit
def row_sums_kernel(
    dy_ptr,  # [G, rows, H]
    total_ptr,  # [G, rows, H]
    scale_ptr,  # [G, H]
    mean_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]
    rows,
    c1_ptr,  # [G, rows]
    c2_ptr,  # [G, rows]
    H: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """c1 and c2 of one tile of rows a program, for rows too wide for `backward_kernel` to add up itself."""
    tiles = _tiles(rows, INNER, BLOCK_ROWS)
    group = (tl.program_id(0) // tiles).to(tl.int64)
    row, start, valid = _tile(tl.program_id(0) % tiles, rows, H, INNER, BLOCK_ROWS)
    size = _size(rows, H, INNER)
    mean, rstd = _load_statistics(
        mean_ptr + _group(group, SHARED, 3) * rows, rstd_ptr + _group(group, SHARED, 4) * rows,
        row, valid, SUBTRACT_MEAN, BLOCK_ROWS, COMPUTE,
    )  # fmt: skip
    c1, c2 = _row_sums(
        dy_ptr + _group(group, SHARED, 0) * size, total_ptr + _group(group, SHARED, 1) * size,
        scale_ptr + _group(group, SHARED, 2) * H, start, valid, mean, rstd,
        H, INNER, HAS_SCALE, ZERO_CENTERED, COMPUTE, BLOCK_ROWS, BLOCK_H,
    )  # fmt: skip
    if SUBTRACT_MEAN:
        tl.store(c1_ptr + group * rows + row, c1, mask=valid)
    tl.store(c2_ptr + group * rows + row, c2, mask=valid)


@triton.jit
def backward_kernel(
    dy_ptr,  # [G, rows, H]
    dtotal_ptr,  # [G, rows, H]
    total_ptr,  # [G, rows, H]
    scale_ptr,  # [G, H]
    mean_ptr,  # [G, rows]
    rstd_ptr,  # [G, rows]
    offset_ptr,  # [G, H]
    c1_ptr,  # [G, rows]
    c2_ptr,  # [G, rows]
    rows,
    programs,
    dx_ptr,  # [G, rows, H]
    dscale_ptr,  # [G, programs, H]; ONE_BUFFER: [2, G, programs, H], doffset's second
    doffset_ptr,  # [G, programs, H]
    y_ptr,  # [G, rows, H]
    H: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_DTOTAL: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    WANTS_DX: tl.constexpr,
    WANTS_DSCALE: tl.constexpr,
    WANTS_DOFFSET: tl.constexpr,
    WANTS_Y: tl.constexpr,
    ONE_BUFFER: tl.constexpr,
    SUBTRACT_MEAN: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of dx, each program's share of dscale and of doffset, and the norm's output once more what is wanted.

    A program owns BLOCK_H columns and every `programs`-th tile of rows, and keeps its sums in registers. c1 and c2
    come from the registers where a row fits in BLOCK_H; from a look at the whole row where a few programs share one
    (HAS_SUMS unset; what the neighbour reads too comes from L2); from `row_sums_kernel` where many do.
    """
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    chunk = tl.program_id(0) % chunks
    program = tl.program_id(0) // chunks % programs
    group = (tl.program_id(0) // chunks // programs).to(tl.int64)
    size = _size(rows, H, INNER)
    dy_ptr += _group(group, SHARED, 0) * size
    dtotal_ptr += _group(group, SHARED, 1) * size
    total_ptr += _group(group, SHARED, 2) * size
    scale_ptr += _group(group, SHARED, 3) * H
    mean_ptr += _group(group, SHARED, 4) * rows
    rstd_ptr += _group(group, SHARED, 5) * rows
    offset_ptr += _group(group, SHARED, 6) * H
    c1_ptr += group * rows
    c2_ptr += group * rows
    dx_ptr += group * size
    y_ptr += group * size
    column, step, exists = _columns(chunk * BLOCK_H, H, INNER, BLOCK_H)
    if BLOCK_H >= H:
        scale = _load_scale(scale_ptr, column, exists, HAS_SCALE, ZERO_CENTERED, BLOCK_H, COMPUTE)

    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    doffset = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for tile in tl.range(program, _tiles(rows, INNER, BLOCK_ROWS), programs, num_stages=STAGES):
        row, start, valid = _tile(tile, rows, H, INNER, BLOCK_ROWS)
        at = start[:, None] + step[None, :]
        mask = valid[:, None] & exists[None, :]
        mean, rstd = _load_statistics(mean_ptr, rstd_ptr, row, valid, SUBTRACT_MEAN, BLOCK_ROWS, COMPUTE)
        if HAS_SUMS:
            c1, c2 = _load_statistics(c1_ptr, c2_ptr, row, valid, SUBTRACT_MEAN, BLOCK_ROWS, COMPUTE)
        elif WANTS_DX and BLOCK_H < H:
            c1, c2 = _row_sums(
                dy_ptr, total_ptr, scale_ptr, start, valid, mean, rstd,
                H, INNER, HAS_SCALE, ZERO_CENTERED, COMPUTE, BLOCK_ROWS, BLOCK_H,
            )  # fmt: skip
        if BLOCK_H < H:  # held through `_row_sums` it would spill
            scale = _load_scale(scale_ptr, column, exists, HAS_SCALE, ZERO_CENTERED, BLOCK_H, COMPUTE)
        dy, x_hat, scaled = _load_row_terms(dy_ptr, total_ptr, at, mask, mean, rstd, scale, COMPUTE)
        if WANTS_DX:
            if BLOCK_H >= H:
                c1 = tl.sum(scaled, axis=1) * (1.0 / H)  # (7)
                c2 = tl.sum(scaled * x_hat, axis=1) * (1.0 / H)  # (8)
            dx = x_hat * -(c2 * rstd)[:, None]  # (9), its factor rstd inside
            if SUBTRACT_MEAN:
                dx = tl.fma(x_hat, -(c2 * rstd)[:, None], -(c1 * rstd)[:, None])
            dx = tl.fma(scaled, rstd[:, None], dx)
            if HAS_DTOTAL:
                dx += tl.load(dtotal_ptr + at, mask=mask, other=0.0).to(COMPUTE)
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANTS_Y:
            y = _affine(x_hat, scale, offset_ptr, column, exists, HAS_OFFSET, COMPUTE)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
        if WANTS_DSCALE:
            dscale = tl.fma(dy, x_hat, dscale)  # (6)
        if WANTS_DOFFSET:
            doffset += dy  # (5)

    partial = (group * programs + program) * H + column
    if WANTS_DSCALE:
        tl.store(dscale_ptr + partial, tl.sum(dscale, axis=0).to(dscale_ptr.dtype.element_ty), mask=exists)
    if WANTS_DOFFSET:
        if ONE_BUFFER:
            doffset_ptr = dscale_ptr + (tl.num_programs(0) // chunks).to(tl.int64) * H
        tl.store(doffset_ptr + partial, tl.sum(doffset, axis=0).to(doffset_ptr.dtype.element_ty), mask=exists)


@triton.jit
def reduce_kernel(
    dscale_partial_ptr,  # [G, programs, H]; ONE_BUFFER: [2, G, programs, H], doffset's second
    doffset_partial_ptr,  # [G, programs, H]
    programs,
    dscale_ptr,  # [G, H]
    doffset_ptr,  # [G, H]
    H: tl.constexpr,
    WANTS_DSCALE: tl.constexpr,
    WANTS_DOFFSET: tl.constexpr,
    ONE_BUFFER: tl.constexpr,
    COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The programs' shares of dscale and doffset, added in a fixed order."""
    chunks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    if ONE_BUFFER:
        doffset_partial_ptr = dscale_partial_ptr + (tl.num_programs(0) // chunks).to(tl.int64) * programs * H
    group = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK_H + tl.arange(0, BLOCK_H)
    exists = column < H
    dscale = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    doffset = tl.zeros([BLOCK_ROWS, BLOCK_H], COMPUTE)
    for first in range(0, programs, BLOCK_ROWS):
        program = first + tl.arange(0, BLOCK_ROWS)
        at = (group * programs + program)[:, None] * H + column[None, :]
        mask = (program < programs)[:, None] & exists[None, :]
        if WANTS_DSCALE:
            dscale += tl.load(dscale_partial_ptr + at, mask=mask, other=0.0)
        if WANTS_DOFFSET:
            doffset += tl.load(doffset_partial_ptr + at, mask=mask, other=0.0)
    if WANTS_DSCALE:
        total = tl.sum(dscale, axis=0).to(dscale_ptr.dtype.element_ty)
        tl.store(dscale_ptr + group * H + column, total, mask=exists)
    if WANTS_DOFFSET:
        total = tl.sum(doffset, axis=0).to(doffset_ptr.dtype.element_ty)
        tl.store(doffset_ptr + group * H + column, total, mask=exists)
