"""Haiku: a Perceiver, and AlphaFold's transition, whose norm is a subclass of Haiku's and whose Linear is its own."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from zoo.common import LARGE, Client, Size, attention, by_heads

FEWER = 4  # times as many tokens as latents
WIDER = 4  # a transition's hidden width


def norm() -> hk.LayerNorm:
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)


class Attend(hk.Module):
    """Attention with norms of its own, one for the queries and in a cross-attention another for what is read."""

    def __init__(self, size: Size, name: str):
        super().__init__(name)
        self.size = size

    def __call__(self, latents: jax.Array, inputs: jax.Array | None = None) -> jax.Array:
        size, inner = self.size, self.size.heads * self.size.head
        y = norm()(latents)
        read = y if inputs is None else norm()(inputs)
        q, k, v = (by_heads(hk.Linear(inner)(a), size.head) for a in (y, read, read))
        latents = latents + hk.Linear(size.width)(attention(size, q, k, v))
        hidden = jax.nn.gelu(hk.Linear(size.hidden)(norm()(latents)))
        return latents + hk.Linear(size.width)(hidden)


def perceiver(size: Size) -> hk.Transformed:
    def of(x: jax.Array) -> jax.Array:
        shape = (max(1, size.tokens // FEWER), size.width)
        latents = hk.get_parameter("latents", shape, size.dtype, hk.initializers.TruncatedNormal(0.02))
        latents = Attend(size, "cross")(jnp.tile(latents[None], (x.shape[0], 1, 1)), x)
        for i in range(size.layers):
            latents = Attend(size, f"self_{i}")(latents)
        return latents

    return hk.without_apply_rng(hk.transform(of))


class LayerNorm(hk.LayerNorm):
    """A LayerNorm in float32 whatever it reads, by the framework's own call."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


class OwnLinear(hk.Module):
    """A Linear with the model's own names and initial values."""

    def __init__(self, features: int, name: str):
        super().__init__(name)
        self.features = features

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[-1], self.features)
        weights = hk.get_parameter("weights", shape, x.dtype, hk.initializers.VarianceScaling())
        bias = hk.get_parameter("bias", (self.features,), x.dtype, jnp.zeros)
        return jnp.einsum("...a,ab->...b", x, weights) + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


class Transition(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = LayerNorm(axis=-1, create_scale=True, create_offset=True, name="input_layer_norm")(x)
        y = jax.nn.relu(OwnLinear(WIDER * x.shape[-1], "transition1")(y))
        return x + OwnLinear(x.shape[-1], "transition2")(y)


def alphafold(size: Size) -> hk.Transformed:
    def of(x: jax.Array) -> jax.Array:
        return hk.layer_stack(size.layers)(Transition(name="transition"))(x)

    return hk.without_apply_rng(hk.transform(of))


CLIENTS = {
    "Perceiver": Client("haiku", perceiver, lambda n: 2 * n + 3, lambda n: 2 * n + 1, lambda n: 2 * n + 3),
    "AlphaFold's transition": Client(
        # Pairs of 384 residues, of 128 features each.
        "haiku",
        alphafold,
        lambda _: 1,
        lambda _: 0,
        lambda _: 1,
        large=LARGE._replace(batch=384, tokens=384, width=128),
    ),
}
