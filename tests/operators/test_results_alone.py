"""Gradients where one result alone is used, or one operand's alone is wanted."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import matrix
import workbench

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


@pytest.mark.parametrize("which", [0, 1])
def test_one_result_alone_of_norms_on_both_sides(which, implementation):
    """Every gradient is right where only one of the two results is used and the other has no cotangent."""
    function, operands = matrix.bind("rms_norm_add_rms_norm", "xs", implementation=implementation)
    exact, _ = matrix.bind("rms_norm_add_rms_norm", "xs", jln.reference)

    def gradients(f):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)[which])), range(4)))(*operands)

    chex.assert_trees_all_close(gradients(function), gradients(exact), **CLOSE)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["add_layer_norm, x_bias and gate", "rms_norm_add_rms_norm, gate"])
def test_one_result_alone_in_16_bits(name, which, implementation):
    """Gradients have their operands' dtypes and shapes where only one of the two results is used."""
    function, operands = matrix.bind(name, matrix.OPTIONAL[name], implementation=implementation)
    operands = tuple(a.astype("float16") for a in operands)
    gradients = jax.grad(lambda *a: jnp.sum(function(*a)[which].astype("float32")), range(len(operands)))(*operands)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, operands)


def test_an_offset_alone_is_added_up_in_its_own_dtype(implementation):
    """The gradient of a float64 offset alone is a sum in float64, though y and its cotangent are in float32."""
    operands = matrix.operands("add_layer_norm")
    dy = workbench.normal(1, operands["x"].shape, "float32")

    def y(offset):
        options = {"dtype": "float32", "implementation": implementation}
        return jln.add_layer_norm(**operands | {"offset": offset}, **options)[0]

    (gradient,) = jax.jit(lambda offset: jax.vjp(y, offset)[1](dy))(operands["offset"])
    np.testing.assert_allclose(gradient, np.sum(np.asarray(dy, "float64"), axis=(0, 1)), rtol=1e-14)


@pytest.mark.parametrize("shape", [(matrix.H,), (3, 1), (3, matrix.H), ()])
def test_a_gate_behind_a_norm_has_a_gradient_of_its_dtype_where_the_sum_alone_is_used(shape, implementation):
    x, gate = jnp.ones((3, matrix.H), "float32"), jnp.ones(shape, "bfloat16")
    of_sum = functools.partial(jln.rms_norm_add_rms_norm, x, x, implementation=implementation)
    assert jax.grad(lambda g: of_sum(gate=g)[1].sum())(gate).dtype == gate.dtype


def test_the_kernel_alone_of_a_linear_behind_norms_on_both_sides(implementation):
    """Backward makes z of the total again, and not of a sum that is not there."""
    x, kernel = jnp.sin(jnp.arange(24.0)).reshape(3, 8), jnp.ones((8, 300))

    def gradient(module, **options):
        function = functools.partial(module.rms_norm_add_rms_norm_linear, x, x, None, None, **options)
        return jax.grad(lambda k: jnp.sum(jnp.sin(function(k)[0])))(kernel)

    got = gradient(jln, implementation=implementation)
    chex.assert_trees_all_close(got, gradient(jln.reference), rtol=1e-6, atol=1e-6)
