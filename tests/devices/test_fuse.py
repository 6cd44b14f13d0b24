"""A fused program on several devices computes what it did, and sends no more."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import program
from placements import put

for _name in ("flax", "haiku", "equinox"):
    pytest.importorskip(_name)

from zoo import sharding  # noqa: E402
from zoo.models import MODELS, functional  # noqa: E402

pytestmark = pytest.mark.usefixtures("promoted_ranks")


def on_four():
    return jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])


@pytest.mark.parametrize("linears", [False, True], ids=["norms", "linears"])
def test_a_result_that_is_split_is_gathered_once(linears):
    """MaxText splits the features of a norm's result over "tensor", in front of several products, in a checkpoint."""
    stream = NamedSharding(on_four(), P("data", None, "tensor"))
    split = functools.partial(jax.lax.with_sharding_constraint, shardings=stream)

    def layer(p, x):
        x = split(x)
        y = split(x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["s"])
        q, k, v = (y @ p[name] for name in "qkv")
        return x + split((jnp.sin(q) * jnp.cos(k) * v) @ p["o"])

    def loss(p, x):
        return jnp.sum(jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), x, p)[0] ** 2)

    sizes = {"s": (2, 32), "q": (2, 32, 64), "k": (2, 32, 64), "v": (2, 32, 64), "o": (2, 64, 32)}
    specs = dict.fromkeys("qkv", P(None, None, "tensor")) | {"s": P(None, "tensor"), "o": P(None, "tensor")}
    given = put({n: jnp.ones(size, "float32") for n, size in sizes.items()}, specs, on_four())
    x = jax.device_put(jnp.ones((4, 16, 32), "float32"), stream)
    counts = []
    for function in (loss, jln.fuse(loss, linears=linears)):
        compiled = jax.jit(jax.grad(function, (0, 1))).lower(given, x).compile()
        found = program.collectives(compiled.as_text())
        counts.append((sum(c.times for c in found), sum(c.times * c.bytes for c in found)))
    (times, size), (own_times, own_size) = counts
    assert own_times <= times and own_size <= size


def test_products_whose_features_a_shard_map_splits():
    """The norm varies over the axis of rows alone, what the product reads over both."""

    def local(x, s, w):
        return jnp.tanh(x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * s @ w)

    in_specs = P("data"), P(), P(None, "tensor")
    spread = jax.shard_map(local, mesh=on_four(), in_specs=in_specs, out_specs=P("data", "tensor"))
    arrays = [jax.random.normal(jax.random.key(i), size) for i, size in enumerate([(4, 64), (64,), (64, 8)])]
    own, wanted = (jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a)), (0, 1, 2))) for f in (jln.fuse(spread), spread))
    assert [r.layer for r in jln.explain(jln.fuse(spread), *arrays)] == ["jln.rms_norm"]
    for got, true in zip(own(*arrays), wanted(*arrays), strict=True):
        assert jnp.max(jnp.abs(got - true)) <= 1e-5


SMALL = {"batch": 4, "tokens": 6, "width": 16, "heads": 4, "key_heads": 2, "head": 4, "hidden": 12, "attention": "xla"}
SMALL |= dict.fromkeys(("dtype", "norm_dtype", "param_dtype"), "float64")
FUSED = {"as it is": lambda f: f, "fused": jln.fuse, "with Linears": lambda f: jln.fuse(f, linears=True)}


@pytest.mark.parametrize(("name", "by_tokens"), [("GPT", False), ("Llama", True)])
def test_a_model_on_a_mesh_is_the_same_function(name, by_tokens):
    """A model on a mesh has the loss and the gradients of one device, and each gradient lies where its argument is.

    All is in float64 but JAX's softmax, so that values agree to 1e-6.
    """
    model = functional(MODELS[name], **SMALL)
    r = np.random.default_rng(0)
    drawn = jax.tree.map(lambda a: jnp.asarray(0.5 * r.normal(size=a.shape), a.dtype), (model.parameters, model.x))
    mesh = jax.make_mesh((2, 2, 2), sharding.AXES, (AxisType.Auto,) * 3)
    stream = sharding.stream_spec(by_tokens)
    places = sharding.shardings(drawn[0], mesh), NamedSharding(mesh, stream)
    assert len({place.spec for place in jax.tree.leaves(places)}) >= 4
    given = jax.tree.map(jax.device_put, drawn, places)

    def step(function):
        return jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(function(*given))), (0, 1))

    with sharding.on(mesh, by_tokens):
        text = str(jax.make_jaxpr(model.function)(*drawn))  # before JAX has traced the function elsewhere
        found = {
            by: jax.jit(step(fuse(model.function)), out_shardings=(None, places))(*given) for by, fuse in FUSED.items()
        }
    assert text.count(f"spec={stream}".replace("PartitionSpec", "P")) == 4, "the stream is where the rules say"
    outside = functional(MODELS[name], **SMALL)
    assert "sharding_constraint" not in str(jax.make_jaxpr(outside.function)(*drawn))
    value, wanted = jax.jit(step(outside.function))(*drawn)
    for by, (own, gradients) in found.items():
        np.testing.assert_allclose(own, value, rtol=1e-6, err_msg=by)
        for a, b, at in zip(*map(jax.tree.leaves, (gradients, wanted, places)), strict=True):
            assert a.sharding.is_equivalent_to(at, a.ndim)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * (1 + jnp.abs(b).max()), err_msg=by)
