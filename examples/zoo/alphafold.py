"""AlphaFold's transition, in Haiku: its norm is a subclass of Haiku's, its Linear its own, its layers are stacked."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp

from zoo.parts import Size

WIDER = 4  # a transition's hidden width


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
