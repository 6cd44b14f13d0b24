"""Tests of Linears: launches of every tile are compiled, fit the chip, hardly spill, and on an H200 use wgmma."""

from __future__ import annotations

import re

import jax.numpy as jnp
import pytest
from test_compiler import STACK, WIDTHS, assert_fits, copy_widths, pairs

from jln._junction.linears import tiles as linear_tiles
from jln._triton.chip import CHIPS as ALL_CHIPS
from jln._triton.tile import is_aligned
from launches import CHIPS, DTYPES, FUSED, ZERO_CENTERED, Case

pytest.importorskip("triton")

# Of which each is compiled for every chip, form and dtype, though not with every pair of these.
MORE_FUSED = ((64, 100_000), (8, 33, 512, 768, 1023, 8192), (1, 3, 16, 32, 33, 64, 100, 104, 128, 130, 136, 200, 256))
LINEAR_CHIPS = (*CHIPS, "l40s")
FORMS = {
    "everything": ("add_layer_norm_linear", ZERO_CENTERED),
    "add_rms_norm": ("add_rms_norm_linear", ()),
    "nothing before": ("rms_norm_linear", ()),
}
KERNELS = ["forward_kernel", "row_sums_kernel", "backward_kernel", "parameters_kernel"]


def case(form, chip, dtype, size):
    name, options = FORMS[form]
    *shape, n = size
    return Case(name, tuple(shape), DTYPES[dtype], chip, features=(n,), options=options)


def is_fused(chip, dtype, size):
    x, rows, _ = DTYPES[dtype]
    return linear_tiles.forward_tile(*size, jnp.promote_types(x, rows).name, ALL_CHIPS[chip]) is not None


def unfenced_products(ptx):
    """Return the products in PTX that a thread may reach without a proxy fence after it stored to shared memory.

    wgmma and tcgen05.mma read shared memory through another proxy than stores, and only such a fence orders the two.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\$\w+:", line)}
    found, seen, ahead = set(), set(), [(0, False)]
    while ahead:
        at, stored = ahead.pop()
        while at < len(lines) and (at, stored) not in seen:
            seen.add((at, stored))
            line = lines[at]
            if re.search(r"\bst(matrix|\.(volatile\.)?shared)", line):
                stored = True
            elif "fence.proxy.async" in line:
                stored = False
            elif stored and re.search(r"wgmma\.mma_async|tcgen05\.(mma|cp)\b", line):
                found.add(line)
            if branch := re.search(r"\bbra(?:\.\w+)?\s+(\$\w+)", line):
                ahead.append((labels[branch[1]], stored))
            if re.match(r"(ret|bra)\b", line):
                break
            at += 1
    return sorted(found)


def test_a_fence_that_is_missing_is_seen():
    loop = "$L__1:\n{wait}\nwgmma.mma_async.sync x;\nst.shared.b32 [%r1], %r2;\n@%p1 bra $L__1;\nret;"
    assert unfenced_products(loop.format(wait="bar.sync 0;")) == ["wgmma.mma_async.sync x;"]
    assert unfenced_products(loop.format(wait="fence.proxy.async.shared::cta;")) == []


def assert_multiplies(made, chip):
    """Hold that each kernel but those that add up has products, on an H200 by wgmma alone, behind their fences.

    Without a fence results are wrong now and then.
    """
    for m in made:
        assert unfenced_products(m.took.assembly) == [], m.what
        if m.kernel != "parameters_kernel" and chip in ("h200", "b200"):
            assert re.search(r"wgmma\.mma_async|tcgen05\.mma\b|mma\.sync\.", m.took.assembly), m.what
        assert chip != "h200" or "mma.sync." not in m.took.assembly, m.what


LIGHT = ("everything", "h200", "bfloat16, float32 parameters")
# float64 has no fused kernels, nor has a product in float32 on Blackwell.
PAIRS = [
    p
    for p in pairs(FORMS, LINEAR_CHIPS, DTYPES)
    if p.values not in (LIGHT,)
    and p.values[2] != "float64"
    and not (p.values[1] == "b200" and "float32" in DTYPES[p.values[2]][:2])
]


@pytest.mark.parametrize(("form", "chip", "dtype"), [LIGHT, *PAIRS])
def test_a_fused_linear_does_not_spill_and_multiplies_behind_fences(compile_all, form, chip, dtype):
    """Triton before 3.7.1 leaves fences out, so that no kernel is fused there."""
    fused = [size for size in FUSED if is_fused(chip, dtype, size)]
    if linear_tiles.missing_fence(ALL_CHIPS[chip]) is not None:
        assert fused == []
        return
    assert len(fused) > len(FUSED) // 3
    made = compile_all(case(form, chip, dtype, size) for size in fused)
    assert [m.kernel for m in made] == KERNELS * len(fused)
    assert_fits(made, 0 if (form, chip, dtype) == LIGHT else STACK)
    assert_multiplies(made, chip)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_fused_forward_copies_16_bytes_at_a_time(compile_all, dtype):
    how = {"wanted": "none", "features": (64,), "absent": ("scale", "bias")}
    made = compile_all([Case("rms_norm_linear", (100_000, 512), DTYPES[dtype], "h200", **how)])
    assert [m.kernel for m in made] == KERNELS[:1] and copy_widths(made[0].took.assembly) == {16}


def test_products_of_a_b200_wait_for_what_is_stored_to_shared_memory(compile_all):
    made = compile_all([case("everything", "b200", "bfloat16", (100_000, 512, 64))])
    assert [m.kernel for m in made] == KERNELS
    assert_multiplies(made, "b200")


# Of few rows that do not start on 16 bytes the fused backward has one trip on a B200, unrolled, and spills once.
# 32 columns of a tile would not, but then a product of many rows is no tcgen05.mma.
ONE_TRIP = 120


@pytest.mark.heavy
@pytest.mark.parametrize("chip", LINEAR_CHIPS)
@pytest.mark.parametrize("are_fused", [True, False], ids=["fused", "composed"])
def test_more_sizes_of_linears_do_not_spill(compile_all, are_fused, chip):
    sizes = MORE_FUSED if are_fused else ((100_000,), [h for h in WIDTHS if h >= 8][::3], (12288,))
    for form, dtype, *size in (p.values for p in pairs(FORMS, DTYPES, *sizes)):
        if is_fused(chip, dtype, size) == are_fused:
            made = compile_all([case(form, chip, dtype, size)])
            has_one_trip = chip == "b200" and size[0] == 64 and not is_aligned(size[1], 2)
            assert_fits(made, ONE_TRIP if has_one_trip else STACK)
            if are_fused:
                assert_multiplies(made, chip)
