"""Behaviour of jln.nnx that jln.linen lacks or does not share; test_flax.py has what both do."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("flax")
from flax import nnx

import jln
from jln import nnx as ours
from parity import MASK, SHAPE, normal


def test_statistics_come_from_the_input_as_it_is():
    """Flax rounds x to dtype=bfloat16 first, of which few values are left around 1024; here the result is rounded."""
    x = 1024 + normal(0, (4, 64), "float32")
    wide = np.asarray(x, "float64")
    true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    error = {}
    for cls in (nnx.LayerNorm, ours.LayerNorm):
        y = cls(64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(x)
        assert y.dtype == jnp.bfloat16
        error[cls] = np.abs(np.asarray(y, "float64") - true)
    assert error[nnx.LayerNorm].max() > 0.1
    # one rounding of the result, and one float32 rounding of the mean
    allowed = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(true) + 2 * 1024 * np.finfo("float32").eps
    assert np.all(error[ours.LayerNorm] <= allowed)


def test_fast_variance_is_not_copied():
    """Flax's E[x^2] - E[x]^2 loses all digits where the mean is 3000 times the spread, and our variance does not."""
    x = 3000 + normal(0, (4, 256), "float32")
    wide = np.asarray(x, "float64")
    true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    error = {c: np.max(np.abs(np.asarray(c(256, rngs=nnx.Rngs(0))(x)) - true)) for c in (nnx.LayerNorm, ours.LayerNorm)}
    assert error[nnx.LayerNorm] > 0.1
    # one float32 rounding of the mean of numbers around 3000, whose spread is 1
    assert error[ours.LayerNorm] <= 2 * 3000 * np.finfo("float32").eps


def test_metadata_is_flaxs():
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        made = [
            c.LayerNorm(8, rngs=nnx.Rngs(0), scale_metadata={"out_sharding": ("model",)}, bias_metadata={"mine": 1})
            for c in (nnx, ours)
        ]
    for parameter in ("scale", "bias"):
        theirs, own = (getattr(m, parameter).get_metadata() for m in made)
        assert theirs == own


def numbers(model):
    """Return copies of all arrays in a model's state except its random keys."""
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
    return [np.array(a) for a in leaves if not jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)]


@pytest.mark.parametrize("make", [lambda r: nnx.Dropout(0.5, rngs=r), lambda r: nnx.BatchNorm(8, rngs=r)])
def test_explain_of_a_model_with_state(make):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.norm = ours.LayerNorm(8, rngs=rngs)
            self.stateful = make(rngs)

        def __call__(self, x):
            return self.encode(x)

        def encode(self, x):
            return self.stateful(self.norm(x))

    model = Model(nnx.Rngs(0))
    before = numbers(model)
    x = jnp.ones((2, 8), "float32")
    for function in (model, model.__call__, model.encode):
        assert [route.path for route in jln.explain(function, x)] == ["norm"]
    jax.tree.map(np.testing.assert_array_equal, numbers(model), before)
    assert model(x).shape == x.shape


def test_put_in_place_of_flaxs(monkeypatch):
    """Setting `nnx.LayerNorm = jln.nnx.LayerNorm` converts a library that cannot be edited.

    With a mask the numbers are still those of Flax's own code.
    """
    x = normal(0, SHAPE, "float32")
    wanted = nnx.LayerNorm(8, rngs=nnx.Rngs(0))(x, mask=MASK)
    monkeypatch.setattr(nnx, "LayerNorm", ours.LayerNorm)
    norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(norm(x, mask=MASK), wanted)
    assert [r.path for r in jln.explain(norm, x)] == ["norm"]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("epsilon", [1e308, ml_dtypes.bfloat16(0.25)], ids=str)
def test_an_epsilon_that_few_would_give(epsilon):
    """An epsilon too large for float32, or of ml_dtypes, is left to Flax's own code."""
    x = normal(0, (2, 8), "float32")
    own, theirs = (cls(8, epsilon=epsilon, rngs=nnx.Rngs(0)) for cls in (ours.LayerNorm, nnx.LayerNorm))
    np.testing.assert_allclose(own(x), theirs(x), rtol=1e-5, atol=1e-6)
    (route,) = jln.explain(own, x)
    assert route.path == "plain"


def test_inside_of_transformations():
    """A norm works like any NNX module inside of nnx.jit, nnx.remat, nnx.value_and_grad and nnx.scan over layers."""
    x = normal(0, (4, 8), "float32")

    def model(cls):
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            return cls(8, rngs=rngs)

        layers = create(nnx.Rngs(0).split(3))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return jnp.sin(nnx.remat(lambda layer, x: layer(x))(layer, x))

        return nnx.jit(nnx.value_and_grad(lambda layers: jnp.sum(run(layers, x) ** 2)))(layers)

    (theirs, their_gradients), (own, own_gradients) = model(nnx.LayerNorm), model(ours.LayerNorm)
    np.testing.assert_allclose(own, theirs, rtol=1e-5)
    a, b = (nnx.to_pure_dict(g) for g in (own_gradients, their_gradients))
    # three layers in float32; each gradient is the sum of 4 rows
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)


class Doubled(ours.LayerNorm):
    def __call__(self, x, **options):
        return 2 * super().__call__(x, **options)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("linear", lambda rngs: nnx.LoRALinear(8, 3, lora_rank=2, b_initializer=nnx.initializers.ones, rngs=rngs)),
        ("linear", lambda rngs: nnx.Einsum("...d,dn->...n", (8, 3), (3,), rngs=rngs)),
        ("norm", lambda rngs: Doubled(8, rngs=rngs)),
    ],
    ids=["LoRALinear", "Einsum", "a norm"],
)
def test_a_layer_that_takes_the_place_of_another_is_called(name, make):
    pair, x = ours.LayerNormLinear(8, 3, rngs=nnx.Rngs(0)), normal(0, SHAPE, "float32")
    setattr(pair, name, make(nnx.Rngs(1)))
    np.testing.assert_array_equal(pair(x), pair.linear(pair.norm(x)))
    assert jln.explain(pair, x)[0].why == "a layer has been replaced"


def double(*args, **kwargs):
    return 2 * jax.lax.dot_general(*args, **kwargs)


def promote_doubled(arrays, dtype):
    return tuple(None if a is None else 2 * jnp.asarray(a, dtype) for a in arrays)


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: nnx.Linear(8, 3, dot_general=double, rngs=rngs),
        lambda rngs: nnx.Linear(8, 3, promote_dtype=promote_doubled, rngs=rngs),
        lambda rngs: nnx.Linear(8, 3, preferred_element_type=jnp.bfloat16, rngs=rngs),
        lambda rngs: nnx.Linear(8, 3, dtype=jnp.bfloat16, rngs=rngs),
        lambda rngs: nnx.Linear(8, 3, precision="highest", rngs=rngs),
        lambda rngs: nnx.LinearGeneral(8, 3, axis=-2, rngs=rngs),
        lambda rngs: nnx.LinearGeneral(8, 3, dot_general_cls=lambda: double, rngs=rngs),
    ],
    ids=["dot_general", "promote_dtype", "preferred_element_type", "dtype", "precision", "axis", "dot_general_cls"],
)
def test_a_linear_with_settings_of_its_own_is_called(make):
    """Be it the second of two, whose product has settings that the first has not."""
    pair, x = ours.LayerNormLinear(8, {"a": 5, "b": 3}, rngs=nnx.Rngs(0)), normal(0, (4, 8, 8), "float32")
    assert jln.explain(pair, x)[0].path == "fused"
    pair.b = make(nnx.Rngs(1))
    z = pair.norm(x)
    for own, theirs in zip(pair(x), (pair.a(z), pair.b(z)), strict=True):
        assert own.dtype == theirs.dtype
        np.testing.assert_array_equal(own, theirs)
    assert "other settings" in jln.explain(pair, x)[0].why
