"""Models in the shape of those that people train, fused as they are.

They have the original's numbers in float64, and the lines of `explain` are true of them.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from counted import found, held
from proof import equations
from zoo import sharding
from zoo.models import MODELS, functional

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
# What differs between any two axes.
SMALL = {"batch": 2, "tokens": 8, "width": 32, "heads": 4, "key_heads": 2, "head": 5, "hidden": 24, "layers": 2}
FLOAT64 = dict.fromkeys(("dtype", "norm_dtype", "param_dtype"), "float64") | {"attention": "xla"}
TRAINED = {"layers": 2, "attention": "xla"}  # cuDNN's attention is traced where it is installed alone
LINEARS = ("GPT", "Gemma", "ViT", "T5", "Mixer", "Parallel")  # the other models' stand in the same places

pytestmark = pytest.mark.usefixtures("promoted_ranks")

# All is in float64 but for JAX's attention, whose softmax is in float32 and rounds the same numbers alike. TOLERANCE is
# a part of an array's largest element, less than float32's rounding. ROUNDING is a part of the largest element of all
# arrays. Where an exact gradient is zero, as that of the keys' bias in front of a softmax, roundings are left.
TOLERANCE, ROUNDING = 1e-10, 1e-13


def drawn(tree):
    """Return random parameters, none of which is at its initial value, so that a scale left out is seen.

    They are so small that no softmax is a selection, whose gradients are zero.
    """
    r = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray((0.3 if a.ndim == 1 else 0.2) * r.normal(size=a.shape), a.dtype), tree)


def gradients(model, *functions, places=None):
    """Return what the functions make of a model's parameters and x, in one program: a result and gradients for each."""
    parameters, x = jax.device_put(drawn((model.parameters, model.x)), places)
    weight = drawn(jax.eval_shape(model.function, parameters, x))

    def of(function):
        def loss(parameters, x):
            y = function(parameters, x)
            return jnp.sum(weight * y), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)

    return jax.jit(lambda *args: [of(function)(*args) for function in functions])(parameters, x)


@pytest.mark.parametrize("name", COUNTS)
def test_outputs_and_gradients_are_the_originals(name):
    layers = 2 if name == "Llama, checkpointed" else 1
    model = functional(MODELS[name], **SMALL | FLOAT64 | {"layers": layers})
    fused = [jln.fuse(model.function, linears=linears) for linears in (False, True)[: 1 + (name in LINEARS)]]
    assert_equal(*gradients(model, model.function, *fused))


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs eight devices")
@pytest.mark.parametrize("by_tokens", [False, True], ids=["tensors", "sequences"])
def test_on_a_mesh(by_tokens):
    """A model that is sharded as trainers shard it has one device's numbers, all of its operators and constraints."""
    mesh = jax.make_mesh((2, 2, 2), sharding.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    model = functional(MODELS["Llama"], **SMALL | FLOAT64 | {"batch": 4})
    stream = jax.sharding.NamedSharding(mesh, sharding.stream_spec(by_tokens))
    wanted = gradients(model, model.function)
    fused = [jln.fuse(model.function, linears=linears) for linears in (False, True)]
    with sharding.on(mesh, by_tokens):
        places = sharding.shardings(model.parameters, mesh), stream
        assert_equal(*wanted, *gradients(model, *fused, places=places), tolerance=1e-6)  # the softmax's float32
        for function, of_linears in zip(fused, (0, 4), strict=True):
            assert found(function, model.parameters, model.x)[:3] == (5, 4, of_linears)
            program = str(jax.make_jaxpr(function)(model.parameters, model.x))
            assert program.count(f"spec={stream.spec}".replace("PartitionSpec", "P")) == 3  # a norm alone reads a 4th


def assert_equal(wanted, *all_of_them, tolerance=TOLERANCE):
    """Assert that results are what is wanted, but for roundings, and that all of it says something."""
    greatest = max(np.abs(a).max() for a in jax.tree.leaves(wanted))
    for own in all_of_them:
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(own), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            difference, largest = np.abs(a - b).max(), np.abs(b).max()
            assert largest > 0, f"{path}: a gradient of zeros tells nothing"
            assert difference <= tolerance * largest + ROUNDING * greatest, f"{path}: {difference / largest:.1e}"


@pytest.mark.parametrize("name", COUNTS)
def test_every_norm_sum_and_linear_is_found_and_explained(name):
    """The lines of `explain` are as many as the program's operators; an operator in a scan's body counts once."""
    model = functional(MODELS[name], **TRAINED)
    for linears in (False, True):
        fused = jln.fuse(model.function, linears=linears)
        with_linears = linears or name in UNASKED
        counts = found(fused, model.parameters, model.x)
        assert counts[:3] == (*COUNTS[name][:2], COUNTS[name][2] if with_linears else 0)
    program = jax.make_jaxpr(fused)(model.parameters, model.x).jaxpr
    operators = [e for e in equations(program) if re.fullmatch(r"jln_norm.*_forward", e.primitive.name)]
    assert len(operators) == sum(r.path != "plain" for r in jln.explain(fused, model.parameters, model.x))


@pytest.mark.parametrize("name", ["GPT", "Gemma", "T5", "Perceiver", "Llama, checkpointed", "AlphaFold"])
def test_less_is_kept_between_forward_and_backward(name):
    """A fused model keeps fewer bytes between forward and backward, and with its Linears fewer still."""
    model = functional(MODELS[name], **TRAINED)
    functions = model.function, jln.fuse(model.function), jln.fuse(model.function, linears=True)
    plain, norms, linears = (held(f, model.parameters, model.x) for f in functions)
    assert norms < plain and linears < plain
    assert linears < norms or name in UNASKED


@pytest.mark.parametrize("name", ["GPT", "Gemma"])
def test_gradients_in_bfloat16_are_no_further_from_float64(name):
    """Rows are wide enough for roundings to average, and blocks are enough for them to add up."""
    sizes = {"tokens": 64, "width": 256, "head": 16, "hidden": 512, "layers": 3, "attention": "xla"}
    low, double = (functional(MODELS[name], **SMALL | sizes | dtypes) for dtypes in ({}, FLOAT64))
    p, x = drawn(low.parameters), drawn(low.x)

    def gradient(function, p, x):
        return jax.jit(jax.grad(lambda p: jnp.mean(function(p, x).astype(wide(x)) ** 2)))(p)

    wide = lambda a: jnp.promote_types(a.dtype, "float32")  # noqa: E731
    exact = gradient(double.function, *jax.tree.map(lambda a: a.astype("float64"), (p, x)))
    untouched, fused = (
        jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), gradient(f, p, x), exact)
        for f in (low.function, jln.fuse(low.function))
    )
    untouched, fused = np.asarray(jax.tree.leaves(untouched)), np.asarray(jax.tree.leaves(fused))
    # The median of the parameters' errors; no parameter by itself is off by more than roundings differ by chance.
    assert 0 < np.median(fused) <= 1.02 * np.median(untouched), (np.median(fused), np.median(untouched))
    assert (fused <= 1.5 * untouched + 1e-3).all(), (fused, untouched)
