"""Rung 4: steps on meshes of 8, 64 and 256 GPUs, whose communication is as committed, and no more for being fused."""

import pathlib
import re
import shlex

import pytest

import absent_gpu  # noqa: F401

for _name in ("flax", "haiku", "equinox", "typer"):
    pytest.importorskip(_name)

import typer  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import steps  # noqa: E402
from zoo import sharding  # noqa: E402

TABLES = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "meshes.txt"
APP = typer.Typer()
APP.command()(steps.main)


def tables(text):
    """Return the tables that a command printed: rows of cells, with what a table is of in the first row."""
    parts = re.findall(r"^(\w.*:.*)\n\n\|(.*)\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    return [
        [[title], *([c.strip() for c in row.strip("| ").split("|")] for row in [header, *rows.splitlines()])]
        for title, header, rows in parts
    ]


def committed(heavy=()):
    """Return parameters of a test: the arguments for one mesh and model, and the table.

    heavy: the mark of all but two: Llama's and GPT's of 256 GPUs, the latter's with sequences split.
    """
    found = []
    for part in TABLES.read_text().split("$ python benchmarks/steps.py ")[1:]:
        arguments, printed = part.split("\n", 1)
        meshes = re.findall(r"--mesh \S+", arguments)
        rest = " ".join(re.findall(r"--sequence", arguments))
        pairs = zip([(mesh, model) for mesh in meshes for model in ("GPT", "Llama")], tables(printed), strict=True)
        for (mesh, model), table in pairs:
            command = f"{model} {mesh} {rest}".strip()
            quick = command in ("Llama --mesh data=8,fsdp=4,tensor=8 --sequence", "GPT --mesh data=2,fsdp=2,tensor=2")
            found.append(pytest.param(shlex.split(command), table, id=command, marks=() if quick else heavy))
    return found


@pytest.mark.parametrize(("arguments", "table"), committed(heavy=pytest.mark.heavy))
def test_a_table_is_what_the_command_prints(arguments, table):
    printed = CliRunner().invoke(APP, arguments, catch_exceptions=False)
    (found,) = tables(printed.output)
    assert printed.exit_code == 0 and len(found) == len(table)
    for cells, kept in zip(found, table, strict=True):
        if kept[0] in ("kernels", "temporary, MB"):  # which change a little with any kernel and version of XLA
            assert [float(c) for c in cells[2:]] == pytest.approx([float(c) for c in kept[2:]], rel=0.05), cells
        else:
            assert cells == kept


def times_and_bytes(cell):
    times, size = cell.split(" / ")
    return int(times), round(float(size) * 1e6)


@pytest.mark.parametrize(("arguments", "table"), committed())
def test_nothing_is_communicated_that_the_step_as_it_is_does_not(arguments, table):
    """A fused step communicates what it does as it is, kind by kind, but small sums in another dtype.

    With its Linears it gathers the norms' results of split sequences again, which it does not hold.
    """
    _, header, *rows = table
    assert header == ["collective", "among", "as it is", "fused", "with Linears"]
    small = [0, 0, 0]
    for kind, among, *cells in rows[:-4]:
        plain, fused, linears = counts = [times_and_bytes(cell) for cell in cells]
        if max(size for _, size in counts) < 1e6:
            small = [before + size for before, (_, size) in zip(small, counts, strict=True)]
            continue
        assert fused == plain, (kind, among)
        gathered = (kind, among) == ("all-gather", "tensor") and "--sequence" in arguments
        again = 4 * 2 * 2048 * 4096 if gathered else 0  # of two blocks' norms, one sequence of 16 bits on one device
        assert linears[1] == pytest.approx(plain[1] + again, abs=1000), (kind, among)  # printed to a thousand bytes
    (times, _), (fused_times, _), (linear_times, _) = map(times_and_bytes, rows[-4][2:])
    assert fused_times <= times and linear_times <= times + (4 if "--sequence" in arguments else 0)
    assert all(size <= 2 * small[0] for size in small)
    memory = [float(cell) for cell in rows[-1][2:]]
    assert memory[2] < memory[0]


BAD = {
    "data": "'data' is not as data=2,tensor=4, of the axes data, fsdp, tensor",
    "data=0": "'data=0' is not as",
    "data=2,data=4": "is not as",
    "data=" + 50 * "9": "is not of at most 4096 GPUs",
    "fsdp=3": "whose tensor divides 8 and fsdp 2048",
    "tensor=3": "whose tensor divides 8 and",
    "model=2": "'model=2' is not as",
}


@pytest.mark.parametrize("mesh", BAD)
def test_a_mesh_that_cannot_be_is_a_bad_request(mesh):
    with pytest.raises(typer.BadParameter, match=BAD[mesh]):
        steps.parsed(mesh, "h200")


def test_a_mesh_of_one_device_communicates_nothing():
    mesh = steps.parsed("data=1", "h200")
    (compiled,) = {r.collectives for r in steps.on_a_mesh("Llama", mesh, False, "h200").values()}
    assert compiled == () and mesh.axis_names == sharding.AXES
