"""The part of a machine's ceiling that programs reach: in words, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from jln._tools import plots


def number(value: float) -> str:
    """Write a number with three digits, or with all of those before the point."""
    return f"{value:.{_places(value)}f}"


def rounded_down(value: float) -> str:
    """Write a number as `number` does, but rounded down."""
    scale = 10 ** _places(value)
    return f"{math.floor(round(value * scale, 6)) / scale:.{_places(value)}f}"  # 28.9999999 is 29 in exact arithmetic


def _places(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(value))) if 0 < value < 100 else 0


def part_of_ceiling(record: Mapping[str, Any]) -> str:
    """Write the percent of the ceiling that a record reaches, rounded down; nothing where it is not known."""
    return f"{math.floor(round(100 * record['of_ceiling'], 6))}" if "of_ceiling" in record else ""


def picture(results: dict[str, Any]) -> Figure | None:
    """Draw the part of the machine's ceiling that each peer reaches forward and backward, the largest first."""
    where, limits = results["environment"], results["ceilings"]
    right = [r for r in results["records"] if r["status"] == "timed" and "of_ceiling" in r]
    shown = [d for d in ("forward", "backward") if any(r["direction"] == d for r in right)]
    rows = []
    for name in dict.fromkeys(r["workload"] for r in right if r["direction"] in shown):
        bars: dict[str, list[plots.Bar]] = {direction: [] for direction in shown}
        for r in sorted((r for r in right if r["workload"] == name), key=lambda r: -r["of_ceiling"]):
            told = f"{part_of_ceiling(r)} % {plots.NAMES[r['peer']]} {number(r['median'] * 1e6)} us"
            bars.setdefault(r["direction"], []).append(plots.Bar(r["peer"], r["of_ceiling"], told))
        rows.append(plots.Row(name, (), [bars[direction] for direction in shown]))
    if not rows:
        return None
    figure = plots.chart(
        "The part of the machine's ceiling that is reached: more is better",
        f"{where['chip']}, jln {where['versions']['jln']} at {where['commit']}, JAX {where['versions']['jax']}. "
        "n %: the least possible time over the time taken.\nThe least is that of every array once by a copy, "
        f"{limits['bytes_per_s'] / 1e9:.0f} GB/s, or of a Linear's products by their rate, "
        f"{limits['flop_per_s'] / 1e12:.3g} TFLOP/s.",
        dict.fromkeys(shown, "the ceiling"),
        rows,
    )
    for text in [text for axes in figure.axes for text in axes.texts] if figure else ():
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # over the ceiling's line
    return figure
