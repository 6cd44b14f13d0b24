"""Plots of the benchmark's results."""

from __future__ import annotations

import pathlib
from typing import Any

from jln._bench.results import relative

COLOURS = {
    "jln": "#d62728",
    "jln-norm": "#ff9896",
    "jnp": "#7f7f7f",
    "flax": "#1f77b4",
    "haiku": "#17becf",
    "tokamax": "#9467bd",
    "torch": "#ff7f0e",
    "torch.compile": "#bcbd22",
    "liger": "#2ca02c",
}
DIRECTIONS = {"forward": "forward", "backward": "backward", "both": "forward + backward", "gradient": "gradient alone"}


def draw(results: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw each peer's time over jln's, and the part of the machine's ceiling that each reaches; return the files."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    records = results["records"]
    times = relative(records)
    parts: dict[tuple[str, str], dict[str, float]] = {}
    for r in records:
        if "of_ceiling" in r:
            parts.setdefault((r["workload"], r["direction"]), {})[r["peer"]] = r["of_ceiling"]
    drawn = []
    for name, values, label, line in (
        ("speed", times, "time, jln's being 1", 1.0),
        ("ceiling", parts, "part of what the machine can do (copy bandwidth, matrix products)", 1.0),
    ):
        workloads = list(dict.fromkeys(workload for workload, _ in values))
        if not workloads:
            continue
        figure = Figure(figsize=(13, 1.9 + 0.26 * len(workloads)), layout="constrained")
        shown = [direction for direction in DIRECTIONS if any(d == direction for _, d in values)]
        axes = figure.subplots(1, len(shown), sharey=True, sharex=True, squeeze=False)[0]
        for ax, direction in zip(axes, shown, strict=True):
            for peer, colour in COLOURS.items():
                points = [
                    (values[w, direction][peer], y)
                    for y, w in enumerate(workloads)
                    if peer in values.get((w, direction), {})
                ]
                if points:
                    ax.plot(*zip(*points, strict=True), "o", color=colour, markersize=6, alpha=0.85, label=peer)
            ax.axvline(line, color=COLOURS["jln"] if name == "speed" else "black", linewidth=1, zorder=0)
            ax.set_title(DIRECTIONS[direction], fontsize=10)
            ax.grid(axis="both", alpha=0.25, which="both")
            if name == "speed":
                ax.set_xscale("log")
                ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
                ax.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
            else:
                ax.set_xlim(left=0)
        axes[0].set_yticks(range(len(workloads)), workloads, fontsize=8)
        axes[0].set_ylim(len(workloads) - 0.5, -0.5)
        axes[len(axes) // 2].set_xlabel(label)
        handles = {k: h for ax in axes for h, k in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
        where = results["environment"]
        versions = where["versions"]
        figure.suptitle(
            f"{where['chip']}, jln {versions['jln']} at {where['commit']}, jax {versions['jax']}", fontsize=11
        )
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        drawn.append(path)
    return drawn
