"""Tests of `python -m jln doctor`, which says what runs where and why, and what is broken."""

import importlib.util
import json
import types

import jax
import pytest

from catalogue import OPERATORS
from jln import doctor
from jln._triton import cache, tuning
from jln._triton.chip import CHIP_VARIABLE


@pytest.fixture
def quick(monkeypatch):
    """Leave out the operators, which take seconds to lower."""
    monkeypatch.setattr(doctor, "choices", lambda *_: [])


def run(capsys):
    status = doctor.run(doctor.devices())
    return status, capsys.readouterr().out


def test_doctor(capsys):
    status, out = run(capsys)
    assert status == 0 and out.endswith("nothing is broken\n")
    assert f"jax                {jax.__version__}" in out
    rows = [line.split("  ")[0] for line in out.splitlines() if "  xla  " in line]
    assert {row.split(",")[0] for row in rows} == set(OPERATORS) and "layer_norm_linear, few features" in rows


def gpu():
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    return types.SimpleNamespace(platform="gpu", id=0, device_kind="NVIDIA H200", client=client)


def test_doctor_says_where_tiles_and_compiled_kernels_are(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(CHIP_VARIABLE, "h200")
    path = tmp_path / "h200.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    entry = {"choice": "forward", "h": [128, 256], "itemsize": 2, "tiles": [[4, 128, 2, 1, 1]]}
    path.write_text(json.dumps({"chip": "h200", "entries": [entry]}))
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kernels"))
    cache.store("key", {})
    status, out = run(capsys)
    assert status == 0 and f"2 of their tiles are as measured, of {path}.\n" in out
    assert f"Compiled kernels: 1 in {tmp_path / 'kernels'}." in out
    monkeypatch.setenv(CHIP_VARIABLE, "h2000")
    assert "BROKEN: JLN_CHIP: unknown chip 'h2000'" in run(capsys)[1]


@pytest.mark.filterwarnings("ignore:jln runs")
def test_doctor_says_what_runs_on_a_gpu_and_why(monkeypatch):
    """Programs are lowered for CUDA as JAX would lower them, on a machine without a GPU."""
    if importlib.util.find_spec("jax_triton") is None:  # its import would empty TRITON_CACHE_DIR
        pytest.skip("needs jax-triton")
    monkeypatch.setenv(CHIP_VARIABLE, "h200")
    monkeypatch.setattr(doctor.target, "missing", lambda platform=None: None)
    rows = {name: row for name, *row in doctor.choices(gpu())}
    assert rows["layer_norm"] == ["triton", "forward_kernel", "backward_kernel, reduce_kernel"]
    assert rows["layer_norm_linear, few features"][2] == "row_sums_kernel, backward_kernel, parameters_kernel"
    assert rows["layer_norm_linear"][2].startswith("backward_kernel, reduce_kernel")
    monkeypatch.setattr(doctor.target, "missing", lambda platform=None: "jax_triton is not installed")
    assert next(iter(doctor.choices(gpu()))) == ("layer_norm", "xla", "-", "-")
    assert doctor.implementations(gpu()) == {"triton": "jax_triton is not installed", "xla": None}


GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6", "jax-triton": "0.3.1", "triton": "3.9.0"}


@pytest.mark.parametrize(
    ("versions", "count"),
    [
        ({}, 0),
        ({"triton": "3.6.0", "numpy": "2.3.1"}, 0),
        *(({"jax-cuda13-plugin": version}, 1) for version in ("0.10.1", "0.11.0")),
        ({"jax-cuda13-plugin": "0.10.2.dev1"}, 0),
        ({"triton": "3.6.0", "jax-cuda13-plugin": "0.10.1"}, 2),
    ],
)
def test_doctor_knows_bad_pairs(quick, capsys, monkeypatch, versions, count):
    monkeypatch.setattr(doctor, "installed", lambda: dict.fromkeys(doctor.PACKAGES) | GOOD | versions)
    status, out = run(capsys)
    assert status == (1 if count else 0) and out.count("BROKEN: ") == count


def test_doctor_finds_a_gpu_that_is_not_used(quick, capsys, monkeypatch, tmp_path):
    (tmp_path / "nvidia3").touch()  # a container has the number that its GPU has on the machine
    monkeypatch.setattr(doctor, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status, out = run(capsys)
    assert status == 1 and "JAX_PLATFORMS=cpu may hide it" in out
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "JAX does not see it: pip install" in run(capsys)[1]
    assert next(doctor._idle_gpu([gpu()])).startswith("the GPU runs jln without its Triton kernels: ")
