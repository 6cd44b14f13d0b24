"""Ways to break the code, and the tests that must notice.

Each is one small slip of the kind that a person makes: a term dropped, a mask swapped, a bound off by one, a wrong
axis, sums in too few bits. `old` must be in the file exactly once.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """In `file`, `old` becomes `new`; `tests` are pytest's node ids, the likeliest to fail first."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


NORM = "jln/_triton/layer_norm_kernels.py"
LINEAR = "jln/_triton/layer_norm_linear_kernels.py"
NORM_LAUNCH = "jln/_triton/layer_norm.py"
LINEAR_LAUNCH = "jln/_triton/layer_norm_linear.py"
XLA_NORM = "jln/_xla/layer_norm.py"
XLA_LINEAR = "jln/_xla/layer_norm_linear.py"
TRANSFORMS = "jln/_transforms.py"
OPERATOR = "jln/layer_norm.py"
LINEAR_OPERATOR = "jln/layer_norm_linear.py"
PARTITIONING = "jln/_partitioning.py"
CHECKER = "jln/_testing/derivatives.py"
TUNING = "jln/_triton/tuning.py"
SEARCH = "jln/_bench/search.py"

ACCURACY = "tests/test_accuracy.py::"
OPERATORS = "tests/test_operators.py::"
TRANSFORMED = "tests/test_transforms.py::"
FUSED = "tests/test_layer_norm_linear_kernels.py::"
LINEARS = "tests/test_linear_accuracy.py::"
LINEAR_TRANSFORMED = "tests/test_linear_transforms.py::"
ABUSE = "tests/test_abuse.py::"
SHARDING = "tests/test_sharding.py::"

# Whole rows, several a tile and the last one ragged; a row in chunks.
WHOLE = (f"{ACCURACY}test_family[triton-37-100-add_layer_norm-float32]",)
MANY_TILES = (f"{ACCURACY}test_layer_norm[triton-1000-127-float32]",)
CHUNKS = (f"{ACCURACY}test_layer_norm[triton-5-16385-float32]",)
CHUNKS_ADD = (f"{ACCURACY}test_family[triton-2-40000-add_layer_norm-float32]",)
STRIDED = (f"{OPERATORS}test_strided_rows[triton-float32-shape0]", f"{OPERATORS}test_axes[triton-layer_norm-1]")
GROUPS = (
    f"{TRANSFORMED}test_vmap_of_grad_in_every_regime[(None, None, 0, 0)-shape0]",
    f"{TRANSFORMED}test_vmap_of_grad_in_every_regime[(0, 0, None, 0)-shape1]",
)
FUSED_KERNELS = (f"{FUSED}test_fused[64-128-64-float16]", f"{LINEARS}test_sizes[triton-333-100-256-bfloat16]")
COMPOSED = (f"{FUSED}test_composed[33-100-300-float16]",)
XLA = (f"{ACCURACY}test_family[xla-37-100-add_layer_norm-float32]",)
XLA_LINEARS = (f"{LINEARS}test_sizes[xla-16-100-128-float32]", f"{LINEARS}test_sizes[xla-333-8-7-float32]")

MUTANTS = [
    # The norms' kernels
    Mutant("a row too many", NORM, "row * H, row < rows", "row * H, row <= rows", WHOLE),
    Mutant(
        "a neighbour too many", NORM,
        "outer * (H * INNER) + inner, inner < INNER", "outer * (H * INNER) + inner, inner <= INNER", STRIDED,
    ),
    Mutant(
        "outer rows too near each other", NORM,
        "outer * (H * INNER) + inner, inner", "outer * (H + INNER) + inner, inner", STRIDED,
    ),
    Mutant("a column too many", NORM, "column * INNER, column < H", "column * INNER, column <= H", WHOLE),
    Mutant("a shared operand taken for a group's own", NORM, "return group * 0", "return group", GROUPS),
    Mutant(
        "scale not zero-centered", NORM, "scale + given if ZERO_CENTERED else given", "given",
        (f"{OPERATORS}test_optional_arguments[triton-layer_norm-True-False-True]",),
    ),
    Mutant(
        "the sum not rounded before it is normed", NORM,
        "(x + residual).to(total_ptr.dtype.element_ty).to(COMPUTE)", "x + residual",
        (f"{OPERATORS}test_it_is_the_rounded_sum_that_is_normed[triton-bfloat16-100]",),
    ),
    Mutant(
        "y without the mean subtracted", NORM,
        "y = (x - mean[:, None]) * rstd[:, None] * scale[None, :]  # (3), (4)",
        "y = x * rstd[:, None] * scale[None, :]", WHOLE,
    ),
    Mutant(
        "y without the offset", NORM,
        "to(COMPUTE)[None, :]\n    return y", "to(COMPUTE)[None, :] * 0.0\n    return y", WHOLE,
    ),
    Mutant(
        "mean over the tile's width", NORM,
        "mean = tl.sum(x, axis=1) * (1.0 / H)  # (1)", "mean = tl.sum(x, axis=1) * (1.0 / BLOCK_H)", WHOLE,
    ),
    Mutant(
        "columns that are not there in the variance", NORM,
        "centred = tl.where(mask, x - mean[:, None], 0.0)", "centred = x - mean[:, None]", WHOLE,
    ),
    Mutant(
        "epsilon forgotten", NORM, "axis=1) * (1.0 / H) + EPSILON)  # (2)", "axis=1) * (1.0 / H))",
        (f"{ACCURACY}test_small_and_large_data[triton-0.001-float32]",),
    ),
    Mutant(
        "variance as E[x^2] - E[x]^2", NORM,
        "tl.rsqrt(tl.sum(centred * centred, axis=1) * (1.0 / H) + EPSILON)",
        "tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / H) - mean * mean + EPSILON)",
        (f"{ACCURACY}test_rows_with_a_mean_1000_times_their_spread[triton-37-1000-layer_norm-float32]",),
    ),
    Mutant(
        "a last chunk taken for full", NORM,
        "count = tl.minimum(BLOCK_H, H - first).to(COMPUTE)", "count = tl.minimum(BLOCK_H, H).to(COMPUTE)", CHUNKS,
    ),
    Mutant(
        "chunks' means averaged without weights", NORM,
        "mean += ahead * share\n", "mean += ahead * 0.5\n", CHUNKS,
    ),
    Mutant(
        "chunks' squares merged with a wrong weight", NORM,
        "squares += ahead * (ahead * (share * first))", "squares += ahead * (ahead * share)",
        (f"{ACCURACY}test_rows_with_a_mean_1000_times_their_spread[triton-3-16385-layer_norm-float32]", *CHUNKS),
    ),
    Mutant(
        "a first chunk's squared mean times nought", NORM,
        "squares += ahead * (ahead * (share * first))", "squares += ahead * ahead * (share * first)",
        (f"{ABUSE}test_a_mean_whose_square_overflows[triton-False-20000-float32]",),
    ),
    Mutant(
        "columns that are not there in a chunk's variance", NORM,
        "x = tl.where(mask, x - chunk_mean[:, None], 0.0)", "x = x - chunk_mean[:, None]",
        (f"{ACCURACY}test_rows_with_a_mean_1000_times_their_spread[triton-3-16385-layer_norm-float32]",),
    ),
    Mutant(
        "the sum of whole rows not returned", NORM,
        "        if HAS_RESIDUAL:\n            tl.store(total_ptr + at",
        "        if HAS_RESIDUAL and H < 0:\n            tl.store(total_ptr + at",
        WHOLE,
    ),
    Mutant(
        "the sum of chunks not returned", NORM,
        "            if HAS_RESIDUAL:\n                tl.store(total_ptr + at",
        "            if HAS_RESIDUAL and H < 0:\n                tl.store(total_ptr + at",
        CHUNKS_ADD,
    ),
    Mutant(
        "all groups' means in the first one's place", NORM,
        "tl.store(mean_ptr + group * rows + row, mean", "tl.store(mean_ptr + row, mean", GROUPS,
    ),
    Mutant(
        "x_hat not masked", NORM,
        "tl.where(mask, (x - mean[:, None]) * rstd[:, None], 0.0)", "(x - mean[:, None]) * rstd[:, None]",
        (f"{OPERATORS}test_columns_that_are_not_there_cannot_overflow[triton]",),
    ),
    Mutant("c1 of chunks dropped", NORM, "c1 += scaled\n", "c1 += scaled * 0.0\n", CHUNKS),
    Mutant(
        "c2 of chunks over a chunk's width", NORM,
        "tl.sum(c2, axis=1) * (1.0 / H)  # (7), (8)", "tl.sum(c2, axis=1) * (1.0 / BLOCK_H)", CHUNKS,
    ),
    Mutant(
        "all groups' row sums in the first one's place", NORM,
        "tl.store(c2_ptr + group * rows + row, c2", "tl.store(c2_ptr + row, c2", GROUPS,
    ),
    Mutant("c2 dropped", NORM, "dx = scaled - x_hat * c2[:, None]  # (9)", "dx = scaled", WHOLE),
    Mutant("c1 dropped", NORM, "dx -= c1[:, None]", "dx -= 0.0", WHOLE),
    Mutant(
        "c1 without the scale", NORM,
        "c1 = tl.sum(scaled, axis=1) * (1.0 / H)",
        "c1 = tl.sum(dy, axis=1) * (1.0 / H)", WHOLE,
    ),
    Mutant("dx without rstd", NORM, "dx *= rstd[:, None]", "dx *= 1.0", WHOLE),
    Mutant(
        "the sum's cotangent with the wrong sign", NORM,
        "dx += tl.load(dtotal_ptr",
        "dx -= tl.load(dtotal_ptr", WHOLE,
    ),
    Mutant("dscale of the scaled cotangent", NORM, "dscale += dy * x_hat  # (6)", "dscale += scaled * x_hat", WHOLE),
    Mutant("doffset of a program's last tile", NORM, "doffset += dy  # (5)", "doffset = dy", MANY_TILES),
    Mutant(
        "dscale added up in bfloat16", NORM,
        "dscale += dy * x_hat  # (6)", "dscale = (dscale + dy * x_hat).to(tl.bfloat16).to(COMPUTE)", WHOLE,
    ),
    Mutant(
        "a tile of rows forgotten", NORM,
        "for tile in tl.range(program, _tiles(rows, INNER, BLOCK_ROWS), programs",
        "for tile in tl.range(program, _tiles(rows, INNER, BLOCK_ROWS) - 1, programs", WHOLE,
    ),
    Mutant(
        "groups' shares on top of each other", NORM,
        "partial = (group * programs + program) * H + column", "partial = (group + program) * H + column",
        (f"{TRANSFORMED}test_vmap_of_grad_with_several_programs_a_group[(0, 0, None, 0)]",),
    ),
    Mutant("y of backward without the scale", NORM, "y = x_hat * scale[None, :]  # (4)", "y = x_hat", COMPOSED),
    Mutant(
        "a share too many added up", NORM,
        "mask = (program < programs)[:, None] & exists[None, :]",
        "mask = (program <= programs)[:, None] & exists[None, :]",
        (f"{OPERATORS}test_reduction_of_many_partial_sums[33]",),
    ),
    Mutant(
        "a block of shares forgotten", NORM,
        "for first in range(0, programs, BLOCK_ROWS)", "for first in range(0, programs - 1, BLOCK_ROWS)",
        (f"{OPERATORS}test_reduction_of_many_partial_sums[33]",),
    ),
    Mutant(
        "all groups' doffset in the first one's place", NORM,
        "tl.store(doffset_ptr + group * H + column, total", "tl.store(doffset_ptr + column, total",
        (f"{OPERATORS}test_reduction_of_many_partial_sums[33]",),
    ),
    # The fused kernels
    Mutant(
        "a column of a matrix too many", LINEAR,
        "(column < COLUMNS)[None, :]",
        "(column <= COLUMNS)[None, :]", FUSED_KERNELS,
    ),
    Mutant(
        "y without the offset", LINEAR, "constant += tl.sum(kernel.to(COMPUTE) * offset[:, None], axis=0)", "pass",
        FUSED_KERNELS,
    ),
    Mutant(
        "the product not moved when the mean is", LINEAR,
        "product -= (unit * step)[:, None] * weight[None, :]", "pass", FUSED_KERNELS,
    ),
    Mutant(
        "the product not resized when rstd is", LINEAR, "product *= (unit / before)[:, None]", "pass", FUSED_KERNELS,
    ),
    Mutant(
        "y without the bias", LINEAR,
        "constant = _load_vector(bias_ptr", "constant = 0.0 * _load_vector(bias_ptr", FUSED_KERNELS,
    ),
    Mutant(
        "a first chunk's squared mean times nought, fused", LINEAR,
        "squares += first * step * step", "squares += step * step * first",
        (f"{ABUSE}test_a_mean_whose_square_overflows[triton-True-100-bfloat16]",),
    ),
    Mutant(
        "dbias of a program's last tile", LINEAR,
        "dbias += tl.sum(dy.to(COMPUTE), axis=0)", "dbias = tl.sum(dy.to(COMPUTE), axis=0)", FUSED_KERNELS[1:],
    ),
    Mutant(
        "row sums without the scale", LINEAR,
        """scaled = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision="tf32") * scale[None, :]""",
        """scaled = tl.dot(dy, tl.trans(kernel.to(dy.dtype)), input_precision="tf32")""",
        FUSED_KERNELS,
    ),
    Mutant(
        "dscale of a dz rounded to 16 bits", LINEAR,
        "dscale += dz * x_hat  # (6)", "dscale += dz.to(dy.dtype).to(COMPUTE) * x_hat  # (6)",
        (f"{LINEARS}test_a_wider_scale_keeps_its_gradients_digits[triton-bfloat16]",),
    ),
    Mutant("c2 dropped, fused", LINEAR, "- c1[:, None] - x_hat * c2[:, None])  # (9)", "- c1[:, None])", FUSED_KERNELS),
    Mutant(
        "G of a program's last tile", LINEAR,
        """g = tl.dot(tl.trans(x_hat.to(dy.dtype)), dy, g, input_precision="tf32")""",
        """g = tl.dot(tl.trans(x_hat.to(dy.dtype)), dy, input_precision="tf32")""",
        FUSED_KERNELS[1:],
    ),
    Mutant(
        "dkernel without the scale", LINEAR, "g = tl.sum(g, axis=0) * scale[:, None]", "g = tl.sum(g, axis=0)",
        FUSED_KERNELS,
    ),
    Mutant("dkernel without the offset", LINEAR, "g += offset[:, None] * total[None, :]", "g += 0.0", FUSED_KERNELS),
    Mutant(
        "doffset without dbias", LINEAR,
        "doffset = tl.sum(kernel * total[None, :], axis=1)", "doffset = tl.sum(kernel, axis=1)", FUSED_KERNELS,
    ),
    Mutant("a split forgotten", LINEAR, "there = split < splits", "there = split < splits - 1", FUSED_KERNELS),
    Mutant(
        "a share of dbias too many", LINEAR,
        "dbias_partial_ptr, program, program < programs",
        "dbias_partial_ptr, program, program <= programs",
        FUSED_KERNELS,
    ),
    # Launchers
    Mutant(
        "the last tile of neighbours forgotten", NORM_LAUNCH,
        "return self.rows // self.inner * config.ceil_div(self.inner, tile.rows)",
        "return self.rows // self.inner * max(1, self.inner // tile.rows)", STRIDED,
    ),
    Mutant("another operand taken for shared", NORM_LAUNCH, "mask |= 1 << i", "mask |= 2 << i", GROUPS),
    Mutant(
        "partial sums in the dtype of x", NORM_LAUNCH,
        "partial = jax.ShapeDtypeStruct((2 if one_buffer else 1, g.groups, programs, g.h), compute)",
        "partial = jax.ShapeDtypeStruct((2 if one_buffer else 1, g.groups, programs, g.h), total.dtype)",
        (f"{OPERATORS}test_partial_sums_are_not_rounded[bfloat16]",),
    ),
    Mutant(
        "per-example gradients summed", NORM_LAUNCH,
        "grouped=per_example_gradients or not plain", "grouped=not plain",
        (f"{TRANSFORMED}test_vmap_of_grad[layer_norm-triton-(0, 0, None, None)]",),
    ),
    Mutant(
        "dz in float16", LINEAR_LAUNCH,
        "preferred_element_type=dtype if dtype == jnp.bfloat16 else accumulator", "preferred_element_type=dtype",
        (f"{LINEARS}test_dz_does_not_underflow[triton-600]",),
    ),
    # The XLA rules
    Mutant(
        "unbiased variance", XLA_NORM,
        "variance = _over_parts(jnp.mean(jnp.square(_centered(x, mean)), axis, keepdims=True), h_axes)",
        "variance = jnp.sum(jnp.square(_centered(x, mean)), axis, keepdims=True) / (x.shape[axis] - 1)", XLA,
    ),
    Mutant(
        "variance as E[x^2] - E[x]^2, XLA", XLA_NORM,
        "variance = _over_parts(jnp.mean(jnp.square(_centered(x, mean)), axis, keepdims=True), h_axes)",
        "variance = jnp.mean(jnp.square(_centered(x, None)), axis, keepdims=True) - (0 if mean is None else mean**2)",
        (f"{ACCURACY}test_rows_with_a_mean_1000_times_their_spread[xla-37-1000-layer_norm-float32]",),
    ),
    Mutant(
        "scale not zero-centered, XLA", XLA_NORM,
        "return 1.0 + scale.astype(dtype) if zero_centered_scale else scale.astype(dtype)",
        "return scale.astype(dtype)",
        (f"{OPERATORS}test_optional_arguments[xla-layer_norm-True-False-True]",),
    ),
    Mutant("c2 dropped, XLA", XLA_NORM, "dx = g - x_hat * mean_over_h(g_over_h * x_hat)  # (8)", "dx = g", XLA),
    Mutant(
        "c1 without the scale, XLA", XLA_NORM,
        "dx = dx - mean_over_h(g_over_h)  # (7)", "dx = dx - sum_over_h(dy.astype(dtype)) / total.shape[axis]", XLA,
    ),
    Mutant(
        "doffset added up in the dtype of dy", XLA_NORM,
        "with_batch(sum_over_rows(dy.astype(dtype)), batch)", "with_batch(sum_over_rows(dy), batch)",
        (f"{ACCURACY}test_gradients_of_wider_parameters_keep_their_digits[xla-bfloat16]",),
    ),
    Mutant(
        "dscale of x and not of x_hat", XLA_NORM,
        "sum_over_rows(dy.astype(dtype) * x_hat)",
        "sum_over_rows(dy.astype(dtype) * total)", XLA,
    ),
    Mutant("the sum's cotangent dropped", XLA_NORM, "dx = dx + dtotal.astype(dtype)", "dx = dx + 0", XLA),
    Mutant(
        "parameters' gradients summed over vmap's axes", XLA_NORM,
        "rows = [i for i in range(batch_dims, total.ndim)", "rows = [i for i in range(total.ndim)",
        (f"{TRANSFORMED}test_vmap_of_grad[layer_norm-xla-(0, 0, None, None)]",),
    ),
    Mutant(
        "y without the bias, XLA", XLA_LINEAR,
        "y = y + _like_rows(bias.astype(y.dtype), x.ndim, batch_dims)", "y = y + 0", XLA_LINEARS,
    ),
    Mutant(
        "doffset without dbias, XLA", XLA_LINEAR,
        "jnp.sum(kernel.astype(dbias.dtype) * jnp.expand_dims(dbias, -2), axis=-1)",
        "jnp.sum(kernel.astype(dbias.dtype), axis=-1)", XLA_LINEARS,
    ),
    Mutant(
        "dkernel of a z without offset, XLA", XLA_LINEAR,
        "z = norm.scaled(x, row_scale, row_offset, mean", "z = norm.scaled(x, row_scale, None, mean", XLA_LINEARS,
    ),
    Mutant(
        "dz by a kernel not transposed, XLA", XLA_LINEAR,
        "kernel.astype(dtype), [*in_batch, h, n], [*rows, h], precision)  # (14)",
        "kernel.astype(dtype)[..., ::-1], [*in_batch, h, n], [*rows, h], precision)", XLA_LINEARS,
    ),
    # The operators and their transformations
    Mutant(
        "vmap's axis not counted", TRANSFORMS, 'v + 1 if k == "batch_dims" else v', "v",
        (f"{TRANSFORMED}test_vmap_of_grad[layer_norm-xla-(0, 0, None, None)]",),
    ),
    Mutant(
        "operands vary apart in shard_map", TRANSFORMS,
        "a if a is None or axes == union else", "a if a is None or axes is not None else",
        (f"{TRANSFORMED}test_shard_map[xla]",),
    ),
    Mutant(
        "x saved where the sum was normed",
        OPERATOR,
        "(x if total is None else total, scale, mean, rstd)",
        "(x, scale, mean, rstd)",
        ("tests/test_matrix.py::test_reverse_mode[add_layer_norm-so-xla-value_and_grad]",),
    ),
    Mutant(
        "a tangent without the mean's", XLA_NORM, "dy = dy - jnp.mean(t, axis, keepdims=True)", "pass",
        ("tests/test_matrix.py::test_forward_mode[layer_norm-so-xla-jvp]",),
    ),
    Mutant(
        "a tangent without the kernel's", XLA_LINEAR, "mean, rstd, zero_centered_scale), dkernel)",
        "mean, rstd, zero_centered_scale), 0 * dkernel)",
        ("tests/test_matrix.py::test_forward_mode[layer_norm_linear-sob-xla-jvp]",),
    ),
    Mutant(
        "vmap's axes taken for rows where a parameter has them", TRANSFORMS, "return len(batches) == 1 and all(",
        "return len(batches) == 1 or all(",
        ("tests/test_matrix.py::test_forward_mode[layer_norm-so-triton-grad(vmap), over x]",
         "tests/test_matrix.py::test_forward_mode[layer_norm-so-xla-vmap(jvp)]",
         "tests/test_matrix.py::test_forward_mode[layer_norm-so-xla-vmap(grad), over parameters]"),
    ),
    Mutant(
        "no device told of the others' rows", PARTITIONING, "share = jax.lax.psum(share, left) if left else share",
        "pass",
        (f"{SHARDING}test_gradient_under_jit[layer_norm-rows]",),
    ),
    Mutant(
        "features not added up", LINEAR_OPERATOR, '("n", "nr", "nr", "r", "r")', '("", "r", "r", "r", "r")',
        (f"{SHARDING}test_gradient_under_jit[layer_norm_linear-columns]",),
    ),
    Mutant(
        "dbias added up over features", LINEAR_OPERATOR, '("n", "nr", "nr", "r", "r")', '("n", "nr", "nr", "r", "nr")',
        (f"{SHARDING}test_gradient_under_jit[layer_norm_linear-rows and columns]",),
    ),
    Mutant(
        "a part of H taken for the whole", XLA_NORM, "return lax.pmean(mean, h_axes) if h_axes else mean",
        "return mean",
        (f"{SHARDING}test_gradient_under_jit[layer_norm-H]",),
    ),
    Mutant(
        "a product over a part of H", XLA_LINEAR, "y = lax.psum(y, h_axes)", "pass",
        (f"{SHARDING}test_gradient_under_jit[layer_norm_linear-H]",),
    ),
    Mutant(
        "padding taken for rows", PARTITIONING, "% math.prod(mesh.shape[a] for a in axes) == 0:", "% 1 == 0:",
        (f"{SHARDING}test_what_does_not_divide_is_not_split",),
    ),
    # The checker
    Mutant(
        "a cotangent of ones", CHECKER,
        "random.standard_normal(s.shape).astype(s.dtype) for s", "np.ones(s.shape, s.dtype) for s",
        ("tests/test_catalogue.py::test_wrong_rules_are_rejected[LayerNorm: cotangent ignored]",),
    ),
    Mutant(
        "differences of one step, not extrapolated", CHECKER, "better = error < least", "better = error < 0",
        ("tests/test_catalogue.py::test_right_rules_are_accepted[layer_norm]",),
    ),
    Mutant(
        "direction ignored in second derivatives", CHECKER,
        "jnp.vdot(g, d).astype(dtype) for g, d", "jnp.sum(g).astype(dtype) for g, d",
        ("tests/test_catalogue.py::test_right_second_derivatives_are_accepted[layer_norm_linear-forward]",),
    ),
    # Tuning
    Mutant(
        "unaligned rows given the tiles of aligned ones", TUNING, "LAYOUTS[1 if inner * itemsize % 16 == 0 else 2]",
        "LAYOUTS[1]",
        ("tests/test_tuning.py::test_other_elements_layouts_and_results_have_choices_of_their_own",),
    ),
    Mutant(
        "two kernels' tiles exchanged", TUNING, 'chip, chosen["row_sums"], chosen["backward"])',
        'chip, chosen["backward"], chosen["row_sums"])',
        ("tests/test_tuning.py::test_linears_are_right_under_tuned_tiles[fused]",),
    ),
    Mutant(
        "NaN taken for a right number", SEARCH, "if not error <= allowed * largest:", "if error > allowed * largest:",
        ("tests/test_tune.py::test_what_differs_by_more_than_another_order_of_sums_is_wrong[float32]",),
    ),
    Mutant(
        "a tile kept that loses in one workload", SEARCH, "<= (1 + NOISE) * old]", "<= 2 * old]",
        ("tests/test_tune.py::test_what_loses_in_one_workload_is_not_kept",),
    ),
    Mutant(
        "former tiles lost", "jln/_cli/tune.py", "if not _is(raw, key)] + [entry]", "if _is(raw, key)] + [entry]",
        ("tests/test_tune.py::test_a_search_is_taken_up_again_and_loses_nothing",),
    ),
]  # fmt: skip
