"""The operators on a mesh of eight CPU devices: results and gradients, however arguments are split."""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from catalogue import OPERATORS
from jln._core.operation import Operation
from junctions import made
from matrix import OPTIONAL, ROWS, H, bind, communication, gradient, loss_by_name, mesh, operands
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
    "rows and columns": ("layer_norm_linear", "add_layer_norm_linear", "rms_norm_add_rms_norm_linear"),
    "H": ("rms_norm_add_rms_norm", "rms_norm_linear"),
}


def check_in_float32(name, split, implementation):
    given = {n: a.astype("float32") for n, a in operands(name).items()}
    placed = put(given, by_role(name, PLACEMENTS[split]), mesh())
    ours, plain = functools.partial(getattr(jln, name), implementation=implementation), getattr(jln.reference, name)
    got, expected = (jax.jit(jax.value_and_grad(loss_by_name(f)))(a) for f, a in ((ours, placed), (plain, given)))
    chex.assert_trees_all_close(got, expected, rtol=2e-3, atol=2e-3)  # sums of cosines


@pytest.mark.parametrize(("name", "split"), [(name, split) for split in BY_KERNELS for name in BY_KERNELS[split]])
def test_kernels(name, split):
    """Each device runs the kernels, interpreted, on its part of the arrays."""
    check_in_float32(name, split, "triton")


@pytest.mark.parametrize("split", ["rows and columns", "H"])
def test_a_norm_and_few_features_by_xla(split):
    check_in_float32("add_layer_norm_linear", split, None)


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


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("split", SPLIT)
def test_several_linears(split, kind):
    arrays = workbench.named("add_layer_norm_linear", (4, 2, 8), "float64", features=((16,), (8,)))
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
    chex.assert_trees_all_close(got, expected, **CLOSE)


@pytest.mark.parametrize(("name", "placement"), [("add_layer_norm", "H"), ("layer_norm_linear", "rows")])
def test_export_for_several_devices(name, placement):
    pytest.importorskip("flatbuffers")
    function, _, given = placed(name, placement, mesh())
    exported = jax.export.export(jax.jit(gradient(function, given)))(*given)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.nr_devices == 8
    chex.assert_trees_all_close(jax.jit(loaded.call)(*given), reference(name), **CLOSE)


# Gates of rows and parameters of each example.

# How the axes of x [examples, rows of an example, H] are split, and those of a parameter that varies along them.
SPLITS = {
    "examples": ("data", None, None),
    "rows of an example": (None, "tensor", None),
    "examples and rows": ("data", "tensor", None),
    "examples and H": ("data", None, "tensor"),
}
FORMS = [
    ("add_layer_norm", "rows", "shared"),
    ("add_layer_norm", "by example", "by example"),
    ("add_layer_norm", "a number", "shared"),
    ("add_rms_norm_linear", "a row's of each example", "by example"),
    ("add_rms_norm", "over an axis in the middle", "shared"),
    ("layer_norm_linear", "no gate", "apart"),
]
# The arguments whose first axis has H elements, where they are not of x's rank.
LAST = ("scale", "offset", "x_bias", "gate", "kernel")


def placed_in_groups(name, gate, varies, split, on, dtype="float64"):
    """Return the arguments by name on the mesh, and the options."""
    given, options = made(name, gate=gate, varies=varies, shape=(*ROWS, H), dtype=dtype)

    def spec(name, shape):
        if len(shape) == len(ROWS) + 1 and name != "kernel":
            return P(*(axis if n > 1 else None for axis, n in zip(SPLITS[split], shape, strict=True)))
        return P(SPLITS[split][-1]) if name in LAST else P()

    return put(given, {n: spec(n, a.shape) for n, a in given.items()}, on), options


def gradient_by_name(module, name, options):
    return jax.jit(jax.grad(loss_by_name(functools.partial(getattr(module, name), **options))))


@functools.cache
def expected(name, gate, varies):
    given, options = made(name, gate=gate, varies=varies, shape=(*ROWS, H))
    return gradient_by_name(jln.reference, name, options)(given)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "gate", "varies"), FORMS)
def test_groups(name, gate, varies, split, kind):
    """Gradients are those of the reference, nothing is gathered, and what examples have of their own not added up.

    On an explicit mesh they have their arguments' shardings as types.
    """
    on = mesh(getattr(AxisType, kind))
    given, options = placed_in_groups(name, gate, varies, split, on)
    step = gradient_by_name(jln, name, options)
    with jax.set_mesh(on):
        gradients, compiled = step(given), step.lower(given).compile()
    chex.assert_trees_all_close(gradients, expected(name, gate, varies), **CLOSE)
    if kind == "Explicit":
        for n, a in given.items():
            assert jax.typeof(gradients[n]).sharding.spec == jax.typeof(a).sharding.spec, n
        return
    count, size = communication(compiled)
    assert count.keys() <= {"all-reduce"}, count
    if split == "examples" and not OPERATORS[name].is_linear:
        shared = [a for a in given.values() if a.ndim == 1 or a.shape[0] == 1]
        assert size["all-reduce"] == sum(a.nbytes for a in shared)


# Of Linears in float32, whose few features are one operation with the norm.
FEW_FEATURES = [
    ("add_layer_norm_linear", "rows", "by example"),
    ("add_rms_norm_linear", "H", "shared"),
    ("layer_norm_linear", "no gate", "by example"),
]


@pytest.fixture
def by_kernels(monkeypatch):
    """Have jnp in the place of kernels, where JAX cannot look into it either."""
    monkeypatch.setattr(Operation, "_by_kernels", lambda self, *_: functools.partial(self._formula))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "gate", "varies"), FEW_FEATURES)
def test_few_features(name, gate, varies, split, by_kernels):
    """Gradients are those of the reference where JAX cannot look into the operation, and nothing is gathered.

    Those of the norm's parameters of each example stay on the example's devices, those of the Linear are added up over
    examples, too.
    """
    given, options = placed_in_groups(name, gate, varies, split, mesh(), dtype="float32")
    step = gradient_by_name(jln, name, options).lower(given).compile()
    chex.assert_trees_all_close(step(given), expected(name, gate, varies), rtol=1e-3, atol=1e-3)
    count, _ = communication(step)
    assert count.keys() <= ({"all-reduce"} if split != "examples and H" else {"all-reduce", "all-gather"}), count


def test_few_features_of_examples_under_vmap(by_kernels):
    """A vmap's own gradients are not added up over the devices that split its axis."""
    given, _ = made("rms_norm_linear", gate="no gate", varies="by example", shape=(*ROWS, H), dtype="float32")
    given = {n: jnp.stack([a, 2 * a, -a, a / 2]) for n, a in given.items()}

    def of_each(module):
        return jax.jit(jax.vmap(jax.grad(loss_by_name(module.rms_norm_linear))))

    got = of_each(jln)(put(given, dict.fromkeys(given, P("data")), mesh()))
    chex.assert_trees_all_close(got, of_each(jln.reference)(given), rtol=1e-3, atol=1e-3)


# Sums of what has 16 bits: shares are added up in float32, and rounded once.

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
