"""Tests: launches of norms are compiled for sm_80, sm_89, sm_90 and sm_100, fit the chip and hardly spill.

Compiling needs a process without TRITON_INTERPRET, so a worker does it; nothing here needs a GPU. What is not heavy
has one of every kind of tile, of every kind of norm.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

import compiler
import jln
from combinations import covering
from jln._triton.tile import Tile
from launches import CHIPS, DTYPES, ZERO_CENTERED, Case, launches
from workloads import WORKLOADS

pytest.importorskip("triton")

# Either side of every power of two, so every tile, with and without a mask and with and without aligned rows; and rows
# of several chunks, some with a chunk of a few elements. The others are aligned and have a mask; or a model has them.
WIDTHS = [n for k in range(17) for n in (2**k - 1, 2**k) if n > 0] + [24, 7168, 20000, 40000, 262144]
WIDTHS += sorted({w.width for w in WORKLOADS.values() if w.is_over_last} - set(WIDTHS))
# Several rows a tile and a row shared by several warps, aligned and not.
FEW = (1000, 8192)

# Of each kind the form, the widths, and how its case differs; "H" stands for the width.
KINDS = {
    "everything": ("add_layer_norm", (1, 128, 1023, 2048, 4096, 8191, 16384, 40000), {"options": ZERO_CENTERED}),
    "everything in float32": ("add_layer_norm", (100, 1024, 4096, 8192, 20000), {"options": ZERO_CENTERED}),
    "add_rms_norm": ("add_rms_norm", FEW, {}),
    "a float32 result": ("layer_norm", FEW, {"options": (("dtype", "float32"),)}),
    "a bfloat16 result": ("layer_norm", FEW, {"options": (("dtype", "bfloat16"),)}),
    "a gate": ("add_layer_norm, x_bias and gate", (4096, *FEW), {}),
    "the norm before its gate": ("rms_norm_gated", FEW, {}),
    "the gate before the norm": ("rms_norm_gated, norm_before_gate=False", FEW, {}),
    "both sides": ("rms_norm_add_rms_norm", (33, 5376, *FEW), {}),
    # More examples than there are cores, so that one program has all rows of each; heads, and those of examples.
    "examples of a sum": (
        "add_layer_norm", (128, 4096, *FEW),
        {"shape": (400, 250, "H"), "of_groups": (400, 1, "H"), "options": ZERO_CENTERED},
    ),
    "heads": ("rms_norm", FEW, {"shape": (9000, 12, "H"), "of_groups": (1, 12, "H")}),
    "heads of examples": ("add_layer_norm", FEW, {"shape": (4, 9000, 3, "H"), "of_groups": (4, 1, 3, "H")}),
    # Whose Linears' backward pass makes total and statistics again, or adds up what three products pull back.
    "a sum again": ("add_layer_norm_linear", FEW, {"features": (12288,)}),
    "a gate's sum again": ("add_layer_norm_linear, x_bias and gate", FEW, {"features": (12288,)}),
    "statistics again": ("layer_norm_linear", FEW, {"features": (12288,)}),
    "three products": ("add_rms_norm_linear", FEW, {"features": (4096, 4096, 4096)}),
}  # fmt: skip


def cases(kind, chip, dtype, widths=None):
    """Return the cases of a kind, at its own widths or at others."""
    form, own, how = KINDS[kind]
    for h in widths or own:
        given = {
            name: tuple(h if n == "H" else n for n in of) if name in ("shape", "of_groups") else of
            for name, of in ({"shape": (100_000, "H")} | how).items()
        }
        yield Case(form, dtypes=DTYPES[dtype], chip=chip, **given)


# Bytes that a thread may have on its stack. Of all combinations' launches of norms some have 8, and one on an L4 16.
# Of sums with a gate and of norms on both sides some have 8 or 16. Fused Linears on an A100 and L4 have 8 in some
# kernels of few features. ptxas stops at 40 registers there, or at 64 or 128: one more would cost a core one of its
# programs. Another tile only moves it to another launch. An H200 has none with every switch on.
STACK = 16


def assert_fits(made, stack=STACK):
    """Hold that no thread has more on its stack, and no program more shared memory than its chip.

    And no product may be contracted with the sum that it goes into, as ptxas does where PTX says no `.rn`: two threads
    that each add their own x * x to the other's would round only the other's, and store different sums.
    """
    assert made
    assert [m.what for m in made if m.took.spilled > stack] == []
    assert [m.what for m in made if m.took.shared > m.limit] == []
    assert [m.what for m in made if re.search(r"\b(mul|add|sub)\.f\d\d", m.took.assembly)] == []


def pairs(*values):
    """Return a few of the combinations of values, in which is every pair of them, as heavy parameters."""
    combinations = list(itertools.product(*values))
    few = [combinations[i] for i in sorted(covering([dict(enumerate(c)) for c in combinations]))]
    return [pytest.param(*c, marks=pytest.mark.heavy) for c in few]


ELSEWHERE = {
    "everything in float32": ("h200", "float32"),
    "a gate": ("l4", "float32"),
    "examples of a sum": ("l4", "float32"),
    "three products": ("a100", "bfloat16, float32 stream"),
    "a bfloat16 result": ("h200", "float32"),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "heads"])
def test_no_kind_of_norm_spills(compile_all, kind):
    chip, dtype = ELSEWHERE.get(kind, ("h200", "bfloat16"))
    made = compile_all(cases(kind, chip, dtype))
    assert len(made) >= 2 * len(KINDS[kind][1])
    assert all(re.search(r"\b(add|fma)\.rn\.f32", m.took.assembly) for m in made)
    assert_fits(made, 0 if kind.startswith("everything") else STACK)


@pytest.mark.parametrize(
    ("kind", "chip", "dtype"), pairs([kind for kind in KINDS if kind != "everything in float32"], CHIPS, DTYPES)
)
def test_no_norm_of_any_width_spills(compile_all, kind, chip, dtype):
    every = 1 if kind in ("everything", "add_rms_norm") else 3
    assert_fits(compile_all(cases(kind, chip, dtype, WIDTHS[::every])))


# What makes eight bits of float32 by one instruction.
CONVERTS = {
    "l4": "cvt.rn.satfinite.e4m3x2.f32",
    "h200": "cvt.rn.satfinite.e4m3x2.f32",
    "b200": "cvt.rn.satfinite.e4m3x2.f32",
    "mi355x": "v_cvt_scalef32_pk_fp8_f32",
}
EIGHT_BITS = {"one scale": jln.Float8(1.0), "blocks": jln.MXFloat8(), "the largest alone": jln.Float8()}


def assert_converts(compile_all, chip, kind, dtype, widths):
    """Hold that results in eight bits spill nothing, and that the chip converts to them where it can.

    Where it cannot XLA makes them, and a kernel finds the largest number alone.
    """
    how = {"wanted": "none", "options": (("quantize", EIGHT_BITS[kind]),)}
    forms = "rms_norm", "add_layer_norm"
    made = compile_all(Case(f, (100_000, h), DTYPES[dtype], chip, **how) for f in forms for h in widths)
    of_each = 2 if chip in CONVERTS and kind == "the largest alone" else 1
    assert len(made) == of_each * len(forms) * len(widths)
    assert_fits(made)
    converting = [m for m in made if chip in CONVERTS and CONVERTS[chip] in m.took.assembly]
    assert len(converting) == (len(made) // of_each if chip in CONVERTS else 0)


@pytest.mark.parametrize(
    ("chip", "kind"), [*((chip, "blocks") for chip in CONVERTS), ("h200", "one scale"), ("h200", "the largest alone")]
)
def test_a_chip_converts_to_eight_bits(compile_all, chip, kind):
    assert_converts(compile_all, chip, kind, "bfloat16", (1024,))


@pytest.mark.parametrize(("chip", "kind", "dtype"), pairs([*CONVERTS, "a100"], EIGHT_BITS, ("bfloat16", "float32")))
def test_no_norm_to_eight_bits_spills(compile_all, chip, kind, dtype):
    assert_converts(compile_all, chip, kind, dtype, (96, 1024, 4096, 8192, 16384, 20000))


def compile_large_tile():
    """Compile a tile twice as large as any that is chosen."""
    backward = launches(Case("add_layer_norm", (100_000, 16384), DTYPES["float32"], "h200"))[2]
    constants = backward.constants | {"BLOCK_H": 16384}
    return compiler.compile_launch(dataclasses.replace(backward, tile=Tile(1, 16384, 16), constants=constants))


def test_a_spill_is_seen(worker):
    assert worker.submit(compile_large_tile).result().spilled > 0


def load_widths(assembly):
    """Return the widths in bytes of all loads from global memory in PTX, and of copies to shared memory."""
    loads = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", assembly)
    return {int(vector or 1) * int(bits) // 8 for vector, bits in loads} | copy_widths(assembly)


def copy_widths(assembly):
    return {int(n, 16) for n in re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], 0x(\w+)", assembly)}


@pytest.mark.parametrize(("dtype", "widths"), [("bfloat16", (256, 20000)), ("float32", (1000,))])
def test_rows_of_heads_do_not_spill_and_are_loaded_16_bytes_at_a_time(compile_all, dtype, widths):
    """Backward kernels may load statistics, one number a row, by 4 bytes, and what adds up shares is not meant."""
    made = compile_all(cases("heads", "h200", dtype, widths))
    assert_fits(made)
    found = [(m.what, m.kernel, load_widths(m.took.assembly)) for m in made if m.kernel != "reduce_kernel"]
    assert len(found) >= 2 * len(widths)
    assert [f for f in found if f[2] - {4} != {16} or (4 in f[2] and f[1] == "forward_kernel")] == []
