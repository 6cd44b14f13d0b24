"""The calls of all frameworks' modules: by the operators, or by the framework's own code.

A module is its framework's class with another call. It puts its arguments and parameters in the operators' terms, or
says in a few words why the framework's own code must run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jln import _checks
from jln._explain import note
from jln._junction.arrays import Arrays
from jln._operators.call import NormArguments, call, summands
from jln._operators.eight_bits import Quantize, Scaled


class Norm(NamedTuple):
    """A norm over the last axis in the operators' terms.

    scale, offset: `[H]`, or None.
    dtype: that of the result. None: that to which x and the parameters promote.
    """

    scale: Any
    offset: Any
    epsilon: Any
    subtract_mean: bool
    dtype: Any = None


class Linears(NamedTuple):
    """The Linears behind a norm in the operators' terms.

    kernels: `[H, *features]` each.
    biases: `features` each, or None.
    dtype: that of the products. None: that to which the norm's result and the parameters promote.
    """

    kernels: Sequence[Any]
    biases: Sequence[Any]
    dtype: Any = None
    precision: Any = None


# A reader of a layer: it takes x, and puts the layer in the operators' terms, or returns the reason why it cannot.
ReadNorm = Callable[[Any], Norm | str]
ReadLinears = Callable[[Any], Linears | str]


def is_last(axes: int | Iterable[int] | slice, x: jax.Array) -> bool:
    """Tell whether axes, as Flax and Haiku take them, are the last axis of x alone."""
    return (tuple(axes) if isinstance(axes, Iterable) else (axes,)) in ((-1,), (x.ndim - 1,))


def norm(name: str, x: Any, residual: Any, read: ReadNorm, own: Callable[[Any], Any], *, in_init: bool = False) -> Any:
    """Compute the call of a norm: `y`, or with a residual `(y, total)` of the norm of `total = x + residual`.

    name: the module's, as `explain` lists it.
    read: reads the norm of total.
    own: the framework's own code, a function of total.
    in_init: whether the parameters are to be made, which the framework's own code does.
    """
    total = _sum(x, residual)
    terms = "the framework's own code makes the parameters" if in_init else _read_norm(total, read)
    if isinstance(terms, str):
        note(name, "plain", terms, total)
        y = own(total)
    else:
        note(name, "norm", _WHOLE, total)
        results = _results(terms, summands(x, residual), forward_mode=True)
        y, total = results.y, results.total
    return y if residual is None else (y, total)


def norm_and_linears(
    name: str,
    x: Any,
    residual: Any,
    quantize: Quantize,
    layers: tuple[Callable[[Any], Any], Sequence[Callable[[Any], Any]]],
    read_norm: ReadNorm,
    read_linears: ReadLinears,
    *,
    several: bool,
    in_init: bool = False,
) -> Any:
    """Compute the call of a norm and the Linears behind it: `y`, or with a residual `(y, total)`.

    layers: the framework's own, the norm and the Linears, to be called where the operators cannot compute the call.
    several: whether `y` is a tuple.
    in_init: whether the layers must be called to make their parameters.
    """
    total = _sum(x, residual)

    def by_layers() -> Any:
        norm, linears = layers
        z = norm(total)
        ys = tuple(linear(z) for linear in linears)
        return ys if several else ys[0]

    if in_init:
        by_layers()
    terms = _read_pair(total, read_norm, read_linears)
    if isinstance(terms, str):
        if quantize is not None:
            raise ValueError(f"quantize={quantize!r} is of jln's operators, which cannot compute this call: {terms}")
        note(name, "plain", terms, total)
        y = by_layers()
    else:
        note(name, "fused", _WHOLE, total)
        norm, linears = terms
        arrays = summands(x, residual)._replace(
            kernel=tuple(jnp.asarray(a, norm.dtype) for a in linears.kernels),
            bias=tuple(None if a is None else jnp.asarray(a, norm.dtype) for a in linears.biases),
        )
        options = {"precision": linears.precision, "quantize": quantize, "forward_mode": quantize is None}
        results = _results(norm, arrays, **options)
        y = results.y if several else results.y[0]
        y = y if results.y_max is None else Scaled(y, results.y_max)
        total = results.total
    return y if residual is None else (y, total)


_WHOLE = "all arguments are the operator's"
_ARRAY = jax.Array | np.ndarray
_FLOAT32_MAX = float(np.finfo("float32").max)


def _sum(x: Any, residual: Any) -> Any:
    """The array that is normalised. Without a residual it is x, in which the framework finds what is wrong.

    The operators add up for themselves. A sum that nothing reads is not in a compiled program.
    """
    if residual is None:
        return x
    x, residual = _checks.array("x", x), _checks.array("residual", residual)
    _checks.shape("residual", residual, x.shape, "that of x")
    dtype = _checks.promoted(x.dtype, residual.dtype)
    return x.astype(dtype) + residual.astype(dtype)


def _results(norm: Norm, arrays: Arrays, **options: Any) -> Arrays:
    """The results of the operator. The frameworks' layers can be differentiated forward, so it is asked for that."""
    return call(
        arrays._replace(scale=norm.scale, offset=norm.offset),
        NormArguments(norm.subtract_mean, -1, norm.epsilon, dtype=None if arrays.kernel else norm.dtype),
        gives_total=arrays.residual is not None,
        **options,
    )


def _read_norm(x: Any, read: ReadNorm) -> Norm | str:
    """Read the norm of x, with the dtype of its result, or return the reason why the operators cannot compute it."""
    if not isinstance(x, _ARRAY):
        return f"x is a {type(x).__name__}, not an array"
    if x.size == 0 or x.ndim == 0 or jax.dtypes.canonicalize_dtype(x.dtype) not in _checks.DTYPES:
        return f"x is {x.dtype}{list(x.shape)}"
    norm = read(x)
    if isinstance(norm, str):
        return norm
    if type(norm.epsilon) not in (int, float) or not 0 <= norm.epsilon <= _FLOAT32_MAX:
        return f"epsilon is {norm.epsilon!r}, not a Python number from 0 to float32's largest"
    parameters = [a for a in (norm.scale, norm.offset) if a is not None]
    if not all(isinstance(a, _ARRAY) and a.shape == x.shape[-1:] for a in parameters):
        return f"a parameter is not an array of shape {x.shape[-1:]}"
    dtypes = [jax.dtypes.canonicalize_dtype(a.dtype) for a in (x, *parameters)]
    dtypes.append(jax.dtypes.canonicalize_dtype(norm.dtype or _checks.promoted(*dtypes)))
    if not {*dtypes} <= {*_checks.DTYPES}:
        return f"the norm has the dtypes {', '.join(d.name for d in dtypes)}"
    if jnp.float64 in dtypes and not dtypes[0] == dtypes[-1] == jnp.float64:
        return "some of it is float64, and x or the result is not: the operators would lose digits"
    return norm._replace(dtype=dtypes[-1])


def _read_pair(x: Any, read_norm: ReadNorm, read_linears: ReadLinears) -> tuple[Norm, Linears] | str:
    """Read a norm of x and the Linears behind it, or return the reason why they cannot be one operator."""
    norm = _read_norm(x, read_norm)
    linears = norm if isinstance(norm, str) else read_linears(x)
    if isinstance(norm, str) or isinstance(linears, str):
        return str(linears)
    parameters = [a for a in (*linears.kernels, *linears.biases) if a is not None]
    if not all(isinstance(a, _ARRAY) for a in parameters):
        return "a Linear has parameters that are no arrays"
    product = jnp.dtype(linears.dtype or _checks.promoted(norm.dtype, *(a.dtype for a in parameters)))
    if norm.dtype != product or _checks.promoted(x.dtype, product) != product:
        return f"one operator would round differently: x is {x.dtype}, the norm {norm.dtype}, the product {product}"
    return norm, linears
