"""Profiler traces as lists of what ran on the device, and when.

A kernel's time is the device's own account of it (from CUPTI, through the profilers of JAX and of PyTorch): no
dispatch, no launch queue, and the same kind of number for every peer. A program's time is the time in which at least
one of its kernels ran: gaps between kernels, which a larger program would fill, do not count.
"""

from __future__ import annotations

import json
import pathlib
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax


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
    """A GPU's events in each of the windows whose name starts with `window`, in the order of the windows.

    A window is a `torch.profiler.record_function`.

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
