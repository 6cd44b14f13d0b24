"""A ViT, in Flax Linen: Flax's own attention, layers in a scan under a checkpoint, and a head that attends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zoo.parts import Size

PROBES = 1


class VitMlp(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, y: jax.Array) -> jax.Array:
        of = self.size.of_linears()
        return nn.Dense(y.shape[-1], **of)(nn.gelu(nn.Dense(self.size.hidden, **of)(y)))


def vit_attention(size: Size) -> nn.Module:
    return nn.MultiHeadDotProductAttention(size.heads, qkv_features=size.heads * size.head, **size.of_linears())


class VitBlock(nn.Module):
    """A block in which the readers of a norm's result are in other modules, some of them Flax's."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        y = nn.LayerNorm(**self.size.of_norms(name="attention_norm"))(x)
        x = x + vit_attention(self.size)(y, y)
        return x + VitMlp(self.size)(nn.LayerNorm(**self.size.of_norms(name="mlp_norm"))(x)), None


class Vit(nn.Module):
    """A ViT of patches [B, T, H], whose result is an image's features [B, H]."""

    size: Size

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = self.size
        block = nn.remat(VitBlock, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
        scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=size.layers)
        x, _ = scanned(size, name="blocks")(x, None)
        x = nn.LayerNorm(**size.of_norms(name="encoder_norm"))(x)
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, PROBES, size.width), size.param_dtype)
        probe = jnp.tile(probe.astype(size.dtype), (x.shape[0], 1, 1))
        x = vit_attention(size)(probe, x)
        return (x + VitMlp(size)(nn.LayerNorm(**size.of_norms(name="head_norm"))(x)))[:, 0]
