"""Operators under `vmap` of which examples share some operands, on a CPU in float32, each gradient wanted alone.

jaxlib 0.10.2 and 0.11.0 compile such programs wrongly, which `jln._core.one_by_one` avoids.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax import export

import jln
import workbench
from catalogue import FORMS, sizes
from jln._core.one_by_one import WRONG, one_by_one

# From 32 rows of 64 elements on XLA hands these sums to the library that is wrong.
EXAMPLES, ROWS, H, FEATURES = 3, 32, 64, 16


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


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("wanted", ["x", "scale", "offset"])
def test_parameters_of_examples_under_a_broadcast(axes, wanted):
    """Gradients are right where examples share x, and the cotangent of y is the same number along rows and H.

    XLA's CPU backend makes NaN of plain jnp's sums over examples of products of two broadcasts, so the truth is eager.
    """
    x, weights = workbench.normal(0, (ROWS, 2, H), "float32"), workbench.normal(1, (EXAMPLES, 1, 2, 1), "float32")
    shapes = {"scale": axes[0], "offset": axes[1]}
    given = {"x": x} | {
        name: workbench.normal(2, (H,) if axis is None else (EXAMPLES, H), "float32") for name, axis in shapes.items()
    }

    def gradient(module, given):
        def loss(of_wanted):
            every = given | {wanted: of_wanted}
            y = jax.vmap(functools.partial(module.layer_norm, every["x"]), axes)(every["scale"], every["offset"])
            return jnp.sum(y * jnp.broadcast_to(weights, y.shape))

        return jax.grad(loss)(given[wanted])

    with jax.disable_jit():
        true = gradient(jln.reference, given)
    got = jax.jit(functools.partial(gradient, jln))(given)
    assert relative_error(got, np.asarray(true, "float64")) < 2e-5


@pytest.mark.parametrize("sizes", [(EXAMPLES,), (1, EXAMPLES)])
def test_a_shared_scale_under_a_broadcast(sizes):
    """The gradient of a scale is right where only offsets have examples, and each row has one cotangent of y."""
    x, weights = workbench.normal(0, (2048, 2, H), "float32"), workbench.normal(1, (2048, 2, 1), "float32")
    scale, offsets = workbench.normal(2, (H,), "float32"), workbench.normal(3, (*sizes, H), "float32")

    def gradient(module):
        def loss(scale, x, offsets):
            call = functools.partial(module.layer_norm, x, scale)
            for _ in sizes:
                call = jax.vmap(call)
            y = call(offsets)
            return jnp.sum(y * jnp.broadcast_to(weights, y.shape))

        return jax.grad(loss)

    with jax.disable_jit():
        true = gradient(jln.reference)(scale, x, offsets)
    compiled = jax.jit(gradient(jln))
    for i in range(16):  # what is wrong without the loop is memory that nobody wrote, which may happen to be right
        jnp.full((EXAMPLES * x.size,), float(i)).block_until_ready()  # and so this one is left for it
        assert relative_error(compiled(scale, x, offsets), np.asarray(true, "float64")) < 2e-5


@pytest.mark.parametrize("shared", ["x", "scale"])
def test_no_examples(shared):
    """`vmap` over an axis of size 0 gives results without elements, as it does in plain jnp."""
    x, scale = jnp.ones((0, ROWS, H)), jnp.ones((0, H))
    x, scale = (x[:, :1].sum(0) if shared == "x" else x), (scale.sum(0) if shared == "scale" else scale)
    axes = tuple(None if n == shared else 0 for n in ("x", "scale"))

    def gradients(x, scale):
        return jax.vmap(jax.grad(lambda x, s: jnp.sum(jln.rms_norm(x, s)), (0, 1)), axes)(x, scale)

    y = jax.jit(jax.vmap(jln.rms_norm, axes))(x, scale)
    assert y.shape == (0, *x.shape[-2:])
    assert [d.shape for d in jax.jit(gradients)(x, scale)] == [y.shape, (0, H)]


def test_export_of_a_symbolic_number_of_examples():
    """`one_by_one` finds the examples' number whichever size comes first in a set."""
    compute = one_by_one(lambda operands, settings, dtypes, batch_dims: operands[0] * operands[1])
    (b,) = export.symbolic_shape("b")
    shapes = [(1, H), (b, H), (b, 1), (1, 1)]
    for pair in itertools.permutations(shapes, 2):
        a, c = (jax.ShapeDtypeStruct(shape, "float32") for shape in pair)
        made = export.export(jax.jit(lambda a, c: compute((a, c), None, None, 1)))(a, c)
        assert len(made.out_avals) == 1


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
