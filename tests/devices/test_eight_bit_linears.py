"""Norms and Linears in eight bits over devices: the same numbers, however rows and features are split."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from matrix import mesh

QUANTIZE = {"blocks": jln.MXFloat8(), "current scale": jln.Float8(), "given scale": jln.Float8(0.01)}
SPLIT = {
    "rows and features": {"x": P("data"), "kernel": P(None, "tensor"), "bias": P("tensor")},
    "sequences": {"x": P(None, "data"), "kernel": P(None, "tensor"), "bias": P("tensor")},
    "H": {"x": P("data", None, "tensor"), "kernel": P("tensor"), "scale": P("tensor")},
}


def results(arrays, quantize, implementation=None):
    def loss(arrays):
        y = jln.layer_norm_linear(**arrays, quantize=quantize, implementation=implementation)
        return jnp.sum(jnp.sin(y.y if isinstance(y, jln.Scaled) else y)), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)


# Of 64 rows a device has half a block where four devices split them.
@pytest.mark.parametrize("rows", [128, 64])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize("how", QUANTIZE)
def test_on_a_mesh(how, split, kind, rows, implementation):
    """Scales are of the whole, and a block of the whole array, whatever a device has of it."""
    arrays = workbench.named("layer_norm_linear", (4, rows, 64), "float32", features=(64,))
    expected = results(arrays, QUANTIZE[how])
    on = mesh(getattr(AxisType, kind))
    specs = dict.fromkeys(arrays, P()) | SPLIT[split]
    placed = {n: jax.device_put(a, NamedSharding(on, specs[n])) for n, a in arrays.items()}
    with jax.set_mesh(on):
        got = results(placed, QUANTIZE[how], implementation)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(expected), rtol=2e-3, atol=2e-3)
