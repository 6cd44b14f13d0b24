"""Rung 4: bytes that a converted model's step holds and moves, as parts of those of the original's.

These are some rows of the table that `python benchmarks/real_models.py` prints.
"""

import jax
import jax.numpy as jnp
import pytest

import absent_gpu
from jln import program

for _name in ("flax", "haiku", "equinox"):
    pytest.importorskip(_name)

from zoo import CLIENTS, functions, held  # noqa: E402


# Parts with JAX 0.10.2, rounded up to hundredths, of one block where the table has two; and the number of norms.
@pytest.mark.parametrize(
    ("name", "held_part", "moved_part", "norms"),
    [
        ("GPT-2", 0.66, 1.04, 3),
        ("BERT", 0.66, 1.03, 3),
        ("AlphaFold's, with a recipe", 0.71, 0.91, 1),
        ("Parallel block", 0.74, 0.92, 2),
    ],
)
def test_a_converted_model_holds_less_and_moves_about_as_much(name, held_part, moved_part, norms):
    client = CLIENTS[name]
    model = functions(client, client.large._replace(layers=1))

    def compiled(function):
        def loss(parameters, x):
            return jnp.mean(function(parameters, x).astype("float32") ** 2)

        return program.compile_for(jax.value_and_grad(loss, (0, 1)), model.parameters, model.x)

    plain, converted = compiled(model.plain), compiled(model.converted)
    assert absent_gpu.triton_kernels(plain) == []
    assert len(absent_gpu.triton_kernels(converted)) >= 3 * norms
    kept, before = (held(f, model.parameters, model.x) for f in (model.converted, model.plain))
    assert kept <= held_part * before
    assert converted.bytes_total <= moved_part * plain.bytes_total
