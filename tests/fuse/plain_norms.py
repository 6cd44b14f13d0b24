"""Norms in plain jnp, of which the tests write variants, arrays for them, and a small model that has them."""

import collections
import inspect

import jax
import jax.numpy as jnp
from jax import lax

from proof import Case, H, normal

EPS = 1e-6
# [2, 3, H]: more rows than one, of two axes.
X, R, Z = normal(2, 3, H), normal(2, 3, H) * 0.7 + 0.1, normal(2, 3, H) * 0.5 - 0.2
# Parameters, an upward and a downward matrix.
S, B, W, V, C = normal(H), normal(H) * 0.3, normal(H, 4), normal(4, H), normal(4)
ARRAYS = {"x": X, "r": R, "z": Z, "s": S, "t": S + 1, "b": B, "w": W, "v": V, "c": C}


def case(finds, function, *, linears=False, **arrays):
    """Return a case of a function of arrays: those given, and others that `ARRAYS` has by its arguments' names.

    finds: the names of the operators that fuse is to find in it.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.name in arrays or p.default is p.empty]
    args = [(ARRAYS | arrays)[name] for name in names]
    return Case(function, args, dict(collections.Counter(finds.split())), {"linears": linears})


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def ms(x):
    return mean(x * x)


def squares(x):
    return jnp.sum(x * x, -1, keepdims=True)


def var(x):
    return jnp.var(x, -1, keepdims=True)


def over(x, statistic):
    return x * lax.rsqrt(statistic + EPS)


def rms(x, s=None):
    y = over(x, ms(x))
    return y if s is None else y * s


def layer(x, s=None, b=None):
    y = rms(x - mean(x), s)
    return y if b is None else y + b


# A small model: two norms a block and one behind, all but the first of which read a sum.
WIDTH, BLOCKS = 16, 2
EXAMPLES = normal(4, 4, WIDTH)  # for four devices
ALL = {"layer_norm": 1, "add_layer_norm": 2 * BLOCKS}
_SHAPES = {"s": (2, WIDTH), "b": (2, WIDTH), "u": (WIDTH, 8), "v": (8, WIDTH), "c": (WIDTH,)}
_BLOCKS = [{n: normal(*shape) * 0.3 + 0.1 * i for n, shape in _SHAPES.items()} for i in range(BLOCKS)]
PARAMETERS = {"blocks": _BLOCKS, "s": normal(WIDTH), "b": normal(WIDTH), "out": normal(WIDTH, 4)}


def block(p, x):
    x = x + jnp.tanh(layer(x, p["s"][0], p["b"][0]) @ p["u"]) @ p["v"] + p["c"]
    return x + jnp.sin(layer(x, p["s"][1], p["b"][1]) @ p["u"]) @ p["v"]


def head(p, x):
    return jnp.mean((layer(x, p["s"], p["b"]) @ p["out"]) ** 2)


def model(p, x, block=block):
    for of in p["blocks"]:
        x = block(of, x)
    return head(p, x)


def scanned(p, x, block=block):
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *p["blocks"])
    x, _ = lax.scan(lambda x, of: (block(of, x), None), x, stacked)
    return head(p, x)
