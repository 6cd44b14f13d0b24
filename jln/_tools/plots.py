"""Pictures of what `bench` and `report` found, which say in one look what is better and by how much."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jln._tools.canvas import GREYS, INK, MARGIN, OURS, RULE, SOFT, WIDTH, Canvas
from jln._tools.results import geometric_mean

# What this library is compared with has a grey of its own, the darkest what a user would most likely have.
NAMES = {
    "jln": "jln",
    "flax": "Flax",
    "jnp": "plain jnp",
    "haiku": "Haiku",
    "tokamax": "tokamax",
    "torch": "PyTorch",
    "torch.compile": "torch.compile",
    "liger": "Liger",
    "jln-norm": "jln-norm",
    "bound": "no norm",
}
COLOURS = {name: OURS if name == "jln" else GREYS[min(i, len(GREYS)) - 1] for i, name in enumerate(NAMES)}
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"
_PITCH = 14  # of bars, their text included


@dataclass(frozen=True)
class Bar:
    """A bar. peer: whose it is. strong, text: what stands at its end."""

    peer: str
    length: float
    strong: str
    text: str = ""


@dataclass(frozen=True)
class Row:
    """A thing compared: its name, notes on it, and for each column of the picture its bars."""

    name: str
    notes: Sequence[str]
    columns: Sequence[Sequence[Bar]]


@dataclass(frozen=True)
class Column:
    """A column of bars.

    title: what the bars are lengths of. part: the column's part of the sheet's width. line: a length to draw a line at,
    and what it means.
    """

    title: str
    part: float = 1.0
    line: tuple[float, str] | None = None

    def unit(self, canvas: Canvas, bars: Sequence[Bar], width: float) -> float:
        """Return the pixels of a length of 1: as many as leave room for what stands at the bars' ends."""
        rooms = [(width - sum(_widths(canvas, bar)), bar.length) for bar in bars]
        return min((room / length for room, length in rooms if length), default=width)


@dataclass
class Chart:
    """Rows of bars, as many columns side by side."""

    title: str
    lines: Sequence[str]
    columns: Sequence[Column]
    names: float  # pixels for the rows' names
    rows: list[Row] = field(default_factory=list)

    def drawn(self) -> Canvas:
        top = 50 + 15 * len(self.lines) + 30
        heights = [max(8 + 14 * len(row.notes), _PITCH * max(len(c) for c in row.columns)) + 12 for row in self.rows]
        starts = [top + sum(heights[:i]) for i in range(len(heights))]
        end = top + sum(heights)
        canvas = Canvas(end + 6)
        canvas.title(self.title, *self.lines)
        left = MARGIN + self.names
        room = WIDTH - MARGIN - left
        for i, column in enumerate(self.columns):
            width = room * column.part / sum(c.part for c in self.columns)
            canvas.text(left, top - 26, column.title, bold=True)
            unit = column.unit(canvas, [bar for row in self.rows for bar in row.columns[i]], width - 10)
            if column.line:
                at, meaning = left + unit * column.line[0], column.line[1]
                canvas.line((at, top - 8), (at, end - 8), colour=SOFT if meaning else RULE, dashed=True)
                canvas.text(at + 4, top - 10, meaning, size=10)
            for row, start in zip(self.rows, starts, strict=True):
                for k, bar in enumerate(row.columns[i]):
                    draw_bar(canvas, bar, left, start + _PITCH * k, unit)
            left += width
        for row, start in zip(self.rows, starts, strict=True):
            canvas.text(MARGIN, start + 8, row.name, bold=True)
            for k, note in enumerate(row.notes):
                canvas.text(MARGIN, start + 22 + 13 * k, note, size=10, colour=SOFT)
        return canvas


def draw_bar(canvas: Canvas, bar: Bar, left: float, top: float, unit: float) -> None:
    """Draw a bar, `unit` pixels for a length of 1, and what stands at its end."""
    ours = bar.peer == "jln"
    canvas.box(left, top + 2, max(1.0, unit * bar.length), _PITCH - 3, COLOURS[bar.peer])
    end, middle = left + unit * bar.length + 5, top + 8
    canvas.text(end, middle, bar.strong, size=10.5, colour=OURS if ours else INK, bold=True)
    end += _widths(canvas, bar)[0]
    canvas.text(end, middle, bar.text, size=10.5, colour=OURS if ours else SOFT)


def _widths(canvas: Canvas, bar: Bar) -> tuple[float, float]:
    """Return the pixels of what stands at a bar's end, each with the space behind it."""
    return canvas.width(bar.strong, size=10.5, bold=True) + 5, canvas.width(bar.text, size=10.5) + 5


def _compared(values: dict[str, float], unit: float, said: Callable[[str], str]) -> list[Bar]:
    """Make bars of lengths in `unit`, the shortest first, with how many times ours each is."""
    ours = values["jln"]
    strong = {peer: "jln" if peer == "jln" else times(value / ours) for peer, value in values.items()}
    return _in_order([Bar(peer, value / unit, strong[peer], said(peer)) for peer, value in values.items()])


def _in_order(bars: list[Bar]) -> list[Bar]:
    return sorted(bars, key=lambda bar: (bar.length, list(NAMES).index(bar.peer)))


def times(ratio: float) -> str:
    return f"{ratio:.1f}{TIMES}" if ratio >= 1.995 else f"{ratio:.2f}{TIMES}"


def _size(value: float) -> str:
    return (
        f"{value / 1e9:.1f} GB"
        if value >= 1e10
        else f"{value / 1e9:.2f} GB"
        if value >= 1e9
        else f"{value / 1e6:.0f} MB"
    )


def _operator(workload: dict[str, Any], programs: dict[str, dict[str, Any]]) -> tuple[float, Row]:
    """Return how many times our bytes the others move, and a workload's row."""
    moved = {peer: p["bytes"] for peer, p in programs.items()}
    held = {peer: p["held_bytes"] for peer, p in programs.items() if p["held_bytes"]}

    def all_of(peer: str) -> str:
        name, count = "" if peer == "jln" else f"{NAMES[peer]} ", programs[peer]["kernels"]
        return f"{name}{_size(moved[peer])}, {count} kernel{'s' if count > 1 else ''}"

    def kept(peer: str) -> str:
        return _size(held[peer]) if peer == "jln" else f"{NAMES[peer]} {_size(held[peer])}"

    notes = [" x ".join(map(str, workload["shape"]))]
    if isinstance(workload["features"], list):
        notes.append("to " + " + ".join(map(str, workload["features"])))
    elif workload["features"]:
        notes[0] += f" to {workload['features']}"
    more = workload["title"].removeprefix(workload["operator"]).lstrip(", ")
    notes += [more] if more else []
    notes += ["parameters of each example"] if workload["of_examples"] else []
    notes += [] if "backward" in workload["directions"] else ["forward alone"]
    once = workload["bytes_once"]
    columns = (_compared(moved, once, all_of), _compared(held, once, kept) if "jln" in held else ())
    gain = geometric_mean([b / moved["jln"] for peer, b in moved.items() if peer != "jln"])
    return gain, Row(workload["operator"], notes, columns)


def operators(report: dict[str, Any]) -> Canvas | None:
    """Draw the bytes that programs move beside every array once, and those held between forward and backward.

    The operator that gains most comes first.
    """
    rows: list[tuple[float, Row]] = []
    for w in report["workloads"]:
        programs = {peer: p for peer, p in w["programs"].items() if peer != "jln-norm"}
        if "jln" in programs and len(programs) > 1:
            rows.append(_operator(w, programs))
    if not rows:
        return None
    chart = Chart(
        "Bytes moved, and bytes held: less is better",
        (
            f"Forward + backward of one operator, compiled for {_chip(report)} with JAX {report['versions']['jax']}. "
            f"n{TIMES}: so many times jln's.",
            "Held: what jax.vjp hands from forward to backward; a step in one jit keeps less of it.",
        ),
        (
            Column("moved by all kernels", 1.35, (1.0, "every array once")),
            Column("held between forward and backward", 1.0),
        ),
        names=160,
        rows=[row for _, row in sorted(rows, key=lambda item: -item[0])],
    )
    return chart.drawn()


def steps(report: dict[str, Any], products: str | None = None) -> Canvas | None:
    """Draw whole steps: bytes outside of products and attention, and temporary memory. products: by these alone."""
    rows = []
    for s in report["steps"]:
        programs = s["programs"]
        if (products and s["products"] != products) or not any(p.startswith("jln") for p in programs):
            continue
        columns = []
        for fact in ("bytes_outside_products", "temporary_bytes"):
            values = {peer: float(p[fact]) for peer, p in programs.items()}
            columns.append(_beside(values))
        notes = [f"{s['layers']} layers of {s['shape'][-1]}", f"products by {s['products']}"]
        rows.append(Row(s["name"], notes[:1] if products else notes, columns))
    if not rows:
        return None
    return Chart(
        "A whole training step: less is better",
        (
            f"Forward + backward of a transformer's layers, compiled for {_chip(report)} with JAX "
            f"{report['versions']['jax']}. n %: beside Flax's layers.",
            "No norm: the same step with its norms left out, a bound and no model.",
        ),
        (
            Column("moved outside of products and attention"),
            Column("temporary memory"),
        ),
        names=120,
        rows=rows,
    ).drawn()


# Of a step's variants Flax's layers, plain jnp, two of ours (with the residual in front of the norm, and with the
# Linear behind it, too), and the bound: whose bar each is, and what it is called there.
_VARIANTS = {
    "flax": ("flax", "Flax"),
    "jnp": ("jnp", "plain jnp"),
    "jln, add_norm": ("jln", "add_norm"),
    "jln, add_norm_linear": ("jln", "add_norm_linear"),
    "no norm at all": ("bound", "no norm"),
}


def _beside(values: dict[str, float]) -> list[Bar]:
    """Make bars that say how each differs from Flax's layers, or from plain jnp: the shortest first, last the bound."""
    base = "flax" if "flax" in values else "jnp"
    bars = []
    for variant, (peer, name) in _VARIANTS.items():
        if variant in values:
            change = f"{100 * (values[variant] / values[base] - 1):+.1f} %".replace("-", MINUS)
            strong = name if variant == base else "same" if change[1:] == "0.0 %" else change
            told = _size(values[variant])
            bars.append(Bar(peer, values[variant], strong, told if variant == base else f"{name} {told}"))
    return sorted(bars, key=lambda bar: (bar.peer == "bound", bar.length))


def _chip(report: dict[str, Any]) -> str:
    chip = report["chip"].upper()
    return f"{'an' if chip[0] in 'AHM' else 'a'} {chip}"


def draw_report(report: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw operators, if there are any, and return the files."""
    return _saved({"operators": operators(report)}, folder)


def _saved(canvases: dict[str, Canvas | None], folder: pathlib.Path) -> list[pathlib.Path]:
    drawn = []
    for name, canvas in canvases.items():
        if canvas is not None:
            canvas.save(folder / f"{name}.svg")
            drawn.append(folder / f"{name}.svg")
    return drawn


# What bench times, a column each. On the CPU, where the gradient alone is timed too, it stands for the backward pass.
_DIRECTIONS = {"forward": "forward", "backward": "backward", "gradient": "gradient alone", "both": "forward + backward"}


def speed(results: dict[str, Any]) -> Canvas | None:
    """Draw each peer's median time, jln's being 1."""

    def ours(r: dict[str, Any]) -> str:
        return _duration(r["median"]) + (f", {100 * r['of_ceiling']:.0f} %" if "of_ceiling" in r else "")

    lines = (
        f"n{TIMES}: the median time is so many times jln's. n %: what jln reaches of this machine's copy bandwidth, or "
        "product rate.",
    )
    return _timed(results, "Time: less is better", lines, lambda r: r.get("median"), ours)


def memory(results: dict[str, Any]) -> Canvas | None:
    """Draw the most memory that each peer's program needs at once, jln's being 1."""
    lines = (f"All that a program needs at once, its arguments and results too. n{TIMES}: so many times jln's.",)
    return _timed(
        results, "Memory: less is better", lines, lambda r: r.get("peak_bytes"), lambda r: _size(r["peak_bytes"])
    )


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _timed(
    results: dict[str, Any],
    title: str,
    lines: Sequence[str],
    value: Callable[[dict[str, Any]], float | None],
    ours: Callable[[dict[str, Any]], str],
) -> Canvas | None:
    """Draw a row for each workload, behind one of the geometric means where there are several.

    The row whose fastest peer is furthest behind in the last column is the first.
    """
    measurements: dict[tuple[str, str], dict[str, tuple[float, dict[str, Any]]]] = {}
    for r in results["records"]:
        if r["direction"] in _DIRECTIONS and r["status"] == "timed" and (measured := value(r)):
            measurements.setdefault((r["workload"], r["direction"]), {})[r["peer"]] = measured, r
    compared = {key: by for key, by in measurements.items() if "jln" in by and len(by) > 1}
    shown = [d for d in _DIRECTIONS if any(direction == d for _, direction in compared)]
    shown = [d for d in shown if not (d == "backward" and "gradient" in shown)]
    if not shown:
        return None
    ratios: dict[str, dict[str, list[float]]] = {d: {} for d in shown}
    rows = []
    for workload in dict.fromkeys(w for w, _ in compared):
        columns = []
        for direction in shown:
            by = compared.get((workload, direction), {})
            bars = []
            for peer, (measured, r) in by.items():
                ratio = measured / by["jln"][0]
                bars.append(Bar(peer, ratio, *(("jln", ours(r)) if peer == "jln" else (times(ratio), NAMES[peer]))))
                ratios[direction].setdefault(peer, []).append(ratio)
            columns.append(_in_order(bars))
        rows.append(Row(workload.removeprefix("cpu-"), (), columns))
    rows.sort(key=lambda row: -min((b.length for b in row.columns[-1] if b.peer != "jln"), default=math.inf))
    if len(rows) > 1:
        means = [_in_order([_mean(peer, of, len(by["jln"])) for peer, of in by.items()]) for by in ratios.values()]
        rows.insert(0, Row("geometric mean", (f"of {len(rows)} workloads",), means))
    where, versions = results["environment"], results["environment"]["versions"]
    run = f"{where['chip']}, jln {versions['jln']} at {where['commit']}, JAX {versions['jax']}."
    columns = [Column(_DIRECTIONS[d], line=(1.0, "")) for d in shown]
    return Chart(title, (run, *lines), columns, names=150, rows=rows).drawn()


def _mean(peer: str, ratios: list[float], all_there_are: int) -> Bar:
    """Make the bar of a geometric mean, which says of how many where a peer is not in all rows."""
    mean = geometric_mean(ratios)
    less = f", of {len(ratios)}" if len(ratios) < all_there_are else ""
    return Bar(peer, mean, *(("jln",) if peer == "jln" else (times(mean), NAMES[peer] + less)))


def draw_bench(results: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw time, and memory where it is known, of each peer beside jln's, and return the files."""
    return _saved({"speed": speed(results), "memory": memory(results)}, folder)
