"""The command `python -m jln report`: what compiled programs launch, move and keep on a GPU that need not be here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn
from unittest import mock

import jax
import typer

import jln
from jln import program
from jln._tools.console import (
    UserError,
    draw_plots,
    for_output,
    known,
    megabytes,
    print_json,
    print_note,
    print_table,
    progress,
    save,
)
from jln._tools.kernels import compile_all, print_kernels
from jln._tools.parts import Unsupported, one_line, version
from jln._tools.peers import PEERS
from jln._tools.workloads import WORKLOADS, Workload
from jln._triton import target
from jln._triton.chip import CHIPS, named_chip

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
    known("chip", [chip], CHIPS if kernels or chip in CHIPS else program.CHIPS)
    for_output(output)
    if kernels:
        if peer:
            raise UserError("--kernels are jln's: without --peer")
        _report_kernels(known("workload", workload or WORKLOADS, WORKLOADS), chip, output, as_json)
    if chip not in program.CHIPS:
        why = "takes a ROCm compiler" if CHIPS[chip].is_amd else f"is none of {', '.join(program.CHIPS)}"
        raise UserError(f"a whole program for {chip} {why}; --kernels prints its kernels")
    names = known("workload", workload or WORKLOADS, WORKLOADS)
    peers = ["jln", *(p for p in known("peer", peer or COMPARED, COMPARED) if p != "jln")]
    with target.using(target.Gpu(named_chip(chip))):
        why = target.missing()
    if why is not None:
        raise UserError(f"jln's kernels cannot be compiled: {why}")
    try:
        program.mesh(chip, (1,), ("gpu",))
    except RuntimeError as error:
        raise UserError(str(error)) from None
    skipped = {p: why for p in peers if (why := PEERS[p].missing("gpu")) is not None}
    compared = [p for p in peers if p not in skipped]
    workloads = [WORKLOADS[n] for n in names]

    failures: list[Failure] = []
    jobs = [(w, [p for p in compared if w.is_linear or PEERS[p].of_norms]) for w in workloads]
    with progress(sum(len(by) for _, by in jobs)) as begin:
        count = _Counting(chip, begin, failures)
        sizes = [(w, count.workload(w, by)) for w, by in jobs]
    document = _json(chip, sizes, skipped, failures, count.held)
    if output is not None:
        save(document, output / REPORT)
        draw_plots("draw_report", document, output)
    if as_json:
        print_json(document)
    else:
        _print(chip, sizes, skipped, failures, count.held)
    raise typer.Exit(1 if any(f.is_ours for f in failures) else 0)


def _report_kernels(names: Sequence[str], chip: str, output: pathlib.Path | None, as_json: bool) -> NoReturn:
    if importlib.util.find_spec("triton") is None:
        raise UserError(f"triton is not installed: {target.INSTALL[named_chip(chip).platform]}")
    with progress(len(names)) as begin:
        kernels, failures = compile_all(names, chip, begin)
    rows = [dataclasses.asdict(kernel) for kernel in kernels]
    document = _versions(chip) | {"kernels": rows, "failures": failures}
    if output is not None:
        save(document, output / REPORT)
    if as_json:
        print_json(document)
    else:
        _print_versions(chip)
        print_kernels(kernels, chip)
        _print_failures([Failure(text, is_ours=True) for text in failures])
    raise typer.Exit(1 if failures else 0)


class Failure(NamedTuple):
    """The failure of a program to compile. is_ours: the program is this library's, all of which must compile."""

    text: str
    is_ours: bool


class _Counting:
    """Compiles programs, tells `begin` before each, and collects in `failures` those that do not compile.

    held: by workload and peer, what `jax.vjp` hands from forward to backward.
    """

    def __init__(self, chip: str, begin: Callable[[str], None], failures: list[Failure]):
        self._chip, self._begin, self._failures = chip, begin, failures
        self.held: dict[tuple[str, str], int | None] = {}

    def workload(self, workload: Workload, peers: list[str]) -> dict[str, program.CompiledProgram]:
        reports = {}
        for peer in peers:
            self._begin(f"{workload.name} by {peer}")
            try:
                function = PEERS[peer].function(workload)
                with _gpu_for_tokamax(self._chip) if peer == "tokamax" else contextlib.nullcontext():
                    report = program.compile_for(workload.step(function), *workload.step_arguments(), chip=self._chip)
                    self.held[workload.name, peer] = workload.held_bytes(function)
                if peer == "tokamax" and not any("triton" in k.kind for k in report.kernels):
                    raise Unsupported("it falls back to jnp")
                reports[peer] = report
            except Unsupported as why:
                self._failures.append(Failure(f"{peer} has no {workload.name}: {why}", PEERS[peer].is_ours))
            except Exception as error:  # another library's trouble with one size must not hide all the others
                self._fail(peer, workload.name, error, PEERS[peer].is_ours)
        return reports

    def _fail(self, whose: str, what: str, error: Exception, is_ours: bool) -> None:
        self._failures.append(Failure(f"{whose} does not compile for {what}: {one_line(error)}", is_ours))


@contextlib.contextmanager
def _gpu_for_tokamax(chip: str) -> Iterator[None]:
    """Tell tokamax that the chip is this process's GPU: it asks the GPU for its size, and takes jnp without one."""
    import tokamax  # pyright: ignore[reportMissingImports]

    logging.getLogger("absl").setLevel(logging.ERROR)  # that it has not been tuned for this chip, once a size
    gpus = list(program.mesh(chip, (1,), ("gpu",)).devices.flat)
    with tokamax.config.cross_compile(True), mock.patch.object(jax, "devices", lambda *_: gpus):
        yield


def _all_facts(reports: dict[str, program.CompiledProgram]) -> dict[str, dict[str, int]]:
    return {
        name: {
            "kernels": report.launches,
            "bytes": report.bytes_total,
            "bytes_outside_products": report.bytes_total - report.product_bytes,
            "temporary_bytes": report.temp_bytes,
        }
        for name, report in reports.items()
    }


def _versions(chip: str) -> dict[str, Any]:
    packages = ("jax", "jaxlib", "jax-triton", "triton", "flax", "tokamax")
    return {"chip": chip, "versions": {"jln": jln.__version__} | {p: version(p) for p in packages}}


def _print_versions(chip: str) -> None:
    print_note(f"Compiled for {chip} with jax {jax.__version__}, jln {jln.__version__}; MB is 10^6 bytes.\n")


def _print_failures(failures: Sequence[Failure]) -> None:
    for failure in failures:
        print_note(failure.text, wrong=failure.is_ours)


def _json(chip, sizes, skipped, failures, held) -> dict[str, Any]:
    programs = {
        w.name: {by: facts | {"held_bytes": held[w.name, by]} for by, facts in _all_facts(reports).items()}
        for w, reports in sizes
    }
    return _versions(chip) | {
        "workloads": [
            {
                f: getattr(w, f)
                for f in ("name", "operator", "shape", "features", "axis", "dtype", "parameter_dtype", "of_examples")
            }
            | {"title": w.entry.title, "directions": w.directions, "bytes_once": w.bytes_once()}
            | {"programs": programs[w.name]}
            for w, _ in sizes
        ],
        "skipped": skipped,
        "failures": [failure.text for failure in failures],
    }


def _print(chip, sizes, skipped, failures, held) -> None:
    _print_versions(chip)
    if sizes:
        header = ("workload", "operator", "x", "N", "by", "kernels", "MB", "once MB", "ratio", "temporary MB")
        rows = [row for w, reports in sizes for row in _rows(w, reports, held)]
        print_table(_title(sizes), (*header, "held MB"), rows, left=(0, 1, 2, 4))
    for peer, why in skipped.items():
        print_note(f"Skipped {peer}: {why}.")
    _print_failures(failures)


def _title(sizes: list[tuple[Workload, Any]]) -> str:
    only = {w.directions for w, _ in sizes}
    return f"{'Forward' if only == {('forward',)} else 'Forward + backward (decode: forward)'}, results returned"


def _rows(workload: Workload, reports: dict[str, program.CompiledProgram], held) -> list[tuple[str, ...]]:
    once = workload.bytes_once()
    return [
        (
            workload.name,
            workload.operator,
            workload.shape_text,
            workload.features_text or "-",
            peer,
            str(report.launches),
            megabytes(report.bytes_total),
            megabytes(once),
            f"{report.bytes_total / once:.2f}",
            megabytes(report.temp_bytes),
            "-" if (kept := held[workload.name, peer]) is None else megabytes(kept),
        )
        for peer, report in reports.items()
    ]
