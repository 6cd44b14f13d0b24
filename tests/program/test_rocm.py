"""Rung 4, as far as it goes for AMD: programs lowered for ROCm beside the same programs for CUDA.

CUDA's plugin stands in for the one call that wants ROCm's library, which writes the protobuf of a launch: both plugins
have the same.
"""

import dataclasses
import os
import re
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import pytest
from jaxlib import gpu_triton
from jaxlib.mlir import ir

import absent_gpu  # noqa: F401
import jln
import program
from jln._triton import lowering
from jln._triton.chip import CHIPS, Chip
from jln._triton.target import Gpu, using

ROWS, H = 512, 1024
X = jax.ShapeDtypeStruct((ROWS, H), jnp.bfloat16)
SCALE = jax.ShapeDtypeStruct((H,), jnp.float32)
KERNEL = jax.ShapeDtypeStruct((H, 64), jnp.bfloat16)


@pytest.fixture(autouse=True)
def rocm(monkeypatch):
    program.mesh("h200", (1,), ("x",))
    monkeypatch.setattr(gpu_triton, "_hip_triton", gpu_triton._cuda_triton)


def norm(x, scale, offset):
    y, pull = jax.vjp(lambda *a: jln.layer_norm(*a, implementation="triton"), x, scale, offset)
    return y, pull(y)


def total(x, residual, scale):
    y, pull = jax.vjp(lambda *a: jln.add_rms_norm(*a, implementation="triton"), x, residual, scale)
    return y, pull(y)


def linear(x, scale, kernel):
    y, pull = jax.vjp(lambda *a: jln.rms_norm_linear(*a, implementation="triton"), x, scale, kernel)
    return y, pull(y)


def calls(function, *args, chip, platform, monkeypatch):
    """Return (attributes without the kernel's own, types of operands and results, protobuf) of each kernel's call."""
    monkeypatch.setenv("JLN_CHIP", chip)
    jax.clear_caches()
    module = jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
            attributes = {name: str(op.attributes[name]) for name in op.attributes}
            protobuf = zlib.decompress(op.attributes["mhlo.backend_config"]["opaque"].value_bytes)
            attributes.pop("mhlo.backend_config")
            types = [str(value.type) for value in (*op.operands, *op.results)]
            found.append((attributes, types, protobuf))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


@pytest.mark.parametrize(
    ("function", "args", "count"),
    [(norm, (X, SCALE, SCALE), 3), (total, (X, X, SCALE), 3), (linear, (X, SCALE, KERNEL), 4)],
)
def test_calls_have_cudas_operands_results_aliases_and_grids(function, args, count, monkeypatch):
    grids, protobuf = [], lowering._protobuf
    monkeypatch.setattr(lowering, "_protobuf", lambda *a: grids.append(a[0].programs) or protobuf(*a))
    # As many cores as an H200 has, on which the number of shares of the sums over rows depends.
    monkeypatch.setitem(CHIPS, "mi300x", dataclasses.replace(CHIPS["mi300x"], cores=CHIPS["h200"].cores))
    on_cuda = calls(function, *args, chip="h200", platform="cuda", monkeypatch=monkeypatch)
    on_rocm = calls(function, *args, chip="mi300x", platform="rocm", monkeypatch=monkeypatch)
    assert len(on_rocm) == len(on_cuda) == count
    if function is linear:  # its tiles are smaller for ROCm, and so are its shares of dkernel
        on_cuda, on_rocm = on_cuda[:1], on_rocm[:1]
    else:
        assert grids[:count] == grids[count:]
    for (ours, types, _), (theirs, their_types, _) in zip(on_rocm, on_cuda, strict=True):
        assert types == their_types and ours == theirs


def test_a_code_object_lies_where_its_launch_says(monkeypatch):
    (call, *_) = calls(norm, X, SCALE, SCALE, chip="mi355x", platform="rocm", monkeypatch=monkeypatch)
    (path,) = re.findall(rb"/[\w./-]+\.hsaco", call[2])
    with open(path, "rb") as file:
        code = file.read()
    assert code.startswith(b"\x7fELF") and b"gfx950" in code and b"forward_kernel" in code


def test_a_launch_whose_file_was_read_and_deleted_is_lowered_again(monkeypatch):
    for _ in range(2):
        (call, *_) = calls(norm, X, SCALE, SCALE, chip="mi300x", platform="rocm", monkeypatch=monkeypatch)
        (path,) = re.findall(rb"/[\w./-]+\.hsaco", call[2])
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


def test_a_card_of_other_waves_is_refused():
    """A card with waves of another size is refused, as a launch has 64 threads for each of the plugin's waves."""
    radeon = Gpu(Chip("AMD Radeon RX 7900 XTX", "gfx1100", 96))
    with using(radeon), pytest.raises(RuntimeError, match=r"for gfx90a, gfx942, gfx950, .* is gfx1100"):
        jax.jit(lambda x: jln.rms_norm(x, implementation="triton")).trace(X).lower(lowering_platforms=("rocm",))
    unknown_name = Gpu(Chip("AMD Instinct MI300A", "gfx942", 228))
    with using(unknown_name):
        jax.jit(lambda x: jln.rms_norm(x, implementation="triton")).trace(X).lower(lowering_platforms=("rocm",))


def test_none_is_xla_until_a_card_has_measured_it(monkeypatch):
    monkeypatch.setenv("JLN_CHIP", "mi300x")
    lowered = jax.jit(lambda x: jln.rms_norm(x)).trace(X).lower(lowering_platforms=("rocm",)).as_text()
    assert "triton" not in lowered


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(gpu_triton, "_hip_triton", None)
    monkeypatch.setenv("JLN_CHIP", "mi300x")
    with pytest.raises(RuntimeError, match=r"JAX uses no plugin for rocm here: pip install -e .\.\[rocm7\]"):
        jax.jit(lambda x: jln.rms_norm(x, implementation="triton")).trace(X).lower(lowering_platforms=("rocm",))
    monkeypatch.setenv("JLN_CHIP", "h200")
    monkeypatch.setattr(gpu_triton, "_hip_triton", gpu_triton._cuda_triton)
    with pytest.raises(RuntimeError, match="the chip is h200: set JLN_CHIP to one of mi250x"):
        jax.jit(lambda x: jln.rms_norm(x, implementation="triton")).trace(X).lower(lowering_platforms=("rocm",))
    assert lowering.missing("cuda") is None
