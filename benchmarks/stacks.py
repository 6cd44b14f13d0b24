"""Whole training steps of pre-norm transformers: their sizes, parameters and the parts without a norm.

A custom call keeps XLA from fusing its neighbours, so an operator's own bytes are not the whole truth. `losses.py` has
the norms around these parts, of this library and of others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

Loss = Callable[[Any, jax.Array], jax.Array]
# Whose kernels do the products, and XLA's options for it. With no GPU it cannot try them, as it would where there is
# one.
PRODUCTS: dict[str, dict[str, Any]] = {"XLA": {}, "cuBLAS": {"xla_gpu_enable_triton_gemm": False}}


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers of `x += out(attention(qkv(norm(x)))); x += down(activation(up(norm(x))))`, and a norm at the end.

    shape: x's, `[batch, tokens, width]`.
    dtype: x's, and that of all arithmetic between norms.
    hidden: the width of the MLP.
    gated: RMSNorm, no biases and an MLP of silu(gate) * up, as in Llama; otherwise LayerNorm, biases and gelu, as in
      GPT.
    ada: a Linear in each block makes, for each example, the scales and offsets of its norms and the gates of its
      branches (adaLN: Peebles and Xie, "Scalable Diffusion Models with Transformers", 2023).
    both_sides: an RMSNorm behind attention and behind the MLP too, of the branch alone, as in Gemma 2 and 3.
    parameter_dtype: the dtype in which the step gets its parameters, which it casts to `dtype`.
    key_heads: the heads of keys and of values, where they are fewer than those of queries.
    apart: queries, keys and values, gate and up have a Linear each; otherwise those of one norm share one.
    policy: the name in `jax.checkpoint_policies` with which each block is checkpointed.
    attention: "cudnn" or "xla", as `jax.nn.dot_product_attention` takes it.
    """

    name: str
    why: str
    layers: int
    shape: tuple[int, int, int]
    hidden: int
    heads: int
    gated: bool
    parameter_dtype: str
    key_heads: int | None = None
    apart: bool = False
    policy: str | None = None
    ada: bool = False
    both_sides: bool = False
    attention: Literal["xla", "cudnn"] = "cudnn"
    dtype: str = "bfloat16"

    width = property(lambda self: self.shape[-1])

    @property
    def attention_features(self) -> dict[str, int]:
        """The numbers of features of queries, of keys and of values."""
        keys = self.width * (self.key_heads or self.heads) // self.heads
        return {"q": self.width, "k": keys, "v": keys}

    @property
    def projections(self) -> tuple[dict[str, int], dict[str, int]]:
        """The Linears behind each of a block's two norms, by name with their features."""
        attention = self.attention_features
        mlp = {name: self.hidden for name in (("gate", "up") if self.gated else ("up",))}
        return (attention, mlp) if self.apart else ({"qkv": sum(attention.values())}, {"up": sum(mlp.values())})

    def parameters(self) -> Any:
        """A tree of the parameters' shapes and dtypes, which `init` fills."""
        a = jax.ShapeDtypeStruct

        def norm():
            return {
                n: a((self.width,), self.parameter_dtype) for n in (("scale",) if self.gated else ("scale", "bias"))
            }

        def linear(h, n):
            kernel = {"kernel": a((h, n), self.parameter_dtype)}
            return kernel if self.gated else kernel | {"bias": a((n,), self.parameter_dtype)}

        def block():
            attention, mlp = ({name: linear(self.width, n) for name, n in of.items()} for of in self.projections)
            linears = {**attention, "out": linear(self.width, self.width)}
            linears |= {**mlp, "down": linear(self.hidden, self.width)}
            if self.ada:
                return {"ada": linear(self.width, 6 * self.width), **linears}
            behind = {"post_1": norm(), "post_2": norm()} if self.both_sides else {}
            return {"norm_1": norm(), "norm_2": norm(), **behind, **linears}

        return {f"block_{i}": block() for i in range(self.layers)} | {"norm": norm()}

    def x(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def init(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """Return parameters and x of random numbers.

        The kernels' spread keeps each branch's result about the size of x.
        """
        leaves, tree = jax.tree.flatten(self.parameters())
        keys = jax.random.split(key, len(leaves) + 1)

        def fill(key, a):
            spread = a.shape[0] ** -0.5 if len(a.shape) == 2 else 0.1
            return (jax.random.normal(key, a.shape) * spread + (len(a.shape) == 1)).astype(a.dtype)

        filled = [fill(k, a) for k, a in zip(keys[1:], leaves, strict=True)]
        return jax.tree.unflatten(tree, filled), jax.random.normal(keys[0], self.shape, self.dtype)

    def step(self, loss: Loss) -> Callable[..., Any]:
        """Return a function (parameters, x) -> (loss, gradients of both): in a model, x comes from a layer below."""
        return jax.value_and_grad(loss, argnums=(0, 1))

    def checkpointed(self, wrap: Callable[..., Any], block: Any) -> Any:
        """A block as it is or, where the stack has a policy, wrapped by `jax.checkpoint` or Flax's own."""
        return block if self.policy is None else wrap(block, policy=getattr(jax.checkpoint_policies, self.policy))

    def attend(self, projected: Sequence[jax.Array]) -> jax.Array:
        """Causal self-attention of queries, keys and values, each [batch, tokens, features], or all in one array.

        No norm has a part in it, so all variants share it.
        """
        if not self.apart:
            q, k, _ = self.attention_features.values()
            projected = jnp.split(projected[0], (q, q + k), axis=-1)
        q, k, v = (a.reshape(*a.shape[:-1], -1, self.width // self.heads) for a in projected)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        return attended.reshape(*projected[0].shape[:-1], -1)

    def condition(self, x: jax.Array) -> jax.Array | None:
        """A stand-in for the embedding of a time and a class, [batch, 1, width]."""
        return jnp.mean(x, axis=1, keepdims=True) if self.ada else None

    def activate(self, projected: Sequence[jax.Array]) -> jax.Array:
        """The MLP's activation: gelu(up), or silu(gate) * up."""
        if not self.gated:
            return jax.nn.gelu(projected[0])
        gate, up = projected if self.apart else jnp.split(projected[0], 2, axis=-1)
        return jax.nn.silu(gate) * up


_GPT = Stack(
    "stack-gpt",
    "LayerNorm, biases, gelu; float32 parameters, cast in the step, as Flax's layers do it",
    layers=12,
    shape=(4, 2048, 4096),
    hidden=16384,
    heads=32,
    gated=False,
    parameter_dtype="float32",
)
_DIT = Stack(
    "stack-dit",
    "DiT-XL/2 on 512x512 images: 1024 tokens; scale, offset and gate of each example",
    layers=12,
    shape=(16, 1024, 1152),
    hidden=4608,
    heads=16,
    gated=False,
    parameter_dtype="float32",
    ada=True,
)
_LLAMA = Stack(
    "stack-llama",
    "RMSNorm, no biases, gated MLP; bfloat16 parameters, whose float32 copies are the optimizer's",
    layers=12,
    shape=(4, 2048, 4096),
    hidden=11008,
    heads=32,
    gated=True,
    parameter_dtype="bfloat16",
)
_LLAMA_3 = dataclasses.replace(
    _LLAMA,
    name="stack-llama-q-k-v",
    why="as Llama 3 8B: 8 heads of keys and values, and q, k, v, gate and up apart",
    hidden=14336,
    key_heads=8,
    apart=True,
)
_GEMMA = dataclasses.replace(
    _LLAMA_3,
    name="stack-gemma",
    why="as Gemma 2: a norm behind attention and MLP too, half as many heads of keys and values, gated MLP",
    key_heads=16,
    both_sides=True,
)
STACKS = {
    s.name: s
    for s in (
        _GPT,
        dataclasses.replace(_GPT, name="stack-gpt-q-k-v", why="the same, q, k and v apart", apart=True),
        _DIT,
        _LLAMA,
        _LLAMA_3,
        _GEMMA,
        dataclasses.replace(
            _LLAMA_3,
            name="stack-llama-checkpointed",
            why="the same, each block under jax.checkpoint: products saved, all else made again",
            policy="dots_with_no_batch_dims_saveable",
        ),
    )
}
