"""Tests of gradients of some arguments only, in every operator: what nobody wants is not computed."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import matrix
import workbench
from catalogue import FORMS
from jln._triton import target
from matrix import OPTIONAL, loss, of_some
from workbench import LINEAR_OPERATORS

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
OPERANDS = {name: tuple(matrix.operands(name)) for name in OPTIONAL}
# Each operand alone; and every pair of operands, of the operators that subtract a mean and do not have both a residual
# and a Linear.
CASES = [
    (name, some)
    for name, names in OPERANDS.items()
    for n in (1, 2)
    for some in itertools.combinations(names, n)
    if n == 1 or (FORMS[name].centres and not (FORMS[name].adds and FORMS[name].is_linear))
]


def frozen(name, some, **options):
    """Return the operator as a function of some of its operands, and these operands."""
    function, operands = matrix.bind(name, OPTIONAL[name], **options)
    return of_some(function, operands, OPERANDS[name], some)


@functools.cache
def all_gradients(name, implementation, forward_mode):
    function, operands = frozen(name, OPERANDS[name], implementation=implementation, forward_mode=forward_mode)
    return dict(zip(OPERANDS[name], jax.jit(matrix.gradient(function, operands))(*operands), strict=True))


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(("name", "some"), CASES, ids=lambda c: c if isinstance(c, str) else "+".join(c))
def test_some_gradients_are_those_of_all(name, some, forward_mode, implementation):
    """Gradients of some arguments are those of all arguments, by kernels bit for bit.

    They are in float64, where a Linear is composed. doffset and dbias are sums of cotangents alone, which something
    else than a kernel may add up where no other gradient needs one.
    """
    function, operands = frozen(name, some, implementation=implementation, forward_mode=forward_mode)
    got = dict(zip(some, jax.jit(matrix.gradient(function, operands))(*operands), strict=True))
    expected = {n: a for n, a in all_gradients(name, implementation, forward_mode).items() if n in some}
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    chex.assert_trees_all_close(got, expected, **CLOSE)
    if implementation == "triton":
        kernels = [n for n in some if n not in ("offset", "bias")]
        chex.assert_trees_all_equal(*({n: a[n] for n in kernels} for a in (got, expected)))


GRADIENT = {name: f"d{name}" for name in ("x", "scale", "offset", "kernel", "bias")}


@pytest.mark.parametrize(
    "some", [c for n in range(1, 5) for c in itertools.combinations(GRADIENT, n)], ids=lambda c: "+".join(c)
)
def test_some_gradients_of_a_fused_linear(some):
    """Gradients of some arguments of a fused Linear in bfloat16 are right by `workbench.assert_accurate`.

    There are several tiles of rows and of columns, all ragged.
    """
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    operands = workbench.arguments(operator, (150, 100), "bfloat16", features=(20,))
    dy = workbench.normal(6, (150, 20), "bfloat16")

    def run(function):
        function, given = of_some(function, operands, tuple(GRADIENT), some)
        y, *gradients = jax.jit(lambda *a: (lambda y, pullback: (y, *pullback(dy)))(*jax.vjp(function, *a)))(*given)
        in_order = (n for n in GRADIENT if n in some)
        return {k: np.asarray(a) for k, a in zip(("y", *(GRADIENT[n] for n in in_order)), (y, *gradients), strict=True)}

    got = run(functools.partial(operator, implementation="triton"))
    values, roundings = workbench.truth(operator, operands, dy)
    workbench.assert_accurate(got, run(functools.partial(operator, module=jln.reference)), (values, roundings))


def written(step, *operands):
    """Return the kernels that a program launches, each with the names of the results that it writes."""
    with target.recording() as made:
        jax.jit(step).lower(*operands)
    return [(run.kernel.fn.__name__, *run.results) for run in made]


# The launches for a loss that is linear in y, so that y is not needed, by the gradients that are wanted.
FORWARD, BACKWARD = ("forward_kernel", "r.mean", "r.rstd"), "backward_kernel"
NORM_LAUNCHES = {
    ("x",): [FORWARD, (BACKWARD, "d.x")],
    ("scale",): [FORWARD, (BACKWARD, "shares"), ("reduce_kernel", "d.scale")],
    ("offset",): [],
    ("x", "offset"): [FORWARD, (BACKWARD, "d.x", "shares"), ("reduce_kernel", "d.offset")],
    ("scale", "offset"): [
        FORWARD,
        (BACKWARD, "shares"),
        ("reduce_kernel", "d.scale", "d.offset"),
    ],  # one buffer for both
}
SUMS = "row_sums_kernel"
FUSED_LAUNCHES = {
    ("x",): [FORWARD, (SUMS, "c1", "c2"), (BACKWARD, "d.x")],
    ("scale",): [FORWARD, (BACKWARD, "dscale"), ("parameters_kernel", "d.scale")],
    ("offset", "bias"): [],
    ("kernel",): [FORWARD, (BACKWARD, "g"), ("parameters_kernel", "d.kernel")],
    ("x", "bias"): [FORWARD, (SUMS, "c1", "c2", "dbias"), (BACKWARD, "d.x"), ("parameters_kernel", "d.bias")],
    ("x", "scale"): [FORWARD, (SUMS, "c1", "c2"), (BACKWARD, "d.x", "dscale"), ("parameters_kernel", "d.scale")],
}
COMPOSED_LAUNCHES = {
    ("x",): [FORWARD, (BACKWARD, "d.x")],
    ("offset", "bias"): [],
    ("kernel",): [FORWARD, ("forward_kernel", "r.y")],
    ("x", "kernel"): [FORWARD, (BACKWARD, "d.x", "d.y")],
    ("scale", "kernel"): [FORWARD, (BACKWARD, "d.y", "shares"), ("reduce_kernel", "d.scale")],
}


@pytest.mark.parametrize("how", ["asked for", "used", "forward mode"])
@pytest.mark.parametrize(
    ("features", "some", "expected"),
    [
        pytest.param(features, some, launches, id=f"{what}-{'+'.join(some)}")
        for what, features, table in (
            ("norm", None, NORM_LAUNCHES),
            ("fused", 16, FUSED_LAUNCHES),
            ("composed", 300, COMPOSED_LAUNCHES),
        )
        for some, launches in table.items()
    ],
)
def test_launches(features, some, expected, how):
    """Gradients that nobody wants have no kernel and no place in memory.

    The wanted ones are asked for alone, or the program uses them out of all gradients.
    """
    if not target.interpreting():
        pytest.skip("kernels are compiled here")
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    x, scale, offset, kernel, bias = workbench.arguments(operator, (400, 64), "bfloat16", features=(features or 1,))
    names, operands = ("x", "scale", "offset", "kernel", "bias"), (x, scale, offset, kernel, bias)
    function = jln.layer_norm_linear
    if features is None:
        names, operands, function = names[:3], operands[:3], jln.layer_norm
    function = functools.partial(function, implementation="triton", forward_mode=how == "forward mode")
    weight = workbench.normal(7, (400, features or 64), "bfloat16")

    def step(*operands):
        wanted = names if how == "used" else some
        f, given = of_some(function, operands, names, wanted)
        gradients = jax.grad(lambda *a: jnp.vdot(weight, f(*a)), range(len(given)))(*given)
        return [g for n, g in zip((n for n in names if n in wanted), gradients, strict=True) if n in some]

    assert written(step, *operands) == expected


def test_wide_rows_without_dx_need_no_sums():
    """The gradient dscale alone launches no kernel for row sums.

    The rows are so wide that dx would need such a kernel, for its c1 and c2.
    """
    if not target.interpreting():
        pytest.skip("kernels are compiled here")
    x, _, scale, _ = workbench.arguments(workbench.OPERATORS["layer_norm"], (2, 40000), "float32")

    def step(x, scale):
        return jax.grad(lambda s: jnp.sum(jnp.sin(jln.layer_norm(x, s, implementation="triton"))))(scale)

    assert [name for name, *_ in written(step, x, scale)] == ["forward_kernel", BACKWARD]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(
    ("name", "some", "rows_held"),
    [
        ("layer_norm", ("x",), 1),
        ("layer_norm", ("scale",), 1),
        ("layer_norm", ("offset",), 0),
        ("add_layer_norm", ("offset",), 0),
        ("layer_norm_linear", ("x",), 1),
        ("layer_norm_linear", ("kernel",), 1),
        ("layer_norm_linear", ("offset", "bias"), 0),
    ],
    ids=lambda c: "+".join(c) if isinstance(c, tuple) else str(c),
)
def test_held_between_forward_and_backward(name, some, rows_held, forward_mode, implementation):
    """Nothing of a row is kept for gradients of offset and bias, and x and two numbers a row for the others.

    Of an operator that adds a residual the sum is kept in x's place.
    """
    function, operands = frozen(name, some, implementation=implementation, forward_mode=forward_mode)
    held = [a.shape for a in jax.tree.leaves(jax.vjp(function, *operands)[1])]
    of_rows = sorted(shape for shape in held if shape[: len(matrix.ROWS)] == matrix.ROWS)
    assert of_rows == [(*matrix.ROWS, 1), (*matrix.ROWS, 1), (*matrix.ROWS, matrix.H)] * rows_held


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(
    ("name", "some", "rows_held", "numbers"),
    [
        ("rms_norm_add", ("x",), 1, 1),
        ("rms_norm_add", ("residual",), 0, 0),
        ("rms_norm_add_rms_norm", ("x",), 2, 2),
        ("rms_norm_add_rms_norm", ("x_scale",), 2, 2),
        ("rms_norm_add_rms_norm", ("residual",), 1, 1),
        ("rms_norm_add_rms_norm", ("scale",), 1, 1),
    ],
    ids=lambda c: "+".join(c) if isinstance(c, tuple) else str(c),
)
def test_held_by_norms_in_front_of_a_sum(name, some, rows_held, numbers, forward_mode, implementation):
    """A norm in front of a sum keeps x only for its own gradient and its scale's, and never the residual."""
    function, operands = frozen(name, some, implementation=implementation, forward_mode=forward_mode)
    held = [a.shape for a in jax.tree.leaves(jax.vjp(function, *operands)[1])]
    of_rows = sorted(shape for shape in held if shape[: len(matrix.ROWS)] == matrix.ROWS)
    assert of_rows == [(*matrix.ROWS, 1)] * numbers + [(*matrix.ROWS, matrix.H)] * rows_held


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.vmap(f, (0, *[None] * 4))], ids=["jit", "jit(vmap)"])
def test_differentiated_by_one_argument_then_another(wrap, implementation):
    """A jitted operator that is differentiated by one argument and then by another gives the right gradients each time.

    JAX traces a function once, and remembers of a forward rule's residuals what it saw last.
    """
    function, operands = matrix.bind("layer_norm_linear", "sob", implementation=implementation)
    exact = matrix.bind("layer_norm_linear", "sob", jln.reference)[0]
    operands = (jnp.stack([operands[0], 2 * operands[0]]), *operands[1:])
    traced = jax.jit(wrap(function))

    def pullback(f, i):
        y, pull = jax.vjp(lambda a: f(*operands[:i], a, *operands[i + 1 :]), operands[i])
        return lambda: pull(jnp.cos(y))

    arguments = [0, 3, 1, 0, 4, 3, 2, 1, 0]  # x, offset, kernel, x, bias, offset, scale, kernel, x
    expected = {i: pullback(jax.jit(wrap(exact)), i)() for i in {*arguments}}
    for i in arguments:
        chex.assert_trees_all_close(pullback(traced, i)(), expected[i], **CLOSE)
    pending = [(i, pullback(traced, i)) for i in arguments]
    for i, pull in reversed(pending):
        chex.assert_trees_all_close(pull(), expected[i], **CLOSE)
    for i in arguments:  # a new program for each, of an operator that is traced once

        def step(*operands, i=i):
            def f(a):
                return wrap(function)(*operands[:i], a, *operands[i + 1 :])

            y, pull = jax.vjp(f, operands[i])
            return pull(jnp.cos(y))

        chex.assert_trees_all_close(jax.jit(step)(*operands), expected[i], **CLOSE)


def stacked_layers(name, some, module, wrap):
    """Return the gradients by the arguments in `some` of a network of three layers with stacked parameters.

    The other arguments are frozen. x is carried from layer to layer.
    """
    function, operands = matrix.bind(name, OPTIONAL[name], module)
    x, rest = operands[0], matrix.examples(operands[1:])
    names = OPERANDS[name]

    def network(*given):
        x_, *stacked = (dict(zip(some, given, strict=True)).get(n, a) for n, a in zip(names, (x, *rest), strict=True))

        def layer(x, parameters):
            return x + matrix.first(function)(jnp.sin(x), *parameters), None

        return jnp.sum(jnp.sin(jax.lax.scan(wrap(layer), x_, tuple(stacked))[0]))

    given = tuple(a for n, a in zip(names, (x, *rest), strict=True) if n in some)
    return jax.jit(jax.grad(network, range(len(given))))(*given)


SOME = [("layer_norm", ("x",)), ("layer_norm", ("offset",)), ("add_layer_norm", ("residual", "scale"))]
SOME += [("layer_norm_linear", some) for some in (("x",), ("kernel",), ("offset", "bias"), ("x", "scale", "bias"))]


@pytest.mark.parametrize("wrap", [lambda b: b, jax.checkpoint], ids=["scan", "scan(checkpoint)"])
@pytest.mark.parametrize(("name", "some"), SOME)
def test_layers_with_frozen_parameters(name, some, wrap):
    ours, plain = (stacked_layers(name, some, module, wrap) for module in (jln, jln.reference))
    chex.assert_trees_all_close(ours, plain, **CLOSE)


TRANSFORMED = {
    "vmap(grad)": lambda f, a, x: jax.vmap(lambda x: jax.grad(loss(f(x)), matrix.every(a))(*a))(x),
    "grad(vmap)": lambda f, a, x: jax.grad(lambda *a: jnp.sum(jax.vmap(lambda x: loss(f(x))(*a))(x)), matrix.every(a))(
        *a
    ),
    "jvp(grad)": lambda f, a, x: jax.jvp(jax.grad(loss(f(x[0])), matrix.every(a)), a, matrix.directions(a)),
    "grad(grad)": lambda f, a, x: jax.grad(matrix.along(f(x[0]), a), matrix.every(a))(*a),
    "checkpoint": lambda f, a, x: jax.grad(loss(jax.checkpoint(f(x[0]))), matrix.every(a))(*a),
}


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("how", TRANSFORMED)
@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("layer_norm", ("scale",)),
        ("layer_norm", ("offset",)),
        ("add_layer_norm", ("residual", "offset")),
        ("layer_norm_linear", ("kernel",)),
        ("layer_norm_linear", ("offset", "bias")),
        ("layer_norm_linear", ("scale", "bias")),
    ],
)
def test_transformed_with_x_frozen(name, some, how, forward_mode, implementation):
    """Gradients of other arguments than x are right under each transformation.

    Under vmap x differs from example to example, and the arguments that are differentiated do not.
    """

    def run(module, **options):
        function, operands = matrix.bind(name, OPTIONAL[name], module, **options)
        xs = matrix.examples(operands[:1])[0]
        _, given = of_some(function, operands, OPERANDS[name], some)

        @jax.jit
        def step(given, xs):
            return TRANSFORMED[how](lambda x: of_some(function, (x, *operands[1:]), OPERANDS[name], some)[0], given, xs)

        return step(given, xs)

    ours = run(jln, implementation=implementation, forward_mode=forward_mode)
    chex.assert_trees_all_close(ours, run(jln.reference), **CLOSE)


@pytest.mark.parametrize("some", [("x",), ("scale",), ("offset",)], ids="+".join)
def test_an_unused_result_may_have_brought_the_axis_of_vmap(some, implementation):
    """Each gradient by itself is right where the examples of a vmap differ in their scale only.

    dy is the same for all examples. doffset has an axis of examples all the same, which it may have from an unused
    result.
    """
    function, (x, scale, offset) = matrix.bind("layer_norm", "so", implementation=implementation)
    names = OPERANDS["layer_norm"]

    def run(f):
        gradients = jax.vmap(jax.grad(lambda *a: jnp.sum(2 * f(*a)), (0, 1, 2)), (None, 0, None))
        step = jax.jit(lambda *a: [g for n, g in zip(names, gradients(*a), strict=True) if n in some])
        return step(x, jnp.stack([scale, 2 * scale]), offset)

    chex.assert_trees_all_close(run(function), run(matrix.bind("layer_norm", "so", jln.reference)[0]), **CLOSE)


def test_the_cpu_makes_what_is_wanted_and_no_temporary():
    """One gradient takes at most 0.2 MiB of temporary memory on the CPU, where x has 16 MiB.

    XLA's CPU backend keeps whatever stands behind a fence (`optimization_barrier`), wanted or not. The cotangent of y
    is an array of the loss's: one that is made of a number XLA writes out first, from JAX 0.11 on.
    """
    x, scale, offset = jnp.ones((4096, 1024), "float32"), jnp.ones(1024), jnp.ones(1024)

    def loops(n):
        def step(x, scale, offset, weight):
            f, given = of_some(jln.layer_norm, (x, scale, offset), ("x", "scale", "offset"), (n,))
            return jax.grad(lambda a: jnp.vdot(weight, f(a)), 0)(*given)

        compiled = jax.jit(step).lower(x, scale, offset, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert max(loops(n) for n in ("x", "scale", "offset")) <= 0.2 * 2**20
