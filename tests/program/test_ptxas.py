"""The assembler that jaxlib takes: which it is, what is said of one that reads no kernels, and that it reads ours.

CI runs the last test with the ptxas of CUDA 12.9 and of 13.0 in front on PATH.
"""

import os
import subprocess
import types

import jax
import pytest
from jaxlib import gpu_triton

import compiler
import jln
from absent_gpu import struct
from jln._triton import ptxas, target
from jln._triton.chip import CHIPS, Chip
from launches import DTYPES, Case, launches

REFUSAL = "ptxas stdin, line 1; fatal   : Unsupported .version 8.5; current version is '8.4'"


def assembler(folder, version, refusal="", status=0):
    """Write a ptxas that says this version and of programs the refusal, and return its path."""
    folder.mkdir(parents=True)
    path = folder / "ptxas"
    says = f'[ "$1" = --version ] && echo "release, V{version}" && exit {status}'
    path.write_text(f'#!/bin/sh\n{says}\n[ -z "{refusal}" ] || {{ echo "{refusal}" >&2; exit 255; }}\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a machine where jaxlib's plugin for CUDA 12 is, and an H200, and no ptxas."""
    path = str(tmp_path / "packages/jax_cuda12_plugin/_triton.so")
    plugin = types.SimpleNamespace(**vars(gpu_triton._cuda_triton) | {"__file__": path})
    (tmp_path / "packages/jax_cuda12_plugin").mkdir(parents=True)
    monkeypatch.setattr(gpu_triton, "_cuda_triton", plugin)
    monkeypatch.setattr(ptxas, "TOOLKITS", (tmp_path / "cuda",))
    monkeypatch.setattr(target.chips, "local_chip", lambda: CHIPS["h200"])
    monkeypatch.setenv("PATH", f"{tmp_path}/first:{tmp_path}/second")
    return tmp_path


def test_it_is_the_first_that_is_new_enough(folder):
    """The places are those that XLA's message lists where it finds none."""
    found = [ptxas.find()]
    for place, version in (
        ("packages/nvidia/cu13/bin", "13.5.37"),  # of a plugin for CUDA 13
        ("packages/nvidia/cuda_nvcc/bin", "12.6.85"),
        ("cuda/bin", "12.8.93"),
        ("second", "13.0.88"),
    ):
        path = assembler(folder / place, version)
        ptxas._first.cache_clear()
        found.append(ptxas.find())
        if "cu13" not in place:
            assert found[-1] == path
    assert found[:2] == [None, None]


@pytest.mark.parametrize("other", [("11.7.99", 0), ("12.3.103", 0), ("13.0.88", 1), None])
def test_it_is_none_that_jaxlib_passes_by(folder, other):
    """Anything may be named ptxas on PATH, such as a program that speaks no text."""
    if other is not None:
        assembler(folder / "first", other[0], status=other[1])
    else:
        (folder / "first").mkdir()
        (folder / "first/ptxas").write_bytes(b"#!/bin/sh\nprintf '\\377\\376 V12'\n")
        (folder / "first/ptxas").chmod(0o755)
    wanted = assembler(folder / "second", "12.3.107")
    assert ptxas.find() == wanted


def lowered():
    jax.clear_caches()  # or the program before would be known
    x, scale = struct(64, 128), struct(128)
    return jax.jit(jln.rms_norm).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()


def test_without_one_jnp_runs(folder):
    with pytest.warns(match="jaxlib finds no ptxas, which assembles kernels, on PATH.*: pip install"):
        assert "triton" not in lowered()
    assembler(folder / "second", "12.6.85")
    ptxas._first.cache_clear()
    assert "triton" in lowered()


def test_with_one_that_refuses_kernels_jnp_runs(folder):
    path = assembler(folder / "first", "12.4.131", REFUSAL)
    why = rf"{path}, the first ptxas.*, takes no kernels for sm_90: Unsupported \.version 8\.5; current.*'8\.4'"
    with pytest.warns(match=why):
        assert "triton" not in lowered()


def test_without_a_gpu_none_is_asked_for(folder, monkeypatch):
    """A program is lowered for a GPU of another machine, as by JLN_CHIP, without a ptxas."""
    monkeypatch.setattr(target.chips, "local_chip", lambda: None)
    monkeypatch.setenv("JLN_CHIP", "h200")
    assert "triton" in lowered()


@pytest.mark.parametrize("chip", ["a100", "l4", "h200", "b200", "sm_120"])
def test_kernels_are_assembled(chip, monkeypatch):
    monkeypatch.setitem(CHIPS, "sm_120", Chip("sm_120", 120, 188))
    made = launches(Case("add_layer_norm", (4096, 1024), DTYPES["bfloat16"], chip))
    for dtype in ("bfloat16", "float32"):
        made += launches(Case("add_rms_norm_linear", (4096, 512), DTYPES[dtype], chip, features=(64,)))
    assembler = ptxas.find()
    assert assembler is not None and ptxas.missing(CHIPS[chip]) is None
    gpu = f"{CHIPS[chip]}{'a' if CHIPS[chip].capability >= 90 else ''}"
    for launch in made:
        ptx = compiler.compile_launch(launch).assembly
        command = [assembler, f"--gpu-name={gpu}", "-o", os.devnull, "-"]
        assert subprocess.run(command, input=ptx, text=True, capture_output=True).stderr == ""
        assert CHIPS[chip].ptx_version == {"b200": 86, "sm_120": 87}.get(chip, 85)
        assert f".version {CHIPS[chip].ptx_version / 10}\n" in ptx
