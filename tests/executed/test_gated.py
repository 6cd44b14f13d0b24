"""Compiled kernels of gated norms, and of heads with parameters of their own, executed."""

from cases import Case, cases, check

FIRST = "rms_norm_gated"
LAST = "rms_norm_gated, norm_before_gate=False"

# Whole rows, with several programs and a ragged last tile; one row; the widest whole rows; rows that several programs
# share; rows in chunks, of which one kernel takes 10248 and 16384 in 16 bits, the last chunk of a few columns or whole.
SIZES = [
    Case(FIRST, (70, 128), "bfloat16", "small-h200"),
    Case(LAST, (70, 128), "bfloat16", "small-h200"),
    Case(FIRST, (29, 1000), "float32", "small-l4"),
    Case(LAST, (1, 64), "float16", "a100"),
    Case(LAST, (33, 768), "bfloat16", "small-b200", parameters="float32", zero_centered_scale=True),
    Case(FIRST, (9, 33), "bfloat16", "h200", without="s"),
    Case(LAST, (5, 4096), "float32", "small-h200"),
    Case(FIRST, (5, 8192), "bfloat16", "small-h200"),
    Case(LAST, (5, 16384), "bfloat16", "small-a100"),
    Case(FIRST, (2, 40000), "float32", "small-h200"),
    Case(LAST, (2, 40000), "bfloat16", "small-h200"),
    Case(FIRST, (19, 100), "bfloat16", "small-a100", wanted="z"),
    Case(LAST, (19, 100), "bfloat16", "small-a100", wanted="zs"),
    Case(FIRST, (19, 100), "bfloat16", "small-a100", wanted="x", forward_mode=True),
    Case(LAST, (7, 10248), "bfloat16", "small-h200", zero_centered_scale=True),
    Case(LAST, (4, 16384), "float16", "small-h200", wanted="xz"),
    Case(FIRST, (4, 20000), "bfloat16", "small-b200", without="s"),
]

# A head has several programs or one, of whole rows or of chunks. vmap's examples share heads' parameters, or the rows.
HEADS = [
    Case(LAST, (40, 4, 128), "bfloat16", "small-h200", of_heads=True),
    Case(FIRST, (9, 3, 100), "float32", "l4", of_heads=True),
    Case("layer_norm", (29, 5, 1000), "float32", "small-h200", of_heads=True),
    Case("rms_norm", (3, 4, 2, 16400), "bfloat16", "small-a100", of_heads=True),
    Case("rms_norm", (9, 3, 65), "float16", "b200", of_heads=True),
    Case("add_layer_norm, x_bias and gate", (9, 3, 100), "float32", "h200", without="e", of_heads=True),
    Case("add_layer_norm", (9, 3, 40), "float32", "small-h200", of_heads=True, over="xrdt"),
    Case("layer_norm", (21, 4, 64), "bfloat16", "small-h200", of_heads=True, over="sd"),
    Case("rms_norm", (2, 5, 16400), "bfloat16", "small-h200", of_heads=True, over="x"),
    Case("rms_norm", (9, 3, 128), "bfloat16", "small-h200", of_heads=True, forward_mode=True),
]  # fmt: skip

VMAP = [
    Case(LAST, (9, 40), "float32", "small-h200", over="zd"),
    Case(FIRST, (9, 40), "float32", "small-h200", over="xs"),
    Case(LAST, (5, 768), "bfloat16", "b200", over="xzsd"),
]


@cases(SIZES, quick=(0, 4, 6, 8, 9, 11))
def test_sizes(case):
    check(case)


@cases(HEADS, quick=(0, 2, 3, 5, 7, 8))
def test_parameters_of_heads(case):
    check(case)


@cases(VMAP, quick=(0, 1))
def test_vmap(case):
    check(case)
