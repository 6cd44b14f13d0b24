"""Compiled kernels of Linears behind a norm, fused and composed, executed: values and every gradient."""

import pytest

from cases import Case, check

LAYER, RMS = "layer_norm_linear", "rms_norm_linear"
ADD_LAYER, ADD_RMS = "add_layer_norm_linear", "add_rms_norm_linear"
GATED_LAYER = f"{ADD_LAYER}, x_bias and gate"
# Features. 7: less than half of the narrowest tile. 16, 64 and 128: the widths of tiles. 30: between those.
# Rows. 64: one tile; 100 and 333: several tiles, the last one ragged.
# H. 33: less than a tile of columns, and rows off 16 bytes; 64 and 128: one tile and two; 100 and 1000: ragged.
# By wgmma, mma, and tcgen05. Operands of several dtypes are multiplied in the promoted one.
FUSED = [
    Case(LAYER, (333, 128), "bfloat16", "small-h200", 64),
    Case(LAYER, (64, 64), "float16", "small-h200", 7),
    Case(LAYER, (100, 128), "bfloat16", "small-h200", 32),
    Case(LAYER, (100, 33), "float16", "h200", 30),
    Case(LAYER, (200, 64), "float32", "small-h200", 16),
    Case(LAYER, (3, 23, 128), "float32", "h200", 32, forward_mode=True, zero_centered_scale=True),
    Case(LAYER, (70, 64), "bfloat16", "l4", 32, without="b", zero_centered_scale=True),
    Case(RMS, (100, 128), "float32", "a100", 128),
    Case(LAYER, (100, 128), "bfloat16", "small-b200", 64),
    Case(LAYER, (100, 128), "float32", "small-h200", 32, parameters="bfloat16"),
    # Behind a sum.
    Case(ADD_LAYER, (100, 128), "bfloat16", "small-h200", 32),
    Case(ADD_LAYER, (100, 128), "bfloat16", "small-h200", 32, residual="float32"),
    Case(ADD_RMS, (65, 1000), "float16", "small-a100", 64),
]
# Composed where there are many features, or a kernel of each example's own (with parameters of some rows' own: see
# test_norms.py). The norm's backward kernel writes y, made again, into dy's memory.
COMPOSED = [
    Case(LAYER, (37, 128), "bfloat16", "small-h200", 300),
    Case(LAYER, (2, 16400), "bfloat16", "small-h200", 4, over="k"),
    Case(GATED_LAYER, (100, 128), "bfloat16", "small-b200", 64, without="so"),
    Case(ADD_LAYER, (37, 128), "bfloat16", "small-h200", 300),
    Case(ADD_RMS, (29, 1000), "float16", "small-a100", 257, remat=True),
]
# Cases in which not all gradients are wanted, with the backward kernels that run. For x alone no shares of parameters
# are added up, for a kernel alone no row sums for dx are made.
SOME = {
    Case(LAYER, (200, 128), "bfloat16", "small-h200", 32, wanted="x"): {"row_sums", "backward"},
    Case(LAYER, (200, 128), "bfloat16", "small-a100", 32, wanted="k"): {"backward", "parameters"},
    Case(LAYER, (37, 128), "float32", "small-a100", 300, wanted="k"): {"forward"},
}


def launched(ran) -> list[str]:
    return [call.name.removeprefix("jln_").removesuffix("_kernel") for call in ran.program.calls]


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_fused(case):
    assert "parameters" in launched(check(case))


@pytest.mark.parametrize("case", COMPOSED, ids=str)
def test_composed(case):
    assert "parameters" not in launched(check(case))


@pytest.mark.parametrize("case", SOME, ids=str)
def test_where_not_all_is_wanted(case):
    forward, *backward = launched(check(case))
    assert forward == "forward" and {*backward} == SOME[case]
