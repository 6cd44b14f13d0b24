"""Rung 3 on AMD's chips: launches compiled for gfx90a, gfx942 and gfx950 use their registers, and nothing of memory but
what they read and write.
"""

import pytest

from jln._triton import compiler
from jln._triton.chip import CHIPS
from jln._triton.target import Recorder
from launches import DTYPES, LINEAR_DTYPES, SWITCHES, both_sides_launches, launches, linear_launches

pytest.importorskip("triton")

# One of each architecture.
AMD = ("mi250x", "mi300x", "mi355x")
# One of every kind of tile, aligned and not, and rows that lie side by side.
LAYOUTS = [(h, 1) for h in (128, 1000, 1024, 4096, 8192, 16384, 20000)] + [(256, 147456)]


def compiled(chip, dtype):
    """Runs in the worker: of each launch what it is, and its resources less the binary."""
    made = [a for h, inner in LAYOUTS for a in launches(h, inner, DTYPES[dtype], chip, SWITCHES["everything"])]
    made += [a for h in (1024, 4096) for a in both_sides_launches(h, DTYPES[dtype], chip, SWITCHES["add_rms_norm"])]
    found = []
    for launch in made:
        of = compiler.compile_launch(launch)
        wide = sum(
            of.assembly.count(f"{kind}_load_{size}") for kind in ("global", "buffer") for size in ("dwordx4", "b128")
        )
        h = max(a.shape[-1] for a in launch.arrays.values())
        found.append((f"{launch.kernel.fn.__name__} {dtype} H={h}", of.registers, of.spilled, of.shared, wide))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("chip", [pytest.param(c, marks=[] if c == "mi300x" else [pytest.mark.heavy]) for c in AMD])
def test_norms_keep_to_registers(worker, chip, dtype):
    """Two waves a SIMD have 256 vector registers each."""
    found = worker.submit(compiled, chip, dtype).result()
    assert [f for f in found if f[1] > 256 or f[2] > 0 or f[3] > CHIPS[chip].shared] == []
    assert [f for f in found if "forward" in f[0] and "H=1000" not in f[0] and not f[4]] == []


def test_half_as_many_waves_of_twice_the_threads():
    for launch in launches(4096, 1, DTYPES["bfloat16"], "mi300x", SWITCHES["everything"]):
        options = launch.tile.options(launch.chip)
        assert options["num_warps"] == max(1, launch.tile.warps // 2) and "maxnreg" not in options


@pytest.mark.parametrize("dtype", LINEAR_DTYPES)
def test_linears_are_composed(dtype):
    made = linear_launches(100_000, 1024, 64, LINEAR_DTYPES[dtype], "mi300x", SWITCHES["everything"])
    assert made and not any("_norm_linear" in launch.kernel.fn.__module__ for launch in made)


def test_a_chip_says_what_it_is():
    assert [str(CHIPS[name]) for name in ("h200", "mi300x", "mi355x")] == ["sm_90", "gfx942", "gfx950"]
    assert {chip.platform for chip in CHIPS.values() if chip.is_amd} == {"rocm"}
    assert Recorder(CHIPS["mi355x"]).chip.shared == 163840
