"""The fused operators under JAX's transformations, each against the reference under the same ones, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jln
import workbench
from workbench import LINEAR_OPERATORS

pytestmark = pytest.mark.usefixtures("compile_fast")

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
OPERATOR = LINEAR_OPERATORS["layer_norm_linear"]


def arguments(operator=OPERATOR, rows=(4,), features=(6,)):
    return workbench.arguments(operator, (*rows, 9), "float64", features=features)


def both(transformed, implementation, operator=OPERATOR):
    """`transformed(function)`, for our operator and for the reference."""
    ours = transformed(lambda *a: operator(*a, implementation=implementation))
    reference = transformed(lambda *a: operator(*a, module=jln.reference))
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, reference)
    chex.assert_trees_all_close(ours, reference, **CLOSE)


def loss(function):
    """A loss whose gradient is nowhere zero."""
    return lambda *operands: jnp.sum(jnp.sin(function(*operands)))


def present(operands):
    return tuple(i for i, a in enumerate(operands) if a is not None)


# One axis of x; three, and as many of features.
@pytest.mark.parametrize(("rows", "features"), [((), (6,)), ((2, 1, 3), (2, 3, 2))], ids=str)
@pytest.mark.parametrize("name", LINEAR_OPERATORS)
def test_jit_and_value_and_grad(name, rows, features, implementation):
    operator = LINEAR_OPERATORS[name]
    operands = arguments(operator, rows, features)
    both(lambda f: jax.jit(jax.value_and_grad(loss(f), present(operands)))(*operands), implementation, operator)


def test_zero_centered_scale(implementation):
    operands = arguments()
    both(
        lambda f: jax.grad(loss(f), range(5))(*operands),
        implementation,
        lambda *a, **options: OPERATOR(*a, zero_centered_scale=True, epsilon=1e-3, **options),
    )


# Which of (x, scale, offset, kernel, bias) have an axis of examples, and where.
IN_AXES = [
    (0, None, None, None, None),
    (1, None, None, None, None),
    (None, None, None, 0, None),  # an ensemble of kernels over one x
    (None, 0, None, 1, None),
    (None, None, 0, None, 0),
    (0, None, None, 2, 1),
    (1, 1, 0, 1, 0),
]


def batched(in_axes, examples=3):
    operands = arguments()
    return tuple(
        a if i is None else jnp.stack([a * (1 + k / 7) for k in range(examples)], axis=i)
        for a, i in zip(operands, in_axes, strict=True)
    )


@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
def test_vmap_of_value_and_grad(in_axes, implementation):
    operands = batched(in_axes)
    both(lambda f: jax.vmap(jax.value_and_grad(loss(f), range(5)), in_axes)(*operands), implementation)


@pytest.mark.parametrize("in_axes", IN_AXES, ids=str)
def test_grad_of_vmap(in_axes, implementation):
    operands = batched(in_axes)

    def total(f):
        return lambda *a: jnp.sum(jax.vmap(loss(f), in_axes)(*a))

    both(lambda f: jax.grad(total(f), range(5))(*operands), implementation)


def test_nested_vmap_over_different_arguments(implementation):
    """The inner axis on the kernel, the outer on x: neither has both."""
    x, scale, offset, kernel, bias = arguments()
    kernels, xs = jnp.stack([kernel, 2 * kernel]), jnp.stack([x, x + 1, x**2])

    def transformed(f):
        inner = jax.vmap(jax.grad(loss(f), range(5)), (None, None, None, 0, None))
        return jax.vmap(inner, (0, None, None, None, None))(xs, scale, offset, kernels, bias)

    both(transformed, implementation)


def test_no_operand_is_written_out_over_a_batch():
    """vmap over x alone is a longer x: one product, without a copy of the kernel for every example."""
    x, *parameters = workbench.arguments(OPERATOR, (64, 8, 32), "float32", features=(16,))
    function = jax.vmap(lambda x: jln.layer_norm_linear(x, *parameters, implementation="xla"))
    text = jax.jit(function).lower(x).as_text()
    assert text.count("dot_general") == 1 and "64x32x16" not in text


def test_eager_and_disabled_jit(implementation):
    operands = arguments()
    eager = OPERATOR(*operands, implementation=implementation)
    with jax.disable_jit():
        disabled = OPERATOR(*operands, implementation=implementation)
    chex.assert_trees_all_close(eager, disabled, **CLOSE)


@pytest.mark.parametrize("features", [(24,), (2, 12)])
def test_only_x_is_kept_of_its_size(features, implementation):
    """Between forward and backward: x, the parameters as they are, mean and rstd; no z, no y, no bias."""
    operands = workbench.arguments(OPERATOR, (64, 32), "bfloat16", features=features, parameter_dtype="float32")
    _, pullback = jax.vjp(lambda *a: OPERATOR(*a, implementation=implementation), *operands)
    held = sorted((a.dtype.name, a.shape) for a in jax.tree.leaves(pullback) if a.size)
    parameters = [("float32", (32,)), ("float32", (32,)), ("float32", (32, *features))]
    statistics = [("float32", (64, 1)), ("float32", (64, 1))]
    assert held == sorted([("bfloat16", (64, 32)), *parameters, *statistics])


def test_x_is_kept_as_it_is(implementation):
    """Not a copy of it, nor of a parameter: what is kept are the arguments themselves and what is new of a row."""
    operands = workbench.arguments(OPERATOR, (64, 32), "bfloat16", features=(24,), parameter_dtype="float32")

    def held(*operands):
        return jax.tree.leaves(jax.vjp(lambda *a: OPERATOR(*a, implementation=implementation), *operands)[1])

    jaxpr = jax.make_jaxpr(held)(*operands).jaxpr
    made = [a.aval.shape for a in jaxpr.outvars if a not in jaxpr.invars and a.aval.size]
    assert made == [(64, 1), (64, 1)] and jaxpr.invars[0] in jaxpr.outvars


# Rows split, and features: then y and dy of a device are its features' and dx is summed over the mesh.
@pytest.mark.parametrize("split", ["rows", "features"])
@pytest.mark.parametrize("name", LINEAR_OPERATORS)
def test_shard_map(name, split, implementation):
    """Checked mode: gradients of what is shared are summed over the mesh, a varying result is not taken for a copy."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",))
    operator = LINEAR_OPERATORS[name]
    operands = arguments(operator)
    copied, first, last = PartitionSpec(), PartitionSpec("d"), PartitionSpec(None, "d")
    specs = (first, *[copied] * 4) if split == "rows" else (*[copied] * 3, last, first)
    out_specs = first if split == "rows" else last

    def transformed(f):
        sharded = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs)
        return jax.jit(jax.value_and_grad(loss(sharded), present(operands)))(*operands)

    both(transformed, implementation, operator)
    with pytest.raises(ValueError, match="out_specs"):
        ours = functools.partial(operator, implementation=implementation)
        jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=copied)(*operands)


@pytest.mark.parametrize("precision", ["highest", ("high", "default"), jax.lax.Precision.HIGH, "BF16_BF16_F32", None])
def test_precision_is_that_of_every_product(precision):
    """Of the forward's, of the backward's two, and of none other."""
    x, *parameters = (jnp.asarray(a, "float32") for a in arguments())

    def step(f, *operands):
        y, pullback = jax.vjp(lambda *a: f(*a, precision=precision), *operands)
        return pullback(y)

    def asked(f):
        text = jax.jit(lambda *a: step(f, *a)).trace(x, *parameters).lower(lowering_platforms=("cuda",)).as_text()
        return sorted(line.split(", precision")[-1].split(" :")[0] for line in text.splitlines() if "dot_gen" in line)

    ours = asked(lambda *a, **o: jln.layer_norm_linear(*a, implementation="xla", **o))
    assert len(ours) == 3 and ours == asked(jln.reference.layer_norm_linear)


def test_precision_may_be_the_default_of_the_moment():
    x, *parameters = (jnp.asarray(a, "float32") for a in arguments())
    with jax.default_matmul_precision("highest"):
        text = str(jax.make_jaxpr(jln.layer_norm_linear)(x, *parameters))
    assert "HIGHEST" in text


def test_numpy_arrays_are_accepted(implementation):
    operands = [np.asarray(a) for a in arguments()]
    y = OPERATOR(*operands, implementation=implementation)
    chex.assert_trees_all_close(y, OPERATOR(*arguments(), module=jln.reference), **CLOSE)
