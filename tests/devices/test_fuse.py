"""Collectives of a fused program on several devices: no more than of the program as it is."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jln
import program


@pytest.mark.usefixtures("promoted_ranks")
@pytest.mark.parametrize("linears", [False, True], ids=["norms", "linears"])
def test_a_result_that_is_split_is_gathered_once(linears):
    """MaxText splits the features of a norm's result over "tensor", in front of several products, in a checkpoint."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), kinds, devices=jax.devices()[:4])
    placed = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    split = functools.partial(jax.lax.with_sharding_constraint, shardings=placed("data", None, "tensor"))

    def layer(p, x):
        x = split(x)
        y = split(x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["s"])
        q, k, v = (y @ p[name] for name in "qkv")
        return x + split((jnp.sin(q) * jnp.cos(k) * v) @ p["o"])

    def loss(p, x):
        return jnp.sum(jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), x, p)[0] ** 2)

    sizes = {"s": (2, 32), "q": (2, 32, 64), "k": (2, 32, 64), "v": (2, 32, 64), "o": (2, 64, 32)}
    axes = {"s": (None, "tensor"), "o": (None, "tensor", None)}
    parameters = {
        name: jax.ShapeDtypeStruct(size, "float32", sharding=placed(*axes.get(name, (None, None, "tensor"))))
        for name, size in sizes.items()
    }
    x = jax.ShapeDtypeStruct((4, 16, 32), "float32", sharding=placed("data", None, "tensor"))
    counts = []
    for function in (loss, jln.fuse(loss, linears=linears)):
        compiled = jax.jit(jax.grad(function, (0, 1))).lower(parameters, x).compile()
        found = program.collectives(compiled.as_text())
        counts.append((sum(c.times for c in found), sum(c.times * c.bytes for c in found)))
    (times, size), (own_times, own_size) = counts
    assert own_times <= times and own_size <= size


@pytest.mark.usefixtures("promoted_ranks")
def test_products_whose_features_a_shard_map_splits():
    """The norm varies over the axis of rows alone, what the product reads over both."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def local(x, s, w):
        return jnp.tanh(x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * s @ w)

    rows, columns, both = (PartitionSpec(*axes) for axes in (("data",), (None, "tensor"), ("data", "tensor")))
    spread = jax.shard_map(local, mesh=mesh, in_specs=(rows, PartitionSpec(), columns), out_specs=both)
    x, s, w = (jax.random.normal(jax.random.key(i), size) for i, size in enumerate([(4, 64), (64,), (64, 8)]))
    own, wanted = (jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a)), (0, 1, 2))) for f in (jln.fuse(spread), spread))
    assert [r.layer for r in jln.explain(jln.fuse(spread), x, s, w)] == ["jln.rms_norm"]
    for got, true in zip(own(x, s, w), wanted(x, s, w), strict=True):
        assert jnp.max(jnp.abs(got - true)) <= 1e-5
