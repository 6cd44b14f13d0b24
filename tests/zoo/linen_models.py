"""Flax Linen: BERT with norms behind the sums, a ViT with scan and an attending head, T5, a diffusion transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zoo.common import LARGE, Client, Size, attention, by_heads

PROBES = 1


def options(size: Size) -> dict:
    return {"dtype": size.dtype, "param_dtype": size.param_dtype}


class SelfAttention(nn.Module):
    size: Size
    use_bias: bool = True

    @nn.compact
    def __call__(self, y: jax.Array) -> jax.Array:
        size, of = self.size, {"use_bias": self.use_bias, **options(self.size)}
        q, k, v = (by_heads(nn.Dense(size.heads * size.head, **of, name=name)(y), size.head) for name in "qkv")
        return nn.Dense(size.width, **of, name="out")(attention(size, q, k, v))


class BertLayer(nn.Module):
    """A layer in which a norm's result is read by Linears and by the sum in front of the next norm."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        of = options(self.size)
        x = nn.LayerNorm(epsilon=1e-12, **of, name="attention_norm")(x + SelfAttention(self.size)(x))
        y = nn.Dense(self.size.width, **of)(nn.gelu(nn.Dense(self.size.hidden, **of)(x)))
        return nn.LayerNorm(epsilon=1e-12, **of, name="output_norm")(nn.Dropout(0.1)(y, deterministic=True) + x)


class Bert(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.LayerNorm(epsilon=1e-12, **options(self.size), name="embeddings_norm")(x)
        x = nn.Dropout(0.1)(x, deterministic=True)
        for _ in range(self.size.layers):
            x = BertLayer(self.size)(x)
        return nn.tanh(nn.Dense(self.size.width, **options(self.size), name="pooler")(x[:, 0]))


class VitMlp(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, y: jax.Array) -> jax.Array:
        of = options(self.size)
        return nn.Dense(y.shape[-1], **of)(nn.gelu(nn.Dense(self.size.hidden, **of)(y)))


def vit_attention(size: Size) -> nn.Module:
    of = options(size)
    return nn.MultiHeadDotProductAttention(num_heads=size.heads, qkv_features=size.heads * size.head, **of)


class VitBlock(nn.Module):
    """A block in which the readers of a norm's result are in other modules, some of them Flax's."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        y = nn.LayerNorm(**options(self.size))(x)
        x = x + vit_attention(self.size)(y, y)
        return x + VitMlp(self.size)(nn.LayerNorm(**options(self.size))(x)), None


class Vit(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = self.size
        block = nn.remat(VitBlock, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
        scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=size.layers)
        x, _ = scanned(size, name="blocks")(x, None)
        x = nn.LayerNorm(**options(size), name="encoder_norm")(x)
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, PROBES, size.width), size.param_dtype)
        probe = jnp.tile(probe.astype(size.dtype), (x.shape[0], 1, 1))
        x = vit_attention(size)(probe, x)
        return (x + VitMlp(size)(nn.LayerNorm(**options(size))(x)))[:, 0]


class T5LayerNorm(nn.Module):
    """T5's own norm, which makes its parameter in setup."""

    features: int
    dtype: str
    param_dtype: str
    eps: float = 1e-6

    def setup(self) -> None:
        self.weight = self.param("weight", nn.initializers.ones, (self.features,), self.param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.eps)
        return (self.weight.astype(wide.dtype).reshape(1, 1, -1) * y).astype(self.dtype)


class T5Layer(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size, of = self.size, {"use_bias": False, **options(self.size)}
        x = x + SelfAttention(size, use_bias=False)(T5LayerNorm(size.width, **options(size))(x))
        y = T5LayerNorm(size.width, **options(size))(x)
        gated = nn.gelu(nn.Dense(size.hidden, **of, name="wi_0")(y)) * nn.Dense(size.hidden, **of, name="wi_1")(y)
        return x + nn.Dense(size.width, **of, name="wo")(gated)


class T5(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.size.layers):
            x = T5Layer(self.size)(x)
        return T5LayerNorm(self.size.width, **options(self.size), name="final_norm")(x)


def modulated(y: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    return y * (1 + scale[:, None]) + shift[:, None]


class DitBlock(nn.Module):
    """A block with adaLN-Zero: each example has its own scale, shift and gate; the norm itself has no parameters."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        size, of = self.size, options(self.size)

        def norm(name: str) -> Callable:
            return nn.LayerNorm(use_scale=False, use_bias=False, **of, name=name)

        six = jnp.split(nn.Dense(6 * size.width, **of, name="modulation")(nn.silu(condition)), 6, axis=-1)
        x = x + six[2][:, None] * SelfAttention(size)(modulated(norm("norm1")(x), *six[:2]))
        return x + six[5][:, None] * VitMlp(size)(modulated(norm("norm2")(x), *six[3:5]))


class Dit(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        condition = nn.Dense(self.size.width, **options(self.size))(x[:, 0])
        for _ in range(self.size.layers):
            x = DitBlock(self.size)(x, condition)
        return nn.LayerNorm(use_scale=False, use_bias=False, **options(self.size), name="final_norm")(x)


CLIENTS = {
    # A norm's result is read by the next sum, too.
    "BERT": Client("linen", Bert, lambda n: 2 * n + 1, lambda n: 2 * n, lambda _: 0),
    "ViT, MAP head and scan": Client(
        "linen", Vit, lambda _: 4, lambda _: 1, lambda _: 4, large=LARGE._replace(batch=32, tokens=256, layers=4)
    ),
    "T5": Client("linen", T5, lambda n: 2 * n + 1, lambda n: 2 * n, lambda n: 2 * n),
    "DiT": Client(
        "linen",
        Dit,
        lambda n: 2 * n + 1,
        lambda n: 2 * n,
        lambda n: 2 * n,
        large=LARGE._replace(batch=32, tokens=256),
    ),
}
