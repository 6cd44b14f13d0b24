"""Functions that look like norms: by their statistics or where one does not look, as on some rows, or in gradients.

Others have a norm, and something behind it, or around it, that no operator has. What is found is the norm alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import sigmoid, silu
from jax.sharding import PartitionSpec as P

from plain_norms import EPS, R, S, W, X, Z, case, layer, mean, ms, over, rms, squares, var
from proof import H, normal, prove

pytestmark = pytest.mark.usefixtures("promoted_ranks")


EPSILONS = {
    "a lower bound that is far below": case("", lambda x: x * lax.rsqrt(jnp.maximum(ms(x), 1e-12))),
    "a tiny number behind the root": case("", lambda x: x / (jnp.sqrt(ms(x)) + 1e-20), x=X * 1e-20),
    "a number of each feature": case("", lambda x, s: x * lax.rsqrt(ms(x) + s**2)),
    "a negative number": case("", lambda x: x * lax.rsqrt(ms(x) - EPS)),
    "a square": case("rms_norm", lambda x: x * lax.rsqrt(ms(x) + 1e-3**2)),
    "a number inside of the mean": case("", lambda x: x * lax.rsqrt(mean(x * x + EPS))),
    "a large number": case("rms_norm", lambda x, s: x * lax.rsqrt(ms(x) + 30.0) * s),
}


def unit(x):
    """Rows of length 1: each is a norm's, times a number."""
    return over(x, squares(x))


def batch_norm(x):
    d = x - jnp.mean(x, (0, 1), keepdims=True)
    return over(d, jnp.mean(d * d, (0, 1), keepdims=True)) + mean(x)


def group_norm(x, s, b):
    groups = x.reshape(2, 6, 6, 4, 16)
    d = groups - jnp.mean(groups, (1, 2, 4), keepdims=True)
    return over(d, jnp.var(groups, (1, 2, 4), keepdims=True)).reshape(x.shape) * s + b


def over_devices(function):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P(None, None, "d"), out_specs=P(None, None, "d"))


STATISTICS = {
    "multiplied by the root": case("", lambda x: x * jnp.sqrt(ms(x) + EPS)),
    "a row of length 1": case("", lambda x, s: unit(x) * s),
    "a row of length 1 times a root": case("rms_norm", lambda x: unit(x) * np.sqrt(H)),
    "cosine similarity": case("", lambda x, r: jnp.sum(unit(x) * unit(r), -1)),
    "batch norm": case("", batch_norm),
    "group norm": case("", group_norm, x=normal(2, 6, 6, 64), s=normal(64), b=normal(64)),
    "a power of each feature": case("", lambda x: over(x, mean(x ** np.linspace(2.0, 2.0001, H))), x=jnp.abs(X)),
    "running statistics": case("", lambda x, b, s: over(x - b, s) + mean(x), s=jnp.abs(S)),
    "a mean of another array": case("", lambda x, r: over(x - mean(r), var(x))),
    "features that a constant chooses": case("", lambda x: over(x, squares(x * (np.arange(H) < H // 2)) / (H // 2))),
    "means over two axes": case("", lambda x: over(x - mean(x), jnp.mean((x - mean(x)) ** 2, 1, keepdims=True))),
    "squares of what is not scaled": case("", lambda x: over(x - mean(x), ms(x))),
    "a median": case("", lambda x: over(x - jnp.median(x, -1, keepdims=True), var(x))),
    "all but the element itself": case("", lambda x: over(x, (squares(x) - x * x) / (H - 1))),
    "a mean over two rows": case("", lambda x: over(x, jnp.mean(ms(x), 0, keepdims=True)), x=normal(2, H)),
    "a product with ones": case("", lambda x: over(x, (x * x) @ jnp.ones((H, 1)) / H)),
    "added up over devices": case("", over_devices(lambda x: over(x, lax.pmean(ms(x), "d"))), x=normal(2, 3, 4 * H)),
    "of one device": case("rms_norm", over_devices(rms), x=normal(2, 3, 4 * H)),
    "added up over a mapped axis": case("", jax.vmap(lambda x: over(x, lax.pmean(ms(x), "b")), axis_name="b")),
}


def far_penalty(x):
    v = var(x)
    return over(x - mean(x), v + jnp.maximum(v - 1e4, 0))


def rows_of_size(size):
    """Rows with a mean of squares of `size`."""
    return X * np.sqrt(size / np.mean(X * X, -1, keepdims=True))


def far_out(x):
    """A number that is 0 in float64 on all but huge rows."""
    return jnp.exp(-1 / squares(x * 1e-3 * 1e-3 * 1e-3))


# What agrees with a norm on most rows, as float64 hides all else there: it counts on the rows here.
ROWS = {
    "a mean without its sign": case("rms_norm", lambda x: rms(x - jnp.sqrt(mean(x) ** 2)), x=-X),
    "an epsilon that counts on small rows": case("rms_norm", lambda x: x * lax.rsqrt(ms(x) + 1e-12)),
    "a penalty on a large mean": case("", lambda x: over(x, ms(x) + jnp.maximum(mean(x) - 100, 0)), x=X * 100 + 500),
    "a penalty on a large variance": case("", far_penalty, x=X * 100 + 500),
    "a selection that no normal row makes": case("rms_norm", lambda x: jnp.where(ms(x) > 1e6, x, rms(x)) @ W),
    "a gate that is open on small rows": case("rms_norm", lambda x: rms(x) * sigmoid(60 - ms(x)), x=X * 10),
    "a residual that counts on large rows": case("rms_norm_add", lambda x: rms(x) + 1e-10 * x, x=X * 1e6),
    "a fourth power": case("rms_norm_add", lambda x: over(x, ms(x) + 1e-12 * ms(x) * ms(x)) + rms(x), x=X * 1e4),
    "a bell around some rows": case(
        "rms_norm", lambda x: rms(x) * (1 + jnp.exp(-((ms(x) / 7 - 97) ** 2))) @ W, x=rows_of_size(679.0)
    ),
    "a power on rows too large": case("rms_norm", lambda x: rms(x) * 2.0 ** -far_out(x * 1e-41) @ W, x=X * 1e50),
    "a sigmoid on rows too large": case("rms_norm", lambda x: 2 * rms(x) * sigmoid(far_out(x * 1e-41)) @ W, x=X * 1e50),
    "a silu gate that falls again": case("rms_norm", lambda x, z: rms(x) * (silu(z) * sigmoid(60 - z)) @ W, z=Z + 60),
}


@jax.custom_vjp
def own_gradient(x):
    return rms(x)


own_gradient.defvjp(lambda x: (rms(x), x), lambda x, dy: (dy * 2,))


@jax.custom_jvp
def own_statistic(x):
    return ms(x)


own_statistic.defjvp(lambda primals, tangents: (ms(*primals), mean(primals[0] * tangents[0])))


def rounded(a, dtype):
    return a.astype(dtype).astype(a.dtype)


INTEGERS = np.arange(2 * H).reshape(2, H) % 11
GRADIENTS_AND_ROUNDINGS = {
    "a mean behind stop_gradient": case("", lambda x: over(x - lax.stop_gradient(mean(x)), var(x))),
    "a gradient of its own": case("", own_gradient),
    "a statistic with a gradient of its own": case("", lambda x: over(x, own_statistic(x))),
    "a straight-through estimator": case("", lambda x: over(x, ms(x + lax.stop_gradient(jnp.round(x) - x)))),
    "float8": case("", lambda x: over(x, ms(rounded(x, "float8_e4m3fn")))),
    "an integer of one row": case("", lambda x: over(x, rounded(ms(x)[0], "int32")), x=S * 3),
    "reduced precision": case("", lambda x: over(x, lax.reduce_precision(ms(x), 8, 3))),
    "integers": case("", rms, x=INTEGERS),
    "complex numbers": case(
        "", lambda x, r: over(lax.complex(x, r), mean(jnp.real(lax.complex(x, r) * lax.complex(x, -r))))
    ),
}


def read_twice(x, w):
    return rms(x) * silu(jnp.tanh(rms(x) @ w) @ w.T)


# What is behind the norm is left.
BEHIND = {
    "statistics, too": case("rms_norm", lambda x: (rms(x), lax.rsqrt(ms(x) + EPS), ms(x))),
    "mean and centred x, too": case("layer_norm", lambda x: (layer(x), mean(x), x - mean(x))),
    "a scale made of the result": case("rms_norm", lambda x, w, v: rms(x) * (1 + jnp.tanh(rms(x) @ w @ v))),
    "a silu gate made of the result": case("rms_norm", read_twice),
    "its own silu": case("rms_norm", lambda x: silu(rms(x))),
    "a gate of another slope": case("rms_norm", lambda x, z: rms(x) * z * sigmoid(1.702 * z)),
    "a gelu gate": case("rms_norm", lambda x, z: rms(x) * jax.nn.gelu(z)),
    "a scale that is one number": case("rms_norm", rms, s=np.float64(1.3)),
    "a scale of each example": case("rms_norm", rms, s=normal(2, 1, 1)),
    "a scale of x's size": case("rms_norm", rms, s=R),
    "an offset of an RMSNorm": case("rms_norm", lambda x, b: rms(x) + b),
    "a factor of the row": case("rms_norm", lambda x, s: rms(x, s) * ms(x) * 0.1),
    "a norm of a norm": case("rms_norm rms_norm", lambda x: rms(rms(x))),
}


def of_sums(x, y):
    """Two norms of sums, each with a scale that is made of the other sum."""
    a, b = R + x, R + 1 + y
    return rms(a) * jnp.sum(b, (0, 1)), rms(b) * jnp.sum(a, (0, 1))


def kernels_of_linears(x, z, w):
    a, b = rms(x), rms(z)
    p, q = a @ w, b @ w
    return p, q, a @ (w * jnp.sum(q)), b @ (w * jnp.sum(p))


CIRCLES = {
    "a scale made of its rows": case("add_rms_norm", lambda x, r: (rms(r + x) * jnp.sum(r + x, (0, 1)), r + x)),
    "a scale made of the sum": case("rms_norm", lambda x, r: (rms(r + x) * jnp.max(r + x, (0, 1)), r + x)),
    "two sums": case("add_rms_norm rms_norm", of_sums, y=X + 1),
    "a kernel made of a Linear": case(
        "rms_norm", lambda x, w: (rms(x) @ w, rms(x) @ (2 * w * jnp.sum(rms(x) @ w))), linears=True
    ),
    "kernels made of each other's Linears": case("rms_norm rms_norm_linear", kernels_of_linears, linears=True),
}
TABLES = EPSILONS, STATISTICS, ROWS, GRADIENTS_AND_ROUNDINGS, BEHIND, CIRCLES
CASES = {name: one for table in TABLES for name, one in table.items()}


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes_and_no_more_is_found_than_is_there(name):
    prove(CASES[name])
