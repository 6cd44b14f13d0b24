"""Pictures of what `bench` and `report` found, which say in one look what is better and by how much."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from jln._tools.results import geometric_mean, relative

STYLED = style.context("jln._tools.plots")  # plots.mplstyle, beside this file
WIDTH = 830 / 96  # inches: the page where a repository is browsed
LEFT = 0.014  # of it, where texts start
BOUND = "no norm at all"  # a step without norms
# What this library is compared with has a grey of its own, the darkest what a user would most likely have.
INK, OURS = "#1f2937", "#0f766e"
GREYS = ("#6b7280", "#9ca3af", "#b4bac4", "#c8cdd5", "#d8dce2", "#e5e8ec")
NAMES = {
    "jln": "jln",
    "flax": "Flax",
    "jnp": "plain jnp",
    "haiku": "Haiku",
    "tokamax": "tokamax",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "liger": "Liger",
    "cudnn": "XLA's cuDNN",
    "jln-norm": "jln-norm",
    BOUND: "no norm",
}
COLOURS = {name: OURS if name == "jln" else GREYS[min(i, len(GREYS)) - 1] for i, name in enumerate(NAMES)}
TIMES = "\N{MULTIPLICATION SIGN}"
# What bench times, a column each. On the CPU, where the gradient alone is timed too, it stands for the backward pass.
_DIRECTIONS = {"forward": "forward", "backward": "backward", "gradient": "gradient alone", "both": "forward + backward"}


class Bar(NamedTuple):
    """A bar: whose it is, its length, and what stands at its end."""

    peer: str
    length: float
    text: str


class Row(NamedTuple):
    """A thing compared: its name, notes on it, and for each column of the picture its bars."""

    name: str
    notes: Sequence[str]
    columns: Sequence[Sequence[Bar]]


@STYLED
def chart(title: str, caption: str, columns: Mapping[str, str | None], rows: Sequence[Row]) -> Figure | None:
    """Draw rows of bars, if there are any, as many columns side by side.

    columns: by its title what a line at the length of 1 means there, if there is one.
    """
    if not rows:
        return None
    heights = [max(1 + len(row.notes), *map(len, row.columns)) + 0.8 for row in rows]
    tops = [sum(heights[:i]) for i in range(len(rows))]
    figure = card(max(0.15 * sum(heights) + 1, 2), title, caption)  # less has no room for the texts around them
    panels: list[Axes] = list(figure.subplots(1, len(columns), sharey=True, squeeze=False)[0])
    for i, (axes, (column, line)) in enumerate(zip(panels, columns.items(), strict=True)):
        axes.set_title(column)
        axes.set_xticks([] if line is None else [1], [] if line is None else [line])
        for top, row in zip(tops, rows, strict=True):
            draw_bars(axes, top, row.columns[i])
        if line is not None and axes.get_xlim()[1] < 1:  # where all bars are shorter
            axes.set_xlim(0, 1)
    notes = {top + k: note for top, row in zip(tops, rows, strict=True) for k, note in enumerate(row.notes, 1)}
    panels[0].set_yticks(tops, [row.name for row in rows], weight="bold")
    panels[0].set_yticks(list(notes), notes.values(), minor=True, color=GREYS[0])
    panels[0].set_ylim(sum(heights) - 1, -0.7)
    figure.align_titles()
    bars = [", ".join(bar.text for column in row.columns for bar in column) for row in rows]
    names = [", ".join([row.name, *row.notes]) for row in rows]
    figure.set_label("\n".join([caption, *columns, *(f"{name}: {of}" for name, of in zip(names, bars, strict=True))]))
    return figure


def card(height: float, title: str, caption: str) -> Figure:
    """Make an empty picture, so many inches high."""
    figure = Figure((WIDTH, height))
    figure.suptitle(title, x=LEFT, ha="left")
    figure.supxlabel(caption, x=LEFT, ha="left", color=GREYS[0])
    return figure


def draw_bars(axes: Axes, top: float, bars: Sequence[Bar]) -> None:
    """Draw bars below one another, with their texts."""
    lengths, colours = [bar.length for bar in bars], [COLOURS[bar.peer] for bar in bars]
    drawn = axes.barh([top + i for i in range(len(bars))], lengths, color=colours)
    for bar, text in zip(bars, axes.bar_label(drawn, [bar.text for bar in bars], padding=3), strict=True):
        if bar.peer == "jln":
            text.set(color=OURS, weight="bold")


@STYLED
def save_all(figures: Mapping[str, Figure | None], folder: pathlib.Path) -> None:
    """Write SVGs that have their title, and their label or every text on them as their description."""
    for path, figure in figures.items():
        if figure is not None:
            told = figure.get_label() or "\n".join(filter(None, [text.get_text() for text in figure.findobj(Text)]))
            about: Any = {"Date": None, "Title": figure.get_suptitle(), "Description": told}
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(folder / path, format="svg", metadata=about)


def draw_report(report: dict[str, Any], folder: pathlib.Path) -> None:
    """Draw operators, if there are any."""
    save_all({"operators.svg": operators(report)}, folder)


def draw_bench(results: dict[str, Any], folder: pathlib.Path) -> None:
    """Draw time, and memory where it is known, of each peer beside jln's."""
    save_all({"speed.svg": speed(results), "memory.svg": memory(results)}, folder)


def beside_ours(values: Mapping[str, float], told: Mapping[str, str], unit: float = 1) -> list[Bar]:
    """Make bars of lengths in `unit`, the shortest first, with how many times ours each is, and what is told of it."""
    bars = []
    for peer in [peer for peer in NAMES if peer in values]:
        ratio = values[peer] / values["jln"]
        times = [] if peer == "jln" else [f"{ratio:.1f}{TIMES}" if ratio >= 1.995 else f"{ratio:.2f}{TIMES}"]
        bars.append(Bar(peer, values[peer] / unit, " ".join([*times, NAMES[peer], told.get(peer, "")]).strip()))
    return sorted(bars, key=lambda bar: bar.length)


def mb(size: float) -> str:
    """Say a number of bytes."""
    return f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e6:.2f} MB"


def operators(report: dict[str, Any]) -> Figure | None:
    """Draw the bytes that programs move beside every array once, and those held between forward and backward.

    The operator that gains most comes first.
    """
    rows: list[tuple[float, Row]] = []
    for workload in report["workloads"]:
        programs = {peer: p for peer, p in workload["programs"].items() if peer != "jln-norm"}
        if not programs.keys() > {"jln"}:
            continue
        once, moved = workload["bytes_once"], {peer: p["bytes"] for peer, p in programs.items()}
        held = {peer: p["held_bytes"] for peer, p in programs.items() if p["held_bytes"]}
        kernels = {peer: f"{p['kernels']} kernel{'s' if p['kernels'] > 1 else ''}" for peer, p in programs.items()}
        columns = [beside_ours(moved, {peer: f"{mb(moved[peer])}, {kernels[peer]}" for peer in programs}, once), []]
        if "jln" in held:
            columns[1] = beside_ours(held, {peer: mb(value) for peer, value in held.items()}, once)
        gain = geometric_mean([bar.length for bar in columns[0] if bar.peer != "jln"]) / (moved["jln"] / once)
        rows.append((gain, Row(workload["operator"], _notes(workload), columns)))
    return chart(
        "Bytes moved, and bytes held: less is better",
        f"Forward + backward of one operator, compiled for the {report['chip'].upper()} with JAX "
        f"{report['versions']['jax']}. n{TIMES}: so many times jln's.\n"
        "Held: what jax.vjp hands from forward to backward; a step in one jit keeps less of it.",
        {"moved by all kernels": "every array once", "held between forward and backward": None},
        [row for _, row in sorted(rows, key=lambda r: -r[0])],
    )


def _notes(workload: dict[str, Any]) -> list[str]:
    """Say what else a workload is than its operator."""
    features = workload["features"]
    return [
        " x ".join(map(str, workload["shape"])),
        *([f"to {' + '.join(map(str, features if isinstance(features, list) else [features]))}"] if features else []),
        *filter(None, [workload["title"].removeprefix(workload["operator"]).lstrip(", ")]),
        *(["parameters of each example"] if workload["of_examples"] else []),
        *([] if "backward" in workload["directions"] else ["forward alone"]),
    ]


def speed(results: dict[str, Any]) -> Figure | None:
    """Draw each peer's median time, jln's being 1."""

    def told(record: dict[str, Any]) -> str:
        seconds = record["median"]
        taken = f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
        return taken + (f", {100 * record['of_ceiling']:.0f} %" if "of_ceiling" in record else "")

    meaning = (
        f"n{TIMES}: the median time is so many times jln's. n %: what jln reaches of this machine's copy bandwidth, or "
        "product rate."
    )
    return _measured(results, "median", "Time: less is better", meaning, told)


def memory(results: dict[str, Any]) -> Figure | None:
    """Draw the most memory that each peer's program needs at once, jln's being 1."""
    meaning = f"All that a program needs at once, its arguments and results too. n{TIMES}: so many times jln's."
    return _measured(results, "peak_bytes", "Memory: less is better", meaning, lambda record: mb(record["peak_bytes"]))


def _measured(
    results: dict[str, Any], fact: str, title: str, meaning: str, told: Callable[[dict[str, Any]], str]
) -> Figure | None:
    """Draw a row for each workload, behind one of the geometric means where there are several.

    The row whose fastest peer is furthest behind in the last column is the first.
    """
    records = [r for r in results["records"] if r["status"] == "timed" and r.get(fact)]
    ours = {(r["workload"], r["direction"]): told(r) for r in records if r["peer"] == "jln"}
    ratios = {key: {"jln": 1.0} | by for key, by in relative(records, fact).items() if by}
    shown = [d for d in _DIRECTIONS if any(direction == d for _, direction in ratios)]
    shown = [d for d in shown if not (d == "backward" and "gradient" in shown)]
    rows = []
    for workload in dict.fromkeys(workload for workload, _ in ratios):
        keys = [(workload, direction) for direction in shown]
        columns = [beside_ours(ratios[key], {"jln": ours[key]}) if key in ratios else [] for key in keys]
        rows.append(Row(workload.removeprefix("cpu-"), (), columns))
    rows.sort(key=lambda row: -min((bar.length for bar in row.columns[-1] if bar.peer != "jln"), default=math.inf))
    if len(rows) > 1:
        means = [_means([by for (_, of), by in ratios.items() if of == direction]) for direction in shown]
        rows.insert(0, Row("geometric mean", (f"of {len(rows)} workloads",), means))
    where, versions = results["environment"], results["environment"]["versions"]
    run = f"{where['chip']}, jln {versions['jln']} at {where['commit']}, JAX {versions['jax']}."
    return chart(title, f"{run}\n{meaning}", {_DIRECTIONS[direction]: "" for direction in shown}, rows)


def _means(ratios: Sequence[Mapping[str, float]]) -> list[Bar]:
    """Make bars of geometric means, which say of how many where a peer is not in all rows."""
    of = {peer: [by[peer] for by in ratios if peer in by] for peer in NAMES}
    told = {peer: f"(of {len(numbers)})" for peer, numbers in of.items() if len(numbers) < len(ratios)}
    return beside_ours({peer: geometric_mean(numbers) for peer, numbers in of.items() if numbers}, told)
