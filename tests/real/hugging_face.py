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
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("USE_TORCH", "0")

import jax
import jax.numpy as jnp
import numpy as np
from transformers import BertConfig, GemmaConfig, GPT2Config, LlamaConfig, T5Config, ViTConfig
from transformers.models.bert.modeling_flax_bert import FlaxBertForMaskedLM
from transformers.models.gemma.modeling_flax_gemma import FlaxGemmaForCausalLM
from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModel
from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLM
from transformers.models.t5 import modeling_flax_t5
from transformers.models.t5.modeling_flax_t5 import FlaxT5ForConditionalGeneration
from transformers.models.vit.modeling_flax_vit import FlaxViTForImageClassification

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "benchmarks"))
from compared import judged

LAYERS, WIDTH, WORDS = 2, 32, 50
TOKENS = np.random.default_rng(0).integers(2, WORDS, (2, 12))
IMAGES = np.random.default_rng(1).normal(size=(2, 3, 8, 8))

# Of an array's largest element: sums of 32 to 96 terms, of which float64 rounds each by 1e-16 and float32 by 6e-8.
# Where an exact gradient is zero, as the keys' bias's, roundings of the largest gradient's size are left.
TOLERANCES = {"float64": (1e-12, 1e-15), "float32": (3e-5, 1e-6)}


class _Numpy:
    """A `jax.numpy` as T5's file wants it: with the name `a_max` in `clip`, which JAX has taken away."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def clip(self, a: Any, a_max: Any) -> jax.Array:
        return jnp.clip(a, max=a_max)


modeling_flax_t5.jnp = _Numpy()


class Real(NamedTuple):
    """A model of Hugging Face's.

    inputs: what the model is called with. norms, sums: those to be found. linears: norms that are one operator with the
      Linears behind. left: norms that are left to XLA.
    """

    make: Callable[..., Any]
    config: Any
    inputs: Mapping[str, Any]
    norms: int
    sums: int
    linears: int
    dtype: str = "float64"
    left: int = 0


def config(cls: type, **more: Any) -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    return cls(num_attention_heads=4, **sizes, **more)


GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 16}
MODELS = {
    # Its Linears but the head are a class of its own, FlaxConv1D.
    "GPT-2": Real(
        FlaxGPT2LMHeadModel,
        GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=4, vocab_size=WORDS, n_positions=16),
        {"input_ids": TOKENS},
        norms=2 * LAYERS + 1,
        sums=2 * LAYERS + 1,
        linears=2 * LAYERS + 1,
    ),
    # The head has a norm of its own, which is read by a Linear whose kernel are the embeddings.
    "BERT": Real(
        FlaxBertForMaskedLM,
        config(BertConfig),
        {"input_ids": TOKENS},
        norms=2 * LAYERS + 2,
        sums=2 * LAYERS + 1,
        linears=2,
    ),
    "ViT": Real(
        FlaxViTForImageClassification,
        config(ViTConfig, image_size=8, patch_size=4),
        {"pixel_values": IMAGES},
        norms=2 * LAYERS + 1,
        sums=2 * LAYERS,
        linears=2 * LAYERS,
    ),
    # The decoder's keys and values read the encoder's last norm. Its own last norm is multiplied by a number before the
    # head reads it, which is the scale's.
    "T5": Real(
        FlaxT5ForConditionalGeneration,
        T5Config(
            d_model=WIDTH,
            d_kv=8,
            d_ff=96,
            num_layers=LAYERS,
            num_heads=4,
            vocab_size=WORDS,
            feed_forward_proj="gated-gelu",
        ),
        {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :7]},
        norms=5 * LAYERS + 2,
        sums=5 * LAYERS,
        linears=5 * LAYERS + 2,
        dtype="float32",
    ),
    "Llama": Real(
        FlaxLlamaForCausalLM,
        config(LlamaConfig, **GROUPED),
        {"input_ids": TOKENS},
        norms=2 * LAYERS + 1,
        sums=2 * LAYERS,
        linears=2 * LAYERS + 1,
        dtype="float32",
    ),
    "Gemma": Real(
        FlaxGemmaForCausalLM,
        config(GemmaConfig, head_dim=8, **GROUPED),
        {"input_ids": TOKENS},
        norms=2 * LAYERS + 1,
        sums=2 * LAYERS,
        linears=2 * LAYERS + 1,
        dtype="float32",
    ),
}


def checked(name: str, real: Real) -> bool:
    model = real.make(real.config, dtype=jnp.dtype(real.dtype), seed=0, **sizes(real))
    r = np.random.default_rng(2)
    parameters = jax.tree.map(lambda a: jnp.asarray(a + 0.1 * r.normal(size=a.shape), real.dtype), model.params)

    def loss(parameters: Any) -> jax.Array:
        return jnp.sum(jnp.sin(model(**real.inputs, params=parameters, train=False).logits))

    def results(loss: Callable[[Any], jax.Array]) -> list[Any]:
        value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
        return [value, *jax.tree.leaves(gradients)]

    counts = [(real.norms, real.sums, linears, real.left) for linears in (0, real.linears)]
    return judged(f"{name} {real.dtype}", results, loss, parameters, counts, TOLERANCES[real.dtype])


def sizes(real: Real) -> dict[str, Any]:
    """The model's own argument for the shape of its inputs; none where they are images."""
    return {} if "pixel_values" in real.inputs else {"input_shape": (1, 4)}


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    wanted = sys.argv[1:] or list(MODELS)
    results = [checked(name, MODELS[name]) for name in wanted]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
