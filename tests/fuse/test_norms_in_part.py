"""Norms with something behind that no operator has, and sums that go in a circle: what fuse finds of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from plain_norms import EPS, R, S, W, X, layer, mean, ms, rms
from proof import Case, H, listed, normal, proven

CASES: dict[str, Case] = {}
case = listed(CASES)
pytestmark = pytest.mark.usefixtures("promoted_ranks")


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


@case(X, R, finds="rms_norm")
def a_gate_of_another_slope(x, z):
    return rms(x) * z * jax.nn.sigmoid(1.702 * z)


@case(X, R, finds="rms_norm")
def a_gelu_gate(x, z):
    return rms(x) * jax.nn.gelu(z)


@case(X, R, finds="rms_norm")
def a_gate_of_two_arrays(x, z):
    return rms(x) * z * jax.nn.sigmoid(z + x)


@case(X, R, finds="rms_norm")
def a_gate_of_the_absolute_value(x, z):
    return rms(x) * jnp.abs(jax.nn.silu(z))


@case(X, np.float64(1.3), finds="rms_norm")
def a_scale_that_is_one_number(x, s):
    return rms(x) * s


@case(X, normal(2, 1, 1), finds="rms_norm")
def a_scale_of_each_example(x, s):
    return rms(x) * s


@case(X, R, finds="rms_norm")
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


# Sums that go in a circle.


@case(X, R, finds="add_rms_norm")
def a_scale_made_of_the_sum_over_rows(x, r):
    total = r + x
    return rms(total) * jnp.sum(total, (0, 1)), total


@case(X, R, finds="rms_norm")
def a_scale_made_of_the_sum(x, r):
    total = r + x
    return rms(total) * jnp.max(total, (0, 1)), total


@case(X, R, X + 1, R + 1, finds="add_rms_norm rms_norm")
def two_sums_that_scale_each_others_norm(xa, ra, xb, rb):
    a, b = ra + xa, rb + xb
    return rms(a) * jnp.sum(b, (0, 1)), rms(b) * jnp.sum(a, (0, 1))


@case(X, R, X + 1, R + 1, S, finds="rms_norm_add_rms_norm rms_norm_add rms_norm")
def two_sums_of_norms_that_scale_each_others_norm(xa, ra, xb, rb, s):
    a, b = ra + rms(xa) * s, rb + rms(xb) * s
    return rms(a) * jnp.sum(b, (0, 1)), rms(b) * jnp.sum(a, (0, 1))


@case(X, R, X + 1, R + 1, X + 2, R + 2, finds="add_rms_norm add_rms_norm rms_norm")
def three_sums_that_scale_each_others_norm(xa, ra, xb, rb, xc, rc):
    a, b, c = ra + xa, rb + xb, rc + xc
    return tuple(rms(p) * jnp.sum(q, (0, 1)) for p, q in ((a, b), (b, c), (c, a)))


@case(X, W, W + 1, finds="rms_norm", linears=True)
def a_kernel_made_of_a_linears_result(x, w, v):
    y = rms(x)
    p = y @ w
    return p, y @ (v * jnp.sum(p))


@case(X, R, W, finds="rms_norm rms_norm_linear", linears=True)
def kernels_made_of_each_others_linears(x, z, w):
    a, b = rms(x), rms(z)
    p, q = a @ w, b @ w
    return p, q, a @ (w * jnp.sum(q)), b @ (w * jnp.sum(p))


@case(X, R, W, finds="rms_norm_linear rms_norm_linear", linears=True)
def a_kernel_made_of_anothers_linear(x, z, w):
    a, b = rms(x), rms(z)
    p, q = a @ w, b @ w
    return p, q, a @ (w * jnp.sum(q)), b @ w + jnp.sum(p)


@case(X, R, W, S[:4], finds="add_rms_norm", linears=True)
def a_bias_made_of_the_sum(x, r, w, b):
    total = r + x
    return rms(total) @ w + b * jnp.sum(total), total


@case(np.float64(2.0), finds="rms_norm rms_norm_add")
def arrays_that_are_made_of_nothing(a):
    positions = jnp.arange(4.0 * H).reshape(4, H)
    return rms(jnp.arange(1.0, H + 1)[None]) * jnp.arange(H) * a, rms(positions) + positions * a


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_and_no_more_is_found_than_is_there(name):
    assert proven(CASES[name]) == (CASES[name].finds, True)
