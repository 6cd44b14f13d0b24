"""The command `python -m jln check`, which tells whether the operators are right on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args

import jax
import numpy as np
import typer

from jln import reference
from jln._tools import clocks, controls
from jln._tools.accuracy import Judge, exact
from jln._tools.catalogue import DIRECTIONS, EPSILON, FORMS, OPERATORS, Operator
from jln._tools.console import Column, Note, Rows, UserError, known, progress, show
from jln._tools.machine import Device, described, devices, implementations, interpret_without_a_gpu
from jln._tools.workload import Init, Workload
from jln.testing import Report, check_hvp, check_vjp
from jln.testing.report import finite_or_text, for_json

Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Implementation = Literal["xla", "triton"]
DTYPES: tuple[str, ...] = get_args(Dtype)
DEFAULT_SHAPE = "64x1024"
# Several rows a tile and a ragged last one; a row in chunks, a single kernel sharing it, with as much in its last chunk
# as 16 bits show when it is left out. Of the Linear: the fused kernels, and the norm's around XLA's products, two of
# them.
NORM_SIZES = (((37, 100), 0), ((2, 20000), 0))
LINEAR_SIZES = (((37, 100), 64), ((16, 200), (300, 40)))
# The elements that the interpreter takes some ten seconds for.
INTERPRETED_ELEMENTS = 2**21
VERDICT = Column("", {True: "ok", False: "WRONG"}.__getitem__)
ACCURACY = {
    "name": Column("result"),
    "largest": Column("largest", ".2e"),
    "error": Column("error", ".2e"),
    "plain_error": Column("plain jnp's", ".2e"),
    "limit": Column("limit", ".2e"),
    "rms_error": Column("rms error", ".2e"),
    "rms_plain_error": Column("plain jnp's", ".2e"),
    "rms_limit": Column("limit", ".2e"),
    "ok": VERDICT,
}
TIMES = {
    "direction": Column(""),
    "seconds": Column("microseconds", ".1f", 1e-6),
    "gb_per_s": Column("GB/s", ".1f"),
    "tflop_per_s": Column("TFLOP/s", ".3f"),
}


def command(
    operator: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(OPERATORS)}; at one size. [default: all, at several]")
    ] = None,
    shape: Annotated[str | None, typer.Option(help=f"Of x, as 8192x4096. [default: {DEFAULT_SHAPE}]")] = None,
    features: Annotated[
        str | None, typer.Option(help="Of a Linear, or of several: 64, 64+16+16. [default: as many as x has]")
    ] = None,
    extras: Annotated[str | None, typer.Option(help="Of a sum: x_bias, gate, x_bias+gate.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of every array. [default: float32]")] = None,
    init: Annotated[Init | None, typer.Option(help="What the arrays hold. [default: normal]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data.")] = 0,
    implementation: Annotated[Implementation | None, typer.Option(help="Only this. [default: all that run]")] = None,
    device: Annotated[str | None, typer.Option(help="Only this: cpu, gpu, gpu:1. [default: all]")] = None,
    time: Annotated[bool, typer.Option("--time", help="Time forward and backward, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare values and gradients with float64, autodiff and central differences, on every device.

    Without OPERATOR: all operators in all dtypes, to second order, and wrong rules that must be rejected. With
    OPERATOR: one operator at one size. Exits with 1 if anything is wrong.
    """
    workload = None
    if operator is not None:
        workload = _workload(operator, shape, features, extras, dtype)
    else:
        sizes = {"shape": shape, "features": features, "extras": extras, "dtype": dtype}
        for name, value in (sizes | {"init": init, "time": time or None}).items():
            if value is not None:
                raise UserError(f"--{name} needs an operator: one of {', '.join(OPERATORS)}")
    jax.config.update("jax_enable_x64", True)
    interpret_without_a_gpu()
    chosen = [(d, _runnable(d, implementation)) for d in devices(device)]
    if not any(runnable for _, (runnable, _) in chosen):
        _, (_, why_not) = chosen[0]
        raise UserError(next(f"{name} cannot run: {why}" for name, why in why_not.items()))
    found = _check_one(workload, init or "normal", seed, chosen, time) if workload else _check_all(chosen, seed)
    show(*found, as_json)
    raise typer.Exit(0 if found[0]["ok"] else 1)


def _runnable(device: Device, only: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the implementations that run on a device, and for each of the others the reason why not."""
    wanted = {name: why for name, why in implementations(device).items() if only in (None, name)}
    return [name for name, why in wanted.items() if why is None], {n: w for n, w in wanted.items() if w is not None}


def _workload(operator, shape, features, extras, dtype) -> Workload:
    known("operator", [operator], OPERATORS)
    entry = OPERATORS[operator]
    if features is not None and not entry.is_linear:
        raise UserError(f"--features is for the fused operators; {operator} has none")
    if extras is not None:
        if not entry.extras:
            raise UserError(f"--extras is for the operators that add a residual; {operator} adds none")
        known("extra", extras.split("+"), entry.extras)
        entry = entry.including(*extras.split("+"))
    shape = DEFAULT_SHAPE if shape is None else shape
    sizes, several = parsed_shape(shape), parsed_features(features) if features is not None else ()
    if len(sizes) > 32 or math.prod(sizes) * max(sum(several), 1) >= 2**48:
        raise UserError(f"too large: {shape}" + (f" to {features} features" if features else ""))
    n = several if len(several) > 1 else several[0] if several else sizes[-1]
    return Workload.sized(entry, sizes, n, dtype or "float32")


def parsed_shape(text: str) -> tuple[int, ...]:
    """The shape in a text: "8192x4096" is (8192, 4096)."""
    return _positive(text, "x", "a shape is written as 8192x4096, of positive sizes")


def parsed_features(text: str) -> tuple[int, ...]:
    """The features of one or several Linears in a text: "64+16" is (64, 16)."""
    return _positive(text, "+", "features are written as 64, or 64+16+16, all positive")


def _positive(text: str, between: str, rule: str) -> tuple[int, ...]:
    numbers = text.split(between)
    if not all(s.isascii() and s.isdigit() and len(s) <= 18 and int(s) > 0 for s in numbers):
        raise UserError(f"{rule}; got {text!r}")
    return tuple(map(int, numbers))


# One operator at one size


def _check_one(
    workload: Workload, init: Init, seed: int, chosen: list[tuple[Device, Any]], time: bool
) -> tuple[dict[str, Any], list[Rows | Note]]:
    accuracies, times, notes = [], [], []
    with progress(sum(1 + len(runnable) * (1 + time) for _, (runnable, _) in chosen)) as begin:
        for device, (runnable, why_not) in chosen:
            begin(f"float64 on {described(device)}")
            with jax.default_device(device):
                data = workload.draw(init, seed)
                judge = Judge(workload, *data) if runnable else None
                for implementation in runnable:
                    run = {"implementation": implementation, "device": described(device)}
                    interpreted = implementation == "triton" and device.platform == "cpu"
                    if interpreted and math.prod(workload.shape) > INTERPRETED_ELEMENTS and len(runnable) > 1:
                        why = f"more than {INTERPRETED_ELEMENTS} elements take the interpreter minutes"
                        notes.append(run | {"why": why})
                        continue
                    assert judge is not None
                    begin(f"{implementation} on {described(device)}")
                    judged = judge.accuracies(exact(workload, implementation=implementation))
                    accuracies += [run | for_json(line) | {"ok": line.ok} for line in judged]
                    if time and interpreted:
                        notes.append(run | {"why": "checked, and not timed: it is Triton's interpreter"})
                    elif time:
                        begin(f"timing {implementation} on {described(device)}")
                        times += [run | row for row in _timed(workload, data, implementation)]
            notes += [{"implementation": n, "device": described(device), "why": why} for n, why in why_not.items()]
    good, case = all(row["ok"] for row in accuracies), f"{workload}, {init} (seed {seed})"
    where = "{implementation} on {device}"
    return {"case": case, "ok": good}, [
        Note(case),
        Rows(accuracies, where, ACCURACY, key="accuracy"),
        Rows(times, f"{where}, timed (every tensor moved once)", TIMES, key="times"),
        Rows(notes, f"{where}: {{why}}", key="notes"),
        Note("all within their limits" if good else "some are NOT within their limits", wrong=not good),
    ]


def _timed(workload: Workload, data: Any, implementation: str) -> Iterator[dict[str, Any]]:
    """Time the forward pass as training runs it, which saves what the backward pass needs, and the backward pass."""
    arguments, cotangents = jax.device_put(data)
    forward = jax.jit(lambda *a: jax.vjp(exact(workload, implementation=implementation), *a))
    _, pullback = forward(*arguments)
    backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    cotangent = workload.signature.packed(cotangents)
    runs = (lambda: forward(*arguments), lambda: backward(pullback, cotangent))
    for direction, run in zip(DIRECTIONS, runs, strict=True):
        moved, operations, took = workload.bytes_once(direction), workload.operations(direction), clocks.seconds(run)
        rates = {"gb_per_s": moved / took / 1e9, "tflop_per_s": operations / took / 1e12}
        yield {"direction": direction, "seconds": took} | rates


# All operators


def _check_all(chosen: list[tuple[Device, Any]], seed: int) -> tuple[dict[str, Any], list[Rows | Note]]:
    checks: list[dict[str, Any]] = []
    with progress(1 + sum(len(FORMS) * (len(DTYPES) + 2 * len(runnable)) for _, (runnable, _) in chosen)) as begin:
        begin("wrong rules")
        judged = _controls(seed)
        for device, (runnable, _) in chosen:
            with jax.default_device(device):
                for operator in FORMS.values() if runnable else ():
                    checks += _checks(operator, device, runnable, seed, begin)
    misjudged = [name for name, rightly in judged.items() if not rightly]
    good = not misjudged and all(check["ok"] for check in checks)
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
    columns = ("operator", "implementation", *DTYPES, "gradients", "second order")
    return {"ok": good, "controls_judged_rightly": judged}, [
        Rows(checks, key="checks"),
        Rows(list(table.values()), "{device}", {name: Column(name) for name in columns}),
        Rows([c for c in checks if not c["ok"]], "WRONG: {operator}, {implementation}, {check}: {where}", wrong=True),
        Rows(not_run, "{implementation} was not run on {device}: {why}", key="not_run"),
        Note(
            "Each number is the largest error as a part of what is allowed: of values and gradients against float64, "
            "by dtype; of the rules in float64 against autodiff and, but in the interpreter, central differences, to "
            "first and to second order."
        ),
        Note(
            f"{len(judged) - len(misjudged)} of {len(judged)} controls were judged rightly: one right rule, the others "
            "wrong."
        ),
        *([Note(f"WRONG: misjudged {', '.join(misjudged)}", wrong=True)] if misjudged else []),
        Note("all is right" if good else "something is WRONG", wrong=not good),
    ]


def _controls(seed: int) -> dict[str, bool]:
    """Check the checker: each wrong rule must be rejected, and a right rule written in the same way accepted.

    Returns for each control whether it was judged rightly.
    """
    random = np.random.default_rng(seed)
    args = (random.standard_normal((4, 6)), 1 + random.standard_normal(6), random.standard_normal(6))

    def passes(rule: Callable) -> bool:
        return check_vjp(rule, args, reference=_layer_norm, seed=seed).ok

    return {"a right rule": passes(controls.RIGHT)} | {n: not passes(f) for n, f in controls.WRONG.items()}


def _layer_norm(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    return reference.layer_norm(x, scale, offset, epsilon=EPSILON)


def _checks(
    operator: Operator, device: Device, runnable: list[str], seed: int, begin: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row of each check: whether it is right, the largest error as a part of its limit, and where that is."""
    where = described(device)

    def attempt(implementation: str, check: str, run: Callable[[], tuple[bool, float, str]]) -> dict[str, Any]:
        """One check. One that raises has failed, and leaves the others to run."""
        try:
            ok, part, at = run()
        except Exception as error:
            ok, part, at = False, math.inf, f"{type(error).__name__}: {error}"
        row = {"device": where, "operator": operator.title, "implementation": implementation, "check": check}
        return row | {"ok": ok, "part": finite_or_text(part), "where": at}

    for dtype in DTYPES:
        begin(f"{operator.title} in {dtype} on {where}")
        sizes = LINEAR_SIZES if operator.is_linear else NORM_SIZES
        workloads = [Workload.sized(operator, shape, n, dtype) for shape, n in sizes]
        judges = [(w, Judge(w, *w.draw(seed=seed))) for w in workloads]
        for implementation in runnable:
            yield attempt(implementation, dtype, lambda i=implementation, judges=judges: _worst_accuracy(judges, i))
    tiny = Workload.sized(operator, (3, 5), (4, 2), "float64")
    arguments, _ = tiny.draw(seed=seed)
    for implementation in runnable:
        function, truth = exact(tiny, implementation=implementation), exact(tiny, plain=True)
        # A difference would run the interpreter twenty times.
        interpreted = implementation == "triton" and device.platform == "cpu"
        for name, check in (("gradients", check_vjp), ("second order", check_hvp)):
            begin(f"{operator.title}, {implementation}, {name} on {where}")

            def run(check=check, f=function, truth=truth, interpreted=interpreted) -> tuple[bool, float, str]:
                return _worst_row(
                    check(f, arguments, reference=truth, differences=not interpreted, elements=None, seed=seed)
                )

            yield attempt(implementation, name, run)


def _worst_accuracy(judges: list[tuple[Workload, Judge]], implementation: str) -> tuple[bool, float, str]:
    lines = [(line, w) for w, judge in judges for line in judge.accuracies(exact(w, implementation=implementation))]
    line, workload = max(lines, key=lambda pair: (not pair[0].ok, pair[0].part))
    errors = f"error {line.error:.2e}, limit {line.limit:.2e}; rms {line.rms_error:.2e}, limit {line.rms_limit:.2e}"
    return line.ok, line.part, f"{line.name} of {workload}: {errors}"


def _worst_row(report: Report) -> tuple[bool, float, str]:
    row = max(report.rows, key=lambda row: (not row.ok, row.badness))
    return row.ok, row.badness, f"{row.name}{list(row.index)}: {row.got!r} for {row.expected!r} by {row.against}"
