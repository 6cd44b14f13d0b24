"""Sums that XLA's CPU backend computes wrongly, which the operators keep clear of: each gradient wanted alone is right.

jaxlib 0.10.2 and 0.11.0 do so under a `vmap` of which examples share some operands (`jln._core.one_by_one`), and
0.10.2 where a cotangent is one row or one number, repeated (`jln._junction.gradients`).
"""

import functools

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import jln
import workbench
from catalogue import FORMS, sizes
from jln._core.one_by_one import WRONG

# From 32 rows of 64 elements on XLA hands these sums to the library that is wrong.
EXAMPLES, ROWS, H, FEATURES = 3, 32, 64, 16
NAMES = ("x", "scale", "offset")


def relative_error(got, true):
    return np.max(np.abs(np.asarray(got, "float64") - true)) / np.max(np.abs(true))


def test_the_jaxlibs_that_are_wrong_are_those_that_are_named():
    """A program without jln is wrong on the jaxlibs that `one_by_one` names, and right on all others."""

    @jax.jit
    def f(dy, x, s):
        s = jnp.broadcast_to(s, (EXAMPLES, ROWS, 1))
        dy, x, s = jax.lax.optimization_barrier((dy, x, s))
        return jnp.sum(dy * (x * s), 1)

    dy, x, s = (
        workbench.normal(i, shape, "float32")
        for i, shape in enumerate([(EXAMPLES, ROWS, H), (1, ROWS, H), (1, ROWS, 1)])
    )
    true = np.sum(np.asarray(dy, "float64") * (np.asarray(x, "float64") * np.asarray(s, "float64")), 1)
    is_wrong = relative_error(f(dy, x, s), true) > 0.1
    assert is_wrong == (jaxlib.version.__version_info__[:3] in WRONG)


# Each argument alone of examples, and alone shared, of a form of each family: RMSNorm is LayerNorm with a switch.
FAMILIES = ("add_layer_norm, x_bias and gate", "layer_norm_add", "rms_norm_gated", "rms_norm_add_rms_norm, gate")
FAMILIES += ("rms_norm_gated, norm_before_gate=False", "layer_norm_linear", "add_layer_norm_linear, x_bias and gate")
CASES = [(name, argument, alone) for name in FAMILIES for argument in FORMS[name].names for alone in (True, False)]


@pytest.mark.parametrize(("name", "argument", "alone"), CASES)
def test_each_gradient_alone(name, argument, alone):
    """Each gradient by itself is right, and all together, where one argument alone is of examples, or shared."""
    form, every = FORMS[name], FORMS[name].names
    batched = {argument} if alone else {*every} - {argument}
    axes = [0 if n in batched else None for n in every]
    arrays = [a.of(sizes((ROWS, H), -1, (FEATURES,)), "float32", "float32") for a in form.arguments]
    given = {
        n: workbench.normal(i, (EXAMPLES, *a.shape) if n in batched else a.shape, "float32")
        for i, (n, a) in enumerate(zip(every, arrays, strict=True))
    }

    def gradients(module, wanted, given, **options):
        call = jax.vmap(form.in_order(getattr(module, form.name), every, **options), axes)

        def loss(of_wanted):
            results = jax.tree.leaves(call(*((given | of_wanted)[n] for n in every)))
            return sum(jnp.sum(r * w) for r, w in zip(results, weights_of(results), strict=True))

        return jax.grad(loss)({n: given[n] for n in wanted})

    def weights_of(results):
        return [workbench.normal(50 + i, r.shape, "float32").astype(r.dtype) for i, r in enumerate(results)]

    wide = {n: a.astype("float64") for n, a in given.items()}
    true = jax.jit(functools.partial(gradients, jln.reference, every))(wide)
    for wanted in {(n,) for n in every} | {every}:
        got = jax.jit(functools.partial(gradients, jln, wanted, implementation="xla"))(given)
        for n in wanted:
            # Some hundred roundings of float32, where the fault is as large as the gradient.
            assert relative_error(got[n], np.asarray(true[n])) < 2e-5, (n, wanted)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("summed", ["in the rule", "behind it"])
def test_a_kernel_under_a_mean(summed, implementation):
    """The gradient of a shared kernel is right where rows have several axes and the cotangent is one number.

    The rule adds up the examples, or the program does what each example gave.
    """
    x, kernel = workbench.normal(0, (EXAMPLES, 2, ROWS, H), "float32"), workbench.normal(1, (H, 160), "float32")

    def gradient(module, **options):
        def loss(kernel, x):
            return jnp.mean(module.layer_norm_linear(x, None, None, kernel, **options))

        if summed == "behind it":
            return jax.jit(lambda kernel, x: jnp.mean(jax.vmap(jax.grad(loss), (None, 0))(kernel, x), 0))
        return jax.jit(jax.grad(lambda kernel, x: jnp.mean(jax.vmap(loss, (None, 0))(kernel, x))))

    got = gradient(jln, implementation=implementation)(kernel, x)
    true = gradient(jln.reference)(kernel.astype("float64"), x.astype("float64"))
    assert relative_error(got, np.asarray(true)) < 2e-5


@pytest.mark.parametrize("weights", [(EXAMPLES, 1, 2, 1), (1, ROWS, 2, 1)], ids=["of examples", "of rows"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("wanted", ["x", "scale"])
def test_parameters_of_examples_under_a_broadcast(wanted, axes, weights):
    """A gradient alone is right where examples share x, and the cotangent of y is a broadcast.

    XLA's CPU backend gets sums of such products wrong in plain jnp, too: the truth has each step by itself.
    """
    weights = workbench.normal(1, weights, "float32")
    shapes = [(ROWS, 2, H), *((H,) if axis is None else (EXAMPLES, H) for axis in axes)]
    given = {n: workbench.normal(2 + i, s, "float32") for i, (n, s) in enumerate(zip(NAMES, shapes, strict=True))}

    def gradient(module):
        def loss(of_wanted, given):
            x, *parameters = ((given | {wanted: of_wanted})[n] for n in NAMES)
            y = jax.vmap(functools.partial(module.layer_norm, x), axes)(*parameters)
            return jnp.sum(y * jnp.broadcast_to(weights, y.shape))

        return jax.grad(loss)

    with jax.disable_jit():
        true = gradient(jln.reference)(given[wanted], given)
    got = jax.jit(gradient(jln))(given[wanted], given)
    assert relative_error(got, np.asarray(true, "float64")) < 2e-5


def test_an_offset_alone_is_in_no_fence():
    """XLA sums a number that is repeated wrongly where an optimization barrier hides that it is one."""
    x, offset = workbench.normal(0, (5, 4, 2, ROWS, 128), "float32"), jnp.zeros((4, 128), "float32")
    of_examples = jax.vmap(jax.vmap(lambda x, offset: jln.layer_norm(x, None, offset)), (0, None))
    gradient = jax.jit(jax.grad(lambda o, c: jnp.sum(of_examples(x, o) * jnp.broadcast_to(c, x.shape))))
    number = jnp.full((1,) * 5, -0.75, "float32")
    assert "optimization_barrier" not in gradient.lower(offset, number).as_text()
    np.testing.assert_allclose(gradient(offset, number), np.full((4, 128), -0.75 * 5 * 2 * ROWS), rtol=1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_x_alone_under_a_mean_over_rows(name):
    x, scale, w = (workbench.normal(i, n, "float32") for i, n in enumerate([(64, 768), (768,), (768,)]))
    gradient = lambda module: jax.grad(lambda x: jnp.mean(getattr(module, name)(x, scale), 0) @ w)  # noqa: E731
    moved = lambda module: lambda x: jax.jvp(gradient(module), (x,), (jnp.sin(x),))[1]  # noqa: E731
    for of in (gradient, moved):
        true = jax.jit(of(jln.reference))(x.astype("float64"))
        assert relative_error(jax.jit(of(jln))(x), np.asarray(true)) < 2e-5


ONE_ALONE = {
    "layer_norm_add": lambda x, a: jln.layer_norm_add(x, a, dtype="float16", forward_mode=True),
    "layer_norm": lambda x, a: jln.layer_norm(x, None, a[0], dtype="float16", forward_mode=True),
    "layer_norm_linear": lambda x, a: jln.layer_norm_linear(
        x.astype("float16"), None, None, jnp.ones((H, H), "float16"), a[0], forward_mode=True
    ),
}


@pytest.mark.parametrize("name", ONE_ALONE)
def test_the_gradient_alone_of_what_examples_share_is_added_up_wide(name):
    """A float32 operand has the float32 sum of float16 cotangents, in a function made for forward mode too."""
    x, a = workbench.normal(0, (EXAMPLES, ROWS, H), "float32"), workbench.normal(1, (ROWS, H), "float32")
    cotangent = workbench.normal(2, (EXAMPLES, ROWS, H), "float16")
    _, transposed = jax.vjp(lambda a: jax.vmap(lambda x: ONE_ALONE[name](x, a))(x), a)
    (got,) = jax.jit(transposed)(cotangent)
    true = np.asarray(cotangent, "float64").sum(0)
    if name != "layer_norm_add":
        true, got = true.sum(0), got[0]
    assert relative_error(got, true) < 1e-6
