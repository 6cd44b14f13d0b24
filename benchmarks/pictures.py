"""Draw the pictures of the pages from records of `report.py`, `steps.py` with twelve layers, and `bench.py`.

python benchmarks/pictures.py [FOLDER]    # pip install -e ".[bench]"; seconds
"""

from __future__ import annotations

import json
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from matplotlib import style
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).resolve().parents[1]
WIDTH, LEFT = 830 / 96, 0.014  # inches: the page where a repository is browsed; and where in it texts start
OURS, GREY, LIGHT = "#0f766e", "#9ca3af", "#d8dce2"
NAMES = {"jnp": "plain jnp", "cudnn": "XLA's cuDNN", "flax": "Flax", "haiku": "Haiku", "torch": "PyTorch"}
NAMES |= {"liger": "Liger"} | {name: name for name in ("jln", "jln-norm", "tokamax", "torch.compile")}
TITLES = {
    "median": "Time: less is better",
    "peak_bytes": "Memory: less is better",
    "of_ceiling": "The part of the machine's ceiling that is reached: more is better",
}
DIRECTIONS = {"forward": "forward", "backward": "backward", "gradient": "gradient alone", "both": "forward + backward"}
# A step's programs, and whose they are: as the framework's layers make it, ours, and what no norm would take.
STEPS = {"as it is": "flax", "fused": "jln", "with Linears": "jln", "no norm": "bound"}


class Bar(NamedTuple):
    """A bar: whose it is, its length, and what stands at its end."""

    peer: str
    length: float
    text: str


Rows = Mapping[str, Sequence[Sequence[Bar]]]  # by what is compared, for each column its bars


@style.context(str(ROOT / "benchmarks" / "pictures.mplstyle"))
def chart(path: pathlib.Path, title: str, caption: str, columns: Mapping[str, str | None], rows: Rows) -> None:
    """Draw bars, for each row and column some of them, one below the other, as an SVG.

    columns: by its title what a line at the length of 1 means there, if there is one.
    """
    heights = [max(map(len, bars)) + 0.8 for bars in rows.values()]
    tops = [sum(heights[:i]) for i in range(len(rows))]
    figure = Figure((WIDTH, max(0.15 * sum(heights) + 1, 2)))  # less has no room for the texts around them
    figure.suptitle(title, x=LEFT, ha="left")
    figure.supxlabel(caption, x=LEFT, ha="left", color=GREY)
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for i, (axes, (column, line)) in enumerate(zip(panels, columns.items(), strict=True)):
        axes.set_title(column)
        axes.set_xticks([] if line is None else [1], [] if line is None else [line])
        for top, bars in zip(tops, rows.values(), strict=True):
            colours = [{"jln": OURS, "bound": LIGHT}.get(bar.peer, GREY) for bar in bars[i]]
            drawn = axes.barh([top + k for k in range(len(bars[i]))], [bar.length for bar in bars[i]], color=colours)
            for bar, text in zip(bars[i], axes.bar_label(drawn, [bar.text for bar in bars[i]], padding=3), strict=True):
                text.set(**({"color": OURS, "weight": "bold"} if bar.peer == "jln" else {}))
    panels[0].set_yticks(tops, list(rows), weight="bold")
    panels[0].set_ylim(sum(heights) - 1, -0.7)
    told = [f"{name}: {', '.join(bar.text for of in bars for bar in of)}" for name, bars in rows.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    about: Any = {"Date": None, "Title": title, "Description": "\n".join([caption, *columns, *told])}
    figure.savefig(path, format="svg", metadata=about)


def beside_ours(values: Mapping[str, float], unit: float, told: Mapping[str, str]) -> list[Bar]:
    """Make bars of lengths in `unit`, the shortest first, with how many times ours each is, and what is told of it."""
    times = {p: "" if p == "jln" else f"{v / values['jln']:.3g}\N{MULTIPLICATION SIGN} " for p, v in values.items()}
    order = sorted(values, key=lambda peer: values[peer])
    return [Bar(peer, values[peer] / unit, f"{times[peer]}{NAMES[peer]} {told[peer]}") for peer in order]


def saves(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draw the bytes that operators move beside every array once, and those held between forward and backward."""
    rows = {}
    for w in report["workloads"]:
        columns = []
        for fact in ("bytes", "held_bytes"):
            values = {peer: p[fact] for peer, p in w["programs"].items() if p[fact] and peer != "jln-norm"}
            columns.append(beside_ours(values, w["bytes_once"], {n: f"{v / 1e6:.0f} MB" for n, v in values.items()}))
        rows[w["name"]] = columns
    columns = {"moved by all kernels": "every array once", "held between forward and backward": None}
    caption = f"python benchmarks/report.py NAME, for the {report['chip'].upper()} by JAX {report['versions']['jax']}."
    chart(path, "Bytes that forward + backward moves, and holds: less is better", caption, columns, rows)


def steps(found: dict[str, Any], path: pathlib.Path, *, whole: bool = False) -> None:
    """Draw steps: temporary memory, and bytes, of the whole step or outside of matmuls and attention."""
    rows = {}
    for step in found["steps"]:
        columns = []
        for fact in ("bytes" if whole else "bytes_outside_products", "temporary_bytes"):
            values = {n: step["programs"][n][fact] for n in STEPS if not whole or n != "no norm"}
            changes = {n: f"{math.ceil(1000 * (v / values['as it is'] - 1)) / 10:+.1f} % " for n, v in values.items()}
            columns.append([Bar(STEPS[n], v, f"{changes[n]}{n} {v / 1e9:.3g} GB") for n, v in values.items()])
        rows[f"{shlex.quote(step['name'])} --products {step['products']}"] = columns
    what, end = ("by all kernels", ".") if whole else ("outside of matmuls and attention", ". No norm: left out.")
    by = f"python benchmarks/steps.py NAME --layers 12, {found['chip'].upper()}, JAX {found['versions']['jax']}"
    columns = {f"bytes moved {what}": None, "temporary memory": None}
    chart(path, "A whole training step: less is better", by + end, columns, rows)


def times(results: dict[str, Any], fact: str, path: pathlib.Path) -> None:
    """Draw a fact of `TITLES` for each peer."""
    timed = [r for r in results["records"] if r["status"] == "timed" and r.get(fact) is not None]
    shown = [d for d in DIRECTIONS if any(r["direction"] == d for r in timed)]
    rows = {}
    for name in dict.fromkeys(r["workload"] for r in timed):
        of = {d: {r["peer"]: r for r in timed if (r["workload"], r["direction"]) == (name, d)} for d in shown}
        if all("jln" in records for records in of.values()):
            rows[name] = [_bars(records, fact) for records in of.values()]
    where = results["environment"]
    caption = f"{where['chip']}, jln {where['versions']['jln']} at {where['commit']}, JAX {where['versions']['jax']}."
    columns = {DIRECTIONS[d]: "the ceiling" if fact == "of_ceiling" else None for d in shown}
    chart(path, TITLES[fact], caption, columns, rows)


def _bars(records: Mapping[str, dict[str, Any]], fact: str) -> list[Bar]:
    values = {peer: r[fact] for peer, r in records.items()}
    if fact == "of_ceiling":
        told = {p: f"{100 * v:.0f} % {NAMES[p]} {records[p]['median'] * 1e6:.3g} us" for p, v in values.items()}
        return [Bar(peer, value, told[peer]) for peer, value in sorted(values.items(), key=lambda item: -item[1])]
    told = {p: f"{v * 1e6:.3g} us" if fact == "median" else f"{v / 1e6:.3g} MB" for p, v in values.items()}
    return beside_ours(values, values["jln"], told)


def main(folder: Annotated[pathlib.Path, typer.Argument(help="In which they are drawn.")] = ROOT) -> None:
    """Draw the pictures of the pages from what is kept."""
    kept = "cpu/results", "h200/times", "h200/report", "h200/steps"
    cpu, card, report, whole = (json.loads((ROOT / f"benchmarks/results/{n}.json").read_text()) for n in kept)
    saves(report, folder / "benchmarks/pictures/saves.svg")
    steps(whole, folder / "benchmarks/pictures/steps.svg")
    front = [s for s in whole["steps"] if s["name"].isalpha() and s["products"] == "XLA"]
    steps(whole | {"steps": front}, folder / "benchmarks/pictures/front.svg", whole=True)
    times(card, "of_ceiling", folder / "benchmarks/results/h200/card.svg")
    times(cpu, "median", folder / "benchmarks/results/cpu/speed.svg")
    times(cpu, "peak_bytes", folder / "benchmarks/results/cpu/memory.svg")


if __name__ == "__main__":
    typer.run(main)
