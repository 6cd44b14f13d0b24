"""The command `python -m jln bench`, which times the operators beside what they would replace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import typer

from jln._tools import measure
from jln._tools import results as found_in
from jln._tools.console import (
    Column,
    Note,
    Rows,
    UserError,
    draw_plots,
    for_output,
    known,
    print_note,
    progress,
    save,
    show,
)
from jln._tools.machine import described, devices, environment, known_chip_variable, named
from jln._tools.measure import Procedure, without
from jln._tools.peers import PEERS, Peer
from jln._tools.workers import OutOfTime, Worker, WorkError
from jln._tools.workloads import ALL, BLOCKS, CPU_WORKLOADS, WORKLOADS, Workload

RESULTS = "results.json"
FINISH = 20.0  # seconds for which a workload that was begun may go on


def command(
    workloads: Annotated[
        list[str] | None, typer.Argument(help="By name; --list has them. [default: all for the device]")
    ] = None,
    peers: Annotated[str | None, typer.Option(help=f"Of {', '.join(PEERS)}; commas between. [default: all]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu, gpu:1. [default: the first]")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each program.")] = 30,
    warm: Annotated[bool, typer.Option("--warm", help="Leave a GPU's L2 as the last run left it.")] = False,
    even_wrong: Annotated[bool, typer.Option("--even-wrong", help="Time peers that are wrong, too.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the data.")] = 0,
    output: Annotated[pathlib.Path | None, typer.Option(help=f"A folder, for {RESULTS} and plots.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the workloads that --output has.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0, help="Begin no workload after so many; exit with 3.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the workloads and the peers.")] = False,
) -> None:
    """Time forward, backward and both (on the CPU also the gradient alone), of jln and of what it would replace.

    Every number is compared with float64 before anything is timed: a peer that is wrong is reported so, and not timed.
    On a GPU times are the device's own, the L2 cold; on the CPU the wall clock's. Exits with 1 if jln is wrong.
    """
    if names:
        _list()
        return
    if resume and output is None:
        raise UserError("--resume needs --output: the folder whose results to keep")
    known_chip_variable()
    for_output(output)
    started = time.monotonic()
    # PyTorch shares the card, and memory is read from programs, not from a pool.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    chosen_peers = _peers(peers)
    chosen = devices(device)[0]
    chosen_workloads = _workloads(workloads, chosen.platform)
    procedure = Procedure(repetitions, cold=not warm, seed=seed, even_wrong=even_wrong)
    with jax.default_device(chosen):
        results = _run(chosen_workloads, chosen_peers, chosen, procedure, output, resume, seconds, started)
    if output is not None:
        draw_plots("draw_bench", results, output)
    show(results, _parts(results, described(chosen)), as_json)
    unfinished = [w.name for w in chosen_workloads if w.name not in _done(results, chosen_peers)]
    if unfinished:
        how = "with --resume" if output is not None else "with --output, and from then on with --resume"
        print_note(f"workloads not finished: {len(unfinished)}; run it again {how}", wrong=True, stderr=True)
    raise typer.Exit(1 if found_in.ours_is_wrong(results["records"]) else 3 if unfinished else 0)


def _list() -> None:
    titles = {"name": "", "operator": "operator", "shape_text": "x", "dtype": "dtype", "why": ""}
    rows = [{field: getattr(w, field) for field in titles} for w in ALL.values()]
    Rows(rows, "Workloads", {field: Column(title) for field, title in titles.items()}).show()
    peers = [{"name": p.name, "what": p.what} for p in PEERS.values()]
    Rows(peers, "Peers", {"name": Column(""), "what": Column("")}).show()


def _peers(text: str | None) -> list[Peer]:
    names = list(PEERS) if text is None else [name.strip() for name in text.split(",")]
    return [PEERS[name] for name in known("peer", names, PEERS)]


def _workloads(names: Sequence[str] | None, platform: str) -> list[Workload]:
    default = CPU_WORKLOADS if platform == "cpu" else {**WORKLOADS, **BLOCKS}
    hint = "`python -m jln bench --list` prints them"
    return [ALL[name] for name in known("workload", names or default, ALL, hint)]


def _done(results: dict[str, Any], peers: Sequence[Peer]) -> set[str]:
    """The names of the workloads that have a record for each of the peers, and in which nothing of jln's failed.

    What it broke may have failed the others.
    """
    by: dict[str, set[str]] = {}
    for record in results["records"]:
        by.setdefault(record["workload"], set()).add(record["peer"])
    for record in results["records"]:
        if record["peer"] == "jln" and record["status"] == "failed":
            by[record["workload"]].clear()
    return {workload for workload, names in by.items() if {p.name for p in peers} <= names}


def _run(workloads, peers, device, procedure, output, resume, seconds, started) -> dict[str, Any]:
    path = output / RESULTS if output is not None else None
    where = environment(device) | dataclasses.asdict(procedure)
    results = _resumed(path, where) if resume and path is not None and path.exists() else None
    # On a GPU each framework has a process of its own: two profilers cannot share one, and a kernel that breaks its
    # process leaves the next workload another.
    is_gpu = device.platform == "gpu"
    groups = [[p for p in peers if p.framework == f] for f in ("jax", "torch")] if is_gpu else [peers]
    end = float("inf") if seconds is None else started + seconds
    with progress(len(workloads) + 1) as begin, contextlib.ExitStack() as ends:
        workers = [Worker() for _ in groups]
        for worker in workers:
            ends.callback(worker.end)
        begin("what the machine can do")
        if results is None:
            ceilings = measure.ceilings(device.platform, procedure)
            results = {"environment": where, "ceilings": ceilings, "records": []}
        done = _done(results, peers)
        for workload in workloads:
            begin(workload.name)
            if time.monotonic() > end:
                break
            if workload.name in done:
                continue
            for worker, group in zip(workers, groups, strict=True):
                if not group:
                    continue
                if is_gpu:
                    records = _elsewhere(worker, workload, group, device, procedure, end)
                else:
                    records = measure.measure(workload, group, device.platform, procedure)
                _keep(results, records, path)
    return results


def _resumed(path: pathlib.Path, where: dict[str, Any]) -> dict[str, Any]:
    try:
        results = found_in.load(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot resume {path}: {error}") from None
    for name in ("chip", "versions", "commit", "tuning", "repetitions", "cold", "seed", "even_wrong"):
        if (before := results["environment"].get(name)) != where[name]:
            raise UserError(f"cannot resume {path}: its {name} is {before}, this one's {where[name]}")
    for kind, among in (("workload", ALL), ("peer", PEERS)):
        if gone := {record[kind] for record in results["records"]} - among.keys():
            raise UserError(f"cannot resume {path}: no {kind} is named {' or '.join(sorted(gone))} any more")
    return results


def _keep(results: dict[str, Any], records: list[dict[str, Any]], path: pathlib.Path | None) -> None:
    new = {(r["workload"], r["peer"]) for r in records}
    old = [r for r in results["records"] if (r["workload"], r["peer"]) not in new]
    results["records"] = old + [found_in.add_ceiling(r, results["ceilings"]) for r in records]
    if path is not None:
        save(results, path)


def _elsewhere(worker, workload, peers, device, procedure, end) -> list[dict[str, Any]]:
    """The records of peers by another process, which has time until FINISH behind `end`, or why there are none.

    Out of time there is no record, and the workload is not done.
    """
    seconds = None if end == float("inf") else max(0.0, end + FINISH - time.monotonic())
    names = [p.name for p in peers]
    try:
        records = worker.call(_measure_by_name, workload, names, named(device), procedure, seconds=seconds)
    except OutOfTime:
        return []
    except WorkError as error:
        records = [without(workload, p, "failed", str(error)) for p in peers]
    if any(r["status"] == "failed" for r in records):  # by a kernel, it may be, that broke what follows in its process
        worker.end()
    return records


def _measure_by_name(workload: Workload, peers: Sequence[str], device: str, procedure: Procedure) -> Any:
    """Measure in a process of its own, which gets no peers and no devices, only their names."""
    chosen = devices(device)[0]
    with jax.default_device(chosen):
        return measure.measure(workload, [PEERS[name] for name in peers], chosen.platform, procedure)


CLOCKS = {
    "device": "the device's own, by its profiler",
    "events": "the GPU's events around a call, gaps between its kernels included",
    "wall": "wall clock, dispatch included",
}
COLUMNS = {
    "peer": Column("peer"),
    "direction": Column("direction"),
    "median": Column("median us", ".1f", 1e-6),
    "minimum": Column("minimum us", ".1f", 1e-6),
    "of_jln": Column("of jln's", ".2f"),
    "gb_per_s": Column("GB/s", ".1f"),
    "tflop_per_s": Column("TFLOP/s", ".2f"),
    "of_ceiling": Column("of ceiling", ".0%"),
    "peak_bytes": Column("peak MB", ".1f", 1e6),
    "temporary_bytes": Column("temporary MB", ".1f", 1e6),
    "kernels": Column("kernels"),
    "note": Column(""),
}


def _parts(results: dict[str, Any], device: str) -> list[Rows | Note]:
    where, ceilings = results["environment"], results["ceilings"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    copied, multiplied = ceilings["bytes_per_s"] / 1e9, ceilings["flop_per_s"] / 1e12
    rates = f"copy {copied:.1f} GB/s, matrix product {multiplied:.2f} TFLOP/s"
    parts: list[Rows | Note] = [
        Note(f"{device}: {where['chip']}, {where['cores']} cores, load {where['load']:.1f}; {versions}"),
        Note(f"ceilings, measured in this run: {rates}"),
    ]
    clocks = sorted({r["clock"] for r in results["records"] if "clock" in r})
    cache = "L2 cold" if where["platform"] == "gpu" and where["cold"] else "caches as the run before left them"
    if clocks:
        parts.append(Note(f"times: {', '.join(CLOCKS[clock] for clock in clocks)}; {cache}"))
    unprofiled = dict.fromkeys(r["unprofiled"] for r in results["records"] if "unprofiled" in r)
    parts += [Note(f"times not by the profiler, which failed: {reason}", wrong=True) for reason in unprofiled]
    times = found_in.relative(results["records"])
    rows = []
    for r in results["records"]:
        word = {"timed": "", "wrong": "WRONG: "}.get(r["status"], f"{r['status']}: ")
        of_jln = times.get((r["workload"], r["direction"]), {}).get(r["peer"])
        w = ALL[r["workload"]]
        more = {"of_jln": of_jln, "note": word + r.get("reason", ""), "title": f"{w.name}: {w}. {w.why}"}
        rows.append(r | more)
    return [*parts, Rows(rows, "{title}", COLUMNS), *map(Note, found_in.summary(results["records"]))]
