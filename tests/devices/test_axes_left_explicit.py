"""The operators in a `jax.shard_map` over some axes of a mesh, where the others stay explicit: gradients are right."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jln
from catalogue import FORMS
from matrix import OPTIONAL, along, bind, every, gradient, mesh, operands
from placements import CLOSE, cases, placed, reference

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)


ROWS_SPLIT = [c for c in cases() if c[1] in ("rows over both axes", "rows and columns")]


def spread(function, name, on):
    """Return the function in a `shard_map` over "data", which splits the rows."""
    rows = [a.name for a in FORMS[name].arguments if a.role == "activation"]
    in_specs = tuple(P("data") if n in rows else P() for n in operands(name))
    return jax.shard_map(function, mesh=on, in_specs=in_specs, out_specs=P("data"), axis_names={"data"})


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(("name", "placement"), ROWS_SPLIT)
def test_gradient_of_a_shard_map_that_leaves_axes_explicit(name, placement, forward_mode):
    """Gradients are right in a `shard_map` over "data" that leaves "tensor" explicit.

    That includes gradients of what the devices of "data" share. JAX itself has no gradient of `auto_axes` there.
    """
    on = mesh(AxisType.Explicit)
    _, _, put = placed(name, placement, on)
    function, _ = bind(name, OPTIONAL[name], forward_mode=forward_mode)
    with jax.set_mesh(on):
        gradients = jax.jit(gradient(spread(function, name, on), put))(*put)
    chex.assert_trees_all_close(gradients, reference(name), **CLOSE)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("name", ["add_rms_norm", "layer_norm_linear"])
def test_eagerly_in_a_shard_map_that_leaves_axes_explicit(name, forward_mode):
    """Results and gradients are right outside of jit, too, where JAX does not evaluate `auto_axes` itself."""
    on = mesh(AxisType.Explicit)
    _, arrays, put = placed(name, "rows", on)
    function, _ = bind(name, OPTIONAL[name], forward_mode=forward_mode)
    with jax.set_mesh(on):
        results, gradients = spread(function, name, on)(*put), gradient(spread(function, name, on), put)(*put)
    expected = bind(name, OPTIONAL[name], jln.reference)[0](*arrays)
    chex.assert_trees_all_close((results, gradients), (expected, reference(name)), **CLOSE)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("name", ["add_rms_norm", "layer_norm_linear"])
def test_second_derivatives_in_a_shard_map_that_leaves_axes_explicit(name, forward_mode):
    on = mesh(AxisType.Explicit)
    _, arrays, put = placed(name, "rows", on)
    function, _ = bind(name, OPTIONAL[name], forward_mode=forward_mode)
    with jax.set_mesh(on):
        second = jax.jit(jax.grad(along(spread(function, name, on), put), every(put)))(*put)
    expected = jax.jit(jax.grad(along(bind(name, OPTIONAL[name], jln.reference)[0], arrays), every(arrays)))(*arrays)
    chex.assert_trees_all_close(second, expected, **CLOSE)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_scale_from_around_a_shard_map_that_leaves_axes_explicit(compiled):
    """The gradient of a scale that the function in the `shard_map` closes over is right."""
    on = mesh(AxisType.Explicit)
    function, _, put = placed("rms_norm", "rows", on)

    def around(x, scale):
        inside = jax.shard_map(
            lambda x: function(x, scale), in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
        return inside(x)

    with jax.set_mesh(on):
        found = gradient(around, put)
        gradients = (jax.jit(found) if compiled else found)(*put)
    chex.assert_trees_all_close(gradients, reference("rms_norm"), **CLOSE)
    assert [jax.typeof(g) for g in gradients] == [jax.typeof(a) for a in put]


@pytest.mark.parametrize("name", ["add_layer_norm", "layer_norm_linear"])
def test_forward_mode_in_a_shard_map_that_leaves_axes_explicit(name):
    on = mesh(AxisType.Explicit)
    _, arrays, put = placed(name, "rows", on)

    def tangent(f):
        return jax.jit(lambda *a: jax.jvp(f, a, tuple(jnp.cos(v) for v in a))[1])

    with jax.set_mesh(on):
        found = tangent(spread(bind(name, OPTIONAL[name], forward_mode=True)[0], name, on))(*put)
        with pytest.raises(TypeError, match="forward_mode=True"):
            tangent(spread(bind(name, OPTIONAL[name])[0], name, on))(*put)
    expected = tangent(bind(name, OPTIONAL[name], jln.reference)[0])(*arrays)
    chex.assert_trees_all_close(found, expected, **CLOSE)
