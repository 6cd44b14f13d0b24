"""Results are right, and rows do not depend on each other, under tiles from files that no heuristic chooses."""

from __future__ import annotations

import jax
import pytest

import jln
import workbench
from invariance import assert_rows_are_independent
from jln._triton import target
from jln._triton.tile import Tile
from tuning_files import entry, norm, write
from workbench import LINEAR_OPERATORS, OPERATORS

# (H, axis, forward tile, backward tile, row sums' tile) that no heuristic chooses: whole rows where a heuristic takes
# chunks or the reverse, several rows or one, with the kernel of row sums or without.
interpreted = pytest.mark.skipif(not target.interpreting(), reason="kernels are compiled here")
NORMS = {
    "whole rows": (130, -1, Tile(1, 256, 2), Tile(1, 256, 2, 1, 3), None),
    "several rows": (130, -1, Tile(16, 256, 8), Tile(8, 256, 8, 3, 1), None),
    "chunks": (300, -1, Tile(2, 64, 1, 2), Tile(2, 128, 4), Tile(2, 64, 1, 2)),
    "sums by a kernel": (600, -1, Tile(1, 256, 2), Tile(4, 128, 2, 2, 2), Tile(2, 64, 1)),
    "side by side": (100, 0, Tile(16, 32, 4), Tile(8, 64, 4), Tile(4, 32, 1)),
    "side by side, whole": (100, 0, Tile(4, 128, 4), Tile(2, 128, 4, 1, 2), None),
}


def norm_entries(h, axis, forward, backward, sums):
    layout = "last axis" if axis == -1 else "other axis, unaligned"
    common = {"h": h, "layout": layout, "itemsize": 4, "chip": "interpreter"}
    return (
        norm("forward", {"tile": forward}, **common),
        norm("backward", {"tile": backward, "sums": sums}, wants_y=False, **common),
    )


@interpreted
@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("name", ["add_layer_norm", "rms_norm"])
def test_norms_are_right_under_tuned_tiles(name, case, tuning_file):
    h, axis, forward, backward, sums = NORMS[case]
    write(tuning_file, *norm_entries(h, axis, forward, backward, sums))
    operator = OPERATORS[name]
    operands = workbench.arguments(operator, (37, h), "float32", mean=3.0)

    def function(module, **options):
        def rows_first(x, residual, scale, offset):
            x, residual = (a if a is None or axis == -1 else a.T for a in (x, residual))
            results = operator(x, residual, scale, offset, module=module, axis=axis, **options)
            return jax.tree.map(lambda a: a if axis == -1 else a.T, results)

        return lambda *given: rows_first(*given)

    got_by = function(jln, implementation="triton")
    cotangent = workbench.cotangents(jax.eval_shape(got_by, *operands))
    got = workbench.value_and_gradients(operator, got_by, operands, cotangent)
    plain = workbench.value_and_gradients(operator, function(jln.reference), operands, cotangent)
    true = workbench.truth(operator, operands, cotangent, got.get("total"))
    workbench.assert_accurate(got, plain, true)
    made = recorded(lambda: workbench.value_and_gradients(operator, got_by, operands, cotangent))
    assert {"forward_kernel": forward, "backward_kernel": backward}.items() <= made.items()
    assert made.get("row_sums_kernel") == sums


def recorded(run):
    """Return {kernel's name: its tile} of the launches that `run` would make."""
    with target.recording() as launches:
        run()
    return {made.kernel.fn.__name__: made.tile for made in launches}


@interpreted
@pytest.mark.parametrize("case", [case for case, (_, axis, *_) in NORMS.items() if axis == -1])
def test_rows_do_not_depend_on_each_other_under_tuned_tiles(case, tuning_file):
    h, axis, forward, backward, sums = NORMS[case]
    write(tuning_file, *norm_entries(h, axis, forward, backward, sums))
    assert_rows_are_independent(19, h)


# (M, H, N), and the tile that each kernel must be launched with. The order of tiles in a file means nothing.
LINEARS = {
    "fused": (
        (70, 100, 24),
        {
            "forward_kernel": Tile(16, 32, 4, 2),
            "row_sums_kernel": Tile(32, 16, 4, 2),
            "backward_kernel": Tile(16, 64, 4, 3),
        },
    ),
    "composed": (
        (23, 100, 300),
        {"forward_kernel": Tile(4, 64, 2), "backward_kernel": Tile(4, 32, 1, 1, 2), "row_sums_kernel": Tile(1, 128, 2)},
    ),
}


def linear_entries(case, h, n, tiles):
    forward, backward, sums = (tiles[f"{name}_kernel"] for name in ("forward", "backward", "row_sums"))
    if case == "fused":
        sizes = {"h": h, "n": n, "dtype": "bfloat16"}
        return (
            entry("fused_forward", {"tile": forward}, **sizes),
            entry("fused_backward", {"backward": backward, "row_sums": sums}, **sizes),
        )
    return (
        norm("forward", {"tile": forward}, h=h, chip="interpreter"),
        norm("backward", {"sums": sums, "tile": backward}, h=h, chip="interpreter", wants_y=True),
    )


@interpreted
@pytest.mark.parametrize("case", LINEARS)
def test_linears_are_right_under_tuned_tiles(case, tuning_file):
    (m, h, n), wanted = LINEARS[case]
    write(tuning_file, *linear_entries(case, h, n, wanted))
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    operands = workbench.arguments(operator, (m, h), "bfloat16", features=(n,))
    dy = workbench.normal(6, (m, n), "bfloat16")

    def run(**options):
        return workbench.value_and_gradients(operator, lambda *a: operator(*a, **options), operands, dy)

    got = run(implementation="triton")
    workbench.assert_accurate(got, run(module=jln.reference), workbench.truth(operator, operands, dy))
    assert wanted.items() <= recorded(lambda: run(implementation="triton")).items()
