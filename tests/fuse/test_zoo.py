"""Models in the shape of those that people train, fused as they are.

They have the original's numbers in float64, and the lines of `explain` are true of them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from proof import equations

for _name in ("flax", "haiku", "equinox"):
    pytest.importorskip(_name)

from counted import found, held  # noqa: E402
from zoo.models import MODELS, functional  # noqa: E402

# What `jln.fuse` must find in each model of two layers (of the ViT's and AlphaFold's scans in one body): norms of the
# model's width, as the short ones of queries and keys are left to XLA; sums that are in one operator with a norm; and
# norms that, with `linears=True`, are one operator with the Linears behind.
COUNTS = {
    "GPT": (5, 4, 4),
    "Llama": (5, 4, 4),
    "Llama, checkpointed": (5, 2, 4),  # where products are kept, Linears' operators make norms again
    "Gemma": (9, 4, 4),
    "Qwen": (5, 4, 4),
    "DiT": (5, 4, 4),
    "BERT": (5, 4, 0),  # a norm's result is read by the next sum, too
    "ViT": (4, 1, 4),
    "T5": (5, 4, 4),
    "Perceiver": (7, 5, 7),
    "AlphaFold": (1, 0, 1),
    "Mixer": (5, 4, 2),  # in front of the others the tokens come last
    "Parallel": (3, 2, 2),
}
UNASKED = ("Llama, checkpointed", "AlphaFold")  # where products are kept, and in a scan, Linears are taken in any case
# What differs between any two axes, and as many features as `jln.fuse` takes whatever reads them.
SMALL = {"batch": 2, "tokens": 8, "width": 512, "heads": 4, "key_heads": 2, "head": 5, "hidden": 24, "layers": 2}
SMALL |= dict.fromkeys(("dtype", "norm_dtype", "param_dtype"), "float64") | {"attention": "xla"}

pytestmark = pytest.mark.usefixtures("promoted_ranks")
each_model = pytest.mark.parametrize("name", COUNTS)
with_and_without_linears = pytest.mark.parametrize("linears", [False, True], ids=["norms", "linears"])

# All is in float64 but for JAX's attention, whose softmax is in float32 and rounds the same numbers alike. TOLERANCE is
# a part of an array's largest element, less than float32's rounding. ROUNDING is a part of the largest element of all
# arrays. Where an exact gradient is zero, as that of the keys' bias in front of a softmax, roundings are left.
TOLERANCE, ROUNDING = 1e-10, 1e-13


def drawn(tree):
    """Return random parameters, none of which is at its initial value, so that a scale left out is seen.

    Products of 512 terms stay so small that no softmax is a selection, whose gradients are zero.
    """
    r = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray((0.3 if a.ndim == 1 else 0.05) * r.normal(size=a.shape), a.dtype), tree)


@functools.cache
def of(name):
    return functional(MODELS[name], **SMALL)


def gradients(function, model):
    parameters, x = drawn((model.parameters, model.x))
    weight = drawn(jax.eval_shape(model.function, parameters, x))

    def loss(parameters, x):
        y = function(parameters, x)
        return jnp.sum(weight * y), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, x)


@functools.cache
def own_gradients(name):
    return gradients(of(name).function, of(name))


@each_model
@with_and_without_linears
def test_outputs_and_gradients_are_the_originals(name, linears):
    wanted = own_gradients(name)
    own = gradients(jln.fuse(of(name).function, linears=linears), of(name))
    greatest = max(np.abs(a).max() for a in jax.tree.leaves(wanted))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(own), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        difference, largest = np.abs(a - b).max(), np.abs(b).max()
        assert largest > 0, f"{path}: a gradient of zeros tells nothing"
        assert difference <= TOLERANCE * largest + ROUNDING * greatest, f"{path}: {difference / largest:.1e}"


@each_model
@with_and_without_linears
def test_every_norm_sum_and_linear_is_found_and_explained(name, linears):
    """The lines of `explain` are as many as the program's operators; an operator in a scan's body counts once."""
    for changes in (SMALL, {"layers": 2, "attention": "xla"}):  # cuDNN's is traced where it is installed alone
        model = functional(MODELS[name], **changes)
        fused = jln.fuse(model.function, linears=linears)
        counts = found(fused, model.parameters, model.x)
        with_linears = linears or name in UNASKED
        assert counts[:3] == (*COUNTS[name][:2], COUNTS[name][2] if with_linears else 0)
        program = jax.make_jaxpr(fused)(model.parameters, model.x).jaxpr
        operators = [e for e in equations(program) if re.fullmatch(r"jln_norm.*_forward", e.primitive.name)]
        listed = [route for route in jln.explain(fused, model.parameters, model.x) if route.path != "plain"]
        assert len(operators) == len(listed)


@each_model
def test_less_is_kept_between_forward_and_backward(name):
    """A fused model keeps fewer bytes between forward and backward, and with its Linears fewer still.

    Models have the size for compiling, and XLA's attention, which keeps its weights in all of them alike.
    """
    model = functional(MODELS[name], layers=2, attention="xla")
    functions = model.function, jln.fuse(model.function), jln.fuse(model.function, linears=True)
    plain, norms, linears = (held(f, model.parameters, model.x) for f in functions)
    assert norms < plain and linears < plain
    # Equinox keeps kernels transposed.
    if COUNTS[name][2] and MODELS[name].framework != "equinox" and name not in UNASKED:
        assert linears < norms
