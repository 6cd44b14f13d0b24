"""Checks of the operators' arguments.

Every error is raised while tracing, names the argument and says what was expected.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = tuple(jnp.dtype(name) for name in ("float16", "bfloat16", "float32", "float64"))
IMPLEMENTATIONS = (None, "triton", "xla")


def _described(a: Any) -> str:
    return f"{a.dtype.name}[{','.join(map(str, a.shape))}]"


def array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array of a supported dtype: a JAX or NumPy array, or an object with `__jax_array__`."""
    if isinstance(value, jax.Array) and value.dtype in DTYPES:  # at once: an eager call takes no longer than its checks
        if value.dtype == jnp.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            raise TypeError(f"{name} is {_described(value)}, made while jax_enable_x64 was on; now it is off")
        return value
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        return array(name, value.__jax_array__())
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name} must be an array; got {type(value).__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be an array without a mask; got {_described(value)} with one: {name}.filled(...)")
    if value.dtype not in DTYPES:  # before JAX sees it, which cannot hold all that NumPy can
        expected = ", ".join(d.name for d in DTYPES)
        raise TypeError(
            f"{name} must have one of the dtypes {expected}; got {_described(value)}{_foreign(name, value)}"
        )
    return jnp.asarray(value)


def _foreign(name: str, value: jax.Array | np.ndarray | np.generic) -> str:
    """A hint for an array of a supported dtype in another byte order than this machine's; "" for any other."""
    dtype = value.dtype
    if getattr(dtype, "isnative", True) or dtype.newbyteorder("=") not in DTYPES:
        return ""
    return f" in another byte order than this machine's: {name}.astype({dtype.name!r})"


def dtype(value: Any, default: Any) -> str:
    """The name of the dtype asked for, as JAX has it; for None the name of `default`."""
    if value is None:
        return default.name
    try:
        asked = jax.dtypes.canonicalize_dtype(value) if value is float else jnp.dtype(value)
    except TypeError:
        raise TypeError(f"dtype must be a dtype or None; got {value!r}") from None
    if asked not in DTYPES:
        raise TypeError(f"dtype must be one of {', '.join(d.name for d in DTYPES)}, or None; got {asked.name}")
    if asked == jnp.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise TypeError("dtype is float64, which needs jax_enable_x64")
    return asked.name


def optional_array(name: str, value: Any) -> jax.Array | None:
    return None if value is None else array(name, value)


def shape(name: str, value: jax.Array | None, expected: tuple[int, ...], why: str) -> None:
    if value is not None and value.shape != expected:
        raise ValueError(f"{name} must have shape {expected}, {why}; got {_described(value)}")


def parameter(name: str, value: Any, x: jax.Array, axes: tuple[int, ...], normalised: tuple[int, ...]) -> Any:
    """`value` as an array of shape `normalised`, or of x's rank with 1 or x's size on every other axis than `axes`.

    Raises ValueError for any other shape. normalised: the shape of x's normalised axes.
    """
    if value is None:
        return None
    value = array(name, value)
    if value.shape != normalised and not _varies_over_x(value, x, axes, (normalised,)):
        raise ValueError(
            f"{name} must have shape {normalised}, that of x's axes {axes}, or x's rank, with 1 or x's size on every "
            f"other axis; got {_described(value)} for x {_described(x)}"
        )
    return value


def gate(value: Any, x: jax.Array, residual: jax.Array | None, axes: tuple[int, ...]) -> jax.Array | None:
    """`value` as an array: of the shapes that a parameter may have, or of x's rank with 1 on the normalised axes.

    A number, static or an array, becomes an array of x's rank with 1 everywhere; a static one is in the dtype of the
    sum.
    """
    if is_number(value) and not isinstance(value, bool):
        is_wide = any(a is not None and a.dtype == jnp.float64 for a in (x, residual))
        dtype = np.dtype("float64" if is_wide else "float32")
        if not abs(value) <= float(np.finfo(dtype).max):
            raise ValueError(f"gate must be a number that {dtype} holds; got {value}")
        return jnp.full((1,) * x.ndim, value, dtype)
    if value is None:
        return None
    value = array("gate", value)
    if value.ndim == 0:
        return value.reshape((1,) * x.ndim)
    normalised = tuple(x.shape[a] for a in axes)
    if value.shape != normalised and not _varies_over_x(value, x, axes, (normalised, (1,) * len(axes))):
        raise ValueError(
            f"gate must be a number, have shape {normalised}, that of x's axes {axes}, or x's rank, with 1 or x's size "
            f"on every other axis and on all of {axes} together; got {_described(value)} for x {_described(x)}"
        )
    return value


def promoted(*dtypes: Any) -> Any:
    """The dtype to which `dtypes` promote in JAX's own mode, the documented one, whatever mode the user has set."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def _varies_over_x(value: jax.Array, x: jax.Array, axes: tuple[int, ...], of_axes: tuple[tuple[int, ...], ...]) -> bool:
    """True where `value` has x's rank, 1 or x's size on every axis, and on `axes` one of the shapes `of_axes`."""
    if value.ndim != x.ndim or not all(n in (1, of) for n, of in zip(value.shape, x.shape, strict=True)):
        return False
    return tuple(value.shape[a] for a in axes) in of_axes


def linears(kernel: Any, bias: Any, x: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
    """The kernels and biases of one Linear or of a tuple of them, as tuples of arrays."""
    if not isinstance(kernel, tuple):
        if isinstance(kernel, list):
            raise TypeError("kernel must be an array; got list (several Linears are a tuple of arrays)")
        if isinstance(bias, tuple | list):
            raise TypeError(f"bias must be an array; got {type(bias).__name__}, where kernel is one array")
        kernel = _kernel("kernel", kernel, x)
        return (kernel,), (_bias("bias", bias, "kernel", kernel),)
    if not kernel:
        raise ValueError("kernel must have at least one array; got ()")
    if bias is None:
        bias = (None,) * len(kernel)
    if not isinstance(bias, tuple):
        got = _described(bias) if hasattr(bias, "dtype") else type(bias).__name__
        raise TypeError(f"bias must be None or a tuple of arrays and Nones, as kernel is a tuple; got {got}")
    if len(bias) != len(kernel):
        raise ValueError(f"bias must have an array or None for each of {len(kernel)} kernels; got {len(bias)}")
    kernels = tuple(_kernel(f"kernel[{i}]", k, x) for i, k in enumerate(kernel))
    pairs = enumerate(zip(bias, kernels, strict=True))
    return kernels, tuple(_bias(f"bias[{i}]", b, f"kernel[{i}]", k) for i, (b, k) in pairs)


def _kernel(name: str, value: Any, x: jax.Array) -> jax.Array:
    value = array(name, value)
    if value.ndim < 2 or value.shape[0] != x.shape[-1]:
        expected = f"({x.shape[-1]}, *features), its first axis as long as x's last, with one axis of features or more"
        raise ValueError(f"{name} must have shape {expected}; got {_described(value)} for x {_described(x)}")
    return value


def _bias(name: str, value: Any, of: str, kernel: Any) -> jax.Array | None:
    value = optional_array(name, value)
    shape(name, value, kernel.shape[1:], f"that of {of}'s axes after the first")
    return value


def axes(axis: Any, x: jax.Array) -> tuple[int, ...]:
    """`axis` as a tuple of non-negative ints, in the order given."""
    if x.ndim == 0:
        raise ValueError("x must have at least one axis; got a scalar")
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if not given:
        raise ValueError("axis must name at least one axis; got ()")
    result = []
    for a in given:
        if isinstance(a, bool | jax.Array):
            raise TypeError(f"axis must be a static int or tuple of ints; got {axis!r}")
        try:
            index = operator.index(a)
        except TypeError:
            raise TypeError(f"axis must be a static int or tuple of ints; got {axis!r}") from None
        if not -x.ndim <= index < x.ndim:
            raise ValueError(f"axis {index} is out of range for x of shape {x.shape}")
        result.append(index % x.ndim)
    if len(set(result)) != len(result):
        raise ValueError(f"axis names an axis of x twice: {axis!r} for x of shape {x.shape}")
    if any(x.shape[a] == 0 for a in result):
        raise ValueError(f"x must have elements to normalise: axis {axis!r} of shape {x.shape} is empty")
    return tuple(result)


def is_number(value: Any) -> bool:
    """True for a real number of Python, of NumPy or of ml_dtypes; False for anything traced."""
    return isinstance(value, int | float) or (
        isinstance(value, np.generic) and (isinstance(value, np.integer) or jnp.issubdtype(value.dtype, jnp.floating))
    )


def too_large(epsilon: float, *dtypes: Any) -> str | None:
    """A message where epsilon exceeds the dtype in which arrays of `dtypes`, or their sum, are normalised, or None."""
    if epsilon <= _FLOAT32_MAX or jnp.dtype("float64") in dtypes:
        return None
    given = " + ".join(d.name for d in dtypes)
    return f"epsilon must be at most {_FLOAT32_MAX:.8g}, the largest float32, in which {given} is normalised"


_FLOAT32_MAX = float(np.finfo(np.float32).max)


def epsilon(value: Any, *dtypes: Any) -> float:
    """`value` as a float that is not negative and fits the arithmetic. Raises TypeError or ValueError for any other.

    dtypes: those of the array that is normalised, or of all that are added up to it.
    """
    if isinstance(value, bool) or not is_number(value):
        raise TypeError(
            f"epsilon must be a static Python or NumPy number; got {value!r} of type {type(value).__name__}"
        )
    try:
        number = float(value)
    except OverflowError:  # an int beyond float's range
        number = math.inf
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"epsilon must be finite and not negative; got {value}")
    if (fault := too_large(number, *dtypes)) is not None:
        raise ValueError(f"{fault}; got {value}")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a static bool; got {value!r}")
    return bool(value)


def precision(value: Any) -> Any:
    """A hashable precision that means what `value` means to `jax.lax.dot_general`; for None JAX's current default."""
    default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if value is None and default is None:
        return None
    try:
        return _canonical_precision(value, default)
    except TypeError:  # a list cannot be remembered
        return _canonical_precision.__wrapped__(value, default)


@functools.lru_cache(maxsize=256)
def _canonical_precision(value: Any, default: str | None) -> Any:
    del default  # read by JAX itself
    one = jax.ShapeDtypeStruct((1,), "float32")
    (product,) = jax.make_jaxpr(lambda a, b: jax.lax.dot(a, b, precision=value))(one, one).eqns
    return product.params["precision"]


def implementation(value: Any) -> str | None:
    if not (value is None or isinstance(value, str)) or value not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be None, 'triton' or 'xla'; got {value!r}")
    return value
