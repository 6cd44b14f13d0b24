"""A parallel block, in Equinox: attention and MLP read the same norm, and all queries share one head of keys."""

from __future__ import annotations

import equinox as eqx
import jax

from zoo.parts import Size, attend, by_heads


class ParallelBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    size: Size = eqx.field(static=True)

    def __init__(self, size: Size, key: jax.Array):
        keys, of, inner = jax.random.split(key, 6), {"dtype": size.dtype}, size.heads * size.head
        self.size = size
        self.norm = eqx.nn.LayerNorm(size.width, **of)
        self.q = eqx.nn.Linear(size.width, inner, use_bias=False, key=keys[0], **of)
        self.k = eqx.nn.Linear(size.width, size.head, use_bias=False, key=keys[1], **of)  # one for all queries
        self.v = eqx.nn.Linear(size.width, size.head, use_bias=False, key=keys[2], **of)
        self.out = eqx.nn.Linear(inner, size.width, use_bias=False, key=keys[3], **of)
        self.up = eqx.nn.Linear(size.width, size.hidden, key=keys[4], **of)
        self.down = eqx.nn.Linear(size.hidden, size.width, key=keys[5], **of)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block to x [T, H], one example."""
        y = jax.vmap(self.norm)(x)
        q, k, v = (by_heads(jax.vmap(linear)(y), self.size.head) for linear in (self.q, self.k, self.v))
        attended = jax.vmap(self.out)(attend(self.size, q, k, v, is_causal=True))
        return x + attended + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(y)))


class Parallel(eqx.Module):
    blocks: list[ParallelBlock]
    norm: eqx.nn.LayerNorm

    def __init__(self, size: Size):
        self.blocks = [ParallelBlock(size, key) for key in jax.random.split(jax.random.key(0), size.layers)]
        self.norm = eqx.nn.LayerNorm(size.width, dtype=size.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the model to x [B, T, H]."""

        def of_example(x: jax.Array) -> jax.Array:
            for block in self.blocks:
                x = block(x)
            return jax.vmap(self.norm)(x)

        return jax.vmap(of_example)(x)
