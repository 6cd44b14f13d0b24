"""Results are right, and rows do not depend on each other, under measured tiles that no rule chooses."""

from __future__ import annotations

import jax
import pytest
from test_tuning import entry, write

import jln
import workbench
from invariance import assert_rows_are_independent
from jln._triton import target
from jln._triton.tile import Tile
from workbench import OPERATORS

# (H, forward tile, backward tile, row sums' tile) that no rule chooses: whole rows where a rule takes chunks or the
# reverse, several rows or one, with the kernel of row sums or without.
NORMS = {
    "whole rows": (130, Tile(1, 256, 2), Tile(1, 256, 2, 1, 3), None),
    "several rows": (130, Tile(16, 256, 8), Tile(8, 256, 8, 3, 1), None),
    "chunks": (300, Tile(2, 64, 1, 2), Tile(2, 128, 4), Tile(2, 64, 1, 2)),
    "sums by a kernel": (600, Tile(1, 256, 2), Tile(4, 128, 2, 2, 2), Tile(2, 64, 1)),
}
pytestmark = pytest.mark.skipif(not target.interpreting(), reason="kernels are compiled here")


def tuned(case, tuning_file):
    h, forward, backward, sums = NORMS[case]
    both = [tile for tile in (backward, sums) if tile is not None]
    entries = entry(forward, h=(h,), itemsize=4), entry(*both, choice="backward", h=(h,), itemsize=4)
    write(tuning_file, *entries, chip="interpreter")
    return h, forward, backward, sums


@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms_are_right_under_measured_tiles(name, case, tuning_file):
    h, forward, backward, sums = tuned(case, tuning_file)
    operator = OPERATORS[name]
    operands = workbench.arguments(operator, (37, h), "float32", mean=3.0)

    def run(**options):
        def function(*given):
            return operator(*given, **options)

        cotangent = workbench.cotangents(jax.eval_shape(function, *operands))
        return workbench.value_and_gradients(operator, function, operands, cotangent), cotangent

    got, cotangent = run(implementation="triton")
    true = workbench.truth(operator, operands, cotangent, got.get("total"))
    workbench.assert_accurate(got, run(module=jln.reference)[0], true)
    with target.recording() as launches:
        run(implementation="triton")
    made = {launch.kernel.fn.__name__: launch.tile for launch in launches}
    assert {"forward_kernel": forward, "backward_kernel": backward}.items() <= made.items()
    assert made.get("row_sums_kernel") == sums


@pytest.mark.parametrize("case", NORMS)
def test_rows_do_not_depend_on_each_other_under_measured_tiles(case, tuning_file):
    h, *_ = tuned(case, tuning_file)
    assert_rows_are_independent(19, h)
