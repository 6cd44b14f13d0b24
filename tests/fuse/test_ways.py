"""The ways in which people write norms: each is found, and nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jln
from plain_norms import EPS, B, S, W, X, mean, ms
from proof import Case, H, listed, normal, proven, rounding_of

CASES: dict[str, Case] = {}
case = listed(CASES)
pytestmark = pytest.mark.usefixtures("promoted_ranks")

# Formulas.


@case(X, S, finds="rms_norm")
def t5(x, s):
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return s * (x / jnp.sqrt(variance + EPS))


@case(X, S, finds="rms_norm")
def gemma(x, s):
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    x = jnp.asarray(x * jnp.reciprocal(jnp.sqrt(variance + EPS)))
    return x * (1 + jnp.expand_dims(s, axis=range(len(x.shape) - 1)))


@case(X, S, B, finds="layer_norm")
def keras(x, gamma, beta):
    """Keras 3: statistics by ops.moments, and one product and one sum per element."""
    m = jnp.mean(x, -1, keepdims=True)
    v = jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(m)
    inv = lax.rsqrt(v + 1e-3)
    gamma, beta = jnp.reshape(gamma, (1, 1, H)), jnp.reshape(beta, (1, 1, H))
    inv = inv * gamma
    return x * inv + (beta - m * inv)


@case(X, S, finds="rms_norm")
def keras_rms(x, gamma):
    rrms = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-3)
    return (x * rrms) * jnp.reshape(gamma, (1, 1, H))


@case(X, S, B, finds="layer_norm")
def penzai(x, s, b):
    """Penzai: each position by vmap, standardised, then scaled and shifted by name."""

    def standardised(row):
        m, v = jnp.mean(row), jnp.var(row)
        return (row - m) * lax.rsqrt(v + EPS)

    y = jax.vmap(jax.vmap(standardised))(x)
    y = jax.vmap(lambda column, s: column * s, (-1, 0), -1)(y, s)
    return jax.vmap(lambda column, b: column + b, (-1, 0), -1)(y, b)


@case(X, S, finds="rms_norm")
def penzai_rms(x, s):
    y = jax.vmap(jax.vmap(lambda row: row * lax.rsqrt(jnp.mean(jnp.square(row)) + EPS)))(x)
    return jax.vmap(lambda column, s: column * s, (-1, 0), -1)(y, s)


@case(X, S.astype("float32"), finds="rms_norm")
def maxtext(x, s):
    """MaxText: the scale, to which an offset of 0 is added, by a product without a sum."""
    y = jnp.asarray(x * lax.rsqrt(jnp.mean(lax.square(x), -1, keepdims=True) + EPS))
    return jnp.einsum("...k,k->...k", y, (s + 0.0).astype(x.dtype))


@case(normal(2, 3, 4, H), normal(4, H), finds="rms_norm")
def a_scale_for_each_head_by_einsum(x, s):
    return jnp.einsum("bthd,hd->bthd", x * lax.rsqrt(ms(x) + EPS), s)


@case(normal(2, 4, H), normal(H, 4), finds="rms_norm")
def a_scale_whose_axes_are_turned(x, s):
    y = lax.dot_general(x * lax.rsqrt(ms(x) + EPS), s, (((), ()), ((2, 1), (0, 1))))
    return jnp.transpose(y, (2, 1, 0))


@case(X, S, finds="rms_norm")
def keras_hub_llama(x, s):
    var = jnp.mean(jnp.power(x, 2.0), axis=-1, keepdims=True)
    return x * lax.rsqrt(var + EPS) * s


@case(X, S, finds="rms_norm")
def a_float_power(x, s):
    return x * lax.rsqrt(mean(jnp.float_power(x, 2)) + EPS) * s


@case(X, S, B, finds="rms_norm")
def equinox_rms(x, s, b):
    """Equinox's RMSNorm has a bias, unless it is told otherwise."""
    return jax.vmap(jax.vmap(lambda row: row * lax.rsqrt(jnp.mean(row**2) + 1e-5) * s + b))(x)


@case(X, S, finds="rms_norm")
def llama(x, s):
    return s * (x * jnp.power(jnp.mean(x**2, -1, keepdims=True) + EPS, -0.5))


@case(X, finds="layer_norm")
def standardize(x):
    return jax.nn.standardize(x, epsilon=1e-5)


@case(X, finds="rms_norm")
def length_without_epsilon(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True) * H**0.5


@case(X, finds="rms_norm")
def rows_without_kept_axes(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1) + EPS)[:, :, None]


@case(X, finds="rms_norm")
def rows_by_vmap(x):
    return jax.vmap(jax.vmap(lambda row: row / jnp.sqrt(row @ row / H + EPS)))(x)


@case(normal(4, 768, dtype=np.float32), finds="rms_norm")
def one_over_features_that_float32_rounds(x):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) * (1 / 768) + EPS)


@case(normal(4, 768, dtype=np.float32), finds="rms_norm")
def a_root_of_the_features_that_float32_rounds(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)) * 768**0.5


@case(X, S, finds="rms_norm")
def a_product_that_is_written_twice(x, s):
    return (x * s) * lax.rsqrt(mean((x * s) ** 2) + EPS)


# Casts.


@case(X.astype(np.float32), S.astype(np.float32), finds="rms_norm")
def an_upcast(x, s):
    wide = x.astype(jnp.float64)
    return (wide * lax.rsqrt(mean(wide * wide) + EPS) * s).astype(x.dtype)


@case(X.astype(np.float32), finds="layer_norm")
def float32_whose_norm_is_computed_in_float64(x):
    wide = x.astype(jnp.float64)
    return (wide - mean(wide)) * lax.rsqrt(jnp.var(wide, -1, keepdims=True) + EPS)


@case(X.astype(jnp.bfloat16), S.astype(np.float32), finds="rms_norm")
def bfloat16_cast_back_before_the_scale(x, s):
    wide = x.astype(jnp.float32)
    return s.astype(x.dtype) * (wide * lax.rsqrt(mean(wide * wide) + EPS)).astype(x.dtype)


@case(X.astype(jnp.bfloat16), S.astype(np.float32), W.astype(jnp.bfloat16), finds="rms_norm")
def a_float32_result_that_every_product_casts_back(x, s, w):
    wide = x.astype(jnp.float32)
    y = wide * lax.rsqrt(mean(wide * wide) + EPS) * s
    return y.astype(w.dtype) @ w, y.astype(w.dtype) @ (w + 1)


# Axes.


@case(normal(2, H, 5), normal(H), normal(H), finds="layer_norm")
def channels_first(x, s, b):
    m, v = jnp.mean(x, 1, keepdims=True), jnp.var(x, 1, keepdims=True)
    return (x - m) * lax.rsqrt(v + EPS) * s[:, None] + b[:, None]


@case(normal(2, 16, 4, 8), finds="rms_norm")
def several_axes(x):
    return x * lax.rsqrt(jnp.mean(x * x, (1, 2, 3), keepdims=True) + EPS)


@case(normal(2, 16, 3, 32), normal(16, 1, 32), finds="rms_norm")
def axes_apart(x, s):
    return x * lax.rsqrt(jnp.mean(x * x, (1, 3), keepdims=True) + EPS) * s


@case(normal(3, 4 * H), normal(4, H), finds="rms_norm")
def groups(x, s):
    g = x.reshape(3, 4, H)
    return (g * lax.rsqrt(jnp.mean(g * g, -1, keepdims=True) + EPS) * s).reshape(3, 4 * H)


@case(X, normal(2, 1, H), normal(2, 1, H) + 0.1, finds="layer_norm")
def adaln(x, scale, shift):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * (1 + scale) + shift


@case(X, normal(2, H), normal(2, H) + 0.1, finds="layer_norm")
def adaln_of_two_axes(x, scale, shift):
    y = (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)
    return y * (1 + scale[:, None, :]) + shift[:, None, :]


@pytest.mark.parametrize("name", CASES)
def test_it_is_found_and_nothing_changes(name):
    assert proven(CASES[name], rounding_of(CASES[name])) == (CASES[name].finds, True)


def test_a_result_that_every_product_casts_back_is_written_as_the_products_read_it():
    function, args, *_ = CASES["a_float32_result_that_every_product_casts_back"]
    program = jax.make_jaxpr(jln.fuse(function))(*args)
    casts = [
        e for e in program.eqns if e.primitive.name == "convert_element_type" and e.outvars[0].aval.shape == X.shape
    ]
    assert not casts, casts


@pytest.mark.parametrize("name", ["maxtext", "a_scale_for_each_head_by_einsum", "a_scale_whose_axes_are_turned"])
def test_a_scale_by_a_product_without_a_sum_is_the_operators(name):
    function, args, *_ = CASES[name]
    (operator,) = (e for e in jax.make_jaxpr(jln.fuse(function))(*args).eqns if e.primitive.name.startswith("jln_"))
    assert len(operator.invars) == 2


def test_a_product_without_a_sum_stays_one():
    """Such a product is computed as it is written where no operator takes its place."""

    def function(x, s):
        return jnp.einsum("...k,k->...k", jnp.sin(x), s) + x * lax.rsqrt(ms(x) + EPS)

    assert "dot_general" in str(jax.make_jaxpr(jln.fuse(function))(X, S))
