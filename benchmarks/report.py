"""Count what compiled programs launch, move and keep on a GPU that need not be here: facts, and no times.

    python benchmarks/report.py layer-norm-4096                        # all workloads without a name; takes minutes
    python benchmarks/report.py router --kernels --chip mi300x         # each kernel by itself; for AMD's chips, too

Beside jln: for Linears its norm and separate products; plain jnp, Flax's layers, tokamax, if they are installed. With
--kernels: registers and spilled bytes of a thread, shared memory of a program, bytes that one instruction loads. The
exit status is 1 if a program or a kernel of jln does not compile.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from unittest import mock

import jax
import typer

import compiler
import program
from jln._triton.chip import CHIPS
from jln._triton.target import Recorder, using
from machine import versions
from peers import PEERS, Peer, Unsupported
from rows import Column, known, megabytes, one_line, save, show
from workloads import WORKLOADS, Workload

COMPARED = ("jln", "jln-norm", "jnp", "flax", "tokamax")  # those whose programs XLA compiles
PROGRAMS = {
    "workload": Column("workload"),
    "operator": Column("operator"),
    "x": Column("x"),
    "features": Column("N"),
    "by": Column("by"),
    "kernels": Column("kernels"),
    "bytes": Column("MB", megabytes),
    "bytes_once": Column("once MB", megabytes),
    "ratio": Column("ratio", ".2f"),
    "temporary_bytes": Column("temporary MB", megabytes),
    "held_bytes": Column("held MB", megabytes),
}
KERNELS = {
    **{field: Column(field) for field in ("workload", "kernel", "tile", "warps", "registers", "spilled")},
    "shared": Column("shared KB", ".1f", 1e3),
    "widest_load": Column("widest load"),
}
FACTS = ("name", "operator", "title", "shape", "features", "dtype", "directions")


def main(
    workloads: Annotated[list[str] | None, typer.Argument(help="By name. [default: all]")] = None,
    peers: Annotated[str, typer.Option(help="By name, with commas between.")] = ",".join(COMPARED),
    kernels: Annotated[bool, typer.Option("--kernels", help="Each kernel by itself instead.")] = False,
    chip: Annotated[str, typer.Option(help=f"Of {', '.join(program.CHIPS)}; with --kernels any.")] = "h200",
    output: Annotated[pathlib.Path | None, typer.Option(help="A file, for all of it as JSON.")] = None,
) -> None:
    """Count the kernels, bytes and memory of compiled programs of operators at named sizes."""
    known("chip", [chip], CHIPS if kernels else program.CHIPS)
    chosen = [WORKLOADS[name] for name in known("workload", workloads or WORKLOADS, WORKLOADS)]
    print(f"Compiled for {chip}; MB is 10^6 bytes. {', '.join(f'{n} {v}' for n, v in versions().items() if v)}\n")
    if kernels:
        found, failed = compiled_kernels(chosen, chip)
    else:
        names = known("peer", ["jln", *peers.split(",")], COMPARED)
        found, failed = compiled_programs(chosen, [PEERS[name] for name in names], chip)
    if output is not None:
        save({"chip": chip, "versions": versions()} | found, output)
    raise typer.Exit(1 if failed else 0)


def compiled_programs(workloads: Sequence[Workload], peers: Sequence[Peer], chip: str) -> tuple[dict[str, Any], bool]:
    """Facts about the workloads' programs, by jln and by others, which are printed; and whether any of jln's failed."""
    skipped, failures = {p.name: why for p in peers if (why := p.missing("gpu"))}, {}
    facts, rows = [], []
    for w in workloads:
        facts.append({field: getattr(w, field) for field in FACTS} | {"bytes_once": w.bytes_once(), "programs": {}})
        for p in peers:
            if p.name in skipped:
                continue
            try:
                facts[-1]["programs"][p.name] = counts = counted(w, p, chip)
            except Unsupported as why:
                skipped[f"{p.name} for {w.name}"] = str(why)
            except Exception as error:  # another library's trouble with one size must not hide all the others
                failures[p.name, w.name] = one_line(error)
            else:
                size = {"workload": w.name, "operator": w.operator, "x": w.shape_text, "features": w.features_text}
                once = {"bytes_once": w.bytes_once(), "ratio": counts["bytes"] / w.bytes_once()}
                rows.append(size | once | counts | {"by": p.name})
    forward_alone = all(len(w.directions) == 1 for w in workloads)
    title = "Forward" if forward_alone else "Forward + backward (decode: forward)"
    show(f"{title}, results returned", rows, PROGRAMS)
    failed = [f"{name} does not compile for {workload}: {why}" for (name, workload), why in failures.items()]
    print(*(f"Skipped {name}: {why}." for name, why in skipped.items()), *failed, sep="\n")
    ours = any(PEERS[name].is_ours for name, _ in failures)
    return {"workloads": facts, "skipped": skipped, "failures": failed}, ours


def counted(workload: Workload, peer: Peer, chip: str) -> dict[str, Any]:
    """The counts of a peer's program, with the bytes that its forward pass keeps. Raises Unsupported."""
    is_tokamax, function = peer.name == "tokamax", peer.function(workload)
    with gpu_for_tokamax(chip) if is_tokamax else contextlib.nullcontext():
        found = program.compile_for(workload.step(function), *workload.step_arguments(), chip=chip)
        held = workload.held_bytes(function)
    if is_tokamax and not any("triton" in k.kind for k in found.kernels):
        raise Unsupported("it falls back to jnp")
    return {
        "kernels": found.launches,
        "bytes": found.bytes_total,
        "bytes_outside_products": found.bytes_total - found.product_bytes,
        "temporary_bytes": found.temp_bytes,
        "held_bytes": held,
    }


@contextlib.contextmanager
def gpu_for_tokamax(chip: str) -> Iterator[None]:
    """Tell tokamax that the chip is this process's GPU: it asks the GPU for its size, and takes jnp without one."""
    import tokamax  # pyright: ignore[reportMissingImports]

    logging.getLogger("absl").setLevel(logging.ERROR)  # that it has not been tuned for this chip, once a size
    gpus = list(program.mesh(chip, (1,), ("gpu",)).devices.flat)
    with tokamax.config.cross_compile(True), mock.patch.object(jax, "devices", lambda *_: gpus):
        yield


def compiled_kernels(workloads: Sequence[Workload], chip: str) -> tuple[dict[str, Any], bool]:
    """Facts about each kernel that the workloads launch, printed, with the most that any takes."""
    rows: list[dict[str, Any]] = []
    failures = []
    with compiler.workers() as pool:
        for workload, job in [(w, pool.submit(compiled, w, chip)) for w in workloads]:
            try:
                rows += job.result()
            except Exception as error:  # said beside the others' numbers
                failures.append(f"{workload.name} does not compile for {chip}: {one_line(error)}")
    most = {field: max((row[field] for row in rows), default=0) for field in ("registers", "spilled", "shared")}
    title = f"Kernels for {chip} ({CHIPS[chip]}), {CHIPS[chip].shared / 1e3:.1f} KB of shared memory a program"
    show(title, [*rows, {"workload": "the most of all", "kernel": "", "tile": ""} | most], KERNELS)
    print(*failures, sep="\n")
    return {"kernels": rows, "failures": failures}, bool(failures)


def compiled(workload: Workload, chip: str) -> list[dict[str, Any]]:
    """The compiled kernels of the workload's launches on the chip, in order; warps are waves on AMD's chips."""
    with using(recorder := Recorder(CHIPS[chip])):
        traced = jax.jit(workload.step(PEERS["jln"].function(workload))).trace(*workload.step_arguments())
        traced.lower(lowering_platforms=(CHIPS[chip].platform,))
    rows = []
    for launch in recorder.launches:
        takes, tile = compiler.compile_launch(launch), launch.tile
        size = {"tile": f"{tile.rows}x{tile.columns}", "warps": tile.warps_of(launch.chip)}
        size |= {field: getattr(takes, field) for field in ("registers", "spilled", "shared", "widest_load")}
        rows.append({"workload": workload.name, "kernel": launch.kernel.fn.__name__} | size)
    return rows


if __name__ == "__main__":
    typer.run(main)
