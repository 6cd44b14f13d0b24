"""Tests of the benchmark: its judgement of numbers, its records, and what it does where peers are missing."""

import contextlib
import json
import time
import types

import jax
import pytest

pytest.importorskip("typer")

import typer
from typer.testing import CliRunner

import bench
import clocks
import jln
import measure
from bench_cases import SMALL, die, off_by
from jln.testing.operators import ROUNDINGS
from peers import PEERS, Peer, Unsupported
from workers import WorkError
from workloads import ALL, Workload

pytestmark = pytest.mark.usefixtures("promoted_ranks")


def measured(workload, peers, platform="cpu", monkeypatch=None):
    """Measure as on a platform: "gpu" for times by the profiler, which works on a CPU too."""
    if platform == "gpu":
        monkeypatch.setattr(clocks, "COLD_BYTES", 2**20)
        monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(platform="gpu")])
    return measure.measure(workload, peers, 2)


@pytest.mark.parametrize(
    ("platform", "name"),
    [("cpu", "norm"), *(("gpu", n) for n in ("sum", "linear", "several", "add", "axis-0", "inference"))],
)
def test_all_peers_of_jax_are_right_and_timed(name, platform, monkeypatch):
    by = {"linear": ("jln", "flax"), "several": ("jln", "jln-norm")}
    chosen = [PEERS[p] for p in by.get(name, ("jln", "flax", "haiku"))]  # the rest is slow
    records = measured(SMALL[name], chosen, platform, monkeypatch)
    directions = ["forward", "backward", "both"] if "backward" in SMALL[name].directions else ["forward"]
    directions += ["gradient"] if platform == "cpu" else []
    assert [(r["peer"], r["direction"]) for r in records] == [(p.name, d) for p in chosen for d in directions]
    for record in records:
        assert record["status"] == "timed", record
        assert record["clock"] == ("wall" if platform == "cpu" else "device") and record["repetitions"] == 2
        assert 0 < record["minimum"] <= record["median"] < 1
        assert record["worst"]["error"] <= record["worst"]["limit"]
        assert record["peak_bytes"] > record["temporary_bytes"] >= 0


@pytest.mark.parametrize("name", [p.name for p in PEERS.values() if p.framework == "jax"])
def test_every_workload_has_a_program_of_every_peer_of_jax(name):
    """Each peer of JAX has a program for every workload, with results of the reference's shapes and dtypes.

    Where a peer cannot compute a workload it raises `Unsupported` with the reason. Nothing is run, as the sizes are
    full.
    """
    chosen = PEERS[name]
    pytest.importorskip(chosen.package)
    for workload in ALL.values():
        centred = workload.entry.centres and not workload.of_examples
        for lacks, why in (
            (name == "jln-norm" and not workload.is_linear, "by itself"),
            (name == "cudnn" and not centred, "of a LayerNorm with one scale"),
            (name in ("flax", "haiku", "tokamax") and workload.of_examples, "for all examples"),
        ):
            if lacks:
                with pytest.raises(Unsupported, match=why):
                    chosen.function(workload)
                break
        else:
            steps = (chosen.function(workload), workload.function(jln.reference))
            given = workload.step_arguments()
            ours, true = (jax.tree.leaves(jax.eval_shape(workload.step(f), *given)) for f in steps)
            assert [(a.shape, a.dtype) for a in ours] == [(a.shape, a.dtype) for a in true], workload
            assert len(ours) == len(workload.names())


def peer(name, function, **others):
    return Peer(name, "", "jax", "jax", function, **others)


def test_a_wrong_peer_is_said_to_be():
    chosen = [peer("dx", off_by(0.05)), peer("dscale", off_by(0.001, 1)), peer("right", off_by(0.0))]
    records = measured(Workload("norm", "layer_norm", (64, 100), "small"), chosen)
    status = {(r["peer"], r["direction"]): r["status"] for r in records}
    assert {s for (name, _), s in status.items() if name == "right"} == {"timed"}
    wrong = {key for key, s in status.items() if s == "wrong"}
    assert wrong == {(name, d) for name in ("dx", "dscale") for d in ("backward", "both", "gradient")}
    assert {r["reason"].split(" ")[0] for r in records if r["peer"] == "dscale" and "reason" in r} == {"dscale"}


def test_what_a_peer_lacks_or_raises_is_its_reason():
    def raises(workload):
        raise RuntimeError("no kernel\nfor this")

    def refuses(workload):
        raise Unsupported("not this one")

    def late(workload):
        return lambda *arguments: jax.pure_callback(raises, arguments[0], arguments[0])

    missing = Peer("missing", "", "no_such_package", "no-such-package", PEERS["jnp"].function)
    chosen = [peer("raises", raises), peer("refuses", refuses), missing, peer("gpu", refuses, on_cpu=False)]
    records = measured(SMALL["inference"], [*chosen, peer("late", late), PEERS["jnp"]])
    found = {r["peer"]: (r["status"], r.get("reason")) for r in records}
    assert found.pop("late")[0] == "failed"
    assert found == {
        "raises": ("failed", "RuntimeError: no kernel for this"),
        "refuses": ("skipped", "not this one"),
        "missing": ("skipped", "no-such-package is not installed"),
        "gpu": ("skipped", "jax needs a GPU"),
        "jnp": ("timed", None),
    }


@pytest.mark.parametrize("error", [clocks.TraceError, RuntimeError])
def test_without_a_profiler_a_gpu_is_timed_by_the_wall_clock_and_the_reason_is_said(monkeypatch, capsys, error):
    def none(*_):
        raise error("none\nhere")

    monkeypatch.setattr(clocks, "traced", none)
    records = measured(SMALL["inference"], [PEERS["jln"], PEERS["jnp"]], "gpu", monkeypatch)
    assert [(r["status"], r["clock"]) for r in records] == [("timed", "wall")] * 2
    where = {"versions": {}, "chip": "a chip", "cores": 1, "load": 0.0}
    monkeypatch.setattr(bench, "ALL", SMALL)
    results = {"environment": where, "ceilings": {"bytes_per_s": 1.0, "flop_per_s": 1.0}, "records": records}
    bench.print_results(results)
    assert capsys.readouterr().out.endswith(f"the profiler, which failed: {error.__name__}: none here\n")


def test_a_program_without_a_peers_evidence_is_skipped(monkeypatch):
    """XLA makes cuDNN's norms for a GPU alone: a program for the CPU has none, and is not timed as cuDNN's."""
    there = peer("there", PEERS["jnp"].function, evidence="HloModule")
    odd = peer("odd", PEERS["jnp"].function, options={"no_such_option": True})
    records = measured(SMALL["norm"], [PEERS["cudnn"], there, odd], "gpu", monkeypatch)
    found = {(r["peer"], r["direction"]): (r["status"], r.get("reason")) for r in records}
    status, reason = found.pop(("odd", None))
    assert status == "failed" and "no_such_option" in reason
    assert found.pop(("cudnn", None)) == ("skipped", "XLA made no __cudnn$norm of it")
    assert set(found.values()) == {("timed", None)} and len(found) == 3


def test_limits_are_of_the_size_of_roundings():
    """A limit in float32 is at most some roundings of the largest element, and 8 more for a sum over 64 rows."""
    workload = Workload("norm", "layer_norm", (64, 100), "small", dtype="float32")
    judge = measure._judge(workload, *workload.draw())
    assert sorted(judge.true) == sorted(workload.names()) == ["doffset", "dscale", "dx", "y"]
    for error in judge.errors({name: true.astype("float32") for name, true in judge.true.items()}):
        summed = 8 if error.name in ("dscale", "doffset") else 0
        largest = abs(judge.true[error.name]).max()
        assert error.error <= error.limit <= (2 * ROUNDINGS + 1 + summed) * 1.2e-7 * largest, error


@pytest.mark.parametrize("name", SMALL)
def test_pytorch_is_right_and_timed(name):
    pytest.importorskip("torch")
    records = measured(SMALL[name], [PEERS["jln"], PEERS["torch"]])
    assert {r["status"] for r in records} == {"timed"}, records


def test_tokamax_is_right_and_timed():
    pytest.importorskip("tokamax")
    records = measured(SMALL["norm"], [PEERS["jln"], PEERS["tokamax"]])
    assert {r["status"] for r in records} == {"timed"}, records


# The command


@pytest.fixture
def small(monkeypatch):
    """Let the command run two small workloads by default, and give it ceilings so that it does not measure any."""
    monkeypatch.setattr(bench, "CPU_WORKLOADS", {name: SMALL[name] for name in ("norm", "inference")})
    monkeypatch.setattr(bench, "ALL", SMALL)
    monkeypatch.setattr(measure, "ceilings", lambda *_: {"bytes_per_s": 1e9, "flop_per_s": 1e10})


def run(*arguments):
    app = typer.Typer()
    app.command()(bench.main)
    ran = CliRunner().invoke(app, ["--peers", "jln,jnp", "--repetitions", "2", *arguments])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.output


def test_tables_results_and_pictures(small, tmp_path):
    pytest.importorskip("matplotlib")
    status, out = run("--output", str(tmp_path))
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


def test_a_run_that_ends_early_is_taken_up_again(small, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    status, out = run("--output", str(tmp_path), "--seconds", "0")
    assert status == 3 and "workloads not finished: 2" in out
    assert run("norm", "--output", str(tmp_path))[0] == 0
    names, original = [], measure.measure
    monkeypatch.setattr(measure, "measure", lambda w, *rest: names.append(w.name) or original(w, *rest))
    assert run("--output", str(tmp_path))[0] == 0 and names == ["inference"]
    status, out = run("--output", str(tmp_path), "--repetitions", "3")
    assert status == 2 and "its repetitions is 2" in " ".join(out.split())
    (tmp_path / "results.json").write_text("[]")
    status, out = run("--output", str(tmp_path))
    assert status == 2 and "cannot read" in out


def test_exits_with_1_if_ours_is_wrong_and_2_for_a_bad_request(small, monkeypatch):
    monkeypatch.setitem(PEERS, "jln", Peer("jln", "", "jln", "jln", off_by(0.1)))
    status, out = run("norm")
    assert status == 1 and "wrong: dx is off by" in out
    status, out = run("nrom")
    assert status == 2 and "unknown workload 'nrom'" in out


def test_list():
    status, out = run("--list")
    assert status == 0 and all(name in out for name in (*ALL, *PEERS))


def test_what_another_process_measures(monkeypatch):
    """Another process measures a workload; where it cannot or dies, the reason is told."""

    def told(end=float("inf")):
        (record,) = bench.elsewhere(worker, SMALL["inference"], ["jnp"], 2, end)
        assert (record["workload"], record["peer"]) == ("inference", "jnp")
        return record["status"], record.get("reason")

    with contextlib.ExitStack() as ends:
        ends.callback((worker := bench.Worker()).end)
        assert told() == ("timed", None) and (first := worker._process) is not None
        assert told(end=time.monotonic() + 100) == ("timed", None) and worker._process is first
        assert bench.elsewhere(worker, SMALL["inference"], ["jnp"], 2, -100.0) == []  # to be done yet
        monkeypatch.setattr(bench, "measure_by_name", die)
        status, reason = told()
        assert status == "failed" and reason.endswith("its process died with exit status 3")
        assert worker._process is None  # whatever failed has lost no later workload


def test_each_workload_has_all_its_peers_before_the_next_begins(monkeypatch, tmp_path):
    """Each framework's peers have a process of their own on a GPU, and what is done is not done again."""
    asked, times = [], iter([0.0, 1.0, 2.0, 99.0, 101.0, 102.0, *[200.0] * 20])

    class Other:
        def call(self, function, workload, names, repetitions, *, seconds):
            assert function is bench.measure_by_name and repetitions == 2
            asked.append((workload.name, names, seconds))
            return [measure.without(workload, PEERS[n], Unsupported("a test")) for n in names]

        def end(self):
            asked.append("end")

    monkeypatch.setattr(bench, "Worker", Other)
    monkeypatch.setattr(bench, "time", types.SimpleNamespace(monotonic=lambda: next(times)))
    chosen, three = [PEERS[name] for name in ("torch", "jln", "liger")], [SMALL[n] for n in ("norm", "sum", "add")]
    ours, theirs, path = ["jln"], ["torch", "liger"], tmp_path / bench.RESULTS
    ceilings = {"bytes_per_s": 1e9, "flop_per_s": 1e10}
    results = {"environment": {"repetitions": 2}, "ceilings": ceilings, "records": []}
    bench.run(results, three, chosen, path, 100.0, apart=True)
    first = [("norm", ours, 119.0), ("norm", theirs, 118.0), ("sum", ours, 19.0), ("sum", theirs, 18.0)]
    assert asked == [*first, "end", "end"]
    both = [(w, p) for w in ("norm", "sum") for p in ("jln", "torch", "liger")]
    assert [(r["workload"], r["peer"]) for r in json.loads(path.read_text())["records"]] == both

    def again(keep=lambda record: True, **changes):
        """Run once more behind a change of what was kept, and return what is asked."""
        for r in results["records"]:
            r.update(changes if (r["workload"], r["peer"]) == ("norm", "jln") else {})
        results["records"] = list(filter(keep, results["records"]))
        asked.clear()
        bench.run(results, three, chosen, path, float("inf"), apart=True)
        return [a[:2] for a in asked if a != "end"]

    assert again() == [("add", ours), ("add", theirs)]
    # What lacks a peer is measured again, and so is what jln failed in, which may have failed the others.
    assert again(keep=lambda r: (r["workload"], r["peer"]) != ("sum", "liger")) == [("sum", ours), ("sum", theirs)]
    assert again(status="failed") == [("norm", ours), ("norm", theirs)]
    assert again() == []


def test_an_error_of_a_process_is_its_peers():
    record = measure.without(SMALL["norm"], PEERS["jln"], WorkError("its process died"))
    assert record["status"] == "failed" and "its process died" in record["reason"]
