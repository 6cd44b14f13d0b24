"""Fuse keras_hub's own models, and compare them with themselves: losses and gradients.

    pip install --no-deps keras==3.15.1 keras-hub==0.32.0 h5py namex optree    # beside transformers, which brings more
    python tests/real/keras_models.py     # a minute, nothing is downloaded

For every backbone, with a head behind it: the norms and sums that `jln.fuse` finds, and the largest difference of any
gradient, as a part of that gradient's largest element. Exits with 1 where a number differs, or other norms and sums are
found than there are.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from keras_hub import models

from compared import judged

LAYERS, WORDS = 2, 50
SIZES = {"vocabulary_size": WORDS, "num_layers": LAYERS, "hidden_dim": 32, "intermediate_dim": 96}
HEADS = {"num_query_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 2, "top_k": 2}
ALL = (2 * LAYERS + 1, 2 * LAYERS, 0, 0)
# By name the sizes beside those, and what is found, as of `judged`: the norms of queries and keys are left to XLA.
BACKBONES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "LlamaBackbone": (HEADS, ALL),
    "MistralBackbone": (HEADS | {"sliding_window": 8}, ALL),
    "MixtralBackbone": (HEADS | EXPERTS | {"sliding_window": 8}, ALL),
    "QwenBackbone": (HEADS, ALL),
    "Qwen3Backbone": (HEADS | {"head_dim": 8}, (*ALL[:3], 2 * LAYERS)),
    "Phi3Backbone": (HEADS, ALL),
    "GptOssBackbone": (HEADS | EXPERTS | {"head_dim": 8}, ALL),
    "GemmaBackbone": (HEADS | {"head_dim": 8}, ALL),
    "GPT2Backbone": ({"num_heads": 4, "max_sequence_length": 16, "dropout": 0.0}, ALL),
}
# Norms that with `linears=True` are one operator with the Linears behind, where not all are: a mixture's experts read
# theirs in other ways.
LINEARS = {"MixtralBackbone": LAYERS + 1, "GptOssBackbone": LAYERS + 1}


def checked(name: str) -> bool:
    sizes, expected = BACKBONES[name]
    model = getattr(models, name)(**SIZES, **sizes)
    r = np.random.default_rng(0)
    tokens = r.integers(1, WORDS, (2, 12))
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    fixed = [v.value for v in model.non_trainable_variables]
    given = [v.value for v in model.trainable_variables]
    parameters = [a + 0.1 * r.normal(size=a.shape).astype("float32") for a in given], r.normal(size=(32, WORDS)) / 6

    def loss(parameters: Any) -> jax.Array:
        own, head = parameters
        y, _ = model.stateless_call(own, fixed, inputs, training=True)
        return jnp.sum(jnp.sin(y @ head.astype("float32")))

    linears = LINEARS.get(name, 2 * LAYERS + 1)
    return judged(name, loss, parameters, [expected, (*expected[:2], linears, expected[3])])


if __name__ == "__main__":
    sys.exit(0 if all([checked(name) for name in sys.argv[1:] or BACKBONES]) else 1)
