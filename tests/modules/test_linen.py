"""Behaviour of jln.linen that jln.nnx lacks or does not share; test_flax.py has what both do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import linen as nn

import jln
from jln import linen as ours
from parity import SHAPE, described, normal, randomised


def test_statistics_come_from_the_input_as_it_is():
    """Linen with dtype=bfloat16 rounds the result and not x: numbers of spread 1 around 1024 keep their digits."""
    x = 1024 + normal(0, (4, 64), "float32")
    wide = np.asarray(x, "float64")
    true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    layer = ours.LayerNorm(dtype=jnp.bfloat16)
    y = layer.apply(layer.init(jax.random.key(0), x), x)
    assert y.dtype == jnp.bfloat16
    # one rounding of the result, and one float32 rounding of the mean
    allowed = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(true) + 2 * 1024 * np.finfo("float32").eps
    assert np.all(np.abs(np.asarray(y, "float64") - true) <= allowed)


def test_bfloat16_input_and_float32_parameters_give_float32():
    x = normal(0, SHAPE, "bfloat16")
    y, variables = ours.LayerNorm().init_with_output(jax.random.key(0), x)
    assert y.dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(ours.LayerNorm().apply)(variables, x))
    assert "jln_norm_forward" in jaxpr
    # x itself goes into the operator: no float32 copy of it is made
    assert "convert_element_type" not in jaxpr.split("jln_norm_forward")[0]


def test_parameters_of_another_dtype_than_declared():
    """The result's dtype follows loaded parameters, whose shape Linen checks and whose dtype it does not."""
    x = normal(0, SHAPE, "bfloat16")
    variables = {"params": {"scale": jnp.ones(8, "bfloat16"), "bias": jnp.zeros(8, "bfloat16")}}
    assert ours.LayerNorm().apply(variables, x).dtype == nn.LayerNorm().apply(variables, x).dtype == jnp.bfloat16


def test_dense_of_an_int_has_the_values_of_flaxs_dense():
    x = normal(0, SHAPE, "float32")

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(5, name="dense")(nn.LayerNorm(name="norm")(x))

    theirs, own = (m.init(jax.random.key(3), x) for m in (Plain(), ours.LayerNormDense(5)))
    jax.tree.map(np.testing.assert_array_equal, theirs, own)


@pytest.mark.parametrize("cls", [ours.LayerNormDense, ours.RMSNormDense])
def test_the_layers_of_a_pair_are_called_in_init_alone(cls):
    x = normal(0, (3, 8), "float32")
    module = cls((2, 3))
    calls = []

    def interceptor(call, args, kwargs, context):
        y = call(*args, **kwargs)
        calls.append((context.module.name, context.method_name))
        return y

    with nn.intercept_methods(interceptor):
        variables = module.init(jax.random.key(0), x)
        assert {("norm", "__call__"), ("dense", "__call__"), (None, "__call__")} == set(calls)
        calls.clear()
        y, captured = module.apply(variables, x, capture_intermediates=True)
        assert calls == [(None, "__call__")]
    assert captured == {"intermediates": {"__call__": (y,)}}
    table = module.tabulate(jax.random.key(0), x, console_kwargs={"width": 200})
    assert all(name in table for name in (cls.__name__, "DenseGeneral", "[3,2,3]"))


@pytest.mark.parametrize(
    "params", [{"scale": jnp.ones(5), "bias": jnp.ones(5)}, {"bias": jnp.ones(8)}, {}], ids=described
)
def test_wrong_or_missing_parameters(params):
    with pytest.raises(Exception) as theirs:
        nn.LayerNorm().apply({"params": params}, jnp.ones(SHAPE))
    with pytest.raises(type(theirs.value)):
        ours.LayerNorm().apply({"params": params}, jnp.ones(SHAPE))


@pytest.mark.parametrize(
    "params",
    [{"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}, {"kernel": jnp.ones((8, 5)), "bias": jnp.ones(4)},
     {"kernel": jnp.ones((7, 5)), "bias": jnp.ones(5)}, {"bias": jnp.ones(5)}, {"kernel": jnp.ones((8, 5))}],
    ids=lambda params: " ".join(f"{k}{list(a.shape)}" for k, a in params.items()),
)  # fmt: skip
def test_wrong_or_missing_parameters_of_the_dense(params):
    with pytest.raises(Exception) as theirs:
        nn.DenseGeneral(5).apply({"params": params}, jnp.ones(SHAPE))
    norm = {"scale": jnp.ones(8), "bias": jnp.ones(8)}
    with pytest.raises(type(theirs.value)):
        ours.LayerNormDense(5).apply({"params": {"norm": norm, "dense": params}}, jnp.ones(SHAPE))


def test_automatic_names_metadata_and_lifted_transformations():
    """A model's variables and gradients are Flax's under remat, a scan over layers and partitioning boxes."""
    x = normal(0, (4, 8), "float32")

    class Block(nn.Module):
        library: object

        @nn.compact
        def __call__(self, x, _):
            boxed = nn.with_partitioning(nn.initializers.ones, ("model",))
            x = self.library.LayerNorm(scale_init=boxed)(x)
            return self.library.RMSNorm()(jnp.sin(x)), None

    class Model(nn.Module):
        library: object

        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )  # fmt: skip
            return layers(self.library)(x, None)[0]

    theirs, own = (Model(library).init(jax.random.key(0), x) for library in (nn, ours))
    assert jax.tree.structure(theirs) == jax.tree.structure(own)
    jax.tree.map(np.testing.assert_array_equal, theirs, own)

    def gradients(library):
        return jax.jit(jax.grad(lambda v: jnp.sum(jnp.cos(Model(library).apply(v, x)))))(theirs)

    # six layers in float32; each gradient is the sum of 4 rows
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gradients(ours), gradients(nn))


@pytest.mark.parametrize("cls", [ours.LayerNormDense, ours.RMSNormDense])
def test_pairs_inside_of_lifted_transformations(cls):
    """A pair is fused and right in vmap with parameters of each example, in map_variables and in a shared scope."""
    x = normal(0, (4, 8), "float32")

    class Shared(nn.Module):
        def setup(self):
            self.inner = cls(8)
            nn.share_scope(self, self.inner)

        def __call__(self, x):
            return self.inner(x)

    each = nn.vmap(cls, variable_axes={"params": 0}, split_rngs={"params": True})(8)
    doubled = nn.map_variables(cls, "params", lambda params: jax.tree.map(lambda a: 2 * a, params))(8)
    variables = randomised(cls(8).init(jax.random.key(0), x))
    y = cls(8).apply(variables, x)
    assert jax.tree.structure(Shared().init(jax.random.key(0), x)) == jax.tree.structure(variables)
    np.testing.assert_array_equal(Shared().apply(variables, x), y)
    twice = jax.tree.map(lambda a: 2 * a, variables)
    np.testing.assert_array_equal(doubled.apply(variables, x), cls(8).apply(twice, x))
    own = randomised(each.init(jax.random.key(0), x))
    rows = [cls(8).apply(jax.tree.map(lambda a, i=i: a[i], own), x[i]) for i in range(4)]
    # the tolerance for sums of 8 float32 products
    np.testing.assert_allclose(each.apply(own, x), jnp.stack(rows), rtol=1e-5, atol=1e-5)
    for module, params in ((Shared(), variables), (doubled, variables), (each, own)):
        assert [route.path for route in jln.explain(module.apply, params, x)] == ["fused"]
