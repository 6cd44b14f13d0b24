"""Flax NNX: GPT-2, Llama with few heads of keys and a norm of queries and keys, Gemma 3, Qwen's mixture of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.common import Client, Size, attention, by_heads, rotated

EXPERTS, GROUP = 8, 2  # GROUP: heads of queries for one of keys


def options(size: Size, rngs: nnx.Rngs) -> dict:
    return {"dtype": size.dtype, "param_dtype": size.param_dtype, "rngs": rngs}


class Stack(nnx.Module):
    """Blocks, a norm, and where logits are wanted a Linear."""

    def __init__(self, blocks: list[nnx.Module], norm: nnx.Module, head: nnx.Module | None = None):
        self.blocks = nnx.List(blocks)
        self.norm = norm
        self.head = head

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        y = self.norm(x)
        return y if self.head is None else self.head(y)


class Gpt2Block(nnx.Module):
    def __init__(self, size: Size, rngs: nnx.Rngs):
        of, inner = options(size, rngs), size.heads * size.head
        self.size = size
        self.ln_1 = nnx.LayerNorm(size.width, epsilon=1e-5, **of)
        self.c_attn = nnx.Linear(size.width, 3 * inner, **of)
        self.c_proj = nnx.Linear(inner, size.width, **of)
        self.ln_2 = nnx.LayerNorm(size.width, epsilon=1e-5, **of)
        self.c_fc = nnx.Linear(size.width, size.hidden, **of)
        self.c_out = nnx.Linear(size.hidden, size.width, **of)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(by_heads(self.c_attn(self.ln_1(x)), self.size.head), 3, axis=-2)
        x = x + self.c_proj(attention(self.size, q, k, v, is_causal=True))
        return x + self.c_out(jax.nn.gelu(self.c_fc(self.ln_2(x))))


def gpt2(size: Size) -> Stack:
    rngs = nnx.Rngs(0)
    blocks = [Gpt2Block(size, rngs) for _ in range(size.layers)]
    return Stack(blocks, nnx.LayerNorm(size.width, epsilon=1e-5, **options(size, rngs)))


class GroupedAttention(nnx.Module):
    """Attention with a norm, `norm(features)`, of each head's queries and keys."""

    def __init__(self, size: Size, norm, rngs: nnx.Rngs):
        of, inner = {"use_bias": False, **options(size, rngs)}, size.heads * size.head
        self.size = size
        self.q = nnx.Linear(size.width, inner, **of)
        self.k = nnx.Linear(size.width, inner // GROUP, **of)
        self.v = nnx.Linear(size.width, inner // GROUP, **of)
        self.q_norm = norm(size.head)
        self.k_norm = norm(size.head)
        self.out = nnx.Linear(inner, size.width, **of)

    def __call__(self, y: jax.Array) -> jax.Array:
        q, k, v = (by_heads(linear(y), self.size.head) for linear in (self.q, self.k, self.v))
        q, k = rotated(self.q_norm(q)), rotated(self.k_norm(k))
        return self.out(attention(self.size, q, k, v, is_causal=True))


class GatedMlp(nnx.Module):
    def __init__(self, size: Size, activation, rngs: nnx.Rngs):
        of = {"use_bias": False, **options(size, rngs)}
        self.activation = activation
        self.gate = nnx.Linear(size.width, size.hidden, **of)
        self.up = nnx.Linear(size.width, size.hidden, **of)
        self.down = nnx.Linear(size.hidden, size.width, **of)

    def __call__(self, y: jax.Array) -> jax.Array:
        return self.down(self.activation(self.gate(y)) * self.up(y))


class LlamaBlock(nnx.Module):
    def __init__(self, size: Size, mlp, rngs: nnx.Rngs):
        def norm(features):
            return nnx.RMSNorm(features, epsilon=1e-5, **options(size, rngs))

        self.input_norm = norm(size.width)
        self.attention = GroupedAttention(size, norm, rngs)
        self.post_attention_norm = norm(size.width)
        self.mlp = mlp(size, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_attention_norm(x))


def llama(size: Size) -> Stack:
    rngs = nnx.Rngs(0)
    of = options(size, rngs)
    blocks = [LlamaBlock(size, lambda size, rngs: GatedMlp(size, jax.nn.silu, rngs), rngs) for _ in range(size.layers)]
    head = nnx.Linear(size.width, size.hidden, use_bias=False, **of)
    return Stack(blocks, nnx.RMSNorm(size.width, epsilon=1e-5, **of), head)


class Experts(nnx.Module):
    """A mixture of experts, all of which read one norm's result.

    The router is a Linear of few features; the experts' kernels are one parameter each, so what they read is the norm's
    result itself.
    """

    def __init__(self, size: Size, rngs: nnx.Rngs):
        width, hidden = size.width, size.hidden // EXPERTS
        draw = nnx.initializers.lecun_normal()
        self.dtype = size.dtype
        self.router = nnx.Linear(width, EXPERTS, use_bias=False, **options(size, rngs))
        self.gate = nnx.Param(draw(rngs.params(), (EXPERTS, width, hidden), size.param_dtype))
        self.up = nnx.Param(draw(rngs.params(), (EXPERTS, width, hidden), size.param_dtype))
        self.down = nnx.Param(draw(rngs.params(), (EXPERTS, hidden, width), size.param_dtype))

    def __call__(self, y: jax.Array) -> jax.Array:
        weight = jax.nn.softmax(self.router(y))
        gate, up, down = (a[...].astype(self.dtype) for a in (self.gate, self.up, self.down))
        made = jax.nn.silu(jnp.einsum("bth,ehf->btef", y, gate)) * jnp.einsum("bth,ehf->btef", y, up)
        return jnp.einsum("btef,efh->bth", made * weight[..., None], down)


def qwen_moe(size: Size) -> Stack:
    rngs = nnx.Rngs(0)
    blocks = [LlamaBlock(size, Experts, rngs) for _ in range(size.layers)]
    return Stack(blocks, nnx.RMSNorm(size.width, epsilon=1e-6, **options(size, rngs)))


class GemmaRMSNorm(nnx.Module):
    """Gemma's own norm: in float32, of a scale around zero."""

    def __init__(self, features: int, epsilon: float, param_dtype: str, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.zeros(rngs.params(), (features,), param_dtype))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        scale = 1 + self.scale[...].astype(wide.dtype)
        return (y * scale.reshape((1,) * (y.ndim - 1) + scale.shape)).astype(x.dtype)


class GemmaBlock(nnx.Module):
    """A block with norms on both sides of attention and of the MLP."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        def norm(features):
            return GemmaRMSNorm(features, 1e-6, size.param_dtype, rngs)

        self.pre_attention_norm = norm(size.width)
        self.attention = GroupedAttention(size, norm, rngs)
        self.post_attention_norm = norm(size.width)
        self.pre_ffw_norm = norm(size.width)
        self.mlp = GatedMlp(size, jax.nn.gelu, rngs)
        self.post_ffw_norm = norm(size.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.post_attention_norm(self.attention(self.pre_attention_norm(x)))
        return x + self.post_ffw_norm(self.mlp(self.pre_ffw_norm(x)))


def gemma3(size: Size) -> Stack:
    rngs = nnx.Rngs(0)
    blocks = [GemmaBlock(size, rngs) for _ in range(size.layers)]
    return Stack(blocks, GemmaRMSNorm(size.width, 1e-6, size.param_dtype, rngs))


CLIENTS = {
    "GPT-2": Client("nnx", gpt2, lambda n: 2 * n + 1, lambda n: 2 * n, lambda n: 2 * n),
    "Llama, GQA and QK-norm": Client("nnx", llama, lambda n: 2 * n + 1, lambda n: 2 * n, lambda n: 2 * n + 1),
    # The norms in front of a sum are one operator with those behind it, which has no Linears.
    "Gemma 3": Client("nnx", gemma3, lambda n: 4 * n + 1, lambda n: 2 * n, lambda n: 2 * n),
    "Qwen MoE": Client("nnx", qwen_moe, lambda n: 2 * n + 1, lambda n: 2 * n, lambda n: 2 * n),
}
