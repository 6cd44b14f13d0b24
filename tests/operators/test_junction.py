"""Tests of sums with x's bias and a gate, and of parameters of each example: values and gradients."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import matrix
import workbench
from catalogue import OPERATORS
from junctions import APART, GATES, VARIES, has_kernels, made

# Rounding of sums of up to a hundred terms near 10, through a second derivative.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def results_and_gradients(function, given):
    """Return (results, gradients, gradients alone) of a function of arrays by name, under random cotangents.

    The gradients are those of one program for all arrays. Each gradient alone is of a program that wants no other.
    """
    cotangent = workbench.cotangents(jax.eval_shape(lambda a: function(**a), given))
    results, pullback = jax.vjp(lambda a: function(**a), given)
    alone = {}
    for n, a in given.items():
        (alone[n],) = jax.vjp(lambda a, n=n: function(**given | {n: a}), a)[1](cotangent)
    return results, pullback(cotangent)[0], alone


@functools.cache
def expected(name, gate, varies, axis):
    given, options = made(name, gate=gate, varies=varies, axis=axis)
    results, gradients, _ = jax.jit(
        lambda a: results_and_gradients(functools.partial(getattr(jln.reference, name), **options), a)
    )(given)
    return results, gradients


AXES = (-1, 1, (3, 1), (2, 3))
CASES = [
    # Every kind of gate, where the normalised axis is the last.
    *itertools.product(("add_layer_norm", "add_rms_norm_linear"), GATES, ("shared", "by example"), (-1,)),
    *itertools.product(("add_rms_norm", "add_layer_norm_linear"), ("rows", "by example"), ("by row",), (-1,)),
    # Other normalised axes, and several.
    *itertools.product(("add_layer_norm",), ("H", "rows", "by example"), ("shared", "by example"), AXES[1:]),
    # Scale and offset that vary, gates that do not, and axes of rows in another order than x's.
    *itertools.product(("add_layer_norm",), ("H", "rows"), ("over an axis in the middle", "by row"), (-1, (3, 1))),
    # Heads, in front of which is an axis that is an example's, or nobody's.
    *itertools.product(("add_layer_norm",), ("over the last", "by example", "rows"), ("over the last",), (-1,)),
    *itertools.product(("add_rms_norm_linear",), ("H", "over the last"), ("over the last",), (-1,)),
    # Of nothing added up.
    *itertools.product(("add_layer_norm",), ("nothing added",), ("shared", "by example"), (1,)),
    *itertools.product(("add_rms_norm", "add_layer_norm_linear"), ("nothing added",), ("shared",), (-1,)),
    # Without a sum.
    *itertools.product(("layer_norm",), ("no gate",), tuple(VARIES)[1:], AXES),
    *itertools.product(("rms_norm", "layer_norm_linear"), ("no gate",), tuple(VARIES)[1:], (-1,)),
    # An offset that varies along other axes than the scale, and with it a gate or not.
    *itertools.product(("layer_norm",), ("no gate",), APART, (-1, 1)),
    *itertools.product(("layer_norm_linear",), ("no gate",), APART, (-1,)),
    *itertools.product(("add_layer_norm",), ("H", "by example"), ("apart",), (-1, 1)),
    ("add_layer_norm_linear", "by example", "apart", -1),
    # A residual behind the norm; norms on both sides of a sum.
    *itertools.product(("layer_norm_add",), ("no gate",), ("by example", "over an axis in the middle"), (-1, 1)),
    *itertools.product(("rms_norm_add_rms_norm",), ("H", "over the last"), ("over the last", "by example"), (-1, 1)),
    *itertools.product(("rms_norm_add_rms_norm_linear",), ("by example",), ("by example", "by row"), (-1,)),
]
BY_XLA = [("xla", *case) for case in CASES]
BY_KERNELS = [("triton", *case) for case in CASES if has_kernels(*case[1:3], axis=case[3])]


@pytest.mark.parametrize(("implementation", "name", "gate", "varies", "axis"), [*BY_XLA, *BY_KERNELS], ids=str)
def test_values_and_every_gradient(name, gate, varies, axis, implementation):
    """Values and gradients in float64 are those of the reference, all gradients at once and each alone.

    Kernels take some of the cases, XLA all: by the rules, or in plain jnp.
    """
    given, options = made(name, gate=gate, varies=varies, axis=axis)
    function = functools.partial(getattr(jln, name), implementation=implementation, **options)
    results, gradients, alone = jax.jit(lambda a: results_and_gradients(function, a))(given)
    true_results, true_gradients = expected(name, gate, varies, axis)
    chex.assert_trees_all_equal_shapes_and_dtypes((results, gradients), (true_results, true_gradients))
    chex.assert_trees_all_close(results, true_results, **CLOSE)
    chex.assert_trees_all_close(gradients, true_gradients, **CLOSE)
    chex.assert_trees_all_close(alone, true_gradients, **CLOSE)


@pytest.mark.parametrize("varies", [*VARIES, *APART])
def test_several_linears_whose_norm_is_made_again(varies):
    """Gradients of two kernels and a bias, however parameters vary, with `remat`."""
    given, _ = made("layer_norm_linear", varies=varies)
    given |= {"kernel": (given["kernel"], given["kernel"][:, 0]), "bias": (None, given["bias"][0])}

    def run(module, **options):
        return jax.jit(jax.value_and_grad(matrix.loss_by_name(functools.partial(module.layer_norm_linear, **options))))

    ours = run(jln, remat=True)(given)
    chex.assert_trees_all_close(ours, run(jln.reference)(given), **CLOSE)


# Axes of rows, heads and H: rows that fill no tile, several heads a program and one, a row in chunks.
@pytest.mark.parametrize("shape", [(7, 3, 37), (2, 33, 5, 129), (3, 2, 9000)], ids=str)
@pytest.mark.parametrize("gate", ["over the last", "rows"])
def test_heads_of_odd_sizes(shape, gate):
    """Heads next to H are read and written where they are, each with parameters of its own."""
    varies = "over the last" if len(shape) == 4 else "over an axis in the middle"
    gate = varies if gate == "over the last" else gate
    given, options = made("add_layer_norm", gate=gate, varies=varies, shape=shape)

    def run(module, **more):
        function = functools.partial(module.add_layer_norm, **options, **more)
        return jax.jit(lambda a: results_and_gradients(function, a))(given)

    chex.assert_trees_all_close(run(jln, implementation="triton"), run(jln.reference), **CLOSE)


# The transformations of gates that the forms of `test_matrix.py` do not have, and of parameters of each example.
TRANSFORMED = {
    "vmap(grad), over x": matrix.REVERSE,
    "vmap(grad), over parameters": matrix.REVERSE,
    "vmap(grad), over all": matrix.REVERSE,
    "grad(vmap), over x": matrix.REVERSE,
    "grad(vmap), over all": matrix.REVERSE,
    "scan(checkpoint)": matrix.REVERSE,
    "jvp(grad)": matrix.REVERSE,
    "grad(grad)": matrix.REVERSE,
    "jvp": matrix.FORWARD,
    "jvp, of the last alone": matrix.FORWARD,
    "jvp(vmap)": matrix.FORWARD,
}


FORMS = [
    ("add_layer_norm", "rows", "shared"),
    ("add_layer_norm", "by example", "by example"),
    ("add_rms_norm_linear", "a row's of each example", "by example"),
    ("layer_norm", "no gate", "by example"),
    ("layer_norm_linear", "no gate", "over an axis in the middle"),
    ("add_layer_norm_linear", "nothing added", "shared"),
    ("layer_norm", "no gate", "apart"),
    ("layer_norm_linear", "no gate", "apart"),
]
# In forward mode the tangent is the same jnp code whatever the implementation; reverse mode goes through its transpose.
TRANSPOSED = ("grad(vmap), over x", "grad(vmap), over all", "scan(checkpoint)", "jvp")


def cells():
    """Yield the cases of `test_transformed`, some of which are heavy in the interpreter.

    Heavy are the forms whose kernels another form has too, and in forward mode most transformations.
    """
    for form, how, forward_mode, implementation in itertools.product(
        FORMS, TRANSFORMED, (False, True), ("xla", "triton")
    ):
        if forward_mode or TRANSFORMED[how] is matrix.REVERSE:
            light = form in FORMS[:2] and (how in TRANSPOSED or not forward_mode)
            marks = () if implementation == "xla" or light else pytest.mark.heavy
            yield pytest.param(*form, how, forward_mode, implementation, marks=marks)


@pytest.mark.parametrize(
    ("name", "gate", "varies", "transformation", "forward_mode", "implementation"), list(cells()), ids=str
)
def test_transformed(name, gate, varies, transformation, forward_mode, implementation):
    given, _ = made(name, gate=gate, varies=varies, shape=(*matrix.ROWS, matrix.H))

    def run(module, **options):
        function = OPERATORS[name].including("x_bias", "gate").in_order(getattr(module, name), tuple(given), **options)
        return jax.jit(lambda a: TRANSFORMED[transformation][transformation](function, a))(tuple(given.values()))

    ours, plain = run(jln, implementation=implementation, forward_mode=forward_mode), run(jln.reference)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, plain)
    chex.assert_trees_all_close(ours, plain, **CLOSE)


@pytest.mark.parametrize(
    ("scale", "axis", "by"),
    [
        *(((8,), 1, "xla"), ((3, 8, 1), 1, "xla"), ((1, 8, 4), 1, "plain jnp"), ((4, 8), (2, 1), "kernels")),
        *(((3, 1, 4), -1, "kernels"), ((1, 8, 4), -1, "kernels"), ((3, 4), (0, 2), "plain jnp")),
        ((1, 3, 1, 4), -1, "kernels"),  # behind an axis of one
    ],
)
def test_what_computes(scale, axis, by):
    """XLA has the rules where the axis is another than the last, and plain jnp where no operation takes it."""
    x, scale = jnp.ones((3, 8, 4) if len(scale) < 4 else (1, 3, 8, 4)), jnp.ones(scale)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jln.rms_norm(x, scale, axis=axis))))(x)
    found = {*re.findall(r"implementation=(\w+)", str(jaxpr))}
    assert found == {"kernels": {"None"}, "xla": {"xla"}, "plain jnp": set()}[by]


@pytest.mark.parametrize("rows", [3, 4])
def test_groups_of_few_rows_that_share_a_parameter(rows):
    """Groups of less than four rows are plain jnp, where it moves less than kernels with parameters written out."""
    x, scale, offset = jnp.ones((2, rows, 8, 4)), jnp.ones(4), jnp.ones((2, 1, 8, 4))

    def operations(**arrays):
        return str(jax.make_jaxpr(lambda x: jln.layer_norm(x, **arrays))(x)).count("jln_norm_forward")

    assert operations(scale=scale, offset=offset) == (rows == 4)
    assert operations(scale=offset, offset=offset) == operations(offset=offset) == 1
    of_examples = jax.vmap(lambda x, offset: jln.layer_norm(x, scale, offset))
    assert ("jln_norm_forward" in str(jax.make_jaxpr(of_examples)(x[:, :, 0], offset[:, 0, 0]))) == (rows == 4)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("unused", ["y", "total"])
@pytest.mark.parametrize("gate", ["no gate", "H", "rows", "by example", "nothing added"])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm_linear"])
def test_a_result_that_is_not_used(name, gate, unused, forward_mode, implementation):
    given, options = made(name, gate=gate, varies="by example" if gate == "by example" else "shared")

    def run(module, **more):
        function = functools.partial(getattr(module, name), **options, **more)
        used = lambda a: function(**a)[0 if unused == "total" else 1]  # noqa: E731
        alone = [jax.grad(lambda v, n=n: jnp.sum(jnp.sin(used(given | {n: v}))))(a) for n, a in given.items()]
        return jax.grad(lambda a: jnp.sum(jnp.sin(used(a))))(given), alone

    ours = jax.jit(lambda: run(jln, implementation=implementation, forward_mode=forward_mode))()
    chex.assert_trees_all_close(ours, jax.jit(lambda: run(jln.reference))(), **CLOSE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(37, 100), (150, 127), (2, 20000)], ids=str)
@pytest.mark.parametrize("name", [n for n in workbench.FORMS if "linear" not in n])
def test_accuracy(name, shape, dtype, implementation):
    """Norms of a sum with a gate are as accurate as all operators must be, against float64, in every regime."""
    operator = workbench.FORMS[name]
    workbench.check(operator, workbench.arguments(operator, shape, dtype), implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [n for n in workbench.FORMS if "linear" in n])
def test_accuracy_of_linears(name, dtype, implementation):
    """Linears of few features behind a sum with an x_bias and a gate, a norm and a product, are accurate."""
    operator = workbench.FORMS[name]
    operands = workbench.arguments(operator, (64, 128), dtype, features=(16,))
    workbench.check(operator, operands, implementation)


# What a norm in front of a product of few features has beside a sum, each of it alone.
ALONE = {
    "x_bias": ("no gate", "shared"),
    "a gate of H": ("H", "shared"),
    "a gate of rows": ("rows", "shared"),
    "a number": ("a number", "shared"),
    "by example": ("no gate", "by example"),
}


@pytest.mark.parametrize("alone", ALONE)
@pytest.mark.parametrize("name", ["add_layer_norm_linear", "add_rms_norm_linear"])
def test_few_features_behind_a_sum_of_one_kind(name, alone, implementation):
    gate, varies = ALONE[alone]
    given, options = made(name, gate=gate, varies=varies, dtype="float32")
    if alone != "x_bias":
        del given["x_bias"]
    ours = functools.partial(getattr(jln, name), implementation=implementation, **options)
    plain = functools.partial(getattr(jln.reference, name), **options)
    got, expected = (jax.jit(jax.value_and_grad(matrix.loss_by_name(f)))(given) for f in (ours, plain))
    # Gradients are sums over 60 rows, of sums of 8 products in float32 (which on a GPU have ten bits).
    tolerance = 3e-2 if jax.default_backend() == "gpu" else 1e-4
    chex.assert_trees_all_close(got, expected, rtol=tolerance, atol=tolerance)


def test_gates_of_rows_run_plain_jnp():
    """A gate of each row is read by XLA where it is, and no array of x's size is made of it; "triton" writes it out."""
    given, _ = made("add_rms_norm", gate="rows", varies="shared")
    del given["scale"]

    def equations(**options):
        return str(jax.make_jaxpr(lambda a: jln.add_rms_norm(**a, **options))(given))

    assert "jln_norm_forward" not in equations() and "jln_norm_forward" in equations(implementation="triton")


def test_a_number_has_all_the_digits_of_the_sum():
    """A number as gate has all the digits of the sum's dtype.

    x has 16 bits and the stream is in float64: 0.1 rounded to float32 would be another number.
    """
    x, residual = workbench.normal(0, (4, 8), "bfloat16"), workbench.normal(1, (4, 8), "float64")
    _, total = jax.jit(lambda x, r: jln.add_rms_norm(x, r, gate=0.1))(x, residual)
    np.testing.assert_allclose(total, 0.1 * x.astype("float64") + residual, rtol=1e-15, atol=1e-15)


def test_a_number_may_be_traced_and_has_a_gradient(implementation):
    """A gate that is a traced number, as in ReZero, has the reference's value and gradient."""
    given, _ = made("add_layer_norm", gate="no gate")

    def run(module, **options):
        def loss(gate):
            return sum(jnp.sum(jnp.sin(r)) for r in module.add_layer_norm(**given, gate=gate, **options))

        return jax.jit(jax.value_and_grad(loss))(0.3)

    chex.assert_trees_all_close(run(jln, implementation=implementation), run(jln.reference), **CLOSE)


@pytest.mark.parametrize("gate", [2, np.float32(0.5), jnp.bfloat16(0.5)])
def test_numbers_of_several_kinds(gate, implementation):
    x, residual = workbench.normal(0, (4, 8), "float32"), workbench.normal(1, (4, 8), "float32")
    _, total = jln.add_rms_norm(x, residual, gate=gate, implementation=implementation)
    np.testing.assert_allclose(total, float(gate) * x + residual, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gate", ["H", "rows", "by example", "a number"])
@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8)], ids=str)
def test_without_rows(shape, gate, implementation):
    """All gradients of an operator without rows are zero."""
    given, options = made("add_layer_norm", gate=gate, varies="by example", shape=shape)
    function = functools.partial(jln.add_layer_norm, implementation=implementation, **options)
    results, gradients, alone = jax.jit(lambda a: results_and_gradients(function, a))(given)
    assert all(a.shape == shape for a in results)
    for n, a in given.items():
        assert gradients[n].shape == a.shape and (gradients[n] == 0).all() and (alone[n] == 0).all()


@pytest.mark.parametrize("gate", ["H", "by example"])
def test_rows_are_independent_and_runs_alike(gate):
    """Rows do not depend on each other, and a second run gives the same bits.

    y, total, dx and dresidual of some rows by themselves are, bit for bit, what they are among all rows.
    """
    given, _ = made("add_layer_norm", gate=gate, varies="by example", shape=(5, 19, 100), dtype="float32")
    cotangent = workbench.normal(9, (2, 5, 19, 100), "float32")
    of_examples = [n for n, a in given.items() if a.ndim == 3]
    of_rows = [n for n in of_examples if given[n].shape[1] > 1]

    @jax.jit
    def run(arrays, cotangent):
        results, pullback = jax.vjp(lambda a: jln.add_layer_norm(**a, implementation="triton"), arrays)
        return results, pullback((cotangent[0], cotangent[1]))[0]

    (y, total), gradients = run(given, cotangent)
    chex.assert_trees_all_equal(((y, total), gradients), run(given, cotangent))
    for some in (slice(0, 1), slice(2, 4)):
        part = {n: a[some] if n in of_examples else a for n, a in given.items()}
        of_part, gradients_of_part = run(part, cotangent[:, some])
        chex.assert_trees_all_equal(of_part, (y[some], total[some]))
        for n in of_rows:
            np.testing.assert_array_equal(gradients_of_part[n], gradients[n][some])
