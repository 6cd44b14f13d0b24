"""`vmap` inside of a derivative: where it is the same, one wider call that has the examples as rows or as features."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval

import jln
import workbench
from catalogue import FORMS
from matrix import CLOSE, EXAMPLES, ROWS, H, calls, examples_of, loss, operands, rows_at, vmapped_by_name


# In front, in the middle, and behind the normalised axis, where the examples of a Linear's rows cannot stay.
@pytest.mark.parametrize("axis", [0, 1, len(ROWS) + 1])
@pytest.mark.parametrize("name", FORMS)
def test_examples_are_rows(name, axis, implementation):
    """Gradients of what the examples share are sums over all their rows, made at once."""
    axes = rows_at(name, axis)
    arrays = tuple(examples_of(name, axes).values())
    some = range(len(arrays))
    f = vmapped_by_name(name, jln, axes, axis, implementation=implementation)
    got = jax.jit(jax.value_and_grad(loss(f), some))(*arrays)
    true = jax.jit(jax.value_and_grad(loss(vmapped_by_name(name, jln.reference, axes, axis)), some))(*arrays)
    chex.assert_trees_all_close(got, true, **CLOSE)
    assert {*calls(jax.grad(loss(f), some), *arrays)} == {0}


LINEARS = [name for name, form in FORMS.items() if form.is_linear]


@pytest.mark.parametrize("of_kernel", [0, 1, 2])
@pytest.mark.parametrize("of_bias", [None, 0, 1])
@pytest.mark.parametrize("name", LINEARS)
def test_examples_are_features(name, of_bias, of_kernel, implementation):
    """The product of all heads adds up what the norm of their one x pulls back."""
    axes = {"kernel": of_kernel, "bias": of_bias}
    arrays = tuple(examples_of(name, axes).values())
    some = range(len(arrays))
    f = vmapped_by_name(name, jln, axes, implementation=implementation)
    got = jax.jit(jax.value_and_grad(loss(f), some))(*arrays)
    true = jax.jit(jax.value_and_grad(loss(vmapped_by_name(name, jln.reference, axes)), some))(*arrays)
    chex.assert_trees_all_close(got, true, **CLOSE)
    assert {*calls(jax.grad(loss(f), some), *arrays)} == {0}


def several(module, axes, **options):
    def call(x, kernels, biases):
        return module.layer_norm_linear(x, None, None, kernels, biases, **options)

    return jax.vmap(call, axes)


SEVERAL = {
    "one of two kernels": (None, (0, None), (0, None)),
    "the other, a bias shared": (None, (None, 1), (None, None)),
    "both": (None, (0, 2), (None, 1)),
    "rows": (1, (None, None), (None, None)),
    "rows and a kernel": (0, (0, None), (None, None)),
    "a bias alone": (None, (None, None), (None, 0)),
}


@pytest.mark.parametrize("axes", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("features", [(2, 4), (2, 300)], ids=["few", "many"])
def test_several_linears(axes, features, implementation):
    """Linears that differ between examples get an axis of features more; the results of others have no examples."""
    shapes = (*ROWS, H), tuple((H, n) for n in features), tuple((n,) for n in features)
    shapes, places = (
        jax.tree.flatten(shapes, is_leaf=lambda s: isinstance(s[0], int))[0],
        jax.tree.leaves(axes, is_leaf=lambda a: a is None),
    )
    grown = [(*s[:a], EXAMPLES, *s[a:]) if a is not None else s for s, a in zip(shapes, places, strict=True)]
    x, *rest = (workbench.normal(i, s, "float64") for i, s in enumerate(grown))
    arguments = (x, tuple(rest[:2]), tuple(rest[2:]))
    got, true = (
        jax.jit(jax.value_and_grad(loss(several(module, axes, **how)), (0, 1, 2)))(*arguments)
        for module, how in ((jln, {"implementation": implementation}), (jln.reference, {}))
    )
    chex.assert_trees_all_close(got, true, **CLOSE)


def of_examples(f, axes):
    return lambda *a: jnp.sum(jnp.sin(jax.vmap(f, axes)(*a)))


def gradients_of(f):
    return jax.grad(f, (0, 1, 2))


ROW, KERNEL = (0, None, None), (None, None, 0)
# By whether x has examples, and whether the kernel has. A vmap around the derivative has gradients for each of them.
NESTED = {
    "vmap(grad)": (True, False, lambda f: jax.vmap(gradients_of(lambda *a: jnp.sum(jnp.sin(f(*a)))), ROW)),
    "vmap(grad(vmap)), kernels inside": (True, True, lambda f: jax.vmap(gradients_of(of_examples(f, KERNEL)), ROW)),
    "vmap(grad(vmap)), rows inside": (True, True, lambda f: jax.vmap(gradients_of(of_examples(f, ROW)), KERNEL)),
    "grad(vmap(vmap)), kernels inside": (True, True, lambda f: gradients_of(of_examples(jax.vmap(f, KERNEL), ROW))),
    "grad(vmap(vmap)), rows inside": (True, True, lambda f: gradients_of(of_examples(jax.vmap(f, ROW), KERNEL))),
    "grad(vmap(grad))": (
        True,
        False,
        lambda f: gradients_of(of_examples(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)))), ROW)),
    ),
    "grad(vmap(jit))": (True, False, lambda f: gradients_of(of_examples(jax.jit(f), ROW))),
    "grad(vmap(checkpoint))": (False, True, lambda f: gradients_of(of_examples(jax.checkpoint(f), KERNEL))),
    "grad(checkpoint(vmap))": (True, False, lambda f: gradients_of(jax.checkpoint(of_examples(f, ROW)))),
    "hessian": (True, False, lambda f: jax.hessian(of_examples(f, ROW), 1)),
}


@pytest.mark.parametrize(("of_x", "of_kernel", "transform"), NESTED.values(), ids=NESTED)
def test_vmaps_around_and_inside(of_x, of_kernel, transform, implementation):
    x = workbench.normal(0, (EXAMPLES,) * of_x + (*ROWS, H), "float64")
    scale, kernel = (
        workbench.normal(1, (H,), "float64"),
        workbench.normal(2, (EXAMPLES,) * of_kernel + (H, 4), "float64"),
    )

    def with_module(module, **how):
        return transform(lambda *a: module.rms_norm_linear(*a, **how))(x, scale, kernel)

    got = with_module(jln, implementation=implementation)
    chex.assert_trees_all_close(got, with_module(jln.reference), **CLOSE)


def test_a_branch_that_examples_choose():
    """A `cond` whose predicate differs from example to example, around the derivative, gives each its own gradients."""

    def f(p, x, scale):
        return jax.lax.cond(p, lambda: jnp.sum(jnp.sin(jln.rms_norm(x, scale))), lambda: jnp.sum(x * scale[None]))

    x, scale = workbench.normal(0, (EXAMPLES, 4, H), "float64"), workbench.normal(1, (H,), "float64")
    p = jnp.array([True, False, True])
    got = jax.vmap(jax.grad(f, 2), (0, 0, None))(p, x, scale)
    for i in range(EXAMPLES):
        chex.assert_trees_all_close(got[i], jax.grad(f, 2)(p[i], x[i], scale), **CLOSE)


def test_results_that_nobody_uses():
    """Dead code falls away from a call, and what is left has the same gradients."""

    def y_alone(x, residual, scale):
        return jax.jit(lambda *a: jln.add_rms_norm(*a)[0])(x, residual, scale)

    def total_alone(x, residual, scale):
        return jax.jit(lambda *a: jln.add_rms_norm(*a)[1])(x, residual, scale)

    x, residual = (workbench.normal(i, (EXAMPLES, 4, H), "float64") for i in (0, 1))
    scale = workbench.normal(2, (H,), "float64")
    for f, i in ((y_alone, 0), (total_alone, 1)):
        for axes in ((0, 0, None), (0, None, None)):
            given = (x, residual if axes[1] == 0 else residual[0], scale)
            got = jax.jit(jax.grad(of_examples(f, axes), (0, 1, 2)))(*given)
            true = jax.grad(of_examples(lambda *a, i=i: jln.reference.add_rms_norm(*a)[i], axes), (0, 1, 2))(*given)
            chex.assert_trees_all_close(got, true, **CLOSE)


def test_results_that_fall_away_one_after_the_other():
    """A call has the results that are used, each time that JAX removes dead code."""
    x, residual = (workbench.normal(i, (4, H), "float64") for i in (0, 1))
    kernels = tuple(workbench.normal(i, (H, n), "float64") for i, n in ((2, 2), (3, 4)))

    def f(x, residual, *kernels):
        return jax.tree.leaves(jln.add_rms_norm_linear(x, residual, None, kernels))

    jaxpr = jax.make_jaxpr(f)(x, residual, *kernels)
    without_first, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [False, True, True], instantiate=True)
    second_alone, _ = partial_eval.dce_jaxpr(without_first, [True, False], instantiate=True)
    assert "used=(False, True, False)" in str(second_alone)
    (got,) = jaxpr_as_fun(ClosedJaxpr(second_alone, jaxpr.consts))(x, residual, *kernels)
    chex.assert_trees_all_close(got, f(x, residual, *kernels)[1], **CLOSE)


OF_COLUMNS = ("scale", "offset", "x_bias", "gate", "x_scale", "x_offset")


# In front, in the middle, directly before H; behind H, where the examples cannot stay.
@pytest.mark.parametrize("axis", range(len(ROWS) + 2))
@pytest.mark.parametrize("which", ["all", "first", "last"])
@pytest.mark.parametrize("name", [name for name in FORMS if {*operands(name)} & {*OF_COLUMNS}])
def test_examples_have_parameters_of_their_own(name, which, axis, implementation):
    """Gradients are those of each example for its parameters, and one sum for what the examples share."""
    own = [n for n in operands(name) if n in OF_COLUMNS]
    own = {"all": own, "first": own[:1], "last": own[-1:]}[which]
    axes = rows_at(name, axis) | {n: i % 2 for i, n in enumerate(own)}
    arrays = tuple(examples_of(name, axes).values())
    some = range(len(arrays))
    f = vmapped_by_name(name, jln, axes, axis, implementation=implementation)
    got = jax.jit(jax.value_and_grad(loss(f), some))(*arrays)
    true = jax.jit(jax.value_and_grad(loss(vmapped_by_name(name, jln.reference, axes, axis)), some))(*arrays)
    chex.assert_trees_all_close(got, true, **CLOSE)
    assert {*calls(jax.grad(loss(f), some), *arrays)} == {0}


# Scale and offset beside x [2, 3, 4, 5, H]: alike, and along different axes, where the offset is read row by row.
VARYING = [((1, 1, 1, 1), (1, 1, 1, 1)), ((2, 1, 1, 1), (2, 1, 1, 1)), ((1, 1, 4, 1), (1, 1, 4, 1)),
           ((2, 3, 1, 1), (1, 3, 1, 1)), ((1, 1, 1, 5), (1, 1, 4, 5)), ((2, 1, 4, 1), (1, 1, 1, 1)),
           ((2, 1, 1, 1), (1, 3, 4, 1)), ((1, 1, 1, 1), (2, 3, 4, 5))]  # fmt: skip


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("of_offset", [None, 0, -1])
@pytest.mark.parametrize("of_scale", [None, 0])
@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("scale", "offset"), VARYING, ids=str)
def test_examples_beside_parameters_along_axes(scale, offset, axis, place, of_scale, of_offset, around, implementation):
    """Values and gradients, where the norm of each example has examples, or an offset that is read row by row."""
    shapes = ((*s[: axis + 5], 2, *s[axis + 5 :]) for s in ((2, 3, 4, 5), scale, offset))
    x, scale, offset = (workbench.normal(i, s, "float64") for i, s in enumerate(shapes))
    axes = (place, of_scale, of_offset)
    given = [a if i is None else jnp.stack([a, -a, a**2], i) for i, a in zip(axes, (x, scale, offset), strict=True)]

    def transformed(f):
        def of_one(*a):
            return jnp.sum(jnp.sin(f(*a)))

        if around:
            return jax.vmap(jax.value_and_grad(of_one, (0, 1, 2)), axes)
        return jax.value_and_grad(lambda *a: jnp.sum(jax.vmap(of_one, axes)(*a)), (0, 1, 2))

    ours = functools.partial(jln.layer_norm, axis=axis, implementation=implementation)
    plain = functools.partial(jln.reference.layer_norm, axis=axis)
    got, true = (jax.jit(transformed(f))(*given) for f in (ours, plain))
    chex.assert_trees_all_close(got, true, **CLOSE)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("of_gate", [None, 0])
def test_a_gate_of_rows_beside_examples(of_gate, around, implementation):
    """Values and gradients, where examples share a number for each row, or have their own."""
    x, residual = (workbench.normal(i, (4, EXAMPLES, H), "float64") for i in (0, 1))
    scale, gate = workbench.normal(2, (EXAMPLES, H), "float64"), workbench.normal(3, (4, 1), "float64")
    axes = (1, 1, 0, of_gate)
    gate = gate if of_gate is None else jnp.stack([gate, -gate, gate**2])

    def transformed(module, **how):
        def of_one(x, residual, scale, gate):
            results = module.add_rms_norm(x, residual, scale, gate=gate, **how)
            return sum(map(jnp.sum, map(jnp.sin, results)))

        if around:
            return jax.vmap(jax.value_and_grad(of_one, (0, 1, 2, 3)), axes)
        return jax.value_and_grad(lambda *a: jnp.sum(jax.vmap(of_one, axes)(*a)), (0, 1, 2, 3))

    ours = jax.jit(transformed(jln, implementation=implementation))(x, residual, scale, gate)
    chex.assert_trees_all_close(ours, jax.jit(transformed(jln.reference))(x, residual, scale, gate), **CLOSE)


def test_copies_for_examples_under_strict_promotion():
    """A parameter that examples share beside others of their own has its gradient in its dtype, added up in float32."""
    x, scale = workbench.normal(0, (512, 4, H), "bfloat16"), workbench.normal(1, (512, H), "bfloat16")
    f = of_examples(jln.layer_norm, (0, 0, None))
    with jax.numpy_dtype_promotion("strict"):
        got = jax.grad(lambda o: f(x, scale, o).astype("float32"))(jnp.zeros(H, "bfloat16"))
    wide = [a.astype("float32") for a in (x, scale)]
    true = jax.grad(lambda o: of_examples(jln.reference.layer_norm, (0, 0, None))(*wide, o))(jnp.zeros(H, "float32"))
    np.testing.assert_allclose(got.astype("float32"), true, rtol=2**-8, atol=2)


def test_copies_for_examples_in_float64_with_a_narrow_result():
    """Gradients keep the digits of a float64 x whose result is float16, where examples share it, too."""
    x, scale, offset = (workbench.normal(i, s, "float64") for i, s in enumerate([(4, H), (EXAMPLES, H), (EXAMPLES, H)]))
    weights = workbench.normal(3, (EXAMPLES, 4, H), "float16")

    def loss(*given):
        y = jax.vmap(functools.partial(jln.layer_norm, dtype="float16"), (None, 0, 0))(*given)
        return jnp.sum(y * weights)

    def plain(*given):
        y = jax.vmap(jln.reference.layer_norm, (None, 0, 0))(*given)
        return jnp.sum(y * weights.astype("float64"))

    got, true = (jax.grad(f, (0, 1, 2))(x, scale, offset) for f in (loss, plain))
    chex.assert_trees_all_close(got, true, rtol=1e-12, atol=1e-12)


def test_examples_that_share_x_have_one_norm():
    """Scales of the same rows are one call's."""
    x, scale = workbench.normal(0, (4, H), "float64"), workbench.normal(1, (EXAMPLES, H), "float64")
    f = functools.partial(jln.rms_norm, implementation="xla")
    got = jax.grad(of_examples(f, (None, 0)), (0, 1))(x, scale)
    true = jax.grad(of_examples(jln.reference.rms_norm, (None, 0)), (0, 1))(x, scale)
    chex.assert_trees_all_close(got, true, **CLOSE)
    assert {*calls(jax.grad(of_examples(f, (None, 0)), (0, 1)), x, scale)} == {0}


def test_vmaps_of_examples_in_vmaps():
    """Gradients, where two vmaps have scales of their own, and where examples have examples."""
    x, scales = workbench.normal(2, (2, 3, 5, H), "float64"), workbench.normal(3, (2, 3, 1, H), "float64")
    ours, plain = functools.partial(jln.rms_norm, implementation="xla"), jln.reference.rms_norm
    twice = (of_examples(jax.vmap(g), (1, 1)) for g in (ours, plain))
    chex.assert_trees_all_close(*(jax.grad(g, (0, 1))(x, scales) for g in twice), **CLOSE)
    shared = (of_examples(g, (0, None)) for g in (ours, plain))
    chex.assert_trees_all_close(*(jax.grad(g, (0, 1))(x, scales[0]) for g in shared), **CLOSE)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("axes", [(1, None, None), (None, 2, 0), (1, None, 0)], ids=str)
def test_examples_in_the_middle_share_an_array_of_rows(axes, around, implementation):
    """Values and gradients, where examples of one of two summands lie between its rows, and the other is shared."""
    shapes = ((4, 5, H), (4, 5, H), (H,))
    given = [
        workbench.normal(i, s if a is None else (*s[:a], EXAMPLES, *s[a:]), "float64")
        for i, (s, a) in enumerate(zip(shapes, axes, strict=True))
    ]

    def transformed(module, **how):
        def of_one(*a):
            return sum(map(jnp.sum, map(jnp.sin, module.add_rms_norm(*a, **how))))

        if around:
            return jax.vmap(jax.value_and_grad(of_one, (0, 1, 2)), axes)
        return jax.value_and_grad(lambda *a: jnp.sum(jax.vmap(of_one, axes)(*a)), (0, 1, 2))

    got = jax.jit(transformed(jln, implementation=implementation))(*given)
    chex.assert_trees_all_close(got, jax.jit(transformed(jln.reference))(*given), **CLOSE)


def test_few_features_that_become_many():
    """Heads count as features do, where it is decided whether one kernel multiplies."""
    x, kernels = workbench.normal(0, (16, H), "bfloat16"), workbench.normal(1, (8, H, 64), "bfloat16")

    def names(kernels):
        f = of_examples(lambda x, kernel: jln.rms_norm_linear(x, None, kernel), (None, 0))
        return str(jax.make_jaxpr(jax.grad(f))(x, kernels))

    assert "jln_norm_linear_backward" in names(kernels[:4])
    assert "jln_norm_linear_backward" not in names(kernels) and "jln_norm_backward" in names(kernels)


def test_gradients_are_added_up_once():
    """A bfloat16 scale that 512 examples share has the gradient of 512 rows, not of 512 gradients that were rounded."""
    x = workbench.normal(0, (512, 1, 64), "bfloat16")
    scale, dy = jnp.ones(64, "bfloat16"), workbench.normal(1, (512, 1, 64), "bfloat16")
    rows, dy_of_rows = x.reshape(512, 64), dy.reshape(512, 64)
    got = jax.vjp(lambda s: jax.vmap(jln.rms_norm, (0, None))(x, s), scale)[1](dy)
    true = jax.vjp(lambda s: jln.rms_norm(rows, s), scale)[1](dy_of_rows)
    np.testing.assert_array_equal(*(np.asarray(a[0], "float32") for a in (got, true)))
