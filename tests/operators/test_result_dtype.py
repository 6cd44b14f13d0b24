"""Dtypes: of a norm's result by the argument `dtype`, of gradients, and of what is computed between them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import catalogue
import jln
import matrix
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
    operands = workbench.arguments(OPERATORS[name], (rows, width), x_dtype, parameter_dtype="float32")
    workbench.check(OPERATORS[name], operands, implementation, dtype=dtype)


def test_other_names_of_a_dtype():
    x = jnp.ones((2, 4), "bfloat16")
    for dtype in (jnp.float32, np.dtype("float32"), "float32", float):
        assert jln.rms_norm(x, dtype=dtype).dtype == jnp.zeros(0, dtype).dtype
    with jax.enable_x64(False):
        assert jln.rms_norm(jnp.ones((2, 4)), dtype=float).dtype == "float32"
    assert jln.add_layer_norm(x, x.astype("float32"))[0].dtype == "bfloat16"


def test_an_offset_alone_is_added_up_in_its_own_dtype(implementation):
    """The gradient of a float64 offset alone is a sum in float64, though y and its cotangent are in float32."""
    operands = matrix.operands("add_layer_norm")
    dy = workbench.normal(1, operands["x"].shape, "float32")

    def y(offset):
        options = {"dtype": "float32", "implementation": implementation}
        return jln.add_layer_norm(**operands | {"offset": offset}, **options)[0]

    (gradient,) = jax.jit(lambda offset: jax.vjp(y, offset)[1](dy))(operands["offset"])
    np.testing.assert_allclose(gradient, np.sum(np.asarray(dy, "float64"), axis=(0, 1)), rtol=1e-14)


def arrays_in_float32(name):
    operator = catalogue.OPERATORS[name]
    sizes = catalogue.sizes((3, 8), -1, (4,))
    return {a.name: jnp.ones(a.of(sizes, "float32", "float32").shape, "float32") for a in operator.arguments}


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("name", catalogue.OPERATORS)
def test_strict_promotion(name, implementation, forward_mode):
    """Operators and references run under strict dtype promotion with x in bfloat16 and all other arguments in float32.

    Of two kernels one is in float32 and one in bfloat16. Each gradient has its argument's dtype.
    """
    given = arrays_in_float32(name)
    given["x"] = given["x"].astype("bfloat16")
    if "kernel" in given:
        kernel, bias = given["kernel"], given.pop("bias", None)
        given |= {"kernel": (kernel, kernel.astype("bfloat16")), "bias": (bias, None)}
    ours = functools.partial(getattr(jln, name), implementation=implementation, forward_mode=forward_mode)
    for function in (ours, getattr(jln.reference, name)):

        def loss(given, function=function):
            return sum(jnp.sum(a.astype("float32")) for a in jax.tree.leaves(function(**given)))

        with jax.numpy_dtype_promotion("strict"):
            gradients = jax.jit(jax.grad(loss))(given)
        chex.assert_trees_all_equal_dtypes(gradients, given)


def test_weak_types_promote_as_arrays_do(implementation):
    weak = jax.lax.broadcast(jnp.asarray(1.5), (3, 8))
    assert weak.weak_type
    residual = jnp.ones((3, 8), "bfloat16")
    ours = jln.add_layer_norm(weak, residual, implementation=implementation)
    chex.assert_trees_all_equal_dtypes(ours, jln.reference.add_layer_norm(weak, residual))
