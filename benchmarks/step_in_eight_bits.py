"""Print what a training step of a Llama with JAX's own products in eight bits moves and holds, plain and by `jln.fuse`.

    python benchmarks/step_in_eight_bits.py --layers 4    # needs jax[cuda13] and flax, no GPU; a minute

The model is the zoo's, of 8 billion parameters. All its Linears are `jax.nn.scaled_dot_general` of MXFP8, which cuDNN
multiplies on a B200. Nothing in the model knows of jln.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.console import Console
from rich.table import Table

from steps import facts, jln
from zoo.llama import llama
from zoo.models import MODELS, functional
from zoo.parts import Size

COLUMNS = ("kernels", "bytes", "bytes_outside_products", "held_bytes", "temporary_bytes")


def product(x: jax.Array, kernel: jax.Array, axes: Any, **_: Any) -> jax.Array:
    """Multiply as a Linear would by `jax.lax.dot_general`, in eight bits."""
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    return jax.nn.scaled_dot_general(x, kernel, axes, preferred_element_type=jnp.bfloat16, configs=configs)


def llama_in_eight_bits(size: Size) -> Any:
    model = llama(size)
    for _, module in nnx.iter_graph(model):
        if isinstance(module, nnx.Linear):
            module.dot_general = product
    return model


def main(layers: Annotated[int, typer.Option(help="How many of the model's blocks.")] = 4) -> None:
    model = functional(MODELS["Llama"]._replace(make=llama_in_eight_bits), layers=layers)
    table = Table(
        "", "kernels", "moved, GB", "outside of products", "held", "temporary", title=f"{layers} layers, B200"
    )
    for name, function in {"as it is": model.function, "fused": jln.fuse(model.function)}.items():
        kernels, *sizes = (facts(function, model, "b200", "XLA")[column] for column in COLUMNS)
        table.add_row(name, str(kernels), *(f"{size / 1e9:.2f}" for size in sizes))
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
