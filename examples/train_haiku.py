"""Train a small MLP-Mixer in Haiku on handwritten digits: with jln's LayerNorm, and from the same seed with Haiku's.

    python examples/train_haiku.py        # well under two minutes on two CPU cores; nothing is downloaded

The model is Haiku's as it is usually written; only the place that its LayerNorm is taken from changes. Words used in
shapes: B images, T patches of an image, C the width.
"""

from types import ModuleType
from typing import Annotated

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer

import jln
import jln.haiku
from digits import batches, console, patches, report, timed

WIDTH, HIDDEN, LAYERS = 64, 128, 3
GOAL = 0.95  # of the test digits


def mixer(norms: ModuleType, x: jax.Array) -> jax.Array:
    """The logits [B, 10] of patches [B, T, 4]; `norms` is the module that LayerNorm comes from."""

    def norm(x):
        return norms.LayerNorm(axis=-1, create_scale=True, create_offset=True, param_axis=-1)(x)

    def mlp(x, hidden):
        return hk.Linear(x.shape[-1])(jax.nn.gelu(hk.Linear(hidden)(x)))

    x = hk.Linear(WIDTH)(x)
    for _ in range(LAYERS):
        x = x + mlp(norm(x).swapaxes(1, 2), HIDDEN).swapaxes(1, 2)  # over the patches
        x = x + mlp(norm(x), HIDDEN)  # over the channels
    return hk.Linear(10)(norm(x).mean(1))


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 600,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and batches.")] = 0,
):
    """Train with jln's norm and with Haiku's; exits with 1 if they part, or below 95 % in 600 steps."""
    training, (test_x, test_labels) = patches()
    models = {
        name: hk.without_apply_rng(hk.transform(lambda x, norms=norms: mixer(norms, x)))
        for name, norms in (("jln.haiku", jln.haiku), ("haiku", hk))
    }
    initial = {name: model.init(jax.random.key(seed), test_x[:1]) for name, model in models.items()}
    jax.tree.map(np.testing.assert_array_equal, *initial.values())  # the same names, shapes and values
    routes = jln.explain(models["jln.haiku"].apply, initial["jln.haiku"], test_x)
    console.print(str(routes), style="dim", markup=False)

    def train(model, params):
        optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
        state = optimizer.init(params)

        @jax.jit
        def step(params, state, x, labels):
            def loss_of(params):
                return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), labels).mean()

            loss, gradients = jax.value_and_grad(loss_of)(params)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(params, updates), state, loss

        loss = jnp.inf
        for x, labels in batches(*training, 64, steps, seed):
            params, state, loss = step(params, state, x, labels)
        return params, float(loss), ""

    runs = [
        timed(
            name,
            lambda model=model, name=name: train(model, initial[name]),
            lambda params, model=model: float((model.apply(params, test_x).argmax(-1) == test_labels).mean()),
        )
        for name, model in models.items()
    ]
    if not report(runs, GOAL if steps >= 600 else 0):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
