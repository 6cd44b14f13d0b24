"""Sums over eight CPU devices of what has 16 bits: shares are added up in float32, and rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from matrix import mesh
from placements import put

ALL = P(("data", "tensor"))


# doffset; dbias in one operation, by XLA, and of two Linears.
@pytest.mark.parametrize("features", [(), (8,), (300,), (8, 16)], ids=str)
def test_shares_of_16_bit_parameters_are_added_up_in_float32(features):
    """Devices' shares of a bfloat16 doffset or dbias are added up in float32, as in bfloat16 256 + 1 is 256."""
    x = workbench.normal(0, (16, 8), "bfloat16")  # two rows a device
    kernels = tuple(workbench.normal(n, (8, n), "bfloat16") for n in features)
    column = jnp.tile(jnp.array([256, 1, -256, 0], "bfloat16"), 4)[:, None]
    dy = tuple(column * jnp.ones((1, n), "bfloat16") for n in features or (8,))

    def f(x, parameters):
        return (
            jln.rms_norm_linear(x, None, kernels, parameters) if features else (jln.layer_norm(x, None, *parameters),)
        )

    @jax.jit
    def gradients(x, dy):
        parameters = tuple(jnp.zeros(d.shape[1], "bfloat16") for d in dy)
        return jax.vjp(lambda parameters: f(x, parameters), parameters)[1](dy)[0]

    found = gradients(*jax.device_put((x, dy), NamedSharding(mesh(), ALL)))
    jax.tree.map(np.testing.assert_array_equal, found, tuple(np.full(d.shape[1], 4, "bfloat16") for d in dy))


def test_shares_of_a_16_bit_kernels_gradient_are_added_up_in_float32():
    """XLA's CPU backend multiplies bfloat16 to float32 in few layouts, and raised in this one."""
    given = {"x": (8, 4, 256), "kernel": (256, 4), "dy": (8, 4, 4)}
    given = {n: workbench.normal(i, shape, "bfloat16") for i, (n, shape) in enumerate(given.items())}

    def dkernel(module, x, kernel, dy):
        return jax.vjp(lambda k: module.rms_norm_linear(x, None, k), kernel)[1](dy)[0]

    found = jax.jit(lambda a: dkernel(jln, **a))(put(given, {"x": ALL, "dy": ALL}, mesh()))
    true = dkernel(jln.reference, **{n: a.astype("float64") for n, a in given.items()})
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype("float64"), true, rtol=2**-8, atol=0.06)  # of 32 rows, each rounded


def test_parts_of_a_16_bit_product_over_h_are_rounded_once_all_added_up():
    """Devices' parts of a bfloat16 product over H are added up before they are rounded.

    A device's part is 24.1875 or -24, and all eight add up to 0.75; bfloat16 has no 24.1875. XLA is told to round where
    the program says so: its excess precision would hide a rounding that is too early.
    """
    x = jnp.ones((4, 192), jnp.bfloat16)  # its norm is ones too
    column = jnp.where(jnp.arange(192) < 96, 1 + 2**-7, -1.0).astype(jnp.bfloat16)
    kernel = jnp.stack([column] * 5, 1)
    as_written = {"xla_allow_excess_precision": False}
    step = jax.jit(lambda x, k: jln.rms_norm_linear(x, None, k, epsilon=0.0), compiler_options=as_written)
    y = step(jax.device_put(x, NamedSharding(mesh(), P(None, *ALL))), kernel)
    np.testing.assert_array_equal(y.astype("float32"), 0.75)
