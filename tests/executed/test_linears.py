"""LayerNorm+Linear's kernels as they are compiled: fused and composed, values and every gradient."""

from cases import Case, cases, check

LAYER, RMS = "layer_norm_linear", "rms_norm_linear"
# Features: 1, 7: a sixteenth of the narrowest tile and less than half of it. 16, 64, 128, 256: the tiles that there
# are; 30, 104, 200: between. 64 is the last whose rows may be unaligned. Rows: 1; 64: a tile; 100, 200, 333: several,
# and the last one ragged. H: 8, 33: less than a tile of columns. 64, 128: one and two. 100, 1000: ragged.
FUSED = [
    Case(LAYER, (1, 8), "bfloat16", "h200", (1,)),
    Case(LAYER, (64, 64), "float16", "small-h200", (7,)),
    Case(RMS, (200, 128), "bfloat16", "small-h200", (16,)),
    Case(LAYER, (333, 128), "bfloat16", "small-h200", (64,)),
    Case(LAYER, (100, 33), "float16", "h200", (30,)),
    Case(LAYER, (130, 256), "bfloat16", "h200", (256,)),
    Case(RMS, (65, 1000), "bfloat16", "small-h200", (104,)),
    Case(LAYER, (70, 100), "float16", "a100", (64,)),
    Case(LAYER, (200, 128), "bfloat16", "small-a100", (128,)),
    Case(RMS, (40, 256), "bfloat16", "l4", (200,)),
    Case(LAYER, (200, 64), "float32", "small-h200", (16,)),
    Case(LAYER, (70, 256), "float32", "h200", (64,)),
    Case(RMS, (100, 128), "float32", "a100", (128,)),
    Case(LAYER, (100, 33), "float32", "small-a100", (7,)),
    # Operands of several dtypes: products in the promoted one.
    Case(LAYER, (100, 128), "bfloat16", "h200", (32,), parameters="float32"),
    Case(LAYER, (100, 128), "float32", "small-h200", (32,), parameters="bfloat16"),
    Case(RMS, (40, 64), "float16", "a100", (16,), parameters="bfloat16"),
    # Options
    Case(LAYER, (70, 64), "bfloat16", "small-h200", (32,), without="sob"),
    Case(LAYER, (70, 64), "bfloat16", "small-h200", (32,), without="s"),
    Case(LAYER, (70, 64), "float16", "small-a100", (32,), without="o"),
    Case(LAYER, (70, 64), "bfloat16", "l4", (32,), without="b", zero_centered_scale=True),
    Case(RMS, (70, 64), "bfloat16", "small-h200", (32,), without="b", zero_centered_scale=True, epsilon=0.1),
    Case(LAYER, (3, 23, 128), "float32", "h200", (4, 8), forward_mode=True, zero_centered_scale=True),
    Case(LAYER, (100, 192), "bfloat16", "h200", (64,), mean=100.0),
    Case(LAYER, (100, 128), "bfloat16", "small-b200", (64,)),
    Case(RMS, (70, 64), "float16", "b200", (104,)),
]
# Composed: in the backward y takes dy's memory.
COMPOSED = [
    Case(LAYER, (37, 128), "bfloat16", "small-h200", (300,)),
    Case(LAYER, (37, 100), "float16", "h200", (257,)),
    Case(RMS, (20, 768), "bfloat16", "small-a100", (512,)),
    Case(LAYER, (9, 256), "float32", "small-b200", (300,)),
    Case(LAYER, (29, 1024), "bfloat16", "small-h200", (300,), parameters="float32"),
    Case(RMS, (5, 4096), "bfloat16", "small-h200", (272,), without="b"),
    Case(LAYER, (3, 16384), "bfloat16", "small-h200", (4,), over="k"),
    Case(LAYER, (2, 16400), "bfloat16", "small-h200", (4,), over="k"),
    Case(LAYER, (70, 64), "float64", "small-h200", (16,)),
    Case(LAYER, (20, 128), "bfloat16", "small-b200", (300,), without="so"),
    Case(LAYER, (20, 128), "bfloat16", "small-h200", (300,), without="o", forward_mode=True),
]
# Parameters of each example's own are composed, at every number of features.
VMAP = [
    Case(LAYER, (30, 64), "bfloat16", "small-h200", (32,), over="xd"),
    Case(LAYER, (30, 64), "bfloat16", "small-h200", (32,), over="so"),
    Case(RMS, (30, 64), "float32", "small-a100", (32,), over="xsd"),
    Case(LAYER, (9, 128), "float16", "small-h200", (16,), over="xsokbd"),
    Case(LAYER, (9, 128), "bfloat16", "b200", (300,), over="xb"),
]


@cases(FUSED, quick=(1, 3, 7, 10, 14, 19, 22))
def test_fused(case):
    kernels = [call.name for call in check(case).program.calls]
    assert "jln_parameters_kernel" in kernels


@cases(COMPOSED, quick=(0, 4, 7))
def test_composed(case):
    kernels = [call.name for call in check(case).program.calls]
    assert "jln_parameters_kernel" not in kernels


@cases(VMAP, quick=(0, 2))
def test_vmap(case):
    check(case)
