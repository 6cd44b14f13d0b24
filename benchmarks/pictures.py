"""Draw the pictures of the pages from what is kept in `benchmarks/results`, the same file each time.

    python benchmarks/pictures.py             # pip install -e ".[test,bench]"; seconds
    python benchmarks/pictures.py FOLDER      # into a folder, and not where they belong
    python benchmarks/pictures.py --compile   # compiles it first: ".[cuda13,bench,equinox]", tokamax; an hour

| picture | of | from |
|---|---|---|
| `examples/pictures/block.svg` | what stands between two Linears, kernel by kernel | `results/h200/junction.json` |
| `jln/pictures/passes.svg` | what one program of each kernel has | the launchers |
| `benchmarks/pictures/saves.svg` | `python -m jln report` | `results/h200/report.json` |
| `benchmarks/pictures/steps.svg` | `python benchmarks/steps.py`, twelve layers | `results/h200/steps.json` |
| `benchmarks/results/h200/card.svg` | `python -m jln bench`, on an H200 | `results/h200/times.json` |
| `benchmarks/results/cpu/speed.svg`, `memory.svg` | `python -m jln bench` | `results/cpu/results.json` |
"""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from typing import Annotated, Any

import jax
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import ceilings
import dataflow
from jln._tools import launchers, plots
from jln._tools.plots import GREYS, INK, OURS, Bar, Row, mb
from jln._tools.workloads import WORKLOADS
from jln._triton.chip import named_chip
from jln._triton.target import Recorder

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
OPERATORS = (
    *("layer-norm-4096", "add-layer-norm-4096", dataflow.JUNCTION, "layer-scale-4096", "ada-norm-4096"),
    *("norms-both-sides-4096", "post-rms-norm", "post-layer-norm", "gated-4096", "gate-first-4096", "gated-128"),
    *("linear-4096-12288", "linear-4096-256", "llama-4096-q-k-v"),
)
STEPS = ("GPT", "Llama", "DiT", "Gemma")
TABLED = (*STEPS, "Llama, checkpointed", "GPT, norms in float32", "Llama, norms in float32")
# A step's programs, and whose bars they are: as the framework's layers make it, two of ours, and the bound.
PROGRAMS = {"as it is": "flax", "fused": "jln", "with Linears": "jln", "no norm": plots.BOUND}


def pictures() -> dict[str, Figure | None]:
    """Draw every picture; return each by its path in the repository."""
    h200 = {
        name: json.loads((RESULTS / "h200" / f"{name}.json").read_text()) for name in ("junction", "report", "steps")
    }
    bench = json.loads((RESULTS / "cpu" / "results.json").read_text())
    times = json.loads((RESULTS / "h200" / "times.json").read_text())
    return {
        "examples/pictures/block.svg": block(h200["junction"], h200["report"]),
        "jln/pictures/passes.svg": passes(),
        "benchmarks/pictures/saves.svg": plots.operators(h200["report"]),
        "benchmarks/pictures/steps.svg": steps(h200["steps"]),
        "benchmarks/results/h200/card.svg": ceilings.picture(times),
        "benchmarks/results/cpu/speed.svg": plots.speed(bench),
        "benchmarks/results/cpu/memory.svg": plots.memory(bench),
    }


def steps(found: dict[str, Any]) -> Figure | None:
    """Draw whole steps: bytes outside of products and attention, and temporary memory."""
    rows = []
    shown = [step for step in found["steps"] if step["name"] in STEPS]
    for step in sorted(shown, key=lambda step: STEPS.index(step["name"])):
        notes = [f"{step['layers']} layers of {step['shape'][-1]}", f"products by {step['products']}"]
        facts = ("bytes_outside_products", "temporary_bytes")
        columns = [changes({name: p[fact] for name, p in step["programs"].items()}) for fact in facts]
        rows.append(Row(step["name"], notes, columns))
    return plots.chart(
        "A whole training step: less is better",
        f"Forward + backward of a transformer's layers, compiled for the {found['chip'].upper()} with JAX "
        f"{found['versions']['jax']}. n %: beside the step as it is.\n"
        "No norm: the same step with its norms left out, a bound and no model.",
        {"moved outside of products and attention": None, "temporary memory": None},
        rows,
    )


def changes(values: dict[str, float]) -> list[Bar]:
    """Make bars that say how each program differs from the step as it is: the shortest first, last the bound."""
    bars = []
    for program, peer in PROGRAMS.items():
        told = f"{program} {f'{values[program] / 1e9:#.3g}'.rstrip('.')} GB"
        change = f"{100 * (values[program] / values['as it is'] - 1):+z.1f} % ".replace("-", "\N{MINUS SIGN}")
        bars.append(Bar(peer, values[program], told if peer == "flax" else change + told))
    return sorted(bars, key=lambda bar: (bar.peer == plots.BOUND, bar.length))


@plots.STYLED
def block(found: dict[str, Any], report: dict[str, Any]) -> Figure:
    """Draw what the junction's kernels read and write, before and after, and all of it beside others."""
    (workload,) = (w for w in report["workloads"] if w["name"] == found["workload"])
    programs, once, shape = workload["programs"], workload["bytes_once"], workload["shape"]
    kernels, cotangents = found["kernels"], {"dy", "dtotal"}
    firsts = {peer: next(i for i, k in enumerate(of) if cotangents & k["reads"].keys()) for peer, of in kernels.items()}
    behind = 1 + max(firsts.values())  # the row in which the backward part starts
    height = behind + 1 + max(len(of) - firsts[peer] for peer, of in kernels.items())
    figure = plots.card(
        0.33 * height + 2.2,
        "Between two Linears of a transformer block: bias, residual, LayerNorm",
        f"Boxes are kernels, arrows are what they read and write. x is {' x '.join(map(str, shape))} in bfloat16, "
        f"{mb(2 * math.prod(shape))} an array; compiled for an H200.",
    )
    flows, totals = figure.subfigures(2, 1, squeeze=False, height_ratios=(height + 1, 2.8)).flat
    heads = {"jnp": ("before: plain jnp", INK, GREYS[2]), "jln": ("after: jln.add_layer_norm", OURS, OURS)}
    for axes, (peer, (head, ink, colour)) in zip(flows.subplots(1, 2), heads.items(), strict=True):
        facts = programs[peer]
        moved = sum(size for kernel in kernels[peer] for way in WAYS for size in kernel[way].values())
        assert (len(kernels[peer]), moved) == (facts["kernels"], facts["bytes"]), "report.json is of the same programs"
        axes.set_title(f"{head}\n{facts['kernels']} kernels, {mb(facts['bytes'])}", loc="center", color=ink, size=9)
        axes.set(xlim=(-1.6, 1.6), ylim=(height - 0.5, -0.5), xticks=[], yticks=[])
        axes.text(0, 0, "forward: the Linear in front has made x", ha="center", va="center", color=GREYS[0])
        axes.text(0, behind, "backward: the Linear behind has given dy", ha="center", va="center", color=GREYS[0])
        for i, kernel in enumerate(kernels[peer]):
            draw_kernel(axes, 1 + i if i < firsts[peer] else behind + 1 + i - firsts[peer], kernel, colour)
    axes, told = totals.subplots(), {peer: f"{mb(p['bytes'])}, {p['kernels']} kernels" for peer, p in programs.items()}
    plots.draw_bars(axes, 0, plots.beside_ours({peer: p["bytes"] for peer, p in programs.items()}, told, once))
    axes.set_xticks([1], [f"every array once: {mb(once)}"])
    axes.set(yticks=[], ylim=(len(programs) - 0.5, -0.5))
    return figure


WAYS = {"reads": -1, "writes": 1}  # the side of a kernel's box


def draw_kernel(axes: Axes, y: float, kernel: dict[str, Any], colour: str) -> None:
    """Draw a kernel's box, and arrows as wide as what it reads and writes."""
    ink = "white" if colour == OURS else INK
    box = axes.barh([y], [2.2], left=-1.1, color=colour)
    axes.bar_label(box, [kernel["name"]], label_type="center", color=ink, family="monospace", size=6.5)
    for way, side in WAYS.items():
        size = sum(kernel[way].values())
        large = [array for array, of in kernel[way].items() if of > 0.001 * size]  # beside them the others are nothing
        names = " + ".join("temporary" if "fusion" in array else array for array in sorted(large))
        width = max(0.03, 0.3 * size / 201e6)
        axes.arrow(
            1.35 * side - 0.23, y, 0.46, 0, width=width, head_width=width + 0.2, head_length=0.12, color=colour,
            linewidth=0, length_includes_head=True,
        )  # fmt: skip
        for line, below in ((names, -0.2), (mb(size), 0.2)):
            axes.text(1.66 * side, y + below, line, ha="left" if side > 0 else "right", va="center_baseline")


def recorded(name: str, direction: str) -> list[Any]:
    """Return the launches of a workload's operator on an H200, none made."""
    recorder = Recorder(named_chip("h200"))
    function, operands = launchers.call(WORKLOADS[name], direction, recorder)
    jax.eval_shape(function, operands)
    return recorder.launches


# The tiles of a program in the order it takes them, in parts of the rows and columns: x, y, width, height.
SOME_ROWS = [(0, y, 1, 0.06) for y in (0.08, 0.4, 0.72)]
ALONG_ROWS = [(i / 12, 0.4, 1 / 12, 0.16) for i in range(12)]
SOME_OF_COLUMNS = [(0.42, y, 1 / 12, 0.16) for y in (0.08, 0.4, 0.72)]


def columns(count: int) -> list[tuple[float, ...]]:
    return [(0.42, i / count, 1 / 12, 1 / count) for i in range(count)]


@plots.STYLED
def passes() -> Figure:
    """Draw what one program of each kernel has of `[rows, H]`, and what it does with it."""
    (forward,), (backward, reduce) = (recorded("layer-norm-4096", d) for d in ("forward", "backward"))
    (fused,), (sums, gradient, parameters) = (recorded("linear-4096-256", d) for d in ("forward", "backward"))
    shares, splits, n = reduce.scalars["programs"], gradient.scalars["splits"], fused.constants["N"]
    figure = plots.card(
        6.9,
        "What one program of each kernel has, and how often it reads it",
        "Grids are [rows, H], dark is one program's tile, light what it takes next; as of x [8192, 4096] in bfloat16 "
        "on an H200.\nThe numbers in brackets are the equations of the derivation.",
    )
    norm, linear = figure.subfigures(2, 1, squeeze=False).flat
    heads = {norm: "A norm", linear: f"A norm and the Linear behind it, where features are few: here N = {n}"}
    for part, head in heads.items():
        part.suptitle(head, x=plots.LEFT, ha="left", size=9, color=OURS)
    panels = [*norm.subplots(1, 4), *linear.subplots(1, 4)]
    panels.pop(3).set(xticks=[], yticks=[])  # there is no fourth
    # fmt: off
    told = [
        (forward, f"every {forward.programs}th row,\nin tiles", SOME_ROWS,
         "x is read once:\n• its mean (1)\n• its variance, of x - mean (2)\n• y, mean and rstd stored (4)\n"
         "all of it in registers. Rows of\nover 16384: twice, in chunks"),
        (backward, f"every {shares}th row,\nin tiles", SOME_ROWS,
         "dy and x are read once:\n• the row's c1 and c2 (7) (8)\n• dx stored (9)\n• dscale += dy * x_hat (6)\n"
         "• doffset += dy (5)\nin the end its shares are stored"),
        (reduce, f"{reduce.tile.columns} columns of\na sum, in tiles", columns(8),
         f"grid: [{shares} shares, H]\nthe shares are read once:\n• {reduce.tile.rows} of them at a time,\n"
         "• always in the same order\ndscale and doffset are stored:\nno atomics, the same bits"),
        (fused, f"{fused.tile.rows} rows each,\nin chunks", ALONG_ROWS,
         "x is read once, by chunks:\n• mean, rstd so far (1) (2)\n• product so far moved with them\n"
         f"• product += z @ kernel (10) (11)\ny [{fused.tile.rows}, {n}], mean, rstd stored;\nz is never in memory"),
        (sums, f"{sums.tile.rows} rows each,\nin chunks", ALONG_ROWS,
         "x is read once, by chunks:\n• dz = dy @ kernel^T (14)\n• c1, c2 so far (7) (8)\n• dbias += dy (12)\n"
         "stored, dbias as a share. If rows\nare few, a program has a share"),
        (gradient, f"{gradient.tile.columns} columns each,\n1 of {splits} shares, in tiles", SOME_OF_COLUMNS,
         "x is read once more:\n• dz = dy @ kernel^T (14)\n• dx stored (17)\n• G += x_hat^T @ dy (21)\n"
         "• dscale += dz * x_hat (16)\nin the end its shares are stored"),
        (parameters, f"{parameters.tile.columns} columns each,\nin tiles", columns(splits),
         f"grid: [{splits} shares of {n}, H]\nthe shares are read once,\n• always in the same order\n"
         "dkernel, of G (22), dscale,\ndbias (12) and doffset (15)\nare stored"),
    ]
    # fmt: on
    for axes, (launch, has, tiles, lines) in zip(panels, told, strict=True):
        x, y, width, height = zip(*tiles, strict=True)
        axes.bar(x, height, width, y, align="edge", color=[OURS, *["#8ecac4"] * (len(tiles) - 1)], edgecolor="white")
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[], yticks=[], facecolor=GREYS[-1])
        axes.set_title(launch.kernel.__name__, family="monospace")
        tile = f"{launch.tile.rows} x {launch.tile.columns}"
        axes.set_xlabel(f"{launch.programs} programs, {has} of {tile}\n\n{lines}", loc="left")
    return figure


def main(
    folder: Annotated[pathlib.Path, typer.Argument(file_okay=False, help="In which they are drawn.")] = ROOT,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile first what is in them.")] = False,
) -> None:
    """Draw the pictures of the pages from what is kept."""
    if compiled:
        h200 = RESULTS / "h200"
        command = [sys.executable, "-m", "jln", "report", "--output", str(h200)]
        subprocess.run([*command, *(a for name in OPERATORS for a in ("--workload", name))], check=True)
        (h200 / "operators.svg").unlink()  # it lies with the other pictures
        command = [sys.executable, str(ROOT / "benchmarks" / "steps.py"), "--output"]
        subprocess.run([*command, str(h200 / "models.json")], check=True)
        options = ["--layers", "12", "--products", "XLA", "--products", "cuBLAS"]
        subprocess.run([*command, str(h200 / "steps.json"), *TABLED, *options], check=True)
        (h200 / "junction.json").write_text(json.dumps(dataflow.compiled(), indent=1) + "\n")
    drawn = pictures()
    plots.save_all(drawn, folder)
    print(*drawn, sep="\n")


if __name__ == "__main__":
    typer.run(main)
