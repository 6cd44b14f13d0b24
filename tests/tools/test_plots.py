"""Pictures: those on the pages match their data, nothing overlaps, and charts say which library is better."""

import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("triton")  # the picture of the passes shows what would be launched

from jln._tools import plots
from jln._tools.canvas import Canvas
from jln._tools.peers import PEERS

ROOT = pathlib.Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
REPORT = {"chip": "h200", "versions": {"jax": "0.10.2"}, "steps": [], "workloads": []}


@pytest.fixture(scope="module")
def pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import pictures

        yield pictures


def drawn(path):
    """Return the texts of a picture, the colours of its shapes, and the numbers of their outlines."""
    texts, colours, numbers = [], [], []
    for element in ElementTree.parse(path).iter():
        if element.tag == f"{SVG}text":
            texts.append(element.text)
        if element.tag == f"{SVG}path":
            colours.append(re.findall(r"(?:fill|stroke): [#\w]+", element.get("style", "")))
            numbers += [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", element.get("d"))]
    return texts, colours, numbers


def test_the_pictures_of_the_pages_are_what_their_data_draws(pictures, tmp_path):
    """The pictures on the pages have the texts, colours and outlines that their data draws.

    Outlines may differ by half a unit, as another matplotlib may write other last digits.
    `python benchmarks/pictures.py` draws the pictures again.
    """
    canvases = pictures.pictures()
    assert len(canvases) == 6
    for path, canvas in canvases.items():
        canvas.save(tmp_path / path)
        (texts, colours, numbers), kept = drawn(tmp_path / path), drawn(ROOT / path)
        assert texts == kept[0] == canvas.told, path
        assert colours == kept[1], path
        assert numbers == pytest.approx(kept[2], abs=0.5), path
        assert (ROOT / path).stat().st_size < 70_000


def test_a_picture_drawn_twice_is_the_same_file(pictures, tmp_path):
    for name in ("a.svg", "b.svg"):
        pictures.passes().save(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_nothing_lies_on_anything_else_in_the_pictures_of_the_pages(pictures):
    assert {path.name: found for path, c in pictures.pictures().items() if (found := c.collisions())} == {}


def test_what_lies_on_something_else_is_found():
    canvas = Canvas(100)
    canvas.box(100, 40, 50, 10, "red")
    canvas.text(20, 20, "one")
    assert canvas.collisions() == []
    canvas.text(25, 20, "two")
    canvas.text(130, 45, "across")
    canvas.text(800, 80, "beyond the card")
    assert canvas.collisions() == [
        "one | two",
        "across | a box",
        "beyond the card | a box",
        "beyond the card | the edge",
    ]


def test_the_arrows_of_a_block_are_all_bytes_that_the_report_counts(pictures):
    import json

    junction = json.loads((pictures.RESULTS / "h200" / "junction.json").read_text())
    report = json.loads((pictures.RESULTS / "h200" / "report.json").read_text())
    pictures.block(junction, report)
    junction["kernels"]["jln"][0]["reads"]["x"] -= 1
    with pytest.raises(AssertionError, match=r"report\.json is of the same programs"):
        pictures.block(junction, report)


def workload(programs, **more):
    """Return a workload as a report has it, with (bytes, kernels, held bytes) of each program."""
    programs = {
        peer: {"bytes": moved, "kernels": kernels, "held_bytes": held}
        for peer, (moved, kernels, held) in programs.items()
    }
    given = {"operator": "rms_norm", "title": "rms_norm", "shape": [8, 16], "features": None, "of_examples": []}
    return given | {"directions": ["forward", "backward"], "bytes_once": 100_000_000, "programs": programs} | more


def told(canvas, *words):
    """Return those texts of a picture, in order, that have one of the words in them."""
    return [text for text in canvas.told if any(word in text for word in words)]


def test_bars_say_how_many_times_ours_they_are_and_the_shortest_is_the_first():
    better = workload({"jln": (100e6, 3, 50e6), "flax": (250e6, 7, 60e6), "jnp": (150e6, 1, 100e6)})
    worse = workload(
        {"jln": (200e6, 3, None), "jnp": (100e6, 8, None)},
        title="rms_norm, gate",
        features=[4, 2],
        directions=["forward"],
    )
    alone = [workload({"jln": (1, 1, 1)}), workload({"jnp": (1, 1, 1), "flax": (1, 1, 1)})]
    canvas = plots.operators(REPORT | {"workloads": [worse, better, *alone]})
    assert told(canvas, "MB", plots.TIMES, "jln")[1:] == [
        *("jln", "100 MB, 3 kernels", "1.50×", "plain jnp 150 MB, 1 kernel", "2.5×", "Flax 250 MB, 7 kernels"),  # noqa: RUF001
        *("0.50×", "plain jnp 100 MB, 8 kernels", "jln", "200 MB, 3 kernels"),  # noqa: RUF001
        *("jln", "50 MB", "1.20×", "Flax 60 MB", "2.0×", "plain jnp 100 MB"),  # noqa: RUF001
    ]  # fmt: skip
    names = ("rms_norm", "8 x 16", "rms_norm", "8 x 16", "to 4 + 2", "gate", "forward alone")
    assert tuple(canvas.told[-7:]) == names
    assert canvas.collisions() == []


def test_steps_are_beside_flax_and_a_bound_is_the_last():
    def of(bytes_outside, temporary):
        return {"bytes_outside_products": bytes_outside, "temporary_bytes": temporary}

    programs = {
        "no norm at all": of(5e9, 1e9),
        "jln, add_norm": of(9e9, 20e9),
        "jln, norm_linear": of(1, 1),
        "flax": of(10e9, 20e9),
    }
    stack = {"name": "stack-x", "layers": 2, "shape": [1, 8, 64], "products": "XLA", "programs": programs}
    other = stack | {"products": "cuBLAS", "name": "stack-y"}
    canvas = plots.steps(REPORT | {"steps": [stack, other]}, products="XLA")
    assert told(canvas, "GB", "%", "same")[2:] == [
        *(f"{plots.MINUS}10.0 %", "add_norm 9.00 GB", "10.0 GB", f"{plots.MINUS}50.0 %", "no norm 5.00 GB"),
        *("20.0 GB", "same", "add_norm 20.0 GB", f"{plots.MINUS}95.0 %", "no norm 1.00 GB"),
    ]
    assert "stack-y" not in canvas.told and "stack-y" in plots.steps(REPORT | {"steps": [stack, other]}).told


def test_what_has_nothing_to_compare_is_not_drawn(tmp_path):
    assert plots.draw_report(REPORT, tmp_path) == []
    assert plots.draw_bench(results([]), tmp_path) == []
    only = [timed("a", "jln", "forward", 1.0), timed("b", "jnp", "forward", 1.0)]
    assert plots.draw_bench(results(only), tmp_path) == [] and list(tmp_path.iterdir()) == []


def timed(workload, peer, direction, median, **more):
    given = {"workload": workload, "peer": peer, "direction": direction, "median": median, "status": "timed"}
    return given | {"peak_bytes": None} | more


def results(records):
    versions = {"jln": "0", "jax": "0.10.2"}
    return {"environment": {"chip": "NVIDIA H200", "commit": "abc", "versions": versions}, "records": records}


def test_times_are_ratios_whose_mean_stands_in_front():
    records = [
        *(timed("near", "jln", "both", 2e-3, of_ceiling=0.5), timed("near", "flax", "both", 3e-3)),
        *(timed("far", "jln", "both", 1e-5), timed("far", "flax", "both", 8e-5), timed("far", "torch", "both", 4e-5)),
        *(timed("far", "jnp", "both", 1e-6) | {"status": "wrong"}, timed("alone", "jln", "both", 1.0)),
    ]
    canvas = plots.speed(results(records))
    shown = told(canvas, "jln", "us", "ms", plots.TIMES, "Flax", "jnp", "Torch")
    assert shown[2:] == [
        *("jln", "3.5×", "Flax", "4.0×", "PyTorch, of 1"),  # noqa: RUF001
        *("jln", "10 us", "4.0×", "PyTorch", "8.0×", "Flax", "jln", "2 ms, 50 %", "1.50×", "Flax"),  # noqa: RUF001
    ]
    assert canvas.told[-4:] == ["geometric mean", "of 2 workloads", "far", "near"]
    assert plots.memory(results(records)) is None


def test_a_card_full_of_peers_and_sizes_is_still_read():
    """Nothing overlaps in charts as full as a GPU's: every peer, at nine sizes, forward, backward and both.

    Each peer is far ahead of ours at some sizes and far behind at others.
    """
    medians = {p: [1e-4 * 10 ** ((i + k) % 9 / 6 - 0.5) for i in range(9)] for k, p in enumerate(PEERS)}
    medians["jln"] = 9 * [1e-4]
    records = [
        timed(f"llama-4096-add-q-k-v-{i}", peer, direction, median, peak_bytes=1e12 * median, of_ceiling=1.0)
        for direction in ("forward", "backward", "both")
        for peer, of in medians.items()
        for i, median in enumerate(of)
    ]
    for canvas in (plots.speed(results(records)), plots.memory(results(records))):
        assert canvas.collisions() == []
