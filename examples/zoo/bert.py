"""BERT, in Flax Linen: norms behind the sums, whose results are read by Linears and by the next sum."""

from __future__ import annotations

import jax
from flax import linen as nn

from zoo.parts import Size, attend, by_heads


class SelfAttention(nn.Module):
    """Attention with a Linear each for queries, keys and values."""

    size: Size
    use_bias: bool = True

    @nn.compact
    def __call__(self, y: jax.Array) -> jax.Array:
        size, of = self.size, self.size.of_linears(use_bias=self.use_bias)
        q, k, v = (by_heads(nn.Dense(size.heads * size.head, **of, name=name)(y), size.head) for name in "qkv")
        return nn.Dense(size.width, **of, name="out")(attend(size, q, k, v))


class BertLayer(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        of, of_norms = self.size.of_linears(), self.size.of_norms(epsilon=1e-12)
        x = nn.LayerNorm(**of_norms, name="attention_norm")(x + SelfAttention(self.size)(x))
        y = nn.Dense(self.size.width, **of)(nn.gelu(nn.Dense(self.size.hidden, **of)(x)))
        return nn.LayerNorm(**of_norms, name="output_norm")(nn.Dropout(0.1)(y, deterministic=True) + x)


class Bert(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(**self.size.of_norms(epsilon=1e-12), name="embeddings_norm")(x)
        x = nn.Dropout(0.1)(x, deterministic=True)
        for _ in range(self.size.layers):
            x = BertLayer(self.size)(x)
        return nn.tanh(nn.Dense(self.size.width, **self.size.of_linears(), name="pooler")(x[:, 0]))
