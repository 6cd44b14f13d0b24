"""Tests of `python -m jln bench`: tables, files, exit statuses, runs taken up again, and work of other processes."""

import contextlib
import json
import time
import types

import jax
import pytest

pytest.importorskip("typer")

from bench_cases import SETTINGS, SMALL, die, off_by
from command_line import run
from jln._tools import bench, console, machine, measure, results
from jln._tools.peers import PEERS, Peer
from jln._tools.workloads import ALL

pytestmark = pytest.mark.usefixtures("promoted_ranks")


@pytest.fixture
def small(monkeypatch):
    """Let the command run two small workloads by default, and give it ceilings so that it does not measure any."""
    two = {name: SMALL[name] for name in ("norm", "inference")}
    monkeypatch.setattr(bench, "CPU_WORKLOADS", two)
    for module in (bench, results):
        monkeypatch.setattr(module, "ALL", {**two, "linear": SMALL["linear"]})
    monkeypatch.setattr(measure, "ceilings", lambda *_: {"bytes_per_s": 1e9, "flop_per_s": 1e10})


COMMON = ("--device", "cpu", "--peers", "jln,jnp", "--repetitions", "2")


def test_tables_results_and_plots(capsys, small, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, _ = run(capsys, "bench", *COMMON, "--output", str(tmp_path))
    assert status == 0 and "norm: layer_norm of 6x40 in bfloat16. small" in out
    assert "copy 1.0 GB/s, matrix product 0.01 TFLOP/s" in out and "wall clock, dispatch included" in out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("  jln")] == [
        ["jln", d] for d in ("forward", "backward", "both", "gradient", "forward")
    ]
    assert "both: the fastest JAX peer takes" in out
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["environment"]["versions"]["jax"] == jax.__version__ and saved["environment"]["chip"]
    for record in saved["records"]:
        assert record["gb_per_s"] == pytest.approx(record["bytes_once"] / record["median"] / 1e9)
        assert record["of_ceiling"] == pytest.approx(record["bytes_once"] / 1e9 / record["median"])
    moved = {(r["workload"], r["direction"]): r["bytes_once"] for r in saved["records"]}
    assert moved["norm", "both"] == moved["norm", "forward"] + moved["norm", "backward"]
    assert moved["norm", "gradient"] == moved["norm", "backward"]
    assert {p.name for p in tmp_path.iterdir()} == {"results.json", "speed.svg", "memory.svg"}
    assert "plain jnp" in (tmp_path / "speed.svg").read_text()


def test_without_a_library_to_draw_with_there_are_results_alone(capsys, small, tmp_path, monkeypatch):
    found = console.importlib.util.find_spec
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda n: None if n == "matplotlib" else found(n))
    status, _, err = run(capsys, "bench", "inference", *COMMON, "--output", str(tmp_path))
    assert status == 0 and err == 'no plots: matplotlib is not installed; pip install -e ".[bench]"\n'
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_on_a_gpu_the_tuning_in_force_is_recorded(monkeypatch, tmp_path):
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setenv("JLN_CHIP", "h200")
    monkeypatch.setenv("JLN_TUNING", "")
    assert machine.environment(device)["tuning"] == [] and machine.environment(jax.devices("cpu")[0])["tuning"] is None
    (tmp_path / "a.json").write_text('{"schema": 1, "entries": []}')
    monkeypatch.setenv("JLN_TUNING", str(tmp_path / "a.json"))
    (only, *_) = machine.environment(device)["tuning"]
    assert only["file"] == str(tmp_path / "a.json") and only["choices"] == 0 and len(only["sha256"]) == 12


def test_what_cannot_be_written_is_one_line_and_status_2(capsys, small, tmp_path):
    """A results.json that is a folder is found once there are results; whatever else is wrong, before any."""
    (tmp_path / "results.json").mkdir()
    status, _, err = run(capsys, "bench", "inference", *COMMON, "--output", str(tmp_path))
    assert status == 2 and err.startswith(f"jln: cannot write {tmp_path}/results.json: ") and err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_json_is_all_there_is_on_stdout(capsys, small):
    status, out, err = run(capsys, "bench", *COMMON, "--json", "--seconds", "0")
    assert status == 3 and json.loads(out)["records"] == []
    assert err == "workloads not finished: 2; run it again with --output, and from then on with --resume\n"


def test_json(capsys, small):
    status, out, _ = run(capsys, "bench", "inference", *COMMON, "--json")
    found = json.loads(out)
    assert status == 0 and [r["peer"] for r in found["records"]] == ["jln", "jnp"]


def test_a_run_that_ends_early_is_taken_up_again(capsys, small, tmp_path, monkeypatch):
    arguments = (*COMMON, "--output", str(tmp_path), "--resume")
    status, _, err = run(capsys, "bench", *arguments, "--seconds", "0")
    assert status == 3 and err.endswith("workloads not finished: 2; run it again with --resume\n")
    assert run(capsys, "bench", "norm", *arguments)[0] == 0
    measured = []
    original = measure.measure
    monkeypatch.setattr(measure, "measure", lambda w, *rest: measured.append(w.name) or original(w, *rest))
    assert run(capsys, "bench", *arguments)[0] == 0 and measured == ["inference"]
    assert {r["workload"] for r in json.loads((tmp_path / "results.json").read_text())["records"]} == {
        "norm",
        "inference",
    }
    status, _, err = run(capsys, "bench", *arguments, "--repetitions", "3")
    assert status == 2 and "its repetitions is 2, this one's 3" in err
    for option, message in (("--seed=7", "its seed is 0, this one's 7"), ("--even-wrong", "its even_wrong is False")):
        status, _, err = run(capsys, "bench", *arguments, option)
        assert status == 2 and message in err
    saved = (tmp_path / "results.json").read_text()
    for kind, name in (("workload", "norm"), ("peer", "jnp")):
        (tmp_path / "results.json").write_text(saved.replace(f'"{kind}": "{name}"', f'"{kind}": "former"'))
        status, _, err = run(capsys, "bench", *arguments)
        assert status == 2 and f"no {kind} is named former any more" in err and len(err.splitlines()) == 1
    (tmp_path / "results.json").write_text("[]")
    status, _, err = run(capsys, "bench", *arguments)
    assert status == 2 and "it is not what this command writes" in err and len(err.splitlines()) == 1


def test_exits_with_1_if_ours_is_wrong(capsys, small, monkeypatch):
    bad = Peer("jln", "", "jln", "jln", off_by(0.1))
    monkeypatch.setitem(PEERS, "jln", bad)
    status, out, _ = run(capsys, "bench", "norm", *COMMON)
    assert status == 1 and "WRONG: jln in norm: dx is off by" in out and "WRONG: another direction's" in out


def test_what_another_process_measures(monkeypatch):
    """Another process measures a workload on the CPU; where it cannot or dies, the reason is told."""
    device, peers, nowhere = jax.devices("cpu")[0], [PEERS["jnp"]], types.SimpleNamespace(platform="gpu", id=7)
    never = float("inf")

    def told(device=device, end=never):
        (record,) = bench._elsewhere(worker, SMALL["inference"], peers, device, SETTINGS, end)
        assert (record["workload"], record["peer"]) == ("inference", "jnp")
        return record["status"], record.get("reason")

    with contextlib.ExitStack() as ends:
        ends.callback((worker := bench.Worker()).end)
        assert told() == ("timed", None) and (first := worker._process) is not None
        assert told(end=time.monotonic() + 100) == ("timed", None) and worker._process is first
        status, reason = told(nowhere)
        assert status == "failed" and "no device 'gpu:7'" in reason
        assert worker._process is None  # whatever failed has lost no later workload
        assert bench._elsewhere(worker, SMALL["inference"], peers, device, SETTINGS, -100.0) == []  # to be done yet
        monkeypatch.setattr(bench, "_measure_by_name", die)
        assert told() == ("failed", "its process died with exit status 3")


def test_on_a_gpu_each_workload_has_all_its_peers_before_the_next_begins(monkeypatch, tmp_path):
    """Each framework's peers are measured in a process of their own, each workload's before the next one begins."""
    asked, times = [], iter([0.0, 1.0, 2.0, 99.0, 101.0, 102.0, *[200.0] * 20])

    class Other:
        def call(self, function, workload, names, device, *_, seconds):
            assert function is bench._measure_by_name and device == "gpu:0"
            asked.append((workload.name, names, seconds))
            return [measure.without(workload, PEERS[n], "skipped", "a test") for n in names]

        def end(self):
            asked.append("end")

    monkeypatch.setattr(bench, "Worker", Other)
    monkeypatch.setattr(bench, "time", types.SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(measure, "ceilings", lambda *_: {"bytes_per_s": 1e9, "flop_per_s": 1e10})
    gpu = types.SimpleNamespace(platform="gpu", id=0, device_kind="a GPU")
    chosen, three = [PEERS[name] for name in ("torch", "jln", "liger")], [SMALL[n] for n in ("norm", "sum", "add")]
    ours, theirs = ["jln"], ["torch", "liger"]
    found = bench._run(three, chosen, gpu, SETTINGS, tmp_path, False, 100.0, 0.0)
    assert asked == [
        ("norm", ours, 119.0),
        ("norm", theirs, 118.0),
        ("sum", ours, 19.0),
        ("sum", theirs, 18.0),
        "end",
        "end",
    ]
    assert [(r["workload"], r["peer"]) for r in found["records"]] == [
        (w, p) for w in ("norm", "sum") for p in ("jln", "torch", "liger")
    ]

    def again(*peers, keep=lambda record: True, **changes):
        """Run once more behind a change of what was kept, and return what is asked."""
        path = tmp_path / bench.RESULTS
        saved = json.loads(path.read_text())
        kept = filter(keep, saved["records"])
        saved["records"] = [r | (changes if (r["workload"], r["peer"]) == ("norm", "jln") else {}) for r in kept]
        path.write_text(json.dumps(saved))
        asked.clear()
        bench._run(three, peers or chosen, gpu, SETTINGS, tmp_path, True, None, 0.0)
        return [a[:2] for a in asked if a != "end"]

    monkeypatch.setattr(bench, "ALL", SMALL)
    assert again() == [("add", ours), ("add", theirs)]
    # What lacks a peer is measured again, and so is what jln failed in, which may have failed the others.
    assert again(keep=lambda r: (r["workload"], r["peer"]) != ("sum", "liger")) == [("sum", ours), ("sum", theirs)]
    assert again(status="failed") == [("norm", ours), ("norm", theirs)]
    assert again() == []
    assert again(PEERS["torch"], keep=lambda r: False)[0] == ("norm", ["torch"])


def test_list(capsys):
    status, out, _ = run(capsys, "bench", "--list")
    assert status == 0 and all(name in out for name in (*ALL, *PEERS))
