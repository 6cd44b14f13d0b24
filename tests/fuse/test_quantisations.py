"""Quantisations behind norms: fuse has the norm's kernel make the eight bits, and nothing changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters import partial_eval as pe
from jax.custom_derivatives import SymbolicZero

import jln
from eight_bit_products import (
    E4M3,
    E5M2,
    FEATURES,
    H,
    arrays,
    by_current_scales,
    by_jax,
    clipped,
    current_scale,
    direct_by_flax,
    in_blocks,
    metadata,
    patched,
    read,
    rounded_by_flax,
    with_a_cotangent_of_its_own,
)
from plain_norms import layer, rms

# [2, 16, H]: rows of two axes, 32 in all, as JAX's product of blocks wants them. W, V: of products behind.
X, R, S, B = arrays(2, 16, H), arrays(2, 16, H, size=0.5), arrays(H), arrays(H, size=0.3)
W, V, G = arrays(H, FEATURES, size=0.1), arrays(H, FEATURES, size=0.2), arrays(2, 16, H, size=0.9)
OF_Z, OF_W, OF_DY = metadata(), metadata(0.3), metadata(2.0)
NUMBER = jnp.float32(0.013)


pytestmark = pytest.mark.usefixtures("promoted_ranks")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch):
    patched(monkeypatch)


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


def quantised(function, *args, **options):
    """The operators that fuse has quantise, and those that it has not."""
    routes = jln.explain(jln.fuse(function, **options), *args)
    routes = [r for r in routes if r.layer.startswith("jln.")]
    in_eight_bits = [r.layer.removeprefix("jln.") for r in routes if "quantize" in r.why.split(";")[0]]
    return in_eight_bits, len(routes) - len(in_eight_bits)


def everything(function):
    """The function's results, and the gradients of all its arguments."""

    def loss(*args):
        made = function(*args)
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(made)), made

    def values(*args):
        return jax.value_and_grad(loss, range(len(args)), has_aux=True)(*args)

    return values


def parted(got, wanted):
    """The largest difference beside the array's largest number; infinity where one alone is NaN."""
    got, wanted = (np.asarray(a, np.float32) for a in (got, wanted))
    if got.shape != wanted.shape or not np.array_equal(np.isnan(got), np.isnan(wanted)):
        return np.inf
    return float(np.nanmax(np.abs(got - wanted)) / max(np.nanmax(np.abs(wanted)), 1e-30))


def differences(function, fused, *args):
    wanted, got = (jax.tree.leaves(jax.jit(f)(*args)) for f in (function, fused))
    assert [a.dtype for a in wanted] == [a.dtype for a in got]
    return max(parted(a, b) for a, b in zip(got, wanted, strict=True))


# Float32 throughout, so that the operator's numbers are the program's but for their last bits, and a number that lies
# between two of eight bits is rare: in these arrays there is none.
ROUNDING = 1e-5


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_are_differentiated(name):
    function, args, finds = PRODUCTS[name]
    assert quantised(function, *args) == (finds, 0)
    assert differences(everything(function), everything(jln.fuse(function)), *args) < ROUNDING
    assert differences(function, jln.fuse(function), *args) < ROUNDING


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
    "a current scale that is differentiated": (
        lambda x, s: (lambda z: read(lax.stop_gradient(clipped(z / current_scale(z)))) * current_scale(z))(rms(x, s)),
        X,
        S,
    ),
    "another axis": (
        lambda x, s, n: read(clipped(x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6) * s[:16, None] / n)),
        X,
        S,
        NUMBER,
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


def split(x, s, w):
    """A product's operands that others read, too."""
    z = rms(x, s)
    return by_jax(z, w), z


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
    "the maximum beside blocks": (
        lambda x, s: (lambda z: (read(*in_blocks(z)), jnp.max(jnp.abs(z))))(rms(x, s)),
        (X, S),
        "in other bits, too",
    ),
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
    "two products with scales of their own": (
        lambda x, s, w, a, b: (lambda z: (direct_by_flax(z, w, a, OF_W, OF_DY), direct_by_flax(z, w, b, OF_W, OF_DY)))(
            rms(x, s)
        ),
        (X, S, W, OF_Z, metadata(1.7)),
        "two ways",
    ),
    "read in other bits": (split, (X, S, W), "in other bits, too"),
    "an operand of both sides": (
        lambda x, s: (lambda z: by_jax(z[0], z[0].T))(rms(x, s)),
        (X, S),
        None,
    ),
    "a scale made of what is normalised": (
        lambda x, s, w: by_jax(rms(x, s), w) + jnp.sum(read(clipped(rms(x, s) / jnp.mean(jnp.abs(x))))),
        (X, S, W),
        "two ways",
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


def own_rule(primal, forward, backward):
    """A product of one's own, whose rule multiplies in another way than it does without a derivative."""

    @jax.custom_vjp
    def function(z, w):
        return primal(z, w)

    function.defvjp(forward, backward)
    return lambda x, s, w: function(rms(x, s), w)


def of_eight(z, w, factor, dtype=E4M3):
    return jnp.dot(read(clipped(z * factor, dtype)), w) / factor


def backward_of(factor):
    """The rule that reads the eight bits that forward has kept, by a factor."""
    return lambda kept, dy: (dy @ kept[1].T, jnp.einsum("...k,...n->kn", kept[0].astype(jnp.float32) / factor, dy))


RULES = {
    "another factor": own_rule(
        lambda z, w: of_eight(z, w, 32.0), lambda z, w: (of_eight(z, w, 8.0), (clipped(z * 8), w)), backward_of(8)
    ),
    "another factor kept": own_rule(
        lambda z, w: of_eight(z, w, 32.0), lambda z, w: (of_eight(z, w, 32.0), (clipped(z * 8), w)), backward_of(8)
    ),
    "another dtype kept": own_rule(
        lambda z, w: of_eight(z, w, 32.0),
        lambda z, w: (of_eight(z, w, 32.0), (clipped(z * 32, E5M2), w)),
        backward_of(32),
    ),
    "no eight bits": own_rule(lambda z, w: of_eight(z, w, 32.0), lambda z, w: (z @ w, (z, w)), backward_of(1)),
    "blocks": own_rule(
        lambda z, w: of_eight(z, w, 32.0),
        lambda z, w: (of_eight(z, w, 32.0), (read(*in_blocks(z)), w)),
        backward_of(1),
    ),
    "the same": own_rule(
        lambda z, w: of_eight(z, w, 32.0), lambda z, w: (of_eight(z, w, 32.0), (clipped(z * 32), w)), backward_of(32)
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_quantises_in_another_way(name):
    function = RULES[name]
    assert quantised(function, X, S, W) == (["rms_norm"], 0)
    assert differences(everything(function), everything(jln.fuse(function)), X, S, W) < ROUNDING


def test_a_result_that_is_no_float():
    @jax.custom_vjp
    def function(z, w):
        return of_eight(z, w, 32.0), jnp.argmax(w)

    function.defvjp(lambda z, w: (function(z, w), (z, w)), lambda kept, d: backward_of(1)(kept, d[0]))

    def product(x, s, w):
        return function(rms(x, s), w)[0]

    assert quantised(product, X, S, W) == (["rms_norm"], 0)
    assert differences(everything(product), everything(jln.fuse(product)), X, S, W) < ROUNDING


@jax.custom_vjp
def delayed(z, w, n):
    """A product whose scale has the next one for its cotangent, as Flax's have."""
    return jnp.dot(read(clipped(z / n)), w) * n


def _delayed_backward(kept, dy):
    z, w, n = kept
    return dy @ w.T, jnp.einsum("...k,...n->kn", z, dy), jnp.max(jnp.abs(z)) / 448 + 0 * n


delayed.defvjp(lambda z, w, n: (delayed(z, w, n), (z, w, n)), _delayed_backward)


NOT_ALL_READ = {
    "one of two stopped": lambda x, s, w, v, n: (lambda z: (delayed(z, w, n), lax.stop_gradient(delayed(z, v, n))))(
        rms(x, s)
    ),
    "one of two unused": lambda x, s, w, v, n: (lambda z: (delayed(z, w, n), delayed(z, v, n))[0])(rms(x, s)),
    "equations of its own unused": lambda x, s, w, v, n: (lambda z: (clipped(z / n), delayed(z, w, n))[1])(rms(x, s)),
    "equations of its own stopped": lambda x, s, w, v, n: (
        lambda z: (lax.stop_gradient(read(clipped(z / n))), delayed(z, w, n))
    )(rms(x, s)),
    "a maximum without eight bits' gradients": lambda x, s, w, v, n: (
        lambda z, m: (lax.stop_gradient(read(clipped(z * jnp.where(m == 0, 1.0, 448 / m)))), m)
    )(rms(x, 0 * s), jnp.max(jnp.abs(rms(x, 0 * s)))),
}


@pytest.mark.parametrize("name", NOT_ALL_READ)
def test_rules_of_what_is_not_differentiated(name):
    """JAX does not run them, and they may say anything."""
    args = X, S, W, V, NUMBER
    function = NOT_ALL_READ[name]
    assert differences(everything(function), everything(jln.fuse(function)), *args) < ROUNDING


def test_a_function_that_asks_for_symbolic_zeros_is_left_as_it_is():
    """Its rule may read whether an operand or a result is differentiated."""

    @jax.custom_vjp
    def function(z, w, t):
        return of_eight(z, w, 32.0), 2 * t

    def backward(kept, cotangents):
        (z, w), (dy, dt) = kept, cotangents
        dt = jnp.float32(5) if isinstance(dt, SymbolicZero) else dt
        return dy @ w.T, jnp.einsum("...k,...n->kn", z, dy), 2 * dt

    def forward(z, w, t):
        return function(z.value, w.value, t.value), (z.value, w.value)

    function.defvjp(forward, backward, symbolic_zeros=True)
    program = lambda x, s, w, t: function(rms(x, s), w, t)[0]  # noqa: E731
    assert differences(everything(program), everything(jln.fuse(program)), X, S, W, NUMBER) < ROUNDING


@pytest.mark.parametrize("function", [delayed, by_current_scales], ids=["delayed", "current"])
def test_a_rule_that_calls_the_function_reads_the_eight_bits_of_the_kernel(function):
    """In forward, when it is differentiated, nothing reads the norm's result but in eight bits."""

    def program(x, s, w):
        return function(rms(x, s), w, *([NUMBER] if function is delayed else []))

    traced = jax.make_jaxpr(lambda *args: jax.vjp(jln.fuse(program), *args)[0])(X, S, W)
    needed, _ = pe.dce_jaxpr(traced.jaxpr, [True])
    assert "custom_vjp_call" not in str(needed) and "f8_e4m3fn" in str(needed)


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
    def function(x, s, w):
        z = rms(x, s)
        jax.debug.callback(lambda z: None, z)
        return by_jax(z, w)

    assert quantised(function, X, S, W)[0] == []


def test_an_argument_that_is_no_float():
    """An index among a function's operands has no cotangent."""

    @jax.custom_vjp
    def chosen(z, w, i):
        return jnp.dot(clipped(z * 16).astype(jnp.float32), w[i]) / 16

    chosen.defvjp(
        lambda z, w, i: (chosen(z, w, i), (z, w, i)),
        lambda kept, dy: (dy @ kept[1][kept[2]].T, jnp.zeros_like(kept[1]), None),
    )

    def function(x, s, w, i):
        return chosen(rms(x, s), jnp.stack([w, 2 * w]), i)

    fused = jln.fuse(function)
    assert quantised(function, X, S, W, 1) == (["rms_norm"], 0)
    both = [
        jax.jit(jax.grad(lambda x, s, w, i, f=f: jnp.sum(jnp.sin(f(x, s, w, i))), (0, 1, 2)))(X, S, W, jnp.int32(1))
        for f in (function, fused)
    ]
    assert max(parted(a, b) for a, b in zip(*both, strict=True)) < ROUNDING
