"""Tests of `jln.explain`."""

import gc
import subprocess
import sys

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jln
import jln.equinox
from jln.nnx import LayerNorm, LayerNormLinear

X = jnp.ones((4, 8))


def test_arrays_may_be_shapes_and_nothing_is_computed():
    norm = LayerNorm(8, rngs=nnx.Rngs(0))
    (route,) = jln.explain(norm, jax.ShapeDtypeStruct((10**12, 8), jnp.bfloat16))
    assert str(route) == "jln.nnx.LayerNorm: norm (all arguments are the operator's)"
    (route,) = jln.explain(norm, X, mask=jnp.ones((4, 8), bool))
    assert str(route) == "jln.nnx.LayerNorm: plain (mask is given)"


def test_functions_without_layers_with_static_arguments_and_those_that_raise():
    assert jln.explain(lambda x, flag: x if flag else None, X, flag=True) == ()
    with pytest.raises(ZeroDivisionError):
        jln.explain(lambda x: 1 // 0, X)


def network():
    """Return a function with layers under jit, checkpoint and scan, and with functions of jnp that JAX jits too."""
    norm, pair = LayerNorm(8, rngs=nnx.Rngs(0)), LayerNormLinear(8, 8, rngs=nnx.Rngs(0))
    jitted = jax.jit(lambda x: norm(x))

    def function(x):
        x = jitted(jax.checkpoint(lambda x: jax.nn.gelu(norm(x)))(jitted(x)))
        return jax.lax.scan(lambda x, _: (jax.nn.softmax(pair(x)), None), x, length=3)[0]

    return function


def test_each_call_is_listed_in_its_place_and_the_body_of_a_loop_once():
    """JAX's trace of before is listed alike."""
    function, paths = network(), ["norm", "norm", "norm", "fused"]
    jax.jit(function).lower(X)
    for _ in range(2):
        assert [route.path for route in jln.explain(function, X)] == paths
        assert [route.path for route in jln.explain(jax.grad(lambda x: function(x)[0, 0]), X)] == paths
        assert [route.path for route in jln.explain(jax.vmap(jax.jit(function)), X[None])] == paths


def test_where_a_layer_is_and_what_is_around_it():
    model = nnx.Sequential(nnx.List([jln.nnx.RMSNorm(8, rngs=nnx.Rngs(0))])[0], nnx.Dict(norm=1) and jnp.sin)
    assert [r.layer for r in jln.explain(model, X)] == ["jln.nnx.RMSNorm layers.0"]

    def function(x, policy):
        inner = jax.checkpoint(lambda x: jln.rms_norm_linear(x, None, jnp.ones((8, 3))), policy=policy)
        return inner(jln.add_layer_norm(x, x)[0])

    saved, ours = jax.checkpoint_policies, jln.checkpoint_policies
    products, one, statistics = "products", "products of one kernel", "row statistics"
    offload = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": [jln.STATISTICS]}
    offload |= {"offload_src": "device", "offload_dst": "pinned_host"}
    for policy, kept in (
        (None, ["nothing of it"]),
        (saved.everything_saveable, [products, one, statistics]),
        (saved.dots_with_no_batch_dims_saveable, [products]),
        (saved.save_only_these_names(jln.STATISTICS), [statistics]),
        (saved.save_any_names_but_these(jln.PRODUCT), [statistics]),
        (saved.save_and_offload_only_these_names(**offload), [statistics]),
        (ours.dots_saveable, [products, one]),
    ):  # fmt: skip
        first, second = jln.explain(lambda x, policy=policy: function(x, policy), X)
        assert str(first) == "jln.add_layer_norm: norm (called as a function)"
        assert (second.layer, second.path) == ("jln.rms_norm_linear", "fused")
        assert second.why == f"called as a function; in a jax.checkpoint that keeps {' and '.join(kept)}"


def test_equinox_layers_have_their_places():
    model = eqx.nn.Sequential([jln.equinox.LayerNorm(8), jln.equinox.RMSNorm(8)])
    for routes in (
        jln.explain(model, X[0]),
        jln.explain(jax.vmap(model), X),
        jln.explain(lambda model, x: model(x), model, X[0]),
    ):
        assert [r.layer.partition(" ")[2] for r in routes] == [".layers[0]", ".layers[1]"]


def test_transforms_of_haiku():
    call = lambda x: jln.haiku.RMSNormLinear(5, name="pair")(x)  # noqa: E731
    for model in (hk.transform(call), hk.without_apply_rng(hk.transform_with_state(call))):
        assert [(r.layer, r.path) for r in jln.explain(model, X)] == [("jln.haiku.RMSNormLinear pair", "fused")]


def test_loops_branches_and_shards():
    for turns, where in ((3, "in a loop of 3"), (jnp.asarray(3), "in a loop")):
        (route,) = jln.explain(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jln.rms_norm(x, None), x), X, turns)
        assert route.why == f"called as a function; {where}"
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(network(), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    routes = jln.explain(lambda x: jax.lax.cond(x[0, 0] > 0, function, jnp.sin, x), X)
    assert [route.path for route in routes] == ["norm", "norm", "norm", "fused"]
    assert all("; in a jax.shard_map over d" in route.why for route in routes)


class Counted(nnx.Module):
    def __init__(self):
        self.norm, self.calls = LayerNorm(8, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        self.calls[...] += 1
        return self.norm(x)


def test_a_model_that_flax_lets_nobody_close_over():
    """Variables that it changes are of another trace. `explain` leaves the model's own state as it is."""
    model = Counted()
    before = jax.tree.map(np.array, nnx.state(model))
    with pytest.raises(Exception, match="trace level"):  # of Flax
        jln.explain(lambda x: model(x), X)
    for routes in (jln.explain(model, X), jln.explain(model.encode, X), jln.explain(lambda m, x: m(x), model, X)):
        assert [route.path for route in routes] == ["norm"]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


def test_models_are_explained_where_nobody_has_imported_their_module_of_jln():
    """`import jln` loads no framework."""
    code = """
import sys, jax.numpy as jnp, jln
print({'flax', 'haiku', 'equinox', 'triton'} & set(sys.modules))
import haiku, flax.nnx, jln.nnx
x = jnp.ones((2, 8))
print(*jln.explain(haiku.transform(lambda x: jln.rms_norm(x)), x))
print(*jln.explain(flax.nnx.bridge.to_linen(jln.nnx.RMSNormLinear, 8, 3), x))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    of_import, of_haiku, of_linen = run.stdout.splitlines()
    assert of_import == "set()"
    assert of_haiku.startswith("jln.rms_norm: norm") and of_linen.startswith("jln.nnx.RMSNormLinear: fused")


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'pytorch'"):
        jln.pytorch  # noqa: B018


def test_questions_keep_nothing():
    """Calls of `explain` keep no objects, though JAX keeps what it has traced for as long as the process lives."""
    function, x = network(), jax.ShapeDtypeStruct((4, 8), jnp.float32)

    def held_after(questions):
        for _ in range(questions):
            jln.explain(function, x)
        gc.collect()
        return len(gc.get_objects())

    before = held_after(3)
    assert held_after(30) - before < 30  # fewer than one object for each call
