"""The operators under JAX's transformations, each against the reference under the same ones, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from catalogue import OPERATORS as CATALOGUE
from jln._junction.arrays import Arrays
from jln._operators.call import NormArguments, call
from jln._triton import target
from matrix import loss_by_name
from workbench import OPERATORS

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


@pytest.fixture(params=CATALOGUE)
def name(request):
    return request.param


def agree(transformed, name, implementation, operands, **options):
    """Compare `transformed(function, operands)`, as one program, of our operator and of the reference."""
    function = functools.partial(getattr(jln, name), implementation=implementation, **options)
    ours = jax.jit(lambda a: transformed(function, a))(operands)
    plain = functools.partial(getattr(jln.reference, name), **options)
    reference = jax.jit(lambda a: transformed(plain, a))(operands)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, reference)
    chex.assert_trees_all_close(ours, reference, **CLOSE)


# The operands that have an axis of examples, and where it is; an operator takes some of them.
IN_AXES = {
    "x": {"x": 0, "residual": 0},
    "x and scale": {"x": 0, "residual": 0, "scale": 0},
    "vectors": {"scale": 0, "offset": 0, "bias": 0},
    "what is beside x": {"residual": 0, "scale": 1, "kernel": 1},
    "kernel": {"kernel": 0},  # an ensemble of kernels over one x
    "all": {"x": 0, "residual": 1, "scale": 1, "offset": 1, "kernel": 2, "bias": 1},
}
# Operators of RMSNorm have fewer arguments and the same rules, so that few cases are enough.
BATCHED = [
    (name, axes)
    for name, operator in CATALOGUE.items()
    for axes, where in IN_AXES.items()
    if {*where} & {*operator.names} and (operator.centres or axes in ("x", "all"))
]


def grown(name, axes, examples=3):
    operands, where = workbench.named(name, (4, 9), "float64", features=(6,)), IN_AXES[axes]
    in_axes = {n: where.get(n) for n in operands}
    stacked = {
        n: a if in_axes[n] is None else jnp.stack([a * (1 + k / 7) for k in range(examples)], axis=in_axes[n])
        for n, a in operands.items()
    }
    return stacked, in_axes


@pytest.mark.parametrize(("name", "axes"), BATCHED)
def test_vmap_of_grad(name, axes, implementation):
    """`vmap` of the loss and its gradient is the reference's, whichever operands have an axis of examples."""
    operands, in_axes = grown(name, axes)

    def transformed(f, a):
        return jax.vmap(jax.value_and_grad(loss_by_name(f)), (in_axes,))(a)

    agree(transformed, name, implementation, operands)


@pytest.mark.parametrize(("name", "axes"), BATCHED)
def test_grad_of_vmap(name, axes, implementation):
    operands, in_axes = grown(name, axes)

    def transformed(f, a):
        return jax.grad(lambda a: jnp.sum(jax.vmap(loss_by_name(f), (in_axes,))(a)))(a)

    agree(transformed, name, implementation, operands)


def test_nested_vmap_over_different_arguments(name, implementation):
    """Nested `vmap` is right where the inner one maps the kernel, or a norm's scale, and the outer one maps x.

    No operand has both axes.
    """
    operands = workbench.named(name, (4, 9), "float64", features=(6,))
    inner = "kernel" if "kernel" in operands else "scale"
    operands |= {inner: jnp.stack([operands[inner], 2 * operands[inner]])}
    operands |= {"x": jnp.stack([operands["x"], operands["x"] + 1, operands["x"] ** 2])}

    def transformed(f, a):
        gradients = jax.vmap(jax.grad(loss_by_name(f)), ({n: 0 if n == inner else None for n in operands},))
        return jax.vmap(gradients, ({n: 0 if n == "x" else None for n in operands},))(a)

    agree(transformed, name, implementation, operands)


def test_eager_and_disabled_jit(name, implementation):
    operands = workbench.named(name, (4, 9), "float64", features=(6,))
    function = functools.partial(getattr(jln, name), implementation=implementation)
    with jax.disable_jit():
        disabled = function(**operands)
    chex.assert_trees_all_close(function(**operands), disabled, **CLOSE)


def test_numpy_arrays_are_accepted(name, implementation):
    operands = workbench.named(name, (4, 9), "float64", features=(6,))
    y = getattr(jln, name)(**jax.tree.map(np.asarray, operands), implementation=implementation)
    chex.assert_trees_all_close(y, getattr(jln.reference, name)(**operands), **CLOSE)


def test_zero_centered_scale(name, implementation):
    options = {"zero_centered_scale": True, "epsilon": 1e-3}
    agree(
        lambda f, a: jax.grad(loss_by_name(f))(a),
        name,
        implementation,
        workbench.named(name, (4, 9), "float64", features=(6,)),
        **options,
    )


# Tests of the norms' kernels, with operands in order and None for absent ones.


def both(transformed, operator, implementation, *operands):
    """Compare `transformed(function, *operands)`, as one program, of our operator and of the reference."""
    ours = jax.jit(functools.partial(transformed, functools.partial(operator, implementation=implementation)))
    reference = jax.jit(functools.partial(transformed, functools.partial(operator, module=jln.reference)))
    ours, reference = ours(*operands), reference(*operands)
    chex.assert_trees_all_close(ours, reference, **CLOSE)


def loss(function):
    """Return a loss that uses every result and has a gradient that is nowhere zero."""

    def call(*operands):
        y, total = function(*operands)
        result = jnp.sum(jnp.sin(y))
        return result if total is None else result + jnp.sum(total**2)

    return call


def present(operands):
    return tuple(i for i, a in enumerate(operands) if a is not None)


def batched(operator, in_axes, shape=(4, 9), examples=3):
    operands = workbench.arguments(operator, shape, "float64")
    in_axes = tuple(None if a is None else i for a, i in zip(operands, in_axes, strict=True))
    grown = tuple(
        a if i is None else jnp.stack([a * (1 + k / 7) for k in range(examples)], axis=i)
        for a, i in zip(operands, in_axes, strict=True)
    )
    return grown, in_axes


# Rows of several chunks (in float64 from 4097 elements on), with a kernel of their own for row sums; more rows than a
# tile has; one partial sum for each group.
@pytest.mark.parametrize("shape", [(3, 5000), (300, 9), (70, 40)])
@pytest.mark.parametrize("in_axes", [(None, None, 0, 0), (0, 0, None, 0), (None, 0, 0, None)], ids=str)
def test_vmap_of_grad_in_every_regime(shape, in_axes):
    operator = OPERATORS["add_layer_norm"]
    operands, in_axes = batched(operator, in_axes, shape)

    def transformed(f, *a):
        return jax.vmap(jax.grad(loss(f), argnums=(0, 1, 2, 3)), in_axes)(*a)

    both(transformed, operator, "triton", *operands)


@pytest.mark.parametrize("in_axes", [(None, None, 0, 0), (0, 0, None, 0)], ids=str)
def test_vmap_of_grad_with_several_programs_a_group(in_axes):
    """Gradients are right where several programs share a group's rows.

    The test is in float32, as in float64 the interpreter's few SMs leave a group one program.
    """
    operator = OPERATORS["add_layer_norm"]
    operands, in_axes = batched(operator, in_axes, (70, 40))
    narrow = tuple(a.astype("float32") for a in operands)

    def transformed(f, operands):
        return jax.vmap(jax.grad(loss(f), argnums=(0, 1, 2, 3)), in_axes)(*operands)

    with target.recording() as made:
        jax.jit(lambda *a: transformed(functools.partial(operator, implementation="triton"), a)).lower(*narrow)
    assert max(launch.programs for launch in made if launch.kernel.fn.__name__ == "backward_kernel") > 3
    ours = transformed(functools.partial(operator, implementation="triton"), narrow)
    true = transformed(functools.partial(operator, module=jln.reference), [a.astype("float64") for a in narrow])
    for a, t in zip(ours, true, strict=True):  # a sum of 70 terms; each result has its largest for a scale
        np.testing.assert_allclose(a, t, rtol=0, atol=4e-6 * np.max(np.abs(t)))


@pytest.mark.parametrize("width", [9, 5000])  # whole rows, and several chunks
@pytest.mark.parametrize("shared", ["dy", "dtotal", "neither"])
def test_vmap_over_cotangents(shared, width, implementation):
    operator = OPERATORS["add_layer_norm"]
    operands = workbench.arguments(operator, (5, width), "float64")
    dy, dtotal = workbench.normal(7, (3, 5, width), "float64"), workbench.normal(8, (3, 5, width), "float64")
    in_axes = (None if shared == "dy" else 0, None if shared == "dtotal" else 0)
    cotangent = tuple(a[0] if i is None else a for a, i in zip((dy, dtotal), in_axes, strict=True))

    def transformed(f, operands, cotangent):
        _, pullback = jax.vjp(f, *operands)
        return jax.vmap(lambda *c: pullback(c), in_axes)(*cotangent)

    both(transformed, operator, implementation, operands, cotangent)


def test_one_program_for_two_platforms_holds_no_python_choice():
    """A traced gradient has one equation forward and one backward, as lowering alone chooses the implementation."""
    x = jnp.ones((4, 8), "float32")
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: jln.layer_norm(x).sum()))(x))
    assert jaxpr.count("jln_norm_forward[") == 1
    assert jaxpr.count("jln_norm_backward[") == 1


def test_export_with_symbolic_shapes():
    pytest.importorskip("flatbuffers")
    (batch,) = jax.export.symbolic_shape("batch")
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jln.layer_norm(x)))))
    exported = jax.export.export(gradient, platforms=("cpu", "cuda"))(jax.ShapeDtypeStruct((batch, 8), "float64"))
    x = workbench.normal(0, (5, 8), "float64")
    chex.assert_trees_all_close(exported.call(x), gradient(x), **CLOSE)


def test_statistics_are_saved_and_y_is_not():
    """The residuals between forward and backward are x, scale, mean and rstd."""
    x, _, scale, offset = workbench.arguments(OPERATORS["layer_norm"], (64, 32), "bfloat16", parameter_dtype="float32")
    _, pullback = jax.vjp(lambda *a: jln.layer_norm(*a), x, scale, offset)
    held = sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(pullback))
    np.testing.assert_array_equal(sum(s == (64, 32) for s, _ in held), 1)
    assert sum(np.prod(s) * np.dtype("float32").itemsize for s, _ in held if s != (64, 32)) <= 4 * (2 * 64 + 32)


def test_a_transpose_by_the_kernel():
    """`jax.linear_transpose` by the kernel works with `forward_mode` where XLA multiplies.

    JAX can transpose neither the call of an operator without `forward_mode`, nor the name by which policies know a
    fused product.
    """
    x, kernel = workbench.normal(0, (6, 8), "float64"), workbench.normal(1, (8, 4), "float64")

    def transpose(module, kernel, **options):
        linear = jax.linear_transpose(lambda k: module.rms_norm_linear(x, None, k, **options), kernel)
        return linear(jnp.cos(x[:, :4]).astype(jnp.promote_types(x.dtype, kernel.dtype)))

    found = transpose(jln, kernel, forward_mode=True)
    chex.assert_trees_all_close(found, transpose(jln.reference, kernel), **CLOSE)
    with pytest.raises(NotImplementedError, match="jln_reverse_mode"):
        transpose(jln, kernel)
    x = x.astype("float32")
    with pytest.raises(NotImplementedError, match="'name'"):
        transpose(jln, kernel.astype("float32"), forward_mode=True)


@pytest.mark.parametrize("place", [0, 1])
def test_a_sum_that_nobody_asked_for(place):
    """The total lies as y does, where the call of modules has not named it as a result."""
    x, scale = workbench.normal(0, (3, 4, 8), "float64"), workbench.normal(1, (8,), "float64")

    def by_modules(x):
        results = call(Arrays(x, jnp.cos(x), scale=scale), NormArguments(False, -1, 1e-6))
        return results.y, results.total

    def f(x):
        return jln.reference.add_rms_norm(x, jnp.cos(x), scale)

    got, true = (jax.jacrev(jax.vmap(g, place, place))(x) for g in (by_modules, f))
    chex.assert_trees_all_close(got, true, **CLOSE)
