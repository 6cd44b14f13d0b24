"""The list of the zoo's models, each with the size of one that is trained, and what makes functions of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
from flax import nnx

from zoo.alphafold import alphafold
from zoo.bert import Bert
from zoo.dit import Dit
from zoo.gemma import gemma
from zoo.gpt import gpt
from zoo.llama import checkpointed_llama, llama
from zoo.mixer import mixer
from zoo.parallel import Parallel
from zoo.parts import Size
from zoo.perceiver import perceiver
from zoo.qwen import qwen
from zoo.t5 import T5
from zoo.vit import Vit


class Model(NamedTuple):
    """A model: the framework it is written in, what makes it of a size, and the size at which it is trained."""

    framework: str
    make: Callable[[Size], Any]
    size: Size


_GPT = Size(batch=4, tokens=2048, width=4096, heads=32, key_heads=32, head=128, hidden=16384)  # of 6.7 billion
_LLAMA = dataclasses.replace(_GPT, key_heads=8, hidden=14336)  # of 8 billion
_BERT = Size(batch=64, tokens=512, width=1024, heads=16, key_heads=16, head=64, hidden=4096)  # the large one
_VIT = Size(batch=64, tokens=256, width=1024, heads=16, key_heads=16, head=64, hidden=4096, layers=4)  # L/14

MODELS: Mapping[str, Model] = {
    "GPT": Model("nnx", gpt, _GPT),
    "GPT, norms in float32": Model("nnx", gpt, dataclasses.replace(_GPT, norm_dtype=None)),
    "Llama": Model("nnx", llama, _LLAMA),
    "Llama, norms in float32": Model("nnx", llama, dataclasses.replace(_LLAMA, norm_dtype=None)),
    "Llama, checkpointed": Model("nnx", checkpointed_llama, _LLAMA),
    "Gemma": Model("nnx", gemma, dataclasses.replace(_LLAMA, width=5376, key_heads=16, hidden=21504)),  # 3, 27B
    "Qwen": Model("nnx", qwen, dataclasses.replace(_GPT, width=2048, key_heads=4, hidden=8 * 768)),  # 3, 30B-A3B
    "DiT": Model("nnx", Dit, Size(16, 1024, 1152, heads=16, key_heads=16, head=72, hidden=4608)),  # XL/2, 512x512
    "BERT": Model("linen", Bert, _BERT),
    "ViT": Model("linen", Vit, _VIT),
    "T5": Model("linen", T5, dataclasses.replace(_BERT, hidden=2816)),  # 1.1 large
    "Perceiver": Model("haiku", perceiver, dataclasses.replace(_BERT, batch=16, tokens=2048)),
    "AlphaFold": Model("haiku", alphafold, Size(384, 384, 128, heads=4, key_heads=4, head=32, hidden=512)),  # pairs
    "Mixer": Model("haiku", mixer, _VIT),
    "Parallel": Model("equinox", Parallel, dataclasses.replace(_GPT, width=2048, heads=16, hidden=8192)),
}


class Functional(NamedTuple):
    """A model's function of parameters and x [B, T, H]; of these their shapes and dtypes."""

    function: Callable[[Any, Any], jax.Array]
    parameters: Any
    x: jax.ShapeDtypeStruct


def functional(model: Model, **changes: Any) -> Functional:
    """Make a function of a model, of its size with some changes. Nothing is computed: no size is too large."""
    framework, make, size = model.framework, model.make, dataclasses.replace(model.size, **changes)
    x = jax.ShapeDtypeStruct(size.shape, size.dtype)

    # Where a framework's layers compute in the dtype of their parameters, the parameters are cast.
    def wide(parameters: Any) -> Any:
        return jax.tree.map(lambda a: a.update(dtype=size.param_dtype), parameters)

    def cast(parameters: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(size.dtype), parameters)

    if framework == "nnx":
        graph, parameters = nnx.split(nnx.eval_shape(lambda: make(size)))
        return Functional(lambda parameters, x: nnx.merge(graph, parameters)(x), parameters, x)
    if framework == "equinox":
        arrays, rest = eqx.partition(eqx.filter_eval_shape(make, size), lambda a: isinstance(a, jax.ShapeDtypeStruct))
        leaves, tree = jax.tree.flatten(arrays)
        return Functional(lambda leaves, x: eqx.combine(tree.unflatten(cast(leaves)), rest)(x), wide(leaves), x)
    made = make(size)
    parameters = jax.eval_shape(made.init, jax.random.key(0), x)
    if framework == "linen":
        return Functional(made.apply, parameters, x)
    return Functional(lambda parameters, x: made.apply(cast(parameters), x), wide(parameters), x)
