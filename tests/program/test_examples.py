"""The step of `examples/data_and_tensor_parallel.py`, compiled for eight GPUs."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import absent_gpu  # noqa: F401
from jln import program

for name in ("flax", "matplotlib", "optax", "orbax.checkpoint", "rich", "typer"):
    pytest.importorskip(name, reason='the example needs pip install "jln[examples]"')
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

import data_and_tensor_parallel as example  # noqa: E402
from flax import nnx  # noqa: E402

LAYERS = 2  # the shortest that has a norm between two blocks


def test_the_example_only_sums():
    config = dataclasses.replace(example.CONFIGS["gpu"], layers=LAYERS)
    mesh = program.mesh("h200", (4, 2), ("data", "tensor"))

    def new():
        model = example.GPT(config, example.JlnNorm, nnx.Rngs(0))
        return model, example.make_optimizer(model, config)

    graph, state = nnx.split(nnx.eval_shape(new))

    def struct(a, sharding):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        return example.train_step(model, optimizer, batch), nnx.state((model, optimizer))

    batch = jax.ShapeDtypeStruct((config.batch, config.context + 1), "uint8")
    batch = struct(batch, NamedSharding(mesh, PartitionSpec("data")))
    report = program.compile_for(step, jax.tree.map(struct, state, example.shardings(state, mesh)), batch, devices=8)

    assert {c.kind for c in report.collectives} == {"all-reduce"}
    activations = config.batch // 4 * config.context * config.width * 2
    large = [c for c in report.collectives if c.bytes == activations]
    assert [c.devices for c in large] == [2] * 4 * LAYERS  # behind two products forward, the dx of two norms backward
    rest = [c for c in report.collectives if c not in large]
    assert len(rest) <= 4  # whatever is left travels together: one for each set of devices and dtype
    parameters = sum(a.size for a in jax.tree.leaves(state[0]))
    assert sum(c.bytes for c in rest) < 4 * parameters  # and is no more than every gradient, whole, in float32
    kernels = sum(k.times for k in report.kernels if k.is_triton)
    assert kernels == 3 * (2 * LAYERS + 1)  # forward, backward, the sum of its partial gradients
