"""Norms in eight bits on a mesh: a device has the bits and scales of its rows, maxima are of all."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jln
import workbench
from matrix import communication, mesh
from placements import put

AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
KINDS = {"one scale": jln.Float8(0.03), "blocks": jln.MXFloat8(), "current": jln.Float8()}
SPECS = {"rows": P("data"), "rows over both axes": P("data", "tensor"), "H": P(None, None, "tensor")}


def wide(a):
    return np.asarray(a).astype("float32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("axes", AXES)
def test_on_a_mesh(kind, spec, axes, implementation):
    """Results are those of one device. Gradients are the plain norm's for the same cotangents, and send as much."""
    arrays = {"x": (8, 4, 128), "scale": (128,), "dy": (8, 4, 128)}
    arrays = {n: workbench.normal(i, shape, "float32") for i, (n, shape) in enumerate(arrays.items())}
    over = mesh(AXES[axes])
    given = put(arrays, dict.fromkeys(("x", "dy"), SPECS[spec]), over)

    def forward(x, scale, dy, quantize=KINDS[kind]):
        return jln.add_rms_norm(x, x, scale, quantize=quantize, implementation=implementation)

    def gradients(x, scale, dy, quantize=KINDS[kind]):
        def widened(x, scale):
            y, total = forward(x, scale, dy, quantize)
            return (y if quantize is None else y.dequantized()), total

        return jax.vjp(widened, x, scale)[1]((dy, dy))

    def compiled(f, given, **how):
        return jax.jit(lambda given: f(**given, **how)).lower(given).compile()

    with jax.set_mesh(over):
        program, backward, plain = (
            compiled(forward, given),
            compiled(gradients, given),
            compiled(gradients, given, quantize=None),
        )
        got, got_gradients = program(given), backward(given)
    true = jax.jit(forward)(**arrays)
    chex.assert_trees_all_close(jax.tree.map(wide, got), jax.tree.map(wide, true), rtol=2.0**-3)
    same = np.mean(np.asarray(got[0].values).view("u1") == np.asarray(true[0].values).view("u1"))
    assert same == 1 if spec != "H" else same > 0.99
    true = compiled(gradients, arrays, quantize=None)(arrays)
    chex.assert_trees_all_close(jax.device_get(got_gradients), true, rtol=1e-5, atol=1e-5)
    if spec != "H":
        moved, _ = communication(program)
        assert {*moved} <= {"all-reduce"}, "rows are quantised where they are"
        assert ("all-reduce" in moved) == (kind != "blocks"), "and maxima are of all of them"
        assert communication(backward)[0] == communication(plain)[0]


def test_in_a_shard_map(implementation):
    """The largest number is that of a device's own rows, and a shared scale's gradient is added up over the mesh.

    The carrier varies over the mesh as the values do.
    """
    x, scale, over = workbench.normal(0, (8, 64), "float32"), workbench.normal(1, (64,), "float32"), mesh()

    def norm(x, scale, quantize=KINDS["one scale"]):
        return jln.rms_norm(x, scale, quantize=quantize, implementation=implementation)

    def spread(f):
        return jax.shard_map(f, mesh=over, in_specs=(P("data"), P()), out_specs=P("data"))

    @jax.jit
    def results(x, scale):
        def f(x, scale):
            q = norm(x, scale)
            return q.values, q.amax[None]

        return spread(f)(x, scale)

    def gradients(f):
        return jax.jit(jax.grad(lambda *a: jnp.sum(spread(f)(*a) * jnp.cos(x)), (0, 1)))(x, scale)

    values, amax = results(x, scale)
    true = [norm(part, scale) for part in jnp.split(x, 4)]
    np.testing.assert_array_equal(amax, [q.amax for q in true])
    np.testing.assert_array_equal(wide(values), np.concatenate([wide(q.values) for q in true]))
    got = gradients(lambda x, scale: norm(x, scale).dequantized())
    chex.assert_trees_all_close(got, gradients(lambda x, scale: norm(x, scale, None)), rtol=1e-5, atol=1e-5)
