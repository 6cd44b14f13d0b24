"""Rung 3 of Linears: launches of every tile are compiled, fit the chip, hardly spill, and on an H200 use wgmma."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest
from test_compiler import STACK, WIDTHS, assert_fits, every_pair, pairs_of

import compiler
from jln._junction.linears import tiles as linear_tiles
from jln._triton.chip import CHIPS as ALL_CHIPS
from jln._triton.tile import is_aligned
from launches import CHIPS, FUSED, LINEAR_DTYPES, SWITCHES, linear_launches
from workloads import WORKLOADS

pytest.importorskip("triton")

# Composed: every kind of tile that `backward_plan` knows.
COMPOSED = [(100_000, h, 12288) for h in (1024, 8192, 8191, 16384)]
# Sizes of which each is compiled for every chip with every switch and dtype, though not with every pair of these.
MORE_FUSED = (
    (64, 100_000),
    (8, 33, 512, 768, 1023, 8192),
    (1, 3, 16, 32, 33, 64, 100, 104, 128, 130, 136, 200, 256),
)
MORE_COMPOSED = ((100_000,), [h for h in WIDTHS if h >= 8][::3], (12288,))
LINEAR_CHIPS = (*CHIPS, "l40s")


def is_fused(chip, dtype, size):
    product = jnp.promote_types(*LINEAR_DTYPES[dtype][:2]).name
    return linear_tiles.forward_tile(*size, product, ALL_CHIPS[chip]) is not None


def compile_linear(dtypes, chip, switches, sizes):
    """Return what `compile_all` does, and the numbers of wgmma and of mma instructions. Runs in the worker."""
    made = []
    for m, h, n in sizes:
        for launch in linear_launches(m, h, n, dtypes, chip, switches):
            resources = compiler.compile_launch(launch)
            products = [resources.assembly.count(f"{name}.") for name in ("wgmma.mma_async", "mma.sync")]
            what = f"{launch.kernel.fn.__name__} {dtypes} M={m} H={h} N={n} {launch.tile}"
            made.append((what, resources.spilled, resources.shared, launch.chip.shared, *products))
    return made


# The chip of the byte table, with every switch on.
LIGHT_LINEAR = ("everything", "h200", "bfloat16")
LINEAR_COMBINATIONS = list(itertools.product(SWITCHES, LINEAR_CHIPS, LINEAR_DTYPES))
# float64 has no fused kernels, nor has a product in float32 on Blackwell.
FUSED_COMBINATIONS = [
    (s, c, d) for s, c, d in LINEAR_COMBINATIONS if d != "float64" and (c != "b200" or d in ("bfloat16", "float16"))
]


def assert_uses_wgmma(made):
    """Hold that on an H200 no product falls back to mma, and that each kernel but those that add up has products."""
    assert [what for what, *_, mma in made if mma] == []
    assert [what for what, *_, wgmma, _ in made if not wgmma and not what.startswith("parameters_kernel")] == []


@pytest.mark.parametrize(("switches", "chip", "dtype"), every_pair(FUSED_COMBINATIONS, light=[LIGHT_LINEAR]))
def test_fused_linear_does_not_spill_and_uses_wgmma(worker, switches, chip, dtype):
    fused = [size for size in FUSED if is_fused(chip, dtype, size)]
    assert len(fused) > len(FUSED) // 3
    made = worker.submit(compile_linear, LINEAR_DTYPES[dtype], chip, SWITCHES[switches], fused).result()
    assert len(made) == 4 * len(fused)
    assert_fits(made, stack=0 if (switches, chip, dtype) == LIGHT_LINEAR else STACK)
    if chip == "h200":
        assert_uses_wgmma(made)


@pytest.mark.parametrize(("switches", "chip", "dtype"), every_pair(LINEAR_COMBINATIONS, light=[LIGHT_LINEAR]))
def test_composed_linear_does_not_spill(worker, switches, chip, dtype):
    made = worker.submit(compile_linear, LINEAR_DTYPES[dtype], chip, SWITCHES[switches], COMPOSED).result()
    assert len(made) >= 2 * len(COMPOSED)
    assert_fits(made, stack=0 if (switches, chip, dtype) == LIGHT_LINEAR else STACK)


# Of few rows that do not start on 16 bytes the fused backward has one trip on a B200, unrolled, and spills once.
# 32 columns of a tile would not, but then a product of many rows is no tcgen05.mma.
ONE_TRIP = 120


@pytest.mark.heavy
@pytest.mark.parametrize("chip", LINEAR_CHIPS)
@pytest.mark.parametrize("are_fused", [True, False], ids=["fused", "composed"])
def test_more_sizes_of_linears_do_not_spill(worker, are_fused, chip):
    combinations = [
        (switches, dtype, *size)
        for switches, c, dtype in (FUSED_COMBINATIONS if are_fused else LINEAR_COMBINATIONS)
        for size in itertools.product(*(MORE_FUSED if are_fused else MORE_COMPOSED))
        if c == chip and is_fused(chip, dtype, size) == are_fused
    ]
    few = pairs_of(combinations)
    assert len(few) > 30
    for switches, dtype, *size in few:
        made = worker.submit(compile_linear, LINEAR_DTYPES[dtype], chip, SWITCHES[switches], [size]).result()
        assert len(made) >= (4 if are_fused else 2)
        has_one_trip = chip == "b200" and size[0] == 64 and not is_aligned(size[1], 2)
        assert_fits(made, stack=ONE_TRIP if has_one_trip else STACK)
        if chip == "h200" and are_fused:
            assert_uses_wgmma(made)


@pytest.mark.heavy  # a minute; `test_fused_linear_does_not_spill_and_uses_wgmma` has a size of each kind
def test_linear_workloads_do_not_spill(worker):
    sizes = sorted({(w.rows, w.width, sum(w.all_features)) for w in WORKLOADS.values() if w.is_linear})
    made = worker.submit(compile_linear, LINEAR_DTYPES["bfloat16"], "h200", SWITCHES["everything"], sizes).result()
    assert len(made) >= 2 * len(sizes)
    assert_fits(made)
