"""Compiled kernels of a norm in front of a sum, and of norms on both sides of one, executed."""

from cases import Case, cases, check

BOTH = "rms_norm_add_rms_norm"

# Tiles of several rows, several programs and a ragged last tile; one row; rows on 16 bytes and not; a float32 residual;
# the widest rows that a tile holds. Wider rows, and rows side by side, take two kernels forward and two backward.
WHOLE = [
    Case(BOTH, (70, 128), "bfloat16", "small-h200"),
    Case(BOTH, (37, 17), "float32", "l4"),
    Case(BOTH, (29, 1001), "bfloat16", "small-a100"),
    Case(BOTH, (1, 64), "float16", "a100", zero_centered_scale=True),
    Case(BOTH, (33, 768), "bfloat16", "small-b200", residual="float32", parameters="float32"),
    Case(BOTH, (9, 33), "bfloat16", "h200", without="sp"),
    Case(BOTH, (9, 100), "float64", "a100"),
    Case(BOTH, (5, 4096), "float32", "small-h200"),
    Case(BOTH, (7, 8192), "bfloat16", "small-h200", zero_centered_scale=True),
    Case(BOTH, (19, 256), "bfloat16", "small-h200", wanted="x"),
    Case(BOTH, (19, 256), "bfloat16", "small-h200", wanted="p"),
    Case(BOTH, (19, 256), "bfloat16", "small-h200", wanted="rs"),
    Case(BOTH, (3, 16384), "bfloat16", "small-h200"),
    Case(BOTH, (5, 40, 64), "bfloat16", "small-b200", axis=1),
    Case(BOTH, (9, 40), "float32", "small-h200", forward_mode=True),
]

GROUPS = [
    Case(BOTH, (9, 40), "float32", "small-h200", over="xrdt"),
    Case(BOTH, (9, 40), "float32", "small-h200", over="ps"),
    Case(BOTH, (5, 768), "bfloat16", "b200", over="xp"),
]

BEHIND = [
    Case("rms_norm_add", (70, 128), "bfloat16", "small-h200"),
    Case("layer_norm_add", (29, 1000), "float32", "l4"),
    Case("rms_norm_add", (33, 768), "bfloat16", "small-b200", residual="float32", parameters="float32"),
    Case("layer_norm_add", (9, 33), "float32", "a100", residual="float64"),
    Case("layer_norm_add", (2, 40000), "bfloat16", "small-h200"),
    Case("rms_norm_add", (5, 40, 64), "bfloat16", "h200", axis=1),
    Case("rms_norm_add", (9, 40), "float32", "small-h200", over="rd"),
]


@cases(WHOLE, quick=(0, 1, 2, 4, 8, 10))
def test_norms_on_both_sides(case):
    check(case)


@cases(GROUPS, quick=(1,))
def test_groups_of_rows(case):
    check(case)


@cases(BEHIND, quick=(0, 3, 4))
def test_norms_in_front_of_a_sum(case):
    check(case)
