"""Time operators, forward, backward and both, of jln and of what it would replace.

    python benchmarks/bench.py                                  # on the CPU, also the gradient alone
    python benchmarks/bench.py layer-norm-4096 --peers jln,jnp,flax,torch --output FOLDER
    python benchmarks/bench.py --list

Every number is compared with float64 before it is timed. On a GPU times are the device's own, the L2 cold; on the CPU
the wall clock's. With --output the records are kept in FOLDER/results.json, and a run on the same machine goes on from
there. The exit status is 1 if jln is wrong, and 3 if the time ended first.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Sequence
from statistics import geometric_mean
from typing import Annotated, Any

import jax
import typer

import measure
from machine import environment
from peers import PEERS, Peer
from rows import Column, UserError, known, save, show
from workers import OutOfTime, Worker, WorkError
from workloads import ALL, CPU_WORKLOADS, WORKLOADS, Workload

RESULTS = "results.json"
FINISH = 20.0  # seconds for which a workload that was begun may go on
SAME = ("chip", "versions", "commit", "repetitions")  # what a run must have in common with one that it goes on

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
    "tflop_per_s": Column("TFLOP/s", lambda rate: f"{rate:.2f}" if rate else ""),
    "of_ceiling": Column("of ceiling", ".0%"),
    "peak_bytes": Column("peak MB", ".1f", 1e6),
    "kernels": Column("kernels"),
    "note": Column(""),
}


def main(
    workloads: Annotated[list[str] | None, typer.Argument(help="By name. [default: all for the device]")] = None,
    peers: Annotated[str, typer.Option(help="By name, with commas between.")] = ",".join(PEERS),
    repetitions: Annotated[int, typer.Option(min=1, help="Of each program.")] = 30,
    output: Annotated[pathlib.Path | None, typer.Option(help=f"A folder, for {RESULTS} and pictures.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no workload after so many.")] = float("inf"),
    names: Annotated[bool, typer.Option("--list", help="Print the workloads and the peers.")] = False,
) -> None:
    """Time forward, backward and both (on the CPU also the gradient alone), of jln and of what it would replace."""
    if names:
        fields = {"name": Column(""), "operator": Column("operator"), "shape_text": Column("x"), "why": Column("")}
        show("Workloads", [{f: getattr(w, f) for f in fields} for w in ALL.values()], fields)
        show("Peers", [vars(p) for p in PEERS.values()], {"name": Column(""), "what": Column("")})
        return
    end = time.monotonic() + seconds
    # PyTorch shares the card, and memory is read from programs, not from a pool.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    is_gpu = jax.devices()[0].platform == "gpu"
    asked = [PEERS[name] for name in known("peer", peers.split(","), PEERS)]
    chosen = [ALL[name] for name in known("workload", workloads or (WORKLOADS if is_gpu else CPU_WORKLOADS), ALL)]
    where = environment() | {"repetitions": repetitions}
    if not is_gpu and where["load"] > where["cores"] / 2:
        busy = f"this machine's load is {where['load']:.1f}, of {where['cores']} cores"
        typer.echo(f"{busy}, and times are worth little: end what else runs, and wait a minute", err=True)
    path = None if output is None else output / RESULTS
    results = load(path, where) if path is not None and path.exists() else None
    if results is None:
        results = {"environment": where, "ceilings": measure.ceilings(repetitions), "records": []}
    run(results, chosen, asked, path, end, apart=is_gpu)
    print_results(results)
    if path is not None and any(r["status"] == "timed" for r in results["records"]):
        import pictures

        pictures.times(results, "median", path.parent / "speed.svg")
        pictures.times(results, "peak_bytes", path.parent / "memory.svg")
    if unfinished := [w.name for w in chosen if w.name not in done(results, asked)]:
        typer.echo(f"workloads not finished: {len(unfinished)}; run it again with --output", err=True)
    wrong = any(r["peer"] == "jln" and r["status"] in ("wrong", "failed") for r in results["records"])
    raise typer.Exit(1 if wrong else 3 if unfinished else 0)


def load(path: pathlib.Path, where: dict[str, Any] | None = None) -> dict[str, Any]:
    """The results in a file. Raises UserError for any other file, and where it is of another machine than `where`."""
    try:
        results = json.loads(path.read_text())
        before = results["environment"]
        _ = results["ceilings"], [(r["workload"], r["peer"], r["direction"], r["status"]) for r in results["records"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    for name in SAME if where else ():
        if before.get(name) != (now := (where or {})[name]):
            raise UserError(f"cannot go on from {path}: its {name} is {before.get(name)}, this one's {now}")
    return results


def done(results: dict[str, Any], peers: Sequence[Peer]) -> set[str]:
    """The names of the workloads that have a record for each of the peers, and in which nothing of jln's failed.

    What it broke may have failed the others.
    """
    by: dict[str, set[str]] = {}
    for record in results["records"]:
        by.setdefault(record["workload"], set()).add(record["peer"])
    failed = {r["workload"] for r in results["records"] if r["peer"] == "jln" and r["status"] == "failed"}
    return {workload for workload, names in by.items() if {p.name for p in peers} <= names} - failed


def run(
    results: dict[str, Any],
    workloads: Sequence[Workload],
    peers: Sequence[Peer],
    path: pathlib.Path | None,
    end: float,
    apart: bool,
) -> None:
    """Measure the workloads that are not done, each with all its peers before the next.

    apart: whether each framework has a process of its own: on a GPU two profilers cannot share one, and a kernel that
      breaks its process leaves the next workload another.
    """
    groups = [[p for p in peers if p.framework == f] for f in ("jax", "torch")] if apart else [peers]
    finished, repetitions = done(results, peers), results["environment"]["repetitions"]
    with contextlib.ExitStack() as ends:
        workers = [Worker() for _ in groups]
        for worker in workers:
            ends.callback(worker.end)
        for workload in workloads:
            if time.monotonic() > end:
                return
            for worker, group in zip(workers, groups, strict=True):
                if workload.name in finished or not group:
                    continue
                names = [p.name for p in group]
                if apart:
                    records = elsewhere(worker, workload, names, repetitions, end)
                else:
                    records = measure_by_name(workload, names, repetitions)
                new = {(r["workload"], r["peer"]) for r in records}
                results["records"] = [r for r in results["records"] if (r["workload"], r["peer"]) not in new]
                results["records"] += [add_ceiling(r, results["ceilings"]) for r in records]
                if path is not None:
                    save(results, path)


def elsewhere(worker: Worker, workload: Workload, peers: Sequence[str], repetitions: int, end: float) -> Any:
    """The records of peers by another process, or why there are none; none at all out of time."""
    seconds = None if end == float("inf") else max(0.0, end + FINISH - time.monotonic())
    try:
        records = worker.call(measure_by_name, workload, peers, repetitions, seconds=seconds)
    except OutOfTime:
        return []
    except WorkError as error:
        records = [measure.without(workload, PEERS[name], error) for name in peers]
    if any(r["status"] == "failed" for r in records):  # by a kernel, it may be, that broke what follows in its process
        worker.end()
    return records


def measure_by_name(workload: Workload, peers: Sequence[str], repetitions: int) -> list[dict[str, Any]]:
    """Measure in a process of its own, which gets no peers, only their names."""
    return measure.measure(workload, [PEERS[name] for name in peers], repetitions)


def add_ceiling(record: dict[str, Any], ceilings: dict[str, float]) -> dict[str, Any]:
    """The record with the part of the machine's ceiling that it reached: the least possible time over the time taken.

    The least time is that for the bytes or for the arithmetic, whichever is longer.
    """
    if "median" not in record:
        return record
    least = max(record["bytes_once"] / ceilings["bytes_per_s"], record["product_flops"] / ceilings["flop_per_s"])
    return record | {"of_ceiling": least / record["median"]}


def relative(records: Sequence[dict[str, Any]], statistic: str = "median") -> dict[tuple[str, str], dict[str, float]]:
    """The time of each peer over jln's, by (workload, direction), where both were timed."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for r in records:
        if "median" in r:
            times.setdefault((r["workload"], r["direction"]), {})[r["peer"]] = r[statistic]
    ours = {key: by.pop("jln") for key, by in times.items() if "jln" in by}
    return {key: {peer: taken / ours[key] for peer, taken in by.items()} for key, by in times.items() if key in ours}


def print_results(results: dict[str, Any]) -> None:
    """Print a table a workload, and what they come to."""
    where, ceilings, records = results["environment"], results["ceilings"], results["records"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    print(f"{where['chip']}, {where['cores']} cores, load {where['load']:.1f}; {versions}")
    copied, multiplied = ceilings["bytes_per_s"] / 1e9, ceilings["flop_per_s"] / 1e12
    print(f"ceilings, measured in this run: copy {copied:.1f} GB/s, matrix product {multiplied:.2f} TFLOP/s")
    print(f"times: {', '.join(CLOCKS[clock] for clock in sorted({r['clock'] for r in records if 'clock' in r}))}\n")
    times = relative(records)
    for name in dict.fromkeys(r["workload"] for r in records):
        of = [r for r in records if r["workload"] == name]
        ratios = [times.get((name, r["direction"]), {}).get(r["peer"]) for r in of]
        words = ["" if r["status"] == "timed" else f"{r['status']}: {r.get('reason', '')}" for r in of]
        rows = [r | {"of_jln": o, "note": word} for r, o, word in zip(of, ratios, words, strict=True)]
        show(f"{name}: {ALL[name]}. {ALL[name].why}", rows, COLUMNS)
    for direction in ("forward", "backward", "both", "gradient"):
        others = [[by[p] for p in by if PEERS[p].framework == "jax"] for (_, d), by in times.items() if d == direction]
        if fastest := [min(ratios) for ratios in others if ratios]:
            mean = f"{geometric_mean(fastest):.2f} times as long as jln (geometric mean of {len(fastest)} workloads)"
            print(f"{direction}: the fastest JAX peer takes {mean}")
    for reason in dict.fromkeys(r["unprofiled"] for r in records if "unprofiled" in r):
        print(f"times not by the profiler, which failed: {reason}")


if __name__ == "__main__":
    typer.run(main)
