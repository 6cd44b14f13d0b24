"""Time training steps of the zoo's models on the GPU that is here: as they are, by `jln.fuse`, and with their Linears.

    python benchmarks/step_times.py Llama --layers 12 [--output steps.json]

A step is forward + backward, as `benchmarks/steps.py` counts it. Losses and gradients are compared with those of the
model as it is, and the exit status is 1 where they differ. A time is the wall clock's over several steps, each
dispatched behind the one before; the programs take turns, and the medians of their rounds are printed.
"""

from __future__ import annotations

import pathlib
import statistics
import time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

import jln
import machine
from rows import known, save
from steps import FUSED, step
from zoo.models import MODELS, functional

STEPS = 3  # of a round
TOLERANCE = 3e-2  # of the gradient's length: two programs' products in bfloat16 differ by up to 1e-2


def drawn(shapes: Any) -> Any:
    """Arrays of these shapes, normal: around 1 where a parameter has one axis, as scales do, and else of spread 0.02.

    With scales of 1 behind the last norm the loss would be the same whatever the parameters are.
    """
    leaves, tree = jax.tree.flatten(shapes)
    arrays = []
    for key, a in zip(jax.random.split(jax.random.key(0), len(leaves)), leaves, strict=True):
        normal = jax.random.normal(key, a.shape, a.dtype)
        arrays.append(1 + 0.3 * normal if len(a.shape) < 2 else 0.02 * normal)
    return tree.unflatten(arrays)


@jax.jit
def error(got: Any, expected: Any) -> jax.Array:
    """The distance of two trees of arrays, as a part of the second's length."""

    def squares(tree: Any) -> jax.Array:
        return sum((jnp.sum(jnp.square(a.astype(jnp.float32))) for a in jax.tree.leaves(tree)), jnp.float32(0))

    return jnp.sqrt(squares(jax.tree.map(jnp.subtract, got, expected)) / squares(expected))


def measured(name: str, rounds: int, changes: dict[str, Any]) -> dict[str, Any]:
    model = functional(MODELS[name], **changes)
    given = drawn(model.parameters), 50 * drawn(model.x)
    programs, seconds = {}, {}
    for by, fuse in FUSED.items():
        started = time.perf_counter()
        programs[by] = jax.jit(step(fuse(model.function))).lower(*given).compile()
        print(f"{name}, {by}: compiled in {time.perf_counter() - started:.0f} s", flush=True)
    expected = programs["as it is"](*given)
    errors = {by: float(error(program(*given), expected)) for by, program in programs.items()}
    del expected
    taken: dict[str, list[float]] = {by: [] for by in programs}
    for _ in range(rounds):
        for by, program in programs.items():
            results = jax.block_until_ready(program(*given))
            started = time.perf_counter()
            for _ in range(STEPS):
                results = program(*given)
            jax.block_until_ready(results)
            taken[by].append((time.perf_counter() - started) / STEPS)
            del results
    seconds = {by: statistics.median(each) for by, each in taken.items()}
    temporary = {by: program.memory_analysis().temp_size_in_bytes for by, program in programs.items()}
    for by in programs:
        ratio, spread = seconds[by] / seconds["as it is"], max(taken[by]) / min(taken[by]) - 1
        times = f"{seconds[by] * 1e3:>9.3f} ms, {ratio:>6.4f} of the first, spread {spread:.4f}"
        size = f"{temporary[by] / 1e9:>6.2f} GB temporary"
        print(f"{name:<12} {by:<13} {times}, {size}, off by {errors[by]:.1e}", flush=True)
    return {"model": name, "seconds": taken, "temporary_bytes": temporary, "errors": errors}


def main(
    models: Annotated[list[str], typer.Argument(help=f"Of {'; '.join(MODELS)}.")],
    layers: Annotated[int | None, typer.Option(min=1, help="How many. [default: the model's]")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="How many examples. [default: the model's]")] = None,
    attention: Annotated[str | None, typer.Option(help="cudnn or xla. [default: the model's]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help=f"Of {STEPS} steps of each program.")] = 9,
    output: Annotated[pathlib.Path | None, typer.Option(help="A file, for all of it as JSON.", dir_okay=False)] = None,
) -> None:
    """Print the times of models' steps: as they are, fused, and fused with their Linears."""
    found = {"environment": machine.environment(), "jln": jln.__version__, "steps": []}
    asked = {"layers": layers, "batch": batch, "attention": attention}
    changes = {name: value for name, value in asked.items() if value is not None}
    for name in known("model", models, MODELS):
        found["steps"].append(measured(name, rounds, changes) | changes)
        if output is not None:
            save(found, output)
    raise typer.Exit(int(any(not e <= TOLERANCE for each in found["steps"] for e in each["errors"].values())))


if __name__ == "__main__":
    typer.run(main)
