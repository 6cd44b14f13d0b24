"""Ways to break calls under `vmap` that are one wider call."""

from targets import WIDER, Mutant

CALL = "jln/_core/reverse_mode.py"
TESTS = "tests/transformations/test_wider.py::"
BEHIND_H = (f"{TESTS}test_examples_are_rows[xla-rms_norm-3]", f"{TESTS}test_examples_are_rows[xla-rms_norm_linear-3]")
IN_FRONT = (f"{TESTS}test_examples_are_features[xla-rms_norm_linear-None-0]",)

WIDENED = [
    Mutant(
        "rows behind groups, and examples behind both",
        "jln/_junction/arrays.py",
        "axis > h and (norm.behind or dtypes.block_scale is not None)",
        "axis > h and dtypes.block_scale is not None",
        ("tests/transformations/test_transforms.py::test_examples_beside_groups_with_rows_behind[triton-around-4]",),
    ),
    Mutant(
        "what is differentiated no wider than what is not",
        CALL,
        "vmaps=(), widens=True)\n\n            wanted",
        "vmaps=(), widens=False)\n\n            wanted",
        BEHIND_H[:1],
    ),
    Mutant("rows behind H of which H is not counted", WIDER, "axis=norm.axis - 1)", "axis=norm.axis)", BEHIND_H[:1]),
    Mutant(
        "rows behind H that stay there in front of a Linear",
        WIDER,
        "        axis = 0\n",
        "        pass\n",
        BEHIND_H[1:],
    ),
    Mutant(
        "examples as rows of a norm that has examples itself",
        WIDER,
        "    if norm.of_examples or norm.offset_rows:\n",
        "    if False:\n",
        (f"{TESTS}test_parameters_of_examples_stay_axes_of_vmap",),
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
        "vmaps=(*vmaps, tuple(dims))",
        "vmaps=(tuple(dims), *vmaps)",
        (f"{TESTS}test_parameters_of_examples_stay_axes_of_vmap",),
    ),
    Mutant(
        "dead code that takes a live result with it",
        CALL,
        "was_used and next(asked)",
        "next(asked, False)",
        (f"{TESTS}test_results_that_fall_away_one_after_the_other",),
    ),
]
