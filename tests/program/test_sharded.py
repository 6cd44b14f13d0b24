"""Rung 4: steps on meshes of 8, 64 and 256 GPUs, whose communication is as committed and compared with plain jnp's."""

import pathlib
import re
import shlex

import pytest

import absent_gpu  # noqa: F401

typer = pytest.importorskip("typer")

from typer.testing import CliRunner  # noqa: E402

import steps  # noqa: E402

TABLES = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "meshes.txt"


def tables(text):
    """Return the tables that a command printed, each a list of rows of cells, with the title in the first row."""
    parts = [part.splitlines() for part in text.strip().split("\n\n")[1:]]
    return [[re.split(" {2,}", line.strip()) for line in lines] for lines in parts]


def committed(heavy=()):
    """Return parameters of a test: the arguments for one mesh, and its table.

    heavy: the mark of all but two of Llama's tables, both with sequence parallelism: of 256 devices, and of a pipeline.
    """
    found = []
    for part in TABLES.read_text().split("$ python benchmarks/steps.py ")[1:]:
        arguments, printed = part.split("\n", 1)
        meshes = re.findall(r"--mesh \S+", arguments)
        rest = re.sub(r" --mesh \S+", "", arguments)
        pairs = zip(meshes, tables(printed), strict=True)
        found += [
            pytest.param(
                shlex.split(f"{rest} {mesh}"),
                table,
                id=f"{rest} {mesh}",
                marks=() if re.search(r"llama.* --sequence --mesh (pipeline|data=8)", f"{rest} {mesh}") else heavy,
            )
            for mesh, table in pairs
        ]
    return found


@pytest.mark.parametrize(("arguments", "table"), committed(heavy=pytest.mark.heavy))
def test_a_table_is_what_the_command_prints(arguments, table):
    app = typer.Typer()
    app.command()(steps.main)
    printed = CliRunner().invoke(app, arguments, catch_exceptions=False)
    (found,) = tables(printed.output)
    assert printed.exit_code == 0 and len(found) == len(table)
    for cells, kept in zip(found, table, strict=True):
        if kept[0] in ("kernels", "temporary, MB"):  # which change a little with any kernel and version of XLA
            assert [float(c) for c in cells[1:]] == pytest.approx([float(c) for c in kept[1:]], rel=0.05), cells
        else:
            assert cells == kept


def times_and_bytes(cell):
    if cell == "-":
        return 0, 0.0
    times, size = cell.split(" / ")
    return int(times), float(size.removesuffix(" B")) * (1 if size.endswith(" B") else 1e6)


# The number of a block's norms that make z again in the backward pass, where it is gathered again.
MADE_AGAIN = {"jln, add_norm": 0, "jln, norm_linear and add_norm": 1, "jln, norm_linear": 2, "jln, add_norm_linear": 2}


@pytest.mark.parametrize(("arguments", "table"), committed())
def test_nothing_is_communicated_that_plain_jnps_step_does_not(arguments, table):
    """A step communicates what plain jnp's does, except z, gathered again instead of held, and small sums.

    Sums under 1 MB are in float32, and one more than plain jnp's, as XLA does not join sums of different kinds.
    """
    title, header, *rows = table
    (blocks,) = map(int, re.findall(r"(\d+) blocks", title[0]))
    small = {variant: [] for variant in header[2:]}
    assert header[3:] == list(MADE_AGAIN)
    for kind, among, *cells in [row for row in rows if len(row) == len(header)]:
        jnp, *ours = [times_and_bytes(cell) for cell in cells]
        if max(size for _, size in (jnp, *ours)) < 1e6:
            for variant, found in zip(small, (jnp, *ours), strict=True):
                small[variant].append(found)
            continue
        for (times, size), again in zip(ours, MADE_AGAIN.values(), strict=True):
            if (kind, among) == ("all-gather", "tensor") and "pipeline" not in title[0]:
                each = 2 * 2048 * 4096  # one sequence's z on one device, of 16 bits
                times, size = times - blocks * again, size - blocks * again * each
            assert times - jnp[0] in ((0, 1) if among == "pipeline" else (0,)), (kind, among)
            assert size == pytest.approx(jnp[1], rel=0.005), (kind, among)
    jnp = small.pop("jnp")
    for found in small.values():
        assert sum(times for times, _ in found) <= sum(times for times, _ in jnp) + 1
        assert sum(size for _, size in found) <= 1.5 * sum(size for _, size in jnp)
