"""A diffusion transformer with adaLN-Zero, in Flax NNX: each example has its own scale, shift and gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from zoo.parts import Size, attend, by_heads

ZERO = nnx.initializers.zeros


def modulated(y: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Return y [B, T, H], scaled and shifted by what each example has of its own, [B, 1, H]."""
    return y * (1 + scale) + shift


class DitBlock(nnx.Module):
    """A block whose norms have no parameters: `modulation` makes all scales, shifts and gates, which begin as 0."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        inner, of = size.heads * size.head, size.of_linears(rngs=rngs)
        self.size = size
        self.norm = nnx.LayerNorm(size.width, use_scale=False, use_bias=False, **size.of_norms(rngs=rngs))
        self.modulation = nnx.Linear(size.width, 6 * size.width, kernel_init=ZERO, **of)
        self.q, self.k, self.v = (nnx.Linear(size.width, inner, **of) for _ in range(3))
        self.out = nnx.Linear(inner, size.width, **of)
        self.up = nnx.Linear(size.width, size.hidden, **of)
        self.down = nnx.Linear(size.hidden, size.width, **of)

    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        """Apply the block to x [B, T, H], with what the model is asked for, condition [B, 1, H]."""
        scale_1, shift_1, gate_1, scale_2, shift_2, gate_2 = jnp.split(self.modulation(condition), 6, axis=-1)
        y = modulated(self.norm(x), scale_1, shift_1)
        q, k, v = (by_heads(linear(y), self.size.head) for linear in (self.q, self.k, self.v))
        x = x + gate_1 * self.out(attend(self.size, q, k, v))
        y = modulated(self.norm(x), scale_2, shift_2)
        return x + gate_2 * self.down(jax.nn.gelu(self.up(y)))


class Dit(nnx.Module):
    """Blocks, and a last norm that is modulated, too."""

    def __init__(self, size: Size):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([DitBlock(size, rngs) for _ in range(size.layers)])
        self.norm = nnx.LayerNorm(size.width, use_scale=False, use_bias=False, **size.of_norms(rngs=rngs))
        self.modulation = nnx.Linear(size.width, 2 * size.width, kernel_init=ZERO, **size.of_linears(rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the model to x [B, T, H], whose mean stands in for what the model is asked for."""
        condition = jax.nn.silu(jnp.mean(x, axis=1, keepdims=True))
        for block in self.blocks:
            x = block(x, condition)
        return modulated(self.norm(x), *jnp.split(self.modulation(condition), 2, axis=-1))
