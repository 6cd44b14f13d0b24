"""Functions that multiply in eight bits behind norms, whose kernel then makes these: no gradient changes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jln
from eight_bit_products import (
    FEATURES,
    OF_DY,
    OF_W,
    OF_Z,
    ROUNDING,
    B,
    G,
    H,
    R,
    S,
    V,
    W,
    X,
    arrays,
    by_current_scales,
    by_jax,
    clipped,
    current_scale,
    differences,
    direct_by_flax,
    everything,
    parted,
    quantised,
    read,
    rounded_by_flax,
    with_a_cotangent_of_its_own,
)
from plain_norms import layer, rms

pytestmark = pytest.mark.usefixtures("promoted_ranks", "products_on_a_cpu")


# Products that are differentiated: the function, its arguments, the operators that are found.
PRODUCTS = {}


def product(*args, finds="rms_norm"):
    def added(function):
        PRODUCTS[function.__name__] = function, args, finds.split()
        return function

    return added


@product(X, S, W)
def jax_blocks(x, s, w):
    return by_jax(rms(x, s), w)


@product(X, S, W, V)
def jax_blocks_of_two_products(x, s, w, v):
    z = rms(x, s)
    return jax.nn.silu(by_jax(z, w)) * by_jax(z, v)


@product(X, S, B, W, finds="layer_norm")
def behind_a_layer_norm(x, s, b, w):
    return by_jax(layer(x) * s + b, w)


@product(X, R, S, W, finds="add_rms_norm")
def behind_a_sum_that_is_a_result(x, r, s, w):
    total = r + x
    return total, by_jax(rms(total, s), w)


@product(X, R, S, W, finds="rms_norm_add_rms_norm")
def behind_norms_on_both_sides(x, r, s, w):
    return by_jax(rms(r + rms(x, s), s), w)


@product(X, G, S, W, finds="rms_norm_gated")
def behind_a_gate(x, g, s, w):
    return by_jax(rms(x, s) * jax.nn.silu(g), w)


@product(X, S, W)
def behind_a_reshape_of_rows(x, s, w):
    return by_jax(rms(x, s).reshape(32, H), w)


@product(X, S, W, OF_Z, OF_W, OF_DY)
def flax_direct(x, s, w, of_z, of_w, of_dy):
    return direct_by_flax(rms(x, s), w, of_z, of_w, of_dy)


@product(X, S, W, OF_Z, OF_W, OF_DY)
def flax_rounded(x, s, w, of_z, of_w, of_dy):
    return rounded_by_flax(rms(x, s), w, of_z, of_w, of_dy)


@product(X, S, W)
def a_current_scale(x, s, w):
    return by_current_scales(rms(x, s), w)


def of_a_scale(hold):
    """A product whose scale is made of the largest magnitude, and of `hold` of that."""

    @jax.custom_vjp
    def multiply(z, w):
        scale = hold(jnp.max(jnp.abs(z))) / 448
        return read(clipped(z / scale)) @ w * scale

    def backward(kept, dy):
        z, w = kept
        return dy @ w.T, jnp.einsum("...k,...n->kn", z, dy)

    multiply.defvjp(lambda z, w: (multiply(z, w), (z, w)), backward)
    return multiply


@product(X, S, W)
def a_current_scale_that_is_held_constant(x, s, w):
    return of_a_scale(jax.lax.stop_gradient)(rms(x, s), w)


def test_a_scale_that_is_made_of_the_maximum_by_unknown_means_is_left():
    def function(x, s, w):
        return of_a_scale(lambda largest: jnp.sort(largest[None])[0])(rms(x, s), w)

    (finding,) = jln.explain(jln.fuse(function), X, S, W)
    assert "not in eight bits: its scale is made of what is normalised" in str(finding)
    assert differences(everything(function), everything(jln.fuse(function)), X, S, W) < ROUNDING


@product(X, S, W, V)
def a_current_scale_of_two_products(x, s, w, v):
    z = rms(x, s)
    return by_current_scales(z, w), by_current_scales(z, v)


@product(X, S, W)
def a_cotangent_that_reads_the_norm(x, s, w):
    return with_a_cotangent_of_its_own(rms(x, s), w)


@product(X, S, W, V)
def products_one_behind_the_other(x, s, w, v):
    z = rms(x, s)
    first = by_jax(z, w)
    return by_jax(z, v + jnp.mean(first))


@product(jnp.stack([X, R]), S, W)
def under_a_vmap(xs, s, w):
    return jax.vmap(lambda x: by_jax(rms(x, s), w))(xs)


@product(X, jnp.stack([S, B]), jnp.stack([W @ W.T, V @ V.T]), finds="rms_norm")
def in_a_scan(x, scales, kernels):
    return lax.scan(lambda x, of: (x + by_jax(rms(x, of[0]), of[1]), None), x, (scales, kernels))[0]


@product(X, R, S, B, finds="rms_norm")
def two_norms_in_one_product(x, r, s, t):
    """The first is quantised by its kernel, the other one as the program has it."""
    return by_jax(rms(x, s), rms(r, t).reshape(32, H), axis=1)


@product(X, S, W)
def in_a_checkpoint(x, s, w):
    return jax.checkpoint(lambda x: by_jax(rms(x, s), w))(x)


@product(X, S, W)
def in_a_checkpoint_that_keeps_products(x, s, w):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(lambda x: by_jax(rms(x, s), w), policy=policy)(x)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_are_differentiated(name):
    function, args, finds = PRODUCTS[name]
    assert quantised(function, *args) == (finds, 0)
    assert differences(everything(function), everything(jln.fuse(function)), *args) < ROUNDING
    assert differences(function, jln.fuse(function), *args) < ROUNDING


def test_forward_mode_is_left_as_it_is():
    assert quantised(jax_blocks, X, S, W, forward_mode=True)[0] == []


def test_bfloat16():
    """The program rounds the norm to bfloat16 before it rounds to eight bits, and the operator once."""
    x, w, dy = arrays(4, 128, H).astype("bfloat16"), W.astype("bfloat16"), arrays(4, 128, FEATURES)

    def function(x, s, w):
        return by_jax(rms(x.astype("float32"), s).astype("bfloat16"), w)

    def step(f):
        def pulled(*args):
            y, pull = jax.vjp(f, *args)
            return y, *pull(dy)

        return jax.jit(pulled)(x, S, w)

    assert quantised(function, x, S, w) == (["rms_norm"], 0)
    exact = step(lambda x, s, w: rms(x.astype("float32"), s) @ w.astype("float32"))

    def errors(f):
        return [float(jnp.linalg.norm((a - b).astype("float32"))) for a, b in zip(step(f), exact, strict=True)]

    assert all(fused < 1.02 * plain for fused, plain in zip(errors(jln.fuse(function)), errors(function), strict=True))


def test_nothing_is_held_but_what_the_norm_read():
    """Backward reads x, statistics and parameters, and nothing of the norm's size beside."""

    def held(function):
        kept = jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], X, S, W, V)
        return sorted(a.size for a in jax.tree.leaves(kept) if a.size >= X.size and a.shape != W.shape)

    assert (
        held(jln.fuse(jax_blocks_of_two_products)).count(X.size) == 1 < held(jax_blocks_of_two_products).count(X.size)
    )


def test_a_mesh():
    """Inner functions of shard_map find the largest number of their own device."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("data")
    n = jax.device_count()
    x = jnp.concatenate([X.reshape(32, H)] * n)

    def by_device(check_vma):
        def function(x, s, w):
            return by_current_scales(rms(x, s), w)

        how = {"mesh": mesh, "in_specs": (rows, None, None), "out_specs": rows, "check_vma": check_vma}
        return jax.shard_map(function, **how)

    assert differences(by_device(True), jln.fuse(by_device(True)), x, S, W) < ROUNDING
    function = by_device(False)  # this custom_vjp function would have to say how its cotangents vary
    assert quantised(function, x, S, W) == (["rms_norm"], 0)
    assert differences(everything(function), everything(jln.fuse(function)), x, S, W) < ROUNDING


def test_a_function_that_reads_more():
    """The function multiplies eight bits, and adds up others."""

    @jax.custom_vjp
    def both(z, w):
        return jnp.dot(read(clipped(z * 32)), w) + jnp.sum(z, -1, keepdims=True)

    both.defvjp(lambda z, w: (both(z, w), w), lambda w, dy: (dy @ w.T, jnp.zeros_like(w)))

    def function(x, s, w):
        return both(rms(x, s), w)

    assert quantised(function, X, S, W)[0] == []
    assert differences(function, jln.fuse(function), X, S, W) < ROUNDING


def test_scales_of_two_norms_that_wait_for_each_other():
    def program(x, r, s):
        a, b = rms(x, s), rms(r, s)
        return read(clipped(a / current_scale(b))), read(clipped(b / current_scale(a)))

    assert differences(program, jln.fuse(program), X, R, S) < ROUNDING


@pytest.mark.filterwarnings("ignore:jln.fuse found no norm")
def test_cotangents_in_eight_bits_are_not_added_up_first():
    """Each reader's is rounded by the cast of its own, with a norm and without one."""

    def program(x, w, v):
        q = clipped(x * 30)
        return jnp.dot(read(q), w), jnp.dot(read(q), v)

    assert differences(everything(program), everything(jln.fuse(program)), X, W, V) < ROUNDING


def test_effects_stay():
    """The kernel makes the result for them, too."""
    seen = []

    def function(x, s, w):
        z = rms(x, s)
        jax.debug.callback(seen.append, z)
        return by_jax(z, w)

    assert quantised(function, X, S, W) == (["rms_norm"], 0)
    assert "rsqrt" not in str(jax.make_jaxpr(jln.fuse(function))(X, S, W))
    jax.effects_barrier()
    seen.clear()
    jax.block_until_ready(jax.jit(jln.fuse(function))(X, S, W))
    jax.effects_barrier()
    assert len(seen) == 1 and parted(seen[0], rms(X, S)) < ROUNDING
