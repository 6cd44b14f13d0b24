"""Tuned tiles: which file goes first, and one warning about what is wrong with a file."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import inspect
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest

from jln._junction import tiles as norm_tiles
from jln._junction.linears import tiles as linear_tiles
from jln._triton import tuning
from jln._triton.chip import CHIPS, Chip
from jln._triton.target import Target
from jln._triton.tile import Tile
from jln._triton.tuning import Trial
from tuning_files import entry, norm, write

H200 = CHIPS["h200"]
OTHER = Tile(4, 128, 2)  # forward_tile(128, 1, 2) has 16 rows


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
    assert chosen(h=64) == Tile(1, 64, 2)  # the user's file says nothing of it
    assert [(f["file"], f["choices"]) for f in tuning.in_force(H200)] == [
        (str(mine), 1),
        (str(packaged / "h200.json"), 2),
    ]
    write(mine, norm("forward", None))
    assert chosen() == HEURISTIC  # they were measured to be the fastest
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(tuning.VARIABLE, "~/mine.json")
    assert tuning.in_force(H200)[0]["file"] == str(mine)
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert chosen() == HEURISTIC and tuning.in_force(H200) == []


def test_a_file_is_read_again_when_it_changes(tuning_file):
    for rows in (1, 2, 4, 1):
        scratch = write(tuning_file.with_suffix(".part"), norm("forward", {"tile": Tile(rows, 128, 1)}))
        os.replace(scratch, tuning_file)
        os.utime(tuning_file, (0, 0))  # as if it were written within a clock's tick of the last
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
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI250X / MI250", "mi250x"),
        ("AMD Instinct MI250X/MI250", "mi250x"),
        ("AMD Instinct MI300A", "amd-instinct-mi300a"),
    ],
)
def test_chips_by_their_marketing_names(kind, name, tuning_file):
    chip = Chip(kind, 90, 132)
    assert tuning.chip_name(chip) == name
    write(tuning_file, norm("forward", {"tile": OTHER}, chip=name))
    assert chosen(chip) == OTHER


def test_a_chip_of_an_unknown_name_is_its_makers_newest():
    assert tuning.known_or_newest("amd-instinct-mi300a").name == "mi355x"
    assert tuning.known_or_newest("gh200-480gb").name == "b200"


def test_other_elements_layouts_and_results_have_choices_of_their_own(tuning_file):
    write(
        tuning_file,
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
    assert few == norm_tiles.forward_tile(128, 8, 2)  # most of 16 rows would not exist
    assert norm_tiles.backward(128, 1, 2, False, True, h200).tile == OTHER
    rules = norm_tiles.backward_plan(128, 1, 2)
    read_ahead = norm_tiles.read_ahead(rules.tile, 2, (2, 0), H200)
    assert norm_tiles.backward(128, 1, 2, False, False, h200) == dataclasses.replace(rules, tile=read_ahead)


CHOOSE = ("forward", "forward_tile", "backward", "backward_plan", "reduce_tile")


@pytest.mark.parametrize("choose", [getattr(norm_tiles, name) for name in CHOOSE], ids=CHOOSE)
def test_choices_cannot_depend_on_the_number_of_rows(choose):
    """No tile is chosen by the number of rows, on which a row's result would then depend."""
    of_arrays = {"wants_y", "beside", "more", "crammed", "reads", "parameters", "adds"}  # which there are, and how many
    of_arrays |= {"shares"} if choose is norm_tiles.reduce_tile else set()  # of many groups, and no row's result
    assert set(inspect.signature(choose).parameters) - of_arrays <= {"h", "inner", "itemsize", "mixed", "target"}
    assert {f.name for f in dataclasses.fields(Target)} == {"chip", "trial"}
    assert len(tuning.CHOICES) == 4 and not any("rows" in choice.fields for choice in tuning.CHOICES.values())


def test_every_choice_is_known_before_any_kernel_runs():
    """`import jln` is enough to know every choice of tiles.

    Otherwise a file's entries for the others would be taken for unsound and be forgotten.
    """
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
    "absurd programs": (GOOD | {"programs_per_core": 0}, "programs_per_core are 0"),
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
        "128 columns of 4096 have no row sums without a kernel for them",
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
def test_an_entry_that_no_kernel_can_run_is_said_and_left_out(case, tuning_file):
    bad, why = ENTRIES[case]
    write(tuning_file, norm("forward", {"tile": Tile(1, 64, 2)}, h=64), bad)
    with pytest.warns(UserWarning) as said:
        assert chosen() == HEURISTIC
    assert len(said) == 1 and str(tuning_file) in str(said[0].message) and "entry 1: " in str(said[0].message)
    assert why in str(said[0].message)
    assert chosen() == HEURISTIC  # warnings are errors here: it is not said again
    assert chosen(h=64) == Tile(1, 64, 2)


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**40)  # more than anyone could read


FILES: dict[str, tuple[str | bytes | Callable[[pathlib.Path], object], str]] = {
    "not JSON": ("{", "Expecting property name"),
    "empty": ("", "Expecting value"),
    "not text": (b"\xff\xfe\x00", "can't decode"),
    "a list": ("[]", "it is no tuning file"),
    "another file of JSON": ('{"environment": {}}', "it is no tuning file"),
    "no entries": ('{"schema": 1, "entries": {}}', "it is no tuning file"),
    "another schema": ('{"schema": 2, "entries": []}', "its schema is 2, this version's is 1"),
    "nested without end": ("[" * 100_000, "recursion"),
    "a folder": (pathlib.Path.mkdir, "Is a directory"),
    "missing": (lambda path: None, "No such file"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links"),
    "a pipe without a writer": (os.mkfifo, "it is no regular file"),
    "a device without end": (lambda path: path.symlink_to("/dev/zero"), "it is no regular file"),
    "endless": (sparse, "it has more than 4194304 bytes"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_none_is_said_once_and_the_packages_is_asked(case, tuning_file, packaged):
    content, why = FILES[case]
    if isinstance(content, str | bytes):
        tuning_file.write_bytes(content.encode() if isinstance(content, str) else content)
    else:
        content(tuning_file)
    write(packaged / "h200.json", norm("forward", {"tile": OTHER}))
    with pytest.warns(UserWarning) as said:
        assert [chosen() for _ in range(3)] == [OTHER] * 3
    assert len(said) == 1 and f"{tuning_file}: all of it: " in str(said[0].message) and why in str(said[0].message)
    assert [f["choices"] for f in tuning.in_force(H200)] == [0, 1]
    assert why in tuning.in_force(H200)[0]["ignored"][0]


def test_of_a_file_that_grows_while_it_is_read_no_more_is_read_than_there_was(tuning_file, monkeypatch):
    write(tuning_file, norm("forward", {"tile": OTHER}))
    fstat = os.fstat

    def grown(descriptor):
        found = fstat(descriptor)
        with tuning_file.open("a") as more:
            more.write("more")
        return found

    monkeypatch.setattr(os, "fstat", grown)
    assert chosen() == OTHER


def test_what_may_not_be_read_is_said(tuning_file, monkeypatch):
    """A file that may not be read is named in a warning, and the heuristics choose.

    The refusal is simulated, as root may run the test and may read every file.
    """
    write(tuning_file, norm("forward", {"tile": OTHER}))

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", str(tuning_file))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="Permission denied"):
        assert chosen() == HEURISTIC


def test_many_faults_are_one_warning_and_many_threads_say_it_once(tuning_file):
    write(tuning_file, *[7] * 50, norm("forward", {"tile": OTHER}))
    with warnings.catch_warnings(record=True) as said, concurrent.futures.ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        assert set(pool.map(lambda _: chosen(), range(200))) == {OTHER}
    assert len(said) == 1 and "; and 47 more" in str(said[0].message) and len(str(said[0].message)) < 500


@pytest.mark.parametrize("chip", CHIPS)
def test_what_the_heuristics_choose_is_fit(chip):
    """All tiles that the heuristics choose are within the bounds of `unfit`.

    If they were not, the bounds would be too narrow, and the search would leave the best tiles out.
    """
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
