"""Tests of the benchmark: its judgement of numbers, its records, and what it does where peers are missing."""

import contextlib
import json
import os
import time
import types

import jax
import pytest

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

import bench
import clocks
import measure
from jln.testing.operators import DTYPES
from peers import PEERS, Peer, Unsupported
from rows import known
from workloads import Workload

pytestmark = pytest.mark.usefixtures("promoted_ranks")

SMALL = {
    w.name: w
    for w in (
        Workload("norm", "layer_norm", (6, 40), "small"),
        Workload("several", "layer_norm_linear", (6, 40), "small", features=(8, 4)),
        Workload("inference", "rms_norm", (6, 40), "small", directions=("forward",)),
    )
}


def measured(workload, peers, platform="cpu", monkeypatch=None):
    """Measure as on a platform: "gpu" for times by the profiler, which works on a CPU, too."""
    if platform == "gpu":
        monkeypatch.setattr(clocks, "COLD_BYTES", 2**20)
        monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(platform="gpu")])
    return measure.measure(workload, peers, 2)


@pytest.mark.parametrize(
    ("platform", "name", "peers"), [("cpu", "norm", ("jln", "flax", "haiku")), ("gpu", "several", ("jln", "jln-norm"))]
)
def test_peers_of_jax_are_right_and_timed(name, platform, peers, monkeypatch):
    records = measured(SMALL[name], [PEERS[p] for p in peers], platform, monkeypatch)
    directions = ["forward", "backward", "both"] + ["gradient"] * (platform == "cpu")
    assert [(r["peer"], r["direction"]) for r in records] == [(p, d) for p in peers for d in directions]
    for record in records:
        assert record["status"] == "timed", record
        assert record["clock"] == ("wall" if platform == "cpu" else "device") and record["repetitions"] == 2
        assert 0 < record["minimum"] <= record["median"] < 1
        assert record["worst"]["error"] <= record["worst"]["limit"]
        assert record["peak_bytes"] > record["temporary_bytes"] >= 0


def test_pytorch_is_right_and_timed():
    pytest.importorskip("torch")
    records = measured(SMALL["several"], [PEERS["jln"], PEERS["torch"]])
    assert {r["status"] for r in records} == {"timed"}, records


def peer(name, function, **others):
    return Peer(name, "", "jax", "jax", function, **others)


def raises(*_):
    raise RuntimeError("no kernel\nfor this")


def test_what_a_peer_lacks_or_raises_is_its_reason(monkeypatch):
    def refuses(workload):
        raise Unsupported("not this one")

    chosen = [
        peer("raises", raises),
        peer("refuses", refuses),
        Peer("missing", "", "no_such_package", "no-such-package", PEERS["jnp"].function),
        peer("late", lambda workload: lambda *arguments: jax.pure_callback(raises, arguments[0], arguments[0])),
        peer("there", PEERS["jnp"].function, evidence="HloModule"),
        peer("not there", PEERS["jnp"].function, evidence="__cudnn$norm"),
    ]
    found = {r["peer"]: (r["status"], r.get("reason")) for r in measured(SMALL["inference"], chosen)}
    assert found.pop("late")[0] == "failed"
    assert found == {
        "raises": ("failed", "RuntimeError: no kernel for this"),
        "refuses": ("skipped", "not this one"),
        "missing": ("skipped", "no-such-package is not installed"),
        "there": ("timed", None),
        "not there": ("skipped", "XLA made no __cudnn$norm of it"),
    }


def test_without_a_profiler_a_gpu_is_timed_by_the_wall_clock_and_the_reason_is_kept(monkeypatch):
    monkeypatch.setattr(clocks, "traced", raises)
    (record,) = measured(SMALL["inference"], [PEERS["jnp"]], "gpu", monkeypatch)
    assert (record["status"], record["clock"]) == ("timed", "wall")
    assert record["unprofiled"] == "RuntimeError: no kernel for this"


@pytest.fixture
def small(monkeypatch):
    """Let the command run two small workloads by default, and give it ceilings so that it does not measure any."""
    monkeypatch.setattr(bench, "CPU_WORKLOADS", {name: SMALL[name] for name in ("norm", "inference")})
    monkeypatch.setattr(bench, "ALL", SMALL)
    monkeypatch.setattr(measure, "ceilings", lambda *_: {"bytes_per_s": 1e9, "flop_per_s": 1e10})
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def run(*arguments):
    app = typer.Typer()
    app.command()(bench.main)
    ran = CliRunner().invoke(app, ["--peers", "jln,jnp", "--repetitions", "2", *arguments], catch_exceptions=False)
    return ran.exit_code, ran.output


def test_a_run_that_ends_early_is_taken_up_again(small, tmp_path, monkeypatch):
    """A second run measures what is lacking or has failed, and nothing else."""
    pytest.importorskip("matplotlib")
    status, out = run("--output", str(tmp_path), "--seconds", "0")
    assert status == 3 and "workloads not finished: 2" in out
    status, out = run("norm", "--output", str(tmp_path))
    assert status == 0 and "copy 1.0 GB/s, matrix product 0.01 TFLOP/s" in out
    assert "machine's load" not in out and "GB/s  of ceiling  peak MB\n" in out  # no empty column, as of kernels
    for record in json.loads((tmp_path / "results.json").read_text())["records"]:
        assert record["of_ceiling"] == pytest.approx(record["bytes_once"] / 1e9 / record["median"])
    names, original = [], measure.measure
    monkeypatch.setattr(measure, "measure", lambda w, *rest: names.append(w.name) or original(w, *rest))
    assert run("--output", str(tmp_path))[0] == 0 and names == ["inference"]
    results = json.loads((tmp_path / "results.json").read_text())
    results["records"][0]["status"] = "failed"  # of norm, by jln
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert run("--output", str(tmp_path))[0] == 0 and names == ["inference", "norm"]
    status, out = run("--output", str(tmp_path), "--repetitions", "3")
    assert status == 2 and "its repetitions is 2" in " ".join(out.split())


def test_exits_with_1_if_ours_is_wrong_and_2_for_a_bad_request(small, monkeypatch):
    right = PEERS["jnp"].function
    wrong = peer("jln", lambda workload: lambda x, *a: right(workload)(x, *(1.1 * b for b in a)))
    monkeypatch.setitem(PEERS, "jln", wrong)
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    status, out = run("norm")
    assert status == 1 and "wrong: y is off by" in out and "load is 999.0, of" in out
    status, out = run("nrom")
    assert status == 2 and "unknown workload 'nrom'; did you mean norm?" in out
    assert known("dtype", ["bf16", "bfloat16", "f32"], DTYPES) == ["bfloat16", "float32"]


def die(*_):
    os._exit(3)


def test_what_another_process_measures(monkeypatch):
    """A process measures a workload, or tells why it cannot or has died, or nothing where the time is over."""

    def told(end=float("inf")):
        return [(r["status"], r.get("reason")) for r in bench.elsewhere(worker, SMALL["inference"], ["jnp"], 2, end)]

    with contextlib.closing(types.SimpleNamespace(close=(worker := bench.Worker()).end)):
        assert told(end=time.monotonic() + 100) == [("timed", None)]
        assert told(end=-100.0) == []  # to be done yet
        monkeypatch.setattr(bench, "measure_by_name", die)
        assert told() == [("failed", "WorkError: its process died with exit status 3")]
        assert worker._process is None  # whatever failed has lost no later workload
