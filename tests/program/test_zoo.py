"""Rung 4: bytes that a fused model's step holds and moves, as parts of those of the original's.

These are some rows of the table that `python benchmarks/real_models.py` prints.
"""

import jax
import jax.numpy as jnp
import pytest

import absent_gpu
import jln
from jln import program

for _name in ("flax", "haiku", "equinox"):
    pytest.importorskip(_name)

from zoo import CLIENTS, held, made  # noqa: E402


# Parts with JAX 0.10.2, rounded up to hundredths, of one block where the table has two: of `fuse`, then with Linears.
@pytest.mark.parametrize(
    ("name", "held_parts", "moved_parts"),
    [
        ("GPT-2", (0.70, 0.66), (0.99, 0.99)),
        ("BERT", (0.70, 0.68), (0.99, 1.01)),
        ("AlphaFold's transition", (0.71, 0.65), (0.91, 0.92)),
        ("Parallel block", (0.73, 0.74), (0.87, 0.87)),
    ],
)
def test_a_fused_model_holds_less_and_moves_less(name, held_parts, moved_parts):
    client = CLIENTS[name]
    model = made(client, client.large._replace(layers=1))

    def compiled(function):
        def loss(parameters, x):
            return jnp.mean(function(parameters, x).astype("float32") ** 2)

        return program.compile_for(jax.value_and_grad(loss, (0, 1)), model.parameters, model.x)

    plain, before = compiled(model.function), held(model.function, model.parameters, model.x)
    assert absent_gpu.triton_kernels(plain) == []
    for linears, held_part, moved_part in zip((False, True), held_parts, moved_parts, strict=True):
        function = jln.fuse(model.function, linears=linears)
        fused = compiled(function)
        assert len(absent_gpu.triton_kernels(fused)) >= 3 * client.norms(1)
        kept = held(function, model.parameters, model.x)
        print(f"{name}: holds {kept / before:.4f}, moves {fused.bytes_total / plain.bytes_total:.4f}")
        assert kept <= held_part * before
        assert fused.bytes_total <= moved_part * plain.bytes_total
