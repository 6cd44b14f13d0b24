"""Dtypes, axes, optional arguments and the documented guarantees, for both implementations."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from workbench import OPERATORS


def gradients(function, operands):
    outputs, pullback = jax.vjp(function, *operands)
    return outputs, pullback(workbench.cotangents(outputs))


def compare(operator, operands, implementation, rtol=1e-12, **options):
    """Outputs and gradients in float64 against autodiff of the reference."""
    ours = gradients(lambda *a: operator(*a, implementation=implementation, **options), operands)
    reference = gradients(lambda *a: operator(*a, module=jln.reference, **options), operands)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, reference)
    chex.assert_trees_all_close(ours, reference, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("zero_centered_scale", [False, True])
@pytest.mark.parametrize(("has_scale", "has_offset"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_optional_arguments(operator, has_scale, has_offset, zero_centered_scale, implementation):
    if zero_centered_scale and not has_scale:
        pytest.skip("raises: tests/test_errors.py")
    x, residual, scale, offset = workbench.arguments(operator, (3, 5, 17), "float64")
    operands = (x, residual, scale if has_scale else None, offset if has_offset else None)
    compare(operator, operands, implementation, zero_centered_scale=zero_centered_scale, epsilon=1e-3)


# 0 and 1: rows lie side by side, in front of one axis and of two. (1, 2): adjacent, read in place. (2, 1): the scale's
# axes the other way round. (0, 2): not adjacent, transposed. (0, 1, 2): one row. -2: counted from the end.
@pytest.mark.parametrize("axis", [0, 1, 2, -2, (1,), (1, 2), (2, 1), (0, 2), (2, 0), (0, 1, 2), [-1]])
@pytest.mark.parametrize("name", ["layer_norm", "add_rms_norm"])
def test_axes(name, axis, implementation):
    operator = OPERATORS[name]
    axes = tuple(axis) if isinstance(axis, list) else axis
    operands = workbench.arguments(operator, (4, 6, 5), "float64", axis=axes)
    ours = gradients(lambda *a: operator(*a, implementation=implementation, axis=axis), operands)
    reference = gradients(lambda *a: operator(*a, module=jln.reference, axis=axes), operands)
    chex.assert_trees_all_close(ours, reference, rtol=1e-12, atol=1e-12)


# Rows side by side: 70 of them are no multiple of a tile; 300 elements are whole in registers forward, not backward;
# 1000 elements are taken in chunks by both; with 3 rows a tile is narrower than a line.
@pytest.mark.parametrize("shape", [(2, 100, 70), (1, 300, 70), (2, 1000, 33), (5, 129, 3), (2, 3, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strided_rows(shape, dtype, implementation):
    operator = OPERATORS["add_layer_norm"]
    operands = workbench.arguments(operator, shape, dtype, parameter_dtype="float32", axis=1)

    def in_place(x, residual, scale, offset):
        return operator(x, residual, scale, offset, axis=1, implementation=implementation)

    def transposed(x, residual, scale, offset):
        x, residual = jnp.moveaxis(x, 1, -1), jnp.moveaxis(residual, 1, -1)
        y, total = operator(x, residual, scale, offset, implementation="xla")
        return jnp.moveaxis(y, -1, 1), jnp.moveaxis(total, -1, 1)

    eps = float(jnp.finfo(dtype).eps)
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda a: a.astype("float64"), gradients(f, operands)) for f in (in_place, transposed)),
        rtol=4 * eps,
        atol=50 * float(jnp.finfo("float32").eps),
    )


@pytest.mark.parametrize(
    ("x", "residual", "parameter"),
    [
        ("bfloat16", "bfloat16", "float32"),  # the usual mixed precision
        ("bfloat16", "float32", "float32"),  # a residual stream kept in float32
        ("float32", "bfloat16", "bfloat16"),
        ("float16", "bfloat16", "float16"),  # promoted to float32
        ("float64", "float32", "float32"),
        ("float32", "float32", "float64"),
    ],
)
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
def test_mixed_dtypes(name, x, residual, parameter, implementation):
    operator = OPERATORS[name]
    x_, residual_, scale, offset = workbench.arguments(operator, (6, 40), x, parameter_dtype=parameter)
    if residual_ is not None:
        residual_ = residual_.astype(residual)
    operands = (x_, residual_, scale, offset)
    (y, total), grads = gradients(lambda *a: operator(*a, implementation=implementation), operands)
    assert y.dtype == x_.dtype
    if total is not None:
        assert total.dtype == jnp.promote_types(x, residual)
        compute = jnp.promote_types(total.dtype, "float32")
        np.testing.assert_array_equal(total, (x_.astype(compute) + residual_.astype(compute)).astype(total.dtype))
        # What is normalised is the rounded sum.
        alone = jln.layer_norm(total, scale, offset, implementation=implementation)
        np.testing.assert_array_equal(y, alone.astype(y.dtype))
    for gradient, operand in zip(grads, operands, strict=True):
        assert (gradient is None) == (operand is None)
        if gradient is not None:
            assert gradient.dtype == operand.dtype and gradient.shape == operand.shape
    (y64, _), grads64 = gradients(
        lambda *a: operator(*a, module=jln.reference),
        tuple(None if a is None else a.astype("float64") for a in (x_, residual_, scale, offset)),
    )
    eps = max(float(jnp.finfo(a.dtype).eps) for a in operands if a is not None)
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda a: a.astype("float64"), t) for t in ((y, grads), (y64, grads64))),
        rtol=8 * eps,
        atol=8 * eps,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scale_of_a_lower_precision_is_not_what_x_is_rounded_to(dtype, implementation):
    """One downcast, at the store: the product with a bfloat16 scale is not rounded to bfloat16."""
    x = workbench.normal(0, (4, 64), dtype)
    y = jln.layer_norm(x, jnp.full(64, 1.0, "bfloat16"), implementation=implementation)
    np.testing.assert_array_equal(y, jln.layer_norm(x, implementation=implementation))


def test_no_rows(implementation):
    operator = OPERATORS["add_layer_norm"]
    operands = workbench.arguments(operator, (0, 3, 8), "float32")
    (y, total), (dx, dresidual, dscale, doffset) = gradients(
        lambda *a: operator(*a, implementation=implementation), operands
    )
    assert y.shape == total.shape == dx.shape == dresidual.shape == (0, 3, 8)
    np.testing.assert_array_equal(dscale, np.zeros(8, "float32"))
    np.testing.assert_array_equal(doffset, np.zeros(8, "float32"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [24, 20000])  # several rows a tile; chunks of a row
def test_a_bad_row_stays_a_row(bad, width, implementation):
    operator = OPERATORS["layer_norm"]
    x, _, scale, offset = workbench.arguments(operator, (7, width), "float32")

    def run(x):
        y, pullback = jax.vjp(lambda x: jln.layer_norm(x, scale, offset, implementation=implementation), x)
        return y, *pullback(workbench.normal(9, y.shape, y.dtype))

    others = np.arange(7) != 3
    for clean, dirty in zip(run(x), run(x.at[3, 5].set(bad)), strict=True):
        assert np.isnan(dirty[3]).any()
        np.testing.assert_array_equal(clean[others], dirty[others])


# A tile of several rows, a row a tile, a row shared by two programs, chunks.
@pytest.mark.parametrize("width", [20, 3000, 12000, 20000])
def test_rows_do_not_depend_on_each_other(width):
    """Batch invariance of the kernels, bit for bit; on the CPU XLA's own sums depend on how it splits them."""
    operator = OPERATORS["layer_norm"]
    x, _, scale, offset = workbench.arguments(operator, (23, width), "bfloat16")
    dy = workbench.normal(9, x.shape, x.dtype)

    def run(rows):
        y, pullback = jax.vjp(lambda x: jln.layer_norm(x, scale, offset, implementation="triton"), x[rows])
        return y, *pullback(dy[rows])

    everything = run(slice(None))
    for rows in (slice(0, 1), slice(11, 12), slice(5, 19)):
        for alone, among in zip(run(rows), everything, strict=True):
            np.testing.assert_array_equal(alone, among[rows])


def test_gradients_repeat_bit_for_bit(implementation):
    operator = OPERATORS["add_layer_norm"]
    operands = workbench.arguments(operator, (300, 130), "float32")
    run = jax.jit(lambda *a: gradients(lambda *a: operator(*a, implementation=implementation), a))
    first = run(*operands)
    for _ in range(3):
        chex.assert_trees_all_equal(run(*operands), first)


def test_unused_results_have_no_gradient(implementation):
    """Only y, or only the sum, is used: the other's cotangent is zero and dx is still right."""
    operator = OPERATORS["add_layer_norm"]
    operands = workbench.arguments(operator, (5, 12), "float64")
    for used in (0, 1):
        ours, reference = (
            jax.grad(lambda *a, o=o, used=used: (operator(*a, **o)[used] ** 2).sum(), argnums=(0, 1, 2, 3))(*operands)
            for o in ({"implementation": implementation}, {"module": jln.reference})
        )
        chex.assert_trees_all_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_numpy_arrays_are_accepted(implementation):
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
    y = jln.rms_norm(x, np.ones(8, "float32"), implementation=implementation)
    chex.assert_trees_all_close(y, jln.reference.rms_norm(jnp.asarray(x)), rtol=1e-6)
