"""The common parts of the zoo's models, in every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HEAD_FREQUENCY = 10_000.0


class Size(NamedTuple):
    """The size of a model.

    dtype: that in which a model computes, and of what it reads. param_dtype: that of its parameters, where a framework
      keeps the two apart. attention: JAX's implementation of it.
    """

    batch: int
    tokens: int
    width: int
    heads: int
    head: int
    hidden: int
    layers: int
    dtype: str
    param_dtype: str
    attention: Any

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.batch, self.tokens, self.width


# Of every model: what differs between any two axes, and as many features as `jln.fuse` takes whatever reads them.
SMALL = Size(2, 8, 512, 4, 5, 24, 2, "float64", "float64", "xla")
LARGE = Size(4, 2048, 2048, 16, 128, 8192, 2, "bfloat16", "float32", "cudnn")


class Client(NamedTuple):
    """A model as its users have it, and what `jln.fuse` must find in it; of a number of layers, a scan's body once.

    model: from a size to the model.
    norms: those of the model's width; the short ones of queries and keys are left to XLA.
    sums: those that are in one operator with a norm.
    linears: norms that, with `linears=True`, are one operator with the Linears behind.
    large: the size to compile.
    """

    framework: str
    model: Callable[[Size], Any]
    norms: Callable[[int], int]
    sums: Callable[[int], int]
    linears: Callable[[int], int]
    large: Size = LARGE


def attention(size: Size, q: jax.Array, k: jax.Array, v: jax.Array, *, is_causal: bool = False) -> jax.Array:
    """Attention of q [B, T, N, D] and k, v [B, S, K, D], where K divides N: [B, T, N * D]."""
    y = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation=size.attention)
    return y.reshape(*y.shape[:-2], -1)


def by_heads(a: jax.Array, head: int) -> jax.Array:
    """The features parted by heads: [..., N * D] -> [..., N, D]."""
    return a.reshape(*a.shape[:-1], -1, head)


def rotated(a: jax.Array) -> jax.Array:
    """Rotary positions of [B, T, N, D], the first of each half; of an odd D the last stays."""
    half = a.shape[-1] // 2
    wide = jnp.promote_types(a.dtype, jnp.float32)
    angle = jnp.arange(a.shape[1], dtype=wide)[:, None] / HEAD_FREQUENCY ** (jnp.arange(half, dtype=wide) / half)
    cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
    left, right, rest = a[..., :half].astype(wide), a[..., half : 2 * half].astype(wide), a[..., 2 * half :]
    turned = (left * cos - right * sin, left * sin + right * cos)
    return jnp.concatenate([*(b.astype(a.dtype) for b in turned), rest], axis=-1)
