"""Ways to break what is around the kernels: launchers, XLA rules, transformations, the checker and tuning."""

from targets import (
    ACCURACY,
    CHECK,
    CHECKER,
    DERIVATIVES,
    DIFFERENCES,
    EXPLAIN,
    EXPLICIT,
    FROZEN,
    FUSED,
    GROUPS,
    IN_ONE_ON_A_MESH,
    IN_SHARES,
    LAYOUT,
    LIMITS,
    LINEAR_LAUNCH,
    LINEAR_RULES,
    LINEAR_TILES,
    LINEARS,
    NORM_LAUNCH,
    NORM_RULES,
    NORM_TILES,
    OPERATION,
    OPERATORS,
    PARTITIONED,
    PLACEMENT,
    REFERENCE,
    REPORT,
    SEARCH,
    SHARDED_DTYPES,
    SHARDING,
    STRIDED,
    TRANSFORMED,
    XLA,
    XLA_LINEAR,
    XLA_LINEARS,
    XLA_NORM,
    Mutant,
)

OVER_SOME = "tests/test_shard_map.py::test_over_some_axes[kernels-"

RULES = [
    # Launchers
    Mutant(
        "the last tile of neighbours forgotten", NORM_LAUNCH,
        "return self.rows // self.inner * ceil_div(self.inner, tile.rows)",
        "return self.rows // self.inner * max(1, self.inner // tile.rows)", STRIDED,
    ),
    Mutant(
        "what is shared over some of vmap's axes taken for shared over all", NORM_LAUNCH,
        "if batch != geometry.batch and math.prod(batch) == 1:", "if batch != geometry.batch:",
        (f"{TRANSFORMED}test_nested_vmap_over_different_arguments[layer_norm-triton]",),
    ),
    Mutant("a shared operand not said to be", NORM_LAUNCH, "shared.append(name)", "pass", GROUPS),
    Mutant(
        "partial sums in the dtype of x", NORM_LAUNCH,
        "jax.ShapeDtypeStruct((len(sums), g.groups, programs, g.h), compute)",
        "jax.ShapeDtypeStruct((len(sums), g.groups, programs, g.h), total.dtype)",
        (f"{OPERATORS}test_partial_sums_are_not_rounded[bfloat16]",),
    ),
    Mutant(
        "per-example gradients summed", NORM_LAUNCH,
        "grouped=per_example_gradients or not plain", "grouped=not plain",
        (f"{TRANSFORMED}test_vmap_of_grad[triton-layer_norm-x]",),
    ),
    Mutant(
        "dz in float16", XLA_LINEAR,
        "sums = dy.dtype if dy.dtype == jnp.bfloat16 else jnp_norms.compute_dtype(dy.dtype)", "sums = dy.dtype",
        (f"{LINEARS}test_dz_does_not_underflow[triton-600]",),
    ),
    Mutant(
        "z in the place of a dz that other programs read", NORM_LAUNCH,
        "(y.dtype, y.shape) == (dy.dtype, dy.shape) and chunks == 1", "(y.dtype, y.shape) == (dy.dtype, dy.shape)",
        (f"{FUSED}test_programs_that_share_rows_do_not_overwrite_what_others_read",),
    ),
    # The formulas
    Mutant(
        "unbiased variance", XLA_NORM,
        "variance = _over_parts(jnp.mean(jnp.square(_centered(x, mean)), norm.axis, keepdims=True), h_axes)",
        "variance = jnp.sum(jnp.square(_centered(x, mean)), norm.axis, keepdims=True) / (x.shape[norm.axis] - 1)", XLA,
    ),
    Mutant(
        "variance as E[x^2] - E[x]^2, XLA", XLA_NORM,
        "variance = _over_parts(jnp.mean(jnp.square(_centered(x, mean)), norm.axis, keepdims=True), h_axes)",
        "variance = jnp.mean(jnp.square(_centered(x, None)), norm.axis, keepdims=True) - jnp.square(mean)",
        (f"{ACCURACY}test_rows_with_a_mean_1000_times_their_spread[xla-37-1000-layer_norm-float32]",),
    ),
    Mutant(
        "scale not zero-centered, XLA", XLA_NORM,
        "return 1.0 + scale.astype(dtype) if norm.switches.zero_centered_scale else scale.astype(dtype)",
        "return scale.astype(dtype)",
        (f"{ACCURACY}test_optional_arguments[xla-layer_norm-no offset-zero-centered]",),
    ),
    Mutant("c2 dropped, XLA", XLA_NORM, "d = g - x_hat * mean_over_h(g_over_h * x_hat)  # (8)", "d = g", XLA),
    Mutant(
        "c1 without the scale, XLA", XLA_NORM,
        "d = d - mean_over_h(g_over_h)  # (7)",
        "d = d - mean_over_h(dy.astype(dtype) / total.shape[norm.axis])", XLA,
    ),
    Mutant(
        "doffset added up in the dtype of dy", XLA_NORM,
        "sum_over_rows(_wide(dy, dtype))\n", "sum_over_rows(dy)\n",
        (f"{ACCURACY}test_gradients_of_wider_parameters_keep_their_digits[xla-bfloat16]",),
    ),
    Mutant(
        "dscale of x and not of x_hat", XLA_NORM,
        "sum_over_rows(_wide(dy, dtype) * x_hat)",
        "sum_over_rows(_wide(dy, dtype) * total)", XLA,
    ),
    Mutant("the sum's cotangent dropped", XLA_NORM, "d if dtotal is None else d + dtotal.astype(dtype)", "d", XLA),
    Mutant(
        "parameters' gradients summed over vmap's axes", XLA_NORM,
        "others = {*norm.axes_of_examples(ndim, batch_dims), ndim + norm.axis}", "others = {ndim + norm.axis}",
        (f"{TRANSFORMED}test_vmap_of_grad[xla-layer_norm-x]",),
    ),
    Mutant(
        "y without the bias, XLA", XLA_LINEAR,
        "y = y + jnp.expand_dims(bias.astype(sums), axes.lead)", "y = y + 0", XLA_LINEARS,
    ),
    Mutant(
        "doffset without dbias, XLA", XLA_LINEAR,
        "jnp.sum(kernel.astype(dbias.dtype) * row,", "jnp.sum(kernel.astype(dbias.dtype),",
        (f"{FROZEN}test_some_gradients_are_those_of_all[xla-layer_norm_linear-offset-False]",),
    ),
    Mutant(
        "dkernel of a z without offset, XLA", XLA_NORM,
        "y if offset is None else y + offset.astype(dtype)\n", "y\n",
        XLA_LINEARS,
    ),
    Mutant(
        "dz by a kernel not transposed, XLA", XLA_LINEAR,
        "_product(dy, axes.y, kernel, axes.kernel, axes.x",
        "_product(dy, axes.y, kernel[..., ::-1], axes.kernel, axes.x", XLA_LINEARS,
    ),
    # The operators and their transformations
    Mutant(
        "vmap's axis not counted", OPERATION, "batch_dims=told.batch_dims + 1", "batch_dims=told.batch_dims",
        (f"{TRANSFORMED}test_vmap_of_grad[xla-layer_norm-x]",),
    ),
    Mutant(
        "an operation called again where JAX looks for NaN", OPERATION, "call._apply_primitive = True", "pass",
        ("tests/test_debug_nans.py::test_results_that_are_no_numbers[xla-jit-nan-jit-layer_norm_linear]",),
    ),
    Mutant(
        "operands vary apart in shard_map", DERIVATIVES,
        """return jax.lax.pcast(a, tuple(sorted(missing)), to="varying") if missing else a""", "return a",
        ("tests/test_shard_map.py::test_gradients_of_what_devices_share_are_added_up[xla-layer_norm-rows]",),
    ),
    Mutant(
        "x saved where the sum was normed",
        NORM_RULES,
        "total = operands.x if outcome.total is None else outcome.total",
        "total = operands.x",
        ("tests/test_matrix.py::test_reverse_mode[add_layer_norm-so-xla-value_and_grad]",),
    ),
    Mutant(
        "a tangent without the mean's", XLA_NORM, "dy = dy - jnp.mean(t, norm.axis, keepdims=True)", "pass",
        ("tests/test_matrix.py::test_forward_mode[layer_norm-so-xla-jvp]",),
    ),
    Mutant(
        "a tangent without the kernel's", XLA_LINEAR, "d = d + of_rows(z, dkernel)", "pass",
        ("tests/test_matrix.py::test_forward_mode[layer_norm_linear-sob-xla-jvp]",),
    ),
    Mutant(
        "vmap's axes taken for rows where a parameter has them", OPERATION, "return len(batches) == 1 and all(",
        "return len(batches) == 1 or all(",
        ("tests/test_matrix.py::test_forward_mode[layer_norm-so-triton-grad(vmap), over all]",),
    ),
    Mutant(
        "no device told of the others' rows", PARTITIONED, "share = jax.lax.psum(share, left) if left else share",
        "pass",
        (f"{SHARDING}test_gradient_under_jit[layer_norm-rows]",),
    ),
    Mutant(
        "H split where no device can ask another", IN_SHARES, "whole = {Kind.HIDDEN} | {", "whole = {",
        (f"{OVER_SOME}layer_norm-stage-data-tensor]",),
    ),
    Mutant(
        "features split where dx is their sum and no device can ask another", IN_SHARES,
        "for kind in r.summed if kind != Kind.ROW}", "for kind in r.summed if kind == Kind.HIDDEN}",
        ("tests/test_shard_map.py::test_few_features_over_some_axes[kernels-layer_norm_linear]",),
    ),
    Mutant(
        "one device's share for the sum", IN_SHARES,
        "jnp.sum(jax.lax.with_sharding_constraint(a, spread), axis=0) if s", "a[0] if s",
        (f"{OVER_SOME}layer_norm-stage-data-tensor]",),
    ),
    Mutant(
        "the derivative of what mesh axes are left explicit in left to JAX", DERIVATIVES,
        "if AxisType.Manual in mesh.axis_types:", "if False:",
        (f"{EXPLICIT}test_gradient_of_a_shard_map_that_leaves_axes_explicit[layer_norm-rows over both axes-False]",),
    ),
    Mutant(
        "second derivatives of what mesh axes are left explicit in left to JAX", DERIVATIVES,
        "jax.jit(jax.checkpoint(call, prevent_cse=False))", "jax.jit(call)",
        (f"{EXPLICIT}test_second_derivatives_in_a_shard_map_that_leaves_axes_explicit[add_rms_norm-False]",),
    ),
    Mutant(
        "the first function on the host called in another's place", OPERATION,
        "return len(context.host_callbacks) - 1", "return 0",
        ("tests/test_sharded_kernels.py::test_every_operator[layer_norm-rows]",),
    ),
    Mutant(
        "features not added up", LINEAR_RULES, "summed=(Kind.FEATURE, *r.summed)", "summed=r.summed",
        IN_ONE_ON_A_MESH,
    ),
    Mutant(
        "dbias added up over features", LINEAR_RULES,
        "Result(b, summed=(Kind.ROW,)", "Result(b, summed=(Kind.FEATURE, Kind.ROW)",
        IN_ONE_ON_A_MESH,
    ),
    Mutant(
        "a part of H taken for the whole", XLA_NORM, "return lax.pmean(mean, h_axes) if h_axes else mean",
        "return mean",
        (f"{SHARDING}test_gradient_under_jit[layer_norm-H]",),
    ),
    Mutant(
        "a product over a part of H", XLA_LINEAR, "y = lax.psum(y, h_axes)", "pass",
        (f"{SHARDING}test_several_linears[features0-float32-H-Auto]",),
    ),
    Mutant(
        "padding taken for rows", PLACEMENT, "% math.prod(mesh.shape[a] for a in axes) == 0:", "% 1 == 0:",
        (f"{SHARDING}test_what_does_not_divide_is_not_split",),
    ),
    Mutant(
        "sums over devices of shares in 16 bits", LAYOUT, ".name if r.wide else d", ".name if False else d",
        (f"{SHARDED_DTYPES}test_shares_of_16_bit_parameters_are_added_up_in_float32",),
    ),
    # What is frozen
    Mutant(
        "dx of a frozen x written", NORM_LAUNCH, "for d in (dtypes.y, dtypes.dx, dtypes.dresidual, dtypes.dz)",
        "for d in (dtypes.y, total.dtype, dtypes.dresidual, dtypes.dz)",
        (f"{FROZEN}test_launches[norm-scale-asked for]",),
    ),
    Mutant(
        "dscale of a frozen scale", NORM_LAUNCH, "for name in _SUMS if getattr(dtypes, name) is not None)",
        "for name in _SUMS[:2])", (f"{FROZEN}test_launches[norm-x-asked for]",),
    ),
    Mutant(
        "row sums of rows too wide, without a dx", NORM_LAUNCH,
        "if plan.sums is not None and pulls:", "if plan.sums is not None:",
        (f"{FROZEN}test_wide_rows_without_dx_need_no_sums",),
    ),
    Mutant(
        "doffset alone of a part of the rows", LINEAR_LAUNCH,
        "sums = norms.column_sums(rows, dtypes", "sums = norms.column_sums(rows[..., 1:, :], dtypes",
        (f"{FROZEN}test_some_gradients_are_those_of_all[triton-layer_norm_linear-offset-False]",),
    ),
    Mutant(
        "a tangent of offset and bias without the offset's", XLA_LINEAR,
        "offset.astype(compute), kernel", "0 * offset.astype(compute), kernel",
        (f"{FROZEN}test_some_gradients_are_those_of_all[xla-layer_norm_linear-offset-True]",),
    ),
    Mutant(
        "what is not used computed", OPERATION, "partial_eval.dce_rules[primitive] = self._without_unused", "pass",
        (f"{FROZEN}test_launches[norm-scale-used]",),
    ),
    Mutant(
        "vmap's axis dropped with an operand", OPERATION, "kept_places = set(range(len(eqn.invars)))", "pass",
        (f"{FROZEN}test_an_unused_result_may_have_brought_the_axis_of_vmap[xla-offset]",),
    ),
    Mutant(
        "residuals whose number hangs on what is wanted", DERIVATIVES,
        "a.nothing() if isinstance(a, Unneeded)", "None if isinstance(a, Unneeded)",
        (f"{FROZEN}test_differentiated_by_one_argument_then_another[xla-jit]",),
    ),
    Mutant(
        "x kept for an offset", NORM_RULES, """if "rstd" in needed:""", "if True:",
        (f"{FROZEN}test_held_between_forward_and_backward[xla-layer_norm-offset-0-False]",),
    ),
    Mutant(
        "another's gradient wanted", DERIVATIVES, "for n in a.shape[1:]", "for n in a.shape[:0:-1]",
        (f"{FROZEN}test_some_gradients_of_a_fused_linear[x+scale+offset+bias]",),
    ),
    Mutant(
        "residuals whose structure hangs on what is wanted", DERIVATIVES,
        "(kept, _Static(dtypes), _told(", "(kept, _Static(_only(dtypes, is_wanted)), _told(",
        (f"{FROZEN}test_differentiated_by_one_argument_then_another[xla-jit]",),
    ),
    Mutant(
        "all operands needed, whatever is wanted", OPERATION,
        "wanted in _fields(self._made_of, dtypes) if jax.tree.leaves(wanted) for",
        "wanted in _fields(self._made_of, dtypes) for",
        (f"{FROZEN}test_held_between_forward_and_backward[xla-layer_norm-offset-0-False]",),
    ),
    Mutant(
        "what is not needed passed all the same", OPERATION,
        "return a if name in names else jax.tree.map(lambda _: None, a)", "return a",
        (f"{FROZEN}test_launches[norm-offset-used]",),
    ),
    Mutant(
        "the mean forgotten among what dscale is made of", NORM_RULES,
        """dscale=("dy", "total", "mean", "rstd", "z"),""", """dscale=("dy", "total", "rstd", "z"),""",
        (f"{FROZEN}test_some_gradients_are_those_of_all[xla-layer_norm-scale-False]",),
    ),
    # The reference and the checker
    Mutant(
        "the reference's sum not rounded", REFERENCE,
        "total = jax.lax.optimization_barrier((total + residual.astype(total.dtype)).astype(total_dtype))",
        "total = (total + residual.astype(total.dtype)).astype(total_dtype)",
        ("tests/test_rounded_sum.py::test_it_is_what_is_returned_that_is_normed[add_layer_norm-reference-jitted]",),
    ),
    Mutant(
        "a sum's digits left to its conversion", XLA_NORM,
        "lax.reduce_precision(total, jnp.finfo(total.dtype).nexp, digits)", "total",
        ("tests/test_rounded_sum.py::test_a_gradient_alone_is_that_of_the_rounded_sum[add_rms_norm-bfloat16]",),
    ),
    Mutant(
        "only the largest error judged", LIMITS,
        "self.error <= self.limit and self.rms_error <= self.rms_limit", "self.error <= self.limit",
        ("tests/test_limits.py::test_slips_are_rejected_by_what_they_break[bfloat16]",),
    ),
    Mutant(
        "only the root mean square judged", LIMITS,
        "self.error <= self.limit and self.rms_error <= self.rms_limit", "self.rms_error <= self.rms_limit",
        ("tests/test_limits.py::test_slips_are_rejected_by_what_they_break[bfloat16]",),
    ),
    Mutant(
        "a wrong seed outvoted by an unsure one", REPORT,
        "lambda row: (not row.ok, not row.unsure, row.badness)", "lambda row: (row.unsure, row.badness)",
        ("tests/test_testing.py::test_one_wrong_seed_is_not_outvoted",),
    ),
    Mutant(
        "the first seed's arguments for all seeds", CHECKER,
        "dataclasses.replace(other, floats=self.floats, rest=self.rest)", "other",
        ("tests/test_testing.py::test_several_seeds_are_one_program_each",),
    ),
    Mutant(
        "a cotangent of ones", CHECKER,
        "random.standard_normal(a.shape).astype(a.dtype) for a", "np.ones(a.shape, a.dtype) for a",
        ("tests/test_catalogue.py::test_wrong_rules_are_rejected[LayerNorm: cotangent ignored]",),
    ),
    Mutant(
        "differences of one step, not extrapolated", CHECKER, "better = error < least", "better = error < 0",
        (f"{DIFFERENCES}test_numerical_gradient",),
    ),
    Mutant(
        "direction ignored in second derivatives", CHECKER,
        "jnp.vdot(g, d).astype(dtype) for g, d", "jnp.sum(g).astype(dtype) for g, d",
        ("tests/test_catalogue.py::test_right_second_derivatives_are_accepted[layer_norm_linear-forward]",),
    ),
    Mutant(
        "coarse steps not refuted by fine ones", CHECKER,
        "best, least = np.where(refuted, row[0], best), np.where(refuted, np.inf, least)", "pass",
        (f"{DIFFERENCES}test_steps_of_whole_periods_do_not_decide",),
    ),
    Mutant(
        "a slope that rounding hides taken for none", CHECKER, "np.maximum(least, unseen)", "least",
        (f"{DIFFERENCES}test_what_no_step_changes_is_unsure",),
    ),
    Mutant(
        "steps of many periods trusted", CHECKER, "least = np.where(wild, np.inf, least)", "pass",
        (f"{DIFFERENCES}test_differences_without_digits_are_unsure",),
    ),
    Mutant(
        "a NaN beside the sample missed", CHECK, "np.sort(np.append(indices[1:], lost[0])) if", "indices if",
        (f"{DIFFERENCES}test_what_is_not_finite_is_found_beside_a_sample",),
    ),
    Mutant(
        "a wrong element beside the sample missed", CHECK, "in zip(rows, along, strict=True)",
        "in zip(rows, rows, strict=True)",
        (f"{DIFFERENCES}test_a_wrong_element_is_found_beside_a_sample",),
    ),
    Mutant(
        "zeros passed without a word", REPORT,
        "good.all() and np.any(t) and np.all(np.abs(t) <= tolerance.absolute)", "False",
        (f"{DIFFERENCES}test_where_zeros_would_pass_the_report_says_so",),
    ),
    # Tuning
    Mutant(
        "unaligned rows given the tiles of aligned ones", NORM_TILES, "LAYOUTS[1 if inner * itemsize % 16 == 0 else 2]",
        "LAYOUTS[1]",
        ("tests/test_tuning.py::test_other_elements_layouts_and_results_have_choices_of_their_own",),
    ),
    Mutant(
        "two kernels' tiles exchanged", LINEAR_TILES, 'chip, chosen["row_sums"], chosen["backward"])',
        'chip, chosen["backward"], chosen["row_sums"])',
        ("tests/test_tuned_tiles.py::test_linears_are_right_under_tuned_tiles[fused]",),
    ),
    Mutant(
        "NaN taken for a right number", SEARCH, "if not error <= allowed * largest:", "if error > allowed * largest:",
        ("tests/test_tune.py::test_what_differs_by_more_than_another_order_of_sums_is_wrong[float32]",),
    ),
    Mutant(
        "a tile kept that loses in one workload", SEARCH, "<= (1 + NOISE) * old + RESOLUTION]", "<= 2 * old]",
        ("tests/test_tune.py::test_what_loses_in_one_workload_is_not_kept",),
    ),
    Mutant(
        "former tiles lost", "jln/_cli/tune.py", "if not _is(raw, key)] + [entry]", "if _is(raw, key)] + [entry]",
        ("tests/test_tune.py::test_a_search_is_taken_up_again_and_loses_nothing",),
    ),
    # Explaining
    Mutant(
        "loops and checkpoints not told", EXPLAIN,
        "route._replace(why=route.why + within)", "route",
        ("tests/modules/test_explain.py::test_where_a_layer_is_and_what_is_around_it",),
    ),
]  # fmt: skip
