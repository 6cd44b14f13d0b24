"""`vmap` inside of a derivative: one call where examples are rows, heads or groups, else plain jnp; and around one."""

import functools
import re

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
from matrix import CLOSE, H, loss, operands

EXAMPLES = 3
OF_ROWS = ("x", "residual", "z", "added")
OF_COLUMNS = ("scale", "offset", "x_bias", "gate", "x_scale")
# One form for each kind of operands.
NORMS = ("layer_norm", "add_rms_norm, x_bias and gate", "rms_norm_gated", "rms_norm_gated, norm_before_gate=False")
NORMS += ("rms_norm_add", "rms_norm_add_rms_norm, gate", "add_layer_norm_linear")
LINEARS = ("rms_norm_linear", "add_layer_norm_linear, x_bias and gate", "rms_norm_add_rms_norm_linear")
BEHIND_ROWS = r"implementation='triton' takes the examples of this vmap in front of the rows"


def with_examples(arrays, axes):
    """The arrays, with examples of their own numbers at the places that are not None."""

    def of(i, a, axis):
        if axis is None:
            return a
        return workbench.normal(100 + i, (*a.shape[:axis], EXAMPLES, *a.shape[axis:]), a.dtype)

    return tuple(of(i, a, axis) for i, (a, axis) in enumerate(zip(arrays, axes, strict=True)))


def under(function, vmaps):
    """The function under vmaps, from the innermost, each with the places of its axis in operands and results."""
    return functools.reduce(lambda f, places: jax.vmap(f, *places), vmaps, function)


def all_gradients(f):
    """The value of the function's `loss`, and the gradients of all operands."""
    return lambda *a: jax.value_and_grad(loss(f), range(len(a)))(*a)


def compare(ours, plain, *arrays):
    """Compare two functions of the arrays, each as one program."""
    chex.assert_trees_all_close(jax.jit(ours)(*arrays), jax.jit(plain)(*arrays), **CLOSE)


def operations(f, *arrays):
    """The norm's operations in the program of a function: the name, vmap's axes and the results' shapes of each."""
    text = str(jax.make_jaxpr(f)(*arrays))
    found = re.findall(r"^ *(\S[^\n]*) = (jln_norm_\w+)\[\n.*?batch_dims=(\d+)", text, re.M | re.S)
    return [(name, int(n), re.findall(r":\w+\[([\d,]*)\]", results)) for results, name, n in found]


def number_of_calls(f, *arrays):
    """The number of forward and of backward operations, all of them without an axis of vmap."""
    found = operations(f, *arrays)
    assert all(n == 0 for _, n, _ in found), found
    return tuple(sum(name.endswith(which) for name, *_ in found) for which in ("_forward", "_backward"))


def of_named(name, axes, out=0):
    """An operator of a module and its options under a vmap with the places of `axes`, by name, and its arrays."""
    form, names = FORMS[name], tuple(operands(name))
    places = [axes.get(n) for n in names]

    def f(module, **options):
        return jax.vmap(form.in_order(getattr(module, form.name), names, **options), places, out)

    return f, with_examples(operands(name).values(), places)


# The place of the examples in arrays of rows and in parameters, and whether they are one call.
PLACES = {
    "rows in front": (0, None, True),
    "rows in the middle": (1, None, True),
    "rows before H": (2, None, True),
    "rows behind H": (3, None, False),
    "groups": (0, 1, True),
    "heads": (2, 0, True),
    "parameters of examples in the middle": (1, 0, False),
    "parameters of examples behind H": (3, 0, False),
    "parameters of the same rows": (None, 1, False),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name, place, implementation):
    """Values and gradients by one forward and one backward call, or by plain jnp, where kernels are not asked for.

    Kernels by name take no examples behind H, nor parameters of examples behind rows.
    """
    of_rows, of_columns, is_one = place
    axes = dict.fromkeys(OF_ROWS, of_rows) | dict.fromkeys(OF_COLUMNS, of_columns)
    f, arrays = of_named(name, axes, of_rows or 0)
    step = all_gradients(f(jln, implementation=implementation))
    if of_rows and implementation == "triton" and not is_one:
        with pytest.raises(ValueError, match=BEHIND_ROWS):
            step(*arrays)
        return
    compare(step, all_gradients(f(jln.reference)), *arrays)
    if is_one:
        assert number_of_calls(step, *arrays) == (1, 1)
    else:
        assert bool(operations(step, *arrays)) == (implementation == "triton" or of_rows is None)


KERNELS = {
    "kernels": {"kernel": 1},
    "kernels and biases": {"kernel": 0, "bias": 1},
    "rows and kernels": dict.fromkeys(OF_ROWS, 0) | {"kernel": 2},
    "all": dict.fromkeys((*OF_ROWS, *OF_COLUMNS, "kernel", "bias"), 0),
    "some rows and kernels": {"x": 0, "kernel": 1},
}


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("axes", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", LINEARS)
def test_linears_of_examples(name, axes, remat, implementation):
    """Values and gradients where examples differ in a Linear: by plain jnp, where kernels are not asked for."""
    f, arrays = of_named(name, axes, 1)
    step = all_gradients(f(jln, implementation=implementation, remat=remat))
    compare(step, all_gradients(f(jln.reference)), *arrays)
    assert bool(operations(step, *arrays)) == (implementation == "triton")


# Vmaps of a LayerNorm of [12, H], from the innermost, with the places in x, scale and offset, and in y; and the shapes
# of the gradients that the one backward call makes, None where there is none.
ROW, ALL = ((0, None, None),), ((0, 0, 0),)
NESTED = {
    "adaLN": ((ROW, ALL), ["4,2,12,8", "4,1,1,8", "4,1,1,8"]),
    "rows of groups": ((ALL, ROW), ["4,2,12,8", "4,2,1,8", "4,2,1,8"]),
    "heads in two more": ((((1, 0, 0), 1), ROW, ((1, None, None), 1)), ["4,5,12,2,8", "1,1,1,2,8", "1,1,1,2,8"]),
    "heads of groups": ((((1, 0, None), 1), ((0, None, 0),)), ["4,12,2,8", "4,1,2,8", "4,1,2,8"]),
    "rows behind H": ((ROW, ((3, None, None), 3)), None),
    "scales of the same rows": ((((None, 0, 0),), ROW), None),
}


def nested(name):
    """The value and gradients of a module's LayerNorm, with options, under the vmaps of the name; and its arrays."""
    vmaps, shapes = NESTED[name][0], [[12, H], [H], [H]]
    for (places, *_), size in zip(vmaps, (2, 4, 5), strict=False):
        for shape, axis in zip(shapes, places, strict=True):
            if axis is not None:
                shape.insert(axis, size)
    arrays = tuple(workbench.normal(i, tuple(shape), "float64") for i, shape in enumerate(shapes))

    def f(module, **options):
        return all_gradients(under(functools.partial(module.layer_norm, **options), vmaps))

    return f, arrays


@pytest.mark.parametrize("name", NESTED)
def test_nested(name, implementation):
    """Values and gradients under several vmaps.

    One backward call adds up over examples: no gradient of a parameter has an axis that the parameter has not.
    """
    f, arrays = nested(name)
    if name == "rows behind H" and implementation == "triton":
        with pytest.raises(ValueError, match=BEHIND_ROWS):
            f(jln, implementation=implementation)(*arrays)
        return
    compare(f(jln, implementation=implementation), f(jln.reference), *arrays)
    if name != "scales of the same rows":
        found, gradients = operations(f(jln), *arrays), NESTED[name][1]
        assert [o for o in found if o[0].endswith("backward")] == [("jln_norm_backward", 0, gradients)] * bool(
            gradients
        )
        assert len(found) == 2 * bool(gradients)


def test_a_branch_that_examples_choose():
    """A `cond` whose predicate differs from example to example gives each its own gradient."""

    def f(p, x, scale):
        return jax.lax.cond(p, lambda: jnp.sum(jnp.sin(jln.rms_norm(x, scale))), lambda: jnp.sum(x * scale[None]))

    p, x, scale = np.arange(EXAMPLES) % 2 == 0, workbench.normal(0, (EXAMPLES, 4, H), "float64"), jnp.arange(1.0, H + 1)
    got = jax.vmap(jax.grad(f, 2), (0, 0, None))(p, x, scale)
    chex.assert_trees_all_close(got, jnp.stack([jax.grad(f, 2)(*a, scale) for a in zip(p, x, strict=True)]), **CLOSE)


def test_rows_with_scales_of_their_own_are_groups():
    """Examples are no heads there, for whose number kernels are compiled, and among which no outer rows may lie."""
    x, scale = workbench.normal(0, (EXAMPLES, 4, H), "float64"), workbench.normal(1, (EXAMPLES, H), "float64")
    step = all_gradients(jax.vmap(jax.vmap(jln.rms_norm), (1, None), 1))
    assert number_of_calls(step, x, scale) == (1, 1)


# The places of the examples in x, the residual and the scale.
AROUND = {
    "in front": (0, 0, None),
    "in the middle": (1, 1, None),
    "behind H": (3, 3, None),
    "parameters in the middle": (1, 1, 0),
    "a residual for all": (1, None, None),
    "scales of the same rows": (None, None, 0),
}


@pytest.mark.parametrize("axis", [-1, -2, (0, -1)], ids=str)
@pytest.mark.parametrize("places", AROUND.values(), ids=AROUND)
def test_gradients_of_each_example(places, axis, implementation):
    """Values and gradients under a vmap around the derivative, of rows anywhere; results lie where x's examples do."""
    shapes = [[2, 4, 5, H], [2, 4, 5, H], [[2, 4, 5, H][a] for a in ((axis,) if isinstance(axis, int) else axis)]]
    arrays = with_examples([workbench.normal(i, tuple(s), "float64") for i, s in enumerate(shapes)], places)
    out = min([i for i in places[:2] if i is not None], default=0)

    def step(module, **how):
        f = functools.partial(module.add_rms_norm, axis=axis, **how)
        return jax.vmap(all_gradients(f), places, (0, (places[0] or 0, places[1] or 0, 0)))

    if implementation == "triton" and (axis != -1 or out > 0):
        with pytest.raises(ValueError, match="takes rows whose elements lie side by" if axis != -1 else BEHIND_ROWS):
            step(jln, implementation=implementation)(*arrays)
        return
    compare(step(jln, implementation=implementation), step(jln.reference), *arrays)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("scale", [(2, 1, 1, H), (2, 1, 5, H), (1, 4, 1, H)], ids=str)
def test_examples_beside_groups(scale, place, around):
    """Values and gradients where a scale varies along axes of x [2, 4, 5, H] that examples lie among."""
    x = with_examples([workbench.normal(0, (2, 4, 5, H), "float64")], [place])[0]
    scale, offset = workbench.normal(1, scale, "float64"), workbench.normal(2, (H,), "float64")

    def step(module):
        if around:
            return jax.vmap(all_gradients(module.layer_norm), (place, None, None), (0, (place, 0, 0)))
        return all_gradients(jax.vmap(module.layer_norm, (place, None, None), place))

    compare(step(jln), step(jln.reference), x, scale, offset)


@pytest.mark.parametrize("axes", [(0, 0, None), (0, None, None)], ids=["one call", "plain"])
@pytest.mark.parametrize("used", [0, 1], ids=["y", "total"])
def test_results_that_nobody_uses(used, axes):
    """Dead code falls away from a call, and what is left has the same gradients."""
    x, residual, scale = (workbench.normal(i, s, "float64") for i, s in enumerate([(4, H), (4, H), (H,)]))
    arrays = with_examples((x, residual, scale), axes)

    def step(module):
        return all_gradients(jax.vmap(jax.jit(lambda *a: module.add_rms_norm(*a)[used]), axes))

    compare(step(jln), step(jln.reference), *arrays)


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


@pytest.mark.parametrize("axes", [(0, 0), (None, 0)], ids=["rows and kernels", "kernels"])
def test_remat_holds_the_operands_alone(axes):
    """Nothing else is kept by plain jnp, too, where `remat` is asked for, and more where it is not."""
    x, kernel = with_examples((jnp.ones((4, H)), jnp.ones((H, 3))), axes)

    def held(remat):
        f = jax.vmap(lambda x, kernel: jln.rms_norm_linear(x, None, kernel, remat=remat), axes)
        return sorted(a.shape for a in jax.tree.leaves(jax.vjp(f, x, kernel)[1]) if a.size)

    assert held(True) == sorted([x.shape, kernel.shape]) and len(held(False)) > 2


def test_an_offset_that_groups_share_is_added_up_in_float32():
    """A parameter that examples share beside others of their own has its gradient in its dtype, added up in float32."""
    x, scale = workbench.normal(0, (512, 4, H), "bfloat16"), workbench.normal(1, (512, H), "bfloat16")

    def gradient(f, x, scale, offset):
        return jax.grad(lambda o: jnp.sum(jnp.sin(jax.vmap(f, (0, 0, None))(x, scale, o))).astype("float32"))(offset)

    with jax.numpy_dtype_promotion("strict"):
        got = gradient(jln.layer_norm, x, scale, jnp.zeros(H, "bfloat16"))
    wide = (a.astype("float32") for a in (x, scale))
    true = gradient(jln.reference.layer_norm, *wide, jnp.zeros(H, "float32"))
    np.testing.assert_allclose(got.astype("float32"), true, rtol=2**-8, atol=2)
