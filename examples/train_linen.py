"""Train a small ViT in Flax Linen on handwritten digits, in bfloat16 and in float16: with jln's layers and with Flax's.

    python examples/train_linen.py        # well under two minutes on two CPU cores; nothing is downloaded

Parameters are float32. bfloat16 needs no more than `dtype`; float16 has so small a range that the loss is scaled, by
Flax's DynamicScale, which starts too high here: the first gradients overflow, their step is skipped, the scale halved,
and training recovers. Words used in shapes: B images, T patches of an image, C the width.
"""

from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax.training.dynamic_scale import DynamicScale

import jln
import jln.linen
from digits import batches, console, patches, report, timed

WIDTH, HEADS, LAYERS = 64, 4, 3
GOAL = 0.92  # of the test digits
FIRST_SCALE = 2.0**26  # float16 ends at 2**16


class LayerNormDense(nn.Module):
    """Flax's two layers in place of jln.linen.LayerNormDense, with the same names."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features, dtype=self.dtype, name="dense")(nn.LayerNorm(dtype=self.dtype, name="norm")(x))


LAYERS_OF = {"jln.linen": (jln.linen.LayerNorm, jln.linen.LayerNormDense), "flax.linen": (nn.LayerNorm, LayerNormDense)}


class ViT(nn.Module):
    """A transformer from patches [B, T, 4] to logits [B, 10], float32."""

    norm: Any
    norm_dense: Any
    dtype: Any

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, dtype=self.dtype, name="embed")(x)
        x = x + self.param("position", nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)
        for i in range(LAYERS):
            h = self.norm(dtype=self.dtype, name=f"norm_{i}")(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype, name=f"attention_{i}")(h)
            h = jax.nn.gelu(self.norm_dense(2 * WIDTH, dtype=self.dtype, name=f"up_{i}")(x))
            x = x + nn.Dense(WIDTH, dtype=self.dtype, name=f"down_{i}")(h)
        x = x.mean(1)
        return self.norm_dense(10, dtype=self.dtype, name="head")(x).astype(jnp.float32)


def train(model: ViT, params, data, steps: int, seed: int):
    """Train the model and return its parameters, the last loss, and what happened to the loss scale."""
    optimizer = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    state = optimizer.init(params)
    scale = DynamicScale(growth_interval=200, scale=FIRST_SCALE) if model.dtype == jnp.float16 else None

    @jax.jit
    def step(params, state, scale, x, labels):
        def loss_of(params):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), labels).mean()

        finite = True
        if scale is None:
            loss, gradients = jax.value_and_grad(loss_of)(params)
        else:
            scale, finite, loss, gradients = scale.value_and_grad(loss_of)(params)
        updates, new_state = optimizer.update(gradients, state)
        new = (optax.apply_updates(params, updates), new_state)
        params, state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state))
        return params, state, scale, loss, finite

    skipped, loss = [], jnp.inf
    for i, (x, labels) in enumerate(batches(*data, 64, steps, seed)):
        params, state, scale, loss, finite = step(params, state, scale, x, labels)
        if not finite:
            skipped.append(i)
    if scale is None:
        return params, float(loss), ""
    if not skipped or skipped[0] != 0 or len(skipped) == steps:
        raise RuntimeError(f"the first scale should overflow and a later one should not; overflows: {skipped}")
    note = f"The gradients overflowed in steps {skipped}, which were skipped; the loss scale went from "
    return params, float(loss), f"{note}2^{np.log2(FIRST_SCALE):.0f} to 2^{np.log2(float(scale.scale)):.0f}."


def main(
    steps: Annotated[int, typer.Option(min=20, help="Optimizer steps of each run.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
):
    """Train with jln's layers and with Flax's, in two dtypes; exits with 1 if they part, or below 92 % in 500 steps."""
    training, (test_x, test_labels) = patches()
    runs = []
    for dtype in (jnp.bfloat16, jnp.float16):
        models = {name: ViT(*layers, dtype) for name, layers in LAYERS_OF.items()}
        initial = {name: model.init(jax.random.key(seed), test_x[:1]) for name, model in models.items()}
        jax.tree.map(np.testing.assert_array_equal, *initial.values())  # the same names, shapes and values
        routes = jln.explain(models["jln.linen"].apply, initial["jln.linen"], test_x)
        console.print(str(routes), style="dim", markup=False)
        for name, model in models.items():
            runs.append(
                timed(
                    f"{name}, {jnp.dtype(dtype).name}",
                    lambda model=model, name=name: train(model, initial[name], training, steps, seed),  # noqa: B023
                    lambda params, model=model: float((model.apply(params, test_x).argmax(-1) == test_labels).mean()),
                )
            )
    if not report(runs, GOAL if steps >= 500 else 0):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
