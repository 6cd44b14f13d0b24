"""The operators under JAX's transformations, each against the reference under the same ones, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from jln._triton import target
from workbench import OPERATORS

pytestmark = pytest.mark.usefixtures("compile_fast")

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


@pytest.fixture(params=OPERATORS.values(), ids=OPERATORS)
def operator(request):
    return request.param


def both(transformed, operator, implementation):
    """`transformed(function)`, for our operator and for the reference."""
    ours = transformed(lambda *a: operator(*a, implementation=implementation))
    reference = transformed(lambda *a: operator(*a, module=jln.reference))
    chex.assert_trees_all_close(ours, reference, **CLOSE)


def loss(function):
    """A loss whose gradient uses every result, and is nowhere zero."""

    def call(*operands):
        y, total = function(*operands)
        result = jnp.sum(jnp.sin(y))
        return result if total is None else result + jnp.sum(total**2)

    return call


def present(operands):
    return tuple(i for i, a in enumerate(operands) if a is not None)


# Which of (x, residual, scale, offset) have an axis of examples, and where.
IN_AXES = [
    (0, 0, None, None),
    (1, 0, None, None),
    (0, 0, 0, None),
    (None, None, 0, 0),
    (None, 0, 1, None),
    (2, 1, 0, 1),
]


def batched(operator, in_axes, shape=(4, 9), examples=3):
    operands = workbench.arguments(operator, shape, "float64")
    in_axes = tuple(None if a is None else i for a, i in zip(operands, in_axes, strict=True))
    grown = tuple(
        a if i is None else jnp.stack([a * (1 + k / 7) for k in range(examples)], axis=i)
        for a, i in zip(operands, in_axes, strict=True)
    )
    return grown, in_axes


@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
def test_vmap(operator, in_axes, implementation):
    operands, in_axes = batched(operator, in_axes)
    both(lambda f: jax.vmap(f, in_axes)(*operands), operator, implementation)


@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
def test_vmap_of_grad(operator, in_axes, implementation):
    operands, in_axes = batched(operator, in_axes)
    both(lambda f: jax.vmap(jax.grad(loss(f), argnums=present(operands)), in_axes)(*operands), operator, implementation)


# Rows of several chunks (in float64 from 4097 on), whose sums have a kernel of their own; more rows than a tile; a
# partial sum a group.
@pytest.mark.parametrize("shape", [(3, 5000), (300, 9), (70, 40)])
@pytest.mark.parametrize("in_axes", [(None, None, 0, 0), (0, 0, None, 0), (None, 0, 0, None)], ids=str)
def test_vmap_of_grad_in_every_regime(shape, in_axes):
    operator = OPERATORS["add_layer_norm"]
    operands, in_axes = batched(operator, in_axes, shape)
    both(lambda f: jax.vmap(jax.grad(loss(f), argnums=(0, 1, 2, 3)), in_axes)(*operands), operator, "triton")


@pytest.mark.parametrize("in_axes", [(None, None, 0, 0), (0, 0, None, 0)], ids=str)
def test_vmap_of_grad_with_several_programs_a_group(in_axes):
    """In float32: in float64 the interpreter's few SMs leave a group one program."""
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

    def transformed(f):
        _, pullback = jax.vjp(f, *operands)
        return jax.vmap(lambda *c: pullback(c), in_axes)(*cotangent)

    both(transformed, operator, implementation)


@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
def test_grad_of_vmap(operator, in_axes, implementation):
    operands, in_axes = batched(operator, in_axes)

    def total(f):
        return lambda *a: jnp.sum(jax.vmap(loss(f), in_axes)(*a))

    both(lambda f: jax.grad(total(f), argnums=present(operands))(*operands), operator, implementation)


def test_nested_vmap_over_different_arguments(operator, implementation):
    """The inner axis on the scale, the outer on x: neither has both."""
    x, residual, scale, offset = workbench.arguments(operator, (4, 9), "float64")
    scales = jnp.stack([scale, 2 * scale])
    xs = jnp.stack([x, x + 1, x**2])
    inner = (None, None, 0, None)
    outer = (0, None, None, None)

    def transformed(f):
        def gradients(x, residual, scale, offset):
            return jax.grad(loss(f), argnums=(0, 2))(x, residual, scale, offset)

        return jax.vmap(jax.vmap(gradients, inner), outer)(xs, residual, scales, offset)

    both(transformed, operator, implementation)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_where_rows_lie_side_by_side(axis, implementation):
    operator = OPERATORS["layer_norm"]
    x, _, scale, offset = workbench.arguments(operator, (6, 5, 7), "float64", axis=axis)
    xs, scales = jnp.stack([x, -x, x**2], axis=1), jnp.stack([scale, scale + 1, scale**2])

    def transformed(f):
        def gradients(x, scale):
            return jax.grad(lambda x, s: jnp.sum(jnp.sin(f(x, None, s, offset)[0])), argnums=(0, 1))(x, scale)

        return jax.vmap(gradients, (1, 0))(xs, scales)

    ours = transformed(lambda *a: operator(*a, axis=axis, implementation=implementation))
    reference = transformed(lambda *a: operator(*a, axis=axis, module=jln.reference))
    chex.assert_trees_all_close(ours, reference, **CLOSE)


def test_eager_and_disabled_jit(operator, implementation):
    operands = workbench.arguments(operator, (4, 9), "float64")
    eager = operator(*operands, implementation=implementation)
    with jax.disable_jit():
        disabled = operator(*operands, implementation=implementation)
    chex.assert_trees_all_close(eager, disabled, **CLOSE)


def test_one_program_for_two_platforms_holds_no_python_choice():
    """The implementation is chosen when a program is lowered: traced once, it is one equation each way."""
    x = jnp.ones((4, 8), "float32")
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: jln.layer_norm(x).sum()))(x))
    assert jaxpr.count("jln_norm_forward[") == 1
    assert jaxpr.count("jln_norm_backward[") == 1


def test_shard_map(implementation):
    """Checked mode: a shared scale's gradient is summed over the mesh, and a varying result is not taken for a copy."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    rows, copied = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    x, _, scale, offset = workbench.arguments(OPERATORS["layer_norm"], (6, 9), "float64")

    def transformed(f):
        sharded = jax.shard_map(f, mesh=mesh, in_specs=(rows, copied, copied), out_specs=rows)
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(sharded(*a))), argnums=(0, 1, 2)))(x, scale, offset)

    def ours(*a):
        return jln.layer_norm(*a, implementation=implementation)

    chex.assert_trees_all_close(transformed(ours), transformed(jln.reference.layer_norm), **CLOSE)
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(lambda x: ours(x, scale, offset), mesh=mesh, in_specs=rows, out_specs=copied)(x)


def test_export_with_symbolic_shapes():
    pytest.importorskip("flatbuffers")
    (batch,) = jax.export.symbolic_shape("batch")
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jln.layer_norm(x)))))
    exported = jax.export.export(gradient, platforms=("cpu", "cuda"))(jax.ShapeDtypeStruct((batch, 8), "float64"))
    x = workbench.normal(0, (5, 8), "float64")
    chex.assert_trees_all_close(exported.call(x), gradient(x), **CLOSE)


def test_statistics_are_saved_and_y_is_not():
    """Between forward and backward: x, scale, mean and rstd."""
    x, _, scale, offset = workbench.arguments(OPERATORS["layer_norm"], (64, 32), "bfloat16", parameter_dtype="float32")
    _, pullback = jax.vjp(lambda *a: jln.layer_norm(*a), x, scale, offset)
    held = sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(pullback))
    np.testing.assert_array_equal(sum(s == (64, 32) for s, _ in held), 1)
    assert sum(np.prod(s) * np.dtype("float32").itemsize for s, _ in held if s != (64, 32)) <= 4 * (2 * 64 + 32)
