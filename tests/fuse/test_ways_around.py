"""The ways in which people write gates, sums and Linears around norms: each is found, and nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from plain_norms import EPS, B, C, R, S, V, W, X, Z, mean, rms
from proof import Case, H, listed, normal, proven, rounding_of

CASES: dict[str, Case] = {}
case = listed(CASES)
pytestmark = pytest.mark.usefixtures("promoted_ranks")


def layer(x, s, b):
    d = x - mean(x)
    return d * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS) * s + b


# Gates.


@case(X, Z, S, finds="rms_norm_gated")
def a_silu_gate_behind(x, z, s):
    return rms(x, s) * jax.nn.silu(z)


@case(X, Z, S, finds="rms_norm_gated")
def a_silu_gate_before_the_scale(x, z, s):
    return rms(x) * (z * jax.nn.sigmoid(z)) * s


@case(X, Z, S, finds="rms_norm_gated")
def a_silu_gate_written_first(x, z, s):
    return jax.nn.silu(z) * (s * rms(x))


@case(X, Z, S, finds="rms_norm")
def a_silu_gate_behind_a_norm_that_others_read(x, z, s):
    y = rms(x, s)
    return jnp.concatenate([y * jax.nn.silu(z), y])


@case(X, Z, S, finds="rms_norm")
def a_silu_gate_in_front(x, z, s):
    return rms(x * jax.nn.silu(z), s)


@case(X, Z, S, B, finds="layer_norm")
def a_layer_norm_with_a_silu_gate(x, z, s, b):
    return layer(x, s, b) * jax.nn.silu(z)


# Sums in front.


@case(X, R, S, finds="add_rms_norm")
def a_sum(x, r, s):
    total = r + x
    return rms(total, s), total


@case(X, V, R, B, W, finds="add_layer_norm")
def a_linears_bias_added_last(u, k, r, b, w):
    total = r + (u @ w @ k + b)
    return layer(total, b, b) @ w, total


@case(X, V, R, B, W, finds="add_layer_norm")
def a_linears_bias_behind_the_sum(u, k, r, b, w):
    total = r + u @ w @ k + b
    return layer(total, b, b) @ w, total


@case(X, R, finds="add_rms_norm")
def a_difference(x, r):
    total = r - x
    return rms(total), total


@case(normal(2, 16, H), normal(2, 16, H), B, normal(2, 1, H), finds="add_layer_norm")
def a_gate_of_each_example(x, r, b, gate):
    total = r + gate * (x + b)
    return layer(total, b, b), total


@case(normal(2, 16, H), normal(2, 16, H), S, normal(2, 1, H), finds="add_rms_norm")
def a_gate_of_each_example_and_rows_in_one_axis(x, r, s, gate):
    total = r + gate * x
    return rms(total.reshape(-1, H), s), total


@case(X, R, S, finds="add_rms_norm")
def layer_scale(x, r, gamma):
    total = r + gamma * x
    return rms(total), total


@case(X, R, np.asarray([[[1.0]], [[0.0]]]), finds="add_rms_norm")
def stochastic_depth(x, r, kept):
    total = r + x * kept / 0.9
    return rms(total), total


@case(X, R, np.uint32(1), finds="add_rms_norm")
def stochastic_depth_of_a_key(x, r, seed):
    kept = jax.random.bernoulli(jax.random.key(seed), 0.5, (x.shape[0], 1, 1))
    total = r + x * (kept / 0.5)
    return rms(total), total


@case(X, R, finds="add_rms_norm")
def a_scaled_residual(x, r):
    total = r + 0.1 * x
    return rms(total), total


@case(X, R, S, finds="add_rms_norm")
def a_reshape_of_rows_between(x, r, s):
    total = r + x
    return rms(total.reshape(-1, H), s), total


@case(X, R, S, finds="add_rms_norm")
def a_sharding_constraint_on_the_stream(x, r, s):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    total = lax.with_sharding_constraint(r + x, NamedSharding(mesh, P("data")))
    return rms(total, s), total


@case(X, R, S, S + 1, finds="rms_norm_add_rms_norm")
def norms_on_both_sides(x, r, s, t):
    total = r + rms(x, s)
    return rms(total, t), total


@case(X, R, S, S + 1, finds="rms_norm_add_rms_norm")
def norms_on_both_sides_around_zero(x, r, s, t):
    total = r + rms(x) * (1 + s)
    return rms(total) * (1 + t), total


@case(X, R, S, B, S + 1, finds="layer_norm_add layer_norm")
def layer_norms_on_both_sides(x, r, s, b, t):
    total = r + layer(x, s, b)
    return layer(total, t, b), total


@case(X, R, S, B, S + 1, finds="rms_norm_add layer_norm")
def norms_of_two_kinds_on_both_sides(x, r, s, b, t):
    total = r + rms(x, s)
    return layer(total, t, b), total


@case(normal(2, 16, H), normal(2, 16, H), S, normal(2, 1, H), finds="rms_norm_add_rms_norm")
def a_gated_norm_in_front(x, r, s, gate):
    total = r + gate * rms(x, s)
    return rms(total, s), total


@case(normal(2, 16, H), normal(2, 16, H), S, B, normal(2, 1, H), finds="layer_norm add_layer_norm")
def a_gated_layer_norm_in_front(x, r, s, b, gate):
    total = r + gate * layer(x, s, b)
    return layer(total, s, b), total


@case(X, R, S, B, finds="add_layer_norm")
def a_post_norm(x, r, s, b):
    return layer(r + x, s, b)


@case(X, R, S, finds="rms_norm_add")
def a_norm_of_the_branch_alone(x, r, s):
    """OLMo 2: the sum behind is normed by nobody here."""
    return r + rms(x, s)


@case(X, W, V, S, S + 1, finds="rms_norm_add rms_norm_add")
def two_blocks_of_olmo_2(x, w, v, s, t):
    x = x + rms(jnp.tanh(x @ w) @ v, s)
    return x + rms(jnp.tanh(x @ w) @ v, t)


@case(X, R, Z, S, finds="add_rms_norm")
def a_sum_of_three(x, r, z, s):
    total = r + x + z
    return rms(total, s), total


@case(X, W, V, S, S + 1, finds="rms_norm add_rms_norm")
def two_norms_of_one_stream(x, w, v, s, t):
    h = x + jnp.tanh(rms(x, s) @ w) @ v
    return h + jnp.tanh(rms(h, t) @ w) @ v


@case(X, W, V, S, B, finds="layer_norm add_layer_norm")
def a_parallel_block(x, w, v, s, b):
    y = layer(x, s, b)
    x = x + jnp.tanh(y @ w) @ v + jnp.sin(y @ w) @ v
    return layer(x, s, b) @ w, x


# Linears.


@case(X, S, W, finds="rms_norm_linear", linears=True)
def a_linear(x, s, w):
    return rms(x, s) @ w


@case(X, S, B, W, C, finds="layer_norm_linear", linears=True)
def a_linear_with_a_bias(x, s, b, w, c):
    return layer(x, s, b) @ w + c


@case(X, S, normal(H, 3, 4), normal(3, 4), finds="rms_norm_linear", linears=True)
def an_einsum_to_heads(x, s, w, c):
    return jnp.einsum("bsh,hnd->bsnd", rms(x, s), w) + c


@case(X, S, W, finds="rms_norm_linear", linears=True)
def a_dot_general_with_the_kernel_first(x, s, w):
    return lax.dot_general(w, rms(x, s), (((0,), (2,)), ((), ())))


@case(X, S, V, finds="rms_norm_linear", linears=True)
def a_transposed_kernel(x, s, v):
    return jnp.einsum("bsh,nh->bsn", rms(x, s), v)


@case(X, R, S, W, W + 1, C, finds="add_rms_norm_linear", linears=True)
def several_linears_behind_a_sum(x, r, s, w, v, c):
    total = r + x
    y = rms(total, s)
    return y @ w + c, jax.nn.silu(y @ v), total


@case(X, R, S, W, C, finds="add_rms_norm_linear", linears=True)
def a_linear_of_rows_in_one_axis(x, r, s, w, c):
    return rms((r + x).reshape(-1, H), s) @ w + c


@case(X, R, S, W, finds="add_rms_norm_linear", linears=True)
def a_kernel_first_of_rows_in_one_axis(x, r, s, w):
    return jnp.einsum("hk,mh->km", w, rms((r + x).reshape(-1, H), s))


@case(X, R, S, W, finds="layer_norm_add layer_norm_linear", linears=True)
def a_linear_behind_norms_without_offsets(x, r, s, w):
    def norm(a):
        centred = a - a.mean(-1, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + EPS) * s

    total = r + norm(x)
    return norm(total) @ w, total


@pytest.mark.parametrize("name", CASES)
def test_it_is_found_and_nothing_changes(name):
    assert proven(CASES[name], rounding_of(CASES[name])) == (CASES[name].finds, True)
