"""Tests of `python -m jln doctor`, which says what runs where and why, and what is broken."""

import re
import types

import jax
import pytest

from catalogue import OPERATORS
from jln import doctor
from jln._triton import cache
from jln._triton.chip import CHIP_VARIABLE


@pytest.fixture
def quick(monkeypatch):
    """Leave out imports: jax-triton's would empty TRITON_CACHE_DIR."""
    monkeypatch.setattr(doctor, "import_module", lambda _: None)


def run(capsys, *devices):
    status = doctor.run(devices or jax.local_devices())
    return status, capsys.readouterr().out


def test_doctor_of_a_cpu_is_short(quick, capsys):
    status, out = run(capsys)
    assert status == 0 and out.endswith("nothing is broken\n")
    assert re.search(rf"\njax +{jax.__version__}\n", out) and "\nXLA runs every operator on cpu.\n" in out
    assert not any(name in out for name in OPERATORS)


def gpu():
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    return types.SimpleNamespace(platform="gpu", id=0, device_kind="NVIDIA H200", client=client)


def test_doctor_lists_what_is_there_or_lacking_and_what_raises(quick, capsys, monkeypatch):
    """Packages of GPUs are no fault without one: jax-triton 0.3.1 raises where CUDA's plugin is missing."""

    def broken(name):
        raise ValueError(f"no {name}\nand more")

    monkeypatch.setattr(doctor, "import_module", broken)
    monkeypatch.setattr(doctor, "installed", lambda: {"jax-triton": "0.3.1"})
    monkeypatch.setattr(doctor.target, "missing", lambda _: "triton is not installed: pip")
    said = "the import of jax-triton 0.3.1 raises ValueError: no jax_triton\n"
    status, out = run(capsys)
    assert status == 0 and f"\nWithout a GPU no fault: {said}" in out
    assert out.startswith("package     installed\njax-triton  0.3.1\ntriton      -\n\n")
    status, out = run(capsys, gpu())
    assert status == 1 and f"\nBROKEN: {said}" in out and "\nBROKEN: triton cannot run on NVIDIA H200: triton is" in out
    assert "BROKEN: the import of flax 1 raises ValueError: no flax" in doctor._bad_imports({"flax": "1"}, False)


def test_doctor_says_where_compiled_kernels_are(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(CHIP_VARIABLE, "h200")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kernels"))
    cache.store("key", {})
    assert f"Compiled kernels: 1 in {tmp_path / 'kernels'}." in run(capsys)[1]
    monkeypatch.setenv(CHIP_VARIABLE, "h2000")
    assert "BROKEN: JLN_CHIP: unknown chip 'h2000'" in run(capsys)[1]


def test_doctor_says_what_runs_on_a_gpu(quick, capsys, monkeypatch):
    monkeypatch.setenv(CHIP_VARIABLE, "h200")
    for why, runs in ((None, "Triton kernels run"), ("jax_triton is not installed", "XLA runs")):
        monkeypatch.setattr(doctor.target, "missing", lambda _, why=why: why)
        assert f"\n{runs} every operator on NVIDIA H200.\n" in run(capsys, gpu())[1]


GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6", "jax-triton": "0.3.1", "triton": "3.9.0"}


def test_doctor_knows_bad_pairs():
    old, other = {"triton": "3.6.0"}, {"jax-cuda13-plugin": "0.10.1"}
    good = [{}, old | {"numpy": "2.3.1"}, {"jax-cuda13-plugin": "0.10.2.dev1"}]
    for count, cases in enumerate((good, [other, {"jax-cuda13-plugin": "0.11.0"}], [old | other])):
        assert [len([*doctor._bad_pairs(GOOD | versions)]) for versions in cases] == [count] * len(cases)


def test_doctor_finds_a_gpu_that_is_not_used(quick, capsys, monkeypatch, tmp_path):
    (tmp_path / "nvidia3").touch()  # a container has the number that its GPU has on the machine
    monkeypatch.setattr(doctor, "DEVICE_FILES", tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status, out = run(capsys)
    assert status == 1 and "JAX_PLATFORMS=cpu may hide it" in out
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "JAX does not see it: pip install" in run(capsys)[1]
