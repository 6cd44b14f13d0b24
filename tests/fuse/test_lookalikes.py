"""Functions that look like norms: by their statistics or where one does not look, as on some rows, or in gradients.

Others have a norm, and something behind it, or around it, that no operator has. What is found is the norm alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from plain_norms import EPS, R, S, W, X, Z, layer, mean, ms, over, rms, var
from proof import H, case, normal, prove

pytestmark = pytest.mark.usefixtures("promoted_ranks")


def integer(number, x):
    """A number that an integer has rounded, in x's dtype."""
    return lax.convert_element_type(lax.convert_element_type(lax.full((), number), jnp.int32), x.dtype)


def integer_quotient(x):
    zero = lax.convert_element_type(lax.div(lax.full((), 3, jnp.int32), lax.full((), 50, jnp.int32)), x.dtype)
    return x * lax.rsqrt(ms(x) + zero)


EPSILONS = {
    "a lower bound that is far below": case("", lambda x: x * lax.rsqrt(jnp.maximum(ms(x), 1e-12)), X),
    "a tiny number behind the root": case("", lambda x: x / (jnp.sqrt(ms(x)) + 1e-20), X * 1e-20),
    "a number of each feature": case("", lambda x, e: x * lax.rsqrt(ms(x) + e**2), X, S),
    "a negative number": case("", lambda x: x * lax.rsqrt(ms(x) - EPS), X),
    "a square": case("rms_norm", lambda x: x * lax.rsqrt(ms(x) + 1e-3**2), X),
    "a number inside of the mean": case("", lambda x: x * lax.rsqrt(mean(x * x + EPS)), X),
    "a number that an integer rounds away": case(
        "", lambda x: x * lax.rsqrt(ms(x) + integer(0.06, x) + 1e-3 * ms(x)), X * 1e-3
    ),
    "zero as an integer": case("rms_norm", lambda x: x * lax.rsqrt(ms(x) + integer(0.06, x)), X * 0.2),
    "zero as an integers' quotient": case("rms_norm", integer_quotient, X * 0.2),
    **{
        f"{epsilon}": case("rms_norm", lambda x, s, e=epsilon: x * lax.rsqrt(ms(x) + e) * s, X, S)
        for epsilon in (0.1, 0.5, 2.0, 30.0)
    },
}


def newton(x):
    s = ms(x) + EPS
    guess = 1 / (1 + 0.5 * (s - 1))
    return x * guess * (1.5 - 0.5 * s * guess * guess)


def unit(x):
    """Rows of length 1: each is a norm's, times a number."""
    return over(x, jnp.sum(x * x, -1, keepdims=True))


def spectral_norm(w, u):
    v = w @ u
    v = v / jnp.linalg.norm(v)
    u = w.T @ v
    return w / (v @ w @ (u / jnp.linalg.norm(u)))


def batch_norm(x):
    d = x - jnp.mean(x, (0, 1), keepdims=True)
    return over(d, jnp.mean(d * d, (0, 1), keepdims=True)) + mean(x)


def group_norm(x, s, b):
    groups = x.reshape(2, 6, 6, 4, 16)
    d = groups - jnp.mean(groups, (1, 2, 4), keepdims=True)
    return over(d, jnp.var(groups, (1, 2, 4), keepdims=True)).reshape(x.shape) * s + b


def of_kept(x, seed):
    kept = jax.random.bernoulli(jax.random.key(seed), 0.9, x.shape)
    return over(x, mean(jnp.where(kept, x * x / 0.9, 0)))


def over_devices(function):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P(None, None, "d"), out_specs=P(None, None, "d"))


STATISTICS = {
    "softmax": case("", jax.nn.softmax, X),
    "exponentials over their sum": case("", lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True), X),
    "the largest": case("", lambda x: x / (jnp.max(jnp.abs(x), -1, keepdims=True) + EPS), X),
    "multiplied by the root": case("", lambda x: x * jnp.sqrt(ms(x) + EPS), X),
    "a step of Newton's": case("", newton, X),
    "a row of length 1": case("", lambda x, s: unit(x) * s, X, S),
    "a row of length 1 times a root": case("rms_norm", lambda x: unit(x) * np.sqrt(H), X),
    "cosine similarity": case("", lambda x, y: jnp.sum(unit(x) * unit(y), -1), X, R),
    "weight norm": case("", lambda v, g: g * v / jnp.linalg.norm(v, axis=0, keepdims=True), normal(H, 8), normal(8)),
    "spectral norm": case("", spectral_norm, normal(H, 8), normal(8)),
    "batch norm": case("", batch_norm, X),
    "batch norm over the first axis": case(
        "", lambda x, s, b: over(x - jnp.mean(x, 0), jnp.var(x, 0)) * s + b, normal(H, 6), normal(6), normal(6)
    ),
    "group norm": case("", group_norm, normal(2, 6, 6, 64), normal(64), normal(64)),
    "instance norm": case(
        "",
        lambda x: over(x - jnp.mean(x, (1, 2), keepdims=True), jnp.var(x, (1, 2), keepdims=True)),
        normal(2, 24, 24, 8),
    ),
    "a power of each feature": case(
        "", lambda x, s: over(x, mean(jnp.power(x, jnp.linspace(2.0, 2.0001, H)))) * s, jnp.abs(X), S
    ),
    "an outer product": case("", lambda x, s: jnp.einsum("btk,j->btkj", x * jnp.exp(ms(x)), s[:8]), X, S),
    "running statistics": case(
        "", lambda x, m, v: over(x - m, v) + mean(x), X, normal(H, size=0.1), jnp.abs(normal(H))
    ),
    "a mixture with running statistics": case(
        "", lambda x, v: over(x, 0.9 * v + 0.1 * ms(x)), X, jnp.abs(normal(2, 3, 1))
    ),
    "a mean of another array": case("", lambda x, y: over(x - mean(y), var(x)), X, R),
    "features that a constant chooses": case(
        "", lambda x: over(x, jnp.sum(x * x * (np.arange(H) < H // 2), -1, keepdims=True) / (H // 2)), X
    ),
    "means over two axes": case("", lambda x: over(x - mean(x), jnp.mean((x - mean(x)) ** 2, 1, keepdims=True)), X),
    "a variance over more axes than the mean": case(
        "rms_norm",
        lambda x: over(x - mean(x), jnp.mean((x - mean(x)) ** 2, (1, 2), keepdims=True)),
        normal(2, 4, H),
    ),
    "squares of what is not scaled": case("", lambda x: over(x - mean(x), ms(x)), X),
    "a median": case("", lambda x: over(x - jnp.median(x, -1, keepdims=True), var(x)), X),
    "a cumulative norm": case("", lambda x: over(x, jnp.cumsum(x * x, -1) / jnp.arange(1.0, H + 1)), X),
    "all but the element itself": case("", lambda x: over(x, (jnp.sum(x * x, -1, keepdims=True) - x * x) / (H - 1)), X),
    "a mean over two rows": case("", lambda x: over(x, jnp.mean(ms(x), 0, keepdims=True)), normal(2, H)),
    "what dropout has left": case("", of_kept, X, np.uint32(3)),
    "the transposed": case("", lambda x: over(x, jnp.mean(x * x, 0)[:, None]) @ normal(8, 4), normal(8, 8)),
    "a product with ones": case("", lambda x: over(x, (x * x) @ jnp.ones((H, 1)) / H), X),
    "added up over devices": case("", over_devices(lambda x: over(x, lax.pmean(ms(x), "d"))), normal(2, 3, 4 * H)),
    "of one device": case("rms_norm", over_devices(rms), normal(2, 3, 4 * H)),
    "added up over a mapped axis": case(
        "", jax.vmap(lambda x: over(x, lax.pmean(ms(x), "b")), axis_name="b"), normal(4, 3, H)
    ),
}


def far_penalty(x):
    v = var(x)
    return over(x - mean(x), v + jnp.maximum(v - 1e4, 0))


def rows_of_size(size):
    """Rows with a mean of squares of `size`."""
    return X * np.sqrt(size / np.mean(X * X, -1, keepdims=True))


def far_out(x):
    """A number that is 0 in float64 on all but huge rows, by a factor of several constants."""
    return jnp.exp(-1 / jnp.sum((x * 1e-3 * 1e-3 * 1e-3) ** 2, -1, keepdims=True))


# What agrees with a norm on most rows, as float64 hides all else there: it counts on the rows here.
ROWS = {
    "a mean without its sign": case("rms_norm", lambda x: rms(x - jnp.sqrt(mean(x) ** 2)), -X),
    "an epsilon that counts on small rows": case("rms_norm", lambda x: x * lax.rsqrt(ms(x) + 1e-12), X),
    "a penalty on a large mean": case("", lambda x: over(x, ms(x) + jnp.maximum(mean(x) - 100, 0)), X * 100 + 500),
    "a penalty on a large variance": case("", far_penalty, X * 100 + 500),
    "a selection that no normal row makes": case("rms_norm", lambda x: jnp.where(ms(x) > 1e6, x, rms(x)) @ W, X),
    "a gate that is open on small rows": case("rms_norm", lambda x: rms(x) * jax.nn.sigmoid(60 - ms(x)), X * 10),
    "a residual that counts on large rows": case("rms_norm_add", lambda x: rms(x) + 1e-10 * x, X * 1e6),
    "a fourth power that counts on large rows": case(
        "rms_norm_add", lambda x: over(x, ms(x) + 1e-12 * ms(x) * ms(x)) + rms(x), X * 1e4
    ),
    "a maximum of the norm": case("rms_norm", lambda x: jnp.maximum(rms(x), -100), X),
    "a window of two sigmoids": case(
        "rms_norm",
        lambda x: rms(x) * (1 - jax.nn.sigmoid(ms(x) - 650) * jax.nn.sigmoid(700 - ms(x))) @ W,
        rows_of_size(676.0),
    ),
    "a bell around some rows": case(
        "rms_norm", lambda x: rms(x) * (1 + jnp.exp(-((ms(x) / 7 - 97) ** 2))) @ W, rows_of_size(679.0)
    ),
    "a sum with a bell": case(
        "rms_norm_add", lambda x: (rms(x) + x * jnp.exp(-((ms(x) / 7 - 97) ** 2))) @ W, rows_of_size(679.0)
    ),
    "a factor that grows with huge rows": case(
        "rms_norm", lambda x: rms(x) * (1 + ms(x) * 1e-6 * 1e-6 * 1e-6 * 1e-6) @ W, rows_of_size(1e24)
    ),
    "a power that counts on huge rows": case("rms_norm", lambda x: rms(x) * jnp.power(2.0, -far_out(x)) @ W, X * 1e9),
    "a power on larger rows than are tried": case(
        "rms_norm", lambda x: rms(x) * jnp.power(2.0, -far_out(x * 1e-41)) @ W, X * 1e50
    ),
    "a sigmoid on larger rows than are tried": case(
        "rms_norm", lambda x: 2 * rms(x) * jax.nn.sigmoid(far_out(x * 1e-41)) @ W, X * 1e50
    ),
    "a silu gate that falls again": case(
        "rms_norm",
        lambda x, z: rms(x) * (z * jax.nn.sigmoid(z) * jax.nn.sigmoid(60 - z)) @ W,
        *(X, Z + 60),
    ),
    "a silu gate that is divided": case(
        "rms_norm", lambda x, z: rms(x) * (z * jax.nn.sigmoid(z) / (1 + jnp.exp(z - 60))) @ W, X, Z + 60
    ),
}


@jax.custom_vjp
def own_gradient(x):
    return rms(x)


own_gradient.defvjp(lambda x: (rms(x), x), lambda x, dy: (dy * 2,))


@jax.custom_jvp
def own_statistic(x):
    return ms(x)


own_statistic.defjvp(lambda primals, tangents: (ms(*primals), mean(primals[0] * tangents[0])))
INTEGERS = np.arange(2 * H).reshape(2, H) % 11
GRADIENTS_AND_ROUNDINGS = {
    "a mean behind stop_gradient": case("", lambda x: over(x - lax.stop_gradient(mean(x)), var(x)), X),
    "a norm of a difference with such a mean": case("rms_norm", lambda x: rms(x - lax.stop_gradient(mean(x))), X),
    "a gradient of its own": case("", own_gradient, X),
    "a statistic with a gradient of its own": case("", lambda x: over(x, own_statistic(x)), X),
    "a straight-through estimator": case("", lambda x: over(x, ms(x + lax.stop_gradient(jnp.round(x) - x))), X),
    "float8": case("", lambda x: over(x, ms(x.astype(jnp.float8_e4m3fn).astype(x.dtype))), X),
    "float8 of one row": case("", lambda x: over(x, jnp.mean(x * x).astype(jnp.float8_e4m3fn).astype(x.dtype)), S * 3),
    "an integer of one row": case("", lambda x: over(x, jnp.mean(x * x).astype("int32").astype(x.dtype)), S * 3),
    "an integer of one row in two axes": case(
        "", lambda x: over(x, ms(x).astype("int32").astype(x.dtype)), normal(1, H) * 3
    ),
    "reduced precision": case("", lambda x: over(x, lax.reduce_precision(ms(x), 8, 3)), X),
    "integers": case("", rms, INTEGERS),
    "integers and an integer mean": case("", lambda x: x // (jnp.sum(x * x, -1, keepdims=True) // H + 1), INTEGERS),
    "complex numbers": case(
        "", lambda x, y: over(lax.complex(x, y), mean(jnp.real(lax.complex(x, y) * lax.complex(x, -y)))), X, R
    ),
    "squares of complex numbers": case("", lambda x, y: rms(lax.complex(x, y)), X, R),
    "a norm times a complex number": case(
        "rms_norm", lambda x: jnp.real(rms(x) * (1 + 2j)) + jnp.real((x + 1j) * (1 + 2j)), X
    ),
}


def read_twice(x, w):
    return rms(x) * jax.nn.silu(jnp.tanh(rms(x) @ w) @ w.T)


# What is behind the norm is left.
BEHIND = {
    "statistics, too": case("rms_norm", lambda x: (rms(x), lax.rsqrt(ms(x) + EPS), ms(x)), X),
    "mean and centred x, too": case("layer_norm", lambda x: (layer(x), mean(x), x - mean(x)), X),
    "a scale made of the result": case(
        "rms_norm", lambda x, w, v: rms(x) * (1 + jnp.tanh(rms(x) @ w @ v)), X, W, normal(4, H)
    ),
    "a silu gate made of the result": case("rms_norm", read_twice, X, W),
    "its own silu": case("rms_norm", lambda x: jax.nn.silu(rms(x)), X),
    "a gate of another slope": case("rms_norm", lambda x, z: rms(x) * z * jax.nn.sigmoid(1.702 * z), X, R),
    "a gelu gate": case("rms_norm", lambda x, z: rms(x) * jax.nn.gelu(z), X, R),
    "a gate of two arrays": case("rms_norm", lambda x, z: rms(x) * z * jax.nn.sigmoid(z + x), X, R),
    "a gate's absolute value": case("rms_norm", lambda x, z: rms(x) * jnp.abs(jax.nn.silu(z)), X, R),
    "a scale that is one number": case("rms_norm", rms, X, np.float64(1.3)),
    "a scale of each example": case("rms_norm", rms, X, normal(2, 1, 1)),
    "a scale of x's size": case("rms_norm", rms, X, R),
    "a scale's absolute value": case("layer_norm", lambda x, s: layer(x) * jnp.abs(s), X, S),
    "an offset of an RMSNorm": case("rms_norm", lambda x, b: rms(x) + b, X, S),
    "a factor of the row": case("rms_norm", lambda x, s: rms(x, s) * ms(x) * 0.1, X, S),
    "a mean that is subtracted twice": case("layer_norm", lambda x: layer(x - mean(x)), X),
    "a norm of a norm": case("rms_norm rms_norm", lambda x: rms(rms(x)), X),
    "an even function of x": case("rms_norm", lambda x: rms(jnp.abs(x)), X),
}


def of_sums(x, y, norm=lambda x: x):
    """Two norms of sums, each with a scale that is made of the other sum."""
    a, b = R + norm(x), R + 1 + norm(y)
    return rms(a) * jnp.sum(b, (0, 1)), rms(b) * jnp.sum(a, (0, 1))


def of_three_sums(x, y, z):
    sums = x + R, y + R, z + R
    return [rms(p) * jnp.sum(q, (0, 1)) for p, q in zip(sums, sums[1:] + sums[:1], strict=True)]


def kernels_of_linears(x, z, w):
    a, b = rms(x), rms(z)
    p, q = a @ w, b @ w
    return p, q, a @ (w * jnp.sum(q)), b @ (w * jnp.sum(p))


def a_kernel_of_another(x, z, w):
    a, b = rms(x), rms(z)
    p, q = a @ w, b @ w
    return p, q, a @ (w * jnp.sum(q)), b @ w + jnp.sum(p)


CIRCLES = {
    "a scale made of the sum over rows": case(
        "add_rms_norm", lambda x, r: (rms(r + x) * jnp.sum(r + x, (0, 1)), r + x), X, R
    ),
    "a scale made of the sum": case("rms_norm", lambda x, r: (rms(r + x) * jnp.max(r + x, (0, 1)), r + x), X, R),
    "two sums": case("add_rms_norm rms_norm", of_sums, X, X + 1),
    "two sums of norms": case(
        "rms_norm_add_rms_norm rms_norm_add rms_norm", lambda x, y, s: of_sums(x, y, lambda a: rms(a, s)), X, X + 1, S
    ),
    "three sums": case("add_rms_norm add_rms_norm rms_norm", of_three_sums, X, X + 1, X + 2),
    "a kernel made of a Linear": case(
        "rms_norm", lambda x, w: (rms(x) @ w, rms(x) @ (2 * w * jnp.sum(rms(x) @ w))), X, W, linears=True
    ),
    "kernels made of each other's Linears": case("rms_norm rms_norm_linear", kernels_of_linears, X, R, W, linears=True),
    "a kernel made of another's Linear": case(
        "rms_norm_linear rms_norm_linear", a_kernel_of_another, X, R, W, linears=True
    ),
    "a bias made of the sum": case(
        "add_rms_norm", lambda x, r, w, b: (rms(r + x) @ w + b * jnp.sum(r + x), r + x), X, R, W, S[:4], linears=True
    ),
}
TABLES = EPSILONS, STATISTICS, ROWS, GRADIENTS_AND_ROUNDINGS, BEHIND, CIRCLES
CASES = {name: case for table in TABLES for name, case in table.items()}


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_and_no_more_is_found_than_is_there(name):
    prove(CASES[name])
