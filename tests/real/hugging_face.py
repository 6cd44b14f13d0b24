"""Fuse Hugging Face's own models in JAX, and compare them with themselves: losses and gradients.

    pip install "transformers==4.57.6"    # the last with models in JAX
    python tests/real/hugging_face.py     # a minute, nothing is downloaded

For every model: the norms and sums that `jln.fuse` finds, of norms those with Linears too, and the largest difference
of any gradient, as a part of that gradient's largest element. Models that compute all in their own dtype are compared
in float64; T5, Llama and Gemma take a norm's variance in float32 whatever they are told, so they are compared in
float32. Exits with 1 where a number differs, or other norms and sums are found than there are.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("USE_TORCH", "0")

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLM
from transformers.models.gemma.modeling_flax_gemma import FlaxGemmaForCausalLM
from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModel
from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLM
from transformers.models.t5 import modeling_flax_t5
from transformers.models.vit.modeling_flax_vit import FlaxViTForImageClassification

from compared import judged

LAYERS, WIDTH, WORDS = 2, 32, 50
TOKENS = {"input_ids": np.random.default_rng(0).integers(2, WORDS, (2, 12))}
IMAGES = {"pixel_values": np.random.default_rng(1).normal(size=(2, 3, 8, 8))}


class _Numpy:
    """A `jax.numpy` as T5's file wants it: with the name `a_max` in `clip`, which JAX has taken away."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def clip(self, a: Any, a_max: Any) -> jax.Array:
        return jnp.clip(a, max=a_max)


modeling_flax_t5.jnp = _Numpy()


class Real(NamedTuple):
    """A model of Hugging Face's, of a configuration of some sizes, and what it is called with.

    finds: norms, sums, and with `linears=True` norms that are one operator with the Linears behind.
    """

    make: Any
    config: str
    sizes: dict[str, Any]
    inputs: dict[str, Any]
    finds: tuple[int, int, int]
    dtype: str = "float64"


SIZES = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
SIZES |= {"num_attention_heads": 4}
GROUPED = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 16}
OF_GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": WORDS, "n_positions": 16}
OF_T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 96, "num_layers": LAYERS, "num_heads": 4, "vocab_size": WORDS}
OF_T5 |= {"feed_forward_proj": "gated-gelu"}
BOTH = TOKENS | {"decoder_input_ids": TOKENS["input_ids"][:, :7]}
NORMS, SUMS = 2 * LAYERS + 1, 2 * LAYERS
MODELS = {
    # Its Linears but the head are a class of its own, FlaxConv1D.
    "GPT-2": Real(FlaxGPT2LMHeadModel, "GPT2Config", OF_GPT, TOKENS, (NORMS, SUMS + 1, NORMS)),
    # The head has a norm of its own, which is read by a Linear whose kernel are the embeddings.
    "BERT": Real(FlaxBertForMaskedLM, "BertConfig", SIZES, TOKENS, (NORMS + 1, SUMS + 1, 2)),
    "ViT": Real(
        FlaxViTForImageClassification,
        "ViTConfig",
        SIZES | {"image_size": 8, "patch_size": 4},
        IMAGES,
        (NORMS, SUMS, NORMS - 1),
    ),
    # The decoder's keys and values read the encoder's last norm. Its own last norm is multiplied by a number before the
    # head reads it, which is the scale's.
    "T5": Real(
        modeling_flax_t5.FlaxT5ForConditionalGeneration,
        "T5Config",
        OF_T5,
        BOTH,
        (5 * LAYERS + 2, 5 * LAYERS, 5 * LAYERS + 2),
        "float32",
    ),
    "Llama": Real(FlaxLlamaForCausalLM, "LlamaConfig", GROUPED, TOKENS, (NORMS, SUMS, NORMS), "float32"),
    "Gemma": Real(
        FlaxGemmaForCausalLM, "GemmaConfig", GROUPED | {"head_dim": 8}, TOKENS, (NORMS, SUMS, NORMS), "float32"
    ),
}


def checked(name: str, real: Real) -> bool:
    config = getattr(transformers, real.config)(**real.sizes)
    shape = {} if real.inputs is IMAGES else {"input_shape": (1, 4)}
    model = real.make(config, dtype=jnp.dtype(real.dtype), seed=0, **shape)
    r = np.random.default_rng(2)
    parameters = jax.tree.map(lambda a: jnp.asarray(a + 0.1 * r.normal(size=a.shape), real.dtype), model.params)

    def loss(parameters: Any) -> jax.Array:
        return jnp.sum(jnp.sin(model(**real.inputs, params=parameters, train=False).logits))

    norms, sums, linears = real.finds
    counts = [(norms, sums, 0, 0), (norms, sums, linears, 0)]
    return judged(f"{name} {real.dtype}", loss, parameters, counts, real.dtype)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    results = [checked(name, MODELS[name]) for name in sys.argv[1:] or MODELS]
    sys.exit(0 if all(results) else 1)
