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


def _describe(a: Any) -> str:
    return f"{a.dtype.name}[{','.join(map(str, a.shape))}]"


def array(name: str, value: Any) -> jax.Array:
    """`value` as a JAX array of a supported dtype: a JAX or NumPy array, or an object with `__jax_array__`."""
    if isinstance(value, jax.Array) and value.dtype in DTYPES:  # at once: an eager call takes no longer than its checks
        if value.dtype == jnp.float64 and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            raise TypeError(f"{name} is {_describe(value)}, made while jax_enable_x64 was on; now it is off")
        return value
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        return array(name, value.__jax_array__())
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise TypeError(f"{name} must be an array; got {type(value).__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must be an array without a mask; got {_describe(value)} with one: {name}.filled(...)")
    if value.dtype not in DTYPES:  # before JAX sees it, which cannot hold all that NumPy can
        expected = ", ".join(d.name for d in DTYPES)
        foreign = "" if getattr(value.dtype, "isnative", True) else " in another byte order than this machine's"
        raise TypeError(f"{name} must have one of the dtypes {expected}; got {_describe(value)}{foreign}")
    return jnp.asarray(value)


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
        raise ValueError(f"{name} must have shape {expected}, {why}; got {_describe(value)}")


def parameter(
    name: str, value: Any, x: jax.Array, axes: tuple[int, ...], normalised: tuple[int, ...], may_be_rows: bool = False
) -> Any:
    """`value` as an array of shape `normalised`, or of x's rank with 1 or x's size on every other axis than `axes`.

    Raises ValueError for any other shape. normalised: the shape of x's normalised axes. may_be_rows: whether it may
    have 1 on all of these, too.
    """
    if value is None:
        return None
    value = array(name, value)
    of_axes = (normalised, (1,) * len(axes)) if may_be_rows else (normalised,)
    varies_over_x = value.ndim == x.ndim and all(n in (1, size) for n, size in zip(value.shape, x.shape, strict=True))
    if value.shape != normalised and not (varies_over_x and tuple(value.shape[a] for a in axes) in of_axes):
        rows = f" and on all of {axes} together" if may_be_rows else ""
        expected = f"{normalised}, that of x's axes {axes}, or x's rank, with 1 or x's size on every other axis{rows}"
        raise ValueError(f"{name} must have shape {expected}; got {_describe(value)} for x {_describe(x)}")
    return value


def gate(value: Any, x: jax.Array, residual: jax.Array | None, axes: tuple[int, ...]) -> jax.Array | None:
    """`value` as an array: of the shapes that a parameter may have, or of x's rank with 1 on the normalised axes.

    A number, static or an array, becomes an array of x's rank with 1 everywhere; a static one is in the dtype of the
    sum.
    """
    if is_number(value):
        dtype = promote(jnp.dtype("float32"), *(a.dtype for a in (x, residual) if a is not None))
        if not abs(np.asarray(value).item()) <= float(np.finfo(dtype).max):  # Python numbers have no overflow
            raise ValueError(f"gate must be a number that {dtype} holds; got {value}")
        return jnp.full((1,) * x.ndim, value, dtype)
    value = optional_array("gate", value)
    if value is not None and value.ndim == 0:
        return value.reshape((1,) * x.ndim)
    return parameter("gate", value, x, axes, tuple(x.shape[a] for a in axes), may_be_rows=True)


def promote(*dtypes: Any) -> Any:
    """The dtype to which `dtypes` promote in JAX's own mode, the documented one, whatever mode the user has set."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


def linears(kernel: Any, bias: Any, x: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array | None, ...]]:
    """The kernels and biases of one Linear or of a tuple of them, as tuples of arrays."""
    if not isinstance(kernel, tuple):
        kernel, bias = _linear(kernel, bias, x)
        return (kernel,), (bias,)
    if not kernel:
        raise ValueError("kernel must have at least one array; got ()")
    bias = (None,) * len(kernel) if bias is None else bias
    if not isinstance(bias, tuple):
        raise TypeError(f"bias must be None or a tuple of arrays and Nones, as kernel is; got {type(bias).__name__}")
    if len(bias) != len(kernel):
        raise ValueError(f"bias must have an array or None for each of {len(kernel)} kernels; got {len(bias)}")
    pairs = [_linear(k, b, x, f"[{i}]") for i, (k, b) in enumerate(zip(kernel, bias, strict=True))]
    return tuple(k for k, _ in pairs), tuple(b for _, b in pairs)


def _linear(kernel: Any, bias: Any, x: jax.Array, index: str = "") -> tuple[jax.Array, jax.Array | None]:
    """The kernel and the bias of one Linear. index: of both in their tuples, for messages."""
    kernel, bias = array(f"kernel{index}", kernel), optional_array(f"bias{index}", bias)
    if kernel.ndim < 2 or kernel.shape[0] != x.shape[-1]:
        expected = f"({x.shape[-1]}, *features), its first axis as long as x's last, with one axis of features or more"
        raise ValueError(f"kernel{index} must have shape {expected}; got {_describe(kernel)} for x {_describe(x)}")
    shape(f"bias{index}", bias, kernel.shape[1:], f"that of kernel{index}'s axes after the first")
    return kernel, bias


def axes(axis: Any, x: jax.Array) -> tuple[int, ...]:
    """`axis` as a tuple of non-negative ints, in the order given."""
    if x.ndim == 0:
        raise ValueError("x must have at least one axis; got a scalar")
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if not given:
        raise ValueError("axis must name at least one axis; got ()")
    try:
        indices = [operator.index(a) for a in given if not isinstance(a, bool | jax.Array)]
    except TypeError:
        indices = []
    if len(indices) < len(given):
        raise TypeError(f"axis must be a static int or tuple of ints; got {axis!r}")
    if outside := [i for i in indices if not -x.ndim <= i < x.ndim]:
        raise ValueError(f"axis {outside[0]} is out of range for x of shape {x.shape}")
    result = tuple(i % x.ndim for i in indices)
    if len(set(result)) != len(result):
        raise ValueError(f"axis names an axis of x twice: {axis!r} for x of shape {x.shape}")
    if any(x.shape[a] == 0 for a in result):
        raise ValueError(f"x must have elements to normalise: axis {axis!r} of shape {x.shape} is empty")
    return result


def is_number(value: Any) -> bool:
    """True for a real number of Python, of NumPy or of ml_dtypes; False for a bool and for anything traced."""
    if isinstance(value, np.generic):
        return isinstance(value, np.integer) or jnp.issubdtype(value.dtype, jnp.floating)
    return isinstance(value, int | float) and not isinstance(value, bool)


def epsilon(value: Any, *dtypes: Any) -> float:
    """`value` as a float that is not negative and fits the arithmetic. Raises TypeError or ValueError for any other.

    dtypes: those of the array that is normalised, or of all that are added up to it.
    """
    if not is_number(value):
        kind = type(value).__name__
        raise TypeError(f"epsilon must be a static Python or NumPy number; got {value!r} of type {kind}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond float's range
        number = math.inf
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"epsilon must be finite and not negative; got {value}")
    largest = float(np.finfo(np.float32).max)
    if number > largest and jnp.dtype("float64") not in dtypes:
        limit = f"the largest float32, in which {' + '.join(d.name for d in dtypes)} is normalised"
        raise ValueError(f"epsilon must be at most {largest:.8g}, {limit}; got {value}")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a static bool; got {value!r}")
    return bool(value)


def precision(value: Any) -> Any:
    """A hashable precision that means what `value` means to `jax.lax.dot_general`; for None JAX's current default."""
    default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return _canonical_precision(tuple(value) if isinstance(value, list) else value, default)


@functools.lru_cache(maxsize=256)
def _canonical_precision(value: Any, default: str | None) -> Any:
    del default  # read by JAX itself
    one = jax.ShapeDtypeStruct((1,), "float32")
    (product,) = jax.make_jaxpr(lambda a, b: jax.lax.dot(a, b, precision=value))(one, one).eqns
    return product.params["precision"]


def implementation(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value in ("triton", "xla")):
        raise ValueError(f"implementation must be None, 'triton' or 'xla'; got {value!r}")
    return value
