"""The command `python -m jln check`, which tells whether the operators are right on this machine."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jax
import typer

from jln._tools import clocks
from jln._tools.accuracy import Judge, exact
from jln._tools.catalogue import DIRECTIONS, OPERATORS
from jln._tools.check_all import check_all
from jln._tools.console import Column, Note, Rows, UserError, known, progress, show
from jln._tools.machine import Device, described, devices, implementations, interpret_without_a_gpu
from jln._tools.workload import Init, Workload
from jln.testing.report import for_json

Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Implementation = Literal["xla", "triton"]
DEFAULT_SHAPE = "64x1024"
PROCESSES = min(os.cpu_count() or 1, 16)
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
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of every array. [default: float32; without OPERATOR: all]")
    ] = None,
    init: Annotated[Init | None, typer.Option(help="What the arrays hold. [default: normal]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data.")] = 0,
    implementation: Annotated[Implementation | None, typer.Option(help="Only this. [default: all that run]")] = None,
    device: Annotated[str | None, typer.Option(help="Only this: cpu, gpu, gpu:1. [default: all]")] = None,
    time: Annotated[bool, typer.Option("--time", help="Time forward and backward, too.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Without OPERATOR: side by side.")] = PROCESSES,
    seconds: Annotated[float | None, typer.Option(min=0, help="Without OPERATOR: end after so many, with 3.")] = None,
    output: Annotated[
        pathlib.Path | None,
        typer.Option(help="Without OPERATOR: a file, for a line of JSON a check; those it has are not run again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare values and gradients with float64, autodiff and central differences, on every device.

    Without OPERATOR: all operators in all dtypes, to second order, and wrong rules that must be rejected, with a line
    for each as it ends. With OPERATOR: one operator at one size. Exits with 1 if anything is wrong.
    """
    workload = None
    if operator is not None:
        workload = _workload(operator, shape, features, extras, dtype)
        for name, value in {"seconds": seconds, "output": output}.items():
            if value is not None:
                raise UserError(f"--{name} is for the check of all operators, without one")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU
        sizes = {"shape": shape, "features": features, "extras": extras}
        for name, value in (sizes | {"init": init, "time": time or None}).items():
            if value is not None:
                raise UserError(f"--{name} needs an operator: one of {', '.join(OPERATORS)}")
    jax.config.update("jax_enable_x64", True)
    interpret_without_a_gpu()
    chosen = [(d, _runnable(d, implementation)) for d in devices(device)]
    if not any(runnable for _, (runnable, _) in chosen):
        _, (_, why_not) = chosen[0]
        raise UserError(next(f"{name} cannot run: {why}" for name, why in why_not.items()))
    if workload:
        found = _check_one(workload, init or "normal", seed, chosen, time)
    else:
        found = check_all(chosen, dtype, seed, processes, seconds, output)
    show(*found, as_json)
    raise typer.Exit(1 if not found[0]["ok"] else 0 if found[0].get("finished", True) else 3)


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
