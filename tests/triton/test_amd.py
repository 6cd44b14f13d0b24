"""Tests of the kernels on AMD's chips, interpreted and compiled.

The kernels are right in the interpreter with the tiles that waves take. Compiled for gfx90a, gfx942 and gfx950 they
keep their values in registers and use memory only for what they read and write.
"""

import jax
import pytest
from test_compiled_linears import KERNELS, case
from test_compiler import WIDTHS, cases, pairs

from jln._triton.chip import CHIPS, Chip
from jln._triton.target import Interpreter, Recorder, using
from jln.testing import operators
from launches import DTYPES, FUSED, Case, launches

pytest.importorskip("triton")

# One of each architecture.
AMD = ("mi250x", "mi300x", "mi355x")
# The vector registers of a thread, where a SIMD has two waves.
REGISTERS = 256
KINDS = ("everything", "a gate", "the norm before its gate", "heads", "both sides")


def assert_keeps_to_registers(made):
    assert made
    assert [m.what for m in made if m.took.registers > REGISTERS or m.took.spilled or m.took.shared > m.limit] == []


def test_norms_keep_to_registers(compile_all):
    """A kind of norm has a whole row, of which each load is as wide as it may be, and the first has chunks, too."""
    made = compile_all(c for kind in KINDS for c in cases(kind, "mi300x", "bfloat16", (4096,)))
    made += compile_all(cases("everything", "mi300x", "float32", (256, 8192, 20000)))
    assert_keeps_to_registers(made)
    assert [m.what for m in made if m.kernel == "forward_kernel" and m.took.widest_load != 16] == []


@pytest.mark.parametrize(("chip", "dtype", "kind"), pairs(AMD, DTYPES, KINDS))
def test_norms_of_any_width_keep_to_registers(compile_all, chip, dtype, kind):
    assert_keeps_to_registers(compile_all(cases(kind, chip, dtype, WIDTHS[::3])))


@pytest.mark.parametrize(
    ("chip", "dtype", "sizes"),
    [
        ("mi300x", "bfloat16", [FUSED[1], (3000, 768, 64)]),
        *(p for dtype in ("bfloat16", "bfloat16, float32 parameters") for p in pairs(AMD, [dtype], [FUSED])),
    ],
)
def test_fused_linears_keep_to_registers_and_multiply_by_mfma(compile_all, chip, dtype, sizes):
    made = compile_all(case("everything", chip, dtype, size) for size in sizes)
    made = [m for m in made if m.kernel in KERNELS]
    assert {m.kernel for m in made} == {*KERNELS}
    assert_keeps_to_registers(made)
    assert [m.what for m in made if m.kernel != "parameters_kernel" and "v_mfma" not in m.took.assembly] == []


def test_half_as_many_waves_of_twice_the_threads():
    for launch in launches(Case("add_layer_norm", (100_000, 4096), DTYPES["bfloat16"], "mi300x")):
        options = launch.tile.options(launch.chip)
        assert options["num_warps"] == max(1, launch.tile.warps // 2) and "maxnreg" not in options


def test_a_chip_says_what_it_is():
    assert [str(CHIPS[name]) for name in ("h200", "mi300x", "mi355x")] == ["sm_90", "gfx942", "gfx950"]
    assert {chip.platform for chip in CHIPS.values() if chip.is_amd} == {"rocm"}
    assert Recorder(CHIPS["mi355x"]).chip.shared == 163840
    assert Chip("b300", 103, 148).shared == 101376  # an unknown chip has the least of its maker's chips
    assert [CHIPS[name].threads for name in ("h200", "mi300x")] == [32, 64]


CASES = {"add_layer_norm": (5, 1000), "rms_norm_gated": (5, 256), "layer_norm_linear": (70, 96)}


@pytest.mark.parametrize("form", CASES)
def test_the_tiles_of_waves_are_right_in_the_interpreter(form, monkeypatch):
    """The chip has three compute units, so that programs of the backward kernels loop over tiles."""
    monkeypatch.setattr(operators, "SIZES", ((CASES[form], (24,)),))
    with using(Interpreter(Chip("waves", "gfx942", 3))):
        error, _ = operators.check_form(operators.FORMS[form], "float32", "triton", jax.devices()[0])
    assert error.ok, error
