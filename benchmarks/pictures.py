"""Draw the pictures of the pages from what is kept in `benchmarks/results`.

    python benchmarks/pictures.py [FOLDER]    # pip install -e ".[bench]"; seconds

| picture | of | from |
|---|---|---|
| `benchmarks/pictures/saves.svg` | `python benchmarks/report.py` | `results/h200/report.json` |
| `benchmarks/pictures/steps.svg` | `python benchmarks/steps.py`, twelve layers | `results/h200/steps.json` |
| `benchmarks/results/h200/card.svg` | `python benchmarks/bench.py`, on an H200 | `results/h200/times.json` |
| `benchmarks/results/cpu/speed.svg`, `memory.svg` | `python benchmarks/bench.py` | `results/cpu/results.json` |
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from matplotlib import style
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
STYLED = style.context(str(ROOT / "benchmarks" / "pictures.mplstyle"))
WIDTH, LEFT = 830 / 96, 0.014  # inches: the page where a repository is browsed; and where in it texts start
OURS, GREY, LIGHT = "#0f766e", "#9ca3af", "#d8dce2"
NAMES = {"jnp": "plain jnp", "cudnn": "XLA's cuDNN", "flax": "Flax", "haiku": "Haiku", "torch": "PyTorch"}
NAMES |= {name: name for name in ("jln", "jln-norm", "tokamax", "torch.compile", "liger")}
DIRECTIONS = {"forward": "forward", "backward": "backward", "gradient": "gradient alone", "both": "forward + backward"}
# A step's programs, and whose they are: as the framework's layers make it, ours, and what no norm would take.
STEPS = {"as it is": "flax", "fused": "jln", "with Linears": "jln", "no norm": "bound"}


class Bar(NamedTuple):
    """A bar: whose it is, its length, and what stands at its end."""

    peer: str
    length: float
    text: str


Rows = Mapping[str, Sequence[Sequence[Bar]]]  # by what is compared, for each column its bars


@STYLED
def chart(title: str, caption: str, columns: Mapping[str, str | None], rows: Rows) -> Figure:
    """Draw rows of bars, as many columns side by side.

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
    figure.set_label("\n".join([caption, *columns, *told]))  # the description in the file
    return figure


def beside_ours(values: Mapping[str, float], unit: float, told: Mapping[str, str]) -> list[Bar]:
    """Make bars of lengths in `unit`, the shortest first, with how many times ours each is, and what is told of it."""
    bars = []
    for peer, value in sorted(values.items(), key=lambda item: item[1]):
        times = [] if peer == "jln" else [f"{value / values['jln']:.3g}\N{MULTIPLICATION SIGN}"]
        bars.append(Bar(peer, value / unit, " ".join([*times, NAMES[peer], told.get(peer, "")]).strip()))
    return bars


def saves(report: dict[str, Any]) -> Figure:
    """Draw the bytes that operators move beside every array once, and those held between forward and backward."""
    rows = {}
    for w in report["workloads"]:
        programs = {peer: p for peer, p in w["programs"].items() if peer != "jln-norm"}
        columns = []
        for fact in ("bytes", "held_bytes"):
            values = {peer: p[fact] for peer, p in programs.items() if p[fact]}
            columns.append(beside_ours(values, w["bytes_once"], {n: f"{v / 1e6:.0f} MB" for n, v in values.items()}))
        rows[w["name"]] = columns
    where = f"compiled for the {report['chip'].upper()} with JAX {report['versions']['jax']}"
    columns = {"moved by all kernels": "every array once", "held between forward and backward": None}
    title = "Bytes moved, and bytes held: less is better"
    return chart(title, f"Forward + backward of one operator, {where}.", columns, rows)


def steps(found: dict[str, Any]) -> Figure:
    """Draw whole steps: bytes outside of products and attention, and temporary memory."""
    rows = {}
    for step in found["steps"]:
        columns = []
        for fact in ("bytes_outside_products", "temporary_bytes"):
            values = {name: step["programs"][name][fact] for name in STEPS}
            changes = {name: f"{100 * (value / values['as it is'] - 1):+.1f} % " for name, value in values.items()}
            columns.append([Bar(STEPS[n], v, f"{changes[n]}{n} {v / 1e9:.3g} GB") for n, v in values.items()])
        rows[f"{step['name']}, products by {step['products']}"] = columns
    where = f"compiled for the {found['chip'].upper()} with JAX {found['versions']['jax']}"
    columns = {"moved outside of products and attention": None, "temporary memory": None}
    title = "A whole training step: less is better"
    return chart(title, f"Forward + backward, {where}. No norm: a bound and no model.", columns, rows)


def times(results: dict[str, Any], fact: str, title: str) -> Figure:
    """Draw each peer's median time, its peak bytes, or the part of the ceiling that it reaches ("of_ceiling")."""
    timed = [r for r in results["records"] if r["status"] == "timed" and r.get(fact) is not None]
    shown = [d for d in DIRECTIONS if any(r["direction"] == d for r in timed)]
    rows = {}
    for name in dict.fromkeys(r["workload"] for r in timed):
        of = {d: {r["peer"]: r for r in timed if (r["workload"], r["direction"]) == (name, d)} for d in shown}
        if all("jln" in records for records in of.values()):
            rows[name] = [_bars(records, fact) for records in of.values()]
    where = results["environment"]
    caption = f"{where['chip']}, jln {where['versions']['jln']} at {where['commit']}, JAX {where['versions']['jax']}."
    line = "the ceiling" if fact == "of_ceiling" else None
    return chart(title, caption, {DIRECTIONS[d]: line for d in shown}, rows)


def reached(results: dict[str, Any]) -> Figure:
    """Draw the part of the machine's ceiling that each peer reaches."""
    return times(results, "of_ceiling", "The part of the machine's ceiling that is reached: more is better")


def _bars(records: Mapping[str, dict[str, Any]], fact: str) -> list[Bar]:
    values = {peer: r[fact] for peer, r in records.items()}
    if fact == "of_ceiling":
        told = {p: f"{100 * v:.0f} % {NAMES[p]} {records[p]['median'] * 1e6:.3g} us" for p, v in values.items()}
        return [Bar(peer, value, told[peer]) for peer, value in sorted(values.items(), key=lambda item: -item[1])]
    told = {p: f"{v * 1e6:.3g} us" if fact == "median" else f"{v / 1e6:.3g} MB" for p, v in values.items()}
    return beside_ours(values, values["jln"], told)


@STYLED
def save(figure: Figure, path: pathlib.Path) -> None:
    """Write an SVG that has its title, and its label as its description."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about: Any = {"Date": None, "Title": figure.get_suptitle(), "Description": figure.get_label()}
    figure.savefig(path, format="svg", metadata=about)


def main(folder: Annotated[pathlib.Path, typer.Argument(help="In which they are drawn.")] = ROOT) -> None:
    """Draw the pictures of the pages from what is kept."""
    cpu, card = (json.loads((RESULTS / name).read_text()) for name in ("cpu/results.json", "h200/times.json"))
    report, whole = (json.loads((RESULTS / "h200" / f"{name}.json").read_text()) for name in ("report", "steps"))
    for path, figure in {
        "benchmarks/pictures/saves.svg": saves(report),
        "benchmarks/pictures/steps.svg": steps(whole),
        "benchmarks/results/h200/card.svg": reached(card),
        "benchmarks/results/cpu/speed.svg": times(cpu, "median", "Time: less is better"),
        "benchmarks/results/cpu/memory.svg": times(cpu, "peak_bytes", "Memory: less is better"),
    }.items():
        save(figure, folder / path)
        print(path)


if __name__ == "__main__":
    typer.run(main)
