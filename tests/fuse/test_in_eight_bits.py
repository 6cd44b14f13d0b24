"""Norms in front of products in eight bits: RMSNorms are left to XLA, LayerNorms and what else reads a norm are taken.

What quantises stays as it was, whatever its rule does.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jln
from eight_bit_products import (
    PRODUCTS,
    B,
    R,
    S,
    V,
    W,
    X,
    by_current_scales,
    gradients_of_a_product,
    multiply_on_a_cpu,
    to_eight_bits,
)
from plain_norms import layer, rms
from proof import difference

pytestmark = pytest.mark.usefixtures("promoted_ranks", "products_on_a_cpu")
LEFT = "an RMSNorm that no product reads in its own dtype XLA makes better"
# Float32 throughout, so that the operator's numbers are the program's but for their last bits, and a number that lies
# between two of eight bits is rare: in these arrays there is none.
ROUNDING = 1e-5


@pytest.fixture
def products_on_a_cpu(monkeypatch):
    """Have `jax.nn.scaled_dot_general` run on a CPU."""
    monkeypatch.setattr("jax._src.cudnn.scaled_matmul_stablehlo.scaled_matmul_wrapper", multiply_on_a_cpu)


def read(values):
    """Numbers of eight bits, as a program would read them that JAX does not differentiate."""
    return values.astype(jnp.float32)


def route(function, *args, **options):
    """The operator that fuse has in the place of the function's norm, None if it is left; and the reason."""
    (found,) = jln.explain(jln.fuse(function, **options), *args)
    return (None if found.path == "plain" else found.layer.removeprefix("jln.")), found.why


def assert_left(function, *args, why=LEFT, **options):
    """The program is the author's own: it has no operator."""
    operator, found = route(function, *args, **options)
    assert operator is None and why in found
    assert " jln_" not in str(jax.make_jaxpr(jln.fuse(function, **options))(*args))


def assert_taken(operator, function, *args, **options):
    assert route(function, *args, **options)[0] == operator
    assert 0 < difference(function, *args, by_choice=True, **options) < ROUNDING


def with_offset(x, s):
    return layer(x, s, B)


def alone(norm, product):
    return lambda x, r, s, w, *more: product(norm(x, s), w, *more)


def behind_a_sum(norm, product):
    def function(x, r, s, w, *more):
        total = x + r
        return total, product(norm(total, s), w, *more)

    return function


# What is around the norm, options, and the reason why an RMSNorm is left.
WAYS = {
    "alone": (alone, {}, LEFT),
    "behind a sum": (behind_a_sum, {}, LEFT),
    "in a checkpoint": (lambda *of: jax.checkpoint(alone(*of)), {}, "XLA makes"),
    "in forward mode": (alone, {"forward_mode": True}, LEFT),
}
ways_and_products = pytest.mark.parametrize(
    ("way", "product"), [("alone", product) for product in PRODUCTS] + [(way, "Flax") for way in [*WAYS][1:]]
)


@ways_and_products
def test_an_rms_norm_is_left(way, product):
    (around, options, why), (multiply, scales) = WAYS[way], PRODUCTS[product]
    args = X, R, S, W, *scales
    assert_left(around(rms, multiply), *args, why=why, **options)
    assert difference(around(rms, multiply), *args, by_choice=True, **options) == 0


@ways_and_products
def test_a_layer_norm_is_taken(way, product):
    (around, options, _), (multiply, scales) = WAYS[way], PRODUCTS[product]
    operator = "add_layer_norm" if way == "behind a sum" else "layer_norm"
    assert_taken(operator, around(with_offset, multiply), X, R, S, W, *scales, **options)


def of_its_own(function):
    """A function of a norm's result and a kernel whose rule knows a product's gradients, and reads both."""
    own = jax.custom_vjp(function)
    own.defvjp(lambda z, w: (own(z, w), (z, w)), gradients_of_a_product)
    return own


@of_its_own
def in_integers(z, w):
    scale = jnp.max(jnp.abs(z)) / 127
    z, w = (jnp.round(a).astype("int8") for a in (z / scale, w * 100))
    return lax.dot_general(z, w, (((2,), (0,)), ((), ())), preferred_element_type="int32") * scale / 100


@jax.custom_vjp
def read_backward_alone(z, q, w):
    """A product that is given eight bits, and for its gradients what they were made of, as Flax's is."""
    return read(q) @ w


read_backward_alone.defvjp(
    lambda z, q, w: (read_backward_alone(z, q, w), (z, q, w)),
    lambda kept, dy: (dy @ kept[2].T, jnp.zeros_like(kept[1]), gradients_of_a_product(kept[::2], dy)[1]),
)


@jax.custom_vjp
def activation(z):
    return jnp.tanh(z)


activation.defvjp(lambda z: (activation(z), z), lambda z, dy: (dy * (1 - jnp.tanh(z) ** 2),))


def behind(reader):
    """Readers of an RMSNorm's result."""
    return lambda x, r, s, w: reader(rms(x, s), w)


# By the operator that is in the place of the norm: functions of which some read it in eight bits.
READERS = {
    None: {
        "integers": behind(in_integers),
        "an operand for backward alone": behind(
            lambda z, w: read_backward_alone(z, lax.stop_gradient(to_eight_bits(z)), w)
        ),
        "numbers that no function makes": behind(lambda z, w: read(to_eight_bits(z * 32)) @ w),
        "a cast": behind(lambda z, w: read(z.astype("float8_e5m2")) @ w),
        "an activation, too": behind(lambda z, w: (by_current_scales(z, w), jnp.tanh(z))),
        # A step of 8192 x 4096 and Flax's product moves 1261 MB, and with the operator 1330.
        "a sum behind": lambda x, r, s, w: by_current_scales(r + rms(x, s), w),
    },
    "rms_norm": {
        "a plain product, too": behind(lambda z, w: (by_current_scales(z, w), z @ V)),
        "a result, too": behind(lambda z, w: (by_current_scales(z, w), z)),
        "an activation of one's own": behind(lambda z, w: activation(z) @ w),
    },
    "layer_norm_add": {"a LayerNorm's sum": lambda x, r, s, w: by_current_scales(with_offset(x, s) + r, w)},
    "rms_norm_gated": {"a gate": lambda x, r, s, w: by_current_scales(rms(x, s) * jax.nn.silu(r), w)},
    "rms_norm_add_rms_norm": {"both sides": lambda x, r, s, w: by_current_scales(rms(r + rms(x, s), s), w)},
}
BY_NAME = {name: (operator, f) for operator, functions in READERS.items() for name, f in functions.items()}


@pytest.mark.parametrize("name", BY_NAME)
def test_who_reads_a_norm_decides(name):
    operator, function = BY_NAME[name]
    if operator is None:
        assert_left(function, X, R, S, W)
    else:
        assert_taken(operator, function, X, R, S, W)


KEEPS_PRODUCTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_checkpoint_that_keeps_products(product):
    """Eight bits are made again in its backward pass: by XLA with the norm, where a policy knows products."""
    multiply, scales = PRODUCTS[product]
    scaled = lambda z, *a: multiply(jnp.sin(S[0]) * z, *a)  # noqa: E731
    for norm, reader in ((rms, multiply), (with_offset, multiply), (with_offset, scaled)):
        function = jax.checkpoint(alone(norm, reader), policy=KEEPS_PRODUCTS)
        assert_left(function, X, R, S, W, *scales, why="XLA makes the norm better")


def test_both_norms_of_a_pair_that_a_checkpoint_leaves_are_listed():
    function = jax.checkpoint(BY_NAME["both sides"][1], policy=jax.checkpoint_policies.dots_saveable)
    assert [r.path for r in jln.explain(jln.fuse(function), X, R, S, W)] == ["plain", "plain"]


def test_a_layer_norm_in_such_a_checkpoint_that_a_product_reads_too_is_taken():
    both = lambda x, s, w: (by_current_scales(with_offset(x, s), w), with_offset(x, s) @ V)  # noqa: E731
    assert_taken("layer_norm", jax.checkpoint(both, policy=KEEPS_PRODUCTS), X, S, W)


@pytest.mark.filterwarnings("ignore:jln.fuse found no norm")
def test_cotangents_in_eight_bits_are_not_added_up_first():
    """Each reader's is rounded by the cast of its own, with a norm and without one."""

    def program(x, w, v):
        q = to_eight_bits(x * 30)
        return read(q) @ w, read(q) @ v

    assert difference(program, X, W, V) == 0
