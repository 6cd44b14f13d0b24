"""A Perceiver, in Haiku: few latents read many tokens, with a norm for the queries and another for what is read."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from zoo.parts import Size, attend, by_heads

FEWER = 4  # times as many tokens as latents


def norm() -> hk.LayerNorm:
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)


class Attend(hk.Module):
    """Attention of latents to themselves or, where there are any, to inputs; and an MLP."""

    def __init__(self, size: Size, name: str):
        super().__init__(name)
        self.size = size

    def __call__(self, latents: jax.Array, inputs: jax.Array | None = None) -> jax.Array:
        size, inner = self.size, self.size.heads * self.size.head
        y = norm()(latents)
        read = y if inputs is None else norm()(inputs)
        q, k, v = (by_heads(hk.Linear(inner)(a), size.head) for a in (y, read, read))
        latents = latents + hk.Linear(size.width)(attend(size, q, k, v))
        hidden = jax.nn.gelu(hk.Linear(size.hidden)(norm()(latents)))
        return latents + hk.Linear(size.width)(hidden)


def perceiver(size: Size) -> hk.Transformed:
    def of(x: jax.Array) -> jax.Array:
        shape = (max(1, size.tokens // FEWER), size.width)
        latents = hk.get_parameter("latents", shape, x.dtype, hk.initializers.TruncatedNormal(0.02))
        latents = Attend(size, "cross")(jnp.tile(latents[None], (x.shape[0], 1, 1)), x)
        for i in range(size.layers):
            latents = Attend(size, f"self_{i}")(latents)
        return latents

    return hk.without_apply_rng(hk.transform(of))
