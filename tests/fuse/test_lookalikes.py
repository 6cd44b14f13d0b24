"""Functions that look like norms and are none, by their epsilon or their statistics: fuse leaves them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plain_norms import EPS, R, S, X, mean, ms
from proof import Case, H, listed, normal, proven

CASES: dict[str, Case] = {}
case = listed(CASES)
pytestmark = pytest.mark.usefixtures("promoted_ranks")


# Epsilon.


@case(X * 1e-3)
def epsilon_as_a_lower_bound(x):
    return x * lax.rsqrt(jnp.maximum(ms(x), EPS))


@case(X)
def a_lower_bound_that_is_far_below(x):
    return x * lax.rsqrt(jnp.maximum(ms(x), 1e-12))


@case(X * 1e-20)
def a_tiny_epsilon_outside_of_the_root(x):
    return x / (jnp.sqrt(ms(x)) + 1e-20)


@case(X, S)
def an_epsilon_of_each_feature(x, epsilon):
    return x * lax.rsqrt(ms(x) + epsilon**2)


@case(X)
def a_negative_epsilon(x):
    return x * lax.rsqrt(ms(x) - EPS)


@case(X, finds="rms_norm")
def epsilon_squared(x):
    return x * lax.rsqrt(ms(x) + 1e-3**2)


@case(X)
def epsilon_inside_of_the_mean(x):
    return x * lax.rsqrt(mean(x * x + EPS))


@case(X * 1e-3)
def epsilon_that_an_integer_rounds_away(x):
    rounded = lax.convert_element_type(lax.convert_element_type(lax.full((), 0.06), jnp.int32), x.dtype)
    return x * lax.rsqrt(ms(x) + rounded + 1e-3 * ms(x))


@case(X * 0.2, finds="rms_norm")
def epsilon_that_becomes_zero_as_an_integer(x):
    zero = lax.convert_element_type(lax.convert_element_type(lax.full((), 0.06), jnp.int32), x.dtype)
    return x * lax.rsqrt(ms(x) + zero)


@case(X * 0.2, finds="rms_norm")
def epsilon_that_an_integer_quotient_makes_zero(x):
    quotient = lax.convert_element_type(lax.div(lax.full((), 3, jnp.int32), lax.full((), 50, jnp.int32)), x.dtype)
    return x * lax.rsqrt(ms(x) + quotient)


# Other statistics.


@case(X, S, S + 1)
def the_annotated_transformers_layer_norm(x, a, b):
    return a * (x - mean(x)) / (jnp.std(x, -1, ddof=1, keepdims=True) + EPS) + b


@case(X)
def softmax(x):
    return jax.nn.softmax(x)


@case(X)
def exponentials_over_their_sum(x):
    return jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True)


@case(X)
def a_norm_by_the_largest(x):
    return x / (jnp.max(jnp.abs(x), -1, keepdims=True) + EPS)


@case(X)
def multiplied_by_the_root(x):
    return x * jnp.sqrt(ms(x) + EPS)


@case(X)
def one_step_of_newton_for_the_root(x):
    s = ms(x) + EPS
    guess = 1 / (1 + 0.5 * (s - 1))
    return x * guess * (1.5 - 0.5 * s * guess * guess)


@case(X, finds="rms_norm")
def length_one_times_the_root_of_the_features(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + EPS) * np.sqrt(H)


@case(X, R)
def cosine_similarity(x, y):
    unit = lambda a: a / jnp.sqrt(jnp.sum(a * a, -1, keepdims=True) + EPS)  # noqa: E731
    return jnp.sum(unit(x) * unit(y), -1)


@case(normal(H, 8), normal(8))
def weight_norm(v, g):
    return g * v / jnp.linalg.norm(v, axis=0, keepdims=True)


@case(normal(H, 8), normal(8))
def spectral_norm(w, u):
    v = w @ u
    v = v / jnp.linalg.norm(v)
    u = w.T @ v
    return w / (v @ w @ (u / jnp.linalg.norm(u)))


@case(X)
def batch_norm(x):
    m = jnp.mean(x, (0, 1), keepdims=True)
    return (x - m) * lax.rsqrt(jnp.mean((x - m) ** 2, (0, 1), keepdims=True) + EPS) + mean(x)


@case(normal(H, 6), normal(6), normal(6))
def batch_norm_which_is_a_norm_over_the_first_axis(x, s, b):
    return (x - jnp.mean(x, 0)) * lax.rsqrt(jnp.var(x, 0) + EPS) * s + b


@case(X, S)
def a_row_of_length_1(x, s):
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS) * s


@case(jnp.abs(X), S)
def a_power_for_each_element(x, s):
    return x * lax.rsqrt(mean(jnp.power(x, jnp.linspace(2.0, 2.0001, H))) + EPS) * s


@case(X, S)
def an_outer_product(x, s):
    return jnp.einsum("btk,j->btkj", x * jnp.exp(ms(x)), s)


@case(X, S, finds="rms_norm")
def a_norm_times_a_factor_of_the_row(x, s):
    y = x * lax.rsqrt(ms(x) + EPS) * s
    return y * ms(x) * 0.1


@case(X, normal(H, size=0.1), jnp.abs(normal(H)))
def running_statistics(x, m, v):
    return (x - m) * lax.rsqrt(v + EPS) + mean(x)


@case(X, jnp.abs(normal(2, 3, 1)))
def a_mixture_with_running_statistics(x, v):
    return x * lax.rsqrt(0.9 * v + 0.1 * ms(x) + EPS)


@case(X, R)
def a_mean_of_another_array(x, y):
    d = x - mean(y)
    return d * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)


@case(X)
def statistics_of_features_that_a_constant_chooses(x):
    chosen = np.arange(H) < H // 2
    return x * lax.rsqrt(jnp.sum(x * x * chosen, -1, keepdims=True) / (H // 2) + EPS)


@case(X)
def statistics_of_the_positive_alone(x):
    return x * lax.rsqrt(mean(jnp.where(x > 0, x * x, 0)) + EPS)


@case(X)
def a_mean_over_one_axis_and_a_variance_over_another(x):
    d = x - mean(x)
    return d * lax.rsqrt(jnp.mean(d * d, 1, keepdims=True) + EPS)


@case(normal(2, 4, H), finds="rms_norm")
def a_mean_over_one_axis_and_a_variance_over_two(x):
    d = x - mean(x)
    return d * lax.rsqrt(jnp.mean(d * d, (1, 2), keepdims=True) + EPS)


@case(X)
def squares_that_are_not_of_what_is_scaled(x):
    return (x - mean(x)) * lax.rsqrt(ms(x) + EPS)


@case(X)
def centred_by_the_median(x):
    d = x - jnp.median(x, -1, keepdims=True)
    return d * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)


@case(X)
def a_cumulative_norm(x):
    return x * lax.rsqrt(jnp.cumsum(x * x, -1) / jnp.arange(1.0, H + 1) + EPS)


@case(X)
def statistics_without_the_element_itself(x):
    return x * lax.rsqrt((jnp.sum(x * x, -1, keepdims=True) - x * x) / (H - 1) + EPS)


@case(normal(2, H))
def statistics_that_are_averaged_over_two_rows(x):
    return x * lax.rsqrt(jnp.mean(ms(x), 0, keepdims=True) + EPS)


@case(X, np.uint32(3))
def statistics_of_what_dropout_has_left(x, seed):
    kept = jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape)
    return x * lax.rsqrt(mean(jnp.where(kept, x * x / 0.9, 0)) + EPS)


@case(normal(H, H)[:8, :8] @ np.ones((8, 1)) + normal(8, H)[:, :8])
def statistics_of_the_transposed(x):
    return x * lax.rsqrt(jnp.mean(x * x, 0)[:, None] + EPS) @ normal(8, 4)


@case(X)
def tanh_of_features(x):
    return jnp.tanh(0.5 * x)


@case(X)
def logarithm_of_the_sum(x):
    return x - jax.nn.logsumexp(x, -1, keepdims=True)


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_and_no_more_is_found_than_is_there(name):
    assert proven(CASES[name]) == (CASES[name].finds, True)
