"""Sums over eight CPU devices of what has 16 bits: shares are added up in float32, and rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from matrix import mesh

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)


def test_shares_of_16_bit_parameters_are_added_up_in_float32():
    """Devices' shares of a bfloat16 doffset are added up in float32, as in bfloat16 256 + 1 is 256."""
    rows = NamedSharding(mesh(), P(("data", "tensor")))
    x = jax.device_put(workbench.normal(0, (16, 8), "bfloat16"), rows)  # two rows a device
    dy = jnp.tile(jnp.array([256, 1, -256, 0], "bfloat16"), 4)[:, None] * jnp.ones((1, 8), "bfloat16")

    @jax.jit
    def doffset(x, offset, dy):
        return jax.vjp(lambda offset: jln.layer_norm(x, None, offset), offset)[1](dy)[0]

    found = doffset(x, jnp.zeros(8, "bfloat16"), jax.device_put(dy, rows))
    np.testing.assert_array_equal(found, np.full(8, 4, "bfloat16"))


@pytest.mark.parametrize("features", [(8,), (300,), (8, 16)], ids=str)  # in one operation; by XLA; two Linears
def test_shares_of_16_bit_biases_are_added_up_in_float32(features):
    """Devices' shares of a bfloat16 dbias are added up in float32, as in bfloat16 256 + 1 is 256."""
    rows = NamedSharding(mesh(), P(("data", "tensor")))
    x = jax.device_put(workbench.normal(0, (16, 8), "bfloat16"), rows)
    kernels = tuple(workbench.normal(n, (8, n), "bfloat16") for n in features)
    column = jnp.tile(jnp.array([256, 1, -256, 0], "bfloat16"), 4)[:, None]
    dy = tuple(jax.device_put(column * jnp.ones((1, n), "bfloat16"), rows) for n in features)

    @jax.jit
    def dbias(x, biases, dy):
        return jax.vjp(lambda biases: jln.rms_norm_linear(x, None, kernels, biases), biases)[1](dy)[0]

    found = dbias(x, tuple(jnp.zeros(n, "bfloat16") for n in features), dy)
    jax.tree.map(np.testing.assert_array_equal, found, tuple(np.full(n, 4, "bfloat16") for n in features))


def test_shares_of_a_16_bit_kernels_gradient_are_added_up_in_float32():
    """XLA's CPU backend multiplies bfloat16 to float32 in few layouts, and raised in this one."""
    x = workbench.normal(0, (8, 4, 256), "bfloat16")
    kernel, dy = workbench.normal(1, (256, 4), "bfloat16"), workbench.normal(2, (8, 4, 4), "bfloat16")

    def dkernel(module, x, kernel, dy):
        return jax.vjp(lambda k: module.rms_norm_linear(x, None, k), kernel)[1](dy)[0]

    rows = NamedSharding(mesh(), P(("data", "tensor")))
    found = jax.jit(lambda *a: dkernel(jln, *a))(jax.device_put(x, rows), kernel, jax.device_put(dy, rows))
    true = dkernel(jln.reference, *(a.astype("float64") for a in (x, kernel, dy)))
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
    over_h = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("h",)), P(None, "h"))
    as_written = {"xla_allow_excess_precision": False}
    step = jax.jit(lambda x, k: jln.rms_norm_linear(x, None, k, epsilon=0.0), compiler_options=as_written)
    y = step(jax.device_put(x, over_h), kernel)
    np.testing.assert_array_equal(y.astype("float32"), 0.75)
