"""Tests that stacks on a mesh, as `benchmarks/steps.py --mesh` compiles them, compute what one device does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from layouts import Layout
from losses import losses, sharded_losses
from stacks import STACKS

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)

AXES = {"data": ("data", "fsdp", "tensor"), "pipeline": ("pipeline", "fsdp", "tensor")}


def small(name):
    """Return a stack of two blocks in float64, of sizes that two devices divide."""
    options = {"layers": 2, "shape": (2, 6, 16), "hidden": 12, "heads": 4, "key_heads": 2, "attention": "xla"}
    return dataclasses.replace(STACKS[name], **options, dtype="float64", parameter_dtype="float64")


def layout_of(axes, sequence):
    return Layout(jax.make_mesh((2, 2, 2), AXES[axes], (AxisType.Auto,) * 3), sequence)


def staged(tree):
    """Return the parameters of two blocks, one of each stage, stacked in one array each."""
    return {"block_0": jax.tree.map(lambda *a: jnp.stack(a), tree["block_0"], tree["block_1"]), "norm": tree["norm"]}


CASES = [("stack-gpt-q-k-v", "data"), ("stack-llama-q-k-v", "pipeline")]
VARIANTS = ("jnp", "jln, add_norm", "jln, add_norm_linear")  # the other variants are made of the same parts


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("name", "axes"), CASES)
def test_a_stack_on_a_mesh_is_the_same_function(name, axes, sequence, promoted_ranks):
    """A stack on a mesh has the loss and the gradients of one device, and each gradient lies where its argument is.

    All is in float64 but JAX's softmax, so that values agree to 1e-6.
    """
    layout = layout_of(axes, sequence)
    stack = layout.fitted(small(name))
    parameters, x = stack.init(jax.random.key(0))
    plain, as_given = losses(stack)["jnp"], (lambda tree: tree)
    if axes == "pipeline":  # two microbatches with different numbers
        x, as_given = jnp.stack([x, 2 * x]), staged
        plain = functools.partial(added_up, plain)
    value, (of_parameters, of_x) = jax.jit(stack.step(plain))(parameters, x)
    places = layout.arguments(stack)
    given = jax.tree.map(lambda a, at: jax.device_put(a, at.sharding), (as_given(parameters), x), places)
    of_variants = sharded_losses(stack, layout)
    for variant in VARIANTS:
        found, gradients = jax.jit(layout.step(stack, of_variants[variant]))(*given)
        np.testing.assert_allclose(found, value, rtol=1e-6, err_msg=variant)
        for a, b, at in zip(*map(jax.tree.leaves, (gradients, (as_given(of_parameters), of_x), places)), strict=True):
            assert a.sharding.is_equivalent_to(at.sharding, a.ndim)
            size = 1 + jnp.abs(b).max()  # the gradient of the keys' bias is nothing but roundings
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * size, err_msg=variant)


def added_up(loss, parameters, batches):
    return sum(loss(parameters, x) for x in batches)


def test_what_a_mesh_cannot_split_is_named():
    layout = layout_of("data", sequence=True)
    assert layout.fitted(dataclasses.replace(small("stack-gpt-q-k-v"), shape=(5, 6, 16))).shape == (8, 6, 16)
    for changed, what in (({"heads": 3}, "3 heads"), ({"shape": (4, 5, 16)}, "5 tokens"), ({"hidden": 9}, "9 hidden")):
        with pytest.raises(ValueError, match=rf"stack-gpt-q-k-v has {what}.*, which tensor=2 does not divide"):
            layout.fitted(dataclasses.replace(small("stack-gpt-q-k-v"), key_heads=None, **changed))


def test_a_group_of_devices_differs_along_axes():
    layout = layout_of("data", sequence=False)
    assert layout.among((0, 1)) == ("tensor",) and layout.among((1, 3)) == ("fsdp",)
    assert layout.among((0, 2, 4, 6)) == ("data", "fsdp") and layout.among(None) == AXES["data"]
