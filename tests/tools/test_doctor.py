"""Tests of `python -m jln doctor`, which says what runs where and why, and what is broken."""

import json
import types

import jax
import pytest

pytest.importorskip("typer")

import jln
from command_line import run
from jln._tools import doctor
from jln._tools.catalogue import OPERATORS
from jln._triton import cache
from jln._triton.chip import CHIP_VARIABLE
from jln._triton.tile import Tile
from tuning_files import norm, write


def test_doctor(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and out.endswith("nothing is broken\n")
    assert f"jax                {jax.__version__}" in out
    status, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert found["versions"]["jax"] == jax.__version__ and found["devices"][0]["device"] == "cpu:0"
    assert {o["runs"] for o in found["operators"]} == {"xla"}
    assert {o["operator"].split(",")[0] for o in found["operators"]} == set(OPERATORS)


class Gpu:
    platform, id, device_kind = "gpu", 0, "NVIDIA H200"
    client = types.SimpleNamespace(platform_version="PJRT C API\ncuda 13000")


class AmdGpu(Gpu):
    device_kind = "AMD Instinct MI300X"
    client = types.SimpleNamespace(platform_version="PJRT C API\nrocm 70000")


def test_doctor_says_where_tiles_are_from(capsys, monkeypatch, tmp_path):
    """The doctor says for a chip how many choices are measured, by which version, or that rules are all there is."""
    monkeypatch.setattr(doctor, "choices", lambda *_: [])

    def tiles():
        status, out, _ = run(capsys, "doctor", "--json")
        found = json.loads(out)
        assert status == bool(found["faults"])
        return found["tuning"], found["faults"]

    assert (
        "Tiles of the kernels: no GPU is here to ask for; JLN_CHIP names one that is not." in run(capsys, "doctor")[1]
    )
    rules, to_measure = "rules of row length, layout, dtype and chip", "`python -m jln tune` on the card measures tiles"
    unmeasured = f"none is measured, all are by {rules}; "
    for chip in ("l4", "b200"):
        monkeypatch.setenv(CHIP_VARIABLE, chip)
        none = f"the package has no {chip}.json, and JLN_TUNING names no file"
        assert tiles() == (f"Tiles of the kernels on {chip}: {unmeasured}{none}. {to_measure}", [])

    path = tmp_path / "a.json"
    monkeypatch.setenv("JLN_TUNING", str(path))
    same = norm("forward", None, h=64) | {"measured": {"versions": {"jln": jln.__version__}}}
    faster = norm("forward", {"tile": Tile(1, 128, 4)}) | {"measured": {"versions": {"jln": "0.1.0"}}}
    write(path, same, norm("forward", None, chip="h200"))
    assert tiles()[0].endswith(f"; no file has an entry for b200: {path} has h200. {to_measure}")
    monkeypatch.setenv(CHIP_VARIABLE, "h200")
    write(path, same)
    by = f"by jln {jln.__version__}, in {path}, of which in 1 nothing was faster than the rule"
    assert tiles()[0] == f"Tiles of the kernels on h200: 1 choices measured {by}; else by {rules}. {to_measure}"
    write(path, faster, norm("forward", {"tile": Tile(1, 64, 4)}, h=64))
    by = f"by jln 0.1.0, jln unknown, in {path} (this is jln {jln.__version__})"
    assert tiles()[0] == f"Tiles of the kernels on h200: 2 choices measured {by}; else by {rules}. {to_measure}"

    monkeypatch.setenv("JLN_TUNING", "")
    nothing = "JLN_TUNING is set to nothing, so that no file is asked"
    assert tiles()[0] == f"Tiles of the kernels on h200: {unmeasured}{nothing}. {to_measure}"
    monkeypatch.setenv("JLN_TUNING", str(path))
    path.write_text("{")
    says, faults = tiles()
    assert says.endswith(f"no file has an entry for h200: {path} has none at all. {to_measure}")
    assert [fault[: fault.index(" Expecting")] for fault in faults] == [f"{path} is ignored in part: all of it:"]
    monkeypatch.setenv(CHIP_VARIABLE, "h2000")
    assert "BROKEN: JLN_CHIP: unknown chip 'h2000'" in run(capsys, "doctor")[1]


def test_doctor_says_where_compiled_kernels_are(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "choices", lambda *_: [])
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    cache.store("key", {})
    assert f"Compiled kernels: 1 of at most {cache.LIMIT} in {tmp_path}." in run(capsys, "doctor")[1]
    tmp_path.chmod(0o770)
    status, out, _ = run(capsys, "doctor")
    out = " ".join(out.split())
    assert status == 1 and f"BROKEN: compiled kernels are not kept: {tmp_path} may be written by others." in out
    assert f"Run `chmod go-w {tmp_path}`" in out and f"Compiled kernels: not kept in {tmp_path}." in out
    monkeypatch.setenv(cache.VARIABLE, "")
    assert "Compiled kernels: not kept, as JLN_CACHE_DIR says." in run(capsys, "doctor")[1]


@pytest.mark.filterwarnings("ignore:jln runs")
def test_doctor_says_what_runs_on_a_gpu_and_why(monkeypatch):
    """The doctor names the kernels of each operator on a GPU, or the reason why there are none.

    Programs are lowered for CUDA as JAX would lower them, on a machine without a GPU.
    """
    import importlib

    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("needs jax-triton")
    monkeypatch.setenv(CHIP_VARIABLE, "h200")
    monkeypatch.setattr(doctor.target, "missing", lambda platform=None: None)
    rows = {row["operator"]: row for row in doctor.choices(Gpu())}
    assert rows["layer_norm"]["runs"] == "triton"
    assert rows["layer_norm"]["forward"] == ["forward_kernel"]
    assert rows["layer_norm"]["backward"] == ["backward_kernel", "reduce_kernel"]
    fused = ["row_sums_of_product_kernel", "backward_kernel", "parameters_kernel"]
    assert rows["layer_norm_linear, few features"]["backward"] == fused
    assert rows["layer_norm_linear"]["backward"][:2] == ["backward_kernel", "reduce_kernel"]
    monkeypatch.setattr(doctor.target, "missing", lambda platform=None: "jax_triton is not installed")
    row = doctor.choices(Gpu())[0]
    assert row["runs"] == "xla" and row["forward"] == row["backward"] == []
    assert row["why_not_the_other"] == "Why not triton on gpu:0 (NVIDIA H200): jax_triton is not installed."


def test_doctor_says_that_an_amd_gpu_runs_xla_unless_asked(monkeypatch):
    monkeypatch.setenv(CHIP_VARIABLE, "mi300x")
    monkeypatch.setattr(doctor.target, "missing", lambda platform=None: None)
    row = doctor.choices(AmdGpu())[0]
    assert row["runs"] == "xla" and row["forward"] == row["backward"] == []
    assert row["why_not_the_other"] == (
        "Why not triton on gpu:0 (AMD Instinct MI300X): None stays XLA until a card has measured the kernels; "
        'implementation="triton" asks for it.'
    )


GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6", "jax-triton": "0.3.1", "triton": "3.9.0"}


@pytest.mark.parametrize(
    ("versions", "count"),
    [
        ({}, 0),
        ({"jax": "0.12.0", "jaxlib": "0.12.0"}, 0),
        ({"jax-triton": "0.4.1"}, 0),
        ({"triton": "3.6.0", "numpy": "2.3.1"}, 0),
        ({"jax-triton": "0.4.1", "jax": "0.12.0", "jaxlib": "0.12.0"}, 0),
        ({"jax-triton": "0.4.1", "triton": "3.6.0", "numpy": "2.3.1"}, 0),
        ({"triton": "3.6.0"}, 1),
        ({"jax-cuda13-plugin": "0.10.1"}, 1),
        ({"jax-cuda13-plugin": "0.10.2.dev1"}, 0),
        ({"triton": "3.6.0", "jax-cuda13-plugin": "0.10.1"}, 2),
    ],
)
def test_doctor_knows_bad_pairs(capsys, monkeypatch, versions, count):
    monkeypatch.setattr(doctor, "installed", lambda: dict.fromkeys(doctor.PACKAGES) | GOOD | versions)
    monkeypatch.setattr(doctor, "choices", lambda *_: [])
    status, out, _ = run(capsys, "doctor")
    assert status == (1 if count else 0) and out.count("BROKEN: ") == count
    assert f"{count} of {len(doctor.BAD_PAIRS)} are here" in out


def test_doctor_finds_a_gpu_that_is_not_used(capsys, monkeypatch, tmp_path):
    (tmp_path / "nvidia3").touch()  # a container has the number that its GPU has on the machine
    monkeypatch.setattr(doctor, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(doctor, "choices", lambda *_: [])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "JAX_PLATFORMS=cpu hides it" in out
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "JAX does not see it: pip install" in run(capsys, "doctor")[1]
    assert doctor._idle_gpu([Gpu()])[0].startswith("the GPU runs jln without its Triton kernels: ")
