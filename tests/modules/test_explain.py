"""Tests of `jln.explain`."""

import gc
import pickle
import re
import subprocess
import sys

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jln
import jln.equinox
import jln.haiku
import jln.linen
from jln.nnx import LayerNorm, LayerNormLinear

X = jnp.ones((4, 8))


def test_arrays_may_be_shapes_and_nothing_is_computed():
    norm = LayerNorm(8, rngs=nnx.Rngs(0))
    (route,) = jln.explain(norm, jax.ShapeDtypeStruct((10**12, 8), jnp.bfloat16))
    assert str(route) == "jln.nnx.LayerNorm: all arguments are the operator's"
    (route,) = jln.explain(norm, X, mask=jnp.ones((4, 8), bool))
    assert str(route) == "jln.nnx.LayerNorm, not by jln: mask is given"


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


def test_what_is_around_a_call():
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
        assert first[:3] == ("jln.add_layer_norm", "norm", "called as a function")
        assert (second.layer, second.path) == ("jln.rms_norm_linear", "fused")
        assert second.why == f"called as a function; in a jax.checkpoint that keeps {' and '.join(kept)}"


def test_models_are_functions():
    """Models that are trees are traced as arguments; Haiku's and Linen's `apply` has the name scopes of its modules."""
    model = eqx.nn.Sequential([jln.equinox.LayerNorm(8), jln.equinox.RMSNorm(8)])
    routes = jln.explain(jax.vmap(model), X)
    assert (
        [r.layer for r in routes]
        == [r.layer for r in jln.explain(model, X[0])]
        == ["jln.equinox.LayerNorm", "jln.equinox.RMSNorm"]
    )
    of_haiku = hk.without_apply_rng(hk.transform(lambda x: jln.haiku.RMSNormLinear(5, name="pair")(x)))
    (route,) = jln.explain(of_haiku.apply, of_haiku.init(jax.random.key(0), X), X)
    assert (route.layer, route.path, route.scope) == ("jln.haiku.RMSNormLinear", "fused", "pair")
    of_linen = linen.Sequential([jln.linen.LayerNorm(), linen.Dense(8)])
    (route,) = jln.explain(of_linen.apply, of_linen.init(jax.random.key(0), X), X)
    assert (route.layer, route.path, route.scope) == ("jln.linen.LayerNorm", "norm", "Sequential/layers_0")
    with pytest.raises(TypeError, match=r"as a model's apply is; got Transformed"):
        jln.explain(of_haiku, X)


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
        self.calls[...] += 1
        return self.norm(x)


def test_a_model_that_flax_lets_nobody_close_over():
    """Variables that it changes are of another trace. `explain` leaves the model's own state as it is."""
    model = Counted()
    before = jax.tree.map(np.array, nnx.state(model))
    with pytest.raises(Exception, match="trace level"):  # of Flax
        jln.explain(lambda x: model(x), X)
    for routes in (jln.explain(model, X), jln.explain(lambda m, x: m(x), model, X)):
        assert [route.path for route in routes] == ["norm"]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


def norms(x, scales):
    """Two layers alike, a third norm that is left."""
    for i in range(2):
        with jax.named_scope(f"layer_{i}"):
            x = x + jnp.tanh(jax.nn.standardize(x) * scales[i] @ scales)
    return x / jnp.maximum(jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)), 1e-6)


@pytest.mark.usefixtures("promoted_ranks")
def test_an_explanation_prints_itself():
    """A line sums up, equal layers are one line, with the model's line; and what is not fused says what it could be."""
    scales = jnp.ones((8, 8))
    summary, first, second, left = str(jln.explain(jln.fuse(norms), X, scales)).splitlines()
    line = r".*test_explain.py:\d+ \(norms\)"
    assert summary == "2 of 3 norms; 1 with their sum"
    assert re.fullmatch(rf"1 x jln.layer_norm: x, scale; {line}; layer_0", first)
    assert re.fullmatch(rf"1 x jln.add_layer_norm: x, residual, scale; {line}; layer_1", second)
    assert re.fullmatch(rf"1 x norm of float64\[4,8\], not by jln: a maximum in the statistics; {line}", left)
    unfused = jln.explain(norms, X, scales)
    assert unfused.summary == "not fused; jln.fuse takes 2 of 3 norms; 1 with their sum"
    assert [r.path for r in unfused] == ["plain"] * 3
    assert unfused[0].why == "jln.fuse makes it jln.layer_norm of x, scale"
    twice = repr(jln.explain(jln.fuse(lambda x, s: [norms(x, s), norms(jnp.sin(x), s)]), X, scales)).splitlines()
    assert twice[0] == "4 of 6 norms; 2 with their sum" and [line[:3] for line in twice[1:]] == ["2 x"] * 3
    step = jax.grad(lambda x: jnp.sum(norms(x, scales)))
    assert "differentiates inside" in jln.explain(step, X).summary
    assert str(jln.explain(jnp.sin, X)) == "no norm was found"


def test_norms_beside_those_of_jln_are_counted():
    own, flax = LayerNorm(8, rngs=nnx.Rngs(0)), nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    routes = jln.explain(lambda x: own(flax(x)) @ x.T, X)
    assert routes.summary == "1 of 2 norms; jln.fuse takes 1 more"
    assert [r.path for r in routes] == ["plain", "norm"]
    copied = pickle.loads(pickle.dumps(routes))
    assert copied == routes and str(copied) == str(routes)


def test_a_norm_with_derivatives_of_its_own_is_left_and_said_to_be():
    function = jax.custom_jvp(lambda x: jax.nn.standardize(x))
    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0]))
    (route,) = jln.explain(lambda x: function(jax.nn.gelu(x)) @ x.T, X)
    assert (route.path, route.why) == ("plain", "it is in a function with derivatives of its own")


def test_each_norm_has_its_own_line():
    """JAX keeps what it has traced of its own functions, with the lines of their first call."""

    def function(x):
        y = jax.nn.standardize(x) @ x.T
        return y @ jax.nn.standardize(x + 1)

    first, second = (int(route.line.split(":")[1].split()[0]) for route in jln.explain(jln.fuse(function), X))
    assert abs(second - first) == 1


def test_importing_loads_no_framework():
    """The names of modules that load one are there all the same, for a user's tab."""
    code = "import sys, jln; print({'flax', 'haiku', 'equinox', 'triton'} & {*sys.modules}, *dir(jln))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, *names = run.stdout.split()
    assert loaded == "set()" and {"nnx", "linen", "testing", "layer_norm", "__version__"} <= {*names}
    assert [n for n in names if n.startswith("_") or n == "Any"] == ["__version__"]


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
