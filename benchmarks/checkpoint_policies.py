"""Print what policies of `jax.checkpoint` make again and hold, in four layers of the zoo's Llama.

    python benchmarks/checkpoint_policies.py
    python benchmarks/checkpoint_policies.py nothing STATISTICS   # with one of these words in their names

The step is compiled for an H200 that need not be there, as it is, by `jln.fuse` and with its Linears.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import typer

import jln
import program
from steps import FUSED, print_header, print_row, step
from zoo.llama import llama
from zoo.models import MODELS, Model, functional

LAYERS = 4
ours, jaxs = jln.checkpoint_policies, jax.checkpoint_policies
POLICIES: dict[str, Any] = {
    "no checkpoint": None,
    "nothing_saveable": jaxs.nothing_saveable,
    "save_only_these_names(jln.STATISTICS)": jaxs.save_only_these_names(jln.STATISTICS),
    "dots_with_no_batch_dims_saveable": jaxs.dots_with_no_batch_dims_saveable,
    "jln's dots_with_no_batch_dims_and_statistics_saveable": ours.dots_with_no_batch_dims_and_statistics_saveable,
}
HEADER = ("policy", "products", "norm kernels", "moved, GB", "temporary, GB")


def row(name: str, policy: Callable | None) -> list[str]:
    model = functional(Model("nnx", functools.partial(llama, policy=policy), MODELS["Llama"].size), layers=LAYERS)
    columns = []
    for fuse in FUSED.values():
        found = program.compile_for(step(fuse(model.function)), model.parameters, model.x)
        products = sum(k.times for k in found.kernels if k.product and not k.kind.startswith("__cudnn$fmha"))
        norms = sum(k.times for k in found.kernels if k.is_triton)
        columns.append((f"{products}", f"{norms}", f"{found.bytes_total / 1e9:.1f}", f"{found.temp_bytes / 1e9:.2f}"))
    return [f"`{name}`", *map(" / ".join, zip(*columns, strict=True))]


def main(
    words: Annotated[list[str] | None, typer.Argument(help="Only policies whose names have one of these.")] = None,
) -> None:
    """Print what policies of jax.checkpoint make again and hold: as it is / fused / with Linears."""
    chosen = {name: policy for name, policy in POLICIES.items() if not words or any(word in name for word in words)}
    if not chosen:
        raise typer.BadParameter(f"no policy's name has any of these words; known are {'; '.join(POLICIES)}")
    print_header(HEADER)
    for name, policy in chosen.items():
        print_row(row(name, policy))


if __name__ == "__main__":
    typer.run(main)
