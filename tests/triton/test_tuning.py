"""Measured tiles: which file is asked, what is wrong with one is said once and left, and results are right by them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os

import pytest

import jln
import workbench
from jln._junction import tiles
from jln._triton import target, tuning
from jln._triton.chip import CHIPS, Chip
from jln._triton.target import Target
from jln._triton.tile import Tile
from workbench import OPERATORS, assert_rows_are_independent

H200 = CHIPS["h200"]
OTHER = Tile(4, 128, 2)  # forward_tile(128, 2) has 16 rows
RULE = tiles.forward_tile(128, 2)


def chosen(chip=H200, h=128):
    return tiles.forward(h, 2, False, Target(chip), (4, 4))


def entry(*given, choice="forward", h=(128,), itemsize=2):
    return {"choice": choice, "h": [*h], "itemsize": itemsize, "tiles": [[*vars(tile).values()] for tile in given]}


def write(path, *entries, chip="h200"):
    path.write_text(json.dumps({"chip": chip, "entries": entries}))
    return path


def test_the_named_file_goes_before_the_rules(tmp_path, monkeypatch):
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    assert chosen() == RULE != OTHER
    write(tmp_path / "mine.json", entry(OTHER, h=(128, 64)))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(tuning.VARIABLE, "~/mine.json")
    assert chosen() == OTHER == chosen(h=64)
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert chosen() == RULE


def test_a_file_is_read_again_when_it_changes(tuning_file):
    for rows in (1, 2, 4, 1):
        os.replace(write(tuning_file.with_suffix(".part"), entry(Tile(rows, 128, 1))), tuning_file)
        os.utime(tuning_file, (0, 0))  # as if it were written within a clock's tick of the last
        assert chosen() == Tile(rows, 128, 1) and tuning.entries(H200) is tuning.entries(H200)  # and once until then


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("h200", "h200"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("AMD Instinct MI250X / MI250", "mi250x"),
    ],
)
def test_chips_by_their_marketing_names(kind, name, tuning_file):
    chip = Chip(kind, 90, 132)
    assert tuning.chip_name(chip) == name
    write(tuning_file, entry(OTHER), chip=name)
    assert chosen(chip) == OTHER


def test_only_what_was_measured_is_chosen(tuning_file):
    """Other elements, several dtypes, sums, and passes with more to hold go by the rules."""
    sums = Tile(1, 64, 2)
    write(tuning_file, entry(OTHER), entry(Tile(8, 64, 2, 8), sums, choice="backward"))
    h200 = Target(H200)
    assert tiles.forward(128, 4, False, h200, (4, 4)) == tiles.forward_tile(128, 4)
    assert tiles.forward(128, 2, True, h200, (4, 4)) == tiles.forward_tile(128, 2, True)
    assert tiles.forward(128, 2, False, h200, (4, 4), adds=True) == RULE == tiles.forward(128, 2, False, h200)
    plan = tiles.backward(128, 2, False, False, h200)
    assert (dataclasses.replace(plan.tile, stages=8), plan.sums) == (Tile(8, 64, 2, 8), sums)
    rules = tiles.backward_plan(128, 2)
    assert tiles.backward(128, 2, False, True, h200).sums == rules.sums
    assert tiles.backward(128, 2, False, False, h200, more=1).sums == rules.sums
    assert tiles.backward(128, 2, False, False, h200, beside=1).sums == rules.sums


def test_measured_stages_are_no_more_than_there_is_room_for(tuning_file):
    many = Tile(8, 4096, 16, 8)
    write(tuning_file, entry(many, choice="backward", h=(4096,)), entry(many, h=(4096,)))
    assert tiles.backward(4096, 2, False, False, Target(H200)).tile == Tile(8, 4096, 16, 2)
    assert chosen(h=4096) == Tile(8, 4096, 16, 4)


CHOOSE = ("forward", "forward_tile", "backward", "backward_plan", "reduce_tile")


@pytest.mark.parametrize("choose", [getattr(tiles, name) for name in CHOOSE], ids=CHOOSE)
def test_choices_cannot_depend_on_the_number_of_rows(choose):
    """No tile is chosen by the number of rows, on which a row's result would then depend."""
    of_arrays = {"wants_y", "beside", "more", "crammed", "reads", "parameters", "adds"}  # which there are, and how many
    of_arrays |= {"shares"} if choose is tiles.reduce_tile else set()  # of many groups, and no row's result
    assert set(inspect.signature(choose).parameters) - of_arrays <= {"h", "itemsize", "mixed", "target"}
    assert {f.name for f in dataclasses.fields(Target)} == {"chip"}
    assert [*inspect.signature(tuning.entries).parameters] == ["chip"]


GOOD = entry(OTHER)
NO_INT, NO_TILE = "entry 1: it has what is no int", "has numbers that it cannot have"
ENTRIES = {
    "a number": (7, "TypeError: "),
    "an unknown choice": (GOOD | {"choice": "sideways"}, "'sideways' has 1 tiles"),
    "no tiles": ({k: v for k, v in GOOD.items() if k != "tiles"}, "KeyError: 'tiles'"),
    "two tiles forward": (entry(OTHER, OTHER), "'forward' has 2 tiles"),
    "a fraction": (GOOD | {"tiles": [[4, 128, 2.5, 1, 1]]}, NO_INT),
    "a length that is none": (GOOD | {"h": [True]}, NO_INT),
    "no power of 2": (entry(Tile(3, 128, 2)), NO_TILE),
    "no columns": (entry(Tile(4, 0, 2)), NO_TILE),
    "too much to hold": (entry(Tile(1024, 128, 1)), "is too large"),
    "half of the lengths": (entry(OTHER, choice="backward", h=(128, 4096)), "128 columns of 4096 have no row sums"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_a_file_with_an_entry_that_no_kernel_can_run_is_left_out(case, tuning_file):
    bad, why = ENTRIES[case]
    write(tuning_file, entry(Tile(1, 64, 2), h=(64,)), bad)
    with pytest.warns(UserWarning) as said:
        assert chosen() == RULE
    (warning,) = said
    assert str(tuning_file) in str(warning.message) and why in str(warning.message)
    assert tiles.backward(128, 2, False, False, Target(H200)).tile != OTHER
    assert chosen() == RULE and chosen(h=64) != Tile(1, 64, 2)  # warnings are errors here: it is not said again


FILES = {
    "not JSON": (b"{", "JSONDecodeError"),
    "too deep": (b"[" * 100_000, "RecursionError"),
    "no entries": (b'{"chip": "h200"}', "KeyError: 'entries'"),
    "another chip's": (b'{"chip": "h100", "entries": []}', "it is of the chip 'h100', and this one is 'h200'"),
    "missing": (None, "No such file"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_none_is_said_once_and_the_rules_choose(case, tuning_file):
    content, why = FILES[case]
    if content is not None:
        tuning_file.write_bytes(content)
    with pytest.warns(UserWarning) as said:
        assert [chosen() for _ in range(3)] == [RULE] * 3
    (warning,) = said
    assert str(tuning_file) in str(warning.message) and why in str(warning.message)


# (H, forward tile, backward tile, row sums' tile) that no rule chooses: whole rows where a rule takes chunks or the
# reverse, several rows or one, with the kernel of row sums or without.
NORMS = {
    "whole rows": (130, Tile(1, 256, 2), Tile(1, 256, 2, 1, 3), None),
    "several rows": (130, Tile(16, 256, 8), Tile(8, 256, 8, 3, 1), None),
    "chunks": (300, Tile(2, 64, 1, 2), Tile(2, 128, 4), Tile(2, 64, 1, 2)),
    "sums by a kernel": (600, Tile(1, 256, 2), Tile(4, 128, 2, 2, 2), Tile(2, 64, 1)),
}


@pytest.mark.skipif(not target.interpreting(), reason="kernels are compiled here")
@pytest.mark.parametrize("case", NORMS)
def test_norms_are_right_and_rows_independent_under_measured_tiles(case, tuning_file):
    h, forward, backward, sums = NORMS[case]
    both = [tile for tile in (backward, sums) if tile is not None]
    entries = entry(forward, h=(h,), itemsize=4), entry(*both, choice="backward", h=(h,), itemsize=4)
    write(tuning_file, *entries, chip="interpreter")
    operator = OPERATORS["layer_norm"]
    operands = workbench.arguments(operator, (37, h), "float32", mean=3.0)
    cotangent = workbench.cotangents((operands[0], None))

    def run(**options):
        return workbench.value_and_gradients(operator, lambda *a: operator(*a, **options), operands, cotangent)

    true = workbench.truth(operator, operands, cotangent)
    workbench.assert_accurate(run(implementation="triton"), run(module=jln.reference), true)
    with target.recording() as launches:
        run(implementation="triton")
    made = {launch.kernel.fn.__name__: launch.tile for launch in launches}
    assert {"forward_kernel": forward, "backward_kernel": backward}.items() <= made.items()
    assert made.get("row_sums_kernel") == sums
    assert_rows_are_independent(19, h)
