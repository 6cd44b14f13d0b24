"""Tests of what one framework has and the others do not, or do otherwise."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jln
from frameworks import norms
from parity import SHAPE, normal

HALF = {dtype: float(jnp.finfo(dtype).eps) / 2 for dtype in ("bfloat16", "float32")}
X_AT_1024 = 1024 + normal(0, (4, 64), "float32")
IN_BFLOAT16 = {"dtype": "bfloat16"}, 2 * HALF["bfloat16"], 4096 * HALF["float32"]


@pytest.mark.parametrize(
    ("framework", "lost", "x", "options", "relative", "absolute"),
    [
        # A rounding of the result, and one in float32 of the mean. Flax NNX rounds x, of which few values are left.
        ("nnx", 0.1, X_AT_1024, *IN_BFLOAT16),
        ("linen", 0, X_AT_1024, *IN_BFLOAT16),
        # Flax's E[x^2] - E[x]^2 loses all digits where the mean is 3000 times the spread.
        ("nnx", 0.1, 3000 + normal(0, (4, 256), "float32"), {}, 0, 12000 * HALF["float32"]),
    ],
    ids=["nnx", "linen", "fast_variance"],
)
def test_a_result_is_rounded_once(framework, lost, x, options, relative, absolute):
    """Test parameters: lost is what the framework's own layer is off by, at least."""
    layers = norms(framework, size=x.shape[-1], **options)
    theirs, ours = (np.asarray(layer.apply(layer.init(x), x), "float64") for layer in layers)
    wide = np.asarray(x, "float64")
    true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    assert np.all(np.abs(ours - true) <= relative * np.abs(true) + absolute)
    assert np.abs(theirs - true).max() >= lost


def test_linens_parameters_decide_the_dtype_of_the_result():
    """Linen checks the shape of loaded parameters alone. No float32 copy is made of a bfloat16 x."""
    x, (theirs, ours) = normal(0, SHAPE, "bfloat16"), norms("linen")
    wide = {"params": {"scale": jnp.ones(8, "float32"), "bias": jnp.zeros(8, "float32")}}
    for variables in (wide, jax.tree.map(lambda a: a.astype("bfloat16"), wide)):
        assert ours.apply(variables, x).dtype == theirs.apply(variables, x).dtype == variables["params"]["scale"].dtype
    first, operator, _ = str(jax.make_jaxpr(ours.apply)(wide, x)).partition("jln_norm_forward")
    assert operator and "convert_element_type" not in first


PARAMETERS = {"scale": jnp.ones(8), "bias": jnp.ones(8)}
WRONG = [{"scale": jnp.ones(5), "bias": jnp.ones(5)}, {"bias": jnp.ones(8)}, {}]
WRONG_OF_DENSE = [
    {"kernel": jnp.ones((8, 5)), "bias": jnp.ones(4)},
    {"bias": jnp.ones(5)},
    {"kernel": jnp.ones((8, 5))},
]


@pytest.mark.parametrize(
    ("theirs", "ours", "params", "own_params"),
    [
        *((linen.LayerNorm(), jln.linen.LayerNorm(), p, p) for p in WRONG),
        *((linen.Dense(5), jln.linen.LayerNormDense(5), p, {"norm": PARAMETERS, "dense": p}) for p in WRONG_OF_DENSE),
    ],
)
def test_wrong_or_missing_parameters_are_linens_errors(theirs, ours, params, own_params):
    with pytest.raises(Exception) as error:
        theirs.apply({"params": params}, jnp.ones(SHAPE))
    with pytest.raises(type(error.value)):
        ours.apply({"params": own_params}, jnp.ones(SHAPE))


class Doubled(jln.nnx.LayerNorm):
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
    pair, x = jln.nnx.LayerNormLinear(8, 3, rngs=nnx.Rngs(0)), normal(0, SHAPE, "float32")
    setattr(pair, name, make(nnx.Rngs(1)))
    np.testing.assert_array_equal(pair(x), pair.linear(pair.norm(x)))
    assert jln.explain(pair, x)[0].why == "a layer has been replaced"


def double(*args, **kwargs):
    return 2 * jax.lax.dot_general(*args, **kwargs)


def promote_doubled(arrays, dtype):
    return tuple(None if a is None else 2 * jnp.asarray(a, dtype) for a in arrays)


@pytest.mark.parametrize(
    "settings",
    [
        {"dot_general": double},
        {"promote_dtype": promote_doubled},
        {"preferred_element_type": jnp.bfloat16},
        {"dtype": jnp.bfloat16},
        {"precision": "highest"},
        {"axis": -2},
        {"dot_general_cls": lambda: double},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_linear_with_settings_of_its_own_is_called(settings):
    """Be it the second of two, whose product has settings that the first has not."""
    pair, x = jln.nnx.LayerNormLinear(8, {"a": 5, "b": 3}, rngs=nnx.Rngs(0)), normal(0, (4, 8, 8), "float32")
    assert jln.explain(pair, x)[0].path == "fused"
    cls = nnx.LinearGeneral if {*settings} & {"axis", "dot_general_cls"} else nnx.Linear
    pair.b = cls(8, 3, **settings, rngs=nnx.Rngs(1))
    z = pair.norm(x)
    for own, theirs in zip(pair(x), (pair.a(z), pair.b(z)), strict=True):
        np.testing.assert_array_equal(own, theirs, strict=True)
    assert "other settings" in jln.explain(pair, x)[0].why


def test_scale_and_offset_of_a_call_are_haikus():
    x, a = normal(0, SHAPE, "float32"), normal(1, (4, 1), "float32")
    theirs, ours = (functools.partial(layer.apply, {}) for layer in norms("haiku", use_scale=False, use_offset=False))
    (route,) = jln.explain(ours, x, scale=a, offset=2 * a)
    assert (route.path, route.why) == ("plain", "scale or offset is given: jln.layer_norm takes them")
    np.testing.assert_array_equal(ours(x, scale=a, offset=2 * a), theirs(x, scale=a, offset=2 * a))


def test_haikus_modules_of_a_pair_are_read_through_getters():
    """Getters see the modules' own parameters."""
    x, read = normal(0, (3, 8), "float32"), []
    module = hk.without_apply_rng(hk.transform(lambda x: jln.haiku.LayerNormLinear(5)(x)))
    params = module.init(jax.random.key(0), x)

    def getter(call, value, context):
        read.append(context.full_name)
        return call(2 * value)

    def observed(x):
        with hk.custom_getter(getter):
            return jln.haiku.LayerNormLinear(5)(x)

    y = hk.transform(observed).apply(params, None, x)
    np.testing.assert_array_equal(y, module.apply(jax.tree.map(lambda a: 2 * a, params), x))
    assert sorted(read) == sorted(f"{module}/{a}" for module, inner in params.items() for a in inner)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_state_key_and_weights_of_numpy_are_equinoxs(name):
    """A norm hands `state` through and ignores `key`."""
    x, norm = normal(0, (8,), "float32"), getattr(jln.equinox, name)(8, dtype="float32")
    y, total = norm(x, residual=x)
    for given, wanted in (({}, norm(x)), ({"residual": x}, (y, total))):
        got, state = norm(x, "a state", key=jax.random.key(0), **given)
        assert state == "a state" and norm(x, state=None, **given)[1] is None
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
    in_numpy = jax.tree.map(np.asarray, norm)
    np.testing.assert_array_equal(in_numpy(x), norm(x))
    assert [route.path for route in jln.explain(in_numpy, x)] == ["norm"]


def test_leaves_that_are_no_arrays_or_missing_are_equinoxs_errors():
    for change in (
        lambda norm: eqx.tree_at(lambda norm: norm.weight, norm, 2.0),
        lambda norm: eqx.tree_at(lambda norm: norm.bias, norm, None),
        lambda norm: eqx.partition(norm, eqx.is_array)[1],
    ):
        with pytest.raises(Exception) as theirs:
            change(eqx.nn.LayerNorm(8))(jnp.ones(8))
        with pytest.raises(type(theirs.value)):
            change(jln.equinox.LayerNorm(8))(jnp.ones(8))


def test_forward_mode_and_equinoxs_transformations():
    """Inside of nested vmap, filter_jit, filter_checkpoint and a scan over stacked layers derivatives are Equinox's."""
    x, v = normal(0, (2, 3, 8), "float32"), normal(1, (2, 3, 8), "float32")

    def derivatives(cls):
        layers = eqx.filter_vmap(lambda key: cls(8, dtype="float32"))(jax.random.split(jax.random.key(0), 3))
        arrays, rest = eqx.partition(layers, eqx.is_array)

        def loss(arrays, x):
            def body(x, arrays):
                norm = eqx.combine(arrays, rest)
                return jnp.sin(jax.vmap(jax.vmap(eqx.filter_checkpoint(norm)))(x)), None

            return jnp.sum(jnp.cos(jax.lax.scan(body, x, arrays)[0]))

        @eqx.filter_jit
        def run(arrays, x, v):
            gradient = eqx.filter_grad(loss)(arrays, x)
            return gradient, jax.jvp(functools.partial(jax.grad(loss, 1), arrays), (x,), (v,))

        return jax.tree.leaves(run(arrays, x, v))

    for own, theirs in zip(derivatives(jln.equinox.LayerNorm), derivatives(eqx.nn.LayerNorm), strict=True):
        # three layers in float32; each gradient is the sum of 6 rows
        np.testing.assert_allclose(own, theirs, rtol=1e-4, atol=1e-5 * max(1, np.abs(theirs).max()))
