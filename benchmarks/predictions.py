"""Predictions of what operators take on a card, from the bytes and products of their programs, compiled without one."""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer

import report
from bench import load
from machine import versions
from peers import PEERS as ALL_PEERS
from rows import known, save
from workloads import ALL, WORKLOADS

HERE = pathlib.Path(__file__).resolve().parent
RESULTS = HERE / "results"
PREDICTIONS = RESULTS / "predictions.json"
CHIPS = ("h100", "h200")
PEERS = ("jln", "jnp")


def number(value: float) -> str:
    """Write a number with three digits, or with all of those before the point."""
    return f"{value:.{places(value)}f}"


def places(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(value))) if 0 < value < 100 else 0


def table(*rows: Iterable[Any]) -> list[str]:
    """Write a table, its header first."""
    first, *rest = map(list, rows)
    return [f"| {' | '.join(map(str, row))} |" for row in (first, ["---"] * len(first), *rest)]


def rates(chip: str) -> dict[str, Any]:
    """Return the bytes and product flops that a chip is taken to do in a second, and why."""
    h200 = load(RESULTS / "h200" / "times.json")["ceilings"]
    products = f"{h200['flop_per_s'] / 1e12:.3g} TFLOP/s"
    if chip == "h200":
        return h200 | {"why": f"a copy of {h200['bytes_per_s'] / 1e9:.0f} GB/s and {products}, as an H200 measured"}
    why = f"a copy of 3000 GB/s, assumed of 3350 nominal, and {products}, assumed as of an H200, whose SMs it has"
    return {"bytes_per_s": 3.0e12, "flop_per_s": h200["flop_per_s"], "why": why}


def workloads() -> list[str]:
    """Read the operators that first_light.sh times on a card."""
    script = (HERE / "first_light.sh").read_text()
    lines = re.findall(r"^(?:norms|more)=.*", script, re.M)  # those of the rehearsal are indented
    arrays = re.findall(r"\b(?:norms|few|linears|more)=\((?:\$\{\w+:-)?([^)}]*)", "\n".join(lines))
    return [str(name) for array in arrays for name in array.split()]


def predictions() -> dict[str, Any]:
    """Return what was predicted, by the chip's name."""
    return json.loads(PREDICTIONS.read_text()) if PREDICTIONS.exists() else {}


def predicted(chip: str) -> dict[str, Any]:
    """Compile the workloads' programs for a chip, and say what they take: their bytes or their products."""
    compiled, _ = report.compiled_programs([WORKLOADS[n] for n in workloads()], [ALL_PEERS[p] for p in PEERS], chip)
    can, found = rates(chip), {}
    for w in compiled["workloads"]:
        flops = ALL[w["name"]].product_flops()
        found[w["name"]] = {"direction": "both" if len(w["directions"]) > 1 else "forward", "product_flops": flops}
        for peer in PEERS:
            size = w["programs"][peer]["bytes"]
            seconds = max(size / can["bytes_per_s"], flops / can["flop_per_s"])
            found[w["name"]][peer] = {"bytes": size, "microseconds": seconds * 1e6}
    return can | {"versions": {p: versions()[p] for p in ("jln", "jax", "triton")}, "workloads": found}


def rows(found: dict[str, Any]) -> Iterable[list[str]]:
    """Yield the cells of a table, its header first: jln / plain jnp, as predicted and as the cards took."""
    timed = [(c, r) for c in CHIPS for r in load(RESULTS / c / "times.json")["records"] if r["status"] == "timed"]
    took = {(c, r["workload"], r["direction"], r["peer"]): number(r["median"] * 1e6) for c, r in timed}
    yield ["`NAME`", *(f"{c.upper()}, {what}" for what in ("predicted", "measured") for c in CHIPS)]
    for name in dict.fromkeys(name for chip in found.values() for name in chip["workloads"]):
        of = [found[c]["workloads"].get(name) if c in found else None for c in CHIPS]
        cells = [" / ".join(number(w[peer]["microseconds"]) for peer in PEERS) if w else "" for w in of]
        direction = next(w for w in of if w)["direction"]
        measured = [[took.get((c, name, direction, peer)) for peer in PEERS] for c in CHIPS]
        yield [f"`{name}`", *cells, *(" / ".join(filter(None, each)) for each in measured)]


def predict(
    chip: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(CHIPS)}. [default: both]")] = None,
) -> None:
    """Predict what the workloads of first_light.sh take on a chip, and print a table."""
    found = predictions() | {name: predicted(name) for name in known("chip", chip or CHIPS, CHIPS)}
    save(found, PREDICTIONS)
    print(*table(*rows(found)), sep="\n")
