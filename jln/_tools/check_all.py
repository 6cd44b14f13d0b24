"""The check of all operators, in all dtypes, by processes side by side: `python -m jln check` without an operator.

The checks that are worth most come first, in case the time runs out: values and gradients in the dtypes that most train
with, on rows that everybody has; last second order, and the checker's own controls.
"""

from __future__ import annotations

import json
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jln import reference
from jln._core.identity import identity
from jln._tools import controls
from jln._tools.accuracy import Judge, exact
from jln._tools.catalogue import EPSILON, FORMS, Operator
from jln._tools.console import Column, Note, Rows, UserError, for_output, print_note
from jln._tools.machine import Device, described, devices, named
from jln._tools.workers import Last, WorkError, work_side_by_side
from jln._tools.workload import Workload
from jln.testing import Report, check_hvp, check_vjp
from jln.testing.report import finite_or_text

DTYPES = ("bfloat16", "float32", "float16", "float64")
CHECKS = (*DTYPES, "gradients", "second order")
CONTROLS = "controls"
# Several rows a tile and a ragged last one; a row in chunks, a single kernel sharing it, with as much in its last chunk
# as 16 bits show when it is left out. Of the Linear: the fused kernels, and the norm's around XLA's products, two of
# them.
NORM_SIZES = (((37, 100), 0), ((2, 20000), 0))
LINEAR_SIZES = (((37, 100), 64), ((16, 200), (300, 40)))
ON_A_GPU = (((64, 1024), 64),)  # beside those: the rows that everybody has, of which the interpreter makes many seconds
# Seconds for one case. The slowest takes the interpreter some thirty, and an H200 took at most 13: a kernel that hangs
# there must be told within a minute.
LIMITS = {"cpu": 300.0, "gpu": 60.0}


class Case(NamedTuple):
    """One check of one form of an operator on one device, by each of the implementations."""

    device: str
    form: str
    check: str
    implementations: tuple[str, ...]
    seed: int


def check_all(
    chosen: Sequence[tuple[Device, tuple[list[str], dict[str, str]]]],
    dtype: str | None,
    seed: int,
    processes: int,
    seconds: float | None,
    output: pathlib.Path | None,
) -> tuple[dict[str, Any], list[Rows | Note]]:
    """Run the checks and return what they found, "finished" false where the seconds ended first.

    chosen: devices, each with the implementations that run there, and the reasons why the others do not.
    dtype: the only one to check. output: a file for a line of JSON a case as it ends. A case that it has is not run
      again, unless it was wrong or jln, what compiles it or its device has changed since.
    """
    asked = CHECKS if dtype is None else (dtype,)
    # XLA goes first: behind a kernel that breaks its process' GPU nothing is left to fail.
    sorts = [(named(device), tuple(sorted(runnable, reverse=True))) for device, (runnable, _) in chosen if runnable]
    cases = [Case(d, form, check, runnable, seed) for check in asked for d, runnable in sorts for form in FORMS]
    cases += [Case("cpu:0", CONTROLS, CONTROLS, (), seed)] if dtype is None else []
    names = {case: identity(tuple(case), [described(d) for d, _ in chosen]) for case in cases}
    before = _kept(output)
    found = {case: before[name] for case, name in names.items() if name in before}
    left = [case for case in cases if case not in found]
    print_note(f"{len(left)} checks to run, {len(found)} were right before", stderr=True)
    started = time.monotonic()
    for number, (case, rows) in enumerate(_outcomes(left, processes, seconds), 1):
        found[case] = rows
        took = time.monotonic() - started
        rest = f"{number} of {len(left)}, some {took / number * (len(left) - number):.0f} s left"
        said = ", ".join(f"{row['implementation']} {_verdict(row)}".strip() for row in rows)
        wrong = not all(row["ok"] for row in rows)
        print_note(f"{case.form}, {case.check} on {case.device}: {said}; {rest}", wrong=wrong, stderr=True)
        if output is not None:
            _keep(output, names[case], rows)
    rows = [row for case in cases for row in found.get(case, ())]
    return _told(chosen, rows, len(cases) - len(found))


def _outcomes(cases: Sequence[Case], processes: int, seconds: float | None) -> Iterator[tuple[Case, list[Any]]]:
    """Yield each case with its rows, as they end."""
    if processes > 1:
        limit = max((LIMITS.get(c.device.split(":")[0], 300.0) for c in cases if c.check != CONTROLS), default=300.0)
        for case, outcome in work_side_by_side(check_case, cases, processes, limit, seconds):
            yield case, _failed(case, outcome) if isinstance(outcome, WorkError) else outcome
        return
    started = time.monotonic()
    for case in cases:
        if seconds is not None and time.monotonic() - started > seconds:
            return
        rows = check_case(case)
        yield case, rows.result if isinstance(rows, Last) else rows


def check_case(case: Case) -> list[dict[str, Any]] | Last:
    """Return a row for each implementation, or control: is it right, the largest error as a part of its limit, where.

    One that raises is wrong, and leaves the others to run. Behind an error of JAX's own the process should end.
    """
    jax.config.update("jax_enable_x64", True)
    if case.check == CONTROLS:
        return _control_rows(case)
    rows, broken, run = [], False, None
    for implementation in case.implementations:
        started = time.monotonic()
        try:
            run = run or _prepared(case)
            ok, part, where = run(implementation)
        except Exception as error:
            ok, part, where = False, math.inf, f"{type(error).__name__}: {error}"[:1500]
            broken = broken or isinstance(error, jax.errors.JaxRuntimeError)
        rows += [_row(case, implementation, ok, part, where, time.monotonic() - started)]
    return Last(rows) if broken else rows


def _row(case: Case, implementation: str, ok: bool, part: float, where: str, seconds: float = 0) -> dict[str, Any]:
    operator = case.form if case.check == CONTROLS else FORMS[case.form].title
    row = {"device": case.device, "operator": operator, "implementation": implementation, "check": case.check}
    return row | {"ok": ok, "part": finite_or_text(part), "where": where, "seconds": round(seconds, 2)}


def _failed(case: Case, error: WorkError) -> list[dict[str, Any]]:
    return [_row(case, name, False, math.inf, str(error)) for name in case.implementations or ("all",)]


def _prepared(case: Case) -> Callable[[str], tuple[bool, float, str]]:
    """The check as a function of an implementation."""
    (device, *_), form = devices(case.device), FORMS[case.form]
    if case.check in DTYPES:
        return _accuracy(form, device, case.check, case.seed)
    check = check_vjp if case.check == "gradients" else check_hvp
    tiny = Workload.sized(form, (3, 5), (4, 2), "float64")

    def run(implementation: str) -> tuple[bool, float, str]:
        # A difference would run the interpreter twenty times.
        interpreted = implementation == "triton" and device.platform == "cpu"
        how: Any = {"differences": not interpreted, "elements": None, "seed": case.seed}
        with jax.default_device(device):
            function, truth = exact(tiny, implementation=implementation), exact(tiny, plain=True)
            return _worst_row(check(function, tiny.draw(seed=case.seed)[0], reference=truth, **how))

    return run


def _accuracy(form: Operator, device: Device, dtype: str, seed: int) -> Callable[[str], tuple[bool, float, str]]:
    """Values and gradients beside float64, which the CPU computes.

    On a GPU a kernel's program runs twice, and what it does not write the second time would show as NaN.
    """
    sizes = LINEAR_SIZES if form.is_linear else NORM_SIZES
    host = next((d for d in devices() if d.platform == "cpu"), device)
    known = []
    for shape, n in (ON_A_GPU if device.platform == "gpu" else ()) + sizes:
        workload = Workload.sized(form, shape, n, dtype)
        arguments, cotangents = workload.draw(seed=seed)
        with jax.default_device(host):
            judge = Judge(workload, arguments, cotangents)
        known.append((workload, judge, [*arguments, *cotangents]))

    def run(implementation: str) -> tuple[bool, float, str]:
        lines = []
        for workload, judge, drawn in known:
            function = exact(workload, implementation=implementation)
            step = jax.jit(lambda *a, w=workload, f=function: jax.tree.leaves(w.step(f, every=True)(*a)))
            with jax.default_device(device):
                operands = jax.device_put(drawn, device)
                program = step.lower(*operands).compile()
                got = [np.asarray(a) for a in program(*operands)]
                if device.platform == "gpu" and implementation == "triton":
                    _poison([a.nbytes for a in got], program.memory_analysis())
                    again = [np.asarray(a) for a in program(*operands)]
                    if any(a.tobytes() != b.tobytes() for a, b in zip(got, again, strict=True)):
                        return False, math.inf, f"{workload}: not the same bits twice"
            with jax.default_device(host):
                lines += [(judge.accuracy(n, jnp.asarray(a)), workload) for n, a in zip(judge.names, got, strict=True)]
        line, workload = max(lines, key=lambda pair: (not pair[0].ok, pair[0].part))
        errors = f"error {line.error:.2e}, limit {line.limit:.2e}; rms {line.rms_error:.2e}, limit {line.rms_limit:.2e}"
        return line.ok, line.part, f"{line.name} of {workload}: {errors}"

    return run


def _poison(sizes: Sequence[int], memory: Any) -> None:
    """Leave ones in every bit, a NaN of every dtype, in free memory of a program's results' and its workspace's sizes.

    The allocator gives what was freed last of the least size that holds it, so that a few of each are filled.
    """
    sizes = [*sizes, memory.temp_size_in_bytes if memory else 0]
    held = [jnp.full(size // 4 + 1, 2**32 - 1, jnp.uint32) for size in sizes for _ in range(3)]
    jax.block_until_ready(held)


def _worst_row(report: Report) -> tuple[bool, float, str]:
    row = max(report.rows, key=lambda row: (not row.ok, row.badness))
    return row.ok, row.badness, f"{row.name}{list(row.index)}: {row.got!r} for {row.expected!r} by {row.against}"


def _control_rows(case: Case) -> list[dict[str, Any]]:
    """Check the checker: each wrong rule must be rejected, and a right rule written in the same way accepted."""
    random = np.random.default_rng(case.seed)
    args = (random.standard_normal((4, 6)), 1 + random.standard_normal(6), random.standard_normal(6))

    def layer_norm(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        return reference.layer_norm(x, scale, offset, epsilon=EPSILON)

    def passes(rule: Callable) -> bool:
        return check_vjp(rule, args, reference=layer_norm, seed=case.seed).ok

    judged = {"a right rule": passes(controls.RIGHT)} | {n: not passes(f) for n, f in controls.WRONG.items()}
    return [_row(case, name, ok, 0 if ok else math.inf, "misjudged") for name, ok in judged.items()]


# What was found, in words and in a file


def _verdict(row: dict[str, Any]) -> str:
    if row["check"] == CONTROLS:
        return "" if row["ok"] else "WRONG"
    return f"{float(row['part']):.2g}" if row["ok"] else f"WRONG {float(row['part']):.2g}, {row['where'][:200]}"


def _told(chosen: Iterable[Any], rows: list[dict[str, Any]], unfinished: int) -> tuple[dict[str, Any], list[Any]]:
    checks = [row for row in rows if row["check"] != CONTROLS]
    judged = {row["implementation"]: row["ok"] for row in rows if row["check"] == CONTROLS}
    misjudged = [name for name, rightly in judged.items() if not rightly]
    good = all(row["ok"] for row in rows)
    table: dict[Any, dict[str, str]] = {}  # a row of all checks of an operator
    for c in checks:
        row = {field: c[field] for field in ("device", "operator", "implementation")}
        said = f"{'' if c['ok'] else 'WRONG '}{float(c['part']):.2g}"
        table.setdefault(tuple(row.values()), row)[c["check"]] = said
    not_run = [
        {"device": described(device), "implementation": implementation, "why": why}
        for device, (_, why_not) in chosen
        for implementation, why in why_not.items()
    ]
    shown = [check for check in CHECKS if any(check in row for row in table.values())]
    columns = {name: Column(name) for name in ("operator", "implementation", *shown)}
    notes = [
        "Each number is the largest error as a part of what is allowed: of values and gradients against float64, by "
        "dtype; of the rules in float64 against autodiff and, but in the interpreter, central differences, to first "
        "and to second order.",
        f"{len(judged) - len(misjudged)} of {len(judged)} controls were judged rightly: one right rule, the others "
        "wrong.",
    ]
    verdict = "all is right" if good else "something is WRONG"
    verdict += f"; out of time before {unfinished} checks: run it again" if unfinished else ""
    return {"ok": good, "finished": not unfinished, "controls_judged_rightly": judged}, [
        Rows(checks, key="checks"),
        Rows(sorted(table.values(), key=lambda row: row["device"]), "{device}", columns),
        Rows([c for c in checks if not c["ok"]], "WRONG: {operator}, {implementation}, {check}: {where}", wrong=True),
        Rows(not_run, "{implementation} was not run on {device}: {why}", key="not_run"),
        *map(Note, notes[: 1 + bool(judged)]),
        *([Note(f"WRONG: misjudged {', '.join(misjudged)}", wrong=True)] if misjudged else []),
        Note(verdict, wrong=not good or unfinished > 0),
    ]


def _keep(output: pathlib.Path, name: str, rows: list[dict[str, Any]]) -> None:
    try:
        with output.open("a") as file:
            file.write("".join(json.dumps(row | {"case": name}) + "\n" for row in rows))
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from None


def _kept(output: pathlib.Path | None) -> dict[str, list[dict[str, Any]]]:
    """The rows of each case in the file, by the case's name, of those that were right."""
    if output is None:
        return {}
    for_output(output.parent)
    found: dict[str, dict[str, dict[str, Any]]] = {}  # of a case that ran again the last rows count
    try:
        text = output.read_text() if output.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the last line was cut off
            output.write_text(whole)
        for line in whole.splitlines():
            row = json.loads(line)
            found.setdefault(row.pop("case"), {})[row["implementation"]] = row
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"cannot go on from {output}: {error}") from None
    return {name: list(rows.values()) for name, rows in found.items() if all(row["ok"] for row in rows.values())}
