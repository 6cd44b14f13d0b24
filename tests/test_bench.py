"""The benchmark: its clocks, its judgement of numbers, what it does where peers, profilers or time are missing."""

import json
import os
import pathlib
import shutil
import subprocess
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("typer")

from jln import _accuracy
from jln._bench import measure, numerics, parts, results, timing, trace
from jln._bench.blocks import Block
from jln._bench.peers import PEERS, Peer
from jln._bench.timing import Run
from jln._bench.workloads import Workload
from jln._cli import app, bench

pytestmark = pytest.mark.usefixtures("compile_fast")

SETTINGS = measure.Settings(2)


@pytest.fixture(autouse=True)
def promotion():
    """Other libraries rely on it."""
    with jax.numpy_rank_promotion("allow"):
        yield


# Of each operator, and the forms that take another path: an axis that is not the last, a block, inference.
SMALL = {
    w.name: w
    for w in (
        Workload("norm", "layer_norm", (6, 40), "small"),
        Workload("sum", "add_rms_norm", (2, 3, 40), "small"),
        Workload("linear", "layer_norm_linear", (6, 40), "small", features=8),
        Workload("no-bias", "rms_norm_linear", (6, 40), "small", features=8, absent=("bias",)),
        Workload("several", "layer_norm_linear", (6, 40), "small", features=(8, 4)),
        Workload("add", "add_rms_norm_linear", (6, 40), "small", features=(8, 4), absent=("bias",)),
        Workload("axis-0", "layer_norm", (40, 3, 2), "small", axis=0),
        Workload("inference", "rms_norm", (6, 40), "small", directions=("forward",)),
        Block("block", "block", (2, 4, 16), "small", heads=2),
        Block("apart", "block", (2, 4, 16), "small", heads=2, apart=True),
    )
}


def program(name, size):
    """A run of a product of matrices and a sine, two kernels or more."""

    def f(x):
        return jnp.sin(x) @ x

    f.__name__ = name
    x = jnp.ones((size, size), "float32")
    compiled = jax.jit(f).lower(x).compile()
    return Run(name, lambda: compiled(x))


def test_each_program_of_a_trace_gets_its_own_time():
    """On the CPU's threads, through the profiler that a GPU is timed by."""
    runs = [program("small", 8), program("large", 400)]
    times = timing.traced(runs, 5, cold_bytes=2**20)
    assert {name: len(t.seconds) for name, t in times.items()} == {"small": 5, "large": 5}
    assert times["large"].clock == "device" and times["large"].kernels >= 1
    assert times["small"].minimum > 0 and 10 * times["small"].minimum < times["large"].minimum  # 125,000 times the work


def test_a_run_that_the_trace_lacks_is_an_error(monkeypatch):
    other = program("other", 8)
    with pytest.raises(trace.TraceError, match=r"\['jit_other'\] where mine ran"):
        timing.traced([Run("mine", other.call)], 2, cold_bytes=2**20)
    monkeypatch.setattr(trace, "of_jax", lambda folder: [])
    with pytest.raises(trace.TraceError, match="0 runs of 2"):
        timing.traced([other], 2, cold_bytes=2**20)


def test_of_a_gpu_only_its_streams_count(monkeypatch, tmp_path):
    def event(name, start, duration, **stats):
        return types.SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats.items())

    def line(name, *events):
        return types.SimpleNamespace(name=name, events=events)

    kernels = line("Stream #7(Compute)", event("k2", 5.0, 2.0, hlo_module="jit_f(3)"), event("k1", 1.0, 3.0))
    modules = line("XLA Modules", event("jit_f", 1.0, 6.0, hlo_module="jit_f"))
    planes = [
        types.SimpleNamespace(name="/host:CPU", lines=[line("python", event("f", 0.0, 9.0, hlo_module="jit_f"))]),
        types.SimpleNamespace(name="/device:GPU:0", lines=[modules, kernels]),
    ]
    read = types.SimpleNamespace(from_file=lambda path: types.SimpleNamespace(planes=planes))
    monkeypatch.setattr(trace.jax.profiler, "ProfileData", read)
    with pytest.raises(trace.TraceError, match="wrote no trace"):
        trace.of_jax(tmp_path)
    (tmp_path / "a.xplane.pb").touch()
    assert trace.of_jax(tmp_path) == [trace.Event("k1", "", 1.0, 4.0), trace.Event("k2", "jit_f", 5.0, 7.0)]


def test_marks_part_the_events():
    events = [
        trace.Event(name, name, i, i + 1) for i, name in enumerate(["early", "mark", "mark", "a", "b", "mark", "c"])
    ]
    assert [[e.name for e in group] for group in trace.between_marks(events, "mark")] == [["a", "b"], ["c"]]


def test_time_is_counted_once_where_kernels_overlap():
    events = [trace.Event("", "", *span) for span in ((0, 10), (5, 20), (7, 8), (100, 101))]
    assert trace.busy_seconds(events) == pytest.approx(21e-9)
    assert trace.busy_seconds([]) == 0.0


def test_windows_of_a_pytorch_trace():
    def entry(category, name, start, duration):
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}

    text = json.dumps(
        {
            "traceEvents": [
                entry("user_annotation", "window", 100, 50),
                entry("gpu_user_annotation", "window", 101, 20),
                entry("user_annotation", "window", 10, 20),
                entry("kernel", "chill", 5, 4),
                entry("kernel", "second", 120, 5.5),
                entry("gpu_memset", "first", 110, 2),
                entry("cuda_runtime", "launch", 102, 1),
                {"ph": "M", "name": "process_name"},
            ]
        }
    )
    assert [[e.name for e in window] for window in trace.of_torch(text, "window")] == [[], ["first", "second"]]
    assert trace.busy_seconds(trace.of_torch(text, "window")[1]) == pytest.approx(7.5e-6)


def test_every_round_has_every_program_in_an_order_of_its_own():
    runs = [program(name, 4) for name in "abcdef"]
    rounds = np.reshape([run.name for run in timing.shuffled(runs, 20)], (20, 6))
    assert (np.sort(rounds) == list("abcdef")).all() and len({tuple(r) for r in rounds}) > 10


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        ("cpu", "norm"),
        *(("gpu", n) for n in ("sum", "linear", "several", "add", "axis-0", "inference", "block", "apart")),
    ],
)
def test_all_peers_of_jax_are_right_and_timed(name, platform, monkeypatch):
    """platform: whose way; on "gpu" by the profiler, which works here too."""
    monkeypatch.setattr(timing, "COLD_BYTES", 2**20)
    by = {"block": ("jln",), "apart": ("jln", "jln-norm"), "linear": ("jln", "flax"), "several": ("jln", "jln-norm")}
    names = by.get(name, ("jln", "flax", "haiku"))  # the rest is slow
    chosen = [PEERS[p] for p in names]
    records = measure.measure(SMALL[name], chosen, platform, SETTINGS)
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
    """That gives what the reference does, in shapes; at full size nothing is run."""
    chosen = PEERS[name]
    pytest.importorskip(chosen.package)
    for workload in results.ALL.values():
        parts_of = workload.parts() if isinstance(workload, Block) else [workload]
        if not chosen.of_norms and not all(part.is_linear for part in parts_of):
            with pytest.raises(parts.Unsupported, match="by itself"):
                measure.function_of(workload, chosen)
            continue
        given = [*workload.arguments(), *(workload.cotangents() if "backward" in workload.directions else ())]
        steps = (measure.function_of(workload, chosen), numerics.reference(workload, rounded=False))
        ours, true = (jax.tree.leaves(jax.eval_shape(workload.step(f), *given)) for f in steps)
        assert [(a.shape, a.dtype) for a in ours] == [(a.shape, a.dtype) for a in true], workload
        assert len(ours) == len(numerics.names(workload))


def peer(name, function, **others):
    return Peer(name, "", "jax", "jax", function, **others)


def off_by(part, which=0):
    """A peer with one of the gradients off by a part."""

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


def test_a_wrong_peer_is_said_to_be_and_not_timed():
    chosen = [peer("dx", off_by(0.05)), peer("dscale", off_by(0.001, 1)), peer("right", off_by(0.0))]
    workload = Workload("norm", "layer_norm", (64, 100), "small")
    records = measure.measure(workload, chosen, "cpu", SETTINGS)
    status = {(r["peer"], r["direction"]): r["status"] for r in records}
    assert {s for (name, _), s in status.items() if name == "right"} == {"timed"}
    assert {s for (name, _), s in status.items() if name in ("dx", "dscale")} == {"wrong"}
    assert not any("median" in r for r in records if r["status"] == "wrong")
    assert {r["reason"].split(" ")[0] for r in records if r["peer"] == "dscale"} == {"another", "dscale"}
    timed = measure.measure(workload, chosen[:1], "cpu", measure.Settings(2, even_wrong=True))
    assert all("median" in r for r in timed) and "wrong" in {r["status"] for r in timed}


def test_what_a_peer_lacks_or_raises_is_its_reason():
    def raises(workload):
        raise RuntimeError("no kernel\nfor this")

    def refuses(workload):
        raise parts.Unsupported("not this one")

    def late(workload):
        return lambda *arguments: jax.pure_callback(raises, arguments[0], arguments[0])

    missing = Peer("missing", "", "no_such_package", "no-such-package", PEERS["jnp"].function)
    chosen = [peer("raises", raises), peer("refuses", refuses), missing, peer("gpu", refuses, on_cpu=False)]
    workload = SMALL["inference"]
    records = measure.measure(workload, [*chosen, peer("late", late), PEERS["jnp"]], "cpu", SETTINGS)
    found = {r["peer"]: (r["status"], r.get("reason")) for r in records}
    assert found.pop("late")[0] == "failed"
    assert found == {
        "raises": ("failed", "RuntimeError: no kernel for this"),
        "refuses": ("skipped", "not this one"),
        "missing": ("skipped", "no-such-package is not installed"),
        "gpu": ("skipped", "jax needs a GPU"),
        "jnp": ("timed", None),
    }
    assert measure.function_of(SMALL["block"], PEERS["jnp"])
    with pytest.raises(parts.Unsupported, match="within JAX"):
        measure.function_of(SMALL["block"], PEERS["torch"])


def test_without_a_profiler_a_gpu_is_timed_by_the_wall_clock(monkeypatch):
    def none(*_):
        raise trace.TraceError("none here")

    monkeypatch.setattr(timing, "traced", none)
    records = measure.measure(SMALL["inference"], [PEERS["jln"]], "gpu", SETTINGS)
    assert [(r["status"], r["clock"]) for r in records] == [("timed", "wall")]


def test_limits_are_of_the_size_of_roundings():
    """In float32: some of the largest result's, and for sums over rows as many more as the root of their number."""
    workload = Workload("norm", "layer_norm", (64, 100), "small", dtype="float32")
    judge = numerics.judge(workload, *numerics.arrays(workload))
    assert list(judge.true) == numerics.names(workload) == ["y", "dx", "dscale", "doffset"]
    for name, true in judge.true.items():
        line = judge.accuracy(name, true.astype("float32"))
        summed = 8 if name in ("dscale", "doffset") else 0
        assert line.ok and line.limit <= (2 * _accuracy.ROUNDINGS + 1 + summed) * 1.2e-7 * line.largest, name


def test_bytes_and_operations_of_a_block():
    block = SMALL["block"]
    tokens, h = 8, 16
    parameters = 12 * h * h + (3 + 1 + 4 + 1) * h
    assert block.bytes_once("forward") == 2 * (2 * tokens * h + parameters) + 4 * 4 * h
    assert block.product_flops("forward") == 2 * tokens * (12 * h * h + 4 * h)
    assert block.product_flops() == 3 * block.product_flops("forward")
    for name in ("bytes_once", "product_flops"):
        assert getattr(SMALL["apart"], name)() == getattr(block, name)()


# The command


def run(capsys, *arguments):
    status = app.run(["bench", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def small(monkeypatch):
    """Two workloads of its own, and no time for ceilings."""
    two = {name: SMALL[name] for name in ("norm", "inference")}
    monkeypatch.setattr(bench, "CPU_WORKLOADS", two)
    for module in (bench, results):
        monkeypatch.setattr(module, "ALL", {**two, "linear": SMALL["linear"]})
    monkeypatch.setattr(measure, "ceilings", lambda *_: {"bytes_per_s": 1e9, "flop_per_s": 1e10})


COMMON = ("--device", "cpu", "--peers", "jln,jnp", "--repetitions", "2")


def test_tables_results_and_plots(capsys, small, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, _ = run(capsys, *COMMON, "--output", str(tmp_path))
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
    for name in ("speed", "ceiling"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_on_a_gpu_the_tuning_in_force_is_recorded(monkeypatch, tmp_path):
    device = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setenv("JLN_CHIP", "h200")
    monkeypatch.setenv("JLN_TUNING", "")
    assert results.environment(device)["tuning"] == [] and results.environment(jax.devices("cpu")[0])["tuning"] is None
    (tmp_path / "a.json").write_text('{"schema": 1, "entries": []}')
    monkeypatch.setenv("JLN_TUNING", str(tmp_path / "a.json"))
    (only, *_) = results.environment(device)["tuning"]
    assert only["file"] == str(tmp_path / "a.json") and only["choices"] == 0 and len(only["sha256"]) == 12


def test_json(capsys, small):
    status, out, _ = run(capsys, "inference", *COMMON, "--json")
    found = json.loads(out)
    assert status == 0 and [r["peer"] for r in found["records"]] == ["jln", "jnp"]


def test_a_run_that_ends_early_is_taken_up_again(capsys, small, tmp_path, monkeypatch):
    arguments = (*COMMON, "--output", str(tmp_path), "--resume")
    status, out, _ = run(capsys, *arguments, "--seconds", "0")
    assert status == 3 and "2 workloads were not begun" in out
    assert run(capsys, "norm", *arguments)[0] == 0
    measured = []
    original = measure.measure
    monkeypatch.setattr(measure, "measure", lambda w, *rest: measured.append(w.name) or original(w, *rest))
    assert run(capsys, *arguments)[0] == 0 and measured == ["inference"]
    assert {r["workload"] for r in json.loads((tmp_path / "results.json").read_text())["records"]} == {
        "norm",
        "inference",
    }
    status, _, err = run(capsys, *arguments, "--repetitions", "3")
    assert status == 2 and "its repetitions is 2, this one's 3" in err
    (tmp_path / "results.json").write_text("[]")
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "it is not what this command writes" in err and len(err.splitlines()) == 1


def test_exits_with_1_if_ours_is_wrong(capsys, small, monkeypatch):
    bad = Peer("jln", "", "jln", "jln", off_by(0.1))
    monkeypatch.setitem(PEERS, "jln", bad)
    status, out, _ = run(capsys, "norm", *COMMON)
    assert status == 1 and "WRONG: jln in norm: dx is off by" in out and "WRONG: another direction's" in out


def test_what_another_process_measures(monkeypatch):
    """As PyTorch is on a GPU; here the workloads are the list's own, the smallest on the CPU."""
    device = jax.devices("cpu")[0]
    workload = results.ALL["decode-1"]
    records = bench._in_another_process([workload], [PEERS["jnp"]], device, SETTINGS, None)
    assert [(r["workload"], r["peer"], r["status"]) for r in records] == [("decode-1", "jnp", "timed")]
    nowhere = types.SimpleNamespace(platform="gpu", id=7)
    records = bench._in_another_process([workload], [PEERS["jnp"]], nowhere, SETTINGS, None)
    assert [r["status"] for r in records] == ["failed"] and "no device 'gpu:7'" in records[0]["reason"]


def test_on_a_gpu_pytorch_has_a_process_of_its_own(monkeypatch):
    asked = []

    def elsewhere(workloads, peers, *_):
        asked.append(([w.name for w in workloads], [p.name for p in peers]))
        return [measure.without(w, p, "skipped", "a test") for w in workloads for p in peers]

    monkeypatch.setattr(bench, "_in_another_process", elsewhere)
    monkeypatch.setattr(measure, "ceilings", lambda *_: {"bytes_per_s": 1e9, "flop_per_s": 1e10})
    monkeypatch.setattr(timing, "COLD_BYTES", 2**20)
    gpu = types.SimpleNamespace(platform="gpu", id=0, device_kind="a GPU")
    chosen = [PEERS[name] for name in ("jnp", "torch")]
    given = (gpu, SETTINGS, None, False, None, 0.0)
    found = bench._run([SMALL["norm"]], chosen, *given)
    assert asked == [(["norm"], ["torch"])]
    assert [r["peer"] for r in found["records"]] == ["jnp"] * 3 + ["torch"]
    monkeypatch.setattr(measure, "measure", lambda w, own, *_: [measure.without(w, own[0], "skipped", "a test")])
    assert bench._run([SMALL["norm"]], chosen[1:], *given)["ceilings"] is None and len(asked) == 1


ERRORS = {
    "workload": (["gpt5"], "unknown workload 'gpt5'"),
    "peer": (["--peers", "jln,flux"], "unknown peer 'flux'; known are jln, jln-norm, jnp, flax"),
    "device": (["--device", "gpu:7"], "no device 'gpu:7'"),
    "repetitions": (["--repetitions", "0"], "greater than or equal to 1"),
    "resume": (["--resume"], "--resume needs --output"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_requests_are_one_line_and_status_2(capsys, case):
    arguments, message = ERRORS[case]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and message in err and err.startswith("jln: ") and len(err.splitlines()) == 1


def test_list(capsys):
    status, out, _ = run(capsys, "--list")
    assert status == 0 and all(name in out for name in (*results.ALL, *PEERS))


# Peers that are large, where they are installed


@pytest.mark.parametrize("name", [name for name in SMALL if name != "block"])
def test_pytorch_is_right_and_timed(name):
    pytest.importorskip("torch")
    workload = SMALL[name]
    records = measure.measure(workload, [PEERS["jln"], PEERS["torch"]], "cpu", SETTINGS)
    assert {r["status"] for r in records} == {"timed"}, records


def test_tokamax_is_right_and_timed():
    pytest.importorskip("tokamax")
    records = measure.measure(SMALL["norm"], [PEERS["jln"], PEERS["tokamax"]], "cpu", SETTINGS)
    assert {r["status"] for r in records} == {"timed"}, records


def test_pytorch_windows_are_found_in_its_trace():
    torch_peers = pytest.importorskip("torch") and __import__("jln._bench.torch_peers", fromlist=["_windows"])
    workload = SMALL["norm"]
    given = numerics.arrays(workload)
    calls = torch_peers.calls(workload, torch_peers.FUNCTIONS["eager"](workload), *given)
    runs = [Run(direction, call) for direction, call in calls.items()]
    assert len(torch_peers._windows(timing.shuffled(runs, 2), lambda: None)) == 2 * len(runs)
    with pytest.raises(trace.TraceError, match="without kernels"):  # there is no GPU
        torch_peers.profiled(runs, 2, 2**10)


@pytest.mark.skipif(shutil.which("timeout") is None, reason="gpu_run.sh needs GNU's timeout")
def test_gpu_run_writes_where_its_caller_means(tmp_path):
    """Not beside the script. By a Python that passes everything."""
    script = pathlib.Path(__file__).parents[1] / "benchmarks" / "gpu_run.sh"
    ran = subprocess.run(
        ["bash", script, "--cpu", "--results", "found", "--run", "x"],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": "true"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {p.stem for p in (tmp_path / "found" / "x").glob("*.json")} >= {"environment", "kernels", "bench"}
