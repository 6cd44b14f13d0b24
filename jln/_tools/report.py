"""The command `python -m jln report`: what compiled programs launch, move and keep on a GPU that need not be here."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from unittest import mock

import jax
import typer

import jln
from jln import program
from jln._tools.composed import Unsupported
from jln._tools.console import (
    Column,
    Note,
    Rows,
    UserError,
    document,
    draw_plots,
    for_output,
    known,
    megabytes,
    one_line,
    progress,
    save,
    show,
)
from jln._tools.machine import known_chip_variable, version
from jln._tools.peers import PEERS, Peer
from jln._tools.workload import FORWARD, Workload
from jln._tools.workloads import WORKLOADS
from jln._triton import compiler, target
from jln._triton.chip import CHIPS, named_chip
from jln._triton.target import Recorder, using

# Those whose programs XLA compiles.
COMPARED = ("jln", "jln-norm", "jnp", "flax", "tokamax")
REPORT = "report.json"
KERNELS_ALONE = [name for name in CHIPS if name not in program.CHIPS]


def command(
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this; may be repeated. [default: all]", show_default=False)
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Beside jln only this; may be repeated. [default: all]", show_default=False)
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Each kernel by itself instead; for AMD's chips, too.")
    ] = False,
    chip: Annotated[
        str,
        typer.Option(
            help=f"To compile for: {', '.join(program.CHIPS)}; with --kernels also {', '.join(KERNELS_ALONE)}."
        ),
    ] = "h200",
    output: Annotated[pathlib.Path | None, typer.Option(help=f"A folder, for {REPORT} and plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count the kernels, bytes and temporary memory of compiled programs: facts, with no GPU, and no times.

    Operators at named sizes. Beside jln: for Linears its norm and separate products; plain jnp, Flax's layers, tokamax.
    With --kernels: registers, spills, shared memory and loads of each kernel by itself. Exits with 1 if a program or a
    kernel of jln does not compile.
    """
    known_chip_variable()
    known("chip", [chip], CHIPS if kernels or chip in CHIPS else program.CHIPS)
    for_output(output)
    if kernels:
        if peer:
            raise UserError("--kernels are jln's: without --peer")
        facts, parts = _of_kernels(known("workload", workload or WORKLOADS, WORKLOADS), chip)
    else:
        facts, parts = _of_programs(known("workload", workload or WORKLOADS, WORKLOADS), peer or COMPARED, chip)
    packages = ("jax", "jaxlib", "jax-triton", "triton", "flax", "tokamax")
    facts = {"chip": chip, "versions": {"jln": jln.__version__} | {p: version(p) for p in packages}} | facts
    if output is not None:
        save(found := document(facts, parts), output / REPORT)
        if not kernels:
            draw_plots("draw_report", found, output)
    versions = f"Compiled for {chip} with jax {jax.__version__}, jln {jln.__version__}; MB is 10^6 bytes.\n"
    show(facts, [Note(versions), *parts], as_json)
    raise typer.Exit(1 if any(part.wrong for part in parts) else 0)


# Whole programs

PROGRAMS = {
    "workload": Column("workload"),
    "operator": Column("operator"),
    "shape": Column("x"),
    "features": Column("N", absent="-"),
    "by": Column("by"),
    "kernels": Column("kernels"),
    "bytes": Column("MB", megabytes),
    "bytes_once": Column("once MB", megabytes),
    "ratio": Column("ratio", ".2f"),
    "temporary_bytes": Column("temporary MB", megabytes),
    "held_bytes": Column("held MB", megabytes, absent="-"),
}


def _of_programs(names: Sequence[str], others: Sequence[str], chip: str) -> tuple[dict[str, Any], list[Rows | Note]]:
    """Facts about the workloads' programs, by jln and by others, and what is printed of them."""
    if chip not in program.CHIPS:
        why = "takes a ROCm compiler" if CHIPS[chip].is_amd else f"is none of {', '.join(program.CHIPS)}"
        raise UserError(f"a whole program for {chip} {why}; --kernels prints its kernels")
    peers = ["jln", *(p for p in known("peer", others, COMPARED) if p != "jln")]
    with using(target.Gpu(named_chip(chip))):
        why = target.missing()
    if why is not None:
        raise UserError(f"jln's kernels cannot be compiled: {why}")
    try:
        program.mesh(chip, (1,), ("gpu",))
    except RuntimeError as error:
        raise UserError(str(error)) from None
    skipped = {p: why for p in peers if (why := PEERS[p].missing("gpu")) is not None}
    compared = [PEERS[p] for p in peers if p not in skipped]
    workloads, rows, failed = [], [], {False: [], True: []}
    with progress(len(names) * len(compared)) as begin:
        for w in map(WORKLOADS.__getitem__, names):
            workloads.append(_facts(w))
            for peer in compared:
                begin(f"{w.name} by {peer.name}")
                try:
                    counted = _counted(w, peer, chip)
                except Unsupported as why:
                    skipped[f"{peer.name} for {w.name}"] = str(why)
                except Exception as error:  # another library's trouble with one size must not hide all the others
                    failed[peer.is_ours].append(f"{peer.name} does not compile for {w.name}: {one_line(error)}")
                else:
                    workloads[-1]["programs"][peer.name] = counted
                    size = {"operator": w.operator, "shape": w.shape_text, "features": w.features_text}
                    once = {"bytes_once": w.bytes_once(), "ratio": counted["bytes"] / w.bytes_once()}
                    rows.append({"workload": w.name, "by": peer.name} | size | once | counted)
    directions = {WORKLOADS[n].directions for n in names}
    title = "Forward" if directions == {FORWARD} else "Forward + backward (decode: forward)"
    parts = [
        Rows(rows, f"{title}, results returned", PROGRAMS),
        *(Note(f"Skipped {peer}: {why}.") for peer, why in skipped.items()),
        *(Note(text, wrong=is_ours) for is_ours, texts in failed.items() for text in texts),
    ]
    return {"workloads": workloads, "skipped": skipped, "failures": failed[False] + failed[True]}, parts


def _facts(workload: Workload) -> dict[str, Any]:
    fields = ("name", "operator", "shape", "features", "axis", "dtype", "parameter_dtype", "of_examples", "title")
    facts = {field: getattr(workload, field) for field in (*fields, "directions")}
    return facts | {"bytes_once": workload.bytes_once(), "programs": {}}


def _counted(workload: Workload, peer: Peer, chip: str) -> dict[str, Any]:
    """The counts of a peer's program, with the bytes that its forward pass keeps. Raises Unsupported."""
    is_tokamax, function = peer.name == "tokamax", peer.function(workload)
    with _gpu_for_tokamax(chip) if is_tokamax else contextlib.nullcontext():
        report = program.compile_for(workload.step(function), *workload.step_arguments(), chip=chip)
        held = workload.held_bytes(function)
    if is_tokamax and not any("triton" in k.kind for k in report.kernels):
        raise Unsupported("it falls back to jnp")
    return {
        "kernels": report.launches,
        "bytes": report.bytes_total,
        "bytes_outside_products": report.bytes_total - report.product_bytes,
        "temporary_bytes": report.temp_bytes,
        "held_bytes": held,
    }


@contextlib.contextmanager
def _gpu_for_tokamax(chip: str) -> Iterator[None]:
    """Tell tokamax that the chip is this process's GPU: it asks the GPU for its size, and takes jnp without one."""
    import tokamax  # pyright: ignore[reportMissingImports]

    logging.getLogger("absl").setLevel(logging.ERROR)  # that it has not been tuned for this chip, once a size
    gpus = list(program.mesh(chip, (1,), ("gpu",)).devices.flat)
    with tokamax.config.cross_compile(True), mock.patch.object(jax, "devices", lambda *_: gpus):
        yield


# Each kernel by itself


def _compiled(workload: str, chip: str) -> list[dict[str, Any]] | str:
    """The compiled kernels of the workload's launches on the chip, in order; or a sentence why there is none.

    warps: of a program, on AMD's chips waves. registers: of a thread. spilled, shared: bytes, of a thread and of a
    program. widest_load: bytes that one instruction loads for a thread.
    """
    step = WORKLOADS[workload]
    rows = []
    try:
        with using(recorder := Recorder(CHIPS[chip])):
            traced = jax.jit(step.step(PEERS["jln"].function(step))).trace(*step.step_arguments())
            traced.lower(lowering_platforms=(CHIPS[chip].platform,))
        for launch in recorder.launches:
            resources, tile = compiler.compile_launch(launch), launch.tile
            size = {"rows": tile.rows, "columns": tile.columns, "warps": tile.warps_of(launch.chip)}
            takes = {f: getattr(resources, f) for f in ("registers", "spilled", "shared", "widest_load")}
            rows.append({"workload": workload, "kernel": launch.kernel.fn.__name__} | size | takes)
    except Exception as error:  # said beside the others' numbers, and the command then fails
        return f"{workload} does not compile for {chip}: {one_line(error)}"
    return rows


def _of_kernels(names: Sequence[str], chip: str) -> tuple[dict[str, Any], list[Rows | Note]]:
    """Facts about each kernel that the workloads launch, as Triton compiles it, and the most that any takes."""
    if importlib.util.find_spec("triton") is None:
        raise UserError(f"triton is not installed: {target.INSTALL[named_chip(chip).platform]}")
    rows, failures = [], []
    with progress(len(names)) as begin, compiler.workers() as pool:
        jobs = [(name, pool.submit(_compiled, name, chip)) for name in names]
        for name, job in jobs:
            begin(f"{name} for {chip}")
            outcome = job.result()
            if isinstance(outcome, str):
                failures.append(outcome)
            else:
                rows += outcome
    most = {f: max((row[f] for row in rows), default=0) for f in ("registers", "spilled", "shared")}
    shown = [row | {"tile": f"{row['rows']}x{row['columns']}"} for row in rows]
    shown.append({"workload": "the most of all", "kernel": "", "tile": ""} | most)
    architecture = CHIPS[chip]
    columns = {
        "workload": Column("workload"),
        "kernel": Column("kernel"),
        "tile": Column("tile"),
        "warps": Column("waves" if architecture.is_amd else "warps"),
        "registers": Column("registers"),
        "spilled": Column("spilled"),
        "shared": Column("shared KB", ".1f", 1e3),
        "widest_load": Column("widest load"),
    }
    title = f"Kernels for {chip} ({architecture}), {architecture.shared / 1e3:.1f} KB of shared memory a program"
    parts = [Rows(rows, key="kernels"), Rows(shown, title, columns)]
    return {"failures": failures}, [*parts, *(Note(text, wrong=True) for text in failures)]
