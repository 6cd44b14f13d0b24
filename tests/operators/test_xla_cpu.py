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


def needed(how, name, m, h, features, dtype, parameter):
    """Return the temporary memory of Linears behind a norm of x [m, h], and that of plain autodiff.

    features: of one Linear, which has a bias, or a tuple of several's. how: of "a loss" that reads y, as every loss
    does, so that forward ends before backward; of a cotangent that is "given"; of that, "and y" is returned.
    """
    of_x, several = jnp.promote_types(dtype, parameter), isinstance(features, tuple)
    norm = [jax.ShapeDtypeStruct((h,), parameter)] * (2 if name.startswith("layer") else 1)
    kernels, biases, dys = (
        tuple(jax.ShapeDtypeStruct((*rows, n), of) for n in (features if several else (features,)))
        for rows, of in (((h,), parameter), ((), parameter), ((m,), of_x))
    )
    given = jax.ShapeDtypeStruct((m, h), dtype), *norm, *((kernels,) if several else (*kernels, *biases))

    def by(operator):
        def loss(*given):
            return sum(jnp.sum(jnp.sin(a).astype("float32")) for a in jax.tree.leaves(operator(*given)))

        def step(dy, *given):
            y, pullback = jax.vjp(operator, *given)
            return (y if how == "and y" else None), pullback(dy)

        if how == "a loss":
            return temporaries(jax.value_and_grad(loss, range(len(given))), *given)
        return temporaries(step, dys if several else dys[0], *given)

    return by(getattr(jln, name)), by(getattr(jln.reference, name))


LINEAR_DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


@pytest.mark.parametrize(("dtype", "parameter"), LINEAR_DTYPES)
# More rows than a row has elements, fewer, a square, many short rows, and a ragged few.
@pytest.mark.parametrize(
    ("m", "h", "n"), [(4096, 1024, 3072), (1024, 4096, 256), (1024, 1024, 1024), (16384, 256, 64), (333, 768, 1000)]
)
def test_gradient_of_layer_norm_linear(m, h, n, dtype, parameter):
    """A loss's gradient needs no more temporary memory than plain autodiff."""
    ours, plain = needed("a loss", "layer_norm_linear", m, h, n, dtype, parameter)
    assert ours <= plain


@pytest.mark.parametrize(("dtype", "parameter"), LINEAR_DTYPES)
@pytest.mark.parametrize("name", ["rms_norm_linear", "layer_norm_linear"])
# Queries, keys and values with fewer heads of the latter, and three kernels that are equal.
@pytest.mark.parametrize(("m", "h", "features"), [(2048, 1024, (1024, 256, 256)), (4096, 512, (512, 512, 512))])
def test_gradient_of_several_linears(m, h, features, name, dtype, parameter):
    """The gradient of several Linears behind one norm needs no more temporary memory than by plain autodiff."""
    for how in ("a loss", "given"):
        ours, plain = needed(how, name, m, h, features, dtype, parameter)
        assert ours <= plain, how


@pytest.mark.parametrize(("dtype", "parameter"), LINEAR_DTYPES)
# Few features; rows with fewer elements than there are features; few rows. There z and dz are all that is temporary,
# and autodiff has few temporaries.
@pytest.mark.parametrize(("m", "h", "n"), [(1024, 4096, 16), (2048, 128, 512), (16, 1024, 4096), (64, 4096, 256)])
@pytest.mark.parametrize("how", ["given", "and y"])
def test_layer_norm_linear_under_a_given_cotangent(how, m, h, n, dtype, parameter):
    """A given cotangent is pulled back with no more temporary memory than by plain autodiff, unless y is returned too.

    Then dy is there before y, and autodiff makes z once for both passes. Ours makes z twice, and the scheduler of JAX
    0.10 holds both at a time. It also holds two float32 copies of a bfloat16 kernel, as XLA multiplies in float32 on a
    CPU. From JAX 0.11 on a page, 4096 bytes, is allowed for sums over rows and features. Of few rows dkernel is made
    [N, H] and copied: in the other order XLA multiplies wrongly under a `vmap`
    (`tests/operators/test_shared_operands.py`). Of 64 rows that is less than what autodiff holds beside, or than what
    the scheduler of JAX 0.10 does.
    """
    more, newer = 0, jax.__version_info__ >= (0, 11)
    in_16_bits = dtype == parameter == "bfloat16"
    if how == "and y":
        more = 4096 if newer else 4 * m * h + 4 * h * n * in_16_bits
    if m == 16 or (m == 64 and how == "and y" and newer):
        more += 2 * h * n * in_16_bits
    ours, plain = needed(how, "layer_norm_linear", m, h, n, dtype, parameter)
    assert ours <= plain + more


def test_many_rows_over_an_axis_in_front():
    """The gradient is right where each of its loops makes the statistics; jitted plain jnp is not, with JAX 0.12."""
    x = jax.random.normal(jax.random.key(0), (64, 16, 128)) + 3

    def gradient(module):
        return jax.grad(lambda x: jnp.sum(jnp.sin(module.layer_norm(x, axis=1))))

    with jax.disable_jit():
        true = gradient(jln.reference)(x)
    assert jnp.max(jnp.abs(jax.jit(gradient(jln))(x) - true)) < 1e-5
