"""Check every form of every operator on this machine, as `python -m jln check` does, by processes side by side.

    python benchmarks/check_card.py FILE [--seconds 90] [--dtype bfloat16] [--implementation triton] [--processes 8]

A line is printed as each check ends, with an estimate of what is left, and one of JSON goes to FILE. Checks that were
right there, by the same code and versions, are not run again. The exit status is 1 if any is wrong, 3 out of time.
"""

from __future__ import annotations

import json
import os
import pathlib
import time
from typing import Annotated, Any, NamedTuple

import jax
import typer

from jln._core.identity import identity
from jln._triton import target
from jln._triton.chip import platform_of
from jln.testing.operators import DTYPES, FORMS, check_form
from rows import UserError, known
from workers import Last, WorkError, work_side_by_side

# Seconds for one check. The slowest takes the interpreter some thirty, and an H200 took at most 13: a kernel that hangs
# there must be told within a minute.
LIMITS = {"cpu": 300.0, "gpu": 60.0}


class Case(NamedTuple):
    """One check: a form in a dtype by an implementation, on this process' first device."""

    dtype: str
    form: str
    implementation: str


def check(case: Case) -> dict[str, Any] | Last:
    """Return whether a case is right, its largest error as a part of what is allowed, and where; it may raise."""
    started = time.monotonic()
    try:
        jax.config.update("jax_enable_x64", case.dtype == "float64")  # in all threads, as the interpreter needs it
        error, size = check_form(FORMS[case.form], case.dtype, case.implementation, jax.devices()[0])
    except jax.errors.JaxRuntimeError as raised:  # it may have broken the process' GPU
        return Last({"ok": False, "part": "inf", "where": f"{type(raised).__name__}: {raised}"[:1500]})
    seconds = round(time.monotonic() - started, 2)
    return {"ok": error.ok, "part": f"{error.part:.3g}", "where": f"{error}, of {size}", "seconds": seconds}


def main(
    file: Annotated[pathlib.Path, typer.Argument(help="For a line of JSON a check; it may have those of before.")],
    dtype: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(DTYPES)}. [default: all]")] = None,
    implementation: Annotated[str, typer.Option(help="triton or xla.")] = "triton",
    processes: Annotated[int, typer.Option(min=1)] = min(os.cpu_count() or 1, 16),
    seconds: Annotated[float | None, typer.Option(min=0, help="End after so many.")] = None,
) -> None:
    """Check every form of every operator on this machine, by processes side by side."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share a GPU
    device = jax.devices()[0]
    known("implementation", [implementation], ("triton", "xla"))
    if implementation == "triton" and (why := target.missing(platform_of(device))):
        raise UserError(f"triton cannot run: {why}")
    cases = [Case(d, form, implementation) for d in known("dtype", dtype or DTYPES, DTYPES) for form in FORMS]
    names = {case: identity(tuple(case), device.device_kind) for case in cases}
    file.parent.mkdir(parents=True, exist_ok=True)
    right = {name for name, row in rows(file).items() if row["ok"]}
    left = [case for case in cases if names[case] not in right]
    print(f"{len(left)} checks to run, {len(cases) - len(left)} were right before", flush=True)
    started, wrong, ended = time.monotonic(), 0, 0
    limit = LIMITS.get(device.platform, 300.0)
    for case, outcome in work_side_by_side(check, left, processes, limit, seconds):
        if isinstance(outcome, WorkError):
            outcome = {"ok": False, "part": "inf", "where": str(outcome)}
        row = case._asdict() | outcome | {"case": names[case]}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        ended, wrong = ended + 1, wrong + (not row["ok"])
        rest = (time.monotonic() - started) / ended * (len(left) - ended)
        said = row["part"] if row["ok"] else f"WRONG {row['where']}"
        print(f"{case.form}, {case.dtype}: {said}; {ended} of {len(left)}, some {rest:.0f} s left", flush=True)
    unfinished = f"; {len(left) - ended} not finished" if ended < len(left) else ""
    print(f"{wrong} WRONG" if wrong else "all is right", unfinished)
    raise typer.Exit(1 if wrong else 3 if ended < len(left) else 0)


def rows(file: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The rows of a file by their case, the last one of each; a line that was cut off is taken out of the file."""
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return {row["case"]: row for row in map(json.loads, whole.splitlines())}


if __name__ == "__main__":
    typer.run(main)
