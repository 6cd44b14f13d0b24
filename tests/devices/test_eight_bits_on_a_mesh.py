"""Norms that quantise, on a mesh: every device has the bits and the scales of its rows, and maxima are of all."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from matrix import communication, mesh

KINDS = {"one scale": jln.Float8(0.03), "blocks": jln.MXFloat8(), "current": jln.Float8()}
SPECS = {"rows": P("data"), "rows over both axes": P("data", "tensor"), "H": P(None, None, "tensor"), "whole": P()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh(kind, spec, axes, implementation):
    x, scale = workbench.normal(0, (8, 4, 128), "float32"), workbench.normal(1, (128,), "float32")
    over = mesh(axes)

    def f(x, scale):
        return jln.add_rms_norm(x, x, scale, quantize=KINDS[kind], implementation=implementation)

    true = jax.jit(f)(x, scale)
    placed = jax.device_put(x, NamedSharding(over, SPECS[spec]))
    with jax.set_mesh(over):
        compiled = jax.jit(f).lower(placed, scale).compile()
        got = compiled(placed, scale)
    chex.assert_trees_all_close(jax.tree.map(wide, got), jax.tree.map(wide, true), rtol=2.0**-3)
    same = np.mean(np.asarray(got[0].values).view("u1") == np.asarray(true[0].values).view("u1"))
    assert same == 1 if spec != "H" else same > 0.99
    if spec in ("rows", "rows over both axes"):
        moved, _ = communication(compiled)
        assert {*moved} <= {"all-reduce"}, "rows are quantised where they are"
        assert ("all-reduce" in moved) == (kind != "blocks"), "and maxima are of all of them"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_gradients_on_a_mesh(kind, spec, axes):
    """Gradients are the plain norm's for the same cotangents, and communicated is what that communicates."""
    x, scale = workbench.normal(0, (8, 4, 128), "float32"), workbench.normal(1, (128,), "float32")
    dy, over = workbench.normal(2, x.shape, "float32"), mesh(axes)

    def gradients(quantize):
        def f(x, scale, dy):
            def y(x, scale):
                y, total = jln.add_rms_norm(x, x, scale, quantize=quantize)
                return (y if quantize is None else y.dequantized()), total

            return jax.vjp(y, x, scale)[1]((dy, dy))

        return jax.jit(f)

    placed = [jax.device_put(a, NamedSharding(over, SPECS[spec])) for a in (x, dy)]
    with jax.set_mesh(over):
        ours, plain = (gradients(q).lower(placed[0], scale, placed[1]).compile() for q in (KINDS[kind], None))
        got = ours(placed[0], scale, placed[1])
    chex.assert_trees_all_close(jax.device_get(got), gradients(None)(x, scale, dy), rtol=1e-5, atol=1e-5)
    if spec in ("rows", "rows over both axes"):
        assert communication(ours)[0] == communication(plain)[0]


def test_gradients_in_a_shard_map(implementation):
    """The carrier varies over the mesh as the values do, and a shared scale's gradient is added up over it."""
    x, scale, over = workbench.normal(0, (8, 64), "float32"), workbench.normal(1, (64,), "float32"), mesh()

    def gradients(quantize):
        def f(x, scale):
            y = jln.rms_norm(x, scale, quantize=quantize, implementation=implementation)
            return y if quantize is None else y.dequantized()

        def loss(x, scale):
            y = jax.shard_map(f, mesh=over, in_specs=(P("data"), P()), out_specs=P("data"))(x, scale)
            return jnp.sum(y * x)

        return jax.jit(jax.grad(loss, (0, 1)))(x, scale)

    dx, dscale = gradients(jln.Float8(0.03))
    numbers = jln.rms_norm(x, scale, quantize=jln.Float8(0.03)).dequantized()
    plain_dx, plain_dscale = gradients(None)
    chex.assert_trees_all_close(dx - numbers, plain_dx - jln.rms_norm(x, scale), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(dscale, plain_dscale, rtol=1e-5, atol=1e-5)


def wide(a):
    return np.asarray(a).astype("float32")


def test_in_a_shard_map(implementation):
    """Inside of it the largest number is that of a device's own rows."""
    x, over = workbench.normal(0, (8, 64), "float32"), mesh()

    def f(x):
        q = jln.rms_norm(x, quantize=jln.Float8(0.03), implementation=implementation)
        return q.values, q.amax[None]

    values, amax = jax.jit(jax.shard_map(f, mesh=over, in_specs=P("data"), out_specs=P("data")))(x)
    true = [jln.rms_norm(part, quantize=jln.Float8(0.03), implementation=implementation) for part in jnp.split(x, 4)]
    np.testing.assert_array_equal(amax, [q.amax for q in true])
    np.testing.assert_array_equal(wide(values), np.concatenate([wide(q.values) for q in true]))
