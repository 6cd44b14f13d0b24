"""A whole training step of examples/train_lm.py, lowered for an H200 and executed: loss, gradients and parameters."""

import dataclasses
import pathlib
import sys
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx

from cases import lowering_for
from ptx import Program

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
import train_lm

# In bfloat16 the first norm and its Linear are one kernel (192 features). Behind a biased sum, or in float32, none are.
# A training of fewer than ten steps has no warm-up, whose first step would change nothing.
TINY = train_lm.Config(
    layers=2, width=64, heads=2, context=16, batch=4, learning_rate=1e-2, dtype="bfloat16", steps=9, evaluate_every=9
)


def step_and_state(config, loss_fn, dtype="float32"):
    """Return (step, state), where step returns the loss, the new parameters and the optimizer's new state."""
    model = train_lm.GPT(config, nnx.Rngs(0))
    graph, state = nnx.split((model, train_lm.make_optimizer(model, config)))

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss = train_lm.train_step(model, optimizer, batch, loss_fn=loss_fn)
        return loss, nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(nnx.state(optimizer))

    return step, jax.tree.map(lambda a: a.astype(dtype) if a.dtype == np.float32 else a, state)


@pytest.fixture(autouse=True)
def ranks_may_differ():
    """Allow rank promotion, which examples/train_lm.py uses."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_leaves_the_parameters_that_it_leaves_on_the_cpu(dtype):
    """An executed step is at most twice as far from the same step in float64 as that of Flax's norms is on the CPU.

    The loss and Adam's moments, which are the gradients and their squares, are compared one by one, with one rounding
    more allowed. The parameters are compared together, as Adam moves one whose gradient is only rounding by as much as
    any other.
    """
    config = dataclasses.replace(TINY, dtype=dtype)
    batch = np.random.default_rng(0).integers(97, 123, (config.batch, config.context + 1)).astype("uint8")
    step, state = step_and_state(config, train_lm.fused_loss)
    with lowering_for("h200"):
        program = Program(step, state, batch)
    launches = Counter(call.name for call in program.calls)
    assert launches["jln_forward_kernel"] == launches["jln_backward_kernel"] == 2 * config.layers + 1
    assert launches["jln_parameters_kernel"] == (1 if dtype == "bfloat16" else 0)
    got = program.run(state, batch)

    plain_step, plain_state = step_and_state(config, train_lm.loss_fn)
    plain = jax.jit(plain_step)(plain_state, batch)
    wide = dataclasses.replace(config, dtype="float64")
    wide_step, wide_state = step_and_state(wide, train_lm.loss_fn, "float64")
    true = jax.jit(wide_step)(wide_state, batch)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(got)]
    leaves = zip(names, *map(jax.tree.leaves, (got, plain, true)), strict=True)
    squares = np.zeros(2)
    for name, ours, theirs, t in leaves:
        errors = [np.linalg.norm(np.asarray(a, "float64") - np.asarray(t)) for a in (ours, theirs)]
        if name.startswith("[1]"):  # the name of a parameter
            squares += np.square(errors)
        else:
            rounding = float(jax.numpy.finfo(dtype).eps) * np.linalg.norm(t)
            assert errors[0] <= 2 * errors[1] + rounding, name
    assert squares[1] and squares[0] <= 2**2 * squares[1]
