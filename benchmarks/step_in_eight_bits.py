"""Print what training steps of models with products in eight bits move and hold, as they are and by `jln.fuse`.

    python benchmarks/step_in_eight_bits.py               # needs jax[cuda13] and flax, no GPU; 6 minutes
    python benchmarks/step_in_eight_bits.py GPT --layers 1

The models are the zoo's, with a head behind them. All their Linears are `jax.nn.scaled_dot_general` of MXFP8, which
cuDNN multiplies on a B200, or Flax's `fp8_scaled_dot_general` with delayed scales, for an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from flax.linen import fp8_ops

from counted import held
from rows import known
from steps import jln, print_header, print_row, program
from zoo.models import MODELS, Functional, functional
from zoo.parts import Size

NAMES = ("GPT", "Llama", "Gemma")
POLICIES = {
    "": None,
    "keeps products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "keeps nothing": jax.checkpoint_policies.nothing_saveable,
}


def by_jax(x: jax.Array, kernel: jax.Array, axes: Any, **_: Any) -> jax.Array:
    """Multiply as a Linear would by `jax.lax.dot_general`, in eight bits."""
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    return jax.nn.scaled_dot_general(x, kernel, axes, preferred_element_type=jnp.bfloat16, configs=configs)


def by_flax(x: jax.Array, kernel: jax.Array, axes: Any, **_: Any) -> jax.Array:
    """Multiply by the scales of the step before, of which Flax keeps the largest numbers."""
    scales = {f"{side}_scale": jnp.full((1,), 0.01) for side in ("lhs", "rhs", "grad")}
    scales |= {f"{side}_amax_history": jnp.zeros((1024,)) for side in ("lhs", "rhs", "grad")}
    how = {"preferred_element_type": jnp.bfloat16, "quantize_compute_type": jnp.float32}
    return fp8_ops.fp8_scaled_dot_general(x, kernel, axes, **how, **scales)


PRODUCTS = {"JAX's, B200": (by_jax, "b200"), "Flax's, H200": (by_flax, "h200")}


def model_of(name: str, product: Callable[..., Any], policy: Callable[..., Any] | None, layers: int) -> Functional:
    """Make a model of the zoo with other products, and its blocks in checkpoints."""

    def make(size: Size) -> Any:
        model = MODELS[name].make(size)
        model.policy = policy
        for _, module in nnx.iter_graph(model):
            if isinstance(module, nnx.Linear):
                module.dot_general = product
        return model

    return functional(MODELS[name]._replace(make=make), layers=layers)


def sizes(fuse: Callable[..., Any], model: Functional, chip: str) -> tuple[float, float]:
    """Count the GB that a step of the model and a head of 1024 tokens moves, and those that it holds in between."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        head = x.reshape(-1, x.shape[-1])[:1024]
        return jnp.mean(jnp.square((model.function(parameters, x) @ head.T).astype(jnp.float32)))

    given, function = (model.parameters, model.x), fuse(loss)
    step = program.compile_for(jax.value_and_grad(function, (0, 1)), *given, chip=chip)
    return step.bytes_total / 1e9, held(function, *given) / 1e9


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Models of the zoo.")] = None,
    layers: Annotated[int, typer.Option(help="How many of the model's blocks.")] = 2,
) -> None:
    print_header(("model", "products", "jax.checkpoint", "moved, GB", "fused", "held, GB", "fused"))
    for name in known("model", names or NAMES, MODELS):
        for by, (multiply, chip) in PRODUCTS.items():
            for kept, policy in POLICIES.items():
                model = model_of(name, multiply, policy, layers)
                plain, fused = (sizes(fuse, model, chip) for fuse in (lambda loss: loss, jln.fuse))
                cells = [f"{a:.2f}" for pair in zip(plain, fused, strict=True) for a in pair]
                print_row([name, by, kept, *cells])


if __name__ == "__main__":
    typer.run(main)
