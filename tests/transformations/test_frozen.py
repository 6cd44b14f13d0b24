"""Tests of gradients of some arguments only, in every operator: what nobody wants is not computed."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import matrix
import workbench
from jln._triton import target
from matrix import OPTIONAL, of_some
from proof import equations
from workbench import LINEAR_OPERATORS

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
OPERANDS = {name: tuple(matrix.operands(name)) for name in OPTIONAL}
# Each operand alone, and pairs of them.
CASES = [
    (name, (n,)) for name in ("layer_norm", "rms_norm_gated", "add_layer_norm, x_bias and gate") for n in OPERANDS[name]
]
CASES += [(name, (n,)) for name in ("rms_norm_add_rms_norm, gate", "layer_norm_linear") for n in OPERANDS[name]]
CASES += [("rms_norm_add_rms_norm_linear", ("kernel",)), ("add_layer_norm_linear", ("residual", "kernel"))]
CASES += [("layer_norm", ("scale", "offset")), ("layer_norm_linear", ("offset", "bias"))]
CASES += [("layer_norm_linear", ("x", "kernel")), ("add_layer_norm", ("residual", "scale"))]


def joined(case):
    return case if isinstance(case, str) else "+".join(case) if isinstance(case, tuple) else str(case)


def frozen(name, some, **options):
    """Return the operator as a function of some of its operands, and these operands."""
    function, operands = matrix.bind(name, OPTIONAL[name], **options)
    return of_some(function, operands, OPERANDS[name], some)


@functools.cache
def all_gradients(name, implementation, forward_mode):
    function, operands = frozen(name, OPERANDS[name], implementation=implementation, forward_mode=forward_mode)
    return dict(zip(OPERANDS[name], jax.jit(matrix.gradient(function, operands))(*operands), strict=True))


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(("name", "some"), CASES, ids=joined)
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


LINEAR = ("x", "scale", "offset", "kernel", "bias")
SOME = [(n,) for n in LINEAR] + [
    ("x", "kernel"),
    ("scale", "bias"),
    ("offset", "bias"),
    ("x", "scale", "offset", "bias"),
]


@pytest.mark.parametrize("some", SOME, ids=joined)
def test_some_gradients_of_a_fused_linear(some):
    """Gradients of some arguments of a fused Linear in bfloat16 are right by `workbench.assert_accurate`.

    There are several tiles of rows and of columns, all ragged.
    """
    operator = LINEAR_OPERATORS["layer_norm_linear"]
    operands = workbench.arguments(operator, (150, 100), "bfloat16", features=(20,))
    dy = workbench.normal(6, (150, 20), "bfloat16")

    def run(function):
        function, given = of_some(function, operands, LINEAR, some)
        y, *gradients = jax.jit(lambda *a: (lambda y, pullback: (y, *pullback(dy)))(*jax.vjp(function, *a)))(*given)
        names = ("y", *(f"d{n}" for n in LINEAR if n in some))
        return {n: np.asarray(a) for n, a in zip(names, (y, *gradients), strict=True)}

    got = run(functools.partial(operator, implementation="triton"))
    values, roundings = workbench.truth(operator, operands, dy)
    workbench.assert_accurate(got, run(functools.partial(operator, module=jln.reference)), (values, roundings))


def written(step, *operands):
    """Return the kernels that a program launches, each with the names of the results that it writes."""
    if not target.interpreting():
        pytest.skip("kernels are compiled here")
    with target.recording() as made:
        jax.jit(step).lower(*operands)
    return [(run.kernel.fn.__name__, *run.results) for run in made]


# The launches for a loss that is linear in y, so that y is not needed, by features and the gradients that are wanted.
FORWARD, BACKWARD, SUMS = ("forward_kernel", "r.mean", "r.rstd"), "backward_kernel", "row_sums_kernel"
LAUNCHES = {
    ("norm", "x"): [FORWARD, (BACKWARD, "d.x")],
    ("norm", "scale"): [FORWARD, (BACKWARD, "shares"), ("reduce_kernel", "d.scale")],
    ("norm", "offset"): [],
    # one buffer for both
    ("norm", "scale+offset"): [FORWARD, (BACKWARD, "shares"), ("reduce_kernel", "d.scale", "d.offset")],
    ("fused", "x"): [FORWARD, (SUMS, "c1", "c2"), (BACKWARD, "d.x")],
    ("fused", "scale"): [FORWARD, (BACKWARD, "dscale"), ("parameters_kernel", "d.scale")],
    ("fused", "offset+bias"): [],
    ("fused", "kernel"): [FORWARD, (BACKWARD, "g"), ("parameters_kernel", "d.kernel")],
    ("fused", "x+bias"): [*(FORWARD, (SUMS, "c1", "c2", "dbias"), (BACKWARD, "d.x"), ("parameters_kernel", "d.bias"))],
    ("composed", "kernel"): [FORWARD, ("forward_kernel", "r.y")],
    ("composed", "x+kernel"): [FORWARD, (BACKWARD, "d.x", "d.y")],
    ("composed", "scale+kernel"): [FORWARD, (BACKWARD, "d.y", "shares"), ("reduce_kernel", "d.scale")],
}


@pytest.mark.parametrize("how", ["asked for", "used", "forward mode"])
@pytest.mark.parametrize(("what", "some"), LAUNCHES)
def test_launches(what, some, how):
    """Gradients that nobody wants have no kernel and no place in memory.

    The wanted ones are asked for alone, or the program uses them out of all gradients.
    """
    features = {"norm": None, "fused": 16, "composed": 300}[what]
    operands = workbench.arguments(
        LINEAR_OPERATORS["layer_norm_linear"], (400, 64), "bfloat16", features=(features or 1,)
    )
    names, function = LINEAR, jln.layer_norm_linear
    if features is None:
        names, operands, function = names[:3], operands[:3], jln.layer_norm
    function = functools.partial(function, implementation="triton", forward_mode=how == "forward mode")
    weight = workbench.normal(7, (400, features or 64), "bfloat16")

    def step(*operands):
        wanted = names if how == "used" else some.split("+")
        f, given = of_some(function, operands, names, wanted)
        gradients = jax.grad(lambda *a: jnp.vdot(weight, f(*a)), range(len(given)))(*given)
        return [g for n, g in zip((n for n in names if n in wanted), gradients, strict=True) if n in some.split("+")]

    assert written(step, *operands) == LAUNCHES[what, some]


def test_wide_rows_without_dx_need_no_sums():
    """The gradient dscale alone launches no kernel for row sums.

    The rows are so wide that dx would need such a kernel, for its c1 and c2.
    """
    x, _, scale, _ = workbench.arguments(workbench.OPERATORS["layer_norm"], (2, 40000), "float32")

    def step(x, scale):
        return jax.grad(lambda s: jnp.sum(jnp.sin(jln.layer_norm(x, s, implementation="triton"))))(scale)

    assert [name for name, *_ in written(step, x, scale)] == ["forward_kernel", BACKWARD]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(
    ("name", "some", "rows_held", "numbers"),
    [
        ("layer_norm", ("x",), 1, 2),
        ("layer_norm", ("offset",), 0, 0),
        ("layer_norm", ("x", "scale", "offset"), 1, 2),
        ("add_layer_norm", ("offset",), 0, 0),
        ("layer_norm_linear", ("kernel",), 1, 2),
        ("layer_norm_linear", ("offset", "bias"), 0, 0),
        ("rms_norm_add", ("x",), 1, 1),
        ("rms_norm_add_rms_norm", ("x_scale",), 2, 2),
        ("rms_norm_add_rms_norm", ("residual",), 1, 1),
        ("rms_norm_add_rms_norm", ("scale",), 1, 1),
    ],
    ids=joined,
)
def test_held_between_forward_and_backward(name, some, rows_held, numbers, forward_mode, implementation):
    """Nothing of a row is kept for gradients of offset and bias, and x and two numbers a row for the others.

    Of an operator that adds a residual the sum is kept in x's place. A norm in front of a sum keeps x only for its own
    gradient and its scale's.
    """
    function, operands = frozen(name, some, implementation=implementation, forward_mode=forward_mode)
    kept = jax.tree.leaves(jax.vjp(function, *operands)[1])
    held = [a.shape for a in kept]
    of_rows = sorted(shape for shape in held if shape[: len(matrix.ROWS)] == matrix.ROWS)
    assert of_rows == [(*matrix.ROWS, 1)] * numbers + [(*matrix.ROWS, matrix.H)] * rows_held
    if some[0] == "x" and implementation == "xla":  # x itself, and no copy
        assert any(a is operands[0] for a in kept)


@pytest.mark.parametrize("some", "xsk")
def test_a_gradient_along_one_operand_has_no_products_with_zeros_of_others(some):
    """JAX 0.12's CPU backend made NaN of one. The operands are x, scale and kernel."""
    operands = [workbench.normal(i, shape, "float32") for i, shape in enumerate([(6, 16), (16,), (16, 8)])]
    gradient = matrix.gradient(functools.partial(jln.rms_norm_linear, forward_mode=True), operands)

    def products(some):
        along, given = of_some(gradient, operands, "xsk", some)
        program = jax.make_jaxpr(lambda *a: jax.jvp(along, a, a)[1])(*given)
        return sum(e.primitive is jax.lax.dot_general_p for e in equations(program.jaxpr))

    assert products(some) < products("xsk")


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
