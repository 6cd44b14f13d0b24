"""Tests of which implementation runs where, and that launch choices depend on nothing they must not."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jln
from jln._junction import tiles
from jln._junction.linears import tiles as linear_tiles
from jln._triton import target
from jln._triton.chip import CHIP_VARIABLE, CHIPS
from jln._triton.tile import next_power_of_2


def python(code, **environment):
    """Run code in a fresh interpreter; return what it printed on stdout and stderr."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "JAX_PLATFORMS": "cpu", **environment}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    return ran.stdout + ran.stderr


def test_importing_jln_imports_no_framework_and_what_is_beside_the_operators():
    code = """
import sys, jln
print([m for m in ("triton", "jax_triton", "flax", "haiku", "equinox") if m in sys.modules])
print(jln.testing.check_vjp.__name__, jln.STATISTICS)
"""
    assert python(code).splitlines() == ["[]", "check_vjp jln_statistics"]


def test_triton_on_the_cpu_without_the_interpreter_says_how():
    code = "import jax.numpy as jnp, jln; jln.layer_norm(jnp.ones((2, 4)), implementation='triton')"
    said = python(code)
    assert "(slowly), set the environment variable TRITON_INTERPRET=1 before Python starts" in said
    assert "install" not in said  # triton is


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_without_triton_the_default_runs_and_triton_says_what_to_install(interpret):
    code = """
import sys
sys.modules["triton"] = sys.modules["jax_triton"] = None  # as if they were not installed
import jax, jax.numpy as jnp, jln
print(jax.grad(lambda x: jln.layer_norm(x).sum())(jnp.ones((2, 4))).shape)
f = jax.jit(lambda x: jln.layer_norm(x, implementation="triton"))
for platform in ("cpu", "cuda", "rocm"):
    try:
        f.trace(jnp.ones((2, 4))).lower(lowering_platforms=(platform,))
    except RuntimeError as error:
        print(error)
"""
    shape, cpu, cuda, rocm = python(code, TRITON_INTERPRET=interpret).splitlines()
    assert shape == "(2, 4)"
    assert cuda.endswith('triton is not installed: pip install -e ".[cuda13]" (or ".[cuda12]") in a clone of jln')
    assert rocm.endswith('triton is not installed: pip install -e ".[rocm7]" in a clone of jln')
    assert cpu.endswith('triton is not installed: pip install -e ".[test]" in a clone of jln, on Linux')


def test_triton_imported_too_early_says_so():
    code = """
import os, triton
os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_INTERPRET"] = "0"
import jln._junction.kernels.forward
os.environ["TRITON_INTERPRET"] = "1"
import jax.numpy as jnp, jln
jln.layer_norm(jnp.ones((2, 4)), implementation="triton")
"""
    assert "TRITON_INTERPRET=1 must be set before triton is first imported" in python(code)


def test_default_is_not_the_interpreter():
    """TRITON_INTERPRET=1 makes the kernels possible on the CPU, and not the default."""
    lowered = jax.jit(jln.layer_norm).lower(jnp.ones((2, 4))).as_text()
    assert ("callback" in lowered) is False
    if target.interpreting():
        lowered = jax.jit(lambda x: jln.layer_norm(x, implementation="triton")).lower(jnp.ones((2, 4))).as_text()
        assert "callback" in lowered


def test_without_a_chip_the_default_for_cuda_is_xla_with_a_warning():
    code = """
import warnings, jax, jax.numpy as jnp, jln
f = jax.jit(jln.layer_norm)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    exported = jax.export.export(f, platforms=("cuda",))(jax.ShapeDtypeStruct((2, 4), "float32"))
print("triton_kernel_call" in exported.mlir_module(), caught[0].message)
named = jax.jit(lambda x: jln.layer_norm(x, implementation="triton"))
try:
    jax.export.export(named, platforms=("cuda",))(jax.ShapeDtypeStruct((2, 4), "float32"))
except RuntimeError as error:
    print(error)
"""
    printed = python(code, TRITON_INTERPRET="0")
    assert "False jln runs jln_norm_forward without its Triton kernels" in printed
    assert "implementation='triton' cannot run: " in printed


def test_target_chip(monkeypatch):
    monkeypatch.delenv(CHIP_VARIABLE, raising=False)
    with target.using(target.Gpu(CHIPS["b200"])) as used:
        assert used.chip.capability == 100 and target.target_chip() == used.chip
    monkeypatch.setenv(CHIP_VARIABLE, "a100")
    assert target.target_chip().cores == 108
    monkeypatch.setenv(CHIP_VARIABLE, "h2000")
    with pytest.raises(ValueError, match="unknown chip 'h2000'; known are a100"):
        target.target_chip()


WIDTHS = (1, 3, 100, 127, 128, 1024, 4096, 4100, 5000, 8191, 8192, 16384, 16385, 40000, 262144)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_tiles_are_what_triton_accepts_and_row_sums_have_a_kernel_where_a_tile_has_no_whole_rows(itemsize):
    for h, mixed, wants_y, beside, more, chip in itertools.product(
        WIDTHS, (False, True), (False, True), (0, 2), (0, 1, 3), ("a100", "l4", "h200", "b200", "mi300x")
    ):
        how = {"beside": beside, "more": more, "reads": (2 + beside, 0)}
        plan = tiles.backward(h, itemsize, mixed, wants_y, target.Target(CHIPS[chip]), **how)
        assert plan.tile.columns >= h or plan.sums is not None
        reduce = (tiles.reduce_tile(h, shares) for shares in (2, 33, None))
        for tile in filter(None, (tiles.forward_tile(h, itemsize), plan.tile, plan.sums, *reduce)):
            for n in (tile.rows, tile.columns, tile.warps):
                assert n == next_power_of_2(n) >= 1
            assert tile.warps <= 32


@pytest.mark.parametrize(
    ("version", "fuses"),
    [((3, 6, 0), False), ((3, 7, 0), False), ((3, 7, 1), True), ((3, 8, 0), True), ((3, 10, 0), True)],
)
def test_a_triton_that_leaves_out_fences_fuses_no_linear_where_they_matter(monkeypatch, version, fuses):
    monkeypatch.setattr(linear_tiles, "triton_version", lambda: version)
    for name in ("a100", "l4", "h200", "b200"):
        chip = CHIPS[name]
        expected = fuses or chip.capability < 90
        assert (linear_tiles.missing_fence(chip) is None) == expected
        for choose in (linear_tiles.forward_tile, linear_tiles.backward_plan):
            assert (choose(10**5, 4096, 64, "bfloat16", chip) is not None) == expected
    assert linear_tiles.forward_tile(100, 64, 64, "bfloat16", target.INTERPRETED) is not None
    if not fuses:
        assert f"Triton {version[0]}.{version[1]}.0 leaves out fences" in linear_tiles.missing_fence(CHIPS["h200"])


@pytest.mark.parametrize(("gated", "widest"), [(False, 8192), (True, 6144)])
def test_the_widest_row_on_both_sides_of_a_float32_stream(gated, widest):
    """Rows of a few elements more take a kernel for each norm."""
    found = [tiles.both_sides(h, 4, True, CHIPS["h200"], gated) for h in (widest, widest + 4)]
    assert found[0] is not None and found[0].columns >= widest and found[1] is None
