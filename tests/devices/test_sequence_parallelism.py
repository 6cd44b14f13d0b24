"""Megatron's sequence parallelism on a 4 x 2 mesh of CPU devices.

One mesh axis splits the sequence of x and the features of kernels. So rows are gathered between the norm and the
products, and their cotangents are scattered on the way back.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from jln._junction.linears import tiles
from matrix import communication, mesh
from placements import CLOSE, put

DATA, TENSOR = 4, 2
ROWS, WIDTH = (4, 16), 24  # a width of its own, as `by` has these shapes traced with another limit of features
BY_ROWS, BY_FEATURES = P("data", "tensor"), P("data", None, "tensor")
SPECS = {"x": BY_ROWS, "residual": BY_ROWS, "kernel": P(None, "tensor"), "bias": P("tensor")}
FEATURES = {"one": ((32,),), "several": ((32,), (8,), (8,)), "heads": ((8, 3), (4, 3))}
OPERATORS = ["layer_norm_linear", "add_rms_norm_linear"]


@pytest.fixture(params=["few features", "many"])
def by(request, monkeypatch):
    """Run a test with few features, where norm and product are one operation, and with many.

    That operation has rules of its own for how it is split. In float64 it is used only under this fixture.
    """
    if request.param == "few features":
        monkeypatch.setitem(tiles.FUSED_FEATURES, "float64", (128, 32))
        jax.clear_caches()
        yield request.param
        jax.clear_caches()
    else:
        yield request.param


def arguments(name, features, rows=ROWS):
    return workbench.named(name, (*rows, WIDTH), "float64", features=features)


def asked(function, of_y):
    """Return the function of a Linear whose products have the sharding `of_y`."""

    def call(**arrays):
        made = function(**arrays)
        y, *more = made if isinstance(made[0], tuple) else (made,)
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, NamedSharding(mesh(), of_y)), y), *more

    return call


def loss_by_name(f):
    """Return a loss of arguments by name that depends on the order of the rows."""

    def weighed(a, i):
        return jnp.sum(jnp.sin(jnp.arange(1.0, 1 + a.size)).reshape(a.shape) * jnp.sin((1 + i) * a))

    return lambda arrays: sum(weighed(a, i) for i, a in enumerate(jax.tree.leaves(f(**arrays))))


def compiled(function, arrays):
    return jax.jit(lambda arrays: function(**arrays)).lower(arrays).compile()


def compiled_gradient(function, arrays):
    """Return the compiled gradient of a loss of `function`, where each gradient has its argument's sharding."""
    wanted = jax.tree.map(lambda a: a.sharding, arrays)
    return jax.jit(jax.grad(loss_by_name(function)), out_shardings=wanted).lower(arrays).compile()


@functools.cache
def expected(name, features):
    arrays = arguments(name, FEATURES[features])
    return jax.jit(jax.grad(loss_by_name(getattr(jln.reference, name))))(arrays)


def of_all_rows(arrays):
    """Return the bytes of z that one device needs: its part of the data, with the whole sequence."""
    return arrays["x"].nbytes // DATA


def in_parts(arrays):
    return sum(a.nbytes for a in jax.tree.leaves((arrays["kernel"], arrays["bias"])))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("name", OPERATORS)
def test_rows_are_gathered_and_no_kernel_is(name, features, by):
    """The rows of z are gathered once forward, however many products read them, and no kernel is gathered.

    The gradient gathers them twice, as the loss needs y, and adds up dz.
    """
    arrays = put(arguments(name, FEATURES[features]), SPECS, mesh())
    function = asked(getattr(jln, name), BY_FEATURES)
    count, size = communication(compiled(function, arrays))
    assert count == {"all-gather": 1} and size["all-gather"] == of_all_rows(arrays)
    step = compiled_gradient(function, arrays)
    count, size = communication(step)
    assert count["all-gather"] == 2 and size["all-gather"] == 2 * of_all_rows(arrays)
    assert count.keys() <= {"all-gather", "all-reduce", "reduce-scatter"}
    parameters = {n: a for n, a in arrays.items() if n not in ("x", "residual")}
    # XLA's CPU backend adds up each product by itself, and whole.
    dz = (
        of_all_rows(arrays) // TENSOR
        if (by, features) == ("few features", "one")
        else of_all_rows(arrays) * len(arrays["kernel"])
    )
    assert size["all-reduce"] + size["reduce-scatter"] <= dz + sum(a.nbytes for a in jax.tree.leaves(parameters))
    assert count["all-reduce"] + count["reduce-scatter"] == 3
    chex.assert_trees_all_close(step(arrays), expected(name, features), **CLOSE)


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_that_are_only_stored_in_parts_are_gathered(name, by):
    """Kernels are gathered under FSDP, and rows are not.

    There the result is asked for by rows, over the mesh axis that splits the kernel.
    """
    arrays = put(arguments(name, FEATURES["one"]), SPECS, mesh())
    function = asked(getattr(jln, name), BY_ROWS)
    count, size = communication(compiled(function, arrays))
    assert count.keys() == {"all-gather"} and size["all-gather"] == in_parts(arrays)
    step = compiled_gradient(function, arrays)
    count, size = communication(step)
    assert size["all-gather"] <= 2 * in_parts(arrays) and "all-to-all" not in count
    chex.assert_trees_all_close(step(arrays), expected(name, "one"), **CLOSE)


@pytest.mark.parametrize(("rows", "gathered"), [((4, 64), "kernel"), ((4, 2), "z")])
def test_where_nobody_asks_the_smaller_of_z_and_the_kernel_is_gathered(rows, gathered, by):
    arrays = put(arguments("layer_norm_linear", FEATURES["one"], rows), SPECS, mesh())
    step = compiled(jln.layer_norm_linear, arrays)
    count, size = communication(step)
    of = {"kernel": in_parts(arrays), "z": of_all_rows(arrays)}
    assert count.keys() == {"all-gather"} and size["all-gather"] == of[gathered]
    y = jln.reference.layer_norm_linear(**jax.device_get(arrays))
    chex.assert_trees_all_close(step(arrays), y, **CLOSE)


def test_kernels_normalise_each_devices_rows():
    """Kernels, interpreted, normalise the rows, and the results are gathered for the products with its features."""
    arrays = workbench.named("add_rms_norm_linear", (4, 2, 16), "float32", features=((16,),))
    given = put(arrays, SPECS, mesh())
    function = functools.partial(jln.add_rms_norm_linear, implementation="triton")
    step = compiled_gradient(asked(function, BY_FEATURES), given)
    count, size = communication(step)
    assert size["all-gather"] == 2 * of_all_rows(given) and "all-to-all" not in count
    plain = jax.jit(jax.grad(loss_by_name(jln.reference.add_rms_norm_linear)))(arrays)
    chex.assert_trees_all_close(step(given), plain, rtol=2e-3, atol=2e-3)


def test_on_an_explicit_mesh_rows_stay_split(by):
    """Results on an explicit mesh are split by rows, although the rows' mesh axis splits the kernel's features too.

    JAX would refuse a product whose result one axis splits twice. Under `auto_axes` y can be asked for by features.
    """
    explicit = put(arguments("layer_norm_linear", FEATURES["one"]), SPECS, mesh(AxisType.Explicit))
    with jax.set_mesh(mesh(AxisType.Explicit)):
        (y,) = jax.jit(jln.layer_norm_linear)(**explicit)
        assert jax.typeof(y).sharding.spec == P("data", "tensor", None)
        automatic = jax.jit(jax.sharding.auto_axes(lambda a: jln.layer_norm_linear(**a)[0], out_sharding=BY_FEATURES))
        count, _ = communication(automatic.lower(explicit).compile())
        assert count == {"all-gather": 1} and jax.typeof(automatic(explicit)).sharding.spec == BY_FEATURES
        chex.assert_trees_all_close(automatic(explicit), y, **CLOSE)


# The leading axes of x, the features of the Linear, and the mesh axes that split them, of the two that split x's rows.
SHARED = {
    "both": (ROWS, (32,), (("outer", "inner"),)),
    "outer": (ROWS, (32,), ("outer",)),
    "inner": (ROWS, (32,), ("inner",)),
    "uneven rows": ((4, 7), (32,), (("outer", "inner"),)),
    "uneven features": (ROWS, (5,), (("outer", "inner"),)),
    "uneven heads": (ROWS, (8, 3), ("outer", "inner")),
}


@pytest.mark.parametrize("shared", SHARED)
def test_features_over_some_of_the_axes_of_the_rows(shared, by):
    """Gathered rows keep their places where not all of their axes split features, and what is uneven is not split."""
    rows, features, axes = SHARED[shared]
    on_three = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "outer", "inner"))
    arrays = arguments("layer_norm_linear", (features,), rows)

    def at(a, *spec):
        return jax.lax.with_sharding_constraint(a, NamedSharding(on_three, P(*spec)))

    def call(x, scale, offset, kernel, bias):
        (kernel,) = kernel
        x, kernel = at(x, "data", ("outer", "inner")), at(kernel, None, *axes)
        (y,) = jln.layer_norm_linear(x, scale, offset, (kernel,), bias)
        return at(y, "data", None, *axes)

    ours, plain = (
        jax.jit(jax.value_and_grad(loss_by_name(f)))(arrays) for f in (call, jln.reference.layer_norm_linear)
    )
    chex.assert_trees_all_close(ours, plain, **CLOSE)
