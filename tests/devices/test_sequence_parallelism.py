"""Megatron's sequence parallelism on a 2 x 4 mesh of CPU devices.

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
from matrix import communication

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
DATA, TENSOR = 2, 4
ROWS, WIDTH = (4, 16), 24  # a width of its own, as `by` has these shapes traced with another limit of features
BY_ROWS, BY_FEATURES = P("data", "tensor"), P("data", None, "tensor")
FEATURES = {"one": ((32,),), "several": ((32,), (8,), (8,)), "heads": ((8, 3), (4, 3))}
OPERATORS = ["layer_norm_linear", "add_rms_norm_linear"]


def mesh(kind=AxisType.Auto):
    return Mesh(np.array(jax.devices()[:8]).reshape(DATA, TENSOR), ("data", "tensor"), axis_types=(kind,) * 2)


def on(spec, kind=AxisType.Auto):
    return NamedSharding(mesh(kind), spec)


def loss_by_name(f):
    """Return a loss of arguments by name that depends on the order of the rows."""

    def weighed(a, i):
        return jnp.sum(jnp.sin(jnp.arange(1.0, 1 + a.size)).reshape(a.shape) * jnp.sin((1 + i) * a))

    return lambda arrays: sum(weighed(a, i) for i, a in enumerate(jax.tree.leaves(f(**arrays))))


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


def arguments(name, features, rows=ROWS, width=WIDTH):
    return workbench.named(name, (*rows, width), "float64", features=features)


SPECS = {"x": BY_ROWS, "residual": BY_ROWS, "kernel": P(None, "tensor"), "bias": P("tensor")}


def placed(arrays, specs=SPECS, kind=AxisType.Auto):
    """Return the arrays on the mesh, split by `specs`; kernels are split by their first axis of features."""
    where = {n: on(specs.get(n, P()), kind) for n in arrays}
    return {n: jax.tree.map(lambda v, n=n: jax.device_put(v, where[n]), a) for n, a in arrays.items()}


def asked(name, of_y, module=jln):
    """Return the operator as a function whose products have the sharding `of_y`."""

    def call(**arrays):
        made = getattr(module, name)(**arrays)
        y, *more = made if name.startswith("add") else (made,)
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, on(of_y)), y), *more

    return call


def forward(name, of_y):
    return jax.jit(lambda arrays: asked(name, of_y)(**arrays))


def gradient(function, arrays):
    """Return the jitted gradient of a loss of `function`, where each gradient has its argument's sharding."""
    wanted = jax.tree.map(lambda a: a.sharding, arrays)
    return jax.jit(jax.grad(loss_by_name(function)), out_shardings=wanted)


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
    arrays = placed(arguments(name, FEATURES[features]))
    count, size = communication(forward(name, BY_FEATURES).lower(arrays).compile())
    assert count == {"all-gather": 1} and size["all-gather"] == of_all_rows(arrays)
    step = gradient(asked(name, BY_FEATURES), arrays)
    count, size = communication(step.lower(arrays).compile())
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
    arrays = placed(arguments(name, FEATURES["one"]))
    count, size = communication(forward(name, BY_ROWS).lower(arrays).compile())
    assert count.keys() == {"all-gather"} and size["all-gather"] == in_parts(arrays)
    step = gradient(asked(name, BY_ROWS), arrays)
    count, size = communication(step.lower(arrays).compile())
    assert size["all-gather"] <= 2 * in_parts(arrays) and "all-to-all" not in count
    chex.assert_trees_all_close(step(arrays), expected(name, "one"), **CLOSE)


@pytest.mark.parametrize(("rows", "gathered"), [((4, 64), "kernel"), ((2, 4), "z")])
def test_where_nobody_asks_the_smaller_of_z_and_the_kernel_is_gathered(rows, gathered, by):
    arrays = placed(arguments("layer_norm_linear", FEATURES["one"], rows))
    step = jax.jit(lambda arrays: jln.layer_norm_linear(**arrays))
    count, size = communication(step.lower(arrays).compile())
    of = {"kernel": in_parts(arrays), "z": of_all_rows(arrays)}
    assert count.keys() == {"all-gather"} and size["all-gather"] == of[gathered]
    y = jax.jit(lambda arrays: jln.reference.layer_norm_linear(**arrays))(jax.device_get(arrays))
    chex.assert_trees_all_close(step(arrays), y, **CLOSE)


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm_linear"])
def test_what_a_product_by_rows_scatters_is_normalised_where_it_arrives(name, by):
    """A product in front of the norm adds up its shares, and nothing is gathered between it and the norm."""
    hidden = 16
    arrays = arguments(name, FEATURES["one"] if name.endswith("linear") else ())
    x = arrays.pop("x")
    arrays |= {
        "hidden": jnp.tile(x, 2)[..., :hidden],
        "lead": jnp.sin(jnp.arange(1.0 * hidden * WIDTH)).reshape(hidden, WIDTH),
    }
    put = placed(arrays, SPECS | {"hidden": BY_FEATURES, "lead": P("tensor")})

    def layer(module):
        def call(hidden, lead, **others):
            y, total = getattr(module, name)(x=hidden @ lead, **others)
            of_y = BY_FEATURES if name.endswith("linear") else BY_ROWS
            return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, on(of_y)), y), total

        return call

    count, size = communication(jax.jit(lambda a: layer(jln)(**a)).lower(put).compile())
    z = put["residual"].nbytes // DATA
    gathers = 1 if name.endswith("linear") else 0
    assert (count["all-gather"], size["all-gather"]) == (gathers, gathers * z)
    assert count["all-reduce"] == 1 and size["all-reduce"] == z  # the product's shares, scattered by slices on the CPU
    assert count.total() == gathers + 1
    plain = jax.jit(jax.grad(loss_by_name(layer(jln.reference))))(arrays)
    chex.assert_trees_all_close(gradient(layer(jln), put)(put), plain, **CLOSE)


# The leading axes of x and the features of each product, where four devices cannot have equal parts of one of them.
UNEVEN = {"rows": ((4, 6), ((32,),)), "features": (ROWS, ((6,),)), "one of several products": (ROWS, ((32,), (6,)))}


@pytest.mark.parametrize("uneven", UNEVEN)
def test_what_does_not_divide_is_not_split(uneven, by):
    arrays = arguments("layer_norm_linear", UNEVEN[uneven][1], UNEVEN[uneven][0])

    def constrained(**arrays):
        specs = {n: on(SPECS.get(n, P())) for n in arrays}
        given = {
            n: jax.tree.map(lambda v, n=n: jax.lax.with_sharding_constraint(v, specs[n]), a) for n, a in arrays.items()
        }
        return asked("layer_norm_linear", BY_FEATURES)(**given)

    got, plain = (
        jax.jit(jax.value_and_grad(loss_by_name(f)))(arrays) for f in (constrained, jln.reference.layer_norm_linear)
    )
    chex.assert_trees_all_close(got, plain, **CLOSE)


def test_on_an_explicit_mesh_rows_stay_split(by):
    """Results on an explicit mesh are split by rows, although the rows' mesh axis splits the kernel's features too.

    JAX would refuse a product whose result one axis splits twice. Under `auto_axes` y can be asked for by features.
    """
    arrays = arguments("layer_norm_linear", FEATURES["one"])
    explicit = placed(arrays, kind=AxisType.Explicit)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        (y,) = jax.jit(jln.layer_norm_linear)(**explicit)
        assert jax.typeof(y).sharding.spec == P("data", "tensor", None)
        automatic = jax.jit(jax.sharding.auto_axes(lambda a: jln.layer_norm_linear(**a)[0], out_sharding=BY_FEATURES))
        count, _ = communication(automatic.lower(explicit).compile())
        assert count == {"all-gather": 1} and jax.typeof(automatic(explicit)).sharding.spec == BY_FEATURES
        chex.assert_trees_all_close(automatic(explicit), y, **CLOSE)


# For each of two products the axes that split its features, among the two that split x's rows.
PARTLY = {"one product by both": (("outer", "inner"), "outer"), "outer": ("outer",) * 2, "inner": ("inner",) * 2}


@pytest.mark.parametrize("partly", PARTLY)
def test_features_over_some_of_the_axes_of_the_rows(partly, by):
    """Gathered rows keep their places where features are split over some of the axes that split the rows."""
    on_three = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "outer", "inner"))
    arrays = arguments("layer_norm_linear", FEATURES["several"][:2])
    specs = {n: jax.tree.map(lambda _: P(), a) for n, a in arrays.items()}
    specs |= {"x": P("data", ("outer", "inner")), "kernel": tuple(P(None, axes) for axes in PARTLY[partly])}
    put = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(on_three, spec)), arrays, specs)

    def call(**arrays):
        pairs = zip(jln.layer_norm_linear(**arrays), PARTLY[partly], strict=True)
        return [
            jax.lax.with_sharding_constraint(y, NamedSharding(on_three, P("data", None, axes))) for y, axes in pairs
        ]

    plain = jax.jit(jax.grad(loss_by_name(jln.reference.layer_norm_linear)))(arrays)
    chex.assert_trees_all_close(jax.jit(jax.grad(loss_by_name(call)))(put), plain, **CLOSE)
