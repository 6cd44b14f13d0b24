"""Bad arguments: the type of the error, and that it names the argument and what was expected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln

X = jnp.ones((4, 8), "float32")
SCALE = jnp.ones(8, "float32")

CASES = {
    "x is not an array": (TypeError, r"x must be an array; got list", lambda f: f([1.0, 2.0])),
    "x is an integer array": (TypeError, r"x must have one of the dtypes float16.*got int32\[4,8\]",
                              lambda f: f(jnp.ones((4, 8), "int32"))),
    "x is text": (TypeError, r"x must have one of the dtypes .*got str", lambda f: f(np.array(["a"]))),
    "x is complex": (TypeError, r"x must have .*got complex64\[8\]", lambda f: f(jnp.ones(8, "complex64"))),
    "x is float8": (TypeError, r"x must have .*got float8_e4m3fn\[8\]", lambda f: f(jnp.ones(8, "float8_e4m3fn"))),
    "x is a scalar": (ValueError, r"x must have at least one axis", lambda f: f(jnp.float32(1))),
    "rows are empty": (ValueError, r"axis -1 of shape \(4, 0\) is empty", lambda f: f(jnp.ones((4, 0)))),
    "scale is too long": (ValueError, r"scale must have shape \(8,\), that of x's axes \(1,\); got float32\[9\]",
                          lambda f: f(X, jnp.ones(9, "float32"))),
    "scale has another rank": (ValueError, r"scale must have shape \(8,\).*got float32\[4,8\]", lambda f: f(X, X)),
    "scale is an integer array": (TypeError, r"scale must have one of the dtypes", lambda f: f(X, jnp.ones(8, "int8"))),
    "scale is a number": (TypeError, r"scale must be an array; got float", lambda f: f(X, 1.0)),
    "scale's axes are in another order": (ValueError, r"scale must have shape \(8, 4\), that of x's axes \(1, 0\)",
                                          lambda f: f(X, X, axis=(1, 0))),
    "axis is too large": (ValueError, r"axis 2 is out of range for x of shape \(4, 8\)", lambda f: f(X, axis=2)),
    "axis is too small": (ValueError, r"axis -3 is out of range", lambda f: f(X, axis=-3)),
    "axis comes twice": (ValueError, r"axis names an axis of x twice: \(1, -1\)", lambda f: f(X, axis=(1, -1))),
    "axis is empty": (ValueError, r"axis must name at least one axis", lambda f: f(X, axis=())),
    "axis is a float": (TypeError, r"axis must be a static int or tuple of ints; got 1.0", lambda f: f(X, axis=1.0)),
    "axis is a bool": (TypeError, r"axis must be a static int", lambda f: f(X, axis=True)),
    "axis is None": (TypeError, r"axis must be a static int", lambda f: f(X, axis=None)),
    "axis is traced": (TypeError, r"axis must be a static int", lambda f: jax.jit(lambda a: f(X, axis=a))(1)),
    "epsilon is negative": (ValueError, r"epsilon must be finite and not negative; got -1e-06",
                            lambda f: f(X, epsilon=-1e-6)),
    "epsilon is NaN": (ValueError, r"epsilon must be finite", lambda f: f(X, epsilon=float("nan"))),
    "epsilon is complex": (TypeError, r"epsilon must be a static Python or NumPy number",
                           lambda f: f(X, epsilon=np.complex64(1e-6))),
    "epsilon is an array": (TypeError, r"epsilon must be a static Python or NumPy number",
                            lambda f: f(X, epsilon=jnp.float32(1e-6))),
    "epsilon is too large": (ValueError, r"epsilon must be finite", lambda f: f(X, epsilon=10**400)),
    "epsilon is text": (TypeError, r"epsilon must be a static Python or NumPy number", lambda f: f(X, epsilon="1e-6")),
    "epsilon is traced": (TypeError, r"epsilon must be a static Python or NumPy number",
                          lambda f: jax.jit(lambda e: f(X, epsilon=e))(0.1)),
    "zero_centered_scale is a number": (TypeError, r"zero_centered_scale must be a static bool; got 1",
                                        lambda f: f(X, SCALE, zero_centered_scale=1)),
    "zero_centered_scale without a scale": (ValueError, r"zero_centered_scale=True needs a scale",
                                            lambda f: f(X, zero_centered_scale=True)),
    "implementation is unknown": (ValueError, r"implementation must be None, 'triton' or 'xla'; got 'cuda'",
                                  lambda f: f(X, implementation="cuda")),
    "implementation is no text": (ValueError, r"implementation must be None", lambda f: f(X, implementation=True)),
}  # fmt: skip


def add_layer_norm(x, *parameters, **options):
    residual = x if isinstance(x, jax.Array) else jnp.ones(())
    return jln.add_layer_norm(x, residual, *parameters, **options)


def add_rms_norm(x, *parameters, **options):
    residual = x if isinstance(x, jax.Array) else jnp.ones(())
    return jln.add_rms_norm(x, residual, *parameters, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("function", [jln.layer_norm, jln.rms_norm, add_layer_norm, add_rms_norm])
def test_norms(function, case):
    error, message, call = CASES[case]
    with pytest.raises(error, match=message):
        call(function)


def test_offset():
    with pytest.raises(ValueError, match=r"offset must have shape \(8,\).*got float32\[4\]"):
        jln.layer_norm(X, SCALE, jnp.ones(4, "float32"))
    with pytest.raises(TypeError, match=r"offset must have one of the dtypes"):
        jln.layer_norm(X, SCALE, jnp.ones(8, "int32"))


@pytest.mark.parametrize("function", [jln.add_layer_norm, jln.add_rms_norm])
def test_residual(function):
    with pytest.raises(ValueError, match=r"residual must have shape \(4, 8\), that of x; got float32\[8\]"):
        function(X, SCALE)
    with pytest.raises(TypeError, match=r"residual must be an array; got NoneType"):
        function(X, None)
    with pytest.raises(TypeError, match=r"residual must have one of the dtypes"):
        function(X, jnp.ones((4, 8), "int32"))


def test_errors_come_while_tracing():
    with pytest.raises(ValueError, match="scale must have shape"):
        jax.eval_shape(jln.layer_norm, X, jax.ShapeDtypeStruct((9,), "float32"))


def test_what_is_almost_an_error():
    """NumPy's own integers and floats are static, epsilon may be zero."""
    jln.layer_norm(X, axis=np.int64(1), epsilon=np.float32(1e-5))
    jln.layer_norm(X, axis=(np.int32(-1),), epsilon=0, zero_centered_scale=False)


def test_float64_without_x64():
    """The error of a moment, which leaves nothing behind."""
    x = jnp.ones((3, 4), "float64")
    with jax.enable_x64(False), pytest.raises(TypeError, match=r"x is float64\[3,4\].*jax_enable_x64"):
        jln.layer_norm(x)
    assert jln.layer_norm(x).dtype == "float64"
    with jax.enable_x64(False):
        assert jln.layer_norm(jnp.ones((3, 4))).dtype == "float32"
