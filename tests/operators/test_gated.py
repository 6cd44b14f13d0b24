"""Tests of gated norms, and of parameters that vary over an axis directly before the normalised one.

Values, gradients and costs are tested.
"""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_junction import results_and_gradients

import jln
import junctions
import matrix
import workbench
from jln._triton import target
from junctions import has_kernels
from matrix import ROWS, H, loss_by_name, of_some

# Rounding of sums of up to a hundred terms near 10, through a second derivative.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
GATED = ("the norm first", "the gate first")
# Mamba 2's groups: the normalised axis is the last, and each place on the axis directly before it has parameters of its
# own.
GROUPS = "over the last"


def made(form, *, varies="shared", **how):
    """Return (arrays by name, function) of a form of the operators. A sum has a gate that varies as its scale.

    The function takes `jln` or `jln.reference` and more options, and returns that module's operator.
    """
    name = "rms_norm_gated" if form in GATED else form
    given, options = junctions.made(name, gate=varies if varies in junctions.GATES else "H", varies=varies, **how)
    options |= {"norm_before_gate": form == GATED[0]} if form in GATED else {}
    return given, lambda module, **more: functools.partial(getattr(module, name), **options, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(37, 100), (150, 127), (2, 20000)], ids=str)
@pytest.mark.parametrize("name", workbench.GATED)
def test_accuracy(name, shape, dtype, implementation):
    """Gated norms are as accurate as all operators must be, against float64, in every regime of tiles."""
    operator = workbench.GATED[name]
    workbench.check(operator, workbench.arguments(operator, shape, dtype), implementation)


@pytest.mark.parametrize("name", workbench.GATED)
def test_gates_far_from_zero_are_nothing_or_all(name, implementation):
    """Gates far from zero are right, where silu(z) is 0 or z.

    For very negative gates exp(-z) overflows; for very positive ones it vanishes.
    """
    operator = workbench.GATED[name]
    x, z, scale = workbench.arguments(operator, (9, 100), "float32")
    workbench.check(operator, (x, 100 * z, scale), implementation)


CASES = [
    *itertools.product(GATED, ("shared", "by example", GROUPS), (-1, 1, (3, 1), (2, 3))),
    *itertools.product(GATED, ("by row", "over an axis in the middle"), (-1,)),
    *itertools.product(("layer_norm", "add_layer_norm"), (GROUPS,), (-1,)),
    *itertools.product((*GATED, "layer_norm"), ("over an axis in the middle",), (2,)),
]
BY_XLA = [("xla", *case) for case in CASES]
BY_KERNELS = [("triton", *case) for case in CASES if has_kernels(case[1], axis=case[2])]


@pytest.mark.parametrize(("implementation", "form", "varies", "axis"), [*BY_XLA, *BY_KERNELS], ids=str)
def test_values_and_every_gradient(form, varies, axis, implementation):
    """Values and gradients in float64 are those of the reference, all gradients at once and each alone."""
    given, function = made(form, varies=varies, axis=axis)

    def run(function):
        return jax.jit(lambda a: results_and_gradients(function, a))(given)

    ours, plain = run(function(jln, implementation=implementation)), run(function(jln.reference))
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, plain)
    chex.assert_trees_all_close(ours, plain, **CLOSE)


def test_groups_under_vmap_of_some_arguments(implementation):
    """Gradients under a vmap of some arguments are those of the reference.

    Arguments without an axis of vmap are read where they are, by each group its own.
    """
    given, function = made("the gate first", varies=GROUPS)
    grown = {n: jnp.stack([a, 2 * a, 1 - a]) for n, a in given.items()}

    def run(function, some):
        def of_one(a):
            return jax.vjp(lambda a: function(**a), a)[1](given["x"])[0]

        axes = {n: 0 if n in some else None for n in given}
        return jax.vmap(of_one, (axes,))({n: grown[n] if n in some else a for n, a in given.items()})

    for some in (("scale",), ("x", "z"), ("z",), ("x", "z", "scale")):
        ours, plain = (
            jax.jit(functools.partial(run, f, some))()
            for f in (function(jln, implementation=implementation), function(jln.reference))
        )
        chex.assert_trees_all_close(ours, plain, **CLOSE)


TRANSFORMED = {
    "vmap(grad), over parameters": matrix.REVERSE,
    "grad(vmap), over all": matrix.REVERSE,
    "scan(checkpoint)": matrix.REVERSE,
    "jvp(grad)": matrix.REVERSE,
    "grad(grad)": matrix.REVERSE,
    "jvp": matrix.FORWARD,
    "jvp, of the last alone": matrix.FORWARD,
}


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("transformation", TRANSFORMED)
@pytest.mark.parametrize("form", (*GATED, "add_layer_norm"))
def test_groups_transformed(form, transformation, forward_mode):
    """Scales of each group are right under each transformation, by XLA.

    Shared scales are in the matrix of all operators; the kernels are those of `test_values_and_every_gradient`.
    """
    if TRANSFORMED[transformation] is matrix.FORWARD and not forward_mode:
        return
    given, function = made(form, varies="over an axis in the middle", shape=(*ROWS, H))

    def run(function):
        def in_order(*arrays):
            return function(**dict(zip(given, arrays, strict=True)))

        transform = TRANSFORMED[transformation][transformation]
        return jax.jit(lambda a: transform(in_order, a))(tuple(given.values()))

    ours, plain = run(function(jln, implementation="xla", forward_mode=forward_mode)), run(function(jln.reference))
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, plain)
    chex.assert_trees_all_close(ours, plain, **CLOSE)


@pytest.mark.parametrize("split", [("data", None, None), (None, "tensor", None), ("data", "tensor", None)], ids=str)
@pytest.mark.parametrize("varies", ["shared", "over an axis in the middle"])
@pytest.mark.parametrize("form", GATED)
def test_on_a_mesh(form, varies, split):
    """Gradients on a mesh gather nothing, with rows, groups or both in parts.

    A scale of each group lies where its group is.
    """
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    given, function = made(form, varies=varies, shape=(*ROWS, H))
    on = matrix.mesh()

    def spec(a):
        return P(*(axis if n > 1 else None for axis, n in zip(split, a.shape, strict=True))) if a.ndim == 3 else P()

    put = {n: jax.device_put(a, NamedSharding(on, spec(a))) for n, a in given.items()}
    step, plain = (jax.jit(jax.grad(loss_by_name(f))) for f in (function(jln), function(jln.reference)))
    chex.assert_trees_all_close(step(put), plain(given), **CLOSE)
    count, _ = matrix.communication(step.lower(put).compile())
    assert count.keys() <= {"all-reduce"}, count


# The form, the wanted gradients (() for all), and how many numbers a row are held beside x and z.
HELD = [(form, some, n) for form in GATED for some, n in ((("x",), 1), (("z",), 1), (("scale",), 1), ((), 1))]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(("form", "some", "numbers"), HELD)
def test_x_z_and_rstd_are_all_that_is_held(form, some, numbers, forward_mode, implementation):
    shape = (6, 8)
    given, function = made(form, shape=shape)
    function = function(jln, implementation=implementation, forward_mode=forward_mode)
    some = some or tuple(given)
    alone, operands = of_some(lambda *a: function(**dict(zip(given, a, strict=True))), given.values(), given, some)
    held = [a.shape for a in jax.tree.leaves(jax.vjp(alone, *operands)[1])]
    assert (held.count(shape), held.count((shape[0], 1))) == (2, numbers)


BACKWARD, REDUCE = "backward_kernel", "reduce_kernel"
LAUNCHES = [
    (None, (BACKWARD, "d.x", "d.z", "shares"), (REDUCE, "d.scale")),
    (("x",), (BACKWARD, "d.x")),
    (("z",), (BACKWARD, "d.z")),
    (("scale",), (BACKWARD, "shares"), (REDUCE, "d.scale")),
]


@pytest.mark.parametrize(("some", "expected"), [(s, e) for s, *e in LAUNCHES], ids=str)
@pytest.mark.parametrize("form", GATED)
def test_one_kernel_each_way_and_a_reduction(form, some, expected):
    """Each pass is one kernel, and a reduction for dscale; what nobody wants has no place in memory."""
    if not target.interpreting():
        pytest.skip("kernels are compiled here")
    given, function = made(form, shape=(400, 64), dtype="bfloat16")
    some = some or tuple(given)

    def step(arrays):
        def loss(wanted):
            y = function(jln, implementation="triton")(**arrays | wanted)
            return jnp.sum(jnp.sin(y.astype("float32")))

        return jax.grad(loss)({n: arrays[n] for n in some})

    with target.recording() as launches:
        jax.jit(step).lower(given)
    forward, *backward = [(run.kernel.fn.__name__, *run.results) for run in launches]
    if form == "the gate first":  # in front, as an array of its own
        expected = [tuple({"d.z": "d.x_z"}.get(name, name) for name in one) for one in expected]
    assert forward[0] == "forward_kernel" and backward == expected


def test_dz_alone_needs_no_row_sums():
    """The backward pass for dz alone reads rows of several chunks once, where the norm goes first."""
    if not target.interpreting():
        pytest.skip("kernels are compiled here")
    given, function = made(GATED[0], shape=(3, 70000), dtype="float32")

    def of_z(z):
        return jnp.sum(function(jln, implementation="triton")(**given | {"z": z}))

    with target.recording() as launches:
        jax.jit(jax.grad(of_z)).lower(given["z"])
    assert [run.kernel.fn.__name__ for run in launches] == ["forward_kernel", BACKWARD]


@pytest.mark.parametrize("form", (*GATED, "layer_norm"))
def test_rows_are_independent_and_runs_alike(form):
    """Rows of heads next to H do not depend on each other, and a second run gives the same bits.

    y, dx and dz of some rows by themselves are, bit for bit, what they are among all rows.
    """
    given, function = made(form, varies="over an axis in the middle", shape=(19, 3, 100), dtype="float32")
    cotangent = workbench.normal(9, (19, 3, 100), "float32")
    of_rows = [n for n, a in given.items() if a.shape[0] > 1]

    @jax.jit
    def run(arrays, cotangent):
        y, pullback = jax.vjp(lambda a: function(jln, implementation="triton")(**a), arrays)
        return y, pullback(cotangent)[0]

    y, gradients = run(given, cotangent)
    chex.assert_trees_all_equal((y, gradients), run(given, cotangent))
    for some in (slice(0, 1), slice(5, 12)):
        part = {n: a[some] if n in of_rows else a for n, a in given.items()}
        of_part, gradients_of_part = run(part, cotangent[some])
        np.testing.assert_array_equal(of_part, y[some])
        for n in of_rows:
            np.testing.assert_array_equal(gradients_of_part[n], gradients[n][some])


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8)], ids=str)
@pytest.mark.parametrize("form", GATED)
def test_without_rows(form, shape, implementation):
    given, function = made(form, varies="over an axis in the middle", shape=shape)
    y, gradients, alone = jax.jit(lambda a: results_and_gradients(function(jln, implementation=implementation), a))(
        given
    )
    assert y.shape == shape
    for n, a in given.items():
        assert gradients[n].shape == a.shape and (gradients[n] == 0).all() and (alone[n] == 0).all()
