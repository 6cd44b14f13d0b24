"""`add_layer_norm`, `add_rms_norm` and `rms_norm_add_rms_norm` normalise the sum that they return.

That sum is rounded to its dtype. The operators do so and the reference does, jitted and eager.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from workbench import OPERATORS

PAIRS = [("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float64", "float64")]
PAIRS += [("bfloat16", "float32"), ("float32", "float16")]
NORMS = {"add_layer_norm": jln.reference.layer_norm, "add_rms_norm": jln.reference.rms_norm}
RUNS = {"reference": jln.reference} | {name: jln for name in ("xla", "triton")}


def sum_that_loses_digits(dtype, residual_dtype):
    """Return x and residual, [5, 100]. x is as small as the last digit of their sum, which rounding so changes much."""
    random = np.random.default_rng(0)
    digits = float(jnp.finfo(jnp.promote_types(dtype, residual_dtype)).eps)
    x = random.standard_normal((5, 100)) * 64 * digits
    return jnp.asarray(x).astype(dtype), jnp.full((5, 100), 64, residual_dtype)


@functools.cache
def function(name, run, jitted):
    options = {} if run == "reference" else {"implementation": run}
    f = functools.partial(getattr(RUNS[run], name), **options)
    return jax.jit(f) if jitted else f


@pytest.mark.parametrize("jitted", [True, False], ids=["jitted", "eager"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", NORMS)
def test_it_is_what_is_returned_that_is_normed(name, run, jitted):
    for dtype, residual_dtype in PAIRS:
        x, residual = sum_that_loses_digits(dtype, residual_dtype)
        y, total = function(name, run, jitted)(x, residual)
        promoted = jnp.promote_types(dtype, residual_dtype)
        assert total.dtype == promoted and y.dtype == dtype
        exact = np.asarray(x, "float64") + np.asarray(residual, "float64")
        np.testing.assert_array_equal(total, exact.astype(promoted))
        expected = np.asarray(NORMS[name](jnp.asarray(total, "float64")))
        # One rounding, and those of a sum of 100 terms whose mean is 64 times its spread, or more.
        compute = jnp.promote_types(promoted, jnp.float32)
        spread = np.std(np.asarray(total, "float64"), -1, keepdims=True)
        roundings = 10 * float(jnp.finfo(compute).eps) * 64 / np.minimum(spread, 64)
        allowed = float(jnp.finfo(dtype).eps) * np.abs(expected) + roundings * (1 + np.abs(expected))
        assert (np.abs(np.asarray(y, "float64") - expected) <= allowed).all()
        unrounded = np.asarray(NORMS[name](jnp.asarray(exact)))
        if name == "add_layer_norm" and promoted in ("float16", "bfloat16"):  # or this test would show nothing
            assert np.max(np.abs(unrounded - expected) / allowed) > 10


@pytest.mark.parametrize("width", [100, 20000], ids=["whole", "chunks"])
@pytest.mark.parametrize("run", RUNS)
def test_so_it_is_between_norms_on_both_sides(run, width):
    """`rms_norm_add_rms_norm` normalises the rounded sum too.

    Its y is in float32, which tells the rounded sum from the exact one.
    """
    x, residual, x_scale, scale = workbench.arguments(OPERATORS["rms_norm_add_rms_norm"], (5, width), "bfloat16")
    options = {} if run == "reference" else {"implementation": run}
    both = functools.partial(RUNS[run].rms_norm_add_rms_norm, dtype="float32", **options)
    y, total = jax.jit(both)(x, residual, x_scale, scale)
    assert (total.dtype, y.dtype) == (jnp.bfloat16, jnp.float32)
    expected = np.asarray(jln.reference.rms_norm(jnp.asarray(total, "float64"), jnp.asarray(scale, "float64")))
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [*NORMS, "rms_norm_add_rms_norm"])
def test_a_gradient_alone_is_that_of_the_rounded_sum(name, dtype):
    """A sum that nothing else reads may go to another library, together with the sums of the gradient."""
    x, residual = (workbench.normal(i, (64, 128), dtype) for i in range(2))  # from 32 rows of 64 on it does
    scale, dy = workbench.normal(2, (128,), "float32"), workbench.normal(3, (64, 128), "float32")

    operator = functools.partial(getattr(jln, name), dtype="float32", implementation="xla")
    again = jax.checkpoint(operator, policy=jax.checkpoint_policies.save_only_these_names(jln.STATISTICS))
    got = jax.jit(jax.grad(lambda s: jnp.sum(again(x, residual, scale=s)[0] * dy)))(scale)
    _, total = operator(x, residual, scale=scale)
    norm = jln.reference.layer_norm if name == "add_layer_norm" else jln.reference.rms_norm
    wide = total.astype("float64"), dy.astype("float64")
    true = jax.grad(lambda s: jnp.sum(norm(wide[0], s) * wide[1]))(scale.astype("float64"))
    # Some roundings of float32, where those to 16 bits would be seen a thousand times as large.
    np.testing.assert_allclose(got, true, rtol=0, atol=1e-5 * np.max(np.abs(true)))
