"""What XLA's CPU backend makes of the hand-derived rules: nothing of the size of x but the inputs and the results."""

import jax
import jax.numpy as jnp
import pytest

import jln

MIB = 2**20


def temporaries(function, *shapes):
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# More rows than a row has elements, fewer, and many short rows: DESIGN section 7's three sizes.
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 4096), (16384, 256)])
@pytest.mark.parametrize("returns_y", [False, True])
def test_gradient_of_layer_norm(shape, dtype, returns_y):
    def step(x, scale, offset, dy):
        y, pullback = jax.vjp(jln.layer_norm, x, scale, offset)
        return (y if returns_y else None), pullback(dy)

    x = jax.ShapeDtypeStruct(shape, dtype)
    parameter = jax.ShapeDtypeStruct(shape[1:], dtype)
    # 0.2 MiB is what the field's smallest tile buffers come to; x itself is 16 MiB in float32.
    assert temporaries(step, x, parameter, parameter, x) <= 0.2 * MIB


@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 4096)])
def test_forward(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert temporaries(jln.layer_norm, x) <= 0.2 * MIB
