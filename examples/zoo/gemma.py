"""Gemma 3, in Flax NNX: its own norms, with a scale around zero, on both sides of attention and MLP.

Its queries and keys have no norms here, which `jln.fuse` would leave to XLA: `qwen.py` has these.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.parts import Size, stream
from zoo.trunk import Attention, GatedMlp, Trunk


class GemmaRMSNorm(nnx.Module):
    """Gemma's own norm: in float32, of a scale around zero."""

    def __init__(self, features: int, param_dtype: str):
        self.scale = nnx.Param(jnp.zeros(features, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
        scale = 1 + self.scale[...].astype(wide.dtype)
        return (y * scale.reshape((1,) * (y.ndim - 1) + scale.shape)).astype(x.dtype)


class GemmaBlock(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        norm = functools.partial(GemmaRMSNorm, param_dtype=size.param_dtype)
        self.pre_attention_norm = norm(size.width)
        self.attention = Attention(size, rngs, norm)
        self.post_attention_norm = norm(size.width)
        self.pre_mlp_norm = norm(size.width)
        self.mlp = GatedMlp(size, rngs, jax.nn.gelu)
        self.post_mlp_norm = norm(size.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = stream(x + self.post_attention_norm(self.attention(self.pre_attention_norm(x))))
        return stream(x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x))))


def gemma(size: Size) -> Trunk:
    rngs = nnx.Rngs(0)
    blocks = [GemmaBlock(size, rngs) for _ in range(size.layers)]
    return Trunk(blocks, GemmaRMSNorm(size.width, size.param_dtype))
