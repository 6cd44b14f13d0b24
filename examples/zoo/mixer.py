"""An MLP-Mixer, in Haiku: the MLP behind one norm mixes tokens, that behind the next mixes features.

Both MLPs are of one width here.
"""

from __future__ import annotations

import haiku as hk
import jax

from zoo.parts import Size


def mixed(size: Size, x: jax.Array) -> jax.Array:
    """Mix x [B, T, H], within `hk.transform`."""

    def normed(x: jax.Array) -> jax.Array:
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True, param_axis=-1)(x)

    def mlp(x: jax.Array) -> jax.Array:
        return hk.Linear(x.shape[-1])(jax.nn.gelu(hk.Linear(size.hidden)(x)))

    for _ in range(size.layers):
        x = x + mlp(normed(x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + mlp(normed(x))
    return normed(x)


def mixer(size: Size) -> hk.Transformed:
    return hk.without_apply_rng(hk.transform(lambda x: mixed(size, x)))
