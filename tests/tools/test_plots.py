"""Pictures: those on the pages are what their data draws, nothing overlaps, and a bar is as long as its text says."""

import json
import math
import pathlib
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("triton")  # the picture of the passes shows what would be launched

import matplotlib
from matplotlib.colors import to_hex
from matplotlib.text import Text

import ceilings
import pictures
from jln._tools import plots
from jln._tools.peers import PEERS

ROOT = pathlib.Path(__file__).parents[2]
TIMES, MINUS = "\N{MULTIPLICATION SIGN}", "\N{MINUS SIGN}"


@pytest.fixture(scope="module")
def figures():
    return pictures.pictures()


def test_the_pages_have_what_their_data_draws(figures, tmp_path):
    """The pictures on the pages are the files drawn here, by another matplotlib those with the same texts.

    `python benchmarks/pictures.py` draws the pictures again.
    """
    plots.save_all(figures, tmp_path)
    for path in figures:
        drawn, page = (tmp_path / path).read_text(), (ROOT / path).read_text()
        told = [re.search("<title>.*<dc:description>.+</dc:description>", svg, re.DOTALL)[0] for svg in (drawn, page)]
        assert told[0] == told[1], path
        assert drawn == page or f"Matplotlib v{matplotlib.__version__}," not in page, path
        assert "</text>" in page and len(page) < 75_000


def faults(figure):
    """Find texts that lie on one another, across the edge of a box, or beyond the picture's."""
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = [patch for axes in figure.axes for patch in axes.patches]
    told = np.array([text.get_text() for text in texts])
    text, box = (np.array([x.get_window_extent().extents for x in of]).reshape(-1, 4) for of in (texts, boxes))

    def shared(a, b):  # [n, 4] and [m, 4]: [n, m, 4], where both are; they meet where that has a size
        low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
        return np.concatenate([low, high], -1), (high - low > 1).all(-1)

    crossed, meets = shared(text, box)
    cut = np.abs(shared(text, np.array([figure.bbox.extents]))[0][:, 0] - text).max(-1) > 1
    return [
        *(f"{told[i]} | {told[j]}" for i, j in np.argwhere(np.triu(shared(text, text)[1], 1))),
        *(f"{one} | a box" for one in told[(meets & (np.abs(crossed - text[:, None]).max(-1) > 1)).any(-1)]),
        *(f"{one} | the edge" for one in told[cut]),
    ]


def test_nothing_lies_on_anything_else(figures):
    assert {path: found for path, figure in figures.items() if (found := faults(figure))} == {}


def test_what_lies_on_something_else_is_found():
    figure = plots.card(1, "title", "caption")
    figure.text(plots.LEFT, 0.1, "over it")
    figure.text(0.98, 0.9, "beyond")
    axes = figure.subplots(subplot_kw={"xticks": [], "yticks": []})
    axes.bar_label(axes.barh([0], [1]), ["long" * 20], label_type="center")
    axes.set_xlim(-1, 4)
    assert faults(figure) == ["caption | over it", f"{'long' * 20} | a box", "beyond | the edge"]


def bars(axes):
    """Return what stands at each bar, and the bar's length."""
    return [(text.get_text(), patch.get_width()) for text, patch in zip(axes.texts, axes.patches, strict=True)]


def compare(axes, pattern, expected):
    """Hold the lengths of those bars whose text has a number, and the numbers, to what is expected, in any order."""
    found = [(length, float(match[1])) for text, length in bars(axes) if (match := re.search(pattern, text))]
    found, expected = np.array(sorted(found)), np.array(sorted(expected))
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=1e-9)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=0.03)  # numbers are of two digits or more


def test_every_number_at_a_bar_is_its_length_and_the_files(figures):
    def kept(name):
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    for axes, fact in zip(figures["benchmarks/pictures/saves.svg"].axes, ("bytes", "held_bytes"), strict=True):
        of = [(w["bytes_once"], by, p) for w in kept("h200/report")["workloads"] for by, p in w["programs"].items()]
        compare(axes, r"(\d+) MB", [(p[fact] / once, p[fact] / 1e6) for once, by, p in of if by != "jln-norm"])
    facts = ("bytes_outside_products", "temporary_bytes")
    for axes, fact in zip(figures["benchmarks/pictures/steps.svg"].axes, facts, strict=True):
        shown = [step for step in kept("h200/steps")["steps"] if step["name"] in pictures.STEPS]
        sizes = [p[fact] for step in shown for p in step["programs"].values()]
        compare(axes, r"([\d.]+) GB", [(size, size / 1e9) for size in sizes])
    for name, fact in (("speed", "median"), ("memory", "peak_bytes")):
        panels = figures[f"benchmarks/results/cpu/{name}.svg"].axes
        for axes, direction in zip(panels, ("forward", "gradient", "both"), strict=True):
            of = {}
            for record in kept("cpu/results")["records"]:
                if record["direction"] == direction and record["status"] == "timed" and record[fact]:
                    of.setdefault(record["peer"], {})[record["workload"]] = record[fact]
            ours = of.pop("jln")
            ratios = [[value / ours[workload] for workload, value in peer.items()] for peer in of.values()]
            lengths = [length for peer in ratios for length in (*peer, math.prod(peer) ** (1 / len(peer)))]
            compare(axes, rf"([\d.]+){TIMES}", [(length, length) for length in lengths])


def test_bars_of_steps_are_beside_the_step_as_it_is_and_a_bound_is_the_last():
    values = {"no norm": 5e9, "as it is": 10e9, "fused": 9e9, "with Linears": 9.999e9}
    assert [bar.text for bar in pictures.changes(values)] == [
        *(f"{MINUS}10.0 % fused 9.00 GB", "+0.0 % with Linears 10.0 GB", "as it is 10.0 GB"),
        f"{MINUS}50.0 % no norm 5.00 GB",
    ]
    assert next(bar.text for bar in pictures.changes(dict.fromkeys(values, 114e9))) == "as it is 114 GB"


def test_the_operator_that_gains_most_is_the_first_and_jln_has_its_colour():
    def workload(operator, **programs):
        programs = {by: {"bytes": 1e8 * n, "kernels": n, "held_bytes": None} for by, n in programs.items()}
        given = {"operator": operator, "title": f"{operator}, gate", "shape": [8, 16], "features": [4, 2]}
        return given | {"of_examples": [], "directions": ["forward"], "bytes_once": 1e8, "programs": programs}

    report = {"chip": "h200", "versions": {"jax": "0.10.2"}, "workloads": [workload("alone", jln=1)]}
    assert plots.operators(report) is None
    report["workloads"] += [workload("worse", jln=2, jnp=1), workload("better", jln=1, flax=3)]
    moved, held = plots.operators(report).axes
    assert bars(moved)[:2] == [("jln 100 MB, 1 kernel", 1), (f"3.0{TIMES} Flax 300 MB, 3 kernels", 3)]
    assert [to_hex(patch.get_facecolor()) == plots.OURS for patch in moved.patches] == [True, False, False, True]
    names = [label.get_text() for minor in (False, True) for label in moved.get_yticklabels(minor=minor)]
    assert names == ["better", "worse", *2 * ["8 x 16", "to 4 + 2", "gate", "forward alone"]] and bars(held) == []


def results(*timed, **more):
    """Return what a benchmark found: workload, peer and median of each time."""
    fields, rest = ("workload", "peer", "median"), {"status": "timed", "peak_bytes": None} | more
    records = [dict(zip(fields, one, strict=True)) | {"direction": "both"} | rest for one in timed]
    environment = {"chip": "NVIDIA H200", "commit": "abc", "versions": {"jln": "0", "jax": "0.10.2"}}
    return {"environment": environment, "records": records}


def test_times_stand_behind_their_mean_and_what_is_wrong_or_alone_is_left_out(tmp_path):
    found = results(("near", "jln", 2e-3), ("near", "flax", 3e-3), ("alone", "jln", 1.0), of_ceiling=0.5)
    found["records"] += results(("far", "jln", 1e-5), ("far", "flax", 8e-5), ("far", "torch", 4e-5))["records"]
    found["records"] += results(("far", "jnp", 1e-6), status="wrong")["records"]
    assert [text.replace(TIMES, "x") for text, _ in bars(*plots.speed(found).axes)] == [
        *("jln", "3.5x Flax", "4.0x PyTorch (of 1)"),
        *("jln 10 us", "4.0x PyTorch", "8.0x Flax", "jln 2 ms, 50 %", "1.50x Flax"),
    ]
    plots.draw_bench(found, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["speed.svg"]


def test_a_card_full_of_peers_and_sizes_is_still_read():
    """Nothing overlaps in a chart as full as a GPU's: every peer, far ahead of ours at some sizes, behind at others."""
    timed = [
        (f"llama-4096-add-q-k-v-{size}", peer, 1e-4 * (1 if peer == "jln" else 10 ** ((2 * size + i) % 9 / 6 - 0.5)))
        for i, peer in enumerate(PEERS)
        for size in range(5)
    ]
    found = results(*timed, of_ceiling=1.0)
    found["records"] += [record | {"direction": way} for record in found["records"] for way in ("forward", "backward")]
    found["ceilings"] = {"bytes_per_s": 1e12, "flop_per_s": 1e15}
    assert faults(plots.speed(found)) == [] and faults(ceilings.picture(found)) == []
