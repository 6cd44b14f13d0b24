"""Qwen 3's mixture of experts, in Flax NNX: a router and all experts read one norm's result.

The experts are few, and each has all tokens: which of them a token takes is no matter of norms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.parts import Size
from zoo.trunk import Attention, PreNormBlock, Trunk

EXPERTS = 8


class Experts(nnx.Module):
    """A router, which is a Linear of few features, and experts, whose kernels are one parameter each."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        width, hidden = size.width, size.hidden // EXPERTS
        draw = nnx.initializers.lecun_normal()
        self.dtype = size.dtype
        self.router = nnx.Linear(width, EXPERTS, **size.of_linears(use_bias=False, rngs=rngs))
        self.gate = nnx.Param(draw(rngs.params(), (EXPERTS, width, hidden), size.param_dtype))
        self.up = nnx.Param(draw(rngs.params(), (EXPERTS, width, hidden), size.param_dtype))
        self.down = nnx.Param(draw(rngs.params(), (EXPERTS, hidden, width), size.param_dtype))

    def __call__(self, y: jax.Array) -> jax.Array:
        weight = jax.nn.softmax(self.router(y))
        y = y.astype(self.dtype)
        gate, up, down = (a[...].astype(self.dtype) for a in (self.gate, self.up, self.down))
        made = jax.nn.silu(jnp.einsum("bth,ehf->btef", y, gate)) * jnp.einsum("bth,ehf->btef", y, up)
        return jnp.einsum("btef,efh->bth", made * weight[..., None], down)


def qwen(size: Size) -> Trunk:
    rngs = nnx.Rngs(0)

    def norm(features: int = size.width) -> nnx.RMSNorm:
        return nnx.RMSNorm(features, epsilon=1e-6, **size.of_norms(rngs=rngs))

    blocks = [PreNormBlock(norm, Attention(size, rngs, norm), Experts(size, rngs)) for _ in range(size.layers)]
    return Trunk(blocks, norm())
