"""The operators on a mesh of eight CPU devices: results and gradients, however arguments are split."""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from matrix import OPTIONAL, bind, gradient, loss_by_name, mesh, of_some, operands
from placements import CLOSE, cases, placed, reference

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)


@pytest.mark.parametrize(("name", "placement"), cases())
def test_gradient_under_jit(name, placement):
    function, _, put = placed(name, placement, mesh())
    gradients = jax.jit(gradient(function, put))(*put)
    chex.assert_trees_all_close(gradients, reference(name), **CLOSE)


@pytest.mark.parametrize(("name", "placement"), cases())
def test_gradient_on_an_explicit_mesh(name, placement):
    """Gradients on an explicit mesh are the reference's, and the type of each has its argument's sharding."""
    function, _, put = placed(name, placement, mesh(AxisType.Explicit))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        gradients = jax.jit(gradient(function, put))(*put)
    chex.assert_trees_all_close(gradients, reference(name), **CLOSE)
    assert [jax.typeof(g).sharding.spec for g in gradients] == [jax.typeof(a).sharding.spec for a in put]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm", "layer_norm_linear", "rms_norm_add_rms_norm"])
def test_gradient_on_an_explicit_mesh_outside_of_jit(name, forward_mode):
    """Eager gradients on an explicit mesh are the reference's, and each has its argument's sharding.

    JAX refuses a program with arguments on the mesh with automatic axes and on the mesh with explicit ones. Residuals
    and cotangents of `auto_axes` are such arguments.
    """
    _, _, put = placed(name, "rows", mesh(AxisType.Explicit))
    function, _ = bind(name, OPTIONAL[name], forward_mode=forward_mode)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        gradients = gradient(function, put)(*put)
    chex.assert_trees_all_close(gradients, reference(name), **CLOSE)
    assert [jax.typeof(g).sharding.spec for g in gradients] == [jax.typeof(a).sharding.spec for a in put]


@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm", "layer_norm_linear"])
def test_gradient_on_an_explicit_mesh_that_is_not_set(name):
    """The arguments alone tell the mesh. From JAX 0.11 on a compiled operator would be refused there."""
    function, _, put = placed(name, "rows", mesh(AxisType.Explicit))
    results, pull = jax.vjp(function, *put)
    gradients = pull(results)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        expected = jax.jit(lambda *a: jax.vjp(function, *a)[1](results))(*put)
    chex.assert_trees_all_close(gradients, expected, **CLOSE)
    assert [jax.typeof(g) for g in gradients] == [jax.typeof(a) for a in put]
    assert all(g.sharding.mesh.axis_types == (AxisType.Explicit,) * 2 for g in gradients)


WITH_PROGRAMS = {
    "jit": jax.jit,
    "scan": lambda f: lambda x, scale: jax.lax.scan(lambda c, _: (f(c, scale), None), x, length=2)[0],
}


@pytest.mark.parametrize("by", WITH_PROGRAMS)
def test_gradient_outside_of_jit_of_a_program_on_an_explicit_mesh(by):
    """Gradients are right in `jit`. Outside JAX refuses what is kept between the two programs.

    Where it no longer does, the line in examples/many_devices.md can go.
    """
    function, _, put = placed("rms_norm", "rows", mesh(AxisType.Explicit))
    found, expected = (gradient(WITH_PROGRAMS[by](f), put) for f in (function, jln.reference.rms_norm))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        chex.assert_trees_all_close(jax.jit(found)(*put), jax.jit(expected)(*put), **CLOSE)
        with pytest.raises(ValueError, match="mesh should be the same"):
            found(*put)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_linear"])
@pytest.mark.parametrize("sharded", ["nothing", "what is closed over", "the scale alone"])
def test_a_mesh_that_is_set_where_no_argument_has_it(name, kind, sharded):
    """Gradients are right under a set mesh over which no argument of the program is split, or only the scale is.

    JAX then gives an empty mesh to the rules that say how an operation is partitioned.
    """
    function, operands = bind(name, OPTIONAL[name])
    with jax.set_mesh(mesh(kind)):
        x, *parameters = operands
        if sharded == "what is closed over":
            x = jax.device_put(x, NamedSharding(mesh(kind), P("data")))
            gradients = jax.jit(lambda *p: gradient(function, (x, *p))(x, *p))(*parameters)
        else:
            if sharded == "the scale alone":
                operands = [
                    jax.device_put(a, NamedSharding(mesh(kind), P("tensor"))) if a.ndim == 1 else a for a in operands
                ]
            gradients = jax.jit(gradient(function, operands))(*operands)
    chex.assert_trees_all_close(gradients, reference(name), **CLOSE)


@pytest.mark.parametrize("placement", ["rows", "H"])
@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name in OPTIONAL for argument in operands(name)])
def test_the_gradient_of_one_argument_alone(name, argument, placement):
    function, _, put = placed(name, placement, mesh())

    @jax.jit
    def step(*arrays):
        alone, given = of_some(function, arrays, operands(name), (argument,))
        return gradient(alone, given)(*given)

    expected = dict(zip(operands(name), reference(name), strict=True))[argument]
    chex.assert_trees_all_close(step(*put), (expected,), **CLOSE)


def test_forward_mode_on_a_mesh():
    function, arrays = bind("layer_norm_linear", "sob", forward_mode=True)
    x = jax.device_put(arrays[0], NamedSharding(mesh(), P("data")))
    step = jax.jit(lambda x, *rest: (gradient(function, arrays)(x, *rest), jax.jvp(function, (x, *rest), (x, *rest))))
    gradients, (y, dy) = step(x, *arrays[1:])
    chex.assert_trees_all_close(gradients, reference("layer_norm_linear"), **CLOSE)
    exact = bind("layer_norm_linear", "sob", jln.reference)[0]
    chex.assert_trees_all_close((y, dy), jax.jvp(exact, tuple(arrays), tuple(arrays)), **CLOSE)


def test_what_does_not_divide_is_not_split():
    """Twelve rows are not split over eight devices, as rows of padding would be part of the sums.

    The data are far from zero, so that such rows would show.
    """
    x, scale = workbench.normal(0, (12, 8), "float64", 5.0), workbench.normal(1, (8,), "float64")
    spec = NamedSharding(mesh(), P(("data", "tensor")))

    def step(f):
        return jax.jit(jax.grad(lambda x, s: jnp.sum(jnp.sin(f(x, s))), (0, 1)))

    ours = step(lambda x, s: jln.layer_norm(jax.lax.with_sharding_constraint(x, spec), s))(x, scale)
    chex.assert_trees_all_close(ours, step(jln.reference.layer_norm)(x, scale), **CLOSE)


def test_results_that_are_asked_for_elsewhere():
    """Gradients may be asked for over a mesh axis that does not split the rows: dscale is not scattered there."""
    function, _, put = placed("layer_norm", "rows", mesh())
    asked = (None, *(NamedSharding(mesh(), P(axis)) for axis in ("tensor", "data")))
    gradients = jax.jit(gradient(function, put), out_shardings=asked)(*put)
    chex.assert_trees_all_close(gradients, reference("layer_norm"), **CLOSE)


# The mesh axes that split the features of each kernel, or H. "both alike": each device has a part of every product, and
# so a share of dz. "one alone": the other product is whole on every device, and must not be counted by each.
SPLIT = {"both alike": ("tensor", "tensor"), "one alone": ("tensor", None), "differently": ("tensor", "data"), "H": "H"}


# In float32 norm and few features are one operation (which a GPU multiplies in TF32, of ten bits); in float64 XLA
# multiplies.
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("split", SPLIT)
@pytest.mark.parametrize(("features", "dtype"), [(((16,), (8,)), "float32"), (((512,), (8,)), "float64")])
def test_several_linears(features, dtype, split, kind):
    arrays = workbench.named("add_layer_norm_linear", (4, 2, 8), dtype, features=features)
    specs = jax.tree.map(lambda _: P(), arrays)
    if split == "H":
        specs |= dict.fromkeys(("x", "residual"), P("data", None, "tensor"))
        specs |= {"scale": P("tensor"), "kernel": (P("tensor"), P("tensor"))}
    else:
        specs |= dict.fromkeys(("x", "residual"), P() if split == "differently" else P("data"))
        specs["kernel"] = tuple(P(None, axis) for axis in SPLIT[split])
        specs["bias"] = (P(SPLIT[split][0]), None)
    on = mesh(getattr(AxisType, kind))
    put = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(on, spec)), arrays, specs)
    expected = jax.jit(jax.value_and_grad(loss_by_name(jln.reference.add_layer_norm_linear)))(arrays)
    with jax.set_mesh(on):
        got = jax.jit(jax.value_and_grad(loss_by_name(jln.add_layer_norm_linear)))(put)
    chex.assert_trees_all_close(got, expected, **(CLOSE if dtype == "float64" else {"rtol": 1e-4, "atol": 1e-4}))


GSPMD = """
import jax, jax.numpy as jnp, numpy as np, jln
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("data",))
x, scale = jnp.sin(jnp.arange(128.0).reshape(16, 8)), jnp.arange(8.0)
f = lambda norm: jax.jit(jax.grad(lambda x, s: jnp.sum(jnp.sin(norm(x, s))), (0, 1)))
got = f(jln.layer_norm)(jax.device_put(x, NamedSharding(mesh, P("data"))), scale)
for a, b in zip(got, f(jln.reference.layer_norm)(x, scale)):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
"""


def test_the_partitioner_before_shardy():
    """Gradients are right with GSPMD, the partitioner before Shardy.

    The test runs it in a process of its own, as a mistake in what GSPMD is told ends the process.
    """
    environment = os.environ | {"JAX_USE_SHARDY_PARTITIONER": "0"}
    ran = subprocess.run([sys.executable, "-c", GSPMD], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("placement", ["rows", "H"])
@pytest.mark.parametrize("name", ["add_layer_norm", "layer_norm_linear"])
def test_export_for_several_devices(name, placement):
    pytest.importorskip("flatbuffers")
    function, _, put = placed(name, placement, mesh())
    exported = jax.export.export(jax.jit(gradient(function, put)))(*put)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.nr_devices == 8
    chex.assert_trees_all_close(jax.jit(loaded.call)(*put), reference(name), **CLOSE)


@pytest.mark.filterwarnings("ignore:jln runs .* without its Triton kernels")  # the interpreter excludes them
@pytest.mark.parametrize("name", OPTIONAL)
def test_export_and_ahead_of_time(name):
    pytest.importorskip("flatbuffers")
    function, arrays = bind(name, OPTIONAL[name])
    step = jax.jit(gradient(function, arrays))
    for platforms in (("cpu",), ("cpu", "cuda")):
        exported = jax.export.export(step, platforms=platforms)(*arrays)
        loaded = jax.export.deserialize(exported.serialize())
        chex.assert_trees_all_close(loaded.call(*arrays), reference(name), **CLOSE)
    chex.assert_trees_all_close(step.lower(*arrays).compile()(*arrays), reference(name), **CLOSE)


def test_bad_meshes():
    x = jnp.ones((8, 8))
    with pytest.raises(Exception, match="model"):  # this error is JAX's own
        jax.jit(lambda x: jln.layer_norm(jax.lax.with_sharding_constraint(x, NamedSharding(mesh(), P("model")))))(x)
    with pytest.raises(Exception, match="divi"):
        jax.device_put(jnp.ones((7, 8)), NamedSharding(mesh(), P("data")))
    with pytest.raises(Exception, match="duplicate entries for `data`"):
        NamedSharding(mesh(), P("data", "data"))
