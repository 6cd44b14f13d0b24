"""Tests for AMD: programs lowered for ROCm beside CUDA's, whose plugin stands in for the call that writes launches."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import zlib

import jax
import pytest
from jaxlib import gpu_triton

import jln
import program
from absent_gpu import custom_calls, struct, with_gradients
from jln._triton import lowering
from jln._triton.chip import CHIPS, Chip
from jln._triton.target import Gpu, using

ROWS, H = 512, 1024
X, SCALE, KERNEL, Y = struct(ROWS, H), struct(H, dtype="float32"), struct(H, 64), struct(ROWS, 64)


@pytest.fixture(autouse=True)
def rocm(monkeypatch):
    program.mesh("h200", (1,), ("x",))
    monkeypatch.setattr(gpu_triton, "_hip_triton", gpu_triton._cuda_triton)


def step(operator):
    return with_gradients(functools.partial(operator, implementation="triton"))


def calls(function, *args, chip, platform, monkeypatch):
    """Return the calls of kernels, and the protobuf of each."""
    monkeypatch.setenv("JLN_CHIP", chip)
    jax.clear_caches()
    found = [c for c in custom_calls(function, *args, platform=platform) if "triton" in c["call_target_name"]]
    return found, [zlib.decompress(call.pop("opaque")) for call in found]


@pytest.mark.parametrize(
    ("function", "args", "count"),
    [
        (step(jln.layer_norm), (X, X, SCALE, SCALE), 3),
        (step(jln.add_rms_norm), ((X, X), X, X, SCALE), 3),
        (step(jln.rms_norm_linear), (Y, X, SCALE, KERNEL), 4),
    ],
)
def test_calls_have_cudas_operands_results_aliases_and_grids(function, args, count, monkeypatch):
    grids, protobuf = [], lowering._protobuf
    monkeypatch.setattr(lowering, "_protobuf", lambda *a: grids.append(a[0].programs) or protobuf(*a))
    # As many cores as an H200 has, on which the number of shares of the sums over rows depends.
    monkeypatch.setitem(CHIPS, "mi300x", dataclasses.replace(CHIPS["mi300x"], cores=CHIPS["h200"].cores))
    on_cuda, _ = calls(function, *args, chip="h200", platform="cuda", monkeypatch=monkeypatch)
    on_rocm, _ = calls(function, *args, chip="mi300x", platform="rocm", monkeypatch=monkeypatch)
    assert len(on_rocm) == len(on_cuda) == count
    if count == 4:  # its tiles are smaller for ROCm, and so are its shares of dkernel
        on_cuda, on_rocm = on_cuda[:1], on_rocm[:1]
    else:
        assert grids[:count] == grids[count:]
    assert on_rocm == on_cuda


def test_a_code_object_lies_where_its_launch_says(monkeypatch):
    """A launch whose file was read and deleted is lowered again."""
    for _ in range(2):
        _, (protobuf, *_) = calls(step(jln.rms_norm), X, X, chip="mi355x", platform="rocm", monkeypatch=monkeypatch)
        (path,) = re.findall(rb"/[\w./-]+\.hsaco", protobuf)
        with open(path, "rb") as file:
            code = file.read()
        assert code.startswith(b"\x7fELF") and b"gfx950" in code and b"forward_kernel" in code
        os.unlink(path)


def test_a_processs_files_are_removed_where_it_ends(tmp_path):
    code = "from jln._triton import lowering; print(lowering._folder().is_dir())"
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n" and list(tmp_path.iterdir()) == []


def test_an_export_for_rocm_has_no_kernels(monkeypatch):
    """An export for ROCm has no kernels, as they would be files of this process and the export is for another."""
    monkeypatch.setenv("JLN_CHIP", "mi300x")
    export = jax.export.export
    with pytest.raises(ValueError, match="cannot run in an export for ROCm, whose plugin reads kernels from files"):
        export(jax.jit(lambda x: jln.rms_norm(x, implementation="triton")), platforms=("rocm",))(X)
    exported = export(jax.jit(lambda x: jln.rms_norm(x)), platforms=("cpu", "cuda", "rocm"))
    with pytest.warns(UserWarning, match="the chip is mi300x"):  # so there are none for CUDA
        assert "triton" not in exported(X).mlir_module()


def lowered(**how):
    return jax.jit(lambda x: jln.rms_norm(x, **how)).trace(X).lower(lowering_platforms=("rocm",)).as_text()


def test_a_card_of_other_waves_is_refused():
    """A card with waves of another size is refused, as a launch has 64 threads for each of the plugin's waves."""
    radeon = Gpu(Chip("AMD Radeon RX 7900 XTX", "gfx1100", 96))
    with using(radeon), pytest.raises(RuntimeError, match=r"for gfx90a, gfx942, gfx950, .* is gfx1100"):
        lowered(implementation="triton")
    unknown_name = Gpu(Chip("AMD Instinct MI300A", "gfx942", 228))
    with using(unknown_name):
        assert "triton" in lowered(implementation="triton")


def test_none_is_xla_until_a_card_has_measured_it(monkeypatch):
    monkeypatch.setenv("JLN_CHIP", "mi300x")
    assert "triton" not in lowered()


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setenv("JLN_CHIP", "h200")
    with pytest.raises(RuntimeError, match="the chip is h200: set JLN_CHIP to one of mi250x"):
        lowered(implementation="triton")
    monkeypatch.setattr(gpu_triton, "_hip_triton", None)
    monkeypatch.setenv("JLN_CHIP", "mi300x")
    with pytest.raises(RuntimeError, match=r"JAX uses no plugin for rocm here: pip install -e .\.\[rocm7\]"):
        lowered(implementation="triton")
    assert lowering.missing("cuda") is None
