"""Tests of the benchmark: its judgement of numbers, and what it does where peers or profilers are missing."""

import jax
import pytest

pytest.importorskip("typer")

from bench_cases import SETTINGS, SMALL, off_by
from jln._tools import accuracy, bench, clocks, measure
from jln._tools.composed import Unsupported
from jln._tools.peers import PEERS, Peer
from jln._tools.workload import Block, Workload
from jln._tools.workloads import ALL

pytestmark = pytest.mark.usefixtures("promoted_ranks")


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        ("cpu", "norm"),
        *(("gpu", n) for n in ("sum", "linear", "several", "add", "axis-0", "inference", "apart")),
        pytest.param("gpu", "block", marks=pytest.mark.heavy),  # whose parts are timed apart
    ],
)
def test_all_peers_of_jax_are_right_and_timed(name, platform, monkeypatch):
    """Every peer of JAX is right and is timed in each direction, the CPU's way and a GPU's.

    platform: "cpu" for times by the wall clock, "gpu" for times by the profiler, which works on a CPU too.
    """
    monkeypatch.setattr(clocks, "COLD_BYTES", 2**20)
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
    """Each peer of JAX has a program for every workload, with results of the reference's shapes and dtypes.

    Where a peer cannot compute a workload it raises `Unsupported` with the reason. Nothing is run, as the sizes are
    full.
    """
    chosen = PEERS[name]
    pytest.importorskip(chosen.package)
    for workload in ALL.values():
        parts_of = workload.parts() if isinstance(workload, Block) else [workload]
        if name == "jln-norm" and not all(part.is_linear for part in parts_of):
            with pytest.raises(Unsupported, match="by itself"):
                measure.function_of(workload, chosen)
            continue
        if name == "cudnn" and not all(part.entry.centres and not part.of_examples for part in parts_of):
            with pytest.raises(Unsupported, match="of a LayerNorm with one scale"):
                measure.function_of(workload, chosen)
            continue
        if name in ("flax", "haiku", "tokamax") and workload.of_examples:
            with pytest.raises(Unsupported, match="for all examples"):
                measure.function_of(workload, chosen)
            continue
        given = [*workload.arguments(), *(workload.cotangents() if "backward" in workload.directions else ())]
        steps = (measure.function_of(workload, chosen), accuracy.reference(workload))
        ours, true = (jax.tree.leaves(jax.eval_shape(workload.step(f), *given)) for f in steps)
        assert [(a.shape, a.dtype) for a in ours] == [(a.shape, a.dtype) for a in true], workload
        assert len(ours) == len(workload.names())


def peer(name, function, **others):
    return Peer(name, "", "jax", "jax", function, **others)


def test_a_wrong_peer_is_said_to_be_and_not_timed():
    chosen = [peer("dx", off_by(0.05)), peer("dscale", off_by(0.001, 1)), peer("right", off_by(0.0))]
    workload = Workload("norm", "layer_norm", (64, 100), "small")
    records = measure.measure(workload, chosen, "cpu", SETTINGS)
    status = {(r["peer"], r["direction"]): r["status"] for r in records}
    assert {s for (name, _), s in status.items() if name == "right"} == {"timed"}
    assert {s for (name, _), s in status.items() if name in ("dx", "dscale")} == {"wrong"}
    assert not any("median" in r for r in records if r["status"] == "wrong")
    assert {r["reason"].split(" ")[0] for r in records if r["peer"] == "dscale"} == {"another", "dscale"}
    timed = measure.measure(workload, chosen[:1], "cpu", measure.Procedure(2, even_wrong=True))
    assert all("median" in r for r in timed) and "wrong" in {r["status"] for r in timed}


def test_what_a_peer_lacks_or_raises_is_its_reason():
    def raises(workload):
        raise RuntimeError("no kernel\nfor this")

    def refuses(workload):
        raise Unsupported("not this one")

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
    with pytest.raises(Unsupported, match="within JAX"):
        measure.function_of(SMALL["block"], PEERS["torch"])


@pytest.mark.parametrize("error", [clocks.TraceError, RuntimeError])
def test_without_a_profiler_a_gpu_is_timed_by_the_wall_clock_and_the_reason_is_said(monkeypatch, error):
    def none(*_):
        raise error("none\nhere")

    monkeypatch.setattr(clocks, "traced", none)
    records = measure.measure(SMALL["inference"], [PEERS["jln"], PEERS["jnp"]], "gpu", SETTINGS)
    assert [(r["status"], r["clock"]) for r in records] == [("timed", "wall")] * 2
    assert {r["unprofiled"] for r in records} == {f"{error.__name__}: none here"}
    where = {"versions": {}, "chip": "a chip", "cores": 1, "load": 0.0, "platform": "gpu", "cold": True}
    results = {"environment": where, "ceilings": {"bytes_per_s": 1.0, "flop_per_s": 1.0}}
    monkeypatch.setattr(bench, "ALL", SMALL)
    assert not any(part.wrong for part in bench._parts(results | {"records": []}, "gpu:0"))
    (note,) = [part for part in bench._parts(results | {"records": records}, "gpu:0") if part.wrong]
    assert note.text == f"times not by the profiler, which failed: {error.__name__}: none here"


def test_a_program_without_a_peers_evidence_is_skipped(monkeypatch):
    """XLA makes cuDNN's norms for a GPU alone: a program for the CPU has none, and is not timed as cuDNN's."""
    monkeypatch.setattr(clocks, "COLD_BYTES", 2**20)
    there = peer("there", PEERS["jnp"].function, evidence="HloModule")
    odd = peer("odd", PEERS["jnp"].function, options={"no_such_option": True})
    records = measure.measure(SMALL["norm"], [PEERS["jln"], PEERS["cudnn"], there, odd], "gpu", SETTINGS)
    found = {(r["peer"], r["direction"]): (r["status"], r.get("reason"), "median" in r) for r in records}
    status, reason, _ = found.pop(("odd", None))
    assert status == "failed" and "no_such_option" in reason
    for direction in ("forward", "backward", "both"):
        assert found.pop(("cudnn", direction)) == ("skipped", "XLA made no __cudnn$norm of it", False)
    assert set(found.values()) == {("timed", None, True)} and len(found) == 6


def test_limits_are_of_the_size_of_roundings():
    """A limit in float32 is at most some roundings of the largest element, and 8 more for a sum over rows.

    8 is the square root of the number of rows, 64.
    """
    workload = Workload("norm", "layer_norm", (64, 100), "small", dtype="float32")
    judge = accuracy.Judge(workload, *workload.draw(), mild=True)
    assert list(judge.true) == workload.names() == ["y", "dx", "dscale", "doffset"]
    for name, true in judge.true.items():
        line = judge.accuracy(name, true.astype("float32"))
        summed = 8 if name in ("dscale", "doffset") else 0
        assert line.ok and line.limit <= (2 * accuracy.ROUNDINGS + 1 + summed) * 1.2e-7 * line.largest, name


def test_bytes_and_operations_of_a_block():
    block = SMALL["block"]
    tokens, h = 32, 64
    parameters = 12 * h * h + (3 + 1 + 4 + 1) * h
    assert block.bytes_once("forward") == 2 * (2 * tokens * h + parameters) + 4 * 4 * h
    assert block.product_flops("forward") == 2 * tokens * (12 * h * h + 16 * h)
    assert block.product_flops() == 3 * block.product_flops("forward")
    for name in ("bytes_once", "product_flops"):
        assert getattr(SMALL["apart"], name)() == getattr(block, name)()


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("block", "apart")])  # PyTorch has no blocks
def test_pytorch_is_right_and_timed(name):
    pytest.importorskip("torch")
    workload = SMALL[name]
    records = measure.measure(workload, [PEERS["jln"], PEERS["torch"]], "cpu", SETTINGS)
    assert {r["status"] for r in records} == {"timed"}, records


def test_tokamax_is_right_and_timed():
    pytest.importorskip("tokamax")
    records = measure.measure(SMALL["norm"], [PEERS["jln"], PEERS["tokamax"]], "cpu", SETTINGS)
    assert {r["status"] for r in records} == {"timed"}, records
