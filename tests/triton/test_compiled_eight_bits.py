"""Rung 3: kernels that write eight bits, compiled: they convert in hardware where the chip can, and nothing spills."""

import functools
import itertools

import jax
import pytest
from test_compiler import STACK, assert_fits

import jln
from jln._junction.along_rows import AlongRows, in_blocks_of_rows
from jln._junction.arrays import Arrays, Norm, Switches
from jln._junction.operations import along_rows
from jln._operators.eight_bits import Ways
from jln._triton.chip import CHIPS
from jln._triton.target import Recorder, using

# What makes eight bits of float32, by one instruction; None where the kernel writes float32, and XLA the eight bits.
CONVERTS = {
    "l4": "cvt.rn.satfinite.e4m3x2.f32",
    "h200": "cvt.rn.satfinite.e4m3x2.f32",
    "b200": "cvt.rn.satfinite.e4m3x2.f32",
    "a100": None,
    "mi300x": None,
    "mi355x": "v_cvt_scalef32_pk_fp8_f32",
}
SIZES = (96, 1024, 4096, 8192, 16384, 20000)  # several rows a tile, one, the widest whole ones, and chunks
KINDS = {
    "one scale": jln.Float8(1.0),
    "blocks": jln.MXFloat8(),
    "the largest alone": jln.Float8(),
    "three scales": Ways((jln.Float8(1.0), jln.Float8(2.0), jln.Float8(3.0))),
}


def compile_kernels(chip, kind, dtype, sizes):
    """Return, of each launch, what `assert_fits` takes, and whether the kernel converts as the chip should.

    Runs in the worker.
    """
    made = []
    for h, name in itertools.product(sizes, ("rms_norm", "add_layer_norm")):
        x = jax.ShapeDtypeStruct((100_000, h), dtype)

        def step(x, name=name):
            operands = (x, x) if name == "add_layer_norm" else (x,)
            return getattr(jln, name)(*operands, quantize=KINDS[kind], implementation="triton")

        made += [compiled(launch, dtype, h) for launch in launches_of(step, chip, x)]
    return made


def launches_of(step, chip, *operands):
    with using(recorder := Recorder(CHIPS[chip])):
        jax.jit(step).trace(*operands).lower(lowering_platforms=(CHIPS[chip].platform,))
    return recorder.launches


def compiled(launch, dtype, h):
    """Return what `assert_fits` takes, and whether the kernel converts as the chip should."""
    import compiler

    resources = compiler.compile_launch(launch)
    what = f"{launch.kernel.fn.__name__} {dtype} H={h} {launch.tile}"
    y, instruction = launch.results.get("y"), CONVERTS[launch.chip.name]
    converts = y is None or (y.dtype == "float32" if instruction is None else instruction in resources.assembly)
    return what, resources.spilled, resources.shared, launch.chip.shared, converts


def compile_blocks_of_rows(chip, dtype, sizes):
    """Return the same of blocks along the rows, in the layouts of both kinds of product.

    Runs in the worker.
    """
    made = []
    for (rows, h), transposed in itertools.product(sizes, (False, True)):
        shapes = {"x": (rows, h), "scale": (1, h), "offset": (1, h), "mean": (rows, 1), "rstd": (rows, 1)}
        dtypes = {"mean": "float32", "rstd": "float32"}
        operands = Arrays(**{n: jax.ShapeDtypeStruct(s, dtypes.get(n, dtype)) for n, s in shapes.items()})
        settings = AlongRows(Norm(-1, 1e-6, Switches(True)), transposed)
        by = functools.partial(along_rows, implementation="triton")
        step = functools.partial(in_blocks_of_rows, by, settings=settings, dtype="float8_e4m3fn")
        made += [compiled(launch, dtype, h) for launch in launches_of(step, chip, operands)]
    return made


def compile_norms_along_rows(chip, dtype):
    """Return the same of norms that are gated in front and behind, and to which something is added.

    Runs in the worker.
    """
    x, scale = jax.ShapeDtypeStruct((8192, 4096), dtype), jax.ShapeDtypeStruct((4096,), "float32")
    wide = jax.ShapeDtypeStruct(x.shape, "float32")
    made = []
    how = {"quantize": jln.MXFloat8(axis=-2), "implementation": "triton"}
    calls = (
        lambda x, other, scale: jln.rms_norm_gated(x, other, scale, **how),
        lambda x, other, scale: jln.rms_norm_gated(x, other, scale, norm_before_gate=False, **how),
        lambda x, other, scale: jln.layer_norm_add(x, other, scale, **how),
    )
    for call, other in itertools.product(calls, (x, wide)):
        made += [compiled(launch, dtype, 4096) for launch in launches_of(call, chip, x, other, scale)]
    return made


CASES = [
    pytest.param(chip, kind, dtype, marks=() if (chip, dtype) == ("h200", "bfloat16") else pytest.mark.heavy)
    for chip, kind, dtype in itertools.product(CONVERTS, KINDS, ("bfloat16", "float32"))
]


@pytest.mark.parametrize(("chip", "kind", "dtype"), CASES)
def test_eight_bits_do_not_spill(worker, chip, kind, dtype):
    made = worker.submit(compile_kernels, chip, kind, dtype, SIZES).result()
    assert len(made) == (2 if kind == "the largest alone" else 1) * 2 * len(SIZES)
    assert_fits(made, STACK)
    assert [what for what, *_, converts in made if not converts] == []


@pytest.mark.parametrize("chip", CONVERTS)
def test_every_chip_converts(worker, chip):
    made = worker.submit(compile_kernels, chip, "blocks", "bfloat16", (1024,)).result()
    assert_fits(made, STACK)
    assert [what for what, *_, converts in made if not converts] == []


# Half a tile of columns, many tiles, and rows that leave room in a last block; columns that do not start on 16 bytes.
OF_ROWS = ((64, 32), (8192, 4096), (8200, 4096), (1000, 100))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("chip", [chip for chip, converts in CONVERTS.items() if converts])
def test_blocks_of_rows_do_not_spill(worker, chip, dtype):
    made = worker.submit(compile_blocks_of_rows, chip, dtype, OF_ROWS).result()
    assert len(made) == 2 * len(OF_ROWS)
    assert_fits(made, 0)
    assert [what for what, *_, converts in made if not converts] == []


@pytest.mark.parametrize(
    "chip", ["h200", *(pytest.param(c, marks=pytest.mark.heavy) for c in ("l4", "b200", "mi355x"))]
)
def test_norms_along_rows_do_not_spill(worker, chip):
    """Kernels of the statistics in front spill no more."""
    made = worker.submit(compile_norms_along_rows, chip, "bfloat16").result()
    assert len(made) == 2 * 6
    assert_fits(made, STACK)
    assert [what for what, *_, converts in made if not converts] == []
