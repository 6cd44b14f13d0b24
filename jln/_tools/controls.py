"""Wrong backward rules of LayerNorm that a checker must reject: two that are widely copied, and common slips.

They prove that `check` can fail. Each returns the right value and has one error in its gradients; the terms are those
of `jln._junction.formulas`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jln import reference
from jln._tools.catalogue import EPSILON


def _terms(x, scale):
    mean = jnp.mean(x, -1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + EPSILON)
    return (x - mean) * rstd, rstd, scale[None, :]


def _right(x, scale, dy):
    x_hat, rstd, s = _terms(x, scale)
    g = dy * s
    c1, c2 = (jnp.mean(a, -1, keepdims=True) for a in (g, g * x_hat))
    return rstd * (g - c1 - x_hat * c2), jnp.sum(dy * x_hat, 0), jnp.sum(dy, 0)


def column_sums_for_row_means(x, scale, dy):
    """A wrong rule: the parameters' gradients, sums over rows, stand where the sums over a row belong."""
    x_hat, rstd, s = _terms(x, scale)
    _, dscale, doffset = _right(x, scale, dy)
    h = x.shape[-1]
    return rstd * (dy * s - doffset[None, :] / h - x_hat * dscale[None, :] / h), dscale, doffset


def only_the_diagonal(x, scale, dy):
    """A wrong rule: dx_h is made of dy_h alone, as if a row's elements did not share their statistics."""
    x_hat, rstd, s = _terms(x, scale)
    h = x.shape[-1]
    return dy * s * rstd * (1 - 1 / h - x_hat**2 / h), *_right(x, scale, dy)[1:]


def without_c2(x, scale, dy):
    """A wrong rule: the variance is taken for a constant."""
    _, rstd, s = _terms(x, scale)
    g = dy * s
    return rstd * (g - jnp.mean(g, -1, keepdims=True)), *_right(x, scale, dy)[1:]


def dscale_off_by_a_percent(x, scale, dy):
    dx, dscale, doffset = _right(x, scale, dy)
    return dx, 1.01 * dscale, doffset


def doffset_of_one_row(x, scale, dy):
    return *_right(x, scale, dy)[:2], dy[0]


def cotangent_ignored(x, scale, dy):
    """A wrong rule: right for the loss `y.sum()`, and for no other."""
    return _right(x, scale, jnp.ones_like(dy))


def unbiased_variance(x, scale, dy):
    """A wrong rule: dx is too large by sqrt(H / (H - 1))."""
    h = x.shape[-1]
    dx, dscale, doffset = _right(x, scale, dy)
    return dx * (h / (h - 1)) ** 0.5, dscale, doffset


def _norm_with(rule: Callable) -> Callable:
    """LayerNorm of x [M, H] with a given backward rule."""

    @jax.custom_vjp
    def norm(x, scale, offset):
        return reference.layer_norm(x, scale, offset, epsilon=EPSILON)

    norm.defvjp(lambda x, scale, offset: (norm(x, scale, offset), (x, scale)), lambda saved, dy: rule(*saved, dy))
    return norm


RIGHT = _norm_with(_right)
WRONG = {
    rule.__name__.replace("_", " "): _norm_with(rule)
    for rule in (
        column_sums_for_row_means,
        only_the_diagonal,
        without_c2,
        dscale_off_by_a_percent,
        doffset_of_one_row,
        cotangent_ignored,
        unbiased_variance,
    )
}
