"""Llama 3, in Flax NNX: RMSNorms, no biases, a gated MLP; and the same with each block under a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx

from zoo.parts import Size
from zoo.trunk import Attention, GatedMlp, PreNormBlock, Trunk


def llama(size: Size, policy: Callable | None = None) -> Trunk:
    rngs = nnx.Rngs(0)

    def norm() -> nnx.RMSNorm:
        return nnx.RMSNorm(size.width, epsilon=1e-5, **size.of_norms(rngs=rngs))

    blocks = [PreNormBlock(norm, Attention(size, rngs), GatedMlp(size, rngs)) for _ in range(size.layers)]
    return Trunk(blocks, norm(), policy)


def checkpointed_llama(size: Size) -> Trunk:
    """Make a Llama whose blocks hold their products alone, and make all else again."""
    return llama(size, jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
