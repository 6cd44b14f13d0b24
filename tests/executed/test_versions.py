"""Executed kernels that must be right with every supported Triton: CI runs this file with each version."""

import pytest
import test_eight_bits
import test_norms

from cases import Case, check
from jln._junction.linears.tiles import missing_fence
from jln._triton.chip import CHIPS

LINEAR = Case("layer_norm_linear", (100, 128), "bfloat16", "small-h200", 32)
CASES = [
    Case("add_layer_norm", (29, 1000), "float32", "small-l4"),
    Case("layer_norm", (3, 16401), "bfloat16", "small-h200"),
    Case("rms_norm_linear", (100, 128), "float32", "a100", 128),
    Case("layer_norm_linear", (37, 128), "bfloat16", "small-h200", 300),
    Case("rms_norm", (3, 16400), "bfloat16", "small-h200"),  # long rows
    Case("layer_norm", (21, 3, 64), "bfloat16", "small-h200", of_heads=True, over="sd"),
    Case("rms_norm_add_rms_norm", (29, 1001), "bfloat16", "small-a100"),
    Case("add_rms_norm_linear", (29, 1000), "float16", "small-a100", 257, remat=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_right(case):
    check(case)


def test_parameters_along_different_axes_are_right():
    test_norms.test_parameters_along_different_axes(*test_norms.APART[0])


@pytest.mark.parametrize("blocks", [False, True], ids=["one scale", "blocks"])
def test_eight_bits_are_right(blocks):
    test_eight_bits.test_every_number_of_bfloat16(blocks, "e4m3", "h200")


def test_linears_are_fused_where_triton_fences_their_products():
    """A Linear is fused only with a Triton that fences its products, and is right fused or composed.

    A product that reads a tile too early would raise a Violation.
    """
    kernels = [call.name for call in check(LINEAR).program.calls]
    assert ("jln_parameters_kernel" in kernels) == (missing_fence(CHIPS["h200"]) is None)
