"""Draw the pictures of the pages from what is kept in `benchmarks/results`, the same file each time.

    python benchmarks/pictures.py             # pip install -e ".[test,bench]"; seconds
    python benchmarks/pictures.py FOLDER      # into a folder, and not where they belong
    python benchmarks/pictures.py --compile   # what is in them is compiled again first: ".[cuda13,bench]", five minutes

| picture | of | from |
|---|---|---|
| `examples/pictures/block.svg` | what stands between two Linears, kernel by kernel | `results/h200/junction.json` |
| `jln/pictures/passes.svg` | what one program of each kernel has | the launchers |
| `benchmarks/pictures/saves.svg` | `python -m jln report` | `results/h200/report.json` |
| `benchmarks/pictures/steps.svg` | `python benchmarks/steps.py` | `results/h200/steps.json` |
| `benchmarks/results/cpu/speed.svg`, `memory.svg` | `python -m jln bench` | `results/cpu/results.json` |
"""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from typing import Any

from picture_of_passes import passes

from jln._tools import plots
from jln._tools.canvas import BAND, GREYS, INK, MARGIN, OURS, SOFT, Canvas

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
JUNCTION = "x-bias-4096"
WORKLOADS = (
    *("layer-norm-4096", "add-layer-norm-4096", JUNCTION, "layer-scale-4096", "ada-norm-4096"),
    *("norms-both-sides-4096", "post-rms-norm", "post-layer-norm", "gated-4096", "gate-first-4096", "gated-128"),
    *("linear-4096-12288", "linear-4096-256", "llama-4096-q-k-v"),
)

STEPS = ("stack-gpt", "stack-llama", "stack-gemma", "stack-dit")


def pictures() -> dict[pathlib.Path, Canvas]:
    """Draw every picture; return each by its path in the repository."""
    report = json.loads((RESULTS / "h200" / "report.json").read_text())
    whole = json.loads((RESULTS / "h200" / "steps.json").read_text())
    bench = json.loads((RESULTS / "cpu" / "results.json").read_text())
    junction = json.loads((RESULTS / "h200" / "junction.json").read_text())
    drawn = {
        "examples/pictures/block.svg": block(junction, report),
        "jln/pictures/passes.svg": passes(),
        "benchmarks/pictures/saves.svg": plots.operators(report),
        "benchmarks/pictures/steps.svg": plots.steps(whole),
        "benchmarks/results/cpu/speed.svg": plots.speed(bench),
        "benchmarks/results/cpu/memory.svg": plots.memory(bench),
    }
    return {pathlib.Path(path): canvas for path, canvas in drawn.items() if canvas is not None}


# What the programs do, compiled.


def compiled_junction() -> dict[str, Any]:
    """Compile the junction by plain jnp and by jln: their kernels, with the bytes of each array read and written."""
    import jax

    from jln import program
    from jln._tools.peers import PEERS
    from jln._tools.workloads import WORKLOADS as ALL

    workload = ALL[JUNCTION]
    signature = workload.signature
    results = [a.name for a in signature.results]
    arguments = [*signature.names, *(f"d{name}" for name in results)]
    outputs = [*results, *("d" + name for name in signature.names if name != "residual")]
    found: dict[str, Any] = {"workload": JUNCTION, "chip": "h200", "jax": jax.__version__, "kernels": {}}
    for peer in ("jnp", "jln"):
        step = workload.step(PEERS[peer].function(workload))
        compiled = program.compile_for(step, *workload.step_arguments())
        kernels = flow(compiled.hlo, arguments, outputs)
        found["kernels"][peer] = named(kernels) if peer == "jln" else kernels
        moved = sum(sum(k["reads"].values()) + sum(k["writes"].values()) for k in kernels)
        assert (moved, len(kernels)) == (compiled.bytes_total, compiled.launches), "the arrows are all bytes there are"
    return found


def flow(text: str, arguments: list[str], outputs: list[str]) -> list[dict[str, Any]]:
    """List the kernels of a program without loops, with the bytes of the arrays that each reads and writes.

    Arrays that are neither arguments nor results have their kernel's name and their place among its results.
    """
    from jln.program import hlo

    entry = hlo._parse(text)
    launched = {k.name: k for k in hlo.launches(text)}
    names = {a.buffer(): name for name, a in zip(outputs, entry.outputs, strict=True)}
    names |= {a.buffer(): arguments[int(a.name.split("_")[1])] for a in entry.parameters.values()}
    kernels = []
    for value in entry.values.values():
        if value.name in launched:
            parts = {u.buffer(): u.bytes for u, _ in value.users if u.kind == "get-tuple-element"}
            written = parts or {value.buffer(): value.bytes}
            kernels.append(
                {
                    "name": value.name,
                    "reads": {names.get(b, "".join(b)): size for b, size in hlo.reads(value).items()},
                    "writes": {names.get(b, "".join(b)): size for b, size in written.items()},
                }
            )
    return kernels


# Of the junction's kernels by jln, in order, and of what they write in order (jln/_junction/launches.py).
LAUNCHES = {
    "forward_kernel": ("y", "total", "mean", "rstd"),
    "backward_kernel": ("dx", "shares"),
    "reduce_kernel": ("dscale", "doffset", "dx_bias"),
}


def named(kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give jln's kernels, and what they write, the names that these have in the source."""
    names = {
        f"{kernel['name']} index={i}": name
        for kernel, results in zip(kernels, LAUNCHES.values(), strict=True)
        for i, name in enumerate(results)
    }
    return [
        {"name": name} | {way: {names.get(a, a): size for a, size in k[way].items()} for way in ("reads", "writes")}
        for name, k in zip(LAUNCHES, kernels, strict=True)
    ]


# The junction: a panel for each of its programs.

_PANEL, _GAP, _BOX = 390, 14, (146, 124)  # a panel's width, what is between, and where in it a kernel's box is
_SMALL = 100_000  # bytes, below which an array has no name beside larger ones


def block(junction: dict[str, Any], report: dict[str, Any]) -> Canvas:
    """Draw what the junction's kernels read and write, before and after."""
    (workload,) = (w for w in report["workloads"] if w["name"] == junction["workload"])
    panels = {peer: _directions(kernels) for peer, kernels in junction["kernels"].items()}
    for peer, kernels in junction["kernels"].items():
        assert len(kernels) == workload["programs"][peer]["kernels"], "report.json is of the same programs"
        assert _moved(kernels) == workload["programs"][peer]["bytes"], "report.json is of the same programs"
    forward, backward = (max(sum(map(_height, of[i])) for of in panels.values()) for i in (0, 1))
    top = 134
    strips = (top - 26, top + forward + 4, top + forward + 34 + backward + 4)
    canvas = Canvas(strips[2] + 40)
    shape = " x ".join(map(str, workload["shape"]))
    canvas.title(
        "Between two Linears of a transformer block: bias, residual, LayerNorm",
        f"Boxes are kernels, arrows are what they read and write. x is {shape} in bfloat16, "
        f"{_mb(2 * math.prod(workload['shape']))} an array; compiled for an H200.",
    )
    heads = {"jnp": ("before: plain jnp", INK), "jln": ("after: jln.add_layer_norm", OURS)}
    for i, (peer, (ahead, behind)) in enumerate(panels.items()):
        left = MARGIN + i * (_PANEL + _GAP)
        facts, (head, colour) = workload["programs"][peer], heads[peer]
        canvas.text(left, 84, head, size=12, bold=True, colour=colour)
        total = f"{facts['kernels']} kernels, {_mb(facts['bytes'])}"
        canvas.text(left + _PANEL, 84, total, size=15, bold=True, colour=colour, align="right")
        for y, says in zip(
            strips, ("forward: the Linear in front has made x", "backward: the Linear behind has read y, and given dy",
                     "dx goes back to the Linear in front"), strict=True,
        ):  # fmt: skip
            canvas.box(left, y, _PANEL, 20, BAND, radius=4)
            canvas.text(left + _PANEL / 2, y + 10, says, size=10, colour=SOFT, align="center")
        for y, kernels in ((top, ahead), (top + forward + 34, behind)):
            for kernel in kernels:
                _kernel(canvas, kernel, left, y, ours=peer == "jln")
                y += _height(kernel)
    _totals(canvas, workload, MARGIN + _PANEL + _GAP, strips[2] - 96)
    return canvas


def _moved(kernels: list[dict[str, Any]]) -> int:
    return sum(size for k in kernels for way in ("reads", "writes") for size in k[way].values())


def _directions(kernels: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Part kernels into those that need no cotangent and those that do."""
    after = {"dy", "dtotal"}
    forward, backward = [], []
    for kernel in kernels:
        needs = not after.isdisjoint(kernel["reads"])
        after |= set(kernel["writes"]) if needs else set()
        (backward if needs else forward).append(kernel)
    return forward, backward


def _mb(size: float) -> str:
    mb = size / 1e6
    return f"{mb:.0f} MB" if mb >= 10 else f"{mb:.1f} MB" if mb >= 0.1 else f"{mb:.2f} MB"


_ORDER = ("x", "residual", "y", "dy", "dtotal", "total", "dx", "dscale", "doffset", "dx_bias", "shares")


def _told(arrays: dict[str, int]) -> list[str]:
    """Name a kernel's arrays, in lines; those that stand for nothing are called temporary."""
    large = [a for a, size in arrays.items() if size >= _SMALL] or list(arrays)
    large.sort(key=lambda a: _ORDER.index(a) if a in _ORDER else len(_ORDER))
    names = ["temporary" if "fusion" in a else a for a in large]
    lines = [names[0]]
    for name in names[1:]:
        if len(lines[-1]) + len(name) > 17:
            lines.append(f"+ {name}")
        else:
            lines[-1] += f" + {name}"
    return lines


def _height(kernel: dict[str, Any]) -> int:
    lines = max(len(_told(kernel[way])) for way in ("reads", "writes"))
    return 22 if _is_small(kernel) and lines == 1 else 14 * (lines + 1) + 10


def _is_small(kernel: dict[str, Any]) -> bool:
    return _moved([kernel]) < 2e6


def _kernel(canvas: Canvas, kernel: dict[str, Any], left: float, top: float, *, ours: bool) -> None:
    height, (start, width) = _height(kernel), _BOX
    middle = top + height / 2
    face, ink, colour = (OURS, "white", OURS) if ours else ("#e5e7eb", INK, GREYS[1])
    canvas.box(left + start, top + 3, width, height - 6, face, radius=5)
    canvas.text(left + start + width / 2, middle, kernel["name"], size=9, colour=ink, align="center", fixed=True)
    for way, near, far, align in (
        ("reads", left + start - 36, left + start - 1, "right"),
        ("writes", left + start + width + 1, left + start + width + 36, "left"),
    ):
        size = sum(kernel[way].values())
        canvas.arrow((near, middle), (far, middle), max(1.0, 3 * size / 67e6), colour)
        names = _told(kernel[way])
        beside = near - 5 if way == "reads" else far + 5
        if height == 22:
            canvas.text(beside, middle, f"{names[0]}  {_mb(size)}", size=10, colour=SOFT, align=align)
            continue
        first = middle - 7 * len(names)
        for i, line in enumerate(names):
            canvas.text(beside, first + 14 * i, line, size=10, colour=SOFT, align=align)
        canvas.text(beside, first + 14 * len(names), _mb(size), size=11, bold=True, align=align)


def _totals(canvas: Canvas, workload: dict[str, Any], left: float, top: float) -> None:
    """Draw all bytes as bars, beside every array once."""
    programs = workload["programs"]
    canvas.text(left, top, "all of it, MB", size=10, bold=True)
    unit = (_PANEL - 205) / max(p["bytes"] for p in programs.values())
    once = left + unit * workload["bytes_once"]
    canvas.line((once, top + 8), (once, top + 74), colour=SOFT, dashed=True)
    canvas.text(once + 4, top + 2, f"every array once: {_mb(workload['bytes_once'])}", size=10, colour=SOFT)
    for i, peer in enumerate(sorted(programs, key=lambda p: programs[p]["bytes"])):
        facts, ours = programs[peer], programs["jln"]
        told = f"{_mb(facts['bytes'])}, {facts['kernels']} kernels"
        ratio = plots.times(facts["bytes"] / ours["bytes"])
        named = ("jln", told) if peer == "jln" else (ratio, f"{plots.NAMES[peer]} {told}")
        plots.draw_bar(canvas, plots.Bar(peer, facts["bytes"], *named), left, top + 14 + 20 * i, unit)


def main() -> None:
    if "--compile" in sys.argv[1:]:
        folder = RESULTS / "h200"
        command = [sys.executable, "-m", "jln", "report", "--output", str(folder)]
        subprocess.run([*command, *(a for name in WORKLOADS for a in ("--workload", name))], check=True)
        steps = ROOT / "benchmarks" / "steps.py"
        subprocess.run([sys.executable, str(steps), *STEPS, "--output", str(folder)], check=True)
        for drawn in folder.glob("*.svg"):  # they lie with the other pictures
            drawn.unlink()
        (folder / "junction.json").write_text(json.dumps(compiled_junction(), indent=1) + "\n")
    root = next((pathlib.Path(a) for a in sys.argv[1:] if a != "--compile"), ROOT)
    for path, canvas in pictures().items():
        assert not (collisions := canvas.collisions()), f"{path.name}: {collisions}"
        canvas.save(root / path)
        print(path)


if __name__ == "__main__":
    main()
