"""The search for tiles, with a clock of the tests: what it asks, what the compiler rules out, and what it keeps."""

import dataclasses
import json
import math
import time

import jax
import pytest

pytest.importorskip("typer")
pytest.importorskip("triton")

from command_line import run
from jln._junction import tiles as norm_tiles
from jln._tools import clocks, launchers, search, tune
from jln._tools.search import Verdict
from jln._tools.workload import Workload
from jln._tools.workloads import TUNABLE, WORKLOADS
from jln._triton import compiler, target, tuning
from jln._triton.chip import CHIPS, SHARED_LIMIT, Chip
from jln._triton.target import INTERPRETED, Interpreter, Recorder, Target
from jln._triton.tile import Tile
from jln._triton.tuning import Trial

pytestmark = pytest.mark.usefixtures("promoted_ranks")
interpreted = pytest.mark.skipif(not target.interpreting(), reason="kernels are compiled here")

# Small workloads for every launcher and choice of tiles; some choices are shared by norms and Linears, and "many" has
# the row length of "norm" at more rows.
SMALL = [
    Workload("norm", "layer_norm", (6, 100), "small", dtype="float32"),
    Workload("many", "add_rms_norm", (40, 100), "small", dtype="float32", directions=("forward",)),
    Workload("axis-0", "layer_norm", (40, 4, 4), "small", axis=0),
    Workload("fused", "layer_norm_linear", (70, 64), "small", features=16),
    Workload("several", "add_layer_norm_linear", (70, 64), "small", features=(16, 8)),
    Workload("apart", "add_layer_norm_linear", (6, 100), "small", features=(300, 20)),
    Workload("composed", "rms_norm_linear", (6, 100), "small", features=300, absent=("bias",)),
]


@pytest.fixture(autouse=True)
def programs_of_the_interpreter(monkeypatch):
    """Let the search time programs in the interpreter, in place of those on a GPU."""
    if target.interpreting():
        monkeypatch.setattr(search, "Gpu", Interpreter)


def question(name="norm", choice="forward", workloads=SMALL):
    chosen = search.questions([w for w in workloads if w.name in name.split()], INTERPRETED)
    return next(q for q in chosen if q.sizes["choice"] == choice)


@interpreted
@pytest.mark.parametrize("workload", SMALL, ids=lambda w: w.name)
def test_what_is_asked_is_what_the_operators_ask(workload):
    def ours(*arguments):
        return workload.step(lambda *a: workload.function()(*a, implementation="triton"))(*arguments)

    with target.using(Recorder(INTERPRETED, trial := Trial({}))):
        jax.jit(ours).lower(*workload.step_arguments())
    asked = search.questions([workload], INTERPRETED)
    assert {q.key: q.heuristic for q in asked} == trial.asked


def test_all_workloads_are_asked_about_and_share_choices(monkeypatch):
    monkeypatch.setattr(search, "LARGEST", 1000)
    asked = search.questions(list(TUNABLE.values()), CHIPS["h200"])
    calls = [call for q in asked for call in q.calls]
    assert len(calls) == len(set(calls)) == sum(len(w.directions) for w in TUNABLE.values())
    assert {q.sizes["choice"] for q in asked} == set(tuning.CHOICES) and len(asked) < len(calls) / 2
    for q in asked:
        moved = [c.workload.bytes_once(c.direction) for c in q.calls]
        assert moved == sorted(moved, reverse=True)


def test_a_choice_is_measured_in_the_largest_calls_that_have_it(monkeypatch):
    """A choice is measured in the three calls that move the most; else one decode step would settle it for a batch."""
    (few,) = search.questions([WORKLOADS["decode-1"]], CHIPS["h200"], TUNABLE.values())
    monkeypatch.setattr(search, "LARGEST", 1000)
    (every,) = search.questions([WORKLOADS["decode-1"]], CHIPS["h200"], TUNABLE.values())
    assert every.key == few.key and len(every.calls) > 5 and len(few.calls) == 3 and set(few.calls) <= set(every.calls)
    left_out = set(every.calls) - set(few.calls)
    moved = [{c.workload.bytes_once(c.direction) for c in calls} for calls in (few.calls, left_out)]
    assert min(moved[0]) >= max(moved[1]) and WORKLOADS["decode-1"] in {c.workload for c in left_out}


def test_candidates_are_few_near_and_fit():
    for q in search.questions(list(TUNABLE.values()), CHIPS["h200"]):
        found = search.candidates(q)
        assert 4 <= len(found) <= 130 and q.heuristic not in found
        assert len({search.identifier(tiles) for tiles in found}) == len(found)
        for tiles in found:
            assert tuning.unfit(q.key, tiles) is None
            tile = tiles.get("tile")
            if q.sizes["choice"] == "forward" and q.heuristic["tile"].columns >= q.sizes["h"]:
                assert tile.columns == q.heuristic["tile"].columns  # a row in registers is read once
    wide = next(q for q in search.questions([WORKLOADS["layer-norm-32768"]], CHIPS["h200"])
                if q.sizes["choice"] == "backward")  # fmt: skip
    assert wide.heuristic["sums"] is not None
    assert any(t["sums"] != wide.heuristic["sums"] for t in search.candidates(wide))


def test_what_spills_or_does_not_fit_is_not_timed():
    """The compiler rules out a tile that spills, and more programs than an SM's registers hold.

    The first tile has too many elements a thread, the second few enough, and the third too many programs.
    """
    h200 = CHIPS["h200"]
    (q,) = [q for q in search.questions([WORKLOADS["layer-norm-1024"]], h200) if q.sizes["choice"] == "backward"]
    tiles = [Tile(4, 1024, 2, 2, 1), Tile(1, 1024, 4, 2, 4), Tile(1, 1024, 4, 2, 16)]
    with compiler.workers(2) as pool:
        spilling, good, crowded = search.verdicts(pool, q, [{"tile": t, "sums": None} for t in tiles], h200)
    assert spilling.spilled > 100 and spilling.why == f"spills {spilling.spilled} bytes"
    assert good.why is None and 0 < good.registers < 255 and good.spilled == 0 < good.shared
    assert crowded.why == "16 programs do not fit on a core"


def test_what_does_not_compile_or_needs_too_much_memory_is_not_timed():
    class Pool:
        def __init__(self, *found):
            self.found = list(found)

        def submit(self, *_):
            verdict = self.found.pop(0)
            return type("Job", (), {"result": lambda self: verdict})()

    q = question()
    choices = [{"tile": Tile(1, 128, w)} for w in (1, 2, 4, 8)]
    own, limit = Verdict(32, 8, 0), SHARED_LIMIT[90]
    given = (Verdict(why="does not compile: X"), Verdict(32, 9, 0), Verdict(32, 8, limit + 1), Verdict(32, 8, limit))
    found = search.verdicts(Pool(own, *given), q, choices, INTERPRETED)
    why = [verdict.why for verdict in found]
    assert why[0] == "does not compile: X" and why[1] == "spills 9 bytes" and f"needs {limit + 1}" in why[2]
    assert why[3] is None  # spills no more than the heuristics' own
    assert (
        "RuntimeError" in search.compiled(q.calls[0], q.key, choices[0], INTERPRETED).why or not target.interpreting()
    )


def clock(seconds):
    """Return a clock that reads a program's tile in its name: `seconds(rows, columns, warps, stages, programs)`."""

    def measured(runs):
        assert len({run.name for run in runs}) == len(runs)
        return {run.name: seconds(*map(int, run.name.split("_")[1:6])) for run in runs}

    return measured


@interpreted
def test_the_fastest_is_found():
    q = question("norm many")
    assert [call.name for call in q.calls] == ["many forward", "norm forward"]
    best = q.heuristic["tile"].rows // 2
    found = search.fastest(q, search.candidates(q), INTERPRETED, clock(lambda rows, *_: 1 + abs(rows - best)))
    assert found.tiles["tile"].rows == best and found.failed == {}
    old = 1 + best
    assert found.seconds == {"many forward": (old, 1), "norm forward": (old, 1)}
    assert found.ratio == pytest.approx(1 / old)


@interpreted
@pytest.mark.parametrize(("gain", "kept"), [(0.015, False), (0.025, True)])
def test_what_is_within_the_noise_is_not_kept(gain, kept):
    q = question()
    own = q.heuristic["tile"]
    found = search.fastest(
        q, search.candidates(q), INTERPRETED, clock(lambda *n: 1.0 if n == dataclasses.astuple(own) else 1 - gain)
    )
    assert (found.tiles is not None) == kept


@interpreted
def test_the_luckiest_of_many_is_timed_again():
    times = iter([1.0, 0.5, 0.9, 1.0, 1.01, 0.9])  # of the heuristics and two candidates, twice
    q = question()
    choices = search.candidates(q)[:2]
    found = search.fastest(q, choices, INTERPRETED, lambda runs: {run.name: next(times) for run in runs})
    assert found.tiles == choices[1] and found.seconds == {"norm forward": (1.0, 0.9)}


@interpreted
def test_what_loses_in_one_workload_is_not_kept():
    """A candidate that loses in one workload is not kept, however much faster it is in another."""
    q, rounds = question("norm many"), []

    def seconds(runs):
        rounds.append(None)  # the first and the second are of "many", the third is of "norm"
        return {run.name: 1.0 if run is runs[0] else 1.03 if len(rounds) == 3 else 0.1 for run in runs}

    assert search.fastest(q, search.candidates(q), INTERPRETED, seconds).tiles is None and len(rounds) == 3


@interpreted
def test_wrong_numbers_are_never_taken(monkeypatch):
    """A candidate whose numbers are off by a hundredth, or that raises, is not taken, however fast it is."""
    q = question()
    original = launchers.call

    def broken(workload, direction, target):
        function, shapes = original(workload, direction, target)

        def call(operands):
            rows = target.trial.tiles[q.key]["tile"].rows
            if rows == 1:
                raise RuntimeError("no room\nfor it")
            return jax.tree.map(lambda a: a * (1.01 if rows == 2 else 1.0), function(operands))

        return call, shapes

    monkeypatch.setattr(launchers, "call", broken)
    choices = [{"tile": Tile(rows, 128, 1)} for rows in (1, 2, 4)]
    found = search.fastest(q, choices, INTERPRETED, clock(lambda rows, *_: rows))
    assert found.tiles == choices[2] and found.timed == 1
    one, two = (found.failed[search.identifier(c)] for c in choices[:2])
    assert one == "RuntimeError: no room for it" and two.startswith("WRONG: result 0 is off by")
    with pytest.raises(RuntimeError, match="norm forward: RuntimeError: no room"):
        own = dataclasses.replace(q, heuristic=choices[0])
        search.fastest(own, choices, INTERPRETED, clock(lambda rows, *_: rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_differs_by_more_than_another_order_of_sums_is_wrong(dtype):
    workload = Workload("norm", "layer_norm", (6, 100), "small", dtype=dtype)
    right = jax.random.normal(jax.random.key(0), (6, 100))
    eps = float(jax.numpy.finfo(dtype).eps)
    assert search.difference((right * (1 + eps), None), (right, None), workload) is None
    for wrong in (right * 1.05, right.at[3, 5].set(math.nan), right.at[0].set(0)):
        assert search.difference((wrong, None), (right, None), workload).startswith("WRONG: result 0 is off by ")
    assert search.difference((0 * right,), (0 * right,), workload) is None


@interpreted
@pytest.mark.parametrize("name", ["axis-0", "fused", "composed"])
def test_candidates_of_every_launcher_give_the_heuristics_numbers(name):
    for q in search.questions([w for w in SMALL if w.name == name], INTERPRETED):
        chosen = search.candidates(q)[::6]
        runs = search.prepared(q.calls[0], q.key, [q.heuristic, *chosen], INTERPRETED)
        assert all(isinstance(run, clocks.Run) for run in runs), runs


@pytest.fixture
def sound(monkeypatch):
    """Replace the compiler's verdicts by those of a compiler that finds no fault."""
    monkeypatch.setattr(search, "verdicts", lambda pool, q, choices, chip: [Verdict()] * len(choices))


HALF = clock(lambda rows, *_: rows)


@interpreted
def test_what_is_found_is_written_and_taken(sound, tmp_path, monkeypatch, capsys):
    path = tmp_path / "{a}" / "tuning.json"
    assert tune.tune(SMALL[:1], INTERPRETED, path, HALF)
    out = capsys.readouterr().out
    assert f", in {path}\n" in out and "2x128 warps" in out
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    assert norm_tiles.forward(100, 1, 4, False, Target()).rows == 2 < norm_tiles.forward_tile(100, 1, 4).rows
    (forward, _) = json.loads(path.read_text())["entries"]
    measured = forward["measured"]
    assert measured["seconds"] == {"norm forward": {"heuristics": 8, "tiles": 2}}
    assert measured["versions"]["triton"] and measured["cases"] == ["norm forward"]
    assert measured["heuristics"]["tile"]["rows"] == 8


@interpreted
def test_a_search_is_taken_up_again_and_loses_nothing(sound, tmp_path):
    path = tmp_path / "tuning.json"
    others = [7, {"choice": "forward", "chip": "b200", "h": 1, "layout": "last axis", "itemsize": 2, "mixed": False,
                  "tiles": None}]  # fmt: skip
    path.write_text(json.dumps({"schema": 1, "entries": others, "note": "mine"}))
    assert not tune.tune(SMALL[:1], INTERPRETED, path, HALF, seconds=-math.inf)
    assert json.loads(path.read_text())["entries"] == others
    timed = []

    def counting(runs):
        timed.append(len(runs))
        return {run.name: 1.0 for run in runs}

    assert tune.tune(SMALL[:1], INTERPRETED, path, counting) and len(timed) == 2
    content = json.loads(path.read_text())
    assert content["entries"][:2] == others and content["note"] == "mine" and len(content["entries"]) == 4
    assert [entry["tiles"] for entry in content["entries"][2:]] == [None, None]
    assert tune.tune(SMALL[:1], INTERPRETED, path, counting) and len(timed) == 2  # known
    assert tune.tune(SMALL[:2], INTERPRETED, path, counting) and len(timed) == 3  # forward in a workload more
    content["entries"][3]["measured"]["versions"]["triton"] = "0"
    path.write_text(json.dumps(content))
    assert tune.tune(SMALL[:1], INTERPRETED, path, counting) and len(timed) == 4  # backward again
    assert len(json.loads(path.read_text())["entries"]) == 4


@interpreted
def test_heuristics_that_changed_and_strange_measurements_are_not_known(tmp_path):
    q, path = question(), tmp_path / "tuning.json"
    found = search.Answer(None, {"norm forward": (1.0, 1.0)}, 1, {})
    good = tune.entry(q, found, INTERPRETED)
    other = {"tile": dict.fromkeys(good["measured"]["heuristics"]["tile"], 1)}
    for change, known in (({}, True), ({"heuristics": other}, False), ({"cases": 7}, False), ({"cases": [[]]}, False)):
        path.unlink(missing_ok=True)
        tune.keep(path, [good | {"measured": good["measured"] | change}])
        assert tune._known(q, path) == known


def test_an_interrupted_search_leaves_what_is_queued():
    jobs = []
    with pytest.raises(KeyboardInterrupt), compiler.workers(1) as pool:
        jobs += [pool.submit(time.sleep, 0.1) for _ in range(1000)]
        raise KeyboardInterrupt
    assert jobs[-1].cancelled()


def test_what_cannot_be_added_to_is_left_alone(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for name in ("bad.json", "bad.json/x", "."):
        with pytest.raises(tune.UserError, match="cannot"):
            tune.keep(tmp_path / name, [])
    assert (tmp_path / "bad.json").read_text() == "{"
    text = '{"schema": 1, "entries": [NaN]}'
    (tmp_path / "nan.json").write_text(text)
    with pytest.raises(tune.UserError, match="cannot write"):
        tune.keep(tmp_path / "nan.json", [])
    assert (tmp_path / "nan.json").read_text() == text


# The command


@interpreted
def test_without_a_gpu_it_says_what_there_is(capsys):
    status, out, err = run(capsys, "tune", "decode-1")
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "there is no GPU to time on; --dry-run prints the candidates" in err


def test_dry_run(capsys, monkeypatch):
    """`--dry-run` prints candidates for a chip that is not here; a process of its own compiles them."""
    original = search.candidates
    monkeypatch.setattr(search, "candidates", lambda q: original(q)[:2])
    status, out, err = run(capsys, "tune", "decode-1", "--dry-run", "--chip", "a100", "--dtype", "float32")
    assert status == 0 and err == ""
    assert out.startswith("forward of H 4096, last axis, 4 bytes: 1x4096 warps 8 stages 1 by heuristics; of decode-1\n")
    assert len([line for line in out.splitlines() if "x4096 warps" in line]) == 3
    assert run(capsys, "tune", "decode-1", "--dry-run", "--seconds", "0")[0] == 3


def test_on_a_gpu(capsys, monkeypatch, tmp_path):
    """`tune` on a simulated GPU takes the process's chip and JLN_TUNING's file, and prints how to export the file.

    It refuses another chip, and says why kernels cannot be compiled.
    """
    gpu = type("Gpu", (), {"platform": "gpu", "device_kind": "NVIDIA H200"})()
    monkeypatch.setattr(tune, "devices", lambda: [gpu])
    monkeypatch.setattr(target, "missing", lambda: None)
    monkeypatch.setattr(target, "target_chip", lambda: Chip("NVIDIA H200", 90, 132))
    asked = []
    monkeypatch.setattr(tune, "tune", lambda workloads, chip, path, *_: asked.append((len(workloads), path)) or True)
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "mine.json"))
    status, out, _ = run(capsys, "tune")
    assert status == 0 and asked == [(len(TUNABLE), tmp_path / "mine.json")]
    assert f"export JLN_TUNING={tmp_path / 'mine.json'}" in out
    status, _, err = run(capsys, "tune", "--chip", "b200")
    assert status == 2 and "this GPU is a h200 and no b200, for which there is only --dry-run" in err
    gpu.device_kind = "NVIDIA B200"  # and JLN_CHIP says h200
    assert "this GPU is a b200 and no h200" in run(capsys, "tune")[2]
    monkeypatch.setattr(target, "missing", lambda: "a reason")
    assert "cannot be compiled: a reason" in run(capsys, "tune", "--chip", "h200")[2]
