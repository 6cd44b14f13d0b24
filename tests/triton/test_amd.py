"""Tests of the kernels on AMD's chips, of rungs 2 and 3.

The kernels are right in the interpreter with the tiles that waves take. Compiled for gfx90a, gfx942 and gfx950 they
keep their values in registers and use memory only for what they read and write.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compiler
import jln
from jln._triton.chip import CHIPS, Chip
from jln._triton.target import Interpreter, Recorder, using
from launches import (
    DTYPES,
    EXAMPLES_SWITCHES,
    FUSED,
    GATED_SWITCHES,
    LINEAR_DTYPES,
    SUM_SWITCHES,
    SWITCHES,
    both_sides_launches,
    dealt_on,
    launches,
    linear_launches,
)
from workloads import WORKLOADS

pytest.importorskip("triton")

# One of each architecture.
AMD = ("mi250x", "mi300x", "mi355x")
# One of every kind of tile, aligned and not.
WIDTHS = [128, 1000, 4096, 1024, 8192, 16384, 256, 20000]
OTHERS = [SUM_SWITCHES["everything and a gate"], GATED_SWITCHES["the norm before its gate"], EXAMPLES_SWITCHES["heads"]]
SIZES = [*FUSED, (3000, 768, 64)]
# The vector registers of a thread, where a SIMD has two waves.
REGISTERS = 256


def resources(made, dtype):
    """Compile the launches and return the name, registers, spills, shared memory, widest load and mfmas of each.

    This runs in the worker process, which returns everything but the binaries.
    """
    found = []
    for launch in made:
        of = compiler.compile_launch(launch)
        h = max(a.shape[-1] for a in launch.arrays.values())
        products = of.assembly.count("v_mfma")
        found.append((f"{launch.kernel.fn.__name__} {dtype} H={h}", of.registers, of.spilled, of.shared))
        found[-1] += (of.widest_load, products)
    return found


def norms(chip, dtype, widths):
    of = DTYPES[dtype]
    made = [a for h in widths for a in launches(h, of, chip, SWITCHES["everything"])]
    made += [a for h in {*widths} & {1000, 4096, 8192} for s in OTHERS for a in launches(h, of, chip, s)]
    made += [a for h in {*widths} & {1024, 4096} for a in both_sides_launches(h, of, chip, SWITCHES["add_rms_norm"])]
    return resources(made, dtype)


def linears(chip, dtype, sizes):
    of = LINEAR_DTYPES[dtype]
    made = [a for size in sizes for a in linear_launches(*size, of, chip, SWITCHES["everything"])]
    return resources([launch for launch in made if "kernels.with_linear" in launch.kernel.fn.__module__], dtype)


@pytest.mark.parametrize(
    ("chip", "dtype", "widths"),
    dealt_on("mi300x", AMD, ["bfloat16", "float32"], WIDTHS, ["float16", "float64", "bfloat16, float32 stream"]),
)
def test_norms_keep_to_registers(worker, chip, dtype, widths):
    found = worker.submit(norms, chip, dtype, widths).result()
    assert [f for f in found if f[1] > REGISTERS or f[2] > 0 or f[3] > CHIPS[chip].shared] == []
    assert [f for f in found if "forward" in f[0] and "H=1000" not in f[0] and f[4] != 16] == []


@pytest.mark.parametrize(
    ("chip", "dtype", "sizes"), dealt_on("mi300x", AMD, ["bfloat16", "bfloat16, float32 parameters"], SIZES)
)
def test_fused_linears_keep_to_registers_and_multiply_by_mfma(worker, chip, dtype, sizes):
    found = worker.submit(linears, chip, dtype, sizes).result()
    names = {f[0].split()[0] for f in found}
    assert names == {"forward_kernel", "row_sums_kernel", "backward_kernel", "parameters_kernel"}
    assert [f for f in found if f[1] > REGISTERS or f[2] > 0 or f[3] > CHIPS[chip].shared] == []
    assert [f for f in found if "parameters" not in f[0] and not f[5]] == []


def test_half_as_many_waves_of_twice_the_threads():
    for launch in launches(4096, DTYPES["bfloat16"], "mi300x", SWITCHES["everything"]):
        options = launch.tile.options(launch.chip)
        assert options["num_warps"] == max(1, launch.tile.warps // 2) and "maxnreg" not in options


def test_a_chip_says_what_it_is():
    assert [str(CHIPS[name]) for name in ("h200", "mi300x", "mi355x")] == ["sm_90", "gfx942", "gfx950"]
    assert {chip.platform for chip in CHIPS.values() if chip.is_amd} == {"rocm"}
    assert Recorder(CHIPS["mi355x"]).chip.shared == 163840
    assert Chip("b300", 103, 148).shared == 101376  # an unknown chip has the least of its maker's chips
    assert [CHIPS[name].threads for name in ("h200", "mi300x")] == [32, 64]


CASES = {
    "add_layer_norm": ((5, 1000), ("x", "residual", "scale", "offset"), {}),
    "rms_norm_gated": ((5, 256), ("x", "z", "scale"), {}),
    "rms_norm, heads": ((35, 3, 40), ("x", "scale"), {"scale": (1, 3, 40)}),
    "layer_norm_linear": ((70, 96), ("x", "scale", "offset", "kernel", "bias"), {}),
    "rms_norm_linear": ((70, 96), ("x", "scale", "kernel"), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tiles_of_waves_are_right_in_the_interpreter(case):
    """Results and gradients are right to 1e-5 with the tiles of an AMD chip.

    The chip has three compute units, so that programs of the backward kernels loop over tiles.
    """
    shape, names, own = CASES[case]
    operator = case.partition(",")[0]
    h, random = shape[-1], np.random.default_rng(3)
    shapes = {"scale": (h,), "offset": (h,), "kernel": (h, 24), "bias": (24,)} | own
    arrays = [jnp.asarray(random.standard_normal(shapes.get(name, shape)), "float32") for name in names]

    def cotangent(result):
        return jnp.cos(jnp.arange(result.size, dtype=result.dtype)).reshape(result.shape)

    def step(function, *arrays):
        results, pull = jax.vjp(function, *arrays)
        return results, pull(jax.tree.map(cotangent, results))

    expected = step(getattr(jln.reference, operator), *(a.astype("float64") for a in arrays))
    with using(Interpreter(Chip("waves", "gfx942", 3))):
        ours = step(lambda *a: getattr(jln, operator)(*a, implementation="triton"), *arrays)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))


def test_the_tiles_of_waves_are_not_those_of_warps():
    size = 70, 96, 24, LINEAR_DTYPES["float32"]
    warps, waves = (linear_launches(*size, chip, SWITCHES["everything"]) for chip in ("h200", "mi300x"))
    assert [launch.tile for launch in warps] != [launch.tile for launch in waves]


def test_each_kernel_of_a_workload_is_counted_for_a_chip(capsys):
    import report

    found, failed = report.compiled_kernels([WORKLOADS["router"]], "mi300x")
    kernels = {k["kernel"]: k for k in found["kernels"]}
    assert not failed and "mi300x (gfx942), 65.5 KB" in capsys.readouterr().out
    assert [*kernels] == ["forward_kernel", "row_sums_kernel", "backward_kernel", "parameters_kernel"]
    assert all(0 < k["registers"] <= REGISTERS and k["spilled"] == 0 for k in kernels.values())
    assert kernels["forward_kernel"]["widest_load"] == 16 and kernels["forward_kernel"]["warps"] == 4
