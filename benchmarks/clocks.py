"""Clocks: many programs in one measurement, in shuffled order, so that a drift of the clock is shared.

The profiler's clock (`traced`, and `torch_peers.profiled`) is the device's own, from CUPTI, for a GPU: no dispatch, no
launch queue, and the same kind of number for every peer. A program's time is that in which at least one of
its kernels ran: gaps between kernels, which a larger program would fill, do not count. A buffer larger than any L2 is
written before each run, so inputs come from memory. The wall clock is for the CPU, and for a GPU whose profiler cannot
be read; there it includes the dispatch.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

# Twice the largest L2 there is (B200's, 126 MB).
COLD_BYTES = 2**28
# Seconds of a wall clock's single measurement: a clock read is 1e-7, waking a thread up 1e-5.
WALL_SECONDS = 2e-3
_MARK = "jln_bench_mark"
BATCHES = 7
BATCH_SECONDS = 0.1


@dataclass(frozen=True)
class Run:
    """A program with its arguments, to be timed.

    call: starts it, and returns what `wait` waits for.
    pause: seconds to leave the machine alone afterwards, for threads that spin before they sleep.
    """

    name: str
    call: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    pause: float = 0.0


@dataclass(frozen=True)
class Times:
    """The times of one program.

    kernels: how many it launched, where the clock can tell.
    unprofiled: why they are not the profiler's, which a GPU's should be.
    """

    seconds: tuple[float, ...]
    clock: str
    kernels: int | None = None
    unprofiled: str | None = None

    median = property(lambda self: statistics.median(self.seconds))
    minimum = property(lambda self: min(self.seconds))


def shuffled(runs: Sequence[Run], repetitions: int) -> list[Run]:
    """Each run `repetitions` times, in rounds that have an order of their own each."""
    order = random.Random(0)
    return [run for _ in range(repetitions) for run in order.sample(runs, len(runs))]


def walled(runs: Sequence[Run], repetitions: int) -> dict[str, Times]:
    """Times by the wall clock, dispatch included, with caches as the run before left them."""
    calls = {}
    for run in runs:
        run.wait(run.call())  # compiles
        start = time.perf_counter()
        run.wait(run.call())
        calls[run.name] = max(1, round(WALL_SECONDS / (time.perf_counter() - start)))
        time.sleep(run.pause)
    seconds: dict[str, list[float]] = {run.name: [] for run in runs}
    for run in shuffled(runs, repetitions):
        start = time.perf_counter()
        for _ in range(calls[run.name]):
            run.wait(run.call())
        seconds[run.name].append((time.perf_counter() - start) / calls[run.name])
        time.sleep(run.pause)
    return {name: Times(tuple(taken), "wall") for name, taken in seconds.items()}


def seconds(run: Callable[[], Any]) -> float:
    """The seconds of one call by the wall clock, the dispatch of a call hidden behind the run of the one before.

    The best of several batches of calls, each batch waited for once. The caches are as the last call left them.
    """
    jax.block_until_ready(run())  # compiles
    start = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(1, round(BATCH_SECONDS / (time.perf_counter() - start)))

    def batch() -> float:
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)][-1])
        return (time.perf_counter() - start) / calls

    return min(batch() for _ in range(BATCHES))


@functools.cache
def _marker(size: int) -> Callable[[], jax.Array]:
    """A program that reads and writes a buffer of that size: a trace shows it between two timed programs."""

    def jln_bench_mark(a):
        return a + 1

    buffer = jnp.zeros((size // 4,), jnp.int32)
    compiled = jax.jit(jln_bench_mark).lower(buffer).compile()
    return lambda: compiled(buffer)


def traced(runs: Sequence[Run], repetitions: int, cold_bytes: int = COLD_BYTES) -> dict[str, Times]:
    """Times by JAX's profiler, with a buffer of `cold_bytes` written before each run.

    Every run is a JAX program compiled under its `name`. Raises TraceError where the trace lacks one.
    """
    mark = _marker(cold_bytes)
    for run in runs:
        run.wait(run.call())
    jax.block_until_ready(mark())
    order = shuffled(runs, repetitions)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1  # on the CPU, the programs' own events are of this level
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for run in order:
                mark()
                run.wait(run.call())
            jax.block_until_ready(mark())
        finally:
            jax.profiler.stop_trace()
        groups = between_marks(jax_events(pathlib.Path(folder)), f"jit_{_MARK}")
    return _assigned(order, groups[:-1])


def _assigned(order: Sequence[Run], groups: Sequence[Sequence[Event]]) -> dict[str, Times]:
    if len(groups) != len(order):
        raise TraceError(f"the trace shows {len(groups)} runs of {len(order)}")
    by_run: dict[str, list[Sequence[Event]]] = {run.name: [] for run in order}
    for run, events in zip(order, groups, strict=True):
        programs = {event.program for event in events}
        if not programs or programs - {"", f"jit_{run.name}"}:  # copies may lack theirs
            raise TraceError(f"the trace shows {sorted({e.program for e in events})} where {run.name} ran")
        by_run[run.name].append(events)
    return {name: program_times(events) for name, events in by_run.items()}


def program_times(runs: Sequence[Sequence[Event]]) -> Times:
    """The times of one program from the events of each of its runs on the device."""
    return Times(tuple(map(busy_seconds, runs)), "device", statistics.mode(map(len, runs)))


class TraceError(RuntimeError):
    """The error of a trace that does not show what was asked for."""


@dataclass(frozen=True)
class Event:
    """One kernel or copy; times are in nanoseconds. program: its HLO module, "" where the trace does not say."""

    name: str
    program: str
    start: float
    end: float


def jax_events(folder: pathlib.Path) -> list[Event]:
    """The events that `jax.profiler` saw on a GPU or, where the trace has no GPU, in the CPU's threads; by start."""
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise TraceError("the profiler wrote no trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about how the reader's own types are named
        planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
        gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
        events = []
        for plane in gpus or planes:
            for line in plane.lines:
                # Other lines of a GPU repeat its streams' events, by module and by operation.
                if gpus and not (line.name or "").startswith("Stream"):
                    continue
                for event in line.events:
                    program = str(dict(event.stats).get("hlo_module", "")).split("(")[0]
                    if gpus or program:
                        events.append(Event(event.name, program, event.start_ns, event.start_ns + event.duration_ns))
    return sorted(events, key=lambda event: event.start)


def between_marks(events: Iterable[Event], mark: str) -> list[list[Event]]:
    """Lists of events: those after each run of the program `mark`, up to the next run of it."""
    groups: list[list[Event]] = []
    marking = False
    for event in events:
        if event.program == mark:
            if not marking:
                groups.append([])
            marking = True
        elif groups:
            groups[-1].append(event)
            marking = False
    return groups


def torch_events(text: str, window: str) -> list[list[Event]]:
    """A GPU's events in each of the windows of `torch.profiler.record_function` so named, in their order.

    text: the trace as JSON, as `export_chrome_trace` writes it; its times are in microseconds.
    """
    entries = [e for e in json.loads(text)["traceEvents"] if e.get("ph") == "X"]
    device = [e for e in entries if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    windows = [e for e in entries if e.get("cat") == "user_annotation" and e["name"].startswith(window)]
    return [
        [
            Event(e["name"], w["name"], e["ts"] * 1e3, (e["ts"] + e["dur"]) * 1e3)
            for e in sorted(device, key=lambda e: e["ts"])
            if w["ts"] <= e["ts"] < w["ts"] + w["dur"]
        ]
        for w in sorted(windows, key=lambda w: w["ts"])
    ]


def busy_seconds(events: Sequence[Event]) -> float:
    """The seconds in which at least one of the events was running."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total * 1e-9
