"""Print what `jln.fuse` makes of the models in tests/zoo: norms, sums, numbers, and bytes on an H200.

    python benchmarks/real_models.py              # needs jax[cuda13], Flax, Haiku, Equinox, no GPU; twelve minutes
    python benchmarks/real_models.py GPT-2 T5     # only models whose names have one of these words

Norms and sums: those that operators compute, of the sums those that are in one operator with a norm. Linears: norms
that, with `linears=True`, are one operator with the Linears behind. All three as tests/fuse/test_zoo.py holds them; a
scan's body counts once. Difference: of any gradient in float64 at the tests' size, as a part of that gradient's largest
element (or, where that is a rounding itself, of the largest of all), the larger of the two functions that fuse makes.
The rest is a training step of two blocks (of the ViT four) in bfloat16 at the model's large size, compiled for an H200,
as it is, fused, and fused with `linears=True`: what is held between forward and backward, beside the parameters and x;
what all kernels move; the compiled program's temporary memory.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JLN_CHIP", "h200")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))
import jln
import zoo  # pyright: ignore[reportMissingImports]

GB = 1e9
ROUNDING = 1e-15
HEADER = ("model", "framework", "norms", "sums", "Linears", "difference", "held, GB", "moved, GB", "temporary, GB")


def functions(model: Any) -> tuple[Callable[..., Any], ...]:
    """The model's function as it is, fused, and fused with its Linears."""
    return model.function, jln.fuse(model.function), jln.fuse(model.function, linears=True)


def drawn(tree: Any) -> Any:
    r = np.random.default_rng(0)
    return jax.tree.map(lambda a: jnp.asarray((0.3 if a.ndim == 1 else 0.05) * r.normal(size=a.shape), a.dtype), tree)


def gradient_difference(client: Any) -> float:
    with jax.enable_x64(True):
        model = zoo.made(client, zoo.SMALL)
        parameters, x = drawn((model.parameters, model.x))
        weight = drawn(jax.eval_shape(model.function, parameters, x))

        def gradients(f: Any) -> list[Any]:
            return jax.tree.leaves(jax.jit(jax.grad(lambda *args: jnp.sum(weight * f(*args)), (0, 1)))(parameters, x))

        wanted, *fused = map(gradients, functions(model))
        greatest = max(float(jnp.abs(b).max()) for b in wanted)
        sizes = [max(float(jnp.abs(b).max()), ROUNDING / 1e-12 * greatest) for b in wanted]
        return max(
            float(jnp.abs(a - b).max()) / size for own in fused for a, b, size in zip(own, wanted, sizes, strict=True)
        )


def compiled(function: Any, model: Any) -> tuple[int, int, int]:
    """The bytes that a model's compiled step holds, moves, and takes as temporary memory."""

    def loss(parameters: Any, x: Any) -> Any:
        return jnp.mean(function(parameters, x).astype(jnp.float32) ** 2)

    program = jln.program.compile_for(jax.value_and_grad(loss, (0, 1)), model.parameters, model.x)
    return zoo.held(function, model.parameters, model.x), program.bytes_total, program.temp_bytes


def row(name: str) -> list[str]:
    client = zoo.CLIENTS[name]
    difference = gradient_difference(client)
    model = zoo.made(client, client.large)
    measured = [compiled(function, model) for function in functions(model)]
    cells = [" / ".join(f"{a / GB:.2f}" for a in column) for column in zip(*measured, strict=True)]
    counts = [str(count(client.large.layers)) for count in (client.norms, client.sums, client.linears)]
    return [name, client.framework, *counts, f"{difference:.0e}", *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what jln.fuse makes of the models in tests/zoo.")
    parser.add_argument("words", nargs="*", help="only models whose names have one of these")
    words = parser.parse_args().words
    names = [name for name in zoo.CLIENTS if not words or any(word in name for word in words)]
    if not names:
        parser.error(f"no model's name has any of these words; known are {'; '.join(zoo.CLIENTS)}")
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for name in names:
        print("| " + " | ".join(row(name)) + " |", flush=True)


if __name__ == "__main__":
    main()
