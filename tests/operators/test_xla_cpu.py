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
def test_gradient_of_layer_norm(shape, dtype, returns_y):
    def step(x, scale, offset, dy):
        y, pullback = jax.vjp(jln.layer_norm, x, scale, offset)
        return (y if returns_y else None), pullback(dy)

    x = jax.ShapeDtypeStruct(shape, dtype)
    parameter = jax.ShapeDtypeStruct(shape[1:], dtype)
    # 0.2 MiB are left for small buffers of tiles; x itself is 16 MiB in float32.
    assert temporaries(step, x, parameter, parameter, x) <= 0.2 * MIB


@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 4096)])
def test_forward(shape):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert temporaries(jln.layer_norm, x) <= 0.2 * MIB


LINEAR_DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


def linear_operands(m, h, n, dtype, parameter):
    """Return ((x, scale, offset, kernel, bias), dy) as shapes and dtypes; x is [m, h] and dy [m, n]."""
    parameters = (jax.ShapeDtypeStruct(shape, parameter) for shape in ((h,), (h,), (h, n), (n,)))
    dy = jax.ShapeDtypeStruct((m, n), jnp.promote_types(dtype, parameter))
    return (jax.ShapeDtypeStruct((m, h), dtype), *parameters), dy


@pytest.mark.parametrize(("dtype", "parameter"), LINEAR_DTYPES)
# More rows than a row has elements, fewer, a square, many short rows, and a ragged few.
@pytest.mark.parametrize(
    ("m", "h", "n"), [(4096, 1024, 3072), (1024, 4096, 256), (1024, 1024, 1024), (16384, 256, 64), (333, 768, 1000)]
)
def test_gradient_of_layer_norm_linear(m, h, n, dtype, parameter):
    """A loss's gradient needs no more temporary memory than plain autodiff.

    The loss reads y, as every loss does, so that forward ends before backward.
    """

    def needed(operator):
        def loss(*operands):
            return jnp.sum(jnp.sin(operator(*operands)).astype("float32"))

        return temporaries(jax.value_and_grad(loss, range(5)), *linear_operands(m, h, n, dtype, parameter)[0])

    assert needed(jln.layer_norm_linear) <= needed(jln.reference.layer_norm_linear)


@pytest.mark.parametrize(("dtype", "parameter"), LINEAR_DTYPES)
@pytest.mark.parametrize("name", ["rms_norm_linear", "layer_norm_linear"])
# Queries, keys and values with fewer heads of the latter, and three kernels that are equal.
@pytest.mark.parametrize(("m", "h", "features"), [(2048, 1024, (1024, 256, 256)), (4096, 512, (512, 512, 512))])
def test_gradient_of_several_linears(m, h, features, name, dtype, parameter):
    """The gradient of several Linears behind one norm needs no more temporary memory than by plain autodiff."""

    def needed(module):
        def loss(x, scale, kernels):
            offset = (scale,) if name.startswith("layer") else ()
            y = getattr(module, name)(x, scale, *offset, kernels)
            return sum(jnp.sum(jnp.sin(a).astype("float32")) for a in y)

        def pulled(dy, x, scale, kernels):
            offset = (scale,) if name.startswith("layer") else ()
            return jax.vjp(lambda *a: getattr(module, name)(a[0], a[1], *offset, a[2]), x, scale, kernels)[1](dy)

        operands, dys = zip(*(linear_operands(m, h, n, dtype, parameter) for n in features), strict=True)
        x, scale, *_ = operands[0]
        given = x, scale, tuple(kernel for _, _, _, kernel, _ in operands)
        return temporaries(jax.grad(loss, range(3)), *given), temporaries(pulled, dys, *given)

    ours, plain = needed(jln), needed(jln.reference)
    assert all(a <= b for a, b in zip(ours, plain, strict=True)), (ours, plain)


@pytest.mark.parametrize(("dtype", "parameter"), LINEAR_DTYPES)
# Few features; rows with fewer elements than there are features; few rows. There z and dz are all that is temporary,
# and autodiff has few temporaries.
@pytest.mark.parametrize(("m", "h", "n"), [(1024, 4096, 16), (2048, 128, 512), (16, 1024, 4096), (64, 4096, 256)])
@pytest.mark.parametrize("returns_y", [False, True])
def test_layer_norm_linear_under_a_given_cotangent(returns_y, m, h, n, dtype, parameter):
    """A given cotangent is pulled back with no more temporary memory than by plain autodiff, unless y is returned too.

    Then dy is there before y, and autodiff makes z once for both passes. Ours makes z twice, and the scheduler of JAX
    0.10 holds both at a time. It also holds two float32 copies of a bfloat16 kernel, as XLA multiplies in float32 on a
    CPU. From JAX 0.11 on a page, 4096 bytes, is allowed for sums over rows and features. Of few rows dkernel is made
    [N, H] and copied: in the other order XLA multiplies wrongly under a `vmap`
    (`tests/operators/test_shared_operands.py`). Of 64 rows that is less than what autodiff holds beside, or than what
    the scheduler of JAX 0.10 does.
    """

    def needed(operator):
        def step(dy, *operands):
            y, pullback = jax.vjp(operator, *operands)
            return (y if returns_y else None), pullback(dy)

        operands, dy = linear_operands(m, h, n, dtype, parameter)
        return temporaries(step, dy, *operands)

    more = 0
    if returns_y:
        copy = 4 * h * n if dtype == parameter == "bfloat16" else 0
        more = 4 * m * h + copy if jax.__version_info__ < (0, 11) else 4096
    few = m == 16 or (m == 64 and returns_y and jax.__version_info__ >= (0, 11))
    if few and dtype == parameter == "bfloat16":
        more += 2 * h * n
    assert needed(jln.layer_norm_linear) <= needed(jln.reference.layer_norm_linear) + more


def test_many_rows_over_an_axis_in_front():
    """The gradient is right where each of its loops makes the statistics; jitted plain jnp is not, with JAX 0.12."""
    x = jax.random.normal(jax.random.key(0), (64, 16, 128)) + 3

    def gradient(module):
        return jax.grad(lambda x: jnp.sum(jnp.sin(module.layer_norm(x, axis=1))))

    with jax.disable_jit():
        true = gradient(jln.reference)(x)
    assert jnp.max(jnp.abs(jax.jit(gradient(jln))(x) - true)) < 1e-5
