"""Compiled kernels of a norm in front of a sum, and of norms on both sides of one, executed."""

from cases import Case, cases, check

BOTH = "rms_norm_add_rms_norm"
GATED = f"{BOTH}, gate"

# Tiles of several rows, several programs and a ragged last tile; one row; rows on 16 bytes and not; a float32 residual;
# the widest rows that a tile holds; beside a float32 residual 5376, of which a fourth round of a thread's is left out.
# Wider rows take two kernels forward and two backward.
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
    Case(BOTH, (9, 40), "float32", "small-h200", forward_mode=True),
    Case(BOTH, (7, 5376), "bfloat16", "small-h200", residual="float32", parameters="float32"),
    Case(BOTH, (4, 8192), "bfloat16", "small-h200", residual="float32"),
]

# A gate between the norms, of features and of examples. Where the norms take two kernels XLA multiplies by it.
BETWEEN = [
    Case(GATED, (70, 128), "bfloat16", "small-h200"),
    Case(GATED, (29, 1000), "float32", "small-l4"),
    Case(GATED, (33, 768), "bfloat16", "small-b200", residual="float32", parameters="float32"),
    Case(GATED, (9, 100), "float64", "a100", zero_centered_scale=True),
    Case(GATED, (3, 16384), "bfloat16", "small-h200"),
    Case(GATED, (19, 256), "bfloat16", "small-h200", wanted="g"),
    Case(GATED, (3, 70, 128), "bfloat16", "small-h200", of_examples=True),
    Case(GATED, (5, 5376), "bfloat16", "small-a100", residual="float32", parameters="float32"),
    Case(GATED, (5, 4096), "bfloat16", "small-h200", residual="float32", parameters="float32"),
]

OF_HEADS = [
    Case(BOTH, (5, 4, 128), "bfloat16", "small-h200", of_heads=True),
    Case(GATED, (5, 3, 100), "float32", "small-a100", of_heads=True),
]

LINEARS = [
    Case(f"{BOTH}_linear", (70, 128), "bfloat16", "small-h200", features=(16,)),
    Case(f"{BOTH}_linear", (33, 104), "float32", "a100", features=(300,)),
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
    Case("rms_norm_add", (9, 40), "float32", "small-h200", over="rd"),
]


@cases(WHOLE, quick=(0, 1, 2, 4, 8, 10, 14))
def test_norms_on_both_sides(case):
    check(case)


@cases(BETWEEN, quick=(0, 3))
def test_a_gate_between_the_norms(case):
    check(case)


@cases(OF_HEADS, quick=(1,))
def test_parameters_of_heads(case):
    check(case)


@cases(LINEARS, quick=(0,))
def test_linears_behind_both(case):
    check(case)


@cases(GROUPS, quick=(1,))
def test_groups_of_rows(case):
    check(case)


@cases(BEHIND, quick=(0, 3, 4))
def test_norms_in_front_of_a_sum(case):
    check(case)
