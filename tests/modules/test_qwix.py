"""Models that qwix quantises or adds LoRA to, by functions of its own in the place of JAX's while a model runs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

import jln
import jln.nnx
from frameworks import made_apart, made_together
from parity import normal

pytestmark = [pytest.mark.usefixtures("promoted_ranks"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
H, N, F = 64, 32, 16
DOUBLE = {"param_dtype": jnp.float64}  # in which no rounding of a norm moves an integer that qwix makes of its result
# Of a scale for the largest magnitude itself, the least element lies between two integers, and any rounding decides.
TO_INT8 = {"weight_qtype": jnp.int8, "act_qtype": jnp.int8, "act_calibration_method": "absmax,0.9"}
INT8 = [qwix.QuantizationRule(module_path=".*", **TO_INT8)]
LORA = {"module_path": ".*", "rank": 4, "alpha": 2.0}


def with_provider(provider, model, *args):
    return qwix.quantize_model(model, provider(INT8), *args)


def with_lora(model, *args, **base):
    """The model with LoRA, whose zeros are other numbers in NNX, where these lie in the model."""
    rngs = {"rngs": nnx.Rngs(1)} if args else {}
    model = qwix.apply_lora_to_model(model, qwix.LoraProvider(**LORA, **base), *args, **rngs)
    if args:
        state = nnx.state(model, nnx.LoRAParam)
        nnx.update(model, jax.tree.map(lambda a: a + normal(1, a.shape, a.dtype), state))
    return model


WAYS = {
    "ptq": functools.partial(with_provider, qwix.PtqProvider),
    "qt": functools.partial(with_provider, qwix.QtProvider),
    "lora": with_lora,
    "qlora": functools.partial(with_lora, weight_qtype=jnp.int8),
}
TRAINED = {"qt": nnx.Param, "lora": nnx.LoRAParam, "qlora": nnx.LoRAParam}
ROWS = itertools.count(3)  # more for each test: no operation of these was traced before


@pytest.fixture
def x():
    return normal(0, (next(ROWS), H), jnp.float64)


class Ours(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = jln.nnx.LayerNormLinear(H, N, **DOUBLE, rngs=rngs)
        self.last = nnx.Linear(N, F, **DOUBLE, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.sin(self.first(x)))


class Theirs(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm, self.linear = nnx.LayerNorm(H, **DOUBLE, rngs=rngs), nnx.Linear(H, N, **DOUBLE, rngs=rngs)
        self.last = nnx.Linear(N, F, **DOUBLE, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.sin(self.linear(self.norm(x))))


def loss(model, x):
    return jnp.sum(jnp.sin(model(x)))


class Caller(nnx.Module):
    def __call__(self, function, *args):
        return function(*args)


class Refusing(qwix.QuantizationProvider):
    """A provider in which no product of a model is allowed."""

    def get_intercept_map(self):
        def refuse(*args, **kwargs):
            raise AssertionError("a product was seen")

        products = ("lax.dot_general", "numpy.einsum", "numpy.dot", "numpy.matmul", "numpy.tensordot")
        return {f"jax.{name}": refuse for name in products}


def gradients(f):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), range(4))


def tangents(f):
    return lambda *args: jax.jvp(functools.partial(f, forward_mode=True), args, args)


EIGHT_BITS = {"": None, "blocks": jln.MXFloat8(), "one scale": jln.Float8()}  # which have no forward mode


@pytest.mark.parametrize(("asked", "quantize"), [*((gradients, kind) for kind in EIGHT_BITS), (tangents, "")])
def test_no_product_of_an_operator_is_seen(x, asked, quantize):
    """Derivatives inside of a model, too. For a `vmap` there JAX's own rule of products calls `lax.dot_general`."""
    x = x.astype("float32")
    arrays = x, jnp.ones(H, "float32"), jnp.zeros(H, "float32"), normal(1, (H, N), jnp.float32)
    function = asked(functools.partial(jln.layer_norm_linear, quantize=EIGHT_BITS[quantize]))
    model = qwix.quantize_model(Caller(), Refusing([]), lambda: None, skip_nnx_init=True)
    with pytest.raises(AssertionError, match="a product was seen"):
        model(jnp.matmul, x, arrays[3])
    jax.tree.map(np.testing.assert_array_equal, model(function, *arrays), function(*arrays))


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_is_the_same_whether_it_ran_before_or_not(x, way):
    """The layer's product is its own, whatever becomes of the model's others."""
    model = Ours()
    fresh = WAYS[way](model, x)(x)
    before = jnp.sin(model.first(x))
    np.testing.assert_array_equal(WAYS[way](model, x)(x), fresh)
    last = WAYS[way](nnx.Sequential(model.last), before)
    np.testing.assert_allclose(fresh, last(before), rtol=1e-12, atol=1e-12)
    assert not np.allclose(fresh, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("way", "linears", "operator"),
    [("qt", True, "layer_norm"), ("lora", True, "layer_norm_linear"), ("qlora", False, "layer_norm")],
)
def test_fuse_around_the_loss(x, way, linears, operator):
    model = WAYS[way](Theirs(), x)
    fused = jln.fuse(loss, linears=linears)
    (route,) = jln.explain(fused, model, x)
    assert route.layer == f"jln.{operator}"
    trained = nnx.DiffState(0, TRAINED[way])
    got, true = (nnx.jit(nnx.value_and_grad(f, argnums=trained))(model, x) for f in (fused, loss))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max())


@pytest.mark.parametrize("way", ["ptq", "lora"])
def test_a_dense_whose_parameters_qwix_made_is_called(x, way):
    """Linen's layers make their parameters by Flax's own code, which qwix sees: so does the call that has them."""
    theirs, ours = (WAYS[way](made("linen", "LayerNorm", N, **DOUBLE)()) for made in (made_apart, made_together))
    params = ours.init(jax.random.key(0), x)["params"]
    if way == "lora":
        params["dense"]["kernel_lora_b"] = normal(1, (4, N), jnp.float64)
    got, wanted = (module.apply({"params": params}, x) for module in (ours, theirs))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
