"""Ways to break calls under `vmap` that are one wider call."""

from targets import ARRAYS, JUNCTION_RULES, TRANSFORMED, WIDER, XLA_GRADIENTS, Mutant

CALL = "jln/_core/reverse_mode.py"
PRODUCTS = "jln/_junction/parts.py"
ONE_PRODUCT = "jln/_junction/linears/product.py"
TESTS = "tests/transformations/test_wider.py::"
BEHIND_H = (f"{TESTS}test_examples_are_rows[xla-rms_norm-3]", f"{TESTS}test_examples_are_rows[xla-rms_norm_linear-3]")


def beside(case: str) -> tuple[str, ...]:
    return (f"{TESTS}test_examples_beside_parameters_along_axes[{case}]",)


OF_GATES = (f"{TESTS}test_a_gate_of_rows_beside_examples",)
STAYS = f"{TRANSFORMED}test_examples_stay_where_they_are[triton-"
IN_FRONT = (f"{TESTS}test_examples_are_features[xla-rms_norm_linear-None-0]",)
TRANSPOSED = f"{TRANSFORMED}test_what_kernels_would_have_transposed_is_left_to_xla["
PARTS = "tests/transformations/test_parts.py::"
AROUND_ROWS = (f"{PARTS}test_rows_around_a_residual_that_rows_share",)
COPIES = (f"{PARTS}test_parameters_of_the_same_rows",)
SAME_EXAMPLES = f"{PARTS}test_parameters_of_the_same_examples[xla-add_layer_norm-"
COPIES_OF_EXAMPLES, EXAMPLES_OF_COPIES = (
    (f"{SAME_EXAMPLES}{a} of {b}]",) for a, b in (("copies", "examples"), ("examples", "copies"))
)
NESTED = f"{PARTS}test_nested[xla-{{}}-grad-True]"

WIDENED = [
    Mutant(
        "rows behind groups, and examples behind both", ARRAYS,
        "return None if self.behind else self._moved(axis, ndim, axis=self.axis - 1)",
        "return self._moved(axis, ndim, axis=self.axis - 1)",
        (f"{TRANSFORMED}test_examples_beside_groups_with_rows_behind[triton-around-4]",),
    ),
    Mutant("rows behind H of which H is not counted", ARRAYS, "axis=self.axis - 1)", "axis=self.axis)", BEHIND_H[:1]),
    Mutant(
        "rows among groups that lie interleaved", ARRAYS,
        "if in_front <= axis <= end - self.interleaved:", "if in_front <= axis <= end:",
        beside("xla-(2, 1, 4, 1)-(1, 1, 1, 1)--1-3-None-None-inside"),
    ),
    Mutant(
        "rows behind groups not counted", ARRAYS,
        "behind=self.behind + 1) if has_rows_behind", "behind=self.behind) if has_rows_behind",
        beside("xla-(1, 1, 4, 1)-(1, 1, 4, 1)--1-4-None-None-inside"),
    ),
    Mutant(
        "rows between groups and a normalised axis that is not the last", ARRAYS,
        "has_rows_behind = axis >= end and self.axis == -1", "has_rows_behind = axis >= end",
        beside("triton-(1, 1, 4, 1)-(1, 1, 4, 1)--2-3-None-None-inside"),
    ),
    Mutant(
        "rows among examples in front", ARRAYS,
        "if axis > batch_dims or (in_front < h and self.axis != -1):", "if in_front < h and self.axis != -1:",
        beside("xla-(2, 3, 1, 1)-(1, 3, 1, 1)--1-1-None-None-inside"),
    ),
    Mutant(
        "rows in front of examples, and a normalised axis that is not the last", ARRAYS,
        "if axis > batch_dims or (in_front < h and self.axis != -1):", "if axis > batch_dims:",
        beside("triton-(2, 1, 1, 1)-(2, 1, 1, 1)--2-0-None-None-inside"),
    ),
    Mutant(
        "rows behind examples forgotten where others come in front", ARRAYS,
        "interleaved=self.examples, behind=h - in_front)", "interleaved=self.examples)",
        beside("xla-(2, 1, 1, 1)-(2, 1, 1, 1)--1-0-None-None-inside"),
    ),
    Mutant(
        "examples between examples in front taken for others", ARRAYS,
        "if axis <= batch_dims + self.examples:", "if axis <= batch_dims:",
        beside("xla-(2, 3, 1, 1)-(1, 3, 1, 1)--1-1-None--1-around"),
    ),
    Mutant(
        "examples that lie apart from interleaved ones", ARRAYS,
        "if not end - self.interleaved <= axis <= end <= h or", "if not axis <= end <= h or",
        beside("xla-(1, 1, 4, 1)-(1, 1, 4, 1)--1-1-0-0-around"),
    ),
    Mutant(
        "examples between rows, and a normalised axis that is not the last", ARRAYS,
        "<= axis <= end <= h or (end < h and self.axis != -1):", "<= axis <= end <= h:", (f"{STAYS}(0, 2, 3)--2-1]",),
    ),
    Mutant(
        "rows behind interleaved examples forgotten", ARRAYS,
        "interleaved=self.interleaved + 1, behind=h - end)", "interleaved=self.interleaved + 1)",
        (f"{STAYS}(0, 2, 3)--1-1]",),
    ),
    Mutant(
        "rows taken to be behind examples that lie before others", ARRAYS,
        "end = h - self.behind if self.interleaved else axis", "end = axis",
        (f"{TRANSFORMED}test_examples_beside_groups_stay_where_they_are[triton-together-1]",),
    ),
    Mutant(
        "a parameter that interleaved examples share not written out", WIDER,
        "copies | columns_of(norm, names)\n", "copies\n", (f"{STAYS}(0, 2, 3)--1-2]",),
    ),
    Mutant(
        "a gate of rows that examples share not written out", WIDER,
        "if TABLE[name].shape is Shape.NUMBER}", "if False}", OF_GATES,
    ),
    Mutant(
        "parameters of examples taken for one, where no gradient of them is wanted", WIDER,
        "are_rows = {*axes.present(), *dtypes.present()}.isdisjoint", "are_rows = {*dtypes.present()}.isdisjoint",
        beside("triton-(1, 1, 4, 1)-(1, 1, 4, 1)--1-2-None--1-around"),
    ),
    Mutant(
        "gradients of parameters of each example added up", WIDER,
        "are_rows = {*axes.present(), *dtypes.present()}.isdisjoint", "are_rows = {*axes.present()}.isdisjoint",
        (f"{STAYS}(0, 2, 3)--1-2]",),
    ),
    Mutant(
        "results of what is moved left in front", WIDER,
        "implementation=_OF_MOVED, back=axis)", "implementation=_OF_MOVED)",
        (f"{TRANSPOSED}a residual for all-inside]",),
    ),
    Mutant(
        "moved axes of operations handed to kernels", WIDER,
        "implementation=_OF_MOVED, back=axis)", "back=axis)", (f"{TRANSPOSED}parameters of each behind H-around]",),
    ),
    Mutant(
        "moved axes of calls handed to kernels", WIDER,
        "implementation=junction.implementation or _OF_MOVED)", "implementation=junction.implementation)",
        (f"{TRANSPOSED}parameters of each behind H-inside]",),
    ),
    Mutant(
        "rows that examples share taken for rows of each", WIDER,
        "    if any(getattr(axes, name) is None for name in of_rows):\n", "    if False:\n",
        (f"{TESTS}test_examples_in_the_middle_share_an_array_of_rows",),
    ),
    Mutant(
        "copies made in the user's mode of promotion", "jln/_core/derivatives.py",
        "_in_own_modes(widen)", "widen", (f"{TESTS}test_copies_for_examples_under_strict_promotion",),
    ),
    Mutant(
        "what is differentiated no wider than what is not",
        CALL,
        "vmaps=(), moving=moving)",
        "vmaps=(), moving=None)",
        BEHIND_H[:1],
    ),
    Mutant(
        "rows behind H that stay there in front of a Linear",
        WIDER,
        "if axis <= ndim + norm.axis or not (junction.features or junction.eight_bits):",
        "if True:",
        BEHIND_H[1:],
    ),
    Mutant(
        "parameters of examples taken for rows of one norm",
        WIDER,
        "are_rows = axes.present().keys().isdisjoint(columns_of(norm, names))",
        "are_rows = True",
        (f"{TESTS}test_examples_have_parameters_of_their_own[xla-rms_norm-all-0]",),
    ),
    Mutant("heads that stay in front of H", WIDER, "jnp.moveaxis(k, a, 1)", "jnp.moveaxis(k, a, -1)", IN_FRONT),
    Mutant(
        "heads of a bias behind its features",
        WIDER,
        "jnp.moveaxis(bias, of_bias, 0)",
        "jnp.moveaxis(bias, of_bias, -1)",
        (f"{TESTS}test_examples_are_features[xla-rms_norm_linear-0-1]",),
    ),
    Mutant("heads that a Linear's features do not count", WIDER, "n + (a is not None)", "n", IN_FRONT),
    Mutant(
        "one kernel for more features than it can hold, as heads",
        WIDER,
        "in_one=few_features(operands, junction)",
        "in_one=junction.in_one",
        (f"{TESTS}test_few_features_that_become_many",),
    ),
    Mutant(
        "vmaps in the other order",
        CALL,
        "bind(leaves, vmaps=(*vmaps, dims)",
        "bind(leaves, vmaps=(dims, *vmaps)",
        (f"{TESTS}test_vmaps_of_examples_in_vmaps",),
    ),
    Mutant(
        "dead code that takes a live result with it",
        CALL,
        "was_used and next(asked)",
        "next(asked, False)",
        (f"{TESTS}test_results_that_fall_away_one_after_the_other",),
    ),
    # Parts, and parameters in copies
    Mutant(
        "calls in no parts, so that JAX adds up examples that share a norm",
        PRODUCTS,
        "if junction.eight_bits or not junction.features:",
        "if True:",
        (f"{PARTS}test_one_norm[biases, then scales]",),
    ),
    Mutant(
        "z in float16, and so what is pulled back to it",
        PRODUCTS,
        "z_dtype = dtype_in_memory(jnp.result_type(*dtypes))",
        "z_dtype = jnp.result_type(*dtypes).name",
        (f"{PARTS}test_small_cotangents_in_float16",),
    ),
    Mutant(
        "z held where remat is asked for",
        PRODUCTS,
        "if junction.norm.remat else of_operands)",
        "if False else of_operands)",
        (f"{PARTS}test_remat_holds_the_operands_alone",),
    ),
    Mutant(
        "what does not move as a call in reverse mode, that forward mode around it refuses",
        CALL,
        "if not any(jax.tree.leaves(moving)):",
        "if False:",
        (NESTED.format("all, then rows-jvp of grad of some").replace("-grad-", "-"),),
    ),
    Mutant(
        "vmaps that do not change places",
        CALL,
        "if widens and vmaps and is_widened(leaves, inside, around, **how):",
        "if False:",
        AROUND_ROWS,
    ),
    Mutant(
        "a vmap that changes places and leaves its axis behind",
        CALL,
        "[place] * sum(used)",
        "[0] * sum(used)",
        AROUND_ROWS,
    ),
    Mutant(
        "an axis inside whose place counts one around it",
        CALL,
        "else a - (a > b) for",
        "else a for",
        AROUND_ROWS,
    ),
    Mutant(
        "an axis around whose place does not count one inside",
        CALL,
        "else b + (b >= a) for",
        "else b + (b > a) for",
        AROUND_ROWS,
    ),
    Mutant(
        "a bias of examples in another order than y",
        ONE_PRODUCT,
        "jnp.moveaxis(operands.bias, places.bias, 0)",
        "jnp.moveaxis(operands.bias, places.bias, -1)",
        (f"{PARTS}test_linears[xla-rms_norm_linear-biases-False]",),
    ),
    Mutant(
        "an axis of examples at another place in a kernel than its own",
        ONE_PRODUCT,
        "grown(axes.kernel, places.kernel)",
        "grown(axes.kernel, places.kernel and 0)",
        (f"{PARTS}test_linears[xla-rms_norm_linear-rows and kernels-False]",),
    ),
    Mutant(
        "x_hat's cotangent without the scales",
        XLA_GRADIENTS,
        "product(g, jnp.asarray(effective_scale(operands.scale, dtype, norm)), norm.copies)",
        "g",
        COPIES,
    ),
    Mutant(
        "dscale of examples of the same rows without x_hat",
        XLA_GRADIENTS,
        "jnp.sum(product(wide(dy, dtype), x_hat, norm.copies), rows, keepdims=True)",
        "jnp.sum(wide(dy, dtype), rows, keepdims=True)",
        COPIES,
    ),
    Mutant(
        "the gradients of examples of the same rows in the compute dtype of dy",
        XLA_GRADIENTS,
        "operands.total\n    dtype = compute_dtype(dy.dtype if total is None else total.dtype)",
        "operands.total\n    dtype = compute_dtype(dy.dtype)",
        (f"{TESTS}test_copies_for_examples_in_float64_with_a_narrow_result",),
    ),
    Mutant(
        "the cotangent of the same rows' x_hat in float32",
        XLA_GRADIENTS,
        "kept = dtype_in_memory(dtype if dtype == jnp.float64 else widest)",
        'kept = "float32"',
        (f"{TESTS}test_copies_for_examples_in_float64_with_a_narrow_result",),
    ),
    Mutant(
        "a sum over examples of products of broadcasts, on a CPU",
        "jln/_core/one_by_one.py",
        "cpu=in_a_loop",
        "cpu=jax.numpy.multiply",
        ("tests/operators/test_shared_operands.py::test_parameters_of_examples_under_a_broadcast[x-axes0]",),
    ),
    Mutant(
        "a sum over examples of products of broadcasts, by a loop of one",
        "jln/_core/one_by_one.py",
        "if a.shape[i] != 1)",
        "if a.shape)",
        ("tests/operators/test_shared_operands.py::test_a_shared_scale_under_a_broadcast[sizes1]",),
    ),
    Mutant(
        "the gradient of a scale that examples share, of products of broadcasts, on a CPU",
        XLA_GRADIENTS,
        "product(wide(dy, dtype), x_hat, norm.copies)",
        "wide(dy, dtype) * x_hat",
        ("tests/operators/test_shared_operands.py::test_a_shared_scale_under_a_broadcast",),
    ),
    Mutant(
        "rows of which one is no row",
        XLA_GRADIENTS,
        "own = {*range(norm.copies), ",
        "own = {*range(norm.copies + 1), ",
        COPIES,
    ),
    Mutant(
        "examples of copies added up",
        XLA_GRADIENTS,
        "*norm.axes_of_examples(dy.ndim, norm.copies), dy",
        "dy",
        COPIES_OF_EXAMPLES,
    ),
    Mutant(
        "examples in front of copies",
        WIDER,
        'in_front = norm.copies if name in ("scale", "offset") else 0',
        "in_front = 0",
        EXAMPLES_OF_COPIES,
    ),
    Mutant(
        "examples of copies of which each operator has its own call",
        WIDER,
        "if norm.offset_rows or norm.remat or",
        "if norm.of_examples or norm.offset_rows or norm.remat or",
        COPIES_OF_EXAMPLES,
    ),
    Mutant(
        "copies of what is gated, too",
        WIDER,
        'or {"x_z", "z", "added"} & {*present}:',
        "or False:",
        (f"{PARTS}test_parameters_of_the_same_rows[xla-rms_norm_gated-scales]",),
    ),
    Mutant(
        "rows in front of copies",
        WIDER,
        "else axis + norm.copies",
        "else axis",
        (NESTED.format("scales, then rows"),),
    ),
    Mutant(
        "copies of the total where its y is not used",
        JUNCTION_RULES,
        "norm = dataclasses.replace(junction.norm, copies=0)\n        if",
        "norm = junction.norm\n        if",
        (f"{PARTS}test_dead_gradients_and_results",),
    ),
]  # fmt: skip
