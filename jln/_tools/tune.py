"""The command `python -m jln tune`, which finds the fastest tiles on this chip."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

import jax
import typer

import jln
from jln._tools import search
from jln._tools.console import Column, Rows, UserError, known, print_note, progress, save
from jln._tools.machine import devices
from jln._tools.search import Answer, Clock, Question
from jln._tools.workloads import TUNABLE, Workload
from jln._triton import compiler, target, tuning
from jln._triton.chip import CHIPS, Chip
from jln._triton.tuning import Tiles

Dtype = Literal["bfloat16", "float16", "float32"]


def command(
    workloads: Annotated[
        list[str] | None, typer.Argument(help="By name; `bench --list` has them. [default: all for a GPU]")
    ] = None,
    chip: Annotated[str | None, typer.Option(help=f"For --dry-run: {', '.join(CHIPS)}. [default: h200]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(get_args(Dtype))}. [default: the workloads' own]")
    ] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option(help="The file to add to. [default: JLN_TUNING, else jln-tuning.json]")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Begin nothing after so many; exit with 3.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each program.")] = 30,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compile, time nothing: no GPU needed.")] = False,
) -> None:
    """Search for faster tiles of the kernels that the workloads launch, and write them to a file for JLN_TUNING.

    Tiles in which the compiler finds a fault are not timed. Tiles are kept only if their numbers are those of the
    heuristics' tiles, and if they are faster by 2 % and slower by as much in none of the three largest calls that share
    them, of whichever workloads. The file is written after each choice: a search that ends early is taken up again by
    the same command.
    """
    started = time.monotonic()
    chosen = _workloads(workloads, dtype)
    searched = _chip(chip, dry_run)
    if importlib.util.find_spec("triton") is None:
        raise UserError(f"triton is not installed: {target.INSTALL[searched.platform]}")
    path = output or pathlib.Path(os.path.expanduser(os.environ.get(tuning.VARIABLE) or "jln-tuning.json"))
    if dry_run:
        finished = survey(chosen, searched, seconds, started)
    else:
        finished = tune(chosen, searched, path, search.by_the_device(repetitions), seconds, started)
        print_note(f"to use it: export {tuning.VARIABLE}={path.resolve()}")
    raise typer.Exit(0 if finished else 3)


def _workloads(names: Sequence[str] | None, dtype: str | None) -> list[Workload]:
    hint = "`python -m jln bench --list` prints them, those for a GPU first"
    chosen = known("workload", names or TUNABLE, TUNABLE, hint)
    known("dtype", [dtype] if dtype is not None else [], get_args(Dtype))
    return [dataclasses.replace(w, dtype=dtype or w.dtype) for w in map(TUNABLE.__getitem__, chosen)]


def _chip(name: str | None, dry_run: bool) -> Chip:
    hint = None if dry_run else f"--dry-run takes {', '.join(CHIPS)}"
    known("chip", [name] if name is not None else [], CHIPS, hint)
    if dry_run:
        return CHIPS[name or "h200"]
    device = devices()[0]
    if device.platform != "gpu":
        raise UserError("there is no GPU to time on; --dry-run prints the candidates and what the compiler says")
    if (why := target.missing()) is not None:
        raise UserError(f"jln's kernels cannot be compiled: {why}")
    chip = target.target_chip()
    assert chip is not None
    here = tuning.chip_name(dataclasses.replace(chip, name=device.device_kind))
    for asked in (name, tuning.chip_name(chip)):  # the latter of JLN_CHIP
        if asked not in (None, here):
            raise UserError(f"this GPU is a {here} and no {asked}, for which there is only --dry-run")
    return chip


CANDIDATES = {
    "candidate": Column("candidate"),
    "registers": Column("registers"),
    "spilled": Column("spilled"),
    "shared": Column("shared KB", ".1f", 1e3),
    "why": Column(""),
}
ANSWERS = {
    **{field: Column(field) for field in ("choice", "heuristics", "candidates", "compiled", "timed", "fastest")},
    "ratio": Column("of the heuristics' time", ".3f"),
    "wrong": Column(""),
}


def survey(workloads: Sequence[Workload], chip: Chip, seconds: float | None, started: float) -> bool:
    """Print what would be timed, and the compiler's reasons against the rest. Returns whether time sufficed for all."""
    asked = search.questions(workloads, chip, TUNABLE.values())
    with compiler.workers() as pool, progress(len(asked)) as begin:
        for question in asked:
            if _late(seconds, started):
                return False
            begin(described(question))
            choices = search.candidates(question)
            said = search.verdicts(pool, question, choices, chip)
            rows = [
                {"candidate": written(tiles), "why": verdict.why}
                | (dataclasses.asdict(verdict) if verdict.registers else {})
                for tiles, verdict in zip(choices, said, strict=True)
            ]
            calls = ", ".join(dict.fromkeys(call.workload.name for call in question.calls))
            title = f"{described(question)}: {written(question.heuristic)} by heuristics; of {calls}"
            Rows(rows, title, CANDIDATES).show()
    return True


def tune(
    workloads: Sequence[Workload],
    chip: Chip,
    path: pathlib.Path,
    clock: Clock,
    seconds: float | None = None,
    started: float = 0.0,
) -> bool:
    """Find the fastest tiles, write them, and print them. Returns whether there was time for all."""
    rows, finished = [], True
    keep(path, [])  # or say that it cannot be written before anything is timed
    asked = [q for q in search.questions(workloads, chip, TUNABLE.values()) if not _known(q, path)]
    with compiler.workers() as pool, progress(len(asked)) as begin:
        for question in asked:
            if _late(seconds, started):
                finished = False
                break
            begin(described(question))
            choices = search.candidates(question)
            said = search.verdicts(pool, question, choices, chip)
            sound = [tiles for tiles, verdict in zip(choices, said, strict=True) if verdict.why is None]
            try:
                answer = search.fastest(question, sound, chip, clock)
            except RuntimeError as error:
                raise UserError(f"{described(question)} cannot be timed: {error}") from None
            keep(path, [entry(question, answer, chip)])
            rows.append(
                {
                    "chip": tuning.chip_name(chip),
                    "path": path,
                    "choice": described(question),
                    "heuristics": written(question.heuristic),
                    "candidates": len(choices),
                    "compiled": len(sound),
                    "timed": answer.timed,
                    "fastest": None if answer.tiles is None else written(answer.tiles),
                    "ratio": None if answer.tiles is None else answer.ratio,
                    "wrong": next((why for why in answer.failed.values() if isinstance(why, search.Wrong)), None),
                }
            )
    Rows(rows, "Tiles for {chip}, in {path}", ANSWERS).show()
    return finished


def _late(seconds: float | None, started: float) -> bool:
    return seconds is not None and time.monotonic() - started > seconds


def described(question: Question) -> str:
    sizes = question.sizes
    if "n" in sizes:
        return f"{sizes['choice']} of H {sizes['h']}, N {sizes['n']} in {sizes['dtype']}"
    more = ", writes y" if sizes.get("wants_y") else ""
    mixed = ", of several dtypes" if sizes["mixed"] else ""
    return f"{sizes['choice']} of H {sizes['h']}, {sizes['layout']}, {sizes['itemsize']} bytes{mixed}{more}"


def written(tiles: Tiles) -> str:
    texts = []
    for name, tile in tiles.items():
        if tile is not None:
            numbers = f"{tile.rows}x{tile.columns} warps {tile.warps} stages {tile.stages}"
            numbers += f" programs {tile.programs_per_core}" if tile.programs_per_core > 1 else ""
            texts.append(numbers if name == "tile" else f"{name} {numbers}")
    return ", ".join(texts)


def entry(question: Question, answer: Answer, chip: Chip) -> dict[str, Any]:
    """An entry of a tuning file, as `jln._triton.tuning` reads it, with how it was measured."""
    return question.sizes | {
        "tiles": None if answer.tiles is None else _numbers(answer.tiles),
        "measured": {
            "chip": chip.name,
            "versions": _versions(),
            "cases": [call.name for call in question.calls],
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "heuristics": _numbers(question.heuristic),
            "seconds": {case: {"heuristics": old, "tiles": new} for case, (old, new) in answer.seconds.items()},
        },
    }


def _numbers(tiles: Tiles) -> dict[str, dict[str, int] | None]:
    return {name: None if tile is None else dataclasses.asdict(tile) for name, tile in tiles.items()}


def _versions() -> dict[str, str]:
    return {"jln": jln.__version__, "jax": jax.__version__, "triton": importlib.metadata.version("triton")}


def _content(path: pathlib.Path) -> dict[str, Any]:
    """The content of a tuning file, or that of a new one. Raises UserError for a file that cannot be read."""
    if not path.exists():
        return {"schema": tuning.SCHEMA, "entries": []}
    try:
        return tuning.load(path)
    except (ValueError, RecursionError) as error:
        raise UserError(f"cannot add to {path}: {error}") from None


def _is(raw: Any, key: tuning.Key) -> bool:
    with contextlib.suppress(ValueError):
        return tuning.parsed(raw)[0] == key
    return False


def _known(question: Question, path: pathlib.Path) -> bool:
    """True where the file has this choice, measured with the same versions and heuristics, in no fewer calls."""
    same = {"versions": _versions(), "heuristics": _numbers(question.heuristic)}
    for raw in _content(path)["entries"]:
        measured = raw.get("measured") if _is(raw, question.key) else None
        if isinstance(measured, dict) and same.items() <= measured.items():
            before = measured.get("cases")
            return isinstance(before, list) and all(call.name in before for call in question.calls)
    return False


def keep(path: pathlib.Path, new: Sequence[dict[str, Any]]) -> None:
    """Write new entries to a file, each in the place of its former one; all other entries stay, sound or not."""
    content = _content(path)
    for entry in new:
        key = tuning.parsed(entry)[0]
        content["entries"] = [raw for raw in content["entries"] if not _is(raw, key)] + [entry]
    save(content, path)
