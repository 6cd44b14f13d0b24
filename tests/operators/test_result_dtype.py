"""The argument `dtype`, by which a norm's result has another dtype than x: every result against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from workbench import OPERATORS


# 100: several rows a tile. 4096: a row a tile. 16385: chunks, and a kernel for the row sums.
@pytest.mark.parametrize(("rows", "width"), [(37, 100), (5, 4096), (3, 16385)])
@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")],
)
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm"])
def test_every_result(name, x_dtype, dtype, rows, width, implementation):
    operator = OPERATORS[name]
    operands = workbench.arguments(operator, (rows, width), x_dtype, parameter_dtype="float32")
    function = functools.partial(operator, dtype=dtype, epsilon=workbench.EPSILON)
    ours, plain = (
        functools.partial(function, implementation=implementation),
        functools.partial(function, module=jln.reference),
    )
    cotangent = workbench.cotangents(jax.eval_shape(ours, *operands))
    got = workbench.value_and_gradients(operator, ours, operands, cotangent)
    assert got["y"].dtype == jnp.dtype(dtype)
    assert {got[n].dtype for n in ("dx", "total") if n in got} == {jnp.dtype(x_dtype)}
    true = workbench.truth(operator, operands, cotangent, total=got.get("total"))
    workbench.assert_accurate(got, workbench.value_and_gradients(operator, plain, operands, cotangent), true)


def test_vmap_and_second_order(implementation):
    """`vmap` keeps the result's dtype, and a second derivative, which runs through the formula, is the reference's."""
    x, scale = workbench.normal(0, (3, 4, 16), "bfloat16"), workbench.normal(1, (3, 16), "float32")
    norm = functools.partial(
        jln.layer_norm, dtype="float32", epsilon=workbench.EPSILON, implementation=implementation, forward_mode=True
    )
    y = jax.vmap(norm)(x, scale)
    assert y.dtype == jnp.float32

    def squared(x, s):
        return jnp.sum(jax.grad(lambda x: jnp.sum(norm(x, s) ** 3))(x.astype("float32")) ** 2)

    def squared_plain(x, s):
        def cube(x):
            return jnp.sum(jln.reference.layer_norm(x, s, epsilon=workbench.EPSILON) ** 3)

        return jnp.sum(jax.grad(cube)(x.astype("float32")) ** 2)

    got, wanted = (jax.grad(f, argnums=1)(x[0], scale[0]) for f in (squared, squared_plain))
    # dozens of float32 roundings of terms as large as the largest result
    assert jnp.max(jnp.abs(got - wanted)) <= 64 * jnp.finfo("float32").eps * jnp.max(jnp.abs(wanted))


def test_other_names_of_a_dtype():
    x = jnp.ones((2, 4), "bfloat16")
    for dtype in (jnp.float32, np.dtype("float32"), "float32", float):
        assert jln.rms_norm(x, dtype=dtype).dtype == jnp.zeros(0, dtype).dtype
    with jax.enable_x64(False):
        assert jln.rms_norm(jnp.ones((2, 4)), dtype=float).dtype == "float32"
    assert jln.add_layer_norm(x, x.astype("float32"))[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("int32", "dtype must be one of float16.*got int32"), ("bogus", "dtype must be a dtype or None; got 'bogus'")],
)
def test_bad_dtypes(dtype, message):
    with pytest.raises(TypeError, match=message):
        jln.layer_norm(jnp.ones((2, 4)), dtype=dtype)
