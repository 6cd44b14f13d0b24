"""Dtypes, axes, optional arguments and the documented guarantees, for both implementations."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from invariance import assert_rows_are_independent
from jln._norm import kernels, launcher, tiles
from jln._norm.signature import Cotangents, Gradients, Norm
from jln._triton import target
from jln._triton.chip import CHIPS
from jln._triton.launch import launch
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


@pytest.mark.parametrize(
    ("has_scale", "has_offset", "zero_centered_scale"),
    # 1 + scale needs one: tests/test_errors.py.
    [case for case in itertools.product([False, True], repeat=3) if case[0] or not case[2]],
)
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_optional_arguments(operator, has_scale, has_offset, zero_centered_scale, implementation):
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


# Several rows a tile; chunks of a row; rows side by side.
@pytest.mark.parametrize(("shape", "axis"), [((7, 24), 1), ((7, 20000), 1), ((5, 37), 0)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_stays_a_row(bad, shape, axis, implementation):
    x = workbench.normal(0, shape, "float32")
    scale, offset = (workbench.normal(seed, (shape[axis],), "float32") for seed in (1, 2))

    def run(x):
        def norm(x):
            return jln.layer_norm(x, scale, offset, axis=axis, implementation=implementation)

        y, pullback = jax.vjp(norm, x)
        return (np.moveaxis(a, axis, 1) for a in (y, *pullback(workbench.normal(9, y.shape, y.dtype))))

    others = np.arange(x.size // shape[axis]) != 3
    for clean, dirty in zip(run(x), run(x.at[(3, 2) if axis else (2, 3)].set(bad)), strict=True):
        assert np.isnan(dirty[3]).any()
        np.testing.assert_array_equal(clean[others], dirty[others])


# A tile of several rows, a row a tile, a row shared by programs, chunks.
@pytest.mark.parametrize("width", [20, 3000, 12000, 20000])
def test_rows_do_not_depend_on_each_other(width):
    """Batch invariance of the kernels, bit for bit; on the CPU XLA's own sums depend on how it splits them."""
    assert_rows_are_independent(23, width)


@pytest.mark.parametrize("programs", [1, 33, 528])  # fewer than a block of partial sums, one more, an H200's
def test_reduction_of_many_partial_sums(programs):
    """The interpreter's few SMs leave few partial sums; a GPU's leave hundreds."""
    partial = workbench.normal(0, (2, programs, 40), "float32")
    where = target.Interpreter() if target.interpreting() else target.Gpu(target.target_chip())

    @jax.jit
    def run(partial):
        tile, result = tiles.reduce_tile(40), jax.ShapeDtypeStruct((2, 40), "float32")
        return launch(
            where,
            kernels.reduce_kernel,
            {"shares": jnp.stack([partial, -partial]), "programs": programs},
            {"dscale": result, "doffset": result},
            programs=2 * (-(-40 // tile.columns)),
            tile=tile,
            compute=jnp.dtype("float32"),
            H=40,
            SUMS=("dscale", "doffset"),
        )

    dscale, doffset = (run(partial)[name] for name in ("dscale", "doffset"))
    np.testing.assert_allclose(dscale, np.asarray(partial, "float64").sum(1), rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(doffset, -dscale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_partial_sums_are_not_rounded(dtype):
    """dscale's and doffset's [P, H] in float32 (float64 for float64), whatever the parameters are."""
    x, p = jax.ShapeDtypeStruct((1000, 64), dtype), jax.ShapeDtypeStruct((1, 64), dtype)
    statistic = jax.ShapeDtypeStruct((1000, 1), jnp.promote_types(dtype, "float32"))
    norm = Norm(axis=-1, epsilon=0.0, subtract_mean=True, zero_centered_scale=False)
    where = target.Recorder(CHIPS["h200"])
    operands = Cotangents(x, None, x, p, None, statistic, statistic)
    jax.eval_shape(lambda o: launcher.backward(o, norm, Gradients(dtype, dtype, dtype, None), 0, where), operands)
    backward, reduction = where.launches
    shares = backward.results["shares"]
    assert shares.dtype == statistic.dtype
    assert shares.shape == (2, 1, reduction.scalars["programs"], 64)


def test_columns_that_are_not_there_cannot_overflow(implementation):
    """mean * rstd is infinite here: a masked column must not turn it into NaN."""
    x = jnp.full((2, 7), 1e36, "float32")
    dy = jnp.arange(14, dtype="float32").reshape(2, 7)
    dx = jax.grad(lambda x: jnp.sum(jln.layer_norm(x, implementation=implementation) * dy))(x)
    assert np.isfinite(dx).all()


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


def test_what_was_not_used_cannot_spoil_what_was(implementation):
    """Only the sum is used: a bad row of the norm is nobody's business, and no kernel runs for it."""
    x = jnp.ones((2, 4)).at[0, 0].set(jnp.inf)

    def loss(x, scale):
        return jnp.sum(2 * jln.add_layer_norm(x, x, scale, implementation=implementation)[1])

    dx, dscale = jax.grad(loss, argnums=(0, 1))(x, jnp.ones(4))
    np.testing.assert_array_equal(dx, np.full((2, 4), 4.0))
    np.testing.assert_array_equal(dscale, np.zeros(4))
    assert "jln_norm_backward" not in str(jax.make_jaxpr(jax.grad(loss))(x, jnp.ones(4)))


def test_strict_promotion(implementation):
    with jax.numpy_dtype_promotion("strict"):
        x, scale = jnp.ones((3, 8), "bfloat16"), jnp.ones(8, "float32")
        run = jax.jit(jax.grad(lambda *a: jln.add_layer_norm(*a, implementation=implementation)[0].sum(), argnums=2))
        assert run(x, x.astype("float32"), scale).dtype == jnp.float32


def test_weak_types_promote_as_arrays_do(implementation):
    weak = jax.lax.broadcast(jnp.asarray(1.5), (3, 8))
    assert weak.weak_type
    residual = jnp.ones((3, 8), "bfloat16")
    ours = jln.add_layer_norm(weak, residual, implementation=implementation)
    chex.assert_trees_all_equal_dtypes(ours, jln.reference.add_layer_norm(weak, residual))


def test_objects_that_stand_for_arrays(implementation):
    """As flax.nnx.Param does."""

    class Parameter:
        def __jax_array__(self):
            return jnp.full(8, 2.0, "float32")

    x = workbench.normal(0, (3, 8), "float32")
    y = jln.rms_norm(x, Parameter(), implementation=implementation)
    np.testing.assert_array_equal(y, jln.rms_norm(x, jnp.full(8, 2.0, "float32"), implementation=implementation))


def test_numpy_arrays_are_accepted(implementation):
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("float32")
    y = jln.rms_norm(x, np.ones(8, "float32"), implementation=implementation)
    chex.assert_trees_all_close(y, jln.reference.rms_norm(jnp.asarray(x)), rtol=1e-6)
