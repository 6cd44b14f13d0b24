"""The operators on a mesh of eight CPU devices: results, gradients and what the compiled step communicates."""

import functools
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from jln._catalogue import FORMS
from matrix import OPTIONAL, along, bind, communication, every, gradient, loss, loss_by_name, mesh, of_some, operands

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
LINEAR = [name for name, o in FORMS.items() if o.is_linear]

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)


# How the arguments are split over the mesh, by their roles.
ROWS = {"activation": P("data")}
PLACEMENTS = {
    "rows": ROWS,
    "rows over both axes": {"activation": P("data", "tensor")},
    "parameters stored in parts": ROWS
    | {"scale": P("data"), "offset": P("tensor"), "kernel": P("data"), "bias": P("tensor")}
    | {"x_bias": P("tensor"), "gate": P("data")},
    "H": {"activation": P("data", None, "tensor")}
    | dict.fromkeys(("scale", "offset", "x_bias", "gate", "kernel"), P("tensor")),
    "H of x alone": {"activation": P(None, None, "data")},
    "columns": {"kernel": P(None, "tensor"), "bias": P("tensor")},
    "rows and columns": {**ROWS, "kernel": P(None, "tensor"), "bias": P("tensor")},
    "rows and columns, kernel stored in parts": {**ROWS, "kernel": P("data", "tensor"), "bias": P("tensor")},
    "features stored in parts": {**ROWS, "kernel": P(None, None, "data"), "bias": P(None, "data")},
}
COLUMNS = [p for p in PLACEMENTS if "columns" in p or "features" in p]


def cases():
    return [(n, p) for n in OPTIONAL for p in PLACEMENTS if n in LINEAR or p not in COLUMNS]


def placed(name, placement, mesh):
    """Return the operator as a function, its operands, and its operands on the mesh."""
    function, arrays = bind(name, OPTIONAL[name])
    roles = {a.name: a.role for a in FORMS[name].arguments} | {"x_bias": "x_bias"}  # not placed as a Linear's bias
    specs = [PLACEMENTS[placement].get(roles[n], P()) for n in operands(name)]
    put = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
    return function, arrays, put


@functools.cache
def reference(name):
    """Return the gradients of the reference on one device."""
    function, arrays = bind(name, OPTIONAL[name], jln.reference)
    return jax.jit(gradient(function, arrays))(*arrays)


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


# The numbers of all-reduces, all-gathers and reduce-scatters of a gradient. XLA makes one all-reduce of all that is
# added up over the same devices at the same time.
EXPECTED = {
    ("layer_norm", "rows"): (1, 0, 0),
    ("rms_norm", "rows"): (1, 0, 0),
    ("add_layer_norm", "rows"): (1, 0, 0),
    ("add_rms_norm", "rows over both axes"): (1, 0, 0),
    ("add_layer_norm, x_bias and gate", "rows"): (1, 0, 0),
    ("add_rms_norm, x_bias and gate", "rows over both axes"): (1, 0, 0),
    ("add_layer_norm, x_bias and gate", "H"): (4, 0, 0),  # as layer_norm, with dx_bias and dgate in the last
    ("layer_norm", "H"): (4, 0, 0),  # mean; variance; c1 with c2; dscale with doffset
    ("rms_norm", "H"): (3, 0, 0),
    ("layer_norm_linear", "rows"): (1, 0, 0),
    ("rms_norm_linear", "rows over both axes"): (3, 0, 0),  # dkernel, XLA's own product, over one axis after the other
    ("layer_norm_linear", "columns"): (1, 0, 0),  # dx with dscale and doffset
    ("layer_norm_linear", "rows and columns"): (2, 0, 0),  # as "columns", and the parameters' gradients over the rows
    ("layer_norm_linear", "rows and columns, kernel stored in parts"): (2, 2, 0),  # the kernel for each pass
    ("layer_norm_linear", "H"): (5, 0, 0),  # as layer_norm, and the product
}


@pytest.mark.parametrize(("name", "placement"), EXPECTED)
def test_communication(name, placement):
    function, _, put = placed(name, placement, mesh())
    count, size = communication(jax.jit(gradient(function, put)).lower(*put).compile())
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    assert tuple(count[k] for k in kinds) == EXPECTED[name, placement]
    assert count.total() == sum(EXPECTED[name, placement])
    if EXPECTED[name, placement] == (1, 0, 0) and placement != "columns":
        assert size["all-reduce"] == sum(operands(name)[a.name].nbytes for a in FORMS[name].parameters)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["add_layer_norm_linear", "rms_norm_linear", "add_rms_norm_linear, x_bias and gate"])
def test_no_more_is_communicated_than_by_plain_jnp(name, placement):
    """A gradient communicates at most the bytes of plain jnp's plus those of the norm's and the sum's parameters.

    A device may have to send its parts of those parameters' gradients.
    """
    function, _, put = placed(name, placement, mesh())
    plain = bind(name, OPTIONAL[name], jln.reference)[0]
    ours, plains = (communication(jax.jit(gradient(f, put)).lower(*put).compile())[1] for f in (function, plain))
    of_norm = sum(operands(name)[n].nbytes for n in ("scale", "offset", "x_bias", "gate") if n in operands(name))
    assert ours.total() <= plains.total() + of_norm


def test_sequence_parallelism():
    """Megatron's sequence parallelism gathers only rows and no kernel, and sends nothing from all to all.

    The mesh axis that splits the features splits the sequence outside of them. The forward pass gathers z once for both
    products. The backward pass makes z again and gathers it once more, and gathers the last product's cotangent.
    """
    width, features = 64, 512  # more features than one kernel multiplies

    def on(*spec):
        return NamedSharding(mesh(), P(*spec))

    x = jax.device_put(workbench.normal(0, (4, 16, width), "float32"), on("data", "tensor"))
    scale = jax.device_put(jnp.ones(width, "float32"), on())
    kernels = tuple(workbench.normal(i, (width, features), "float32") / 8 for i in (1, 2))
    kernels = jax.device_put(kernels, on(None, "tensor"))
    last = jax.device_put(workbench.normal(3, (features, width), "float32") / 23, on("tensor", None))

    def layer(module):
        def call(x, scale, kernels, last):
            y, total = module.add_rms_norm_linear(x, x, scale, kernels)
            gate, up = (jax.lax.with_sharding_constraint(a, on("data", None, "tensor")) for a in y)
            branch = jax.lax.with_sharding_constraint((jnp.sin(gate) * up) @ last, on("data", "tensor"))
            return total + branch

        return call

    arguments = x, scale, kernels, last
    forward = jax.jit(layer(jln), out_shardings=on("data", "tensor")).lower(*arguments).compile()
    count, size = communication(forward)
    assert count["all-gather"] == 1 and size["all-gather"] == 4 * x.size // 4  # of one part of the data
    wanted = tuple(jax.tree.map(lambda a: a.sharding, arguments))
    step, plain = (
        jax.jit(jax.grad(lambda *a, m=m: jnp.sum(jnp.sin(layer(m)(*a))), every(arguments)), out_shardings=wanted)
        for m in (jln, jln.reference)
    )
    count, size = communication(step.lower(*arguments).compile())
    assert count.keys() == {"all-gather", "all-reduce"} and count["all-gather"] == 3
    assert size["all-gather"] == 3 * 4 * x.size // 4
    chex.assert_trees_all_close(step(*arguments), plain(*arguments), rtol=1e-4, atol=1e-4)


def test_vmap_over_a_sharded_axis_gathers_nothing():
    function, (x, *rest) = bind("layer_norm", "so")
    xs = jax.device_put(jnp.stack([x, 2 * x, x + 1, -x]), NamedSharding(mesh(), P("data")))
    step = jax.jit(jax.vmap(gradient(function, [x, *rest]), (0, None, None)))
    assert communication(step.lower(xs, *rest).compile())[0].total() == 0
    expected = jax.vmap(gradient(bind("layer_norm", "so", jln.reference)[0], [x, *rest]), (0, None, None))(xs, *rest)
    chex.assert_trees_all_close(step(xs, *rest), expected, **CLOSE)


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


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_linear"])
@pytest.mark.parametrize("shape", [(2, 4, 2, 8), (4, 2, 2, 8)], ids=str)
def test_a_part_of_a_mesh_axis(shape, name):
    """Gradients are right where a reshape, as into microbatches, splits the rows and the mesh axis that splits them.

    They communicate by all-reduces alone, of no more bytes than plain jnp's.
    """
    whole = Mesh(np.array(jax.devices()[:8]), ("data",))
    function, (x, *rest) = bind(name, OPTIONAL[name])
    x = jnp.concatenate([x, 2 * x]).reshape(16, *x.shape[2:])
    put = jax.device_put(x, NamedSharding(whole, P("data")))

    def step(f):
        return jax.jit(jax.grad(lambda x, *rest: loss(f)(x.reshape(shape), *rest), every((x, *rest))))

    exact = bind(name, OPTIONAL[name], jln.reference)[0]
    chex.assert_trees_all_close(step(lambda *a: function(*a))(put, *rest), step(exact)(x, *rest), **CLOSE)
    count, size = communication(step(lambda *a: function(*a)).lower(put, *rest).compile())
    plain, plain_size = communication(step(lambda *a: exact(*a)).lower(put, *rest).compile())
    assert count.keys() == {"all-reduce"} == plain.keys()
    assert size["all-reduce"] <= plain_size["all-reduce"]
    # dkernel, XLA's own product, is added up over one part of the mesh axis after the other.
    assert count["all-reduce"] == (1 if name == "layer_norm" else 3)


def test_results_that_are_asked_for_elsewhere():
    """Gradients may be asked for over a mesh axis that does not split the rows: dscale is not scattered there."""
    function, _, put = placed("layer_norm", "rows", mesh())
    asked = (None, *(NamedSharding(mesh(), P(axis)) for axis in ("tensor", "data")))
    gradients = jax.jit(gradient(function, put), out_shardings=asked)(*put)
    chex.assert_trees_all_close(gradients, reference("layer_norm"), **CLOSE)


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
