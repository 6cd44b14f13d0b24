"""The command `python -m jln check`, which tells whether the operators are right on this machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import numpy as np
import typer

from jln import reference
from jln._tools import controls, timing
from jln._tools.catalogue import DIRECTIONS, EPSILON, FORMS, OPERATORS, Operator
from jln._tools.console import UserError, known, print_json, print_note, print_table, progress
from jln._tools.devices import Device, described, devices, implementations, interpret_without_a_gpu
from jln._tools.samples import DTYPES, Dtype, Implementation, Init, JudgedSample, Sample, ours, plain
from jln.testing import Report, check_hvp, check_vjp
from jln.testing.report import for_json

DEFAULT_SHAPE = "64x1024"
# Several rows a tile and a ragged last one; a row in chunks, a single kernel sharing it, with as much in its last chunk
# as 16 bits show when it is left out. Of the Linear: the fused kernels, and the norm's around XLA's products, two of
# them.
NORM_SIZES = (((37, 100), 0), ((2, 20000), 0))
LINEAR_SIZES = (((37, 100), 64), ((16, 200), (300, 40)))
# The elements that the interpreter takes some ten seconds for.
INTERPRETED_ELEMENTS = 2**21
# The fields of `Accuracy` that are printed, with their columns' titles.
ACCURACY_COLUMNS = {
    "largest": "largest",
    "error": "error",
    "plain_error": "plain jnp's",
    "limit": "limit",
    "rms_error": "rms error",
    "rms_plain_error": "plain jnp's",
    "rms_limit": "limit",
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
    sample = None
    if operator is not None:
        sample = _sample(operator, shape, features, extras, dtype, init, seed)
    else:
        options = {
            "shape": shape,
            "features": features,
            "extras": extras,
            "dtype": dtype,
            "init": init,
            "time": time or None,
        }
        for name, value in options.items():
            if value is not None:
                raise UserError(f"--{name} needs an operator: one of {', '.join(OPERATORS)}")
    jax.config.update("jax_enable_x64", True)
    interpret_without_a_gpu()
    chosen = [(d, _runnable(d, implementation)) for d in devices(device)]
    if not any(runnable for _, (runnable, _) in chosen):
        _, (_, why_not) = chosen[0]
        raise UserError(next(f"{name} cannot run: {why}" for name, why in why_not.items()))
    good = _check_one(sample, chosen, time, as_json) if sample else _check_all(chosen, seed, as_json)
    raise typer.Exit(0 if good else 1)


def _runnable(device: Device, only: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the implementations that run on a device, and for each of the others the reason why not."""
    wanted = {name: why for name, why in implementations(device).items() if only in (None, name)}
    return [name for name, why in wanted.items() if why is None], {n: w for n, w in wanted.items() if w is not None}


def _sample(operator, shape, features, extras, dtype, init, seed) -> Sample:
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
    return Sample(entry, sizes, n, dtype or "float32", init or "normal", seed)


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


def _check_one(sample: Sample, chosen: list[tuple[Device, Any]], time: bool, as_json: bool) -> bool:
    runs = []
    with progress(sum(1 + len(runnable) * (1 + time) for _, (runnable, _) in chosen)) as begin:
        for device, (runnable, why_not) in chosen:
            begin(f"float64 on {described(device)}")
            judged = JudgedSample(sample, device) if runnable else None
            for implementation in runnable:
                interpreted = implementation == "triton" and device.platform == "cpu"
                if interpreted and math.prod(sample.shape) > INTERPRETED_ELEMENTS and len(runnable) > 1:
                    why_not[implementation] = f"more than {INTERPRETED_ELEMENTS} elements take the interpreter minutes"
                    continue
                assert judged is not None
                begin(f"{implementation} on {described(device)}")
                entry = {"implementation": implementation, "accuracy": judged.accuracies(implementation), "time": None}
                if time and interpreted:
                    why_not[implementation] = "checked, and not timed: it is Triton's interpreter"
                elif time:
                    begin(f"timing {implementation} on {described(device)}")
                    entry["time"] = _timed(sample, device, implementation)
                runs.append({"device": described(device), **entry})
            runs.extend({"device": described(device), "implementation": n, "note": w} for n, w in why_not.items())
    good = all(line.ok for entry in runs for line in entry.get("accuracy", ()))
    if as_json:
        print_json({"case": str(sample), "ok": good, "runs": [_as_json(entry) for entry in runs]})
        return good
    print_note(str(sample))
    for entry in runs:
        where = f"{entry['implementation']} on {entry['device']}"
        if "note" in entry:
            print_note(f"{where}: {entry['note']}")
            continue
        header = ("result", *ACCURACY_COLUMNS.values(), "")
        lines = [
            (a.name, *(f"{getattr(a, field):.2e}" for field in ACCURACY_COLUMNS), "ok" if a.ok else "WRONG")
            for a in entry["accuracy"]
        ]
        print_table(where, header, lines, left=(0, len(header) - 1))
        if entry["time"]:
            print_table(
                f"{where}, timed (every tensor moved once)",
                ("", "microseconds", "GB/s", "TFLOP/s"),
                [
                    (name, f"{t['seconds'] * 1e6:.1f}", f"{t['gb_per_s']:.1f}", f"{t['tflop_per_s']:.3f}")
                    for name, t in entry["time"].items()
                ],
            )
    print_note("all within their limits" if good else "some are NOT within their limits", wrong=not good)
    return good


def _as_json(entry: dict[str, Any]) -> dict[str, Any]:
    lines = entry.get("accuracy")
    return entry if lines is None else {**entry, "accuracy": [for_json(a) | {"ok": a.ok} for a in lines]}


def _timed(sample: Sample, device: Device, implementation: str) -> dict[str, dict[str, float]]:
    """Time the forward pass as training runs it, which saves what the backward pass needs, and the backward pass."""
    arguments, cotangent = jax.device_put(sample.arrays(), device)
    forward = jax.jit(lambda *a: jax.vjp(ours(sample.operator, implementation), *a))
    _, pullback = forward(*arguments)
    backward = jax.jit(lambda pullback, cotangent: pullback(cotangent))
    runs = (lambda: forward(*arguments), lambda: backward(pullback, cotangent))
    times = {}
    for direction, run in zip(DIRECTIONS, runs, strict=True):
        moved, operations, took = sample.bytes_once(direction), sample.operations(direction), timing.seconds(run)
        times[direction] = {"seconds": took, "gb_per_s": moved / took / 1e9, "tflop_per_s": operations / took / 1e12}
    return times


# All operators


@dataclasses.dataclass(frozen=True)
class Cell:
    """One check of one operator.

    part: the largest error as a part of its limit. where: the result that has the largest error.
    """

    operator: str
    implementation: str
    check: str
    ok: bool
    part: float
    where: str

    def __str__(self) -> str:
        return f"{'' if self.ok else 'WRONG '}{self.part:.2g}"


def _check_all(chosen: list[tuple[Device, Any]], seed: int, as_json: bool) -> bool:
    columns = (*DTYPES, "gradients", "second order")
    all_cells: dict[str, list[Cell]] = {}
    with progress(1 + sum(len(FORMS) * (len(DTYPES) + 2 * len(runnable)) for _, (runnable, _) in chosen)) as begin:
        begin("wrong rules")
        judged = _controls(seed)
        for device, (runnable, _) in chosen:
            cells = all_cells[described(device)] = []
            for operator in FORMS.values() if runnable else ():
                with jax.default_device(device):
                    cells += _cells(operator, device, runnable, seed, begin)
    good = all(judged.values()) and all(cell.ok for cells in all_cells.values() for cell in cells)
    if as_json:
        tables = [
            {
                "device": described(device),
                "not_run": why_not,
                "checks": list(map(for_json, all_cells[described(device)])),
            }
            for device, (_, why_not) in chosen
        ]
        print_json({"ok": good, "devices": tables, "controls_judged_rightly": judged})
        return good
    for device, (_, why_not) in chosen:
        cells = all_cells[described(device)]
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for cell in cells:
            rows.setdefault((cell.operator, cell.implementation), {})[cell.check] = str(cell)
        lines = [(*key, *(row[c] for c in columns)) for key, row in rows.items()]
        print_table(described(device), ("operator", "implementation", *columns), lines, left=(0, 1))
        for cell in cells:
            if not cell.ok:
                print_note(f"WRONG: {cell.operator}, {cell.implementation}, {cell.check}: {cell.where}", wrong=True)
        for implementation, why in why_not.items():
            print_note(f"{implementation} was not run on {described(device)}: {why}")
    print_note(
        "Each number is the largest error as a part of what is allowed: of values and gradients against float64, by "
        "dtype; of the rules in float64 against autodiff and, but in the interpreter, central differences, to first "
        "and to second order."
    )
    misjudged = [name for name, rightly in judged.items() if not rightly]
    rightly = len(judged) - len(misjudged)
    print_note(f"{rightly} of {len(judged)} controls were judged rightly: one right rule, the others wrong.")
    if misjudged:
        print_note(f"WRONG: misjudged {', '.join(misjudged)}", wrong=True)
    print_note("all is right" if good else "something is WRONG", wrong=not good)
    return good


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


def _cells(
    operator: Operator, device: Device, runnable: list[str], seed: int, begin: Callable[[str], None]
) -> Iterator[Cell]:
    for dtype in DTYPES:
        begin(f"{operator.title} in {dtype} on {described(device)}")
        sizes = LINEAR_SIZES if operator.is_linear else NORM_SIZES
        samples = [JudgedSample(Sample(operator, s, n, dtype, seed=seed), device) for s, n in sizes]
        for implementation in runnable:
            yield _attempt(operator, implementation, dtype, lambda i=implementation, t=samples: _worst_accuracy(t, i))
    arguments, _ = Sample(operator, (3, 5), (4, 2), "float64", seed=seed).arrays()
    for implementation in runnable:
        function, truth = ours(operator, implementation), plain(operator)
        # A difference would run the interpreter twenty times.
        interpreted = implementation == "triton" and device.platform == "cpu"
        for name, check in (("gradients", check_vjp), ("second order", check_hvp)):
            begin(f"{operator.title}, {implementation}, {name} on {described(device)}")

            def run(check=check, f=function, truth=truth, interpreted=interpreted) -> tuple[bool, float, str]:
                return _worst_row(
                    check(f, arguments, reference=truth, differences=not interpreted, elements=None, seed=seed)
                )

            yield _attempt(operator, implementation, name, run)


def _attempt(operator: Operator, implementation: str, check: str, run: Callable[[], tuple[bool, float, str]]) -> Cell:
    """A cell of the table from one check. A check that raises has failed, and leaves the others to run."""
    try:
        return Cell(operator.title, implementation, check, *run())
    except Exception as error:
        return Cell(operator.title, implementation, check, False, math.inf, f"{type(error).__name__}: {error}")


def _worst_accuracy(samples: list[JudgedSample], implementation: str) -> tuple[bool, float, str]:
    lines = [(line, judged.sample) for judged in samples for line in judged.accuracies(implementation)]
    line, sample = max(lines, key=lambda pair: (not pair[0].ok, pair[0].part))
    errors = f"error {line.error:.2e}, limit {line.limit:.2e}; rms {line.rms_error:.2e}, limit {line.rms_limit:.2e}"
    return line.ok, line.part, f"{line.name} of {sample}: {errors}"


def _worst_row(report: Report) -> tuple[bool, float, str]:
    row = max(report.rows, key=lambda row: (not row.ok, row.badness))
    return row.ok, row.badness, f"{row.name}{list(row.index)}: {row.got!r} for {row.expected!r} by {row.against}"
