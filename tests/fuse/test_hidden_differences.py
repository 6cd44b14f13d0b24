"""Functions that differ from norms where one does not look: on some rows, in gradients, by a rounding, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plain_norms import EPS, R, S, W, X, mean, ms, rms
from proof import Case, H, listed, normal, proven

CASES: dict[str, Case] = {}
case = listed(CASES)
pytestmark = pytest.mark.usefixtures("promoted_ranks")


# What agrees with a norm on some rows.


@case(-X, finds="rms_norm")
def a_mean_without_its_sign_that_is_subtracted(x):
    return rms(x - jnp.sqrt(mean(x) ** 2))


@case(X, finds="rms_norm")
def an_epsilon_that_counts_on_small_rows(x):
    return x * lax.rsqrt(ms(x) + 1e-12)


@case(X * 100 + 500)
def a_penalty_that_begins_at_a_large_mean(x):
    return x * lax.rsqrt(ms(x) + jnp.maximum(mean(x) - 100, 0) + EPS)


@case(X * 100 + 500)
def a_penalty_that_begins_at_a_large_variance(x):
    v = jnp.var(x, -1, keepdims=True)
    return (x - mean(x)) * lax.rsqrt(v + jnp.maximum(v - 1e4, 0) + EPS)


@case(X, finds="rms_norm")
def a_selection_that_no_normal_row_makes(x):
    return jnp.where(ms(x) > 1e6, x, rms(x)) @ W


@case(X * 10, finds="rms_norm")
def a_gate_that_is_open_on_small_rows(x):
    return rms(x) * jax.nn.sigmoid(60 - ms(x))


@case(X * 1e6, finds="rms_norm_add")
def a_residual_that_counts_on_large_rows(x):
    return rms(x) + 1e-10 * x


@case(X * 1e4, finds="rms_norm_add")
def a_fourth_power_that_counts_on_large_rows(x):
    s = ms(x)
    return x * lax.rsqrt(s + 1e-12 * s * s + EPS) + rms(x)


@case(X, finds="rms_norm")
def a_maximum_of_the_norm(x):
    return jnp.maximum(rms(x), -100)


@case(X, finds="layer_norm")
def a_variance_that_is_never_negative(x):
    v = jnp.maximum(mean(x * x) - mean(x) ** 2, 0)
    return (x - mean(x)) * lax.rsqrt(v + EPS)


@case(X, finds="layer_norm")
def a_sum_of_squares_that_is_never_negative(x):
    v = jnp.maximum(jnp.sum(x * x, -1, keepdims=True) - H * mean(x) ** 2, 0) / H
    return (x - mean(x)) * lax.rsqrt(v + EPS)


# Gradients of another function.


@case(X)
def statistics_behind_stop_gradient(x):
    return x * lax.rsqrt(lax.stop_gradient(ms(x)) + EPS)


@case(X)
def a_mean_behind_stop_gradient(x):
    return (x - lax.stop_gradient(mean(x))) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)


@case(X, finds="rms_norm")
def a_mean_behind_stop_gradient_whose_difference_is_normed(x):
    return rms(x - lax.stop_gradient(mean(x)))


@jax.custom_vjp
def _own(x):
    return rms(x)


_own.defvjp(lambda x: (rms(x), x), lambda x, dy: (dy * 2,))


@case(X)
def a_norm_with_a_derivative_of_its_own(x):
    return _own(x)


@jax.custom_jvp
def _half(x):
    return ms(x)


_half.defjvp(lambda primals, tangents: (ms(*primals), mean(primals[0] * tangents[0])))


@case(X)
def a_statistic_with_a_derivative_of_its_own(x):
    return x * lax.rsqrt(_half(x) + EPS)


@case(X)
def a_straight_through_estimator(x):
    return x * lax.rsqrt(ms(x + lax.stop_gradient(jnp.round(x) - x)) + EPS)


# Roundings that are more than roundings.


@case(X, finds="")
def x_in_float8_for_the_statistics(x):
    return x * lax.rsqrt(ms(x.astype(jnp.float8_e4m3fn).astype(x.dtype)) + EPS)


@case(S * 3)
def a_statistic_of_one_row_in_float8(x):
    return x * lax.rsqrt(jnp.mean(x * x).astype(jnp.float8_e4m3fn).astype(x.dtype) + EPS)


@case(S * 3)
def a_statistic_of_one_row_as_an_integer(x):
    return x * lax.rsqrt(jnp.mean(x * x).astype(jnp.int32).astype(x.dtype) + EPS)


@case(normal(1, H) * 3)
def a_statistic_of_one_row_as_an_integer_in_two_axes(x):
    return x * lax.rsqrt(ms(x).astype(jnp.int32).astype(x.dtype) + EPS)


@case(X)
def statistics_of_reduced_precision(x):
    return x * lax.rsqrt(lax.reduce_precision(ms(x), 8, 3) + EPS)


@case(np.arange(2 * H).reshape(2, H) % 11)
def integers(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)


@case(np.arange(2 * H).reshape(2, H) % 11)
def integer_squares_and_an_integer_mean(x):
    return x // (jnp.sum(x * x, -1, keepdims=True) // H + 1)


@case(X, R)
def complex_numbers(x, y):
    z = lax.complex(x, y)
    return z * lax.rsqrt(mean(jnp.real(z * z.conj())) + EPS)


@case(X, R)
def squares_of_complex_numbers(x, y):
    z = lax.complex(x, y)
    return z / jnp.sqrt(mean(z * z) + EPS)


@case(X, finds="rms_norm")
def a_norm_times_a_complex_number(x):
    return jnp.real(rms(x) * (1 + 2j)) + jnp.real((x + 1j) * (1 + 2j))


# Steps that float64 hides wherever random rows are, and that count on the rows here.


def rows_of_size(x, size):
    """Rows with a mean of squares of `size`."""
    return x * np.sqrt(size / np.mean(x * x, -1, keepdims=True))


@case(rows_of_size(X, 676.0), W, finds="rms_norm")
def a_window_of_two_sigmoids(x, w):
    m = ms(x)
    return (x * lax.rsqrt(m + EPS) * (1 - jax.nn.sigmoid(m - 650) * jax.nn.sigmoid(700 - m))) @ w


@case(rows_of_size(X, 679.0), W, finds="rms_norm")
def a_bell_around_some_rows(x, w):
    m = ms(x)
    return (x * lax.rsqrt(m + EPS) * (1 + jnp.exp(-((m / 7 - 97) ** 2)))) @ w


@case(rows_of_size(X, 679.0), W, finds="rms_norm_add")
def a_sum_with_a_bell_around_some_rows(x, w):
    m = ms(x)
    return (x * lax.rsqrt(m + EPS) + x * jnp.exp(-((m / 7 - 97) ** 2))) @ w


@case(rows_of_size(X, 1e24), W, finds="rms_norm")
def a_factor_that_grows_with_huge_rows(x, w):
    m = ms(x)
    return (x * lax.rsqrt(m + EPS) * (1 + m * 1e-6 * 1e-6 * 1e-6 * 1e-6)) @ w


def far_out(x):
    """A number that is 0 in float64 on all but huge rows, by a factor of several constants."""
    return jnp.exp(-1 / jnp.sum((x * 1e-3 * 1e-3 * 1e-3) ** 2, -1, keepdims=True))


@case(X * 1e9, W, finds="rms_norm")
def a_power_that_counts_on_huge_rows(x, w):
    return (rms(x) * jnp.power(2.0, -far_out(x))) @ w


@case(X * 1e50, W, finds="rms_norm")
def a_power_that_counts_on_larger_rows_than_are_tried(x, w):
    return (rms(x) * jnp.power(2.0, -far_out(x * 1e-41))) @ w


@case(X * 1e50, W, finds="rms_norm")
def a_sigmoid_that_counts_on_larger_rows_than_are_tried(x, w):
    return (2 * rms(x) * jax.nn.sigmoid(far_out(x * 1e-41))) @ w


@case(X, normal(2, 3, H) + 60, W, finds="rms_norm")
def a_silu_gate_that_falls_again(x, z, w):
    return (rms(x) * (z * jax.nn.sigmoid(z) * jax.nn.sigmoid(60 - z))) @ w


@case(X, normal(2, 3, H) + 60, W, finds="rms_norm")
def a_silu_gate_that_is_divided(x, z, w):
    return (rms(x) * (z * jax.nn.sigmoid(z) / (1 + jnp.exp(z - 60)))) @ w


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_and_no_more_is_found_than_is_there(name):
    assert proven(CASES[name]) == (CASES[name].finds, True)
