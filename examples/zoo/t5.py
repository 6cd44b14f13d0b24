"""T5's encoder, in Flax Linen: its own norm, which divides by a root and makes its parameter in setup.

Its attention is that of the other models, without T5's biases by distance.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from zoo.bert import SelfAttention
from zoo.parts import Size


class T5LayerNorm(nn.Module):
    size: Size

    def setup(self) -> None:
        self.weight = self.param("weight", nn.initializers.ones, (self.size.width,), self.size.param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
        return (self.weight.astype(wide.dtype).reshape(1, 1, -1) * y).astype(self.size.dtype)


class T5Layer(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size, of = self.size, self.size.of_linears(use_bias=False)
        x = x + SelfAttention(size, use_bias=False)(T5LayerNorm(size)(x))
        y = T5LayerNorm(size)(x)
        gated = nn.gelu(nn.Dense(size.hidden, **of, name="wi_0")(y)) * nn.Dense(size.hidden, **of, name="wi_1")(y)
        return x + nn.Dense(size.width, **of, name="wo")(gated)


class T5(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.size.layers):
            x = T5Layer(self.size)(x)
        return T5LayerNorm(self.size, name="final_norm")(x)
