"""`vmap` inside of a derivative where no one call is the same: the norm once, and each product by itself."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from catalogue import FORMS
from matrix import CLOSE, EXAMPLES, OF_ROWS, H, calls, examples_of, loss, operands, vmapped_by_name

LINEARS = [name for name, form in FORMS.items() if form.is_linear]
NORMS = [name for name, form in FORMS.items() if not form.is_linear]

ROWS = dict.fromkeys(OF_ROWS, 0)
PARAMETERS = {"scale": 1, "offset": 0}
MIXES = {
    "rows and kernels": ROWS | {"kernel": 1},
    "rows and biases": ROWS | {"bias": 1},
    "rows, scales and kernels": ROWS | PARAMETERS | {"kernel": 0, "bias": 0},
    "rows and scales": ROWS | PARAMETERS,
    "scales": PARAMETERS,
    "scales and kernels": {"scale": 0, "kernel": 2},
    "biases": {"bias": 1},
    "some rows and kernels": {"x": 2, "kernel": 0},
}


def compared(name, axes, implementation, out_axes=0, **options):
    """Values and all gradients of a vmapped_by_name operator, beside plain jnp's."""
    arrays = tuple(examples_of(name, axes).values())
    some = range(len(arrays))
    f = vmapped_by_name(name, jln, axes, out_axes, implementation=implementation, **options)
    got = jax.jit(jax.value_and_grad(loss(f), some))(*arrays)
    true = jax.jit(jax.value_and_grad(loss(vmapped_by_name(name, jln.reference, axes, out_axes)), some))(*arrays)
    chex.assert_trees_all_close(got, true, **CLOSE)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("axes", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("name", LINEARS)
def test_linears(name, axes, remat, implementation):
    """Gradients of what the examples of one array or another share are right."""
    compared(name, axes, implementation, 1, remat=remat)


@pytest.mark.parametrize("axes", [{"scale": 1}, {"offset": 0}, PARAMETERS], ids=["scales", "offsets", "both"])
@pytest.mark.parametrize("name", [name for name in NORMS if {"scale", "offset"} & {*operands(name)}])
def test_parameters_of_the_same_rows(name, axes, implementation):
    axes = {n: a for n, a in axes.items() if n in operands(name)}
    if axes:
        compared(name, axes, implementation)


# From the innermost vmap on, the places of examples in all arrays of rows, in the columns behind the norm, and in all
# other columns.
COPIES_AND_EXAMPLES = {
    "copies of examples": ((1, 0, None), (None, 1, None)),
    "examples of copies": ((None, 0, None), (2, 1, 0)),
    "examples of copies that share columns": ((None, 1, None), (0, None, 0)),
    "copies, examples, copies, rows": ((None, 0, None), (1, 2, None), (None, 1, None), (0, None, None)),
}


@pytest.mark.parametrize("vmaps", COPIES_AND_EXAMPLES.values(), ids=COPIES_AND_EXAMPLES)
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm", "layer_norm_add_layer_norm"])
def test_parameters_of_the_same_examples(name, vmaps, implementation):
    """Examples of a norm may share their rows with others, in any order of the vmaps, and are one call all the same."""
    kinds = [0 if n in OF_ROWS else 1 if n in PARAMETERS else 2 for n in operands(name)]
    arrays = [*operands(name).values()]
    for size, places in zip((2, 3, 4, 5), vmaps, strict=False):
        for i, kind in enumerate(kinds):
            if places[kind] is not None:
                shape = [*arrays[i].shape]
                shape.insert(places[kind], size)
                arrays[i] = workbench.normal(i, tuple(shape), "float64")

    def step(module, **how):
        f = FORMS[name].in_order(getattr(module, name), tuple(operands(name)), **how)
        for out, places in enumerate(vmaps):
            f = jax.vmap(f, tuple(places[kind] for kind in kinds), out)
        return jax.value_and_grad(loss(f), range(len(arrays)))

    got, true = (jax.jit(f)(*arrays) for f in (step(jln, implementation=implementation), step(jln.reference)))
    chex.assert_trees_all_close(got, true, **CLOSE)
    assert {*calls(step(jln, implementation=implementation), *arrays)} == {0}


def experts(module, axes, out_axes, **options):
    """A Linear under vmaps, from the innermost, with the places of x, scale, kernel and bias in each."""

    def linear(*arrays):
        return module.rms_norm_linear(*arrays, **options)

    for of_each, out in zip(axes, out_axes, strict=True):
        linear = jax.vmap(linear, of_each, out)
    return linear


def arrays_of(axes):
    """The arrays of `experts`, random."""
    shapes = [[4, H], [H], [H, 2], [2]]
    for of_each, size in zip(axes, (2, 3, 4), strict=False):
        for shape, axis in zip(shapes, of_each, strict=True):
            if axis is not None:
                shape.insert(axis, size)
    return [workbench.normal(i, tuple(shape), "float64") for i, shape in enumerate(shapes)]


NESTED = {
    "kernels, then all": (((None, None, 1, None), (0, None, 1, 0)), (1, 0)),
    "all, then kernels": (((1, None, 0, 0), (None, None, 2, None)), (0, -1)),
    "rows between": (((0, 0, None, None), (1, None, None, None), (None, 1, 0, 0)), (0, 2, 1)),
    "scales, then rows": (((None, 0, None, None), (2, None, None, None), (0, 1, 0, None)), (1, 0, 0)),
    "biases, then scales": (((None, None, None, 1), (None, 0, None, None)), (0, 1)),
    "all, then rows": (((1, 1, 0, 0), (0, None, None, None), (3, None, 1, None)), (1, 1, 0)),
}
TRANSFORMED = {
    "grad": lambda f, some: jax.value_and_grad(loss(f), some),
    "grad of some": lambda f, some: jax.grad(loss(f), some[2:]),
    "grad of others": lambda f, some: jax.grad(loss(f), some[:1]),
    "jvp of grad": lambda f, some: lambda *a: jax.jvp(jax.grad(loss(f), some), a, a),
    "jvp of grad of some": lambda f, some: lambda *a: jax.jvp(jax.grad(loss(f), some[3:]), a, a),
    "vmap of grad": lambda f, some: (
        lambda *a: jax.vmap(jax.grad(loss(f), some), (0, None, None, None))(jnp.stack([a[0], 2 * a[0]]), *a[1:])
    ),
    "grad of grad": lambda f, some: jax.grad(
        lambda *a: sum(jnp.sum(jnp.cos(d)) for d in jax.grad(loss(f), some)(*a)), some
    ),
    "checkpoint": lambda f, some: jax.grad(loss(jax.checkpoint(f)), some),
}


@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
@pytest.mark.parametrize(("axes", "out_axes"), NESTED.values(), ids=NESTED)
def test_nested(axes, out_axes, transform, jitted, implementation):
    """Each of several vmaps gets to the arrays that it gives examples, wherever they lie and however transformed."""
    arrays = arrays_of(axes)

    def by(module, **options):
        f = transform(experts(module, axes, out_axes, **options), range(4))
        return (jax.jit(f) if jitted else f)(*arrays)

    chex.assert_trees_all_close(by(jln, implementation=implementation), by(jln.reference), **CLOSE)


ONE_NORM = {name: NESTED[name] for name in ("kernels, then all", "all, then kernels", "biases, then scales")}


@pytest.mark.parametrize(("axes", "out_axes"), ONE_NORM.values(), ids=ONE_NORM)
def test_one_norm(axes, out_axes):
    """Whatever order the vmaps are in, one norm has all rows, and none twice."""
    step = jax.grad(loss(experts(jln, axes, out_axes, implementation="xla")), range(4))
    arrays = arrays_of(axes)
    assert {*calls(step, *arrays)} == {0}
    assert str(jax.make_jaxpr(step)(*arrays)).count("jln_norm_backward[") == 1


@pytest.mark.parametrize(("inner", "outer"), [(0, 0), (0, 1), (1, 0), (1, 3), (2, 1), (2, 2)])
def test_rows_around_a_residual_that_rows_share(inner, outer):
    """A vmap over rows is one of rows around one whose examples share a residual, wherever the axes of x lie."""
    shape = [4, H]
    shape.insert(inner, 3)
    shape.insert(outer, 5)
    x, residual = workbench.normal(0, tuple(shape), "float64"), workbench.normal(1, (5, 4, H), "float64")
    scale, weights = workbench.normal(2, (H,), "float64"), workbench.normal(3, (3, 5, 4, H), "float64")

    def step(module, **how):
        def norm(*a):
            return module.add_rms_norm(*a, **how)[0]

        norms = jax.vmap(jax.vmap(norm, (inner, None, None)), (outer, 0, None), 1)
        return jax.grad(lambda *a: jnp.sum(weights * norms(*a)), (0, 1, 2))

    given = x, residual, scale
    chex.assert_trees_all_close(step(jln)(*given), step(jln.reference)(*given), **CLOSE)
    assert max(calls(step(jln, implementation="xla"), *given)) < 2


def test_dead_gradients_and_results():
    """Gradients of a sum whose y nobody uses, or of scales alone, need nothing of the rest."""
    x, residual = (workbench.normal(i, (4, H), "float64") for i in (0, 1))
    scale, x_scale = workbench.normal(2, (EXAMPLES, H), "float64"), workbench.normal(3, (H,), "float64")

    def f(module, i, some):
        def norms(*a):
            return module.rms_norm_add_rms_norm(*a)[i]

        given = x, residual, x_scale, scale
        return jax.grad(loss(jax.vmap(norms, (None, None, None, 0))), some)(*given)

    for i, some in ((1, (0, 1, 2, 3)), (0, (3,)), (0, (2, 3)), (1, (3,))):
        chex.assert_trees_all_close(f(jln, i, some), f(jln.reference, i, some), **CLOSE)


@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float32"])
def test_rounded_as_one_example_is(bias_dtype):
    """A product whose biases differ has the bits of one with each bias, where there is one norm of all."""
    x, kernel = workbench.normal(0, (16, 64), "bfloat16"), workbench.normal(1, (64, 256), "bfloat16")
    biases = workbench.normal(2, (EXAMPLES, 256), bias_dtype)

    def linear(bias):
        return jln.rms_norm_linear(x, None, kernel, bias, implementation="xla")

    got, _ = jax.vjp(jax.vmap(linear), biases)
    np.testing.assert_array_equal(*(np.asarray(y, "float32") for y in (got, jnp.stack([linear(b) for b in biases]))))


def test_small_cotangents_in_float16():
    """A dz that float16 cannot hold does not vanish between product and norm: it is wider there."""
    x, kernel = workbench.normal(0, (EXAMPLES, 4, 64), "float16"), workbench.normal(1, (EXAMPLES, 64, 8), "float16")
    f = jax.vmap(lambda x, kernel: jln.rms_norm_linear(x, None, 2.0**-12 * kernel), (0, 0))
    y, pull = jax.vjp(f, 2.0**-10 * x, kernel)
    dx = pull(jnp.full_like(y, 2.0**-18))[0]
    assert np.count_nonzero(dx) > 0.9 * dx.size


def test_remat_holds_the_operands_alone():
    x, kernel = jnp.ones((2, 4, H)), jnp.ones((2, H, 3))

    def held(remat):
        f = jax.vmap(lambda x, kernel: jln.rms_norm_linear(x, None, kernel, remat=remat))
        return sorted(a.shape for a in jax.tree.leaves(jax.vjp(f, x, kernel)[1]) if a.size)

    z, rstd = x.shape, (2, 4, 1)
    assert held(True) == sorted([x.shape, kernel.shape])
    assert held(False) == sorted([x.shape, kernel.shape, z, rstd])
