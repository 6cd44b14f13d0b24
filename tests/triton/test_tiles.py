"""Tiles: chosen without the number of rows, and right whatever they are."""

import dataclasses
import inspect
from unittest import mock

import pytest

import jln
import workbench
from jln._junction import tiles
from jln._triton import target
from jln._triton.chip import Chip, chip_name
from jln._triton.target import Target
from jln._triton.tile import Tile
from workbench import OPERATORS, assert_rows_are_independent


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
def test_chips_by_their_marketing_names(kind, name):
    assert chip_name(Chip(kind, 90, 132)) == name


CHOOSE = ("forward", "forward_tile", "backward", "backward_plan", "reduce_tile")


@pytest.mark.parametrize("choose", [getattr(tiles, name) for name in CHOOSE], ids=CHOOSE)
def test_choices_cannot_depend_on_the_number_of_rows(choose):
    """No tile is chosen by the number of rows, on which a row's result would then depend."""
    of_arrays = {"wants_y", "beside", "more", "crammed", "reads", "parameters", "adds"}  # which there are, and how many
    of_arrays |= {"shares"} if choose is tiles.reduce_tile else set()  # of many groups, and no row's result
    assert set(inspect.signature(choose).parameters) - of_arrays <= {"h", "itemsize", "mixed", "target"}
    assert {f.name for f in dataclasses.fields(Target)} == {"chip"}


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
def test_norms_are_right_and_rows_independent_under_other_tiles(case):
    h, forward, backward, sums = NORMS[case]
    operator = OPERATORS["layer_norm"]
    operands = workbench.arguments(operator, (37, h), "float32", mean=3.0)
    cotangent = workbench.cotangents((operands[0], None))

    def run(**options):
        return workbench.value_and_gradients(operator, lambda *a: operator(*a, **options), operands, cotangent)

    plan = tiles.BackwardPlan(backward, sums)
    with (
        mock.patch.object(tiles, "forward", lambda *_, **__: forward),
        mock.patch.object(tiles, "backward", lambda *_, **__: plan),
    ):
        true = workbench.truth(operator, operands, cotangent)
        workbench.assert_accurate(run(implementation="triton"), run(module=jln.reference), true)
        with target.recording() as launches:
            run(implementation="triton")
        made = {launch.kernel.fn.__name__: launch.tile for launch in launches}
        assert {"forward_kernel": forward, "backward_kernel": backward}.items() <= made.items()
        assert made.get("row_sums_kernel") == sums
        assert_rows_are_independent(19, h)
