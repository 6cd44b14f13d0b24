"""Norms in front of products in eight bits: RMSNorms are left to XLA, LayerNorms and what else reads a norm are taken.

What quantises stays as it was, whatever its rule does.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jln
from eight_bit_products import (
    E5M2,
    PRODUCTS,
    ROUNDING,
    B,
    R,
    S,
    V,
    W,
    X,
    by_current_scales,
    gradients_of_a_product,
    read,
    to_eight_bits,
)
from plain_norms import layer, rms
from proof import difference

pytestmark = pytest.mark.usefixtures("promoted_ranks", "products_on_a_cpu")
LEFT = "an RMSNorm that no product reads in its own dtype XLA makes better"


def route(function, *args, **options):
    """The operator that fuse has in the place of the function's norm, None if it is left; and the reason."""
    (found,) = jln.explain(jln.fuse(function, **options), *args)
    return (None if found.path == "plain" else found.layer.removeprefix("jln.")), found.why


def assert_left(function, *args, why=LEFT, **options):
    """The program is the author's own: it has no operator, and makes the same bits."""
    operator, found = route(function, *args, **options)
    assert operator is None and why in found
    assert " jln_" not in str(jax.make_jaxpr(jln.fuse(function, **options))(*args))
    assert difference(function, *args, by_choice=True, **options) == 0


def assert_taken(operator, function, *args, **options):
    assert route(function, *args, **options)[0] == operator
    assert 0 < difference(function, *args, by_choice=True, **options) < ROUNDING


def with_offset(x, s):
    return layer(x) * s + B


def alone(norm, product):
    return lambda x, r, s, w, *more: product(norm(x, s), w, *more)


def behind_a_sum(norm, product):
    def function(x, r, s, w, *more):
        total = x + r
        return total, product(norm(total, s), w, *more)

    return function


def in_a_checkpoint(norm, product):
    return jax.checkpoint(alone(norm, product))


def under_a_vmap(norm, product):
    return lambda x, r, s, w, *more: jax.vmap(lambda z: product(norm(z, s), w, *more))(jnp.stack([x, r]))


# What is around the norm, options, and the reason why an RMSNorm is left.
WAYS = {
    "alone": (alone, {}, LEFT),
    "behind a sum": (behind_a_sum, {}, LEFT),
    "in a checkpoint": (in_a_checkpoint, {}, "XLA makes"),
    "under a vmap": (under_a_vmap, {}, LEFT),
    "with Linears": (alone, {"linears": True}, LEFT),
    "in forward mode": (alone, {"forward_mode": True}, LEFT),
}
EVERY = [(way, product) for way in WAYS for product in PRODUCTS]


@pytest.mark.parametrize(("way", "product"), EVERY)
def test_an_rms_norm_is_left(way, product):
    (around, options, why), (multiply, scales) = WAYS[way], PRODUCTS[product]
    assert_left(around(rms, multiply), X, R, S, W, *scales, why=why, **options)


@pytest.mark.parametrize(("way", "product"), EVERY)
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


@of_its_own
def through_another(z, w):
    """A function that calls one, beside eight bits of its own."""
    return by_current_scales(z, w) + jnp.sum(read(to_eight_bits(w)))


@jax.custom_vjp
def read_backward_alone(z, q, w):
    """A product that is given eight bits, and for its gradients what they were made of, as Flax's is."""
    return read(q) @ w


read_backward_alone.defvjp(
    lambda z, q, w: (read_backward_alone(z, q, w), (z, q, w)),
    lambda kept, dy: (dy @ kept[2].T, jnp.zeros_like(kept[1]), gradients_of_a_product(kept[::2], dy)[1]),
)

QUANTISERS = {
    "integers": in_integers,
    "a function that calls another": through_another,
    "an operand for backward alone": lambda z, w: read_backward_alone(z, lax.stop_gradient(to_eight_bits(z)), w),
    "numbers that no function makes": lambda z, w: read(to_eight_bits(z * 32)) @ w,
    "a cast": lambda z, w: read(z.astype(E5M2)) @ w,
    "two products": lambda z, w: (by_current_scales(z, w), in_integers(z, w)),
    "an activation, too": lambda z, w: (by_current_scales(z, w), jnp.tanh(z)),
}


@pytest.mark.parametrize("name", QUANTISERS)
def test_an_rms_norm_that_only_quantisers_read_is_left(name):
    assert_left(lambda x, s, w: QUANTISERS[name](rms(x, s), w), X, S, W)


@jax.custom_vjp
def activation(z):
    return jnp.tanh(z)


activation.defvjp(lambda z: (activation(z), z), lambda z, dy: (dy * (1 - jnp.tanh(z) ** 2),))

OTHERS = {
    "a plain product, too": lambda z, w: (by_current_scales(z, w), z @ V),
    "a result, too": lambda z, w: (by_current_scales(z, w), z),
    "a result in another dtype, too": lambda z, w: (by_current_scales(z, w), z.astype("bfloat16")),
    "a function without eight bits": of_its_own(jnp.dot),
    "an activation of one's own": lambda z, w: activation(z) @ w,
    "an unknown reader": of_its_own(lambda z, w: lax.map(lambda row: read(to_eight_bits(row)) @ w, z)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_norm_that_something_else_reads_is_taken(name):
    assert_taken("rms_norm", lambda x, s, w: OTHERS[name](rms(x, s), w), X, S, W)


OTHER_OPERATORS = {
    "rms_norm_gated": lambda x, r, s: rms(x, s) * jax.nn.silu(r),
    "rms_norm_add_rms_norm": lambda x, r, s: rms(r + rms(x, s), s),
    "layer_norm_add": lambda x, r, s: with_offset(x, s) + r,
}


@pytest.mark.parametrize("name", OTHER_OPERATORS)
def test_what_has_an_operator_beyond_the_norm_is_taken(name):
    def function(x, r, s, w):
        return by_current_scales(OTHER_OPERATORS[name](x, r, s), w)

    assert_taken(name, function, X, R, S, W)


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_checkpoint_that_keeps_products(product):
    """Eight bits are made again in its backward pass: by XLA with the norm, where a policy knows products."""
    (multiply, scales), policy = PRODUCTS[product], jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    args = X, R, S, W, *scales

    def around(norm):
        return jax.checkpoint(alone(norm, multiply), policy=policy)

    assert_left(around(rms), *args, why="XLA makes the norm better")
    for reader in (lambda z, *a: multiply(z, *a), lambda z, *a: multiply(jnp.sin(S[0]) * z, *a)):
        function = jax.checkpoint(alone(with_offset, reader), policy=policy)
        assert_left(function, *args, why="XLA makes the norm better")


def test_both_norms_of_a_pair_that_a_checkpoint_leaves_are_listed():
    policy, multiply = jax.checkpoint_policies.dots_saveable, by_current_scales
    function = jax.checkpoint(lambda x, r, s, w: multiply(rms(r + rms(x, s), s), w), policy=policy)
    assert [r.path for r in jln.explain(jln.fuse(function), X, R, S, W)] == ["plain", "plain"]


def test_a_sum_behind_that_a_product_reads_in_eight_bits_is_left():
    """A step of 8192 x 4096 and Flax's product moves 1261 MB, and with the operator 1330."""
    assert_left(lambda x, r, s, w: by_current_scales(r + rms(x, s), w), X, R, S, W, why=LEFT)
    assert_taken("rms_norm_add", lambda x, r, s, w: (r + rms(x, s)) @ w, X, R, S, W)


def test_a_layer_norm_in_such_a_checkpoint_that_a_product_reads_too_is_taken():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    function = jax.checkpoint(lambda x, s, w: OTHERS["a plain product, too"](with_offset(x, s), w), policy=policy)
    assert_taken("layer_norm", function, X, S, W)


@pytest.mark.filterwarnings("ignore:jln.fuse found no norm")
def test_cotangents_in_eight_bits_are_not_added_up_first():
    """Each reader's is rounded by the cast of its own, with a norm and without one."""

    def program(x, w, v):
        q = to_eight_bits(x * 30)
        return read(q) @ w, read(q) @ v

    assert difference(program, X, W, V) == 0
