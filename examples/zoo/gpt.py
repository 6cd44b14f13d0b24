"""GPT-2, in Flax NNX: LayerNorms, biases, and one Linear for queries, keys and values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.parts import Size, attend, features
from zoo.trunk import PreNormBlock, Trunk


class JointAttention(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        inner, of = size.heads * size.head, size.of_linears(rngs=rngs)
        self.size = size
        self.qkv = nnx.Linear(size.width, 3 * inner, **of)
        self.out = nnx.Linear(inner, size.width, **of)

    def __call__(self, y: jax.Array) -> jax.Array:
        # Heads first: neighbouring features are one head's, so that devices can share the heads.
        qkv = features(self.qkv(y)).reshape(*y.shape[:-1], self.size.heads, 3, self.size.head)
        return self.out(attend(self.size, *jnp.unstack(qkv, axis=-2), is_causal=True))


class Mlp(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        self.up = nnx.Linear(size.width, size.hidden, **size.of_linears(rngs=rngs))
        self.down = nnx.Linear(size.hidden, size.width, **size.of_linears(rngs=rngs))

    def __call__(self, y: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(features(self.up(y))))


def gpt(size: Size, rngs: nnx.Rngs | None = None) -> Trunk:
    rngs = rngs or nnx.Rngs(0)

    def norm() -> nnx.LayerNorm:
        return nnx.LayerNorm(size.width, epsilon=1e-5, **size.of_norms(rngs=rngs))

    return Trunk([PreNormBlock(norm, JointAttention(size, rngs), Mlp(size, rngs)) for _ in range(size.layers)], norm())
