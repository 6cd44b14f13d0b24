"""Tests of the benchmark's clocks: what is read from a trace, and in which order programs run."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("typer")

import clocks
import measure
from clocks import Run

pytestmark = pytest.mark.usefixtures("promoted_ranks")


def program(name, size):
    """Return a `Run` of a compiled program that multiplies matrices."""
    x = jnp.ones((size, size), "float32")
    compiled = measure._lowered(name, lambda x: x @ x, [x]).compile()
    return Run(name, lambda: compiled(x))


def test_each_program_of_a_trace_gets_its_own_time():
    """The profiler, by which a GPU is timed, tells two programs' times on the CPU's threads apart."""
    times = clocks.traced([program("small", 8), program("large", 400)], 5, cold_bytes=2**20)
    assert {name: len(t.seconds) for name, t in times.items()} == {"small": 5, "large": 5}
    assert times["large"].clock == "device" and times["large"].kernels >= 1
    assert times["small"].minimum > 0 and 10 * times["small"].minimum < times["large"].minimum  # 125,000 times the work


def test_a_run_that_the_trace_lacks_is_an_error(monkeypatch):
    other = program("other", 8)
    with pytest.raises(clocks.TraceError, match=r"\['jit_other'\] where mine ran"):
        clocks.traced([Run("mine", other.call)], 2, cold_bytes=2**20)
    monkeypatch.setattr(clocks, "jax_events", lambda folder: [])
    with pytest.raises(clocks.TraceError, match="0 runs of 2"):
        clocks.traced([other], 2, cold_bytes=2**20)


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
    monkeypatch.setattr(clocks.jax.profiler, "ProfileData", read)
    with pytest.raises(clocks.TraceError, match="wrote no trace"):
        clocks.jax_events(tmp_path)
    (tmp_path / "a.xplane.pb").touch()
    assert clocks.jax_events(tmp_path) == [clocks.Event("k1", "", 1.0, 4.0), clocks.Event("k2", "jit_f", 5.0, 7.0)]


def test_marks_part_the_events_and_time_is_counted_once_where_kernels_overlap():
    events = [clocks.Event(n, n, i, i + 1) for i, n in enumerate(["early", "mark", "mark", "a", "b", "mark", "c"])]
    assert [[e.name for e in group] for group in clocks.between_marks(events, "mark")] == [["a", "b"], ["c"]]
    overlapping = [clocks.Event("", "", *span) for span in ((0, 10), (5, 20), (7, 8), (100, 101))]
    assert clocks.busy_seconds(overlapping) == pytest.approx(21e-9)
    assert clocks.busy_seconds([]) == 0.0


def test_every_round_has_every_program_in_an_order_of_its_own():
    runs = [Run(name, None) for name in "abcdef"]
    rounds = np.reshape([run.name for run in clocks.shuffled(runs, 20)], (20, 6))
    assert (np.sort(rounds) == list("abcdef")).all() and len({tuple(r) for r in rounds}) > 10
