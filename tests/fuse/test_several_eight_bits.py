"""Readers of one norm that quantise it in several ways, or read it in other bits, too: one kernel makes all of them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jln
from eight_bit_products import (
    E5M2,
    NUMBER,
    OF_DY,
    OF_W,
    OF_Z,
    ROUNDING,
    G,
    R,
    S,
    V,
    W,
    X,
    by_current_scales,
    by_jax,
    clipped,
    differences,
    direct_by_flax,
    everything,
    in_blocks,
    metadata,
    quantised,
    read,
    rounded_by_flax,
)
from plain_norms import layer, rms

pytestmark = pytest.mark.usefixtures("promoted_ranks", "products_on_a_cpu")

SECOND, THIRD = metadata(1.7), metadata(0.6)


def queries_keys_values(product):
    def function(x, s, w, v, a, b, c, of_w, of_dy):
        z = rms(x, s)
        return [product(z, k, of_z, of_w, of_dy) for k, of_z in ((w, a), (v, b), (w - v, c))]

    return function, X, S, W, V, OF_Z, SECOND, THIRD, OF_W, OF_DY


def both(function):
    """A product's operand that others read, too."""

    def split(x, s, w):
        z = rms(x, s)
        return function(z, w), z

    return split, X, S, W


def in_e5m2(z, w):
    return jnp.dot(read(clipped(z * 9, E5M2)), w) / 9


# The function, its arguments, and the operators that are found.
SEVERAL = {
    "three scales of Flax": (*queries_keys_values(direct_by_flax), "rms_norm"),
    "three scales of Flax, rounded": (*queries_keys_values(rounded_by_flax), "rms_norm"),
    "two scales and one in common": (
        lambda x, s, w, v, a, b: (
            lambda z: [direct_by_flax(z, *of, OF_W, OF_DY) for of in ((w, a), (v, b), (w + v, a))]
        )(rms(x, s)),
        X,
        S,
        W,
        V,
        OF_Z,
        SECOND,
        "rms_norm",
    ),
    "blocks, and a scale": (
        lambda x, s, w, v, a: (lambda z: (direct_by_flax(z, v, a, OF_W, OF_DY), by_jax(z, w)))(rms(x, s)),
        X,
        S,
        W,
        V,
        OF_Z,
        "rms_norm",
    ),
    "a current scale, and a given one": (
        lambda x, s, w, v, a: (lambda z: (direct_by_flax(z, v, a, OF_W, OF_DY), by_current_scales(z, w)))(rms(x, s)),
        X,
        S,
        W,
        V,
        OF_Z,
        "rms_norm",
    ),
    "a scale of the program's own": (
        lambda x, s, v, a, n: (lambda z: (direct_by_flax(z, v, a, OF_W, OF_DY), read(clipped(z / n))))(rms(x, s)),
        X,
        S,
        V,
        OF_Z,
        NUMBER,
        "rms_norm",
    ),
    "behind a sum": (
        lambda x, r, s, w, v, a, b: (
            lambda t: (
                t,
                [direct_by_flax(layer(t) * s, *of, OF_W, OF_DY) for of in ((w, a), (v, b))],
            )
        )(x + r),
        X,
        R,
        S,
        W,
        V,
        OF_Z,
        SECOND,
        "add_layer_norm",
    ),
    "a result, too": (*both(by_jax), "rms_norm"),
    "a result, too, of a current scale": (*both(by_current_scales), "rms_norm"),
    "a result, too, of a number": (*both(in_e5m2), "rms_norm"),
    "read by a product in other bits": (
        lambda x, s, w, v: (lambda z: (by_jax(z, w), jnp.tanh(z @ v)))(rms(x, s)),
        X,
        S,
        W,
        V,
        "rms_norm",
    ),
    "a gated norm that is a result": (
        lambda x, g, s, w: (lambda z: (by_jax(z, w), z))(rms(x, s) * jax.nn.silu(g)),
        X,
        G,
        S,
        W,
        "rms_norm_gated",
    ),
    "a residual behind the norm": (
        lambda x, r, s, w: (lambda z: (by_jax(z, w), z + r))(rms(x, s)),
        X,
        R,
        S,
        W,
        "rms_norm",
    ),
    "the maximum beside blocks": (
        lambda x, s: (lambda z: (read(*in_blocks(z)), jnp.max(jnp.abs(z))))(rms(x, s)),
        X,
        S,
        "rms_norm",
    ),
    "two scales in a scan": (
        lambda x, scales, w, v, a, b: lax.scan(
            lambda x, s: (
                x
                + direct_by_flax(rms(x, s), w @ w.T, a, OF_W, OF_DY)
                + direct_by_flax(rms(x, s), v @ v.T, b, OF_W, OF_DY),
                None,
            ),
            x,
            scales,
        )[0],
        X,
        jnp.stack([S, S + 0.1]),
        W,
        V,
        OF_Z,
        SECOND,
        "rms_norm",
    ),
    "two scales under a vmap": (
        lambda xs, s, w, v, a, b: jax.vmap(
            lambda x: (direct_by_flax(rms(x, s), w, a, OF_W, OF_DY), direct_by_flax(rms(x, s), v, b, OF_W, OF_DY))
        )(xs),
        jnp.stack([X, R]),
        S,
        W,
        V,
        OF_Z,
        SECOND,
        "rms_norm",
    ),
    "blocks and the result under a vmap": (
        lambda xs, s, w: jax.vmap(lambda x: (lambda z: (by_jax(z, w), z))(rms(x, s)))(xs),
        jnp.stack([X, R]),
        S,
        W,
        "rms_norm",
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_one_kernel_makes_all(name):
    function, *args, finds = SEVERAL[name]
    assert quantised(function, *args) == ([finds], 0)
    assert "rsqrt" not in str(jax.make_jaxpr(jln.fuse(function))(*args))
    assert differences(function, jln.fuse(function), *args) < ROUNDING
    assert differences(everything(function), everything(jln.fuse(function)), *args) < ROUNDING


@jax.custom_vjp
def by_scale(z, w, n):
    return jnp.dot(read(clipped(z / n)), w) * n


by_scale.defvjp(
    lambda z, w, n: (by_scale(z, w, n), (z, w)),
    lambda kept, dy: (dy @ kept[1].T, jnp.einsum("...k,...n->kn", kept[0], dy), jnp.float32(0)),
)


def scales_beside(*more):
    def function(x, s, w, a, b):
        z = rms(x, s)
        return [direct_by_flax(z, w, of, OF_W, OF_DY) for of in (a, b, *more)], z if len(more) == 1 else None

    return function


LEFT = {
    "four scales": (
        scales_beside(metadata(0.3), metadata(4.0)),
        (X, S, W, OF_Z, SECOND),
        {},
        "in more ways than one kernel has",
    ),
    "three scales and the result": (
        scales_beside(metadata(0.3)),
        (X, S, W, OF_Z, SECOND),
        {},
        "in more ways than one kernel has",
    ),
    "blocks in two dtypes": (
        lambda x, s, w: (by_jax(rms(x, s), w), read(*in_blocks(rms(x, s), E5M2))),
        (X, S, W),
        {},
        "in more ways than one kernel has",
    ),
    "a scale that is made of a product's result": (
        lambda x, s, w, v, n: (lambda z: (lambda y: (y, by_scale(z, v, n * jnp.max(y))))(by_scale(z, w, n)))(rms(x, s)),
        (X, S, W, V, NUMBER),
        {},
        "made of what is normalised",
    ),
    "with Linears, which keep what the norm read": (*both(by_jax)[:1], both(by_jax)[1:], {"linears": True}, "in other"),
    "in a checkpoint, where nothing is made twice": (
        jax.checkpoint(both(by_jax)[0]),
        both(by_jax)[1:],
        {},
        "in other bits, too",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_it_is(name):
    function, args, options, why = LEFT[name]
    assert quantised(function, *args, **options)[0] == []
    assert differences(everything(function), everything(jln.fuse(function, **options)), *args) < ROUNDING
    assert any(why in route.why for route in jln.explain(jln.fuse(function, **options), *args))


@pytest.mark.parametrize("norm", [rms, lambda x, s: layer(x) * (1 + s)], ids=["rms", "layer"])
def test_the_norm_is_made_again_of_the_statistics_that_were_kept(norm):
    """Backward has no kernel but that of the norm's gradient."""

    def function(x, s, w):
        return by_jax(norm(x, s), w)

    program = str(jax.make_jaxpr(everything(jln.fuse(function)))(X, S, W))
    assert program.count("jln_norm_forward") == program.count("jln_norm_backward") == 1
    assert differences(everything(function), everything(jln.fuse(function)), X, S, W) < ROUNDING
