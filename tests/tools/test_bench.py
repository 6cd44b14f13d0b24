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
import jln
import measure
from peers import PEERS, Peer, Unsupported
from workloads import ALL, Workload

pytestmark = pytest.mark.usefixtures("promoted_ranks")

SMALL = {
    w.name: w
    for w in (
        Workload("norm", "layer_norm", (6, 40), "small"),
        Workload("several", "layer_norm_linear", (6, 40), "small", features=(8, 4)),
        Workload("axis-0", "layer_norm", (40, 3, 2), "small", axis=0),
        Workload("inference", "rms_norm", (6, 40), "small", directions=("forward",)),
    )
}
CEILINGS = {"bytes_per_s": 1e9, "flop_per_s": 1e10}


def measured(workload, peers, platform="cpu", monkeypatch=None):
    """Measure as on a platform: "gpu" for times by the profiler, which works on a CPU, too."""
    if platform == "gpu":
        monkeypatch.setattr(clocks, "COLD_BYTES", 2**20)
        monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(platform="gpu")])
    return measure.measure(workload, peers, 2)


@pytest.mark.parametrize(
    ("platform", "name", "peers"),
    [
        ("cpu", "norm", ("jln", "flax", "haiku")),
        ("gpu", "several", ("jln", "jln-norm")),
        ("gpu", "axis-0", ("jln", "flax")),
    ],
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


@pytest.mark.parametrize("name", ["norm", "several", "inference"])
def test_pytorch_is_right_and_timed(name):
    pytest.importorskip("torch")
    records = measured(SMALL[name], [PEERS["jln"], PEERS["torch"]])
    assert {r["status"] for r in records} == {"timed"}, records


def test_tokamax_is_right_and_timed():
    pytest.importorskip("tokamax")
    records = measured(SMALL["norm"], [PEERS["jln"], PEERS["tokamax"]])
    assert {r["status"] for r in records} == {"timed"}, records


# A workload of each operator, set of arrays and number of Linears, and those over another axis.
KINDS = {(w.operator, w.extras, w.absent, w.of_examples, len(w.all_features), w.axis): w for w in ALL.values()}


@pytest.mark.parametrize("name", [p.name for p in PEERS.values() if p.framework == "jax"])
def test_every_workload_has_a_program_of_every_peer_of_jax(name):
    """Results have the reference's shapes and dtypes, or `Unsupported` says why there are none. Nothing is run."""
    chosen = PEERS[name]
    pytest.importorskip(chosen.package)
    for workload in KINDS.values():
        centred = workload.entry.centres and not workload.of_examples
        lacks = {
            "jln-norm": (not workload.is_linear, "by itself"),
            "cudnn": (not centred, "of a LayerNorm with one scale"),
        }
        lacks |= dict.fromkeys(("flax", "haiku", "tokamax"), (workload.of_examples, "for all examples"))
        is_lacking, why = lacks.get(name, (False, ""))
        if is_lacking:
            with pytest.raises(Unsupported, match=why):
                chosen.function(workload)
            continue
        steps = (chosen.function(workload), workload.function(jln.reference))
        given = workload.step_arguments()
        ours, true = (jax.tree.leaves(jax.eval_shape(workload.step(f), *given)) for f in steps)
        assert [(a.shape, a.dtype) for a in ours] == [(a.shape, a.dtype) for a in true], workload


def peer(name, function, **others):
    return Peer(name, "", "jax", "jax", function, **others)


def off_by(part, which=0):
    """A peer with one of its gradients off by a part."""

    def function(workload):
        right = PEERS["jnp"].function(workload)

        @jax.custom_vjp
        def f(*arguments):
            return right(*arguments)

        def backward(pullback, dy):
            gradients = list(pullback(dy))
            gradients[which] = gradients[which] * (1 + part)
            return tuple(gradients)

        f.defvjp(lambda *arguments: jax.vjp(right, *arguments), backward)
        return f

    return function


def test_a_wrong_peer_is_said_to_be():
    chosen = [peer("dx", off_by(0.05)), peer("dscale", off_by(0.001, 1)), peer("right", off_by(0.0))]
    records = measured(Workload("norm", "layer_norm", (64, 100), "small"), chosen)
    status = {(r["peer"], r["direction"]): r["status"] for r in records}
    assert {s for (name, _), s in status.items() if name == "right"} == {"timed"}
    wrong = {key for key, s in status.items() if s == "wrong"}
    assert wrong == {(name, d) for name in ("dx", "dscale") for d in ("backward", "both", "gradient")}
    assert {r["reason"].split(" ")[0] for r in records if r["peer"] == "dscale" and "reason" in r} == {"dscale"}


def raises(*_):
    raise RuntimeError("no kernel\nfor this")


def test_what_a_peer_lacks_or_raises_is_its_reason(monkeypatch):
    def refuses(workload):
        raise Unsupported("not this one")

    chosen = [
        peer("raises", raises),
        peer("refuses", refuses),
        Peer("missing", "", "no_such_package", "no-such-package", PEERS["jnp"].function),
        peer("gpu", refuses, on_cpu=False),
        peer("late", lambda workload: lambda *arguments: jax.pure_callback(raises, arguments[0], arguments[0])),
        peer("odd", PEERS["jnp"].function, options={"no_such_option": True}),
        peer("there", PEERS["jnp"].function, evidence="HloModule"),
        peer("not there", PEERS["jnp"].function, evidence="__cudnn$norm"),
    ]
    found = {r["peer"]: (r["status"], r.get("reason")) for r in measured(SMALL["inference"], chosen)}
    assert found.pop("late")[0] == "failed"
    status, reason = found.pop("odd")
    assert status == "failed" and "no_such_option" in reason
    assert found == {
        "raises": ("failed", "RuntimeError: no kernel for this"),
        "refuses": ("skipped", "not this one"),
        "missing": ("skipped", "no-such-package is not installed"),
        "gpu": ("skipped", "jax needs a GPU"),
        "there": ("timed", None),
        "not there": ("skipped", "XLA made no __cudnn$norm of it"),
    }


def test_without_a_profiler_a_gpu_is_timed_by_the_wall_clock_and_the_reason_is_said(monkeypatch, capsys):
    monkeypatch.setattr(clocks, "traced", raises)
    records = measured(SMALL["inference"], [PEERS["jnp"]], "gpu", monkeypatch)
    assert [(r["status"], r["clock"]) for r in records] == [("timed", "wall")]
    where = {"versions": {}, "chip": "a chip", "cores": 1, "load": 0.0}
    monkeypatch.setattr(bench, "ALL", SMALL)
    bench.print_results({"environment": where, "ceilings": CEILINGS, "records": records})
    assert capsys.readouterr().out.endswith("the profiler, which failed: RuntimeError: no kernel for this\n")


# The command


@pytest.fixture
def small(monkeypatch):
    """Let the command run two small workloads by default, and give it ceilings so that it does not measure any."""
    monkeypatch.setattr(bench, "CPU_WORKLOADS", {name: SMALL[name] for name in ("norm", "inference")})
    monkeypatch.setattr(bench, "ALL", SMALL)
    monkeypatch.setattr(measure, "ceilings", lambda *_: CEILINGS)


def run(*arguments):
    app = typer.Typer()
    app.command()(bench.main)
    ran = CliRunner().invoke(app, ["--peers", "jln,jnp", "--repetitions", "2", *arguments])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.output


def test_a_run_that_ends_early_is_taken_up_again(small, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    status, out = run("--output", str(tmp_path), "--seconds", "0")
    assert status == 3 and "workloads not finished: 2" in out
    status, out = run("norm", "--output", str(tmp_path))
    assert status == 0 and "copy 1.0 GB/s, matrix product 0.01 TFLOP/s" in out
    records = json.loads((tmp_path / "results.json").read_text())["records"]
    for record in records:
        assert record["gb_per_s"] == pytest.approx(record["bytes_once"] / record["median"] / 1e9)
        assert record["of_ceiling"] == pytest.approx(record["bytes_once"] / 1e9 / record["median"])
    moved = {r["direction"]: r["bytes_once"] for r in records}
    assert moved["both"] == moved["forward"] + moved["backward"] and moved["gradient"] == moved["backward"]
    names, original = [], measure.measure
    monkeypatch.setattr(measure, "measure", lambda w, *rest: names.append(w.name) or original(w, *rest))
    assert run("--output", str(tmp_path))[0] == 0 and names == ["inference"]
    assert {p.name for p in tmp_path.iterdir()} == {"results.json", "speed.svg", "memory.svg"}
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
    status, out = run("--list")
    assert status == 0 and all(name in out for name in (*SMALL, *PEERS))


def die(*_):
    os._exit(3)


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
    chosen, three = [PEERS[name] for name in ("torch", "jln", "liger")], [*SMALL.values()][:3]
    ours, theirs, path = ["jln"], ["torch", "liger"], tmp_path / bench.RESULTS
    results = {"environment": {"repetitions": 2}, "ceilings": CEILINGS, "records": []}
    bench.run(results, three, chosen, path, 100.0, apart=True)
    first = [("norm", ours, 119.0), ("norm", theirs, 118.0), ("several", ours, 19.0), ("several", theirs, 18.0)]
    assert asked == [*first, "end", "end"]
    both = [(w, p) for w in ("norm", "several") for p in ("jln", "torch", "liger")]
    assert [(r["workload"], r["peer"]) for r in json.loads(path.read_text())["records"]] == both

    def again(keep=lambda record: True, **changes):
        """Run once more behind a change of what was kept, and return what is asked."""
        for r in results["records"]:
            r.update(changes if (r["workload"], r["peer"]) == ("norm", "jln") else {})
        results["records"] = list(filter(keep, results["records"]))
        asked.clear()
        bench.run(results, three, chosen, path, float("inf"), apart=True)
        return [a[:2] for a in asked if a != "end"]

    assert again() == [("axis-0", ours), ("axis-0", theirs)]
    # What lacks a peer is measured again, and so is what jln failed in, which may have failed the others.
    lacking = again(keep=lambda r: (r["workload"], r["peer"]) != ("several", "liger"))
    assert lacking == [("several", ours), ("several", theirs)]
    assert again(status="failed") == [("norm", ours), ("norm", theirs)]
    assert again() == []
