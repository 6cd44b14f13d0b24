"""The figures of the page on benchmarks, beside the results in `benchmarks/results`."""

import json
import math
import pathlib
import re

import pytest

for _name in ("flax", "haiku", "equinox", "typer"):
    pytest.importorskip(_name)

import steps  # noqa: E402

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text().splitlines()
RESULTS = [
    pytest.param(step, id=f"{step['name']}, {step['layers']} layers, {step['products']}")
    for name in ("models", "steps")
    for step in json.loads((BENCHMARKS / "results" / "h200" / f"{name}.json").read_text())["steps"]
]


@pytest.mark.parametrize("step", RESULTS)
def test_a_row_of_a_step_is_that_of_the_results(step):
    assert f"| {' | '.join(map(str, steps.row(step)))} |" in PAGE


def test_no_row_is_of_another_step():
    header = PAGE.count(f"| {' | '.join(steps.HEADER)} |")
    rows = [line for line in PAGE if line.count(" / ") == 15 and line.startswith("| ")]
    assert (header, len(rows)) == (3, len(RESULTS))


def test_what_the_page_says_of_all_models_holds_in_the_results():
    """A fused step moves fewer bytes than as it is, and holds fewer; with its Linears it needs less memory.

    Both are one program under a checkpoint that keeps products and in a scan, as Linears are taken in any case, and
    where a sum reads each norm's result.
    """
    for step in (parameters.values[0] for parameters in RESULTS):
        plain, fused, linears, bound = step["programs"].values()
        assert bound["bytes"] < plain["bytes"]
        assert max(fused["held_bytes"], linears["held_bytes"]) < plain["held_bytes"]
        assert fused["bytes"] < plain["bytes"]
        if step["name"] in ("Llama, checkpointed", "AlphaFold", "BERT"):
            assert fused == linears
        else:
            assert linears["temporary_bytes"] < plain["temporary_bytes"]


def test_the_first_page_says_what_the_results_say():
    """README's table has the bytes and the memory that `linears=True` saves, with XLA's products."""

    def saved(programs, kind, fact):
        return math.floor(1000 * (1 - programs[kind][fact] / programs["as it is"][fact])) / 10

    page, every = (BENCHMARKS / "../README.md").read_text(), (p.values[0] for p in RESULTS)
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+ % less \| [\d.]+ %) less", page, re.M))
    found = {s["name"]: s["programs"] for s in every if (s["layers"], s["products"]) == (12, "XLA")}
    wanted = {n: [saved(found[n], "with Linears", fact) for fact in ("bytes", "temporary_bytes")] for n in rows}
    assert rows == {n: f"{moved} % less | {held} %" for n, (moved, held) in wanted.items()} and len(rows) == 4
