"""Compiled kernels of LayerNorm+Linear, fused and composed, executed: values and every gradient."""

from cases import Case, cases, check

LAYER, RMS = "layer_norm_linear", "rms_norm_linear"
ADD_LAYER, ADD_RMS = "add_layer_norm_linear", "add_rms_norm_linear"
# Features. 1 and 7: a sixteenth of the narrowest tile, and less than half of it. 16, 64, 128 and 256: the widths of
# tiles. 30, 104 and 200: between those. 64 is the most for which rows may be unaligned.
# Rows. 1; 64: one tile; 100, 200 and 333: several tiles, the last one ragged.
# H. 8 and 33: less than a tile of columns; 64 and 128: one tile and two; 100 and 1000: ragged.
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
    # Operands of several dtypes, whose products are computed in the promoted dtype.
    Case(LAYER, (100, 128), "bfloat16", "h200", (32,), parameters="float32"),
    Case(LAYER, (100, 128), "float32", "small-h200", (32,), parameters="bfloat16"),
    Case(RMS, (40, 64), "float16", "a100", (16,), parameters="bfloat16"),
    # Optional operands left out, and other options.
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
# A residual in front of the norm, in some cases of another dtype: the sum has the wider of the two dtypes.
FUSED_SUMS = [
    Case(ADD_LAYER, (200, 128), "bfloat16", "small-h200", (32,)),
    Case(ADD_RMS, (65, 1000), "float16", "small-a100", (64,)),
    Case(ADD_LAYER, (70, 100), "bfloat16", "small-b200", (48,)),
    Case(ADD_LAYER, (130, 256), "float32", "h200", (64,)),
    Case(ADD_RMS, (100, 33), "bfloat16", "l4", (7,), zero_centered_scale=True),
    Case(ADD_LAYER, (100, 128), "bfloat16", "small-h200", (32,), residual="float32"),
    Case(ADD_RMS, (70, 64), "float32", "small-a100", (16,), residual="bfloat16", without="sb"),
    Case(ADD_LAYER, (3, 23, 64), "float16", "h200", (104,), forward_mode=True, without="o"),
]
GATED_LAYER, GATED_RMS = f"{ADD_LAYER}, x_bias and gate", f"{ADD_RMS}, x_bias and gate"
# Composed, as Linears behind a gate, of examples and of heads always are. The norm's backward kernel writes y, made
# again, into dy's memory.
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
    Case(LAYER, (29, 1024), "bfloat16", "small-h200", (300,), parameters="float32", remat=True),
    Case(RMS, (70, 4, 128), "bfloat16", "small-b200", (64,), of_heads=True, zero_centered_scale=True),
    Case(GATED_LAYER, (21, 3, 256), "float16", "small-h200", (16,), without="e", of_heads=True),
    Case(GATED_LAYER, (100, 128), "bfloat16", "small-b200", (64,), without="so"),
    Case(LAYER, (3, 70, 128), "bfloat16", "small-h200", (32,), of_examples=True),
    Case(GATED_RMS, (3, 70, 64), "float32", "small-a100", (16,), without="e", of_examples=True),
]
# Cases in which not all gradients are wanted, with the backward kernels that run. For x alone no shares of parameters
# are added up, for a kernel alone no row sums for dx are made, and a bias or an offset alone takes no kernel of ours.
FUSED_SOME = {
    Case(LAYER, (200, 128), "bfloat16", "small-h200", (32,), wanted="x"): {"row_sums", "backward"},
    Case(LAYER, (200, 128), "bfloat16", "small-a100", (32,), wanted="k"): {"backward", "parameters"},
    Case(ADD_LAYER, (70, 64), "float32", "small-h200", (16,), wanted="r"): {"row_sums", "backward"},
    Case(LAYER, (70, 64), "bfloat16", "small-h200", (16,), wanted="s"): {"backward", "parameters"},
    Case(LAYER, (70, 64), "bfloat16", "small-h200", (16,), wanted="b"): set(),
    Case(LAYER, (70, 64), "float16", "h200", (16,), wanted="o"): set(),
}
COMPOSED_SUMS = [
    Case(ADD_LAYER, (37, 128), "bfloat16", "small-h200", (300,)),
    Case(ADD_RMS, (29, 1000), "float16", "small-a100", (257,)),
    Case(ADD_LAYER, (9, 256), "float32", "small-b200", (300,), without="b"),
    Case(ADD_LAYER, (29, 1024), "bfloat16", "small-h200", (300,), residual="float32", parameters="float32"),
    Case(ADD_RMS, (5, 4096), "bfloat16", "small-l4", (272,)),
    Case(ADD_LAYER, (3, 16384), "float32", "small-h200", (4,), over="k"),
    Case(ADD_LAYER, (2, 16400), "bfloat16", "small-h200", (4,), over="xk"),
    Case(ADD_LAYER, (70, 64), "float64", "small-h200", (16,)),
    Case(ADD_LAYER, (20, 128), "bfloat16", "small-h200", (300,), zero_centered_scale=True, forward_mode=True),
    Case(ADD_LAYER, (37, 256), "bfloat16", "small-h200", (300,), remat=True),
    Case(ADD_RMS, (9, 1000), "float16", "small-a100", (257,), remat=True),
]
COMPOSED_SEVERAL = [
    Case(LAYER, (70, 128), "bfloat16", "small-h200", ((3, 8), (16,), (4,)), unbiased=(1,)),
    Case(ADD_RMS, (70, 64), "float32", "l4", ((40,), (2, 4)), unbiased=(1,)),
    Case(LAYER, (37, 128), "bfloat16", "small-h200", ((4, 64), (64,), (64,)), unbiased=(1,)),
    Case(ADD_RMS, (20, 768), "bfloat16", "small-a100", ((300,), (2, 9)), unbiased=(0,)),
    Case(ADD_LAYER, (20, 100), "float16", "small-b200", ((150,), (150,)), without="b"),
    Case(RMS, (9, 256), "float32", "small-h200", ((130,), (70,)), unbiased=(0,)),
    Case(ADD_LAYER, (37, 256), "bfloat16", "small-h200", ((130,), (70,), (60,)), without="b", remat=True),
    Case(RMS, (20, 1000), "bfloat16", "small-l4", ((130,), (70,), (60,), (9,)), without="b"),
    Case(LAYER, (2, 16400), "bfloat16", "small-h200", ((4,), (8,)), without="b", over="k"),
]
COMPOSED_SOME = {
    Case(LAYER, (37, 128), "bfloat16", "small-h200", (300,), wanted="x"): {"backward"},
    Case(LAYER, (37, 128), "float32", "small-a100", (300,), wanted="k"): {"forward"},
    Case(ADD_LAYER, (37, 128), "bfloat16", "small-b200", (300,), wanted="r"): {"backward"},
    Case(ADD_LAYER, (37, 128), "bfloat16", "small-h200", ((150,), (150,)), unbiased=(0,), wanted="k"): {"forward"},
    Case(LAYER, (37, 128), "bfloat16", "small-h200", (300,), wanted="so"): {"backward", "reduce"},
    Case(LAYER, (37, 128), "bfloat16", "small-h200", ((150,), (150,)), wanted="b"): set(),
    Case(LAYER, (37, 128), "bfloat16", "small-h200", ((150,), (150,), (8,)), wanted="x"): {"backward"},
}
# Operators whose parameters are each of vmap's examples' own are composed, whatever their number of features.
VMAP = [
    Case(LAYER, (30, 64), "bfloat16", "small-h200", (32,), over="xd"),
    Case(LAYER, (30, 64), "bfloat16", "small-h200", (32,), over="so"),
    Case(RMS, (30, 64), "float32", "small-a100", (32,), over="xsd"),
    Case(LAYER, (9, 128), "float16", "small-h200", (16,), over="xsokbd"),
    Case(LAYER, (9, 128), "bfloat16", "b200", (300,), over="xb"),
    Case(ADD_LAYER, (30, 64), "bfloat16", "small-h200", ((16,), (2, 8)), over="xrdt", unbiased=(0,)),
    Case(ADD_RMS, (9, 128), "bfloat16", "small-a100", ((16,), (8,)), over="rkt"),
]


def launched(ran) -> list[str]:
    return [call.name.removeprefix("jln_").removesuffix("_kernel") for call in ran.program.calls]


@cases(FUSED, quick=(1, 3, 7, 10, 14, 19, 22))
def test_fused(case):
    assert "parameters" in launched(check(case))


@cases(FUSED_SUMS, quick=(0, 1, 2, 5))
def test_fused_behind_a_sum(case):
    assert "parameters" in launched(check(case))


@cases(list(FUSED_SOME), quick=(0, 1, 2, 4))
def test_fused_where_not_all_is_wanted(case):
    forward, *backward = launched(check(case))
    assert forward == "forward" and {*backward} == FUSED_SOME[case]


@cases(COMPOSED, quick=(0, 4, 7, 12, 14, 15))
def test_composed(case):
    assert "parameters" not in launched(check(case))


@cases(COMPOSED_SUMS, quick=(0, 1, 2, 5, 9))
def test_composed_behind_a_sum(case):
    assert "parameters" not in launched(check(case))


@cases(COMPOSED_SEVERAL, quick=(0, 2, 3, 4, 6, 7))
def test_several_composed(case):
    """Several composed Linears behind one norm launch one forward and one backward kernel, which makes y again."""
    kernels = launched(check(case))
    assert (kernels.count("forward"), kernels.count("backward"), "parameters" in kernels) == (1, 1, False)


@cases(list(COMPOSED_SOME), quick=(0, 1, 2, 5))
def test_composed_where_not_all_is_wanted(case):
    forward, *backward = launched(check(case))
    assert forward == "forward" and {*backward} == COMPOSED_SOME[case]


@cases(VMAP, quick=(0, 2, 5))
def test_vmap(case):
    check(case)
