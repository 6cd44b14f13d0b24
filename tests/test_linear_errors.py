"""The fused operators' bad arguments, and those that are almost bad: empty ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln

X = jnp.ones((4, 8), "float32")
P = jnp.ones(8, "float32")
K = jnp.ones((8, 3), "float32")

CASES = {
    "kernel is too long": (ValueError, r"kernel must have shape \(8, \*features\).*got float32\[9,3\] for x",
                           lambda f: f(X, P, jnp.ones((9, 3), "float32"))),
    "kernel is transposed": (ValueError, r"kernel must have .*got float32\[3,8\]", lambda f: f(X, P, K.T)),
    "kernel has one axis": (ValueError, r"kernel must have .*one axis of features or more; got float32\[8\]",
                            lambda f: f(X, P, P)),
    "kernel is a scalar": (ValueError, r"kernel must have .*got float32\[\]", lambda f: f(X, P, jnp.float32(1))),
    "kernel is None": (TypeError, r"kernel must be an array; got NoneType", lambda f: f(X, P, None)),
    "kernel is an integer array": (TypeError, r"kernel must have one of the dtypes.*got int32\[8,3\]",
                                   lambda f: f(X, P, K.astype("int32"))),
    "bias is too long": (ValueError, r"bias must have shape \(3,\), that of kernel's axes after.*got float32\[4\]",
                         lambda f: f(X, P, K, jnp.ones(4, "float32"))),
    "bias is not of the features' shape": (ValueError, r"bias must have shape \(1, 3\)",
                                           lambda f: f(X, P, K[:, None], jnp.ones(3, "float32"))),
    "bias is an integer array": (TypeError, r"bias must have one of the dtypes",
                                 lambda f: f(X, P, K, jnp.ones(3, "int8"))),
    "x is an integer array": (TypeError, r"x must have one of the dtypes.*got int32\[4,8\]",
                              lambda f: f(X.astype("int32"), P, K)),
    "x is not an array": (TypeError, r"x must be an array; got list", lambda f: f([1.0], P, K)),
    "x is a scalar": (ValueError, r"x must have at least one axis", lambda f: f(jnp.float32(1), P, K)),
    "rows are empty": (ValueError, r"axis -1 of shape \(4, 0\) is empty",
                       lambda f: f(jnp.ones((4, 0), "float32"), None, jnp.ones((0, 3), "float32"))),
    "scale is too long": (ValueError, r"scale must have shape \(8,\), that of x's last axis; got float32\[9\]",
                          lambda f: f(X, jnp.ones(9, "float32"), K)),
    "scale is an integer array": (TypeError, r"scale must have one of the dtypes", lambda f: f(X, P.astype("int8"), K)),
    "epsilon is negative": (ValueError, r"epsilon must be finite and not negative", lambda f: f(X, P, K, epsilon=-1.0)),
    "epsilon is traced": (TypeError, r"epsilon must be a static Python or NumPy number",
                          lambda f: jax.jit(lambda e: f(X, P, K, epsilon=e))(0.1)),
    "zero_centered_scale is a number": (TypeError, r"zero_centered_scale must be a static bool",
                                        lambda f: f(X, P, K, zero_centered_scale=1)),
    "zero_centered_scale without a scale": (ValueError, r"zero_centered_scale=True needs a scale",
                                            lambda f: f(X, None, K, zero_centered_scale=True)),
    "precision is unknown": (ValueError, r"(?s)Precision argument must be one of.*got bogus",
                             lambda f: f(X, P, K, precision="bogus")),
    "precision is a number": (ValueError, r"Precision argument must be one of", lambda f: f(X, P, K, precision=3)),
    "implementation is unknown": (ValueError, r"implementation must be None, 'triton' or 'xla'; got 'cuda'",
                                  lambda f: f(X, P, K, implementation="cuda")),
}  # fmt: skip


def layer_norm_linear(x, scale, *others, **options):
    return jln.layer_norm_linear(x, scale, None, *others, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("function", [layer_norm_linear, jln.rms_norm_linear])
def test_bad_arguments(function, case):
    error, message, call = CASES[case]
    with pytest.raises(error, match=message):
        call(function)


def test_offset():
    with pytest.raises(ValueError, match=r"offset must have shape \(8,\), that of x's last axis; got float32\[4\]"):
        jln.layer_norm_linear(X, P, jnp.ones(4, "float32"), K)
    with pytest.raises(TypeError, match=r"offset must have one of the dtypes"):
        jln.layer_norm_linear(X, P, P.astype("int32"), K)


def test_errors_come_while_tracing():
    with pytest.raises(ValueError, match="kernel must have shape"):
        jax.eval_shape(jln.layer_norm_linear, X, P, P, jax.ShapeDtypeStruct((9, 3), "float32"))


# No rows; no features; neither; features of several axes, one of them empty.
@pytest.mark.parametrize(
    ("rows", "features"), [((0, 3), (5,)), ((2, 3), (0,)), ((0,), (0,)), ((4,), (2, 0, 3))], ids=str
)
def test_empty(rows, features, implementation):
    """An empty result, and gradients of zeros."""
    x, kernel = jnp.ones((*rows, 8), "bfloat16"), jnp.ones((8, *features), "float32")
    operands = (x, P, P, kernel, jnp.ones(features, "float32"))
    y, pullback = jax.vjp(lambda *a: jln.layer_norm_linear(*a, implementation=implementation), *operands)
    assert y.shape == (*rows, *features) and y.dtype == jnp.float32
    for gradient, operand in zip(pullback(y), operands, strict=True):
        assert gradient.dtype == operand.dtype
        np.testing.assert_array_equal(gradient, jnp.zeros_like(operand))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("n", [16, 600])  # one of each strategy
def test_a_bad_row_stays_a_row(bad, n, implementation):
    """The others' y and dx do not see it. The rows meet in a tile of a product, so they may round differently."""
    x, kernel, dy = (
        jnp.asarray(np.random.default_rng(0).standard_normal(s), "float32") for s in ((7, 8), (8, n), (7, n))
    )

    def run(x):
        y, pullback = jax.vjp(lambda x: jln.layer_norm_linear(x, P, P, kernel, implementation=implementation), x)
        return y, *pullback(dy)

    others = np.arange(7) != 3
    for clean, dirty in zip(run(x), run(x.at[3, 5].set(bad)), strict=True):
        assert np.isnan(dirty[3]).any()
        np.testing.assert_array_equal(clean[others], dirty[others])


@pytest.mark.parametrize("n", [16, 600])
def test_gradients_repeat_bit_for_bit(n, implementation):
    shapes = ((300, 40), (40,), (40,), (40, n), (n,), (300, n))
    *operands, dy = (jnp.asarray(np.random.default_rng(0).standard_normal(s), "float32") for s in shapes)

    @jax.jit
    def run(operands):
        y, pullback = jax.vjp(lambda *a: jln.layer_norm_linear(*a, implementation=implementation), *operands)
        return y, *pullback(dy)

    first = run(operands)
    for _ in range(3):
        for again, once in zip(run(operands), first, strict=True):
            np.testing.assert_array_equal(again, once)


def test_precision_is_understood_once(monkeypatch):
    """An eager call with a precision traces nothing to learn what it means."""
    x, kernel = jnp.ones((3, 4)), jnp.ones((4, 5))
    jln.layer_norm_linear(x, None, None, kernel, precision="highest")
    monkeypatch.setattr(jax, "make_jaxpr", None)
    jln.layer_norm_linear(x, None, None, kernel, precision="highest")
