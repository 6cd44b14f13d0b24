"""Parts that GPT, Llama, Gemma and Qwen share in Flax NNX: a stack of blocks, attention, and a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from zoo.parts import Size, attend, by_heads, features, rotated, stream


class Trunk(nnx.Module):
    """Blocks and a norm.

    policy: of `jax.checkpoint`, under which each block is then: what it holds for the backward pass.
    """

    def __init__(self, blocks: list[Any], norm: Any, policy: Callable | None = None):
        self.blocks = nnx.List(blocks)
        self.norm = norm
        self.policy = policy

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            run = type(block).__call__ if self.policy is None else nnx.remat(type(block).__call__, policy=self.policy)
            x = run(block, x)
        return self.norm(x)


class Attention(nnx.Module):
    """Causal attention with rotary positions, and fewer heads of keys than of queries.

    norm: makes a norm of each head's queries, and of its keys, from their number of features.
    """

    def __init__(self, size: Size, rngs: nnx.Rngs, norm: Callable[[int], Any] | None = None):
        of = size.of_linears(use_bias=False, rngs=rngs)
        self.size = size
        self.q = nnx.Linear(size.width, size.heads * size.head, **of)
        self.k = nnx.Linear(size.width, size.key_heads * size.head, **of)
        self.v = nnx.Linear(size.width, size.key_heads * size.head, **of)
        self.q_norm, self.k_norm = (norm(size.head), norm(size.head)) if norm else (None, None)
        self.out = nnx.Linear(size.heads * size.head, size.width, **of)

    def __call__(self, y: jax.Array) -> jax.Array:
        q, k, v = (by_heads(features(linear(y)), self.size.head) for linear in (self.q, self.k, self.v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.out(attend(self.size, rotated(q), rotated(k), v, is_causal=True))


class GatedMlp(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs, activation: Callable[[jax.Array], jax.Array] = jax.nn.silu):
        of = size.of_linears(use_bias=False, rngs=rngs)
        self.activation = activation
        self.gate = nnx.Linear(size.width, size.hidden, **of)
        self.up = nnx.Linear(size.width, size.hidden, **of)
        self.down = nnx.Linear(size.hidden, size.width, **of)

    def __call__(self, y: jax.Array) -> jax.Array:
        return self.down(self.activation(features(self.gate(y))) * features(self.up(y)))


class PreNormBlock(nnx.Module):
    """A block with a norm in front of attention, and one in front of what follows."""

    def __init__(self, norm: Callable[[], Any], attention: Any, mlp: Any):
        self.attention_norm = norm()
        self.attention = attention
        self.mlp_norm = norm()
        self.mlp = mlp

    def __call__(self, x: jax.Array) -> jax.Array:
        x = stream(x + self.attention(self.attention_norm(x)))
        return stream(x + self.mlp(self.mlp_norm(x)))
