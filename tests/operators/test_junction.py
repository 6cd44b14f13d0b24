"""Tests of gated norms, of sums with x's bias and a gate, and of parameters that vary over axes of rows.

Values and gradients are tested here, costs in `test_junction_costs.py`.
"""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jln
import matrix
import workbench
from junctions import APART, GATED, GATES, VARIES, bound, made

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
def expected(form, gate, varies, axis):
    given, options = made(form, gate=gate, varies=varies, axis=axis)
    return jax.jit(lambda a: results_and_gradients(bound(form, options, jln.reference), a)[:2])(given)


AXES = (-1, 1, (3, 1), (3, 2))  # of several axes in another order than x's
CASES = [
    # Every kind of gate, where the normalised axis is the last.
    *itertools.product(("add_layer_norm", "add_rms_norm_linear"), GATES, ("shared", "by example"), (-1,)),
    *itertools.product(("add_rms_norm", "add_layer_norm_linear"), ("rows", "by example"), ("by row",), (-1,)),
    # Other normalised axes, and several.
    *itertools.product(("add_layer_norm",), ("H", "rows", "by example"), ("shared", "by example"), AXES[1:]),
    # Scale and offset that vary, gates that do not.
    *itertools.product(("add_layer_norm",), ("H", "rows"), ("over an axis in the middle", "by row"), (-1, (3, 1))),
    # Heads, in front of which is an axis that is an example's, or nobody's.
    *itertools.product(("add_layer_norm",), ("over the last", "by example", "rows"), ("over the last",), (-1,)),
    *itertools.product(("add_rms_norm_linear",), ("H", "over the last"), ("over the last",), (-1,)),
    # Without a sum.
    ("layer_norm", "no gate", "shared", (0, 1, 2, 3)),
    *itertools.product(("layer_norm",), ("no gate",), tuple(VARIES)[1:], AXES),
    *itertools.product(("layer_norm_linear",), ("no gate",), tuple(VARIES)[1:], (-1,)),
    *itertools.product(GATED, ("no gate",), ("shared", "by example", "over the last"), AXES),
    *itertools.product(GATED, ("no gate",), ("by row", "over an axis in the middle"), (-1,)),
    # An offset that varies along other axes than the scale, and with it a gate or not.
    *itertools.product(("layer_norm",), ("no gate",), APART, (-1, 1)),
    *itertools.product(("add_layer_norm",), ("H", "by example"), ("apart",), (-1, 1)),
    ("add_layer_norm_linear", "by example", "apart", -1),
    # A residual behind the norm; norms on both sides of a sum.
    *itertools.product(("layer_norm_add",), ("no gate",), ("by example", "over an axis in the middle"), (-1, 1)),
    *itertools.product(("rms_norm_add_rms_norm",), ("H", "over the last"), ("over the last", "by example"), (-1, 1)),
    ("rms_norm_add_rms_norm_linear", "by example", "by example", -1),
]
BY_XLA = [("xla", *case) for case in CASES]
# Kernels take the last axes, and parameters of x's first axes or of the one in front of H. An axis in the middle is
# neither, but for two normalised axes.
BY_KERNELS = [
    ("triton", *case)
    for case in CASES
    if case[3] in ((3, 2), (0, 1, 2, 3)) or (case[3] == -1 and "over an axis in the middle" not in case[1:3])
]


@pytest.mark.parametrize(("implementation", "name", "gate", "varies", "axis"), [*BY_XLA, *BY_KERNELS], ids=str)
def test_values_and_every_gradient(name, gate, varies, axis, implementation):
    """Values and gradients in float64 are those of the reference, all gradients at once and each alone.

    Kernels take some of the cases, XLA all: by the rules, or in plain jnp.
    """
    given, options = made(name, gate=gate, varies=varies, axis=axis)
    function = bound(name, options, implementation=implementation)
    results, gradients, alone = jax.jit(lambda a: results_and_gradients(function, a))(given)
    true = expected(name, gate, varies, axis)
    chex.assert_trees_all_equal_shapes_and_dtypes((results, gradients), true)
    chex.assert_trees_all_close((results, gradients, alone), (*true, true[1]), **CLOSE)


def test_heads_under_vmap_of_some_arguments(implementation):
    """Arguments without an axis of vmap are read where they are, by each head its own."""
    given, options = made("the gate first", varies="over the last")
    grown = {n: jnp.stack([a, 2 * a, 1 - a]) for n, a in given.items()}

    def run(function, some):
        def of_one(a):
            return jax.vjp(lambda a: function(**a), a)[1](given["x"])[0]

        axes = {n: 0 if n in some else None for n in given}
        return jax.vmap(of_one, (axes,))({n: grown[n] if n in some else a for n, a in given.items()})

    for some in (("scale",), ("x", "z"), ("z",)):
        ours, plain = (
            jax.jit(functools.partial(run, bound("the gate first", options, module, **how), some))()
            for module, how in ((jln, {"implementation": implementation}), (jln.reference, {}))
        )
        chex.assert_trees_all_close(ours, plain, **CLOSE)


# The transformations of gates that the forms of `test_matrix.py` do not have, and of parameters of each example.
TRANSFORMED = {
    how: (matrix.REVERSE | matrix.FORWARD)[how]
    for how in (
        "vmap(grad), over parameters",
        "grad(vmap), over x",
        "grad(vmap), over all",
        "scan(checkpoint)",
        "grad(grad)",
        "jvp",
        "jvp, of the last alone",
    )
}
FORMS = [
    ("add_layer_norm", "rows", "shared"),
    ("add_layer_norm", "by example", "by example"),
    ("add_rms_norm_linear", "a row's of each example", "by example"),
    ("layer_norm_linear", "no gate", "over an axis in the middle"),
    ("add_layer_norm_linear", "nothing added", "shared"),
    ("layer_norm", "no gate", "apart"),
    ("the norm first", "no gate", "over an axis in the middle"),
    ("the gate first", "no gate", "over an axis in the middle"),
]
# In forward mode the tangent is the same jnp code whatever the implementation; reverse mode goes through its transpose.
TRANSPOSED = ("grad(vmap), over x", "grad(vmap), over all", "scan(checkpoint)", "jvp")
CELLS = [
    (*form, how, forward_mode, implementation)
    for form, how, forward_mode in itertools.product(FORMS, TRANSFORMED, (False, True))
    for implementation in ("xla", "triton")
    if forward_mode or how in matrix.REVERSE
    if implementation == "xla" or (form in FORMS[:2] and (how in TRANSPOSED or not forward_mode))
]


@pytest.mark.parametrize(("name", "gate", "varies", "transformation", "forward_mode", "implementation"), CELLS)
def test_transformed(name, gate, varies, transformation, forward_mode, implementation):
    given, options = made(name, gate=gate, varies=varies, shape=(*matrix.ROWS, matrix.H))

    def run(module, **more):
        def in_order(*arrays):
            return bound(name, options, module, **more)(**dict(zip(given, arrays, strict=True)))

        return jax.jit(lambda a: TRANSFORMED[transformation](in_order, a))(tuple(given.values()))

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
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize(
    ("name", "gate"),
    [("add_layer_norm", g) for g in ("no gate", "H", "rows", "nothing added")]
    + [("add_rms_norm_linear", "by example"), ("rms_norm_add_rms_norm", "H"), ("rms_norm_add_rms_norm_linear", "H")],
)
def test_one_result_alone(name, gate, used, forward_mode, implementation):
    """Gradients are right, all at once and each alone, where one result is used and the other has no cotangent."""
    given, options = made(name, gate=gate, varies="by example" if gate == "by example" else "shared")

    def run(module, **more):
        function = bound(name, options, module, **more)
        return jax.jit(lambda a: results_and_gradients(lambda **a: function(**a)[used], a))(given)

    ours = run(jln, implementation=implementation, forward_mode=forward_mode)
    chex.assert_trees_all_close(ours, run(jln.reference), **CLOSE)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("dtypes", [("float16", "float16"), ("float32", "bfloat16")], ids="-".join)
@pytest.mark.parametrize("gate", ["H", "rows", "by example", "one element"])
@pytest.mark.parametrize("name", ["add_layer_norm", "rms_norm_add_rms_norm"])
def test_dtypes_where_one_result_alone_is_used(name, gate, dtypes, used, implementation):
    given, options = made(name, gate=gate, shape=(3, 8))
    given = {n: a.astype(dtypes[n not in ("x", "residual")]) for n, a in given.items()}
    function = bound(name, options, implementation=implementation)
    gradients = jax.grad(lambda a: jnp.sum(function(**a)[used].astype("float32")))(given)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, given)


def test_gates_of_rows_run_plain_jnp():
    """A gate of each row is read by XLA where it is, and no array of x's size is made of it; "triton" writes it out."""
    given, _ = made("add_rms_norm", gate="rows", varies="shared")
    del given["scale"], given["x_bias"]

    def equations(**options):
        return str(jax.make_jaxpr(lambda a: jln.add_rms_norm(**a, **options))(given))

    assert "jln_norm_forward" not in equations() and "jln_norm_forward" in equations(implementation="triton")


def test_a_number_as_gate(implementation):
    """A gate that is a number has all digits of the sum's dtype: 0.1 rounded to float32 would be another number."""
    x, residual = workbench.normal(0, (4, 8), "bfloat16"), workbench.normal(1, (4, 8), "float64")
    for gate in (0.1, 2, np.float32(0.5)):
        _, total = jln.add_rms_norm(x, residual, gate=gate, implementation=implementation)
        np.testing.assert_allclose(total, gate * x.astype("float64") + residual, rtol=1e-15, atol=1e-15)
    for gate in (np.float32(0.5), ml_dtypes.bfloat16(0.5)):
        _, total = jln.add_rms_norm(x, x, gate=gate, implementation=implementation)
        np.testing.assert_array_equal(total, jln.reference.add_rms_norm(x, x, gate=0.5)[1])
