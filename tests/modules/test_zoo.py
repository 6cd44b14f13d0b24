"""Models in the shape of those that people train, converted by one call each.

They have the original's numbers in float64 and its parameters, and the lines of `explain` are true of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

import jln

nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
pytest.importorskip("haiku")

from zoo import CLIENTS, SMALL, functions, held  # noqa: E402

pytestmark = pytest.mark.usefixtures("promoted_ranks")
each_client = pytest.mark.parametrize("name", CLIENTS)

# All is in float64 but for JAX's attention, whose softmax is in float32 and rounds the same numbers alike. TOLERANCE is
# a part of an array's largest element, less than float32's rounding. ROUNDING is a part of the largest element of all
# arrays. Where an exact gradient is zero, as that of the keys' bias in front of a softmax, roundings are left.
TOLERANCE, ROUNDING = 1e-10, 1e-13


@functools.cache
def of(name):
    return functions(CLIENTS[name], SMALL)


def drawn(tree):
    """Return random parameters, none of which is at its initial value, so that a scale left out is seen."""
    r = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray(0.3 * r.normal(size=a.shape), a.dtype), tree)


def same(own, wanted):
    greatest = max(np.abs(a).max() for a in jax.tree.leaves(wanted))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(own), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        difference, largest = np.abs(a - b).max(), np.abs(b).max()
        assert largest > 0, f"{path}: a gradient of zeros tells nothing"
        assert difference <= TOLERANCE * largest + ROUNDING * greatest, f"{path}: {difference / largest:.1e}"


@each_client
def test_outputs_and_gradients_are_the_originals(name):
    client = of(name)
    parameters, x = drawn((client.parameters, client.x))
    weight = drawn(jax.eval_shape(client.plain, parameters, x))

    def gradients(f):
        def loss(parameters, x):
            y = f(parameters, x)
            return jnp.sum(weight * y), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(parameters, x)

    same(gradients(client.converted), gradients(client.plain))


@each_client
def test_a_converted_model_makes_and_reads_the_originals_parameters(name):
    client = of(name)

    def described(tree):
        return [(jax.tree_util.keystr(path), a.shape, a.dtype) for path, a in jax.tree.leaves_with_path(tree)]

    assert described(client.parameters) == described(client.converted_parameters)


def programs(jaxpr):
    """Yield a jaxpr and all jaxprs within it."""
    yield jaxpr
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda a: hasattr(a, "eqns")):
            if hasattr(value, "eqns"):
                yield from programs(getattr(value, "jaxpr", value))


@each_client
def test_every_norm_and_every_linear_behind_one_is_found_and_explained(name):
    """The lines of `explain` are as many as the program's operators; an operator in a scan's body counts once."""
    client, model = of(name), CLIENTS[name]
    paths = [route.path for route in jln.explain(client.converted, client.parameters, client.x)]
    expected = {"norm": model.norms(SMALL.layers), "fused": model.fused(SMALL.layers), "plain": 0}
    assert {path: paths.count(path) for path in expected} == expected
    traced = jax.make_jaxpr(client.converted)(client.parameters, client.x).jaxpr
    program, _ = partial_eval.dce_jaxpr(traced, [True])  # without the calls that only made parameters
    equations = [e for p in programs(program) for e in p.eqns]
    assert sum(e.primitive.name == "jln_norm_forward" for e in equations) == expected["norm"]
    operators = [e.params["call_jaxpr"].eqns for e in equations if e.primitive.name == "custom_jvp_call"]
    products = [any(e.primitive.name == "dot_general" for e in inner) for inner in operators]
    assert sum(products) == expected["fused"]


@each_client
def test_less_is_kept_between_forward_and_backward(name):
    """A converted model keeps fewer bytes between forward and backward, and with fused Linears fewer still.

    Models have the size for compiling, and XLA's attention, which keeps its weights in all of them alike.
    """
    client = CLIENTS[name]
    size = client.large._replace(attention="xla")
    fused, norms = (functions(client, size, fuse=fuse) for fuse in (True, False))
    kept = [held(f, fused.parameters, fused.x) for f in (fused.plain, norms.converted, fused.converted)]
    assert kept[1] < kept[0] and kept[2] < kept[0]
    if client.fused(size.layers) and client.framework != "equinox":  # it keeps kernels transposed
        assert kept[2] < kept[1]


@pytest.mark.parametrize("name", [name for name, client in CLIENTS.items() if client.framework == "nnx"])
def test_an_nnx_model_is_converted_in_place_and_back(name):
    client = CLIENTS[name]
    model = client.model(SMALL)
    before = [type(module) for _, module in nnx.iter_modules(model)]
    loaded = jax.tree.map(lambda a: a + 1, nnx.state(model))
    conversion = jln.convert.nnx(model, fuse=True, norms=client.recipes)
    assert len(conversion.changes) >= client.norms(SMALL.layers)
    nnx.update(model, loaded)  # as if from a checkpoint of the original
    assert conversion.undo() is model
    assert [type(module) for _, module in nnx.iter_modules(model)] == before
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), loaded)


def test_an_equinox_model_is_converted_and_back():
    model = CLIENTS["Parallel block"].model(SMALL)
    conversion = jln.convert.equinox(model, fuse=True)
    loaded = jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, conversion.model)
    wanted = jax.tree.map(lambda a: a + 1 if eqx.is_array(a) else a, model)
    assert not eqx.tree_equal(loaded, wanted)  # their classes differ
    assert eqx.tree_equal(conversion.undo(loaded), wanted)


def test_a_recipe_goes_before_the_call_that_a_subclass_ends_in():
    """A recipe takes precedence over the framework's call that a subclass ends in.

    That call may read an array of another dtype, as AlphaFold's does.
    """
    name = "AlphaFold's, with a recipe"
    client = of(name)
    (route,) = jln.explain(client.converted, client.parameters, client.x)
    assert route.layer == "zoo.haiku_models.LayerNorm transition/input_layer_norm"

    class Half(nnx.RMSNorm):
        def __call__(self, x):
            return super().__call__(x.astype("float32")).astype(x.dtype)

    model = nnx.Sequential(Half(8, rngs=nnx.Rngs(0)))
    recipe = {Half: lambda m: {"kind": "rms_norm", "scale": m.scale, "epsilon": m.epsilon}}
    (change,) = jln.convert.nnx(model, norms=recipe).changes
    assert change.after == "jln" and "recipe" in change.why
    assert [route.path for route in jln.explain(model, jnp.ones((2, 8), "bfloat16"))] == ["norm"]
