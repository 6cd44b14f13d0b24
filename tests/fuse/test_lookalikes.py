"""Functions that look like norms and are none, or are norms in part: what fuse finds, and that nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from proof import Case, H, difference, listed, normal, operators

CASES: dict[str, Case] = {}
case = listed(CASES)
pytestmark = pytest.mark.usefixtures("promoted_ranks")
# [2, 3, H]: more rows than one, of two axes. A scale and a matrix.
X, Y, S, W = normal(2, 3, H), normal(2, 3, H) * 0.7 + 0.1, normal(H), normal(H, 4)
EPS = 1e-6


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def ms(x):
    return mean(x * x)


def rms(x):
    return x * lax.rsqrt(ms(x) + EPS)


def layer(x):
    return rms(x - mean(x))


# Epsilon.


@case(X * 1e-3)
def epsilon_as_a_lower_bound(x):
    return x * lax.rsqrt(jnp.maximum(ms(x), EPS))


@case(X)
def a_lower_bound_that_is_far_below(x):
    return x * lax.rsqrt(jnp.maximum(ms(x), 1e-12))


@case(X * 1e-3)
def epsilon_outside_of_the_root(x):
    return x / (jnp.sqrt(ms(x)) + EPS)


@case(X * 1e-20)
def a_tiny_epsilon_outside_of_the_root(x):
    return x / (jnp.sqrt(ms(x)) + 1e-20)


@case(X, np.float64(1e-5))
def epsilon_as_an_argument(x, epsilon):
    return x * lax.rsqrt(ms(x) + epsilon)


@case(X, S)
def an_epsilon_of_each_feature(x, epsilon):
    return x * lax.rsqrt(ms(x) + epsilon**2)


@case(X)
def a_relative_epsilon(x):
    return x * lax.rsqrt(ms(x) * (1 + 1e-3))


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


@case(X)
def unbiased_variance(x):
    return (x - mean(x)) * lax.rsqrt(jnp.var(x, -1, ddof=1, keepdims=True) + EPS)


@case(X, S, S + 1)
def the_annotated_transformers_layer_norm(x, a, b):
    return a * (x - mean(x)) / (jnp.std(x, -1, ddof=1, keepdims=True) + EPS) + b


@case(X)
def a_sum_divided_by_one_less(x):
    d = x - mean(x)
    return d / jnp.sqrt(jnp.sum(d * d, -1, keepdims=True) / (H - 1) + EPS)


@case(X)
def softmax(x):
    return jax.nn.softmax(x)


@case(X)
def exponentials_over_their_sum(x):
    return jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True)


@case(X)
def a_norm_of_absolute_values(x):
    return x / (mean(jnp.abs(x)) + EPS)


@case(X)
def a_norm_by_the_largest(x):
    return x / (jnp.max(jnp.abs(x), -1, keepdims=True) + EPS)


@case(X)
def a_norm_of_fourth_powers(x):
    return x * (mean(x**4) + EPS) ** -0.25


@case(X)
def another_power_of_the_statistic(x):
    return x * (ms(x) + EPS) ** -0.499


@case(X)
def multiplied_by_the_root(x):
    return x * jnp.sqrt(ms(x) + EPS)


@case(X)
def one_step_of_newton_for_the_root(x):
    s = ms(x) + EPS
    guess = 1 / (1 + 0.5 * (s - 1))
    return x * guess * (1.5 - 0.5 * s * guess * guess)


@case(X)
def length_one(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + EPS)


@case(X, finds="rms_norm")
def length_one_times_the_root_of_the_features(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + EPS) * np.sqrt(H)


@case(X, Y)
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


@case(X, normal(H, size=0.1), jnp.abs(normal(H)))
def running_statistics(x, m, v):
    return (x - m) * lax.rsqrt(v + EPS) + mean(x)


@case(X, jnp.abs(normal(2, 3, 1)))
def a_mixture_with_running_statistics(x, v):
    return x * lax.rsqrt(0.9 * v + 0.1 * ms(x) + EPS)


@case(X, Y)
def statistics_of_another_array(x, y):
    return x * lax.rsqrt(ms(y) + EPS)


@case(X, Y)
def a_mean_of_another_array(x, y):
    d = x - mean(y)
    return d * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)


@case(X)
def statistics_of_half_of_the_features(x):
    return x * lax.rsqrt(ms(x[..., : H // 2]) + EPS)


@case(X)
def statistics_of_features_that_a_constant_chooses(x):
    chosen = np.arange(H) < H // 2
    return x * lax.rsqrt(jnp.sum(x * x * chosen, -1, keepdims=True) / (H // 2) + EPS)


@case(X, normal(2, 3, H) > 0)
def a_masked_norm(x, mask):
    count = jnp.sum(mask, -1, keepdims=True)
    return x * lax.rsqrt(jnp.sum(jnp.where(mask, x * x, 0), -1, keepdims=True) / count + EPS)


@case(X)
def statistics_of_the_positive_alone(x):
    return x * lax.rsqrt(mean(jnp.where(x > 0, x * x, 0)) + EPS)


@case(X, S)
def a_weighed_mean_of_squares(x, w):
    return x * lax.rsqrt(mean(w * w * x * x) + EPS)


@case(X)
def a_mean_over_one_axis_and_a_variance_over_another(x):
    d = x - mean(x)
    return d * lax.rsqrt(jnp.mean(d * d, 1, keepdims=True) + EPS)


@case(normal(2, 4, H), finds="rms_norm")
def a_mean_over_one_axis_and_a_variance_over_two(x):
    d = x - mean(x)
    return d * lax.rsqrt(jnp.mean(d * d, (1, 2), keepdims=True) + EPS)


@case(X)
def a_variance_that_is_not_of_what_is_scaled(x):
    return x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)


@case(X)
def squares_that_are_not_of_what_is_scaled(x):
    return (x - mean(x)) * lax.rsqrt(ms(x) + EPS)


@case(X)
def a_mean_that_is_half_subtracted(x):
    d = x - 0.5 * mean(x)
    return d * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS)


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


@case(normal(2, 3, H))
def roots_that_are_averaged_over_rows(x):
    return x * jnp.mean(lax.rsqrt(ms(x) + EPS), 1, keepdims=True)


@case(X, np.uint32(3))
def statistics_of_what_dropout_has_left(x, seed):
    kept = jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape)
    return x * lax.rsqrt(mean(jnp.where(kept, x * x / 0.9, 0)) + EPS)


@case(X)
def statistics_rolled_to_the_next_row(x):
    return x * lax.rsqrt(jnp.roll(ms(x), 1, 1) + EPS)


@case(normal(H, H)[:8, :8] @ np.ones((8, 1)) + normal(8, H)[:, :8])
def statistics_of_the_transposed(x):
    return x * lax.rsqrt(jnp.mean(x * x, 0)[:, None] + EPS) @ normal(8, 4)


@case(X)
def tanh_of_features(x):
    return jnp.tanh(0.5 * x)


@case(X)
def logarithm_of_the_sum(x):
    return x - jax.nn.logsumexp(x, -1, keepdims=True)


# What agrees with a norm on some rows.


@case(-X, finds="rms_norm")
def a_mean_that_is_subtracted_where_it_is_positive(x):
    return rms(x - jnp.maximum(mean(x), 0))


@case(X * 100 + 500)
def a_penalty_that_begins_at_a_large_mean(x):
    return x * lax.rsqrt(ms(x) + jnp.maximum(mean(x) - 100, 0) + EPS)


@case(X * 100 + 500)
def a_penalty_that_begins_at_a_large_variance(x):
    v = jnp.var(x, -1, keepdims=True)
    return (x - mean(x)) * lax.rsqrt(v + jnp.maximum(v - 1e4, 0) + EPS)


@case(X * 10)
def a_variance_that_is_clipped(x):
    return (x - mean(x)) * lax.rsqrt(jnp.clip(jnp.var(x, -1, keepdims=True), 0, 50) + EPS)


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


@case(X)
def statistics_of_what_is_behind_stop_gradient(x):
    return x * lax.rsqrt(ms(lax.stop_gradient(x)) + EPS)


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


@case(X)
def statistics_in_float8(x):
    return x * lax.rsqrt(ms(x).astype(jnp.float8_e4m3fn).astype(x.dtype) + EPS)


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


@case(X * 3)
def statistics_rounded(x):
    return x * lax.rsqrt(jnp.round(ms(x)) + EPS)


@case(X)
def statistics_of_reduced_precision(x):
    return x * lax.rsqrt(lax.reduce_precision(ms(x), 8, 3) + EPS)


@case(np.arange(2 * H).reshape(2, H) % 11)
def integers(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS)


@case(np.arange(2 * H).reshape(2, H) % 11)
def integer_squares_and_an_integer_mean(x):
    return x // (jnp.sum(x * x, -1, keepdims=True) // H + 1)


@case(X, Y)
def complex_numbers(x, y):
    z = lax.complex(x, y)
    return z * lax.rsqrt(mean(jnp.real(z * z.conj())) + EPS)


@case(X, Y)
def squares_of_complex_numbers(x, y):
    z = lax.complex(x, y)
    return z / jnp.sqrt(mean(z * z) + EPS)


@case(X, finds="rms_norm")
def a_norm_times_a_complex_number(x):
    return jnp.real(rms(x) * (1 + 2j)) + jnp.real((x + 1j) * (1 + 2j))


# Norms in part: what is behind them is left.


@case(X, finds="rms_norm")
def a_clip_behind(x):
    return jnp.clip(rms(x), -1, 1)


@case(X, finds="rms_norm")
def a_norm_whose_statistics_are_returned_too(x):
    return rms(x), lax.rsqrt(ms(x) + EPS), ms(x)


@case(X, finds="layer_norm")
def a_norm_whose_mean_and_centred_x_are_returned_too(x):
    return layer(x), mean(x), x - mean(x)


@case(X, S, finds="rms_norm")
def a_norm_read_twice(x, s):
    y = rms(x) * s
    return jnp.sin(y) + y * y


@case(X, W, normal(4, H), finds="rms_norm")
def a_scale_made_of_the_result(x, w, v):
    y = rms(x)
    return y * (1 + jnp.tanh(y @ w @ v))


@case(X, W, finds="rms_norm")
def a_silu_gate_made_of_the_result(x, w):
    y = rms(x)
    return y * jax.nn.silu(jnp.tanh(y @ w) @ w.T)


@case(X, finds="rms_norm")
def its_own_silu(x):
    return jax.nn.silu(rms(x))


@case(X, Y, finds="rms_norm")
def a_gate_of_another_slope(x, z):
    return rms(x) * z * jax.nn.sigmoid(1.702 * z)


@case(X, Y, finds="rms_norm")
def a_gelu_gate(x, z):
    return rms(x) * jax.nn.gelu(z)


@case(X, Y, finds="rms_norm")
def a_gate_of_two_arrays(x, z):
    return rms(x) * z * jax.nn.sigmoid(z + x)


@case(X, Y, finds="rms_norm")
def a_gate_of_the_absolute_value(x, z):
    return rms(x) * jnp.abs(jax.nn.silu(z))


@case(X, np.float64(1.3), finds="rms_norm")
def a_scale_that_is_one_number(x, s):
    return rms(x) * s


@case(X, normal(2, 1, 1), finds="rms_norm")
def a_scale_of_each_example(x, s):
    return rms(x) * s


@case(X, Y, finds="rms_norm")
def a_scale_of_xs_size(x, s):
    return rms(x) * s


@case(X, S, finds="rms_norm")
def an_offset_behind_an_rms_norm(x, b):
    return rms(x) + b


@case(X, S, finds="layer_norm")
def a_product_with_the_absolute_value_of_the_scale(x, s):
    return layer(x) * jnp.abs(s)


@case(X, finds="layer_norm")
def a_mean_that_is_subtracted_twice(x):
    d = x - mean(x)
    return rms(d - mean(d))


@case(X, S, finds="rms_norm")
def the_same_name_for_everything(x, s):
    def x_of(x):
        def x_of(x):
            x = x * s
            return x * lax.rsqrt(ms(x) + EPS)

        return x_of(x)

    x = jax.jit(x_of)(x)
    return x


@case(X, finds="rms_norm rms_norm")
def a_norm_of_a_norm(x):
    return rms(rms(x))


@case(X, finds="rms_norm")
def an_even_function_of_x(x):
    return rms(jnp.abs(x))


# Shapes.


@case(normal(0, H))
def no_rows(x):
    return rms(x)


@case(normal(4, 0))
def no_features(x):
    return rms(x)


@case(normal(4, 1), normal(1, 3))
def one_feature(x, w):
    return rms(x) @ w


@case(normal(4, 2), normal(2, 3), finds="rms_norm")
def two_features(x, w):
    return rms(x) @ w


@case(normal(3), finds="rms_norm")
def one_row_of_rank_one(x):
    return rms(x) @ normal(3, 2)


@case(normal(H), normal(H), finds="rms_norm")
def one_row_of_rank_one_with_a_scale(x, s):
    return rms(x) * s


@case(normal(1, H), normal(H), finds="layer_norm")
def one_row_of_rank_two(x, s):
    return layer(x) * s


@case(normal(H, H)[:H, :H], finds="rms_norm")
def the_transposed_of_a_norm_of_a_square(x):
    return rms(x).T


@case(normal(2, 2), normal(2, 3), finds="rms_norm")
def two_rows_of_two(x, w):
    return rms(x).T.T @ w


@case(normal(2, H, 8), finds="rms_norm")
def a_norm_over_two_axes(x):
    return x * lax.rsqrt(jnp.mean(x * x, (1, 2), keepdims=True) + EPS)


@case(normal(2, 6, 6, 64), normal(64), normal(64))
def a_group_norm(x, s, b):
    groups = x.reshape(2, 6, 6, 4, 16)
    m = jnp.mean(groups, (1, 2, 4), keepdims=True)
    v = jnp.var(groups, (1, 2, 4), keepdims=True)
    return ((groups - m) * lax.rsqrt(v + EPS)).reshape(x.shape) * s + b


@case(normal(2, 24, 24, 8))
def an_instance_norm(x):
    m, v = jnp.mean(x, (1, 2), keepdims=True), jnp.var(x, (1, 2), keepdims=True)
    return (x - m) * lax.rsqrt(v + EPS)


@case(S, finds="rms_norm")
def x_that_is_a_constant(s):
    return rms(jnp.asarray(X)) * s


@case(S, finds="rms_norm")
def x_that_is_one_number(s):
    return rms(jnp.ones((4, H))) * s


@case(X)
def a_sum_by_a_product_with_ones(x):
    return x * lax.rsqrt((x * x) @ jnp.ones((H, 1)) / H + EPS)


@case(X, finds="layer_norm")
def a_centred_sum_by_a_product_with_ones(x):
    d = x - mean(x)
    return d * lax.rsqrt((d * d) @ jnp.ones((H, 1)) / H + EPS)


# Sums that go in a circle.


@case(X, Y, finds="add_rms_norm")
def a_scale_made_of_the_sum_over_rows(x, r):
    total = r + x
    return rms(total) * jnp.sum(total, (0, 1)), total


@case(X, Y, finds="rms_norm")
def a_scale_made_of_the_sum(x, r):
    total = r + x
    return rms(total) * jnp.max(total, (0, 1)), total


@case(X, Y, X + 1, Y + 1, finds="add_rms_norm rms_norm")
def two_sums_that_scale_each_others_norm(xa, ra, xb, rb):
    a, b = ra + xa, rb + xb
    return rms(a) * jnp.sum(b, (0, 1)), rms(b) * jnp.sum(a, (0, 1))


@case(X, Y, X + 1, Y + 1, S, finds="rms_norm_add_rms_norm rms_norm_add rms_norm")
def two_sums_of_norms_that_scale_each_others_norm(xa, ra, xb, rb, s):
    a, b = ra + rms(xa) * s, rb + rms(xb) * s
    return rms(a) * jnp.sum(b, (0, 1)), rms(b) * jnp.sum(a, (0, 1))


@case(X, Y, X + 1, Y + 1, X + 2, Y + 2, finds="add_rms_norm add_rms_norm rms_norm")
def three_sums_that_scale_each_others_norm(xa, ra, xb, rb, xc, rc):
    a, b, c = ra + xa, rb + xb, rc + xc
    return tuple(rms(p) * jnp.sum(q, (0, 1)) for p, q in ((a, b), (b, c), (c, a)))


@case(X, W, W + 1, finds="rms_norm", linears=True)
def a_kernel_made_of_a_linears_result(x, w, v):
    y = rms(x)
    p = y @ w
    return p, y @ (v * jnp.sum(p))


@case(X, Y, W, finds="rms_norm rms_norm_linear", linears=True)
def kernels_made_of_each_others_linears(x, z, w):
    a, b = rms(x), rms(z)
    p, q = a @ w, b @ w
    return p, q, a @ (w * jnp.sum(q)), b @ (w * jnp.sum(p))


@case(X, Y, W, finds="rms_norm_linear rms_norm_linear", linears=True)
def a_kernel_made_of_anothers_linear(x, z, w):
    a, b = rms(x), rms(z)
    p, q = a @ w, b @ w
    return p, q, a @ (w * jnp.sum(q)), b @ w + jnp.sum(p)


@case(X, Y, W, S[:4], finds="add_rms_norm", linears=True)
def a_bias_made_of_the_sum(x, r, w, b):
    total = r + x
    return rms(total) @ w + b * jnp.sum(total), total


@case(np.float64(2.0), finds="rms_norm rms_norm_add")
def arrays_that_are_made_of_nothing(a):
    positions = jnp.arange(4.0 * H).reshape(4, H)
    return rms(jnp.arange(1.0, H + 1)[None]) * jnp.arange(H) * a, rms(positions) + positions * a


# Of several devices.


def _over_devices(function):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P(None, None, "d"), out_specs=P(None, None, "d"))


@case(normal(2, 3, 4 * H))
def statistics_added_up_over_devices(x):
    return _over_devices(lambda x: x * lax.rsqrt(lax.pmean(ms(x), "d") + EPS))(x)


@case(normal(2, 3, 4 * H), finds="rms_norm")
def statistics_of_one_device(x):
    return _over_devices(rms)(x)


@case(normal(4, 3, H))
def statistics_added_up_over_a_mapped_axis(x):
    return jax.vmap(lambda x: x * lax.rsqrt(lax.pmean(ms(x), "b") + EPS), axis_name="b")(x)


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


@case(X, normal(2, 3, H) + 60, W, finds="rms_norm")
def a_silu_gate_that_falls_again(x, z, w):
    return (rms(x) * (z * jax.nn.sigmoid(z) * jax.nn.sigmoid(60 - z))) @ w


@case(X, normal(2, 3, H) + 60, W, finds="rms_norm")
def a_silu_gate_that_is_divided(x, z, w):
    return (rms(x) * (z * jax.nn.sigmoid(z) / (1 + jnp.exp(z - 60)))) @ w


# ------


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_and_no_more_is_found_than_is_there(name):
    function, args, finds, options = CASES[name]
    assert (operators(function, *args, **options), difference(function, *args, **options) <= 1e-12) == (finds, True)
