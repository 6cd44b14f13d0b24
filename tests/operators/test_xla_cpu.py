"""Temporary memory of the hand-derived rules on XLA's CPU backend.

A norm's gradient needs no array of the size of x beside inputs and results, and a Linear's no more than autodiff.
"""

import jax
import jax.numpy as jnp
import pytest

import jln

MIB = 2**20


def temporaries(function, *shapes):
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# More rows than a row has elements, fewer, and many short rows: the three sizes of benchmarks/README.md.
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 4096), (16384, 256)])
@pytest.mark.parametrize("returns_y", [False, True])
def test_layer_norm(shape, dtype, returns_y):
    def step(x, scale, offset, dy):
        y, pullback = jax.vjp(jln.layer_norm, x, scale, offset)
        return (y if returns_y else None), pullback(dy)

    x = jax.ShapeDtypeStruct(shape, dtype)
    parameter = jax.ShapeDtypeStruct(shape[1:], dtype)
    # 0.2 MiB are left for small buffers of tiles; x itself is 16 MiB in float32.
    assert temporaries(step, x, parameter, parameter, x) <= 0.2 * MIB
    assert temporaries(jln.layer_norm, x) <= 0.2 * MIB


# More rows than a row has elements, fewer, a square, many short rows, and a ragged few.
ONE = [(4096, 1024, 3072), (1024, 4096, 256), (1024, 1024, 1024), (16384, 256, 64), (333, 768, 1000)]
# Queries, keys and values with fewer heads of the latter, and three kernels that are equal.
SEVERAL = [(2048, 1024, (1024, 256, 256)), (4096, 512, (512, 512, 512))]
LINEARS = [("layer_norm_linear", *size) for size in ONE + SEVERAL] + [("rms_norm_linear", *size) for size in SEVERAL]


@pytest.mark.parametrize(
    ("dtype", "parameter"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize(("name", "m", "h", "features"), LINEARS)
def test_gradient_of_linears(name, m, h, features, dtype, parameter):
    """A loss's gradient needs no more temporary memory than plain autodiff, of one Linear or of several."""
    several = isinstance(features, tuple)
    norm = [jax.ShapeDtypeStruct((h,), parameter)] * (2 if name.startswith("layer") else 1)
    kernels = tuple(jax.ShapeDtypeStruct((h, n), parameter) for n in (features if several else (features,)))
    linear = (kernels,) if several else (*kernels, jax.ShapeDtypeStruct((features,), parameter))
    given = jax.ShapeDtypeStruct((m, h), dtype), *norm, *linear

    def needed(operator):
        def loss(*given):
            return sum(jnp.sum(jnp.sin(a).astype("float32")) for a in jax.tree.leaves(operator(*given)))

        return temporaries(jax.value_and_grad(loss, range(len(given))), *given)

    assert needed(getattr(jln, name)) <= needed(getattr(jln.reference, name))
