"""Tuned tiles: which file goes first, what is wrong with one and said once, and that results stay right and the rows'
own under tiles that no heuristic chooses, through the files."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import inspect
import json
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable

import jax
import numpy as np
import pytest

import jln
import workbench
from jln._norm import tiles as norm_tiles
from jln._norm_linear import tiles as linear_tiles
from jln._triton import target, tuning
from jln._triton.chip import CHIPS, Chip
from jln._triton.target import Target
from jln._triton.tile import Tile
from jln._triton.tuning import Trial
from workbench import LINEAR_OPERATORS, OPERATORS

H200 = CHIPS["h200"]
OTHER = Tile(4, 128, 2)  # forward_tile(128, 1, 2) has 16 rows


def entry(choice, tiles, chip="interpreter", **sizes):
    numbers = {n: None if t is None else dataclasses.asdict(t) for n, t in tiles.items()} if tiles else tiles
    return {"choice": choice, "chip": chip, **sizes, "tiles": numbers}


def norm(choice, tiles, h=128, itemsize=2, layout="last axis", chip="h200", **more):
    return entry(choice, tiles, chip=chip, h=h, layout=layout, itemsize=itemsize, mixed=False, **more)


def write(path, *entries):
    path.write_text(json.dumps({"schema": tuning.SCHEMA, "entries": entries}))
    return path


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """The package's folder, empty."""
    monkeypatch.setattr(tuning, "PACKAGED", tmp_path / "tuned")
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    (tmp_path / "tuned").mkdir()
    return tmp_path / "tuned"


@pytest.fixture
def file(packaged, tmp_path, monkeypatch):
    """A user's."""
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "mine.json"))
    return tmp_path / "mine.json"


def chosen(chip=H200, h=128):
    return norm_tiles.forward(h, 1, 2, False, Target(chip))


HEURISTIC = norm_tiles.forward_tile(128, 1, 2)


def test_the_users_file_goes_first_then_the_package_then_the_heuristics(packaged, tmp_path, monkeypatch):
    assert chosen() == HEURISTIC != OTHER
    write(packaged / "h200.json", norm("forward", {"tile": OTHER}), norm("forward", {"tile": Tile(1, 64, 2)}, h=64))
    assert chosen() == OTHER and chosen(h=64) == Tile(1, 64, 2)
    assert chosen(CHIPS["h100"]) == HEURISTIC
    mine = write(tmp_path / "mine.json", norm("forward", {"tile": Tile(2, 128, 1)}))
    monkeypatch.setenv(tuning.VARIABLE, str(mine))
    assert chosen() == Tile(2, 128, 1)
    assert chosen(h=64) == Tile(1, 64, 2)  # of which the user's says nothing
    assert [(f["file"], f["choices"]) for f in tuning.in_force(H200)] == [
        (str(mine), 1),
        (str(packaged / "h200.json"), 2),
    ]
    write(mine, norm("forward", None))
    assert chosen() == HEURISTIC  # measured to be the fastest
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(tuning.VARIABLE, "~/mine.json")
    assert tuning.in_force(H200)[0]["file"] == str(mine)
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert chosen() == HEURISTIC and tuning.in_force(H200) == []


def test_a_file_is_read_again_when_it_changes(file):
    for rows in (1, 2, 4, 1):
        scratch = write(file.with_suffix(".part"), norm("forward", {"tile": Tile(rows, 128, 1)}))
        os.replace(scratch, file)
        os.utime(file, (0, 0))  # as if it were written within a clock's tick of the last
        assert chosen() == Tile(rows, 128, 1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("h200", "h200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
    ],
)
def test_chips_by_their_marketing_names(kind, name, file):
    chip = Chip(kind, 90, 132)
    assert tuning.chip_name(chip) == name
    write(file, norm("forward", {"tile": OTHER}, chip=name))
    assert chosen(chip) == OTHER


def test_other_elements_layouts_and_results_have_choices_of_their_own(file):
    write(
        file,
        norm("forward", {"tile": OTHER}),
        norm("forward", {"tile": Tile(16, 128, 4)}, layout="other axis"),
        norm("backward", {"tile": OTHER, "sums": None}, wants_y=True),
    )
    h200 = Target(H200)
    assert norm_tiles.forward(128, 1, 4, False, h200) == norm_tiles.forward_tile(128, 1, 4)
    assert norm_tiles.forward(128, 1, 2, True, h200) == norm_tiles.forward_tile(128, 1, 2, True)
    assert norm_tiles.forward(128, 64, 2, False, h200) == Tile(16, 128, 4)
    assert norm_tiles.forward(128, 63, 2, False, h200) == norm_tiles.forward_tile(128, 63, 2)  # not aligned
    few = norm_tiles.forward(128, 8, 2, False, h200)
    assert few == norm_tiles.forward_tile(128, 8, 2)  # most of 16 rows would be nobody's
    assert norm_tiles.backward(128, 1, 2, False, True, h200).tile == OTHER
    assert norm_tiles.backward(128, 1, 2, False, False, h200) == norm_tiles.backward_plan(128, 1, 2)


@pytest.mark.parametrize("choose", [norm_tiles.forward, norm_tiles.backward])
def test_choices_cannot_depend_on_the_number_of_rows(choose):
    of_arrays = {"wants_y", "has_dtotal"}
    assert set(inspect.signature(choose).parameters) - of_arrays <= {"h", "inner", "itemsize", "mixed", "target"}
    assert {f.name for f in dataclasses.fields(Target)} == {"chip", "trial"}
    assert len(tuning.CHOICES) == 4 and not any("rows" in choice.fields for choice in tuning.CHOICES.values())


def test_every_choice_is_known_before_any_kernel_runs():
    """Or what a file says of the others would be taken for unsound, and be forgotten."""
    code = "import jln; from jln._triton import tuning; print(*tuning.CHOICES)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["forward", "backward", "fused_forward", "fused_backward"]


GOOD = dataclasses.asdict(OTHER)
TILES = {
    "no number": (GOOD | {"rows": "4"}, "whole numbers"),
    "a fraction": (GOOD | {"warps": 2.0}, "whole numbers"),
    "true": (GOOD | {"rows": True}, "whole numbers"),
    "a number missing": ({k: v for k, v in GOOD.items() if k != "warps"}, "whole numbers"),
    "a number too many": (GOOD | {"speed": 9}, "whole numbers"),
    "no power of 2": (GOOD | {"rows": 3}, "rows are 3, which is no power of 2"),
    "no columns": (GOOD | {"columns": 0}, "columns are 0"),
    "absurd warps": (GOOD | {"warps": 64}, "warps are 64"),
    "negative": (GOOD | {"rows": -4}, "rows are -4"),
    "absurd stages": (GOOD | {"stages": 99}, "stages are 99"),
    "absurd programs": (GOOD | {"programs_per_sm": 0}, "programs_per_sm are 0"),
    "too much to hold": (GOOD | {"rows": 1024, "warps": 1}, "4096 elements to hold"),
    "shared memory": (
        GOOD | {"rows": 128, "warps": 8, "stages": 8},
        "bytes of shared memory, of which there are 232448",
    ),
    "none": (None, "there is no tile"),
    "a list": ([4, 128], "whole numbers"),
}
ENTRIES = {
    "a number": (7, "its choice is not one of forward"),
    "an unknown kernel": (norm("sideways", {"tile": OTHER}), "its choice is not one of forward"),
    "a kernel that is a list": ({"choice": ["forward"]}, "its choice is not one of forward"),
    "no width": (norm("forward", {"tile": OTHER}) | {"h": "128"}, "h is '128', not of type int"),
    "no tiles": ({k: v for k, v in norm("forward", {}).items() if k != "tiles"}, "its tiles are not of tile"),
    "another kernel's tiles": (norm("forward", {"sums": OTHER}), "its tiles are not of tile"),
    "too few columns": (
        norm("backward", {"tile": OTHER, "sums": None}, h=4096, wants_y=False),
        "128 columns are too few of 4096",
    ),
    "the rows' statistics in shared memory": (
        norm(
            "backward",
            {"tile": Tile(1024, 2, 8, 8), "sums": OTHER},
            h=1000,
            itemsize=4,
            layout="other axis",
            wants_y=False,
        ),
        "bytes of shared memory, of which there are 232448",
    ),
    "dy in shared memory, to become an operand of mma": (
        entry(
            "fused_backward",
            {"row_sums": Tile(256, 16, 8), "backward": Tile(16, 16, 4)},
            chip="l4",
            h=1024,
            n=128,
            dtype="float32",
        ),
        "row_sums may need 147456 bytes of shared memory, of which there are 101376",
    ),
    "too small for tl.dot": (
        entry("fused_forward", {"tile": Tile(8, 64, 4)}, chip="h200", h=128, n=64, dtype="bfloat16"),
        "rows are 8, which is no power of 2 from 16",
    ),
    **{name: (norm("forward", None) | {"tiles": {"tile": tile}}, why) for name, (tile, why) in TILES.items()},
}


@pytest.mark.parametrize("case", ENTRIES)
def test_an_entry_that_no_kernel_can_run_is_said_and_left_out(case, file):
    bad, why = ENTRIES[case]
    write(file, norm("forward", {"tile": Tile(1, 64, 2)}, h=64), bad)
    with pytest.warns(UserWarning) as said:
        assert chosen() == HEURISTIC
    assert len(said) == 1 and str(file) in str(said[0].message) and "entry 1: " in str(said[0].message)
    assert why in str(said[0].message)
    assert chosen() == HEURISTIC  # warnings are errors here: it is not said again
    assert chosen(h=64) == Tile(1, 64, 2)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**40)  # which nobody could read


FILES: dict[str, tuple[str | bytes | Callable[[pathlib.Path], object], str]] = {
    "not JSON": ("{", "Expecting property name"),
    "empty": ("", "Expecting value"),
    "not text": (b"\xff\xfe\x00", "can't decode"),
    "a list": ("[]", "it is no tuning file"),
    "another file of JSON": ('{"environment": {}}', "it is no tuning file"),
    "no entries": ('{"schema": 1, "entries": {}}', "it is no tuning file"),
    "another schema": ('{"schema": 2, "entries": []}', "its schema is 2, this version's is 1"),
    "nested without end": ("[" * 100_000, "recursion"),
    "a folder": (pathlib.Path.mkdir, "it is no regular file"),
    "missing": (lambda path: None, "No such file"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
    "a pipe without a writer": (os.mkfifo, "it is no regular file"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
    "endless": (sparse, "it has more than 4194304 bytes"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_none_is_said_once_and_the_packages_is_asked(case, file, packaged):
    content, why = FILES[case]
    if isinstance(content, str | bytes):
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        content(file)
    write(packaged / "h200.json", norm("forward", {"tile": OTHER}))
    with pytest.warns(UserWarning) as said:
        assert [chosen() for _ in range(3)] == [OTHER] * 3
    assert len(said) == 1 and f"{file}: all of it: " in str(said[0].message) and why in str(said[0].message)
    assert [f["choices"] for f in tuning.in_force(H200)] == [0, 1]
    assert why in tuning.in_force(H200)[0]["ignored"][0]


def test_of_a_file_that_grows_while_it_is_read_no_more_is_read_than_there_was(file, monkeypatch):
    write(file, norm("forward", {"tile": OTHER}))
    fstat = os.fstat

    def grown(descriptor):
        found = fstat(descriptor)
        with file.open("a") as more:
            more.write("more")
        return found

    monkeypatch.setattr(os, "fstat", grown)
    assert chosen() == OTHER


def test_what_may_not_be_read_is_said(file, monkeypatch):
    """Whoever runs this may be root, who may read all."""
    write(file, norm("forward", {"tile": OTHER}))

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.warns(UserWarning, match="Permission denied"):
        assert chosen() == HEURISTIC


def test_many_faults_are_one_warning_and_many_threads_say_it_once(file):
    write(file, *[7] * 50, norm("forward", {"tile": OTHER}))
    with warnings.catch_warnings(record=True) as said, concurrent.futures.ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        assert set(pool.map(lambda _: chosen(), range(200))) == {OTHER}
    assert len(said) == 1 and "; and 47 more" in str(said[0].message) and len(str(said[0].message)) < 500


@pytest.mark.parametrize("chip", CHIPS)
def test_what_the_heuristics_choose_is_fit(chip):
    """Or the bounds are too narrow, and the search would leave the best out."""
    for h in (1, 2, 3, 100, 128, 1000, 4096, 8192, 16384, 40000, 262144):
        for inner, itemsize in ((1, 2), (1, 4), (1, 8), (147456, 2), (7, 4)):
            asking = Target(CHIPS[chip], trial := Trial({}))
            norm_tiles.forward(h, inner, itemsize, False, asking)
            for wants_y in (False, True) if inner == 1 else (False,):
                norm_tiles.backward(h, inner, itemsize, False, wants_y, asking)
            for n, dtype in ((16, "bfloat16"), (256, "bfloat16"), (128, "float32")):
                linear_tiles.forward(10**6, h, n, dtype, asking)
                linear_tiles.backward(10**6, h, n, dtype, asking)
            assert {key: tuning.unfit(key, tiles) for key, tiles in trial.asked.items()} == dict.fromkeys(trial.asked)


# The kernels, under tiles that no heuristic chooses: whole rows or chunks where it is the reverse, several rows or one,
# with the sums' kernel or without.
interpreted = pytest.mark.skipif(not target.interpreting(), reason="kernels are compiled here")
NORMS = {
    "whole rows": (130, -1, Tile(1, 256, 2), Tile(1, 256, 2, 1, 3), None),
    "several rows": (130, -1, Tile(16, 256, 8), Tile(8, 256, 8, 3, 1), None),
    "chunks": (300, -1, Tile(2, 64, 1, 2), Tile(2, 128, 4), None),
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
def test_norms_are_right_under_tuned_tiles(name, case, file):
    h, axis, forward, backward, sums = NORMS[case]
    write(file, *norm_entries(h, axis, forward, backward, sums))
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
    """{kernel's name: its tile} of the launches that would be made."""
    with target.recording() as launches:
        run()
    return {made.kernel.fn.__name__: made.tile for made in launches}


@interpreted
@pytest.mark.parametrize("case", [case for case, (_, axis, *_) in NORMS.items() if axis == -1])
def test_rows_do_not_depend_on_each_other_under_tuned_tiles(case, file):
    """As tests/test_operators.py has it, bit for bit, in float32."""
    h, axis, forward, backward, sums = NORMS[case]
    write(file, *norm_entries(h, axis, forward, backward, sums))
    x, _, scale, offset = workbench.arguments(OPERATORS["layer_norm"], (35, h), "float32")
    dy = workbench.normal(9, x.shape, x.dtype)

    def run(rows):
        def function(x):
            return jln.layer_norm(x, scale, offset, implementation="triton")

        y, pullback = jax.vjp(function, x[rows])
        return y, *pullback(dy[rows])

    everything = run(slice(None))
    for rows in (slice(0, 1), slice(11, 12), slice(5, 19)):
        for alone, among in zip(run(rows), everything, strict=True):
            np.testing.assert_array_equal(alone, among[rows])


# By the kernel that must have it, for what a launcher chooses; the order in a file means nothing.
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
def test_linears_are_right_under_tuned_tiles(case, file):
    (m, h, n), wanted = LINEARS[case]
    write(file, *linear_entries(case, h, n, wanted))
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    operands = workbench.arguments(operator, (m, h), "bfloat16", features=(n,))
    dy = workbench.normal(6, (m, n), "bfloat16")

    def run(**options):
        return workbench.value_and_gradients(operator, lambda *a: operator(*a, **options), operands, dy)

    got = run(implementation="triton")
    workbench.assert_accurate(got, run(module=jln.reference), workbench.truth(operator, operands, dy))
    assert wanted.items() <= recorded(lambda: run(implementation="triton")).items()
