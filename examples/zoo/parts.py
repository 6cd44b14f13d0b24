"""Parts that the zoo's models share in every framework: sizes, attention, rotary positions, and names of axes.

Words used in shapes: B examples, T tokens, H features of a token, N heads of queries, K heads of keys, D features of a
head.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

HEAD_FREQUENCY = 10_000.0


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a model, and its precision.

    width: of the stream, H. hidden: of an MLP.
    dtype: in which a model computes. norm_dtype: that of a norm's result; with None, which many leave it at, it is
      float32, and the Linears behind cast it. param_dtype: that of parameters, where a framework keeps the two apart.
    attention: JAX's implementation of it.
    """

    batch: int
    tokens: int
    width: int
    heads: int
    key_heads: int
    head: int
    hidden: int
    layers: int = 2
    dtype: str = "bfloat16"
    norm_dtype: str | None = "bfloat16"
    param_dtype: str = "float32"
    attention: Any = "cudnn"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.tokens, self.width

    def of_linears(self, **options: Any) -> dict[str, Any]:
        """Return what a Flax Linear is given beside its features."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype, **options}

    def of_norms(self, **options: Any) -> dict[str, Any]:
        """Return what a Flax norm is given beside its features."""
        return {"dtype": self.norm_dtype, "param_dtype": self.param_dtype, **options}


def attend(size: Size, q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool = False) -> jax.Array:
    """Return the attention of q [B, T, N, D] to k, v [B, S, K, D], where K divides N: [B, T, N * D]."""
    q, k, v = (features(a) for a in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation=size.attention)
    return features(y.reshape(*y.shape[:-2], -1))


def by_heads(a: jax.Array, head: int) -> jax.Array:
    """Part features by heads: [..., N * D] -> [..., N, D]."""
    return a.reshape(*a.shape[:-1], -1, head)


def rotated(a: jax.Array) -> jax.Array:
    """Rotate a [B, T, N, D] by its tokens' positions, the first of each half; of an odd D the last stays."""
    half = a.shape[-1] // 2
    wide = jnp.promote_types(a.dtype, jnp.float32)
    angle = jnp.arange(a.shape[1], dtype=wide)[:, None] / HEAD_FREQUENCY ** (jnp.arange(half, dtype=wide) / half)
    cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
    left, right, rest = a[..., :half].astype(wide), a[..., half : 2 * half].astype(wide), a[..., 2 * half :]
    turned = (left * cos - right * sin, left * sin + right * cos)
    return jnp.concatenate([*(b.astype(a.dtype) for b in turned), rest], axis=-1)


def stream(x: jax.Array) -> jax.Array:
    """Name the axes of the stream, x [B, T, H], for who trains on a mesh (`sharding.py`); else it is x."""
    return nn.with_logical_constraint(x, ("batch", "tokens", None))


def features(y: jax.Array) -> jax.Array:
    """Name the axes of what is between two Linears, y [B, T, features] or [B, T, heads, D]."""
    return nn.with_logical_constraint(y, ("batch", None, "features", None)[: y.ndim])
