"""Places of the arrays of GPT and Llama on a mesh, as trainers shard them.

The mesh has the axes "data", "fsdp" and "tensor", of any sizes. The first two split the batch, "fsdp" also what is
stored of each kernel, and "tensor" heads and hidden features: the kernels behind the norms by columns, those that lead
back by rows. With `by_tokens`, "tensor" splits the stream between them too, by its tokens (Megatron's sequence
parallelism). The models name their axes in `parts.stream` and `parts.features`; the rules here say what these are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")  # from the outside of a cluster inwards
BATCH = ("data", "fsdp")
BY_COLUMNS, BY_ROWS = P("fsdp", "tensor"), P("tensor", "fsdp")  # of a kernel, [features in, features out]
KERNELS = dict.fromkeys(("qkv", "q", "k", "v", "gate", "up"), BY_COLUMNS) | dict.fromkeys(("out", "down"), BY_ROWS)


def place(path: tuple[Any, ...]) -> P:
    """Return where a parameter lies, by its module's and its own name; norms and other biases are everywhere, whole."""
    module, name = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)][-2:]
    kernel = KERNELS.get(module)
    if kernel is None or name not in ("kernel", "bias"):
        return P()
    return kernel if name == "kernel" else P("tensor") if kernel == BY_COLUMNS else P()


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return a NamedSharding for each leaf of a model's state, or an optimizer's, whose leaves have the same names."""
    return jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, place(path)), tree)


def stream_spec(by_tokens: bool) -> P:
    """Return where x [B, T, H] lies between the Linears."""
    return P(BATCH, "tensor" if by_tokens else None, None)


@contextlib.contextmanager
def on(mesh: Mesh, by_tokens: bool = False) -> Iterator[None]:
    """Trace models within this context, and the axes that they name are those of the mesh."""
    rules = {"batch": BATCH, "tokens": "tensor" if by_tokens else None, "features": "tensor"}
    with jax.set_mesh(mesh), nn.logical_axis_rules(tuple(rules.items())):
        yield
