"""The step of `examples/data_and_tensor_parallel.py`, compiled for eight GPUs, and what it communicates."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import absent_gpu  # noqa: F401
import program

for name in ("flax", "matplotlib", "optax", "orbax.checkpoint", "rich", "typer"):
    pytest.importorskip(name, reason='the example needs pip install -e ".[examples]"')
import data_and_tensor_parallel as example  # noqa: E402
from flax import nnx  # noqa: E402

from zoo import sharding  # noqa: E402

LAYERS = 2  # the fewest that have a norm between two blocks


def compiled(config, sequence):
    """Return the report of the example's step on eight GPUs, and the number of elements of the model's parameters."""
    mesh = program.mesh("h200", (4, 1, 2), sharding.AXES)

    def new():
        model = example.GPT(config, nnx.Rngs(0))
        return model, example.make_optimizer(model, config)

    graph, state = nnx.split(nnx.eval_shape(new))

    def struct(a, sharding):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        return example.train_step(model, optimizer, batch), nnx.state((model, optimizer))

    batch = jax.ShapeDtypeStruct((config.batch, config.context + 1), "uint8")
    batch = struct(batch, NamedSharding(mesh, PartitionSpec(sharding.BATCH)))
    arguments = jax.tree.map(struct, state, sharding.shardings(state, mesh)), batch
    parameters = sum(a.size for a in jax.tree.leaves(state[0]))
    with sharding.on(mesh, sequence):
        return program.compile_for(step, *arguments, devices=8), parameters


CONFIG = dataclasses.replace(example.CONFIGS["gpu"], layers=LAYERS)
ACTIVATION = CONFIG.batch // 4 * CONFIG.context * CONFIG.width * 2  # bytes on one device
# Of a norm forward, backward and the sum of its partial gradients.
KERNELS = 3 * (2 * LAYERS + 1)


def test_the_example_only_sums():
    report, parameters = compiled(CONFIG, sequence=False)
    assert {c.kind for c in report.collectives} == {"all-reduce"}
    large = [c for c in report.collectives if c.bytes == ACTIVATION]
    assert [c.devices for c in large] == [2] * 4 * LAYERS  # of two products forward, of two norms' dx backward
    rest = [c for c in report.collectives if c not in large]
    assert len(rest) <= 4  # whatever is left travels together: one for each set of devices and dtype
    assert sum(c.bytes for c in rest) < 4 * parameters  # and is no more than every gradient, whole, in float32
    assert sum(k.times for k in report.kernels if k.is_triton) == KERNELS


def test_with_sequence_parallelism_the_example_gathers_activations_alone():
    report, parameters = compiled(CONFIG, sequence=True)
    of_tensor = Counter()
    for c in report.collectives:
        of_tensor[c.kind, c.group] += c.bytes // ACTIVATION
    # A block gathers for its two products by columns, forward and again backward, and for its two by rows backward.
    assert of_tensor["all-gather", (0, 1)] == 6 * LAYERS and of_tensor["reduce-scatter", (0, 1)] == 4 * LAYERS
    others = [c for c in report.collectives if c.kind not in ("all-reduce", "reduce-scatter")]
    assert all(example.is_of_sequences(CONFIG, 4, c.kind, c.bytes) for c in others)
    assert sum(c.bytes for c in report.collectives if c.kind == "all-reduce") < 4 * parameters
    assert sum(k.times for k in report.kernels if k.is_triton) == KERNELS
