"""The ways in which people write norms, gates, sums and Linears: each is found, and nothing changes."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from plain_norms import EPS, S, W, X, case, layer, mean, ms, over, rms
from proof import H, normal, prove

pytestmark = pytest.mark.usefixtures("promoted_ranks")
X32, S32, X16 = X.astype("float32"), S.astype("float32"), X.astype(jnp.bfloat16)
HAIKU = hk.transform(lambda x: hk.RMSNorm(-1)(x))
OF_768 = normal(4, 768, dtype="float32")


def keras(x, s, b):
    """Keras 3: statistics by ops.moments, and one product and one sum per element."""
    m = mean(x)
    inv = lax.rsqrt(mean(jnp.square(x)) - jnp.square(m) + 1e-3) * jnp.reshape(s, (1, 1, H))
    return x * inv + (jnp.reshape(b, (1, 1, H)) - m * inv)


def penzai(x, s, b):
    """Penzai: each position by vmap, standardised, then scaled and shifted by name."""
    y = jax.vmap(jax.vmap(lambda row: (row - jnp.mean(row)) * lax.rsqrt(jnp.var(row) + EPS)))(x)
    y = jax.vmap(lambda column, s: column * s, (-1, 0), -1)(y, s)
    return jax.vmap(lambda column, b: column + b, (-1, 0), -1)(y, b)


def gemma(x, s):
    x = jnp.asarray(x * jnp.reciprocal(jnp.sqrt(mean(jnp.square(x)) + EPS)))
    return x * (1 + jnp.expand_dims(s, axis=range(len(x.shape) - 1)))


def with_turned_scale(x, s):
    return jnp.transpose(lax.dot_general(rms(x), s, (((), ()), ((2, 1), (0, 1)))), (2, 1, 0))


def cast_in_front_of_scale(x, s):
    return s.astype(x.dtype) * rms(x.astype("float32")).astype(x.dtype)


def cast_back_by_products(x, s, w):
    y = rms(x.astype("float32"), s)
    return y.astype(w.dtype) @ w, y.astype(w.dtype) @ (w + 1)


NORMS = {
    "Keras": case("layer_norm", keras),
    "Penzai": case("layer_norm", penzai),
    "Gemma": case("rms_norm", gemma),
    "Flax": case("rms_norm", lambda x, s: linen.RMSNorm().apply({"params": {"scale": s}}, x)),
    "Haiku": case("rms_norm", lambda x, s: HAIKU.apply({"rms_norm": {"scale": s}}, None, x)),
    "Equinox": case("rms_norm", lambda x: jax.vmap(jax.vmap(eqx.nn.RMSNorm(H, dtype="float64")))(x)),
    # The scale, to which an offset of 0 is added, by a product without a sum.
    "MaxText": case("rms_norm", lambda x, s: jnp.einsum("...k,k->...k", rms(x), (s + 0.0).astype(x.dtype)), s=S32),
    "a scale of each head": case(
        "rms_norm", lambda x, s: jnp.einsum("bthd,hd->bthd", rms(x), s), x=normal(2, 3, 4, H), s=normal(4, H)
    ),
    "a scale whose axes are turned": case("rms_norm", with_turned_scale, x=normal(2, 4, H), s=normal(H, 4)),
    "keras_hub's Llama": case("rms_norm", lambda x, s: over(x, mean(jnp.power(x, 2.0))) * s),
    "a length": case("rms_norm", lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True) * H**0.5),
    "axes that are not kept": case("rms_norm", lambda x: x * lax.rsqrt(jnp.mean(x * x, -1) + EPS)[:, :, None]),
    "rows by vmap": case("rms_norm", jax.vmap(jax.vmap(lambda x: x / jnp.sqrt(x @ x / H + EPS)))),
    "1 / 768 in float32": case("rms_norm", lambda x: over(x, jnp.sum(x * x, -1, keepdims=True) * (1 / 768)), x=OF_768),
    "a product that is written twice": case("rms_norm", lambda x, s: over(x * s, ms(x * s))),
    "an upcast": case("rms_norm", lambda x, s: rms(x.astype("float64"), s).astype(x.dtype), x=X32, s=S32),
    "a cast in front of the scale": case("rms_norm", cast_in_front_of_scale, x=X16, s=S32),
    "a cast in front of every product": case("rms_norm", cast_back_by_products, x=X16, s=S32, w=W.astype(X16.dtype)),
    "groups": case(
        "rms_norm", lambda x, s: rms(x.reshape(3, 4, H), s).reshape(3, 4 * H), x=normal(3, 4 * H), s=normal(4, H)
    ),
    "adaLN": case(
        "layer_norm", lambda x, s, b: layer(x, 1 + s[:, None], b[:, None]), s=normal(2, H), b=normal(2, H) + 0.1
    ),
    "one feature": case("", lambda x, w: rms(x) @ w, x=normal(4, 1), w=normal(1, 3)),
    "no features": case("", rms, x=normal(4, 0)),
    "a row of rank one": case("rms_norm", rms, x=normal(H), s=S),
    "a row of rank two": case("layer_norm", layer, x=normal(1, H), s=S),
    "the transposed of a square": case("rms_norm", lambda x: rms(x).T, x=normal(H, H)),
    "an x that is a constant": case("rms_norm", lambda s: rms(jnp.asarray(X)) * s),
    "a product with ones": case("layer_norm", lambda x: over(x - mean(x), (x - mean(x)) ** 2 @ jnp.ones((H, 1)) / H)),
    "a variance of 0 or more": case("layer_norm", lambda x: over(x - mean(x), jnp.maximum(ms(x) - mean(x) ** 2, 0))),
}


def summed(total, *parameters):
    """The norm of a sum, and the sum, which a residual stream goes on with."""
    return rms(total, *parameters), total


def layer_summed(total, *parameters):
    return layer(total, *parameters), total


def constrained(a):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return lax.with_sharding_constraint(a, NamedSharding(mesh, P("data")))


# Rows of 16 in each of two examples, and a gate of each example.
OF_EXAMPLES = {"x": normal(2, 16, H), "r": normal(2, 16, H) * 0.7, "g": normal(2, 1, H)}
KEPT = np.asarray([[[1.0]], [[0.0]]])
SUMS = {
    "a sum": case("add_rms_norm", lambda x, r, s: summed(r + x, s)),
    "a sum that the norm alone reads": case("add_layer_norm", lambda x, r, s, b: layer(r + x, s, b)),
    "a Linear's bias": case("add_layer_norm", lambda x, v, r, b, w: layer_summed(r + (x @ w @ v + b), b)),
    "a bias behind the sum": case("add_layer_norm", lambda x, v, r, b, w: layer_summed(r + x @ w @ v + b, b)),
    "a difference": case("add_rms_norm", lambda x, r: summed(r - x)),
    "a gate of each example": case(
        "add_layer_norm", lambda x, r, b, g: layer_summed(r + g * (x + b), b, b), **OF_EXAMPLES
    ),
    "such a gate, rows in one axis": case(
        "add_rms_norm", lambda x, r, s, g: (rms((r + g * x).reshape(-1, H), s), r + g * x), **OF_EXAMPLES
    ),
    "layer scale": case("add_rms_norm", lambda x, r, s: summed(r + s * x)),
    "stochastic depth": case("add_rms_norm", lambda x, r, kept: summed(r + x * kept / 0.9), kept=KEPT),
    "a scaled residual": case("add_rms_norm", lambda x, r: summed(r + 0.1 * x)),
    "rows in one axis": case("add_rms_norm", lambda x, r, s: (rms((r + x).reshape(-1, H), s), r + x)),
    "a constraint": case("add_rms_norm", lambda x, r, s: summed(constrained(r + x), s)),
    "both sides": case("rms_norm_add_rms_norm", lambda x, r, s, t: summed(r + rms(x, s), t)),
    "both sides, around zero": case("rms_norm_add_rms_norm", lambda x, r, s, t: summed(r + rms(x) * (1 + s), 1 + t)),
    "LayerNorms on both sides": case(
        "layer_norm_add layer_norm", lambda x, r, s, b, t: layer_summed(r + layer(x, s, b), t, b)
    ),
    "a gated norm": case("rms_norm_add_rms_norm", lambda x, r, s, g: summed(r + g * rms(x, s), s), **OF_EXAMPLES),
    "a gated LayerNorm": case(
        "layer_norm add_layer_norm", lambda x, r, s, b, g: layer_summed(r + g * layer(x, s, b), s, b), **OF_EXAMPLES
    ),
    "a norm of the branch alone": case("rms_norm_add", lambda x, r, s: r + rms(x, s)),
    "a sum of three": case("add_rms_norm", lambda x, r, z, s: summed(r + x + z, s)),
}


def several_linears(x, r, s, w, c):
    y, total = summed(r + x, s)
    return y @ w + c, jax.nn.silu(y @ (w + 1)), total


def without_offsets(x, r, s, w):
    total = r + layer(x, s)
    return layer(total, s) @ w, total


GATES_AND_LINEARS = {
    "a silu gate": case("rms_norm_gated", lambda x, z, s: rms(x, s) * jax.nn.silu(z)),
    "a silu gate in front of the scale": case("rms_norm_gated", lambda x, z, s: rms(x) * (z * jax.nn.sigmoid(z)) * s),
    "a silu gate beside others": case(
        "rms_norm", lambda x, z, s: jnp.concatenate([rms(x, s) * jax.nn.silu(z), rms(x, s)])
    ),
    "a LayerNorm's gate": case("layer_norm", lambda x, z, s, b: layer(x, s, b) * jax.nn.silu(z)),
    "a Linear with a bias": case("layer_norm_linear", lambda x, s, b, w, c: layer(x, s, b) @ w + c, linears=True),
    "a kernel first": case(
        "rms_norm_linear", lambda x, s, w: lax.dot_general(w, rms(x, s), (((0,), (2,)), ((), ()))), linears=True
    ),
    "a transposed kernel": case(
        "rms_norm_linear", lambda x, s, v: jnp.einsum("bsh,nh->bsn", rms(x, s), v), linears=True
    ),
    "several Linears behind a sum": case("add_rms_norm_linear", several_linears, linears=True),
    "a Linear behind norms without offsets": case("layer_norm_add layer_norm_linear", without_offsets, linears=True),
}
WAYS = NORMS | SUMS | GATES_AND_LINEARS


@pytest.mark.parametrize("name", WAYS)
def test_it_is_found_and_nothing_changes(name):
    prove(WAYS[name])


def primitives(name):
    function, args, *_ = WAYS[name]
    return jax.make_jaxpr(jln.fuse(function))(*args).eqns


def test_a_result_that_every_product_casts_back_is_written_as_the_products_read_it():
    casts = [e for e in primitives("a cast in front of every product") if e.primitive.name == "convert_element_type"]
    assert [e for e in casts if e.outvars[0].aval.shape == X.shape] == []


@pytest.mark.parametrize("name", ["MaxText", "a scale of each head", "a scale whose axes are turned"])
def test_a_scale_by_a_product_without_a_sum_is_the_operators(name):
    (operator,) = (e for e in primitives(name) if e.primitive.name.startswith("jln_"))
    assert len(operator.invars) == 2


def test_a_product_without_a_sum_stays_one():
    """Such a product is computed as it is written where no operator takes its place."""
    function = lambda x, s: jnp.einsum("...k,k->...k", jnp.sin(x), s) + rms(x)  # noqa: E731
    assert "dot_general" in str(jax.make_jaxpr(jln.fuse(function))(X, S))
