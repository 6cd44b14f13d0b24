"""Rung 3: kernels that write eight bits, compiled: they convert in hardware where the chip can, and nothing spills."""

import itertools

import jax
import pytest
from test_compiler import STACK, assert_fits

import jln
from jln._triton.chip import CHIPS
from jln._triton.target import Recorder, using

# What makes eight bits of float32, by one instruction.
CONVERTS = {
    "l4": "cvt.rn.satfinite.e4m3x2.f32",
    "h200": "cvt.rn.satfinite.e4m3x2.f32",
    "b200": "cvt.rn.satfinite.e4m3x2.f32",
    "mi355x": "v_cvt_scalef32_pk_fp8_f32",
}
WITHOUT = ("a100", "mi300x")  # where XLA makes them, and a kernel finds the largest number alone
SIZES = (96, 1024, 4096, 8192, 16384, 20000)  # several rows a tile, one, the widest whole ones, and chunks
KINDS = {"one scale": jln.Float8(1.0), "blocks": jln.MXFloat8(), "the largest alone": jln.Float8()}


def compile_kernels(chip, kind, dtype, sizes):
    """Return, of each launch, what `assert_fits` takes, and whether the kernel converts as the chip should.

    Runs in the worker.
    """
    import compiler

    made = []
    for h, name in itertools.product(sizes, ("rms_norm", "add_layer_norm")):
        x = jax.ShapeDtypeStruct((100_000, h), dtype)

        def step(x, name=name):
            operands = (x, x) if name == "add_layer_norm" else (x,)
            return getattr(jln, name)(*operands, quantize=KINDS[kind], implementation="triton")

        with using(recorder := Recorder(CHIPS[chip])):
            jax.jit(step).trace(x).lower(lowering_platforms=(CHIPS[chip].platform,))
        for launch in recorder.launches:
            resources = compiler.compile_launch(launch)
            what = f"{launch.kernel.fn.__name__} {dtype} H={h} {launch.tile}"
            converts = "r.y" not in launch.results or CONVERTS[chip] in resources.assembly
            made.append((what, resources.spilled, resources.shared, launch.chip.shared, converts))
    return made


CASES = [
    pytest.param(chip, kind, dtype, marks=() if (chip, dtype) == ("h200", "bfloat16") else pytest.mark.heavy)
    for chip, kind, dtype in itertools.product((*CONVERTS, *WITHOUT), KINDS, ("bfloat16", "float32"))
    if chip in CONVERTS or kind == "the largest alone"
]


@pytest.mark.parametrize(("chip", "kind", "dtype"), CASES)
def test_eight_bits_do_not_spill(worker, chip, kind, dtype):
    made = worker.submit(compile_kernels, chip, kind, dtype, SIZES).result()
    of_each = 2 if chip in CONVERTS and kind == "the largest alone" else 1
    assert len(made) == of_each * 2 * len(SIZES)
    assert_fits(made, STACK)
    assert [what for what, *_, converts in made if not converts] == []


@pytest.mark.parametrize("chip", CONVERTS)
def test_every_chip_converts(worker, chip):
    made = worker.submit(compile_kernels, chip, "blocks", "bfloat16", (1024,)).result()
    assert len(made) == 2
    assert_fits(made, STACK)
    assert [what for what, *_, converts in made if not converts] == []
