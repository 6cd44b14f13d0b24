"""Wrong backward rules of LayerNorm that a checker must reject: two that are widely copied, and common slips.

Each returns the right value and has one error in its gradients; the terms are those
of `jln._junction.formulas`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from catalogue import EPSILON
from jln import reference


class Terms(NamedTuple):
    """The terms of the gradients of x [M, H], scale [H] and offset [H], and the gradients."""

    dy: jax.Array
    x_hat: jax.Array
    rstd: jax.Array
    g: jax.Array
    c1: jax.Array
    c2: jax.Array
    dx: jax.Array
    dscale: jax.Array
    doffset: jax.Array

    @classmethod
    def of(cls, x: jax.Array, scale: jax.Array, dy: jax.Array) -> Terms:
        mean = jnp.mean(x, -1, keepdims=True)
        rstd = jax.lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + EPSILON)
        x_hat, g = (x - mean) * rstd, dy * scale[None, :]
        c1, c2 = (jnp.mean(a, -1, keepdims=True) for a in (g, g * x_hat))
        dx = rstd * (g - c1 - x_hat * c2)
        return cls(dy, x_hat, rstd, g, c1, c2, dx, jnp.sum(dy * x_hat, 0), jnp.sum(dy, 0))


def _norm_with(dx: Any = None, dscale: Any = None, doffset: Any = None, dy: Callable = lambda dy: dy) -> Callable:
    """LayerNorm of x [M, H] with a backward rule whose gradients are these functions of `Terms` and H, or right."""

    @jax.custom_vjp
    def norm(x, scale, offset):
        return reference.layer_norm(x, scale, offset, epsilon=EPSILON)

    def backward(saved, cotangent):
        x, scale = saved
        t = Terms.of(x, scale, dy(cotangent))
        right = ((dx, t.dx), (dscale, t.dscale), (doffset, t.doffset))
        return tuple(gradient if wrong is None else wrong(t, cotangent.shape[-1]) for wrong, gradient in right)

    norm.defvjp(lambda x, scale, offset: (norm(x, scale, offset), (x, scale)), backward)
    return norm


RIGHT = _norm_with()
WRONG = {
    # The parameters' gradients, sums over rows, stand where the sums over a row belong.
    "column sums for row means": _norm_with(
        lambda t, h: t.rstd * (t.g - t.doffset[None, :] / h - t.x_hat * t.dscale[None, :] / h)
    ),
    # dx_h is made of dy_h alone, as if a row's elements did not share their statistics.
    "only the diagonal": _norm_with(lambda t, h: t.g * t.rstd * (1 - 1 / h - t.x_hat**2 / h)),
    "without c2": _norm_with(lambda t, h: t.rstd * (t.g - t.c1)),  # the variance is taken for a constant
    "dscale off by a percent": _norm_with(dscale=lambda t, h: 1.01 * t.dscale),
    "doffset of one row": _norm_with(doffset=lambda t, h: t.dy[0]),
    "cotangent ignored": _norm_with(dy=jnp.ones_like),  # right for the loss `y.sum()`, and for no other
    "unbiased variance": _norm_with(lambda t, h: t.dx * (h / (h - 1)) ** 0.5),
}
