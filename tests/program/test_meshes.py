"""Tests: what steps on meshes of 8 and 256 GPUs communicate, as committed, and that of an example."""

import dataclasses
import pathlib
import re
import shlex
from collections import Counter

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import program
from absent_gpu import launches

for _name in ("flax", "haiku", "equinox", "typer", "matplotlib", "optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(_name, reason='this needs pip install -e ".[examples,haiku,equinox]"')

import data_and_tensor_parallel as example  # noqa: E402
import typer  # noqa: E402
from flax import nnx  # noqa: E402
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


def committed():
    """Return the committed tables by the arguments for their mesh and model."""
    found = {}
    for part in TABLES.read_text().split("$ python benchmarks/steps.py ")[1:]:
        arguments, printed = part.split("\n", 1)
        rest = " ".join(re.findall(r"--sequence", arguments))
        pairs = [(mesh, model) for mesh in re.findall(r"--mesh \S+", arguments) for model in ("GPT", "Llama")]
        for (mesh, model), table in zip(pairs, tables(printed), strict=True):
            found[f"{model} {mesh} {rest}".strip()] = table
    return found


COMMITTED = committed()


@pytest.mark.parametrize(
    ("arguments", "by"),
    [
        ("GPT --mesh data=2,fsdp=2,tensor=2", "fused"),
        ("Llama --mesh data=2,fsdp=2,tensor=2 --sequence", "fused"),
        ("GPT --mesh data=8,fsdp=4,tensor=8", "with Linears"),
        ("Llama --mesh data=8,fsdp=4,tensor=8 --sequence", "with Linears"),
    ],
)
def test_a_column_is_what_the_command_prints(arguments, by, monkeypatch):
    monkeypatch.setattr(steps, "FUSED", {by: steps.FUSED[by]})
    printed = CliRunner().invoke(APP, shlex.split(arguments), catch_exceptions=False)
    ([title, (*_, header), *found],) = tables(printed.output)
    kept_title, columns, *rows = COMMITTED[arguments]
    kept = [[*row[:2], row[columns.index(by)]] for row in rows if row[columns.index(by)] != "0 / 0.000"]
    assert printed.exit_code == 0 and (title, header) == (kept_title, by) and len(found) == len(kept)
    for cells, as_kept in zip(found, kept, strict=True):
        if cells[0] in ("kernels", "temporary, MB"):  # which change a little with any kernel and version of XLA
            assert cells[:2] == as_kept[:2] and float(cells[2]) == pytest.approx(float(as_kept[2]), rel=0.05), cells
        else:
            assert cells == as_kept


def times_and_bytes(cell):
    times, size = cell.split(" / ")
    return int(times), round(float(size) * 1e6)


@pytest.mark.parametrize("arguments", COMMITTED)
def test_nothing_is_communicated_that_the_step_as_it_is_does_not(arguments):
    """A fused step communicates what it does as it is, kind by kind, but small sums in another dtype.

    With its Linears it gathers the norms' results of split sequences again, which it does not hold.
    """
    _, header, *rows = COMMITTED[arguments]
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
    "data=" + 50 * "9": "is not of at most 4096 GPUs",
    "fsdp=3": "whose tensor divides 8 and fsdp 2048",
    "model=2": "'model=2' is not as",
}


@pytest.mark.parametrize("mesh", BAD)
def test_a_mesh_that_cannot_be_is_a_bad_request(mesh):
    with pytest.raises(typer.BadParameter, match=BAD[mesh]):
        steps.parsed(mesh, "h200")


LAYERS = 2  # the fewest that have a norm between two blocks
CONFIG = dataclasses.replace(example.CONFIGS["gpu"], layers=LAYERS)
ACTIVATION = CONFIG.batch // 4 * CONFIG.context * CONFIG.width * 2  # bytes on one device


@pytest.mark.parametrize("sequence", [False, True])
def test_the_example_gathers_nothing_but_activations_of_split_sequences(sequence):
    def new():
        model = example.GPT(CONFIG, nnx.Rngs(0))
        return model, example.make_optimizer(model, CONFIG)

    graph, state = nnx.split(nnx.eval_shape(new))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        return example.train_step(model, optimizer, batch), nnx.state((model, optimizer))

    mesh = program.mesh("h200", (4, 1, 2), sharding.AXES)
    split = NamedSharding(mesh, PartitionSpec(sharding.BATCH))
    batch = jax.ShapeDtypeStruct((CONFIG.batch, CONFIG.context + 1), "uint8", sharding=split)
    placed = jax.tree.map(lambda a, at: a.update(sharding=at), state, sharding.shardings(state, mesh))
    with sharding.on(mesh, sequence):
        report = program.compile_for(step, placed, batch, devices=8)
    assert sum(launches(report)) == 3 * (2 * LAYERS + 1)  # of a norm forward, backward and the sum of shares

    sums = [c for c in report.collectives if c.kind == "all-reduce"]
    large = [c for c in sums if c.bytes == ACTIVATION]
    gradients = sum(c.bytes for c in sums if c not in large)
    assert gradients < 4 * sum(a.size for a in jax.tree.leaves(state[0]))  # no more than each, whole, in float32
    if not sequence:
        assert len(sums) == len(report.collectives)
        assert [c.devices for c in large] == [2] * 4 * LAYERS  # of two products forward, of two norms' dx backward
        assert len(sums) - len(large) <= 4  # what is left travels together: one for each set of devices and dtype
        return
    of_tensor = Counter()
    for c in report.collectives:
        of_tensor[c.kind, c.group] += c.bytes // ACTIVATION
    # A block gathers for its two products by columns, forward and again backward, and for its two by rows backward.
    assert of_tensor["all-gather", (0, 1)] == 6 * LAYERS and of_tensor["reduce-scatter", (0, 1)] == 4 * LAYERS
    others = [c for c in report.collectives if c.kind not in ("all-reduce", "reduce-scatter")]
    assert all(example.is_of_sequences(CONFIG, 4, c.kind, c.bytes) for c in others) and not large
