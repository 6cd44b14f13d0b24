"""The calls of all frameworks' modules: by the operators, or by the framework's own code.

A module is its framework's class with another call. It puts its arguments and parameters in the operators' terms, or
says in a few words why the framework's own code must run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jln import _checks
from jln._junction.arrays import Arrays
from jln._operators.call import NormArguments, call, summands
from jln._operators.eight_bits import Quantize, Scaled
from jln._routes import note


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
    several: whether the result is a tuple.
    dtype: that of the products. None: that to which the norm's result and the parameters promote.
    """

    kernels: Sequence[Any]
    biases: Sequence[Any]
    several: bool
    dtype: Any = None
    precision: Any = None


class Layer(NamedTuple):
    """A norm, or a norm and the Linears behind it. The norm is of total, which is x or the sum of x and a residual.

    module: the framework's object.
    own: the framework's own code, a function of total.
    read_norm, read_linears: functions of what has total's shape and dtype. They put the layer in the operators' terms,
      or return the reason why they cannot. A norm alone has no read_linears.
    in_init: whether the parameters are to be made, which the framework's own code does.
    """

    module: Any
    own: Callable[[Any], Any]
    read_norm: Callable[[Any], Norm | str]
    read_linears: Callable[[Any], Linears | str] | None = None
    in_init: bool = False

    def call(self, x: Any, residual: Any, quantize: Quantize = None) -> Any:
        """Compute `y`, or with a residual `(y, total)`: by the operators, which add up for themselves, or by own."""
        like = x  # in which the framework finds what is wrong
        if residual is not None:
            x, residual = _checks.array("x", x), _checks.array("residual", residual)
            _checks.shape("residual", residual, x.shape, "that of x")
            like = jax.ShapeDtypeStruct(x.shape, _checks.promote(x.dtype, residual.dtype))
        terms = _read(self, like) if isinstance(x, _ARRAY) else f"x is a {type(x).__name__}, not an array"
        if not isinstance(terms, str):
            y, total = _by_operator(*terms, summands(x, residual), quantize)
            note(_name(self), "fused" if self.read_linears else "norm", "all arguments are the operator's", total)
            return y if residual is None else (y, total)
        total = x if residual is None else x.astype(like.dtype) + residual.astype(like.dtype)
        if self.in_init and quantize is not None:
            self.own(total)  # makes the parameters that the operators read: their result alone is in eight bits
            return self._replace(in_init=False).call(x, residual, quantize)
        if quantize is not None:
            raise ValueError(f"quantize={quantize!r} is of jln's operators, which cannot compute this call: {terms}")
        note(_name(self), "plain", terms, total)
        y = self.own(total)
        return y if residual is None else (y, total)


def is_last(axes: int | Iterable[int] | slice, x: jax.Array) -> bool:
    """Tell whether axes, as Flax and Haiku take them, are the last axis of x alone."""
    return (tuple(axes) if isinstance(axes, Iterable) else (axes,)) in ((-1,), (x.ndim - 1,))


def linear_sizes(features: Any, name: str) -> dict[str, Any]:
    """The Linears' sizes by name: one of this name, or several of a mapping. Raises ValueError for what is neither."""
    sizes = dict(features) if isinstance(features, Mapping) else {name: features}
    if not sizes or any(isinstance(n, Mapping) for n in sizes.values()):
        mend = "for one with arguments of its own write the framework's layers, and jln.fuse(loss, linears=True)"
        raise ValueError(f"a Linear has a number of features or a tuple, several a mapping; got {features!r}: {mend}")
    return sizes


def in_turn(norm: Callable[[Any], Any], linears: Sequence[Callable[[Any], Any]], several: bool) -> Callable[[Any], Any]:
    """Return a function that calls a norm and then the Linears, whose result is a tuple if they are several."""

    def own(x: Any) -> Any:
        z = norm(x)
        ys = tuple(linear(z) for linear in linears)
        return ys if several else ys[0]

    return own


_ARRAY = jax.Array | np.ndarray
_FLOAT32_MAX = float(np.finfo("float32").max)


def _name(layer: Layer) -> str:
    """The name under which `explain` lists a layer: jln's class, be it a base of the user's."""
    cls = next(c for c in type(layer.module).__mro__ if c.__module__.startswith("jln."))
    return f"{cls.__module__}.{cls.__name__}"


def _by_operator(norm: Norm, linears: Linears | None, arrays: Arrays, quantize: Quantize) -> tuple[Any, Any]:
    """The result and total. As the frameworks' layers, they can be differentiated forward; not so in eight bits."""
    options: dict[str, Any] = {"quantize": quantize, "forward_mode": quantize is None}
    if linears is not None:
        arrays = arrays._replace(
            kernel=tuple(jnp.asarray(a, norm.dtype) for a in linears.kernels),
            bias=tuple(None if a is None else jnp.asarray(a, norm.dtype) for a in linears.biases),
        )
        options["precision"] = linears.precision
    results = call(
        arrays._replace(scale=norm.scale, offset=norm.offset),
        NormArguments(norm.subtract_mean, -1, norm.epsilon, dtype=norm.dtype if linears is None else None),
        gives_total=arrays.residual is not None,
        **options,
    )
    y = results.y if linears is None or linears.several else results.y[0]
    y = y if results.y_max is None else Scaled(y, results.y_max)
    return y, arrays.x if arrays.residual is None else results.total


def _read(layer: Layer, x: Any) -> tuple[Norm, Linears | None] | str:
    """Read a layer that reads x, dtypes included, or return the reason why the operators cannot compute it."""
    if layer.in_init:
        return "the framework's own code makes the parameters"
    norm = _read_norm(layer, x)
    if isinstance(norm, str):
        return norm
    if layer.read_linears is None:
        return norm, None
    linears = layer.read_linears(x)
    if isinstance(linears, str):
        return linears
    parameters = [a for a in (*linears.kernels, *linears.biases) if a is not None]
    if not all(isinstance(a, _ARRAY) for a in parameters):
        return "a Linear has parameters that are no arrays"
    product = jnp.dtype(linears.dtype or _checks.promote(norm.dtype, *(a.dtype for a in parameters)))
    if norm.dtype != product or _checks.promote(x.dtype, product) != product:
        return f"one operator would round differently: x is {x.dtype}, the norm {norm.dtype}, the product {product}"
    return norm, linears


def _read_norm(layer: Layer, x: Any) -> Norm | str:
    """Read the norm of x, with the dtype of its result, or return the reason why the operators cannot compute it."""
    if x.size == 0 or x.ndim == 0 or jax.dtypes.canonicalize_dtype(x.dtype) not in _checks.DTYPES:
        return f"x is {x.dtype}{list(x.shape)}"
    norm = layer.read_norm(x)
    if isinstance(norm, str):
        return norm
    if type(norm.epsilon) not in (int, float) or not 0 <= norm.epsilon <= _FLOAT32_MAX:
        return f"epsilon is {norm.epsilon!r}, not a Python number from 0 to float32's largest"
    parameters = [a for a in (norm.scale, norm.offset) if a is not None]
    if not all(isinstance(a, _ARRAY) and a.shape == x.shape[-1:] for a in parameters):
        return f"a parameter is not an array of shape {x.shape[-1:]}"
    dtypes = [jax.dtypes.canonicalize_dtype(a.dtype) for a in (x, *parameters)]
    dtypes.append(jax.dtypes.canonicalize_dtype(norm.dtype or _checks.promote(*dtypes)))
    if not {*dtypes} <= {*_checks.DTYPES}:
        return f"the norm has the dtypes {', '.join(d.name for d in dtypes)}"
    if jnp.float64 in dtypes and not dtypes[0] == dtypes[-1] == jnp.float64:
        return "some of it is float64, and x or the result is not: the operators would lose digits"
    return norm._replace(dtype=dtypes[-1])
