"""The operators on a mesh of eight CPU devices: results and gradients, however arguments are split."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from matrix import OPTIONAL, bind, gradient, loss_by_name, mesh, of_some, operands
from placements import CASES, CLOSE, PLACEMENTS, by_role, placed, put, reference


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize(("name", "placement"), CASES)
def test_gradient_under_jit(name, placement, kind):
    """Gradients are the reference's, and on an explicit mesh the type of each has its argument's sharding."""
    on = mesh(getattr(AxisType, kind))
    function, _, given = placed(name, placement, on)
    with jax.set_mesh(on) if kind == "Explicit" else contextlib.nullcontext():
        gradients = jax.jit(gradient(function, given))(*given)
    chex.assert_trees_all_close(gradients, reference(name), **CLOSE)
    if kind == "Explicit":
        assert [jax.typeof(g).sharding.spec for g in gradients] == [jax.typeof(a).sharding.spec for a in given]


# Norm and few features are one operation in float32, whose kernels run on each device's rows and features. Kernels
# gather H.
BY_KERNELS = {
    "rows": ("layer_norm", "add_rms_norm", "rms_norm_gated", "add_layer_norm_linear"),
    "rows and columns": ("layer_norm_linear", "rms_norm_add_rms_norm_linear"),
    "H": ("rms_norm_add_rms_norm", "rms_norm_linear"),
}


@pytest.mark.parametrize(("name", "split"), [(name, split) for split in BY_KERNELS for name in BY_KERNELS[split]])
def test_kernels(name, split):
    """Each device runs the kernels, interpreted, on its part of the arrays."""
    given = {n: a.astype("float32") for n, a in operands(name).items()}
    got, expected = (
        jax.jit(jax.value_and_grad(loss_by_name(f)))(arrays)
        for f, arrays in (
            (
                lambda **a: getattr(jln, name)(**a, implementation="triton"),
                put(given, by_role(name, PLACEMENTS[split]), mesh()),
            ),
            (getattr(jln.reference, name), given),
        )
    )
    chex.assert_trees_all_close(got, expected, rtol=2e-3, atol=2e-3)  # sums of cosines


@pytest.mark.parametrize("how", ["a mesh that is set", "forward mode", "a mesh that is not set"])
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm", "layer_norm_linear"])
def test_gradient_on_an_explicit_mesh_outside_of_jit(name, how):
    """Eager gradients on an explicit mesh are the reference's, and each has its argument's sharding.

    JAX refuses a program with arguments on the mesh with automatic axes and on the mesh with explicit ones. Residuals
    and cotangents of `auto_axes` are such arguments. Where no mesh is set, the arguments alone tell it.
    """
    _, arrays, given = placed(name, "rows", mesh(AxisType.Explicit))
    function, _ = bind(name, OPTIONAL[name], forward_mode=how == "forward mode")
    exact, _ = bind(name, OPTIONAL[name], jln.reference)

    def gradients(f, *arrays):
        results, pull = jax.vjp(f, *arrays)
        return pull(results)

    with contextlib.nullcontext() if how == "a mesh that is not set" else jax.set_mesh(mesh(AxisType.Explicit)):
        found = gradients(function, *given)
    chex.assert_trees_all_close(found, jax.jit(functools.partial(gradients, exact))(*arrays), **CLOSE)
    assert [jax.typeof(g) for g in found] == [jax.typeof(a) for a in given]


def test_gradient_outside_of_jit_of_a_program_on_an_explicit_mesh():
    """Gradients are right in `jit`. Outside JAX refuses what is kept between the two programs.

    Where it no longer does, the line in examples/many_devices.md can go.
    """
    function, _, given = placed("rms_norm", "rows", mesh(AxisType.Explicit))
    found = gradient(jax.jit(function), given)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        chex.assert_trees_all_close(jax.jit(found)(*given), reference("rms_norm"), **CLOSE)
        with pytest.raises(ValueError, match="mesh should be the same"):
            found(*given)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("sharded", ["nothing", "what is closed over", "the scale alone"])
def test_a_mesh_that_is_set_where_no_argument_has_it(kind, sharded):
    """Gradients are right under a set mesh over which no argument of the program is split, or only the scale is.

    JAX then gives an empty mesh to the rules that say how an operation is partitioned.
    """
    function, (x, scale, *rest) = bind("layer_norm_linear", OPTIONAL["layer_norm_linear"])
    with jax.set_mesh(mesh(kind)):
        if sharded == "what is closed over":
            x = jax.device_put(x, NamedSharding(mesh(kind), P("data")))
            gradients = jax.jit(lambda *p: gradient(function, (x, *p))(x, *p))(scale, *rest)
        else:
            if sharded == "the scale alone":
                scale = jax.device_put(scale, NamedSharding(mesh(kind), P("tensor")))
            gradients = jax.jit(gradient(function, (x, scale, *rest)))(x, scale, *rest)
    chex.assert_trees_all_close(gradients, reference("layer_norm_linear"), **CLOSE)


@pytest.mark.parametrize("placement", ["rows", "H"])
@pytest.mark.parametrize(
    ("name", "argument"),
    [(name, a) for name in ("add_layer_norm_linear", "rms_norm_add_rms_norm, gate") for a in operands(name)],
)
def test_the_gradient_of_one_argument_alone(name, argument, placement):
    function, _, given = placed(name, placement, mesh())
    alone, some = of_some(function, given, operands(name), (argument,))
    expected = dict(zip(operands(name), reference(name), strict=True))[argument]
    chex.assert_trees_all_close(jax.jit(gradient(alone, some))(*some), (expected,), **CLOSE)


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
    function, _, given = placed("layer_norm", "rows", mesh())
    asked = (None, *(NamedSharding(mesh(), P(axis)) for axis in ("tensor", "data")))
    gradients = jax.jit(gradient(function, given), out_shardings=asked)(*given)
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
    if split == "H":
        specs = dict.fromkeys(("x", "residual"), P("data", None, "tensor"))
        specs |= {"scale": P("tensor"), "kernel": (P("tensor"), P("tensor"))}
    else:
        specs = {} if split == "differently" else dict.fromkeys(("x", "residual"), P("data"))
        specs["kernel"] = tuple(P(None, axis) for axis in SPLIT[split])
        specs["bias"] = (P(SPLIT[split][0]), None)
    on = mesh(getattr(AxisType, kind))
    expected = jax.jit(jax.value_and_grad(loss_by_name(jln.reference.add_layer_norm_linear)))(arrays)
    with jax.set_mesh(on):
        got = jax.jit(jax.value_and_grad(loss_by_name(jln.add_layer_norm_linear)))(put(arrays, specs, on))
    chex.assert_trees_all_close(got, expected, **(CLOSE if dtype == "float64" else {"rtol": 1e-4, "atol": 1e-4}))


@pytest.mark.parametrize(("name", "placement"), [("add_layer_norm", "H"), ("layer_norm_linear", "rows")])
def test_export_for_several_devices(name, placement):
    pytest.importorskip("flatbuffers")
    function, _, given = placed(name, placement, mesh())
    exported = jax.export.export(jax.jit(gradient(function, given)))(*given)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.nr_devices == 8
    chex.assert_trees_all_close(jax.jit(loaded.call)(*given), reference(name), **CLOSE)


@pytest.mark.filterwarnings("ignore:jln runs .* without its Triton kernels")  # the interpreter excludes them
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm_gated", "rms_norm_add_rms_norm_linear"])
def test_export_and_ahead_of_time(name):
    pytest.importorskip("flatbuffers")
    function, arrays = bind(name, OPTIONAL[name])
    step = jax.jit(gradient(function, arrays))
    for platforms in (("cpu",), ("cpu", "cuda")):
        exported = jax.export.export(step, platforms=platforms)(*arrays)
        loaded = jax.export.deserialize(exported.serialize())
        chex.assert_trees_all_close(loaded.call(*arrays), reference(name), **CLOSE)
    chex.assert_trees_all_close(step.lower(*arrays).compile()(*arrays), reference(name), **CLOSE)
