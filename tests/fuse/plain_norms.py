"""Norms in plain jnp, of which the tests write variants, and arrays for them."""

import jax.numpy as jnp
from jax import lax

from proof import H, normal

EPS = 1e-6
# [2, 3, H]: more rows than one, of two axes.
X, R, Z = normal(2, 3, H), normal(2, 3, H) * 0.7 + 0.1, normal(2, 3, H) * 0.5 - 0.2
# Parameters, an upward and a downward matrix.
S, B, W, V, C = normal(H), normal(H) * 0.3, normal(H, 4), normal(4, H), normal(4)


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


def ms(x):
    return mean(x * x)


def rms(x, s=None):
    y = x * lax.rsqrt(ms(x) + EPS)
    return y if s is None else y * s


def layer(x):
    return rms(x - mean(x))
