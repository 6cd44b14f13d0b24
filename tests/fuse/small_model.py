"""A small model whose layers have LayerNorms and sums, for tests of what may be around it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from proof import normal, parted

# [4, 4, 16]: examples for four devices. Two norms a block and one behind: all but the first read a sum.
H, BLOCKS = 16, 3
ALL = {"layer_norm": 1, "add_layer_norm": 6}
IN_BODIES = {"layer_norm": 4, "add_layer_norm": 3}  # the first norm of a body reads its argument, and the last one too
IN_ONE_BODY = {"layer_norm": 2, "add_layer_norm": 1}
IN_A_SCAN = {"layer_norm_linear": 1, "add_layer_norm_linear": 1, "layer_norm": 1}  # which keeps what its norms read
X = normal(4, 4, H)


def parameters():
    shapes = {"s": (2, H), "b": (2, H), "u": (H, 8), "v": (8, H), "c": (H,)}
    blocks = [{n: normal(*of) * 0.3 + 0.1 * i for n, of in shapes.items()} for i in range(BLOCKS)]
    return {"blocks": blocks, "s": normal(H), "b": normal(H), "out": normal(H, 4)}


PARAMETERS = parameters()


def norm(x, s, b):
    d = x - jnp.mean(x, -1, keepdims=True)
    return d * lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-6) * s + b


def block(p, x):
    x = x + jnp.tanh(norm(x, p["s"][0], p["b"][0]) @ p["u"]) @ p["v"] + p["c"]
    return x + jnp.sin(norm(x, p["s"][1], p["b"][1]) @ p["u"]) @ p["v"]


def head(p, x):
    return jnp.mean((norm(x, p["s"], p["b"]) @ p["out"]) ** 2)


def model(p, x, block=block):
    for of in p["blocks"]:
        x = block(of, x)
    return head(p, x)


def scanned(p, x, block=block):
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *p["blocks"])
    x, _ = lax.scan(lambda x, of: (block(of, x), None), x, stacked)
    return head(p, x)


def mesh(*shape, axis_type=AxisType.Auto):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


def apart(got, wanted):
    """Return the largest difference of two trees' arrays, relative to an array's largest element."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    return max(parted(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
