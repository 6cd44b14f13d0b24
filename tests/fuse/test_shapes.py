"""Norms of odd shapes and over several devices: what fuse finds, and that nothing changes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from plain_norms import EPS, S, X, layer, mean, ms, rms
from proof import Case, H, listed, normal, proven

CASES: dict[str, Case] = {}
case = listed(CASES)
pytestmark = pytest.mark.usefixtures("promoted_ranks")


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


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_and_no_more_is_found_than_is_there(name):
    assert proven(CASES[name]) == (CASES[name].finds, True)
