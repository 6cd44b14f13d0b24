"""Compiled kernels of sums with x's bias and a gate, and of parameters of each example's own, executed."""

from cases import Case, cases, check

LAYER, RMS = "add_layer_norm, x_bias and gate", "add_rms_norm, x_bias and gate"

# Whole rows, with several programs and a ragged last tile; one row; the widest whole rows; rows that several programs
# share; rows in chunks.
SUMS = [
    Case(LAYER, (70, 128), "bfloat16", "small-h200"),
    Case(LAYER, (29, 1000), "float32", "small-l4"),
    Case(RMS, (1, 64), "float16", "a100"),
    Case(RMS, (33, 768), "bfloat16", "small-b200", residual="float32", parameters="float32"),
    Case(LAYER, (9, 33), "bfloat16", "h200", without="so"),
    Case(LAYER, (9, 256), "bfloat16", "small-h200", without="e"),
    Case(LAYER, (9, 256), "bfloat16", "small-h200", without="g"),
    Case(LAYER, (5, 4096), "float32", "small-h200"),
    Case(LAYER, (5, 8192), "bfloat16", "small-h200"),
    Case(RMS, (3, 16384), "bfloat16", "small-a100"),
    Case(LAYER, (2, 40000), "float32", "small-h200"),
    Case(LAYER, (9, 100), "float64", "a100"),
    Case(RMS, (19, 100), "bfloat16", "small-a100", wanted="g"),
    Case(LAYER, (19, 100), "bfloat16", "small-a100", wanted="re"),
]

# Examples whose rows take several programs each, and examples whose rows take one; and examples of several heads.
OF_EXAMPLES = [
    Case(LAYER, (3, 70, 128), "bfloat16", "small-h200", without="e", of_examples=True),
    Case("layer_norm", (3, 29, 1000), "float32", "l4", of_examples=True),
    Case(RMS, (7, 5, 768), "float16", "a100", without="e", of_examples=True),
    Case(LAYER, (2, 3, 16400), "bfloat16", "small-h200", without="e", of_examples=True),
    Case(LAYER, (3, 9, 100), "float32", "h200", without="eso", of_examples=True),
    Case("rms_norm", (3, 40, 4, 64), "bfloat16", "small-b200", of_examples=True, of_heads=True),
    Case(LAYER, (2, 9, 3, 100), "float32", "small-h200", without="e", of_examples=True, of_heads=True),
]

# With x_bias and a gate, norm and product are composed even where there are few features.
LINEARS = [
    Case("add_layer_norm_linear, x_bias and gate", (70, 128), "bfloat16", "small-h200", features=(16,)),
    Case("add_rms_norm_linear, x_bias and gate", (33, 104), "float32", "a100", features=(300,)),
]

VMAP = [
    Case(LAYER, (9, 40), "float32", "small-h200", over="xrdt"),
    Case(LAYER, (9, 40), "float32", "small-h200", over="eg"),
    Case(RMS, (5, 768), "bfloat16", "b200", over="xg"),
    Case(LAYER, (3, 16400), "bfloat16", "small-h200", over="rd"),
]


@cases(SUMS, quick=(0, 3, 5, 6, 7, 10))
def test_sums(case):
    check(case)


@cases(OF_EXAMPLES, quick=(0, 1, 4, 5))
def test_parameters_of_examples(case):
    check(case)


@cases(LINEARS, quick=(0,))
def test_linears(case):
    check(case)


@cases(VMAP, quick=(1, 3))
def test_vmap(case):
    check(case)
