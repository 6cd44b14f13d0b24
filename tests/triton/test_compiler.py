"""Rung 3: launches of every tile are compiled for sm_80, sm_89, sm_90 and sm_100, fit the chip and hardly spill.

A thread may have 16 bytes on its stack, in one case on a B200 120, and none on an H200 with every switch on.

Compiling needs a process without TRITON_INTERPRET, so each case is a worker process's; nothing here needs a GPU.
"""

from __future__ import annotations

import itertools

import pytest

import compiler
from combinations import covering
from jln._triton.tile import Tile
from launches import (
    BOTH_SIDES_SWITCHES,
    CHIPS,
    DTYPES,
    EXAMPLES_SWITCHES,
    FUSED,
    GATED_SWITCHES,
    LINEAR_DTYPES,
    REMAT_SWITCHES,
    SEVERAL_SWITCHES,
    SUM_SWITCHES,
    SWITCHES,
    both_sides_launches,
    dealt,
    dealt_on,
    launches,
    linear_launches,
)
from workloads import WORKLOADS

pytest.importorskip("triton")

# Of a module whose result has another dtype than x: x's, none, the parameters', the result's.
MODULE_DTYPES = {
    "bfloat16, float32 result": ("bfloat16", None, "float32", "float32"),
    "float32, bfloat16 result": ("float32", None, "float32", "bfloat16"),
}

# Either side of every power of two, so every tile, with and without a mask and with and without aligned rows; and rows
# of several chunks, some with a chunk of a few elements. The others are aligned and have a mask; or a model has them.
WIDTHS = [n for k in range(17) for n in (2**k - 1, 2**k) if n > 0] + [24, 7168, 20000, 40000, 262144]
WIDTHS += sorted({w.width for w in WORKLOADS.values() if w.is_over_last} - set(WIDTHS))


def pairs_of(combinations):
    """Return a few of the combinations of values, in which is every pair of them."""
    return [combinations[i] for i in sorted(covering([dict(enumerate(c)) for c in combinations]))]


def every_pair(combinations, light=()):
    """Return `pairs_of` the combinations as pytest parameters.

    light: combinations that run by default; the others are heavy. All of them would take hours.
    """
    few = [*light, *(c for c in pairs_of(list(combinations)) if c not in light)]
    return [pytest.param(*c, marks=[] if c in light else [pytest.mark.heavy]) for c in few]


def compile_all(dtypes, chip, switches, widths):
    """Return of each launch (description, bytes of a thread's stack, shared bytes of a program, the chip's limit).

    Runs in the worker.
    """
    made = []
    for h in widths:
        for launch in launches(h, dtypes, chip, switches):
            resources = compiler.compile_launch(launch)
            what = f"{launch.kernel.fn.__name__} {dtypes} H={h} {launch.tile}"
            made.append((what, resources.spilled, resources.shared, launch.chip.shared))
    return made


# Bytes that a thread may have on its stack. Of all combinations' launches of norms some have 8, and one on an L4 16.
# Of sums with a gate and of norms on both sides some have 8 or 16. Fused Linears on an A100 and L4 have 8 in some
# kernels of few features, and `ONE_TRIP` is an exception. ptxas stops at 40 registers there, or at 64 or 128: one
# more would cost a core one of its programs. Another tile only moves it to another launch. An H200 has none with
# every switch on.
STACK = 16


def assert_fits(made, stack=0):
    """Hold that no thread has more on its stack, and no program more shared memory than its chip."""
    assert [what for what, spilled, *_ in made if spilled > stack] == []
    assert [what for what, _, shared, limit, *_ in made if shared > limit] == []


# The dtypes that most train with.
MOST = ("bfloat16", "bfloat16, float32 parameters", "float32")


@pytest.mark.parametrize(("switches", "dtype", "widths"), dealt(["everything"], MOST, WIDTHS))
def test_no_spills_on_an_h200(worker, switches, dtype, widths):
    made = worker.submit(compile_all, DTYPES[dtype], "h200", SWITCHES[switches], widths).result()
    assert len(made) > 2 * len(widths) - 1
    assert_fits(made)


@pytest.mark.parametrize(("switches", "chip", "dtype"), every_pair(itertools.product(SWITCHES, CHIPS, DTYPES)))
def test_no_spills(worker, switches, chip, dtype):
    made = worker.submit(compile_all, DTYPES[dtype], chip, SWITCHES[switches], WIDTHS).result()
    assert len(made) > 2 * len(WIDTHS) - 1
    assert_fits(made, 0 if (switches, chip) == ("everything", "h200") else STACK)


# One of every kind of tile, with aligned rows and without; the dtypes are mixed, so no other tile is chosen.
MODULE_WIDTHS = (100, 1023, 4096, 8191, 16384, 40000)


@pytest.mark.parametrize(("chip", "dtype", "widths"), dealt_on("h200", CHIPS, list(MODULE_DTYPES), MODULE_WIDTHS))
def test_no_spills_of_modules(worker, chip, dtype, widths):
    switches = SWITCHES["everything"] | {"adds": False, "zero_centered_scale": False}
    made = worker.submit(compile_all, MODULE_DTYPES[dtype], chip, switches, widths).result()
    assert_fits(made, 0 if chip == "h200" else STACK)


@pytest.mark.parametrize(
    ("switches", "dtype", "widths"),
    dealt(SUM_SWITCHES | REMAT_SWITCHES, ["bfloat16", "float32"], (*MODULE_WIDTHS, 2048)),
)
def test_no_spills_of_sums_with_a_gate(worker, switches, dtype, widths):
    of = (SUM_SWITCHES | REMAT_SWITCHES)[switches]
    made = worker.submit(compile_all, DTYPES[dtype], "h200", of, widths).result()
    assert_fits(made, STACK)


@pytest.mark.parametrize(
    ("switches", "dtype", "widths"),
    dealt(GATED_SWITCHES, ["bfloat16", "float32"], (*MODULE_WIDTHS, 128, 8192)),
)
def test_no_spills_of_gated_norms(worker, switches, dtype, widths):
    """No launch of a gated norm spills, up to 8192 elements: the widest rows of 16 bits that are no chunks.

    By default each size is in one of the dtypes.
    """
    made = worker.submit(compile_all, DTYPES[dtype], "h200", GATED_SWITCHES[switches], widths).result()
    assert_fits(made)


# Of each size of an element and each mixture one dtype, as tiles depend on no more; and a third of the widths.
@pytest.mark.parametrize(
    ("switches", "chip", "dtype"),
    every_pair(
        itertools.product(
            SUM_SWITCHES | GATED_SWITCHES | REMAT_SWITCHES,
            CHIPS,
            ("bfloat16", "float32", "float64", "bfloat16, float32 stream"),
        )
    ),
)
def test_no_spills_of_sums_with_a_gate_at_any_size(worker, switches, chip, dtype):
    of = (SUM_SWITCHES | GATED_SWITCHES | REMAT_SWITCHES)[switches]
    made = worker.submit(compile_all, DTYPES[dtype], chip, of, WIDTHS[::3]).result()
    assert_fits(made, STACK)


@pytest.mark.parametrize(
    ("switches", "chip", "dtype"),
    every_pair(
        itertools.product(SEVERAL_SWITCHES, CHIPS, (*MOST, "bfloat16, float32 stream")),
        light=[("three products, a sum again", "l4", "float32"), ("three products", "h200", "bfloat16")],
    ),
)
def test_no_spills_in_front_of_several_products(worker, switches, chip, dtype):
    """Nothing spills where a kernel adds up what products pull back, and it has room for what it fetches ahead."""
    widths = (100, 768, 1024, 2048, 4096, 5120, 8192, 16384)
    made = worker.submit(compile_all, DTYPES[dtype], chip, SEVERAL_SWITCHES[switches], widths).result()
    assert_fits(made, STACK)


@pytest.mark.parametrize(
    ("switches", "chip", "dtype"),
    every_pair(
        itertools.product(EXAMPLES_SWITCHES, CHIPS, MOST),
        light=[("examples of a sum", "b200", "float32"), ("heads", "h200", "bfloat16")],
    ),
)
def test_no_spills_of_parameters_of_examples_and_heads(worker, switches, chip, dtype):
    """Nothing spills where one program has all rows of an example: of 8192 elements in float32 40 to 80 bytes did."""
    widths = (128, 1000, 4096, 8192)
    made = worker.submit(compile_all, DTYPES[dtype], chip, EXAMPLES_SWITCHES[switches], widths).result()
    assert_fits(made, STACK)


def compile_both_sides(dtypes, chip, switches, widths):
    """Return of each launch of a norm on both sides of a sum what `compile_all` does. Runs in the worker."""
    made = []
    for h in widths:
        for wants_y, launch in [
            (y, a) for y in (False, True) for a in both_sides_launches(h, dtypes, chip, switches, y)
        ]:
            resources = compiler.compile_launch(launch)
            what = f"{launch.kernel.fn.__name__} {dtypes} H={h} {wants_y=} {launch.tile}"
            made.append((what, resources.spilled, resources.shared, launch.chip.shared))
    return made


# One of every kind of tile, aligned and not, with a mask and without; and those of the byte table.
BOTH_SIDES_WIDTHS = (33, 128, 768, 1000, 1023, 1024, 2048, 4095, 4096, 5376, 7168, 8192)


@pytest.mark.parametrize(
    ("switches", "dtype", "widths"),
    dealt(list(BOTH_SIDES_SWITCHES)[::2], [*MOST, "bfloat16, float32 stream"], BOTH_SIDES_WIDTHS),
)
def test_no_spills_of_norms_on_both_sides_on_an_h200(worker, switches, dtype, widths):
    of = BOTH_SIDES_SWITCHES[switches]
    assert_fits(worker.submit(compile_both_sides, DTYPES[dtype], "h200", of, widths).result(), STACK)


@pytest.mark.parametrize(
    ("switches", "chip", "dtype"), every_pair(itertools.product(BOTH_SIDES_SWITCHES, CHIPS, DTYPES))
)
def test_no_spills_of_norms_on_both_sides(worker, switches, chip, dtype):
    of = BOTH_SIDES_SWITCHES[switches]
    made = worker.submit(compile_both_sides, DTYPES[dtype], chip, of, BOTH_SIDES_WIDTHS).result()
    assert_fits(made, STACK)


def kernels_of(chip, are_linear):
    """Return what is compiled of the launches at a few sizes: kernels, tiles and constants. Runs in the worker."""
    switches = SWITCHES["everything"]
    if are_linear:
        dtypes = LINEAR_DTYPES["bfloat16"]
        made = [launch for size in FUSED for launch in linear_launches(*size, dtypes, chip, switches)]
    else:
        dtypes = DTYPES["bfloat16"]
        made = [launch for h in MODULE_WIDTHS for launch in launches(h, dtypes, chip, switches)]
    return [(launch.kernel.fn.__name__, launch.tile, launch.constants) for launch in made]


@pytest.mark.parametrize(
    ("chip", "compiled", "are_linear"), [("h100", "h200", False), ("h100", "h200", True), ("l40s", "l4", False)]
)
def test_chips_of_one_architecture_have_the_same_kernels(worker, chip, compiled, are_linear):
    """An H100 has the kernels of an H200, and for norms an L40S those of an L4.

    Which Linears are fused depends on an L40S's cores.
    """
    one, other = (worker.submit(kernels_of, c, are_linear).result() for c in (chip, compiled))
    assert len(one) > 20 and one == other


def test_a_spill_is_seen(worker):
    """A tile twice as large as any that is chosen spills, and is reported."""
    assert worker.submit(spills_of_a_large_tile).result() > 0


def spills_of_a_large_tile():
    import dataclasses

    backward = next(
        launch
        for launch in launches(16384, DTYPES["float32"], "h200", SWITCHES["everything"])
        if launch.kernel.fn.__name__ == "backward_kernel"
    )
    constants = backward.constants | {"BLOCK_H": 16384}
    return compiler.compile_launch(dataclasses.replace(backward, tile=Tile(1, 16384, 16), constants=constants)).spilled
