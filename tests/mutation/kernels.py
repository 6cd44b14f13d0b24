"""Ways to break the kernels."""

from targets import (
    ABUSE,
    ACCESS,
    ACCURACY,
    BACKWARD,
    CHUNKS,
    CHUNKS_ADD,
    COMPOSED,
    COPY,
    FORWARD,
    FROZEN,
    FUSED_KERNELS,
    GROUPS,
    LINEAR,
    LINEAR_BACKWARD,
    LINEARS,
    MANY_TILES,
    NORM_TILES,
    OPERATORS,
    RECORDS,
    ROW_TERMS,
    TERMS,
    TRANSFORMED,
    WHOLE,
    Mutant,
    first_part_of,
    shared_as_dy,
)

COMPILED = "tests/triton/test_compiler.py::"

KERNELS = [
    # The norms' kernels
    Mutant("a row too many", ACCESS, "local < left", "local <= left", WHOLE),
    Mutant(
        "what a sum of chunks loses", FORWARD, "return new, (new - total) - term", "return new, 0.0 * term",
        (f"{ACCURACY}test_rows_of_many_chunks[triton-layer_norm]",),
    ),
    Mutant("a column too many", ACCESS, "return column, column < H", "return column, column <= H", WHOLE),
    Mutant(
        "a shared operand taken for a group's own", RECORDS,
        "return group % HEADS if contains(SHARED, NAME) else group", "return group", GROUPS,
    ),
    Mutant(
        "scale not zero-centered", TERMS, "scale + given if NORM.zero_centered_scale else given", "given",
        (f"{ACCURACY}test_optional_arguments[triton-layer_norm-no offset-zero-centered]",),
    ),
    Mutant(
        "the sum not rounded before it is normed", TERMS,
        "(x + residual).to(TOTAL).to(COMPUTE)", "x + residual",
        ("tests/operators/test_rounded_sum.py::test_it_is_what_is_returned_that_is_normed[add_layer_norm-triton-jitted]",),
    ),
    Mutant(
        "y without the mean subtracted", FORWARD,
        "x_hat = (x - mean[:, None]) * rstd[:, None]  # (3)", "x_hat = x * rstd[:, None]", WHOLE,
    ),
    Mutant(
        "y without the offset", TERMS,
        "return tl.fma(x_hat, scale[None, :], offset)", "return x_hat * scale[None, :]", WHOLE,
    ),
    Mutant(
        "mean over the tile's width", FORWARD,
        "mean = tl.sum(x, axis=1) * (1.0 / H)  # (1)", "mean = tl.sum(x, axis=1) * (1.0 / BLOCK_H)", WHOLE,
    ),
    Mutant(
        "columns that are not there in the variance", FORWARD,
        "rstd_of(tl.where(exists[None, :], x - mean[:, None], 0.0), H", "rstd_of(x - mean[:, None], H", WHOLE,
    ),
    Mutant(
        "epsilon forgotten", FORWARD,
        "rstd = rstd_of(tl.where(exists[None, :], x - mean[:, None], 0.0), H, EPSILON)",
        "rstd = rstd_of(tl.where(exists[None, :], x - mean[:, None], 0.0), H, 0.0)",
        (f"{ACCURACY}test_small_and_large_data[triton-0.001-float32]",),
    ),
    Mutant(
        "variance as E[x^2] - E[x]^2", FORWARD,
        "rstd_of(tl.where(exists[None, :], x - mean[:, None], 0.0), H, EPSILON)",
        "tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / H) - mean * mean + EPSILON)",
        (f"{ACCURACY}test_rows_with_a_mean_1000_times_their_spread[triton-37-1000-layer_norm-float32]",),
    ),
    Mutant(
        "a last chunk taken for full", FORWARD,
        "count = tl.minimum(BLOCK_H, H - first).to(COMPUTE)", "count = tl.minimum(BLOCK_H, H).to(COMPUTE)", CHUNKS,
    ),
    Mutant(
        "chunks' means averaged without weights", FORWARD,
        "_add(mean, mean_excess, ahead * share)", "_add(mean, mean_excess, ahead * 0.5)", CHUNKS,
    ),
    Mutant(
        "chunks' squares merged with a wrong weight", FORWARD,
        "more = ahead * (ahead * (share * first))", "more = ahead * (ahead * share)",
        (f"{ACCURACY}test_rows_with_a_mean_1000_times_their_spread[triton-3-16385-layer_norm-float32]", *CHUNKS),
    ),
    Mutant(
        "a first chunk's squared mean times nought", FORWARD,
        "more = ahead * (ahead * (share * first))", "more = ahead * ahead * (share * first)",
        (f"{ABUSE}test_a_mean_whose_square_overflows[triton-False-20000-float32]",),
    ),
    Mutant(
        "columns that are not there in a chunk's variance", FORWARD,
        "x = tl.where(mask, x - chunk_mean[:, None], 0.0)", "x = x - chunk_mean[:, None]",
        (f"{ACCURACY}test_rows_with_a_mean_1000_times_their_spread[triton-3-16385-layer_norm-float32]",),
    ),
    Mutant(
        "the sum of whole rows not returned", FORWARD,
        "if r.total is not None:", "if r.total is not None and BLOCK_H < H:", WHOLE,
    ),
    Mutant(
        "the sum of chunks not returned", FORWARD,
        "if r.total is not None:", "if r.total is not None and BLOCK_H >= H:", CHUNKS_ADD,
    ),
    Mutant(
        "all groups' means in the first one's place", RECORDS, COPY, first_part_of("mean"), GROUPS,
    ),
    Mutant(
        "a program's first tile alone", FORWARD, "BLOCK_ROWS) if PERSISTENT else program + 1", "1) * 0 + program + 1",
        (f"{OPERATORS}test_forward_programs_have_several_rows[1]",),
    ),
    Mutant(
        "the first group's scale and offset held", FORWARD,
        "group_of(tl.program_id(0), programs", "group_of(tl.program_id(0), programs * groups",
        (f"{OPERATORS}test_forward_programs_have_several_rows[3]",),
    ),
    Mutant(
        "x_hat not masked", ROW_TERMS,
        "tl.where(exists[None, :], (x - mean[:, None]) * rstd[:, None], 0.0)", "(x - mean[:, None]) * rstd[:, None]",
        (f"{OPERATORS}test_columns_that_are_not_there_cannot_overflow[triton]",),
    ),
    Mutant("c1 of chunks dropped", BACKWARD, "c1 += scaled\n", "c1 += scaled * 0.0\n", CHUNKS),
    Mutant(
        "c2 of chunks over a chunk's width", BACKWARD,
        "tl.sum(c2, axis=1) * (1.0 / H)", "tl.sum(c2, axis=1) * (1.0 / BLOCK_H)", CHUNKS,
    ),
    Mutant(
        "all groups' row sums in the first one's place", BACKWARD,
        "tl.store(c2_ptr + first_row + row", "tl.store(c2_ptr + row", GROUPS,
    ),
    Mutant(
        "c2 dropped", ROW_TERMS, "tl.fma(x_hat, -(c2 * rstd)[:, None], -(c1", "tl.fma(x_hat, 0.0 * rstd[:, None], -(c1",
        WHOLE,
    ),
    Mutant("c1 dropped", ROW_TERMS, "-(c1 * rstd)[:, None])", "0.0 * rstd[:, None])", WHOLE),
    Mutant(
        "what two roundings leave of a row of one element", BACKWARD,
        "if H == 1 and NORM.subtract_mean:", "if False:",
        (f"{ABUSE}test_rows_of_one_element[triton-layer_norm-float32]",),
    ),
    Mutant(
        "what two roundings leave of a row of one element, fused", LINEAR_BACKWARD,
        "if H == 1 and a.mean is not None:", "if False:",
        (f"{ABUSE}test_rows_of_one_element[triton-layer_norm_linear-bfloat16]",),
    ),
    Mutant(
        "c1 without the scale", BACKWARD,
        "c1 = tl.sum(scaled, axis=1) * (1.0 / H)",
        "c1 = tl.sum(dy, axis=1) * (1.0 / H)", WHOLE,
    ),
    Mutant("dx without rstd", ROW_TERMS, "return tl.fma(scaled, rstd[:, None], d)", "return d + scaled", WHOLE),
    Mutant(
        "the sum's cotangent with the wrong sign", BACKWARD,
        "dx += tl.load(a.dtotal", "dx -= tl.load(a.dtotal", WHOLE,
    ),
    Mutant(
        "dscale of the scaled cotangent", ROW_TERMS,
        "tl.fma(dy, x_hat, dscale)", "tl.fma(dy * scale[None, :], x_hat, dscale)", WHOLE,
    ),
    Mutant("doffset of a program's last tile", ROW_TERMS, "doffset += dy  # (5)", "doffset = dy", MANY_TILES),
    Mutant(
        "dscale added up in bfloat16", ROW_TERMS,
        "tl.fma(dy, x_hat, dscale)", "tl.fma(dy, x_hat, dscale).to(tl.bfloat16).to(COMPUTE)", WHOLE,
    ),
    Mutant(
        "a tile of rows forgotten", BACKWARD,
        "tiles_of(rows, BLOCK_ROWS), programs, num", "tiles_of(rows, BLOCK_ROWS) - 1, programs, num", WHOLE,
    ),
    Mutant(
        "groups' shares on top of each other", BACKWARD,
        "at = (group * programs + program) * H + column", "at = (group + program) * H + column",
        (f"{TRANSFORMED}test_vmap_of_grad_with_several_programs_a_group[(0, 0, None, 0)]",),
    ),
    Mutant(
        "y of backward without the scale", ROW_TERMS,
        "y = affine(x_hat, scale", "y = affine(x_hat, 1.0 + 0.0 * scale", COMPOSED,
    ),
    Mutant(
        "y of backward without the offset", ROW_TERMS,
        "affine(x_hat, scale, load_offset(a.offset, column, exists, COMPUTE))", "affine(x_hat, scale, None)", COMPOSED,
    ),
    Mutant(
        "dtotal shared where dy is", RECORDS, COPY, shared_as_dy("dtotal"),
        (f"{TRANSFORMED}test_vmap_over_cotangents[triton-dtotal-9]",),
    ),
    Mutant(
        "a gradient in the first group's place where its operand is shared", BACKWARD,
        "place(d[i], i, group, rows, H, None,", "place(d[i], i, group, rows, H, SHARED,",
        ("tests/operators/test_gated.py::test_groups_under_vmap_of_some_arguments[triton]",),
    ),
    Mutant("what is shared taken for what is not", RECORDS, "and name in names", "and name not in names", GROUPS),
    Mutant(
        "shares of dscale and doffset on top of each other", ROW_TERMS,
        "first = position(SUMS, NAME) * programs", "first = 0 * programs", MANY_TILES,
    ),
    Mutant(
        "shares of one group counted for those of all", BACKWARD,
        "of_all = tl.num_programs(0) // chunks", "of_all = programs",
        (f"{TRANSFORMED}test_vmap_of_grad_with_several_programs_a_group[(0, 0, None, 0)]",),
    ),
    Mutant(
        "a share too many added up", BACKWARD,
        "mask = (program < programs)[:, None] & exists[None, :]",
        "mask = (program <= programs)[:, None] & exists[None, :]",
        (f"{OPERATORS}test_reduction_of_many_partial_sums[129]",),
    ),
    Mutant(
        "a block of shares forgotten", BACKWARD,
        "for first in range(0, programs, BLOCK_ROWS)", "for first in range(0, programs - 1, BLOCK_ROWS)",
        (f"{OPERATORS}test_reduction_of_many_partial_sums[129]",),
    ),
    Mutant(
        "all groups' sums in the first one's place", BACKWARD,
        "at = group * H + column", "at = column",
        (f"{OPERATORS}test_reduction_of_many_partial_sums[129]",),
    ),
    # The fused kernels
    Mutant(
        "a column of a matrix too many", TERMS,
        "(column < COLUMNS)[None, :]",
        "(column <= COLUMNS)[None, :]", FUSED_KERNELS,
    ),
    Mutant(
        "y without the offset, fused", LINEAR,
        "constant += tl.sum(kernel.to(COMPUTE) * offset[:, None], axis=0)", "pass", FUSED_KERNELS,
    ),
    Mutant(
        "the product not moved when the mean is", LINEAR,
        "product = tl.fma(-(unit * step)[:, None], weight[None, :], product)", "pass", FUSED_KERNELS,
    ),
    Mutant(
        "the product not resized when rstd is", LINEAR, "product *= (unit / before)[:, None]", "pass", FUSED_KERNELS,
    ),
    Mutant(
        "y without the bias, fused", LINEAR,
        "constant = load_vector(a.bias", "constant = 0.0 * load_vector(a.bias", FUSED_KERNELS,
    ),
    Mutant(
        "a first chunk's squared mean times nought, fused", LINEAR,
        "squares += first * step * step", "squares += step * step * first",
        (f"{ABUSE}test_a_mean_whose_square_overflows[triton-True-100-bfloat16]",),
    ),
    Mutant(
        "dbias of a program's last tile", LINEAR_BACKWARD,
        "dbias += tl.sum(dy.to(COMPUTE), axis=0)", "dbias = tl.sum(dy.to(COMPUTE), axis=0)", FUSED_KERNELS,
    ),
    Mutant(
        "row sums without the scale", LINEAR_BACKWARD,
        """scaled = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision=PRECISION) * scale[None, :]""",
        """scaled = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision=PRECISION)""",
        FUSED_KERNELS,
    ),
    Mutant(
        "dscale of a dz rounded to 16 bits", LINEAR_BACKWARD,
        "tl.fma(dz, x_hat, dscale)", "tl.fma(dz.to(dy.dtype).to(COMPUTE), x_hat, dscale)",
        (f"{LINEARS}test_a_wider_scale_keeps_its_gradients_digits[bfloat16-triton]",),
    ),
    Mutant("c2 dropped, fused", LINEAR_BACKWARD, "-(c2 * rstd)[:, None]", "0.0 * rstd[:, None]", FUSED_KERNELS),
    Mutant(
        "G of a program's last tile", LINEAR_BACKWARD,
        """g = tl.dot(tl.trans(x_hat.to(dy.dtype)), dy, g, input_precision=PRECISION)""",
        """g = tl.dot(tl.trans(x_hat.to(dy.dtype)), dy, input_precision=PRECISION)""",
        FUSED_KERNELS,
    ),
    Mutant(
        "dkernel without the scale", LINEAR_BACKWARD,
        "dkernel = tl.sum(g, axis=0) * scale[:, None]", "dkernel = tl.sum(g, axis=0)", FUSED_KERNELS,
    ),
    Mutant(
        "dkernel without the offset", LINEAR_BACKWARD,
        "dkernel = tl.fma(offset[:, None], total[None, :], dkernel)", "dkernel += 0.0", FUSED_KERNELS,
    ),
    Mutant(
        "doffset without dbias", LINEAR_BACKWARD,
        "doffset = tl.sum(kernel * total[None, :], axis=1)", "doffset = tl.sum(kernel, axis=1)", FUSED_KERNELS,
    ),
    Mutant("a split forgotten", LINEAR_BACKWARD, "there = split < splits", "there = split < splits - 1", FUSED_KERNELS),
    Mutant(
        "a share of dbias too many", LINEAR_BACKWARD,
        "dbias_partial_ptr, program * N, program < programs",
        "dbias_partial_ptr, program * N, program <= programs",
        FUSED_KERNELS,
    ),
    Mutant(
        "dz left out where dscale alone needs it", LINEAR_BACKWARD,
        "if d.x is not None or dscale_ptr is not None:", "if d.x is not None:",
        (f"{FROZEN}test_some_gradients_of_a_fused_linear[scale]",),
    ),
    Mutant(
        "stages of a gated sum that shared memory has no room for", NORM_TILES,
        "max(1, min(tile.stages, room))", "tile.stages",
        ("tests/triton/test_compiler.py::test_no_spills_of_sums_with_a_gate_at_any_size",),
    ),
    Mutant(
        "a loop's step that the compiler knows", BACKWARD,
        "programs = tl.maximum(of_all // groups, 1)", "programs = 1",
        (f"{COMPILED}test_no_spills_of_parameters_of_examples_and_heads[examples of a sum-b200-float32]",),
    ),
]  # fmt: skip
