"""Quantisations behind norms: fuse has the norm's kernel make the eight bits where they are its own."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jln
from eight_bit_products import (
    E4M3,
    E5M2,
    NUMBER,
    ROUNDING,
    H,
    R,
    S,
    W,
    X,
    by_current_scales,
    by_jax,
    clipped,
    current_scale,
    differences,
    everything,
    in_blocks,
    quantised,
    read,
)
from plain_norms import rms

pytestmark = pytest.mark.usefixtures("promoted_ranks", "products_on_a_cpu")


# Eight bits that the program itself makes: the function, and its arguments.
WAYS = {
    "blocks": (lambda x, s: read(*in_blocks(rms(x, s))), X, S),
    "blocks in e5m2": (lambda x, s: read(*in_blocks(rms(x, s), E5M2)), X, S),
    "one scale": (lambda x, s, n: read(clipped(rms(x, s) / n)) * n, X, S, NUMBER),
    "one scale that is a factor": (lambda x, s, n: read(clipped(rms(x, s) * n)), X, S, 1 / NUMBER),
    "one scale, and the maximum for the next": (
        lambda x, s, n: (read(clipped(rms(x, s) / n)) * n, jnp.max(jnp.abs(rms(x, s)))),
        X,
        S,
        NUMBER,
    ),
    "a number": (lambda x, s: read(clipped(rms(x, s) * 32)), X, S),
    "a number that divides": (lambda x, s: read(clipped(rms(x, s) / 0.02)), X, S),
    "no scale": (lambda x, s: read(clipped(rms(x, s), E5M2)), X, S),
    "a current scale": (lambda x, s: (lambda z: read(clipped(z / current_scale(z))))(rms(x, s)), X, S),
    "a current scale, clipped by nothing": (
        lambda x, s: (lambda z: read((z / (jnp.max(jnp.abs(z)) / 448)).astype(E4M3)))(rms(x, s)),
        X,
        S,
    ),
    "a current scale that is a factor": (
        lambda x, s: (lambda z: read(clipped(z * (448 / jnp.max(jnp.abs(z))))))(rms(x, s)),
        X,
        S,
    ),
    "saturated": (lambda x, s, n: read(clipped(rms(x, s) / n)) * n, X, S, NUMBER / 9),
    "a scale that is learned": (
        lambda x, s, n: read(lax.stop_gradient(clipped(rms(x, s) / n))) * n * n,
        X,
        S,
        NUMBER,
    ),
    "a penalty on the maximum": (
        lambda x, s, n: (lax.stop_gradient(read(clipped(rms(x, s) / n))), jnp.max(jnp.abs(rms(x, s)))),
        X,
        S,
        NUMBER,
    ),
    "a current scale that is held constant": (
        lambda x, s: (lambda z: read(clipped(z / lax.stop_gradient(current_scale(z)))))(rms(x, s)),
        X,
        S,
    ),
    "a maximum that is held constant": (
        lambda x, s: (lambda z: read(clipped(z / (lax.stop_gradient(jnp.max(jnp.abs(z))) / 448))))(rms(x, s)),
        X,
        S,
    ),
    "a current scale that is differentiated": (
        lambda x, s: (lambda z: read(lax.stop_gradient(clipped(z / current_scale(z)))) * current_scale(z))(rms(x, s)),
        X,
        S,
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_eight_bits_of_the_program(name):
    function, *args = WAYS[name]
    assert len(quantised(function, *args)[0]) == 1
    assert differences(function, jln.fuse(function), *args) < ROUNDING
    assert differences(everything(function), everything(jln.fuse(function)), *args) < ROUNDING


def with_a_floor(z):
    """Blocks by the rule of the formats' own example, whose scales are rounded down."""
    blocks = z.reshape(*z.shape[:-1], -1, 32)
    scale = jnp.exp2(jnp.floor(jnp.log2(jnp.max(jnp.abs(blocks), -1, keepdims=True))) - 8)
    return read(clipped(blocks / scale)), scale


# What is not the operators' eight bits, or is read otherwise, and the reason that is given; None where there is none.
OTHERS = {
    "clipped by nothing": (lambda x, s, n: read((rms(x, s) / n).astype(E4M3)), (X, S, NUMBER / 9), "are none of"),
    "a scale rounded down": (lambda x, s: with_a_floor(rms(x, s)), (X, S), "are none of"),
    "blocks of 64": (lambda x, s: read(*in_blocks(rms(x, s), block=64)), (X, S), None),
    "blocks of rows": (lambda x, s: read(*in_blocks(rms(x, s).reshape(32, H).T)), (X, S), None),
    "flushed": (
        lambda x, s, n: read(clipped(jnp.where(jnp.abs(rms(x, s)) < 1e-3, 0, rms(x, s)) / n)),
        (X, S, NUMBER),
        "are none of",
    ),
    "an offset": (lambda x, s, n: read(clipped(rms(x, s) / n + 0.25)), (X, S, NUMBER), "are none of"),
    "the largest of no magnitudes": (
        lambda x, s: (lambda z: read(clipped(z / (jnp.max(z) / 448))))(rms(x, s)),
        (-X, S),
        None,
    ),
    "a scale for each row": (
        lambda x, s: (lambda z: read(clipped(z / jnp.max(jnp.abs(z), -1, keepdims=True))))(rms(x, s)),
        (X, S),
        None,
    ),
    "a scale for each feature": (lambda x, s: read(clipped(rms(x, s) / (1 + s * s))), (X, S), None),
    "a scale of half the maximum, clipped by nothing": (
        lambda x, s: (lambda z: read((z / (jnp.max(jnp.abs(z)) / 1e4)).astype(E4M3)))(rms(x, s)),
        (X, S),
        "are none of",
    ),
    "a least scale of blocks": (
        lambda x, s: (
            lambda z: read(
                clipped(
                    z.reshape(2, 16, 4, 32)
                    / jnp.exp2(
                        jnp.maximum(
                            jnp.ceil(jnp.log2(jnp.max(jnp.abs(z.reshape(2, 16, 4, 32)), -1, keepdims=True) / 448)), -4.0
                        )
                    )
                )
            )
        )(rms(x, s)),
        (X, S),
        "are none of",
    ),
    "float8_e4m3fnuz": (lambda x, s, n: read(clipped(rms(x, s) / n, jnp.float8_e4m3fnuz)), (X, S, NUMBER), None),
    "guarded against NaN": (
        lambda x, s, n: read(clipped(jnp.nan_to_num(rms(x, s)) / n)),
        (X.at[0, 0, 0].set(jnp.nan), S, NUMBER),
        "are none of",
    ),
    "a number of its own": (
        lambda x, s, n: read(clipped((lambda z: jnp.where(z == 0.5, 9.0, z))(rms(x, s)) / n)),
        (X, S, NUMBER),
        None,
    ),
    "arithmetic in float16": (
        lambda x, s: read(clipped(rms(x, s).astype("float16") * jnp.float16(3e4) / jnp.float16(1.5e4), E5M2)),
        (X, S),
        None,
    ),
    "guarded against large numbers": (
        lambda x, s, n: read(clipped((lambda z: jnp.where(jnp.abs(z) > 1e27, 0, z))(rms(x, s)) / n)),
        (X, S.at[3].set(1e30), NUMBER),
        "are none of",
    ),
    "guarded against small numbers": (
        lambda x, s: read(clipped((lambda z: jnp.where(jnp.abs(z) < 1e-26, 0, z))(rms(x, s)) / 1e-30)),
        (X, S * 1e-28),
        "are none of",
    ),
    "through float16": (
        lambda x, s, n: read(clipped((rms(x, s) * 1e-7).astype("float16").astype("float32") * 1e7 / n)),
        (X, S, NUMBER),
        None,
    ),
    "two axes": (lambda x: read(clipped(x * lax.rsqrt(jnp.mean(x * x, (1, 2), keepdims=True)))), (X,), "axis alone"),
    "two dtypes": (
        lambda x, s, n: (read(clipped(rms(x, s) / n)), read(clipped(rms(x, s) / n, E5M2))),
        (X, S, NUMBER),
        "two ways",
    ),
    "two scales": (
        lambda x, s, n, m: (read(clipped(rms(x, s) / n)), read(clipped(rms(x, s) / m))),
        (X, S, NUMBER, 3 * NUMBER),
        "two ways",
    ),
    "an operand of both sides": (
        lambda x, s: (lambda z: by_jax(z[0], z[0].T))(rms(x, s)),
        (X, S),
        None,
    ),
    "a scale made of what is normalised": (
        lambda x, s, w: by_jax(rms(x, s), w) + jnp.sum(read(clipped(rms(x, s) / jnp.mean(jnp.abs(x))))),
        (X, S, W),
        "made of what",
    ),
    "a scale of x": (lambda x, s: read(clipped(rms(x, s) / jnp.mean(jnp.abs(x)))), (X, S), "made of what"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_as_it_is(name):
    function, args, why = OTHERS[name]
    assert quantised(function, *args)[0] == []
    assert differences(function, jln.fuse(function), *args) < ROUNDING
    if why is not None:
        assert any(why in route.why for route in jln.explain(jln.fuse(function), *args))


def test_float64_is_left_as_it_is():
    with jax.enable_x64(True):
        args = X.astype("float64"), S.astype("float64"), W.astype("float64")
        assert quantised(lambda x, s, w: by_current_scales(rms(x, s), w), *args)[0] == []


def test_a_parameter_in_float64():
    with jax.enable_x64(True):
        args = X, S.astype("float64"), W

        def function(x, s, w):
            return by_current_scales(rms(x, s).astype("float32"), w)

        assert quantised(function, *args)[0] == []
        assert differences(function, jln.fuse(function), *args) < ROUNDING


def test_a_scale_of_the_sum_behind_a_reshape():
    """The sum is made by the kernel that would need the scale."""

    def function(x, r, s, w):
        total = x + r
        z = rms(total.reshape(32, H), s)
        return total, read(clipped(z / jnp.max(total))) @ w

    assert quantised(function, X, R, S, W)[0] == []
    assert differences(function, jln.fuse(function), X, R, S, W) < ROUNDING
