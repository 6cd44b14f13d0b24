"""The modules' operator, whose result may have another dtype than x: every result against float64."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jln
import workbench
from jln._norm.operator import normalised
from workbench import OPERATORS


def plain(x, residual, scale, offset, *, y_dtype):
    y = jln.reference.layer_norm(x.astype("float32"), scale, offset, epsilon=workbench.EPSILON)
    return y.astype(y_dtype), residual


def ours(x, residual, scale, offset, *, y_dtype, implementation):
    y = normalised(
        x,
        scale,
        offset,
        axis=-1,
        epsilon=workbench.EPSILON,
        subtract_mean=True,
        y_dtype=y_dtype,
        implementation=implementation,
    )
    return y, residual


# 100: several rows a tile. 4096: a row a tile. 16385: chunks, and a kernel for the row sums.
@pytest.mark.parametrize(("rows", "width"), [(37, 100), (5, 4096), (3, 16385)])
@pytest.mark.parametrize(
    ("x_dtype", "y_dtype"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")],
)
def test_every_result(x_dtype, y_dtype, rows, width, implementation):
    operator = OPERATORS["layer_norm"]
    operands = workbench.arguments(operator, (rows, width), x_dtype, parameter_dtype="float32")
    cotangent = (workbench.normal(9, (rows, width), y_dtype), None)
    got = workbench.value_and_gradients(
        operator, functools.partial(ours, y_dtype=y_dtype, implementation=implementation), operands, cotangent
    )
    assert got["y"].dtype == jnp.dtype(y_dtype)
    assert got["dx"].dtype == jnp.dtype(x_dtype)
    true = workbench.truth(operator, operands, cotangent)
    workbench.assert_accurate(
        got,
        workbench.value_and_gradients(operator, functools.partial(plain, y_dtype=y_dtype), operands, cotangent),
        true,
    )


def test_vmap_and_second_order(implementation):
    """The result's dtype survives both; a second derivative runs through the formula."""
    x, scale = workbench.normal(0, (3, 4, 16), "bfloat16"), workbench.normal(1, (3, 16), "float32")
    norm = functools.partial(ours, residual=None, offset=None, y_dtype="float32", implementation=implementation)
    y = jax.vmap(lambda x, s: norm(x, scale=s)[0])(x, scale)
    assert y.dtype == jnp.float32

    def squared(x, s):
        return jnp.sum(jax.grad(lambda x: jnp.sum(norm(x, scale=s)[0] ** 3))(x.astype("float32")) ** 2)

    def squared_plain(x, s):
        def cube(x):
            return jnp.sum(jln.reference.layer_norm(x, s, epsilon=workbench.EPSILON) ** 3)

        return jnp.sum(jax.grad(cube)(x.astype("float32")) ** 2)

    got, wanted = (jax.grad(f, argnums=1)(x[0], scale[0]) for f in (squared, squared_plain))
    # dozens of float32 roundings of terms as large as the largest result
    assert jnp.max(jnp.abs(got - wanted)) <= 64 * jnp.finfo("float32").eps * jnp.max(jnp.abs(wanted))
