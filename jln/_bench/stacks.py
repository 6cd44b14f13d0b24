"""Whole training steps: a pre-norm transformer, forward and backward, with this library's operators and with Flax's.

A custom call keeps XLA from fusing its neighbours, so an operator's own bytes are not the whole truth. All variants
compute the same function of the same parameters, named as Flax names them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jln
from jln._catalogue import EPSILON

Loss = Callable[[Any, jax.Array], jax.Array]
# Whose kernels do the products, and XLA's options for it. With no GPU it cannot try them, as it would where there is
# one.
PRODUCTS: dict[str, dict[str, Any]] = {"XLA": {}, "cuBLAS": {"xla_gpu_enable_triton_gemm": False}}


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers of `x += out(attention(qkv(norm(x)))); x += down(activation(up(norm(x))))`, and a norm at the end.

    shape: of x [batch, tokens, width]. dtype: x's, and of all arithmetic between norms. hidden: of the MLP. gated:
    RMSNorm, no biases, and an MLP of silu(gate) * up, as in Llama; else LayerNorm, biases and gelu, as in GPT.
    parameter_dtype: in which the step is given its parameters; others than `dtype` are cast in it. attention: "cudnn"
    or "xla", of `jax.nn.dot_product_attention`.
    """

    name: str
    why: str
    layers: int
    shape: tuple[int, int, int]
    hidden: int
    heads: int
    gated: bool
    parameter_dtype: str
    attention: Literal["xla", "cudnn"] = "cudnn"
    dtype: str = "bfloat16"

    def parameters(self) -> Any:
        """A tree of shapes and dtypes: `init` fills it."""
        width, up = self.shape[-1], (2 if self.gated else 1) * self.hidden
        a = jax.ShapeDtypeStruct

        def norm():
            return {n: a((width,), self.parameter_dtype) for n in (("scale",) if self.gated else ("scale", "bias"))}

        def linear(h, n):
            kernel = {"kernel": a((h, n), self.parameter_dtype)}
            return kernel if self.gated else kernel | {"bias": a((n,), self.parameter_dtype)}

        def block():
            linears = {"qkv": linear(width, 3 * width), "out": linear(width, width)}
            linears |= {"up": linear(width, up), "down": linear(self.hidden, width)}
            return {"norm_1": norm(), "norm_2": norm(), **linears}

        return {f"block_{i}": block() for i in range(self.layers)} | {"norm": norm()}

    def x(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def init(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """-> (parameters, x) of random numbers; the kernels' spread keeps each branch's result about the size of x."""
        leaves, tree = jax.tree.flatten(self.parameters())
        keys = jax.random.split(key, len(leaves) + 1)

        def fill(key, a):
            spread = a.shape[0] ** -0.5 if len(a.shape) == 2 else 0.1
            return (jax.random.normal(key, a.shape) * spread + (len(a.shape) == 1)).astype(a.dtype)

        filled = [fill(k, a) for k, a in zip(keys[1:], leaves, strict=True)]
        return jax.tree.unflatten(tree, filled), jax.random.normal(keys[0], self.shape, self.dtype)

    def step(self, loss: Loss) -> Callable[..., Any]:
        """(parameters, x) -> (loss, gradients of both): x comes from a layer below, as in a model."""
        return jax.value_and_grad(loss, argnums=(0, 1))

    def attend(self, qkv: jax.Array) -> jax.Array:
        """Causal self-attention of [batch, tokens, 3 width]: what it is does not depend on the norms around it."""
        q, k, v = (a.reshape(*a.shape[:-1], self.heads, a.shape[-1] // self.heads) for a in jnp.split(qkv, 3, axis=-1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        return attended.reshape(*qkv.shape[:-1], qkv.shape[-1] // 3)

    def activate(self, up: jax.Array) -> jax.Array:
        if not self.gated:
            return jax.nn.gelu(up)
        gate, up = jnp.split(up, 2, axis=-1)
        return jax.nn.silu(gate) * up


def square_sum(y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(y.astype(jnp.promote_types(y.dtype, jnp.float32))))


STACKS = {
    s.name: s
    for s in (
        Stack(
            "stack-gpt",
            "LayerNorm, biases, gelu; float32 parameters, cast in the step, as Flax's layers do it",
            layers=12,
            shape=(4, 2048, 4096),
            hidden=16384,
            heads=32,
            gated=False,
            parameter_dtype="float32",
        ),
        Stack(
            "stack-llama",
            "RMSNorm, no biases, gated MLP; bfloat16 parameters, whose float32 copies are the optimizer's",
            layers=12,
            shape=(4, 2048, 4096),
            hidden=11008,
            heads=32,
            gated=True,
            parameter_dtype="bfloat16",
        ),
    )
}


# This library's. A projection is the norm and the Linear behind it: (norm's parameters, Linear's, x, branch) ->
# (features, x + branch); branch, what the layer before would have added to x, or None at the beginning.
Projection = Callable[[Any, Any, jax.Array, jax.Array | None], tuple[jax.Array, jax.Array]]


def linear(parameters: Any, x: jax.Array) -> jax.Array:
    y = x @ parameters["kernel"].astype(x.dtype)
    return y + parameters["bias"].astype(x.dtype) if "bias" in parameters else y


def add_and_norm(norm: Any, x: jax.Array, branch: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """-> (z, x + branch)"""
    if branch is None:
        if "bias" in norm:
            return jln.layer_norm(x, norm["scale"], norm["bias"], epsilon=EPSILON), x
        return jln.rms_norm(x, norm["scale"], epsilon=EPSILON), x
    if "bias" in norm:
        return jln.add_layer_norm(branch, x, norm["scale"], norm["bias"], epsilon=EPSILON)
    return jln.add_rms_norm(branch, x, norm["scale"], epsilon=EPSILON)


def add_norm(norm: Any, parameters: Any, x: jax.Array, branch: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """By `add_layer_norm` or `add_rms_norm`, which keep z for the Linear's backward pass."""
    z, x = add_and_norm(norm, x, branch)
    return linear(parameters, z), x


def norm_linear(norm: Any, parameters: Any, x: jax.Array, branch: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """By `layer_norm_linear` or `rms_norm_linear`, which do not; the sum is XLA's."""
    x = x if branch is None else x + branch
    kernel, bias = parameters["kernel"].astype(x.dtype), parameters.get("bias")
    bias = None if bias is None else bias.astype(x.dtype)
    if "bias" in norm:
        return jln.layer_norm_linear(x, norm["scale"], norm["bias"], kernel, bias, epsilon=EPSILON), x
    return jln.rms_norm_linear(x, norm["scale"], kernel, bias, epsilon=EPSILON), x


def no_norm(_: Any, parameters: Any, x: jax.Array, branch: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What would be left if norms cost nothing, and kept XLA from nothing: a bound, and no model."""
    x = x if branch is None else x + branch
    return linear(parameters, x), x


def jln_loss(stack: Stack, before_attention: Projection, before_mlp: Projection) -> Loss:
    def loss(parameters, x):
        branch = None
        for i in range(stack.layers):
            p = parameters[f"block_{i}"]
            qkv, x = before_attention(p["norm_1"], p["qkv"], x, branch)
            branch = linear(p["out"], stack.attend(qkv))
            up, x = before_mlp(p["norm_2"], p["up"], x, branch)
            branch = linear(p["down"], stack.activate(up))
        assert branch is not None
        if before_mlp is no_norm:
            return square_sum(x + branch)
        return square_sum(add_and_norm(parameters["norm"], x, branch)[0])

    return loss


def flax_loss(stack: Stack) -> Loss:
    """Of Flax Linen's own layers, which keep nothing from XLA."""
    import flax.linen as nn

    dtypes: dict[str, Any] = {"dtype": jnp.dtype(stack.dtype), "param_dtype": jnp.dtype(stack.parameter_dtype)}

    def norm(name):
        return (nn.RMSNorm if stack.gated else nn.LayerNorm)(epsilon=EPSILON, name=name, **dtypes)

    def dense(features, name):
        return nn.Dense(features, use_bias=not stack.gated, name=name, **dtypes)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            width = x.shape[-1]
            x = x + dense(width, "out")(stack.attend(dense(3 * width, "qkv")(norm("norm_1")(x))))
            up = dense((2 if stack.gated else 1) * stack.hidden, "up")(norm("norm_2")(x))
            return x + dense(width, "down")(stack.activate(up))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(stack.layers):
                x = Block(name=f"block_{i}")(x)
            return norm("norm")(x)

    model = Model()
    apply: Any = model.apply
    return lambda parameters, x: square_sum(apply({"params": parameters}, x))


OURS: dict[str, tuple[Projection, Projection]] = {
    "jln, add_norm": (add_norm, add_norm),
    "jln, norm_linear and add_norm": (norm_linear, add_norm),
    "jln, norm_linear": (norm_linear, norm_linear),
}


def losses(stack: Stack) -> dict[str, Loss]:
    """Flax's first, which the others are compared with, if it is installed."""
    found = {"flax": flax_loss(stack)} if importlib.util.find_spec("flax") else {}
    found |= {name: jln_loss(stack, *projections) for name, projections in OURS.items()}
    return found | {"no norm at all": jln_loss(stack, no_norm, no_norm)}
