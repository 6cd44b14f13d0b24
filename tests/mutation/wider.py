"""Ways to break calls under `vmap` that are one wider call."""

from targets import ARRAYS, TRANSFORMED, WIDER, Mutant

CALL = "jln/_core/reverse_mode.py"
TESTS = "tests/transformations/test_wider.py::"
BEHIND_H = (f"{TESTS}test_examples_are_rows[xla-rms_norm-3]", f"{TESTS}test_examples_are_rows[xla-rms_norm_linear-3]")


def beside(case: str) -> tuple[str, ...]:
    return (f"{TESTS}test_examples_beside_parameters_along_axes[{case}]",)


OF_GATES = (f"{TESTS}test_a_gate_of_rows_beside_examples",)
STAYS = f"{TRANSFORMED}test_examples_stay_where_they_are[triton-"
IN_FRONT = (f"{TESTS}test_examples_are_features[xla-rms_norm_linear-None-0]",)

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
        "rows that examples share taken for rows of each", WIDER,
        "    if any(getattr(axes, name) is None for name in of_rows):\n", "    if False:\n",
        (f"{TESTS}test_examples_in_the_middle_share_an_array_of_rows",),
    ),
    Mutant(
        "copies made in the user's mode of promotion", "jln/_core/derivatives.py",
        "_with_standard_promotion(widen)", "widen", (f"{TESTS}test_copies_for_examples_under_strict_promotion",),
    ),
    Mutant(
        "what is differentiated no wider than what is not",
        CALL,
        "vmaps=(), widens=True)\n\n            wanted",
        "vmaps=(), widens=False)\n\n            wanted",
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
        "vmaps=(*vmaps, tuple(dims))",
        "vmaps=(tuple(dims), *vmaps)",
        (f"{TESTS}test_vmaps_of_examples_in_vmaps",),
    ),
    Mutant(
        "dead code that takes a live result with it",
        CALL,
        "was_used and next(asked)",
        "next(asked, False)",
        (f"{TESTS}test_results_that_fall_away_one_after_the_other",),
    ),
]  # fmt: skip
