"""Tests of `jln.explain`."""

import gc
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jln


def test_arrays_may_be_shapes_and_nothing_is_computed():
    nnx = pytest.importorskip("flax.nnx")
    from jln.nnx import LayerNorm

    norm = LayerNorm(8, rngs=nnx.Rngs(0))
    (route,) = jln.explain(norm, jax.ShapeDtypeStruct((10**12, 8), jnp.bfloat16))
    assert str(route) == "jln.nnx.LayerNorm: norm (all arguments are the operator's)"
    (route,) = jln.explain(norm, jnp.ones((4, 8)), mask=jnp.ones((4, 8), bool))
    assert str(route) == "jln.nnx.LayerNorm: plain (mask is given)"


def test_a_function_without_layers_and_one_with_static_arguments():
    assert jln.explain(lambda x, flag: x if flag else None, jnp.ones(3), flag=True) == ()


def test_what_jax_has_traced_before_is_listed_again():
    nnx = pytest.importorskip("flax.nnx")
    from jln.nnx import LayerNorm

    norm = LayerNorm(8, rngs=nnx.Rngs(0))
    function = jax.jit(lambda x: norm(x))
    function(jnp.ones((4, 8)))
    for _ in range(2):
        assert [route.path for route in jln.explain(function, jnp.ones((4, 8)))] == ["norm"]


def network():
    """Return a function with layers under jit, checkpoint and scan, and with functions of jnp that JAX jits too."""
    nnx = pytest.importorskip("flax.nnx")
    from jln.nnx import LayerNorm, LayerNormLinear

    norm, pair = LayerNorm(8, rngs=nnx.Rngs(0)), LayerNormLinear(8, 8, rngs=nnx.Rngs(0))
    jitted = jax.jit(lambda x: norm(x))

    def function(x):
        x = jitted(jax.checkpoint(lambda x: jax.nn.gelu(norm(x)))(jitted(x)))
        return jax.lax.scan(lambda x, _: (jax.nn.softmax(pair(x)), None), x, length=3)[0]

    return function


def test_each_call_is_listed_in_its_place_and_the_body_of_a_loop_once():
    function, x = network(), jnp.ones((4, 8))
    paths = ["norm", "norm", "norm", "fused"]
    for _ in range(2):
        assert [route.path for route in jln.explain(function, x)] == paths
        assert [route.path for route in jln.explain(jax.grad(lambda x: function(x)[0, 0]), x)] == paths
        assert [route.path for route in jln.explain(jax.vmap(jax.jit(function)), x[None])] == paths


def test_where_a_layer_is_and_what_is_around_it():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.List([jln.nnx.RMSNorm(8, rngs=nnx.Rngs(0))])[0], nnx.Dict(norm=1) and jnp.sin)
    x = jnp.ones((4, 8))
    assert [r.layer for r in jln.explain(model, x)] == ["jln.nnx.RMSNorm layers.0"]

    def function(x, policy):
        inner = jax.checkpoint(lambda x: jln.rms_norm_linear(x, None, jnp.ones((8, 3))), policy=policy)
        return inner(jln.add_layer_norm(x, x)[0])

    saved, ours = jax.checkpoint_policies, jln.checkpoint_policies
    products, one, statistics = "products", "products of one kernel", "row statistics"
    for policy, kept in (
        (None, ["nothing of it"]),
        (saved.everything_saveable, [products, one, statistics]),
        (saved.dots_with_no_batch_dims_saveable, [products]),
        (saved.save_only_these_names(jln.STATISTICS), [statistics]),
        (saved.save_any_names_but_these(jln.PRODUCT), [statistics]),
        (saved.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=[jln.PRODUCT], offload_src="device",
            offload_dst="pinned_host"), [one]),
        (ours.dots_saveable, [products, one]),
    ):  # fmt: skip
        first, second = jln.explain(lambda x, policy=policy: function(x, policy), x)
        assert str(first) == "jln.add_layer_norm: norm (called as a function)"
        assert (second.layer, second.path) == ("jln.rms_norm_linear", "fused")
        assert second.why == f"called as a function; in a jax.checkpoint that keeps {' and '.join(kept)}"


def test_an_operator_that_a_module_calls_is_listed_as_the_module():
    nnx = pytest.importorskip("flax.nnx")
    norm, x = jln.nnx.RMSNorm(8, rngs=nnx.Rngs(0)), jnp.ones((4, 8))
    (route,) = jln.explain(lambda x: norm(x, residual=x), x)
    assert route.layer == "jln.nnx.RMSNorm"


def test_equinox_layers_have_their_places():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Sequential([jln.equinox.LayerNorm(8), jln.equinox.RMSNorm(8)])
    x = jnp.ones(8)
    for question, of in ((model, x), (jax.vmap(model), x[None])):
        assert [r.layer.partition(" ")[2] for r in jln.explain(question, of)] == [".layers[0]", ".layers[1]"]
    routes = jln.explain(lambda model, x: model(x), model, x)
    assert [r.layer.partition(" ")[2] for r in routes] == [".layers[0]", ".layers[1]"]


def test_a_loop_whose_turns_nobody_knows_is_a_loop():
    (route,) = jln.explain(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jln.rms_norm(x, None), x), jnp.ones(8), 3)
    assert route.why == "called as a function; in a loop of 3"
    unknown = jnp.asarray(3)
    (route,) = jln.explain(
        lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jln.rms_norm(x, None), x), jnp.ones(8), unknown
    )
    assert route.why == "called as a function; in a loop"


def test_a_branch_and_a_shard_of_it_are_listed():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    function = jax.shard_map(network(), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    routes = jln.explain(lambda x: jax.lax.cond(x[0, 0] > 0, function, jnp.sin, x), jnp.ones((4, 8)))
    assert [route.path for route in routes] == ["norm", "norm", "norm", "fused"]
    assert all("; in a jax.shard_map over d" in route.why for route in routes)


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


def scanned_and_counted():
    nnx = pytest.importorskip("flax.nnx")
    from jln.nnx import LayerNorm

    class Scanned(nnx.Module):
        def __init__(self):
            self.norms = nnx.vmap(lambda rngs: LayerNorm(8, rngs=rngs))(nnx.Rngs(0).split(3))

        def __call__(self, x):
            return nnx.scan(lambda x, norm: norm(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.norms)

    class Counted(nnx.Module):
        def __init__(self):
            self.norm, self.calls = LayerNorm(8, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            return self.norm(x)

    return {"nnx.scan": Scanned, "a variable that is changed": Counted}


@pytest.mark.parametrize("what", ["nnx.scan", "a variable that is changed"])
def test_a_model_that_flax_lets_nobody_close_over(what):
    model, x = scanned_and_counted()[what](), jnp.ones((4, 8))
    with pytest.raises(Exception, match="trace level"):  # of Flax
        jln.explain(lambda x: model(x), x)
    for routes in (jln.explain(model, x), jln.explain(model.__call__, x), jln.explain(lambda m, x: m(x), model, x)):
        assert [route.path for route in routes] == ["norm"]


def test_what_the_call_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        jln.explain(lambda x: 1 // 0, jnp.ones(3))


def test_explain_of_nnx_inside_of_linen():
    """An NNX module in a bridge to Linen is explained even where nobody has imported jln.linen."""
    pytest.importorskip("flax")
    code = """
import jax.numpy as jnp, jln, jln.nnx
from flax import nnx
print(*jln.explain(nnx.bridge.to_linen(jln.nnx.RMSNormLinear, 8, 3), jnp.ones((2, 8))))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("jln.nnx.RMSNormLinear: fused")


@pytest.mark.parametrize(
    ("framework", "model"),
    [
        ("flax.linen", "type('Model', (framework.Module,), {'__call__': framework.compact(call)})()"),
        ("haiku", "framework.transform(lambda x: jln.rms_norm(x))"),
        ("haiku", "framework.without_apply_rng(framework.transform_with_state(lambda x: jln.haiku.RMSNorm(-1)(x)))"),
    ],
)
def test_models_are_explained_where_nobody_has_imported_their_module_of_jln(framework, model):
    pytest.importorskip(framework)
    code = f"""
import importlib, jax.numpy as jnp, jln
framework = importlib.import_module({framework!r})
call = lambda self, x: jln.rms_norm(x)
print(*jln.explain({model}, jnp.ones((2, 8))))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "norm" in run.stdout and len(run.stdout.splitlines()) == 1


def test_import_loads_no_framework():
    code = "import sys, jln; print({'flax', 'haiku', 'equinox', 'triton'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'pytorch'"):
        jln.pytorch  # noqa: B018
