"""Rung 4: whole steps through `jln.fuse`, beside the same steps untouched and fused by hand."""

import dataclasses

import pytest

import absent_gpu  # noqa: F401
import jln
from jln import program
from jln._bench.losses import losses
from jln._bench.stacks import STACKS

pytest.importorskip("flax")


def compiled(stack, loss):
    return program.compile_for(stack.step(loss), stack.parameters(), stack.x())


def resembling(*case):
    """Return a case that resembles another one, and runs with `-m heavy`."""
    return pytest.param(*case, marks=pytest.mark.heavy)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("stack-llama", "jnp"),
        ("stack-gpt", "flax"),  # biases in the sums
        ("stack-gemma", "jnp"),  # norms on both sides
        resembling("stack-dit", "flax"),  # scale, offset and gate of each example
        resembling("stack-llama", "flax"),
        resembling("stack-gpt", "jnp"),
        resembling("stack-gemma", "flax"),
        resembling("stack-dit", "jnp"),
        resembling("stack-llama-q-k-v", "flax"),
    ],
)
def test_a_step_is_as_the_hand_fused_one(name, written):
    """A step in plain jnp or with Flax's layers moves and needs what the hand-fused one does, within 0.5 %."""
    stack = dataclasses.replace(STACKS[name], layers=3)
    variants = losses(stack)
    for linears, by_hand in ((False, "jln, add_norm"), (True, "jln, add_norm_linear")):
        if linears and stack.both_sides:
            continue  # by hand the operator of both sides is given up, and more is moved
        ours, theirs = (
            compiled(stack, loss) for loss in (jln.fuse(variants[written], linears=linears), variants[by_hand])
        )
        assert ours.bytes_total <= 1.005 * theirs.bytes_total
        assert ours.temp_bytes <= 1.005 * theirs.temp_bytes


@pytest.mark.parametrize("policy", [None, "dots_with_no_batch_dims_saveable"])
def test_a_checkpointed_step_moves_no_more_than_untouched(policy):
    stack = dataclasses.replace(STACKS["stack-llama-checkpointed"], layers=3, policy=policy or "nothing_saveable")
    plain = losses(stack)["jnp"]
    untouched, fused = (compiled(stack, loss) for loss in (plain, jln.fuse(plain)))
    assert fused.bytes_total <= untouched.bytes_total
    assert fused.temp_bytes <= 1.001 * untouched.temp_bytes
