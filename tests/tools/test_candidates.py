"""Tests of candidates of tiles, and of the file of what a card has found of them."""

import pytest

pytest.importorskip("typer")

import candidates
from jln._junction import tiles
from jln._triton.chip import CHIPS
from jln._triton.target import Target
from jln._triton.tile import Tile


def found(candidate, microseconds, tile=None, error=0.0, workload="layer-norm-4096"):
    made = {"workload": workload, "direction": "forward", "candidate": candidate, "microseconds": microseconds}
    return made | {"bytes": 134_000_000, "error": error, "tiles": [[*vars(tile).values()]] if tile else []}


def test_the_fastest_right_candidate_is_an_entry():
    best = Tile(2, 4096, 8)
    made = [found("by rule", 40.0), found("best", 37.0, best), found("wrong", 1.0, Tile(1, 4096, 8), error=0.2)]
    made += [found(c, us, Tile(1, 1024, 4), workload="gpt2-small") for c, us in (("by rule", 40.0), ("hardly", 39.9))]
    made += [found("nan", 1.0, best, float("nan"), "layer-norm-8192")]
    file = candidates.measured(made, "NVIDIA H200", "3.9.0")
    assert file["chip"] == "h200" and file["candidates"] == made and file["versions"]["triton"] == "3.9.0"
    (entry,) = file["entries"]
    size = {"choice": "forward", "h": [4096], "itemsize": 2}
    assert entry == size | {"tiles": [[2, 4096, 8, 1, 1]], "mb_per_s": 3621622}


def test_the_rules_answer_with_a_candidate_as_long_as_it_is_asked_for():
    target, tile, sums = Target(CHIPS["h200"]), Tile(2, 1024, 4), Tile(1, 2048, 8)

    def ask():
        plan = tiles.backward(4096, 2, False, False, target)
        return tiles.forward(4096, 2, False, target), plan.tile, plan.sums

    before = ask()
    with candidates.answers("forward", (tile,)):
        assert ask() == (tile, *before[1:]) != before
    with candidates.answers("backward", (tile, sums)):
        assert ask() == (before[0], tile, sums) != before
    assert ask() == before
