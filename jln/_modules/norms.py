"""A framework's norm and Linears in the operators' terms, before anything is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jln import _checks
from jln._junction.arrays import Arrays
from jln._operators.call import call
from jln._operators.eight_bits import Quantize


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A norm, ready for the operators.

    scale, offset: of x's rank, with 1 on the axes that are not normalised; or None.
    axes: not negative, ascending.
    dtype: of the result.
    """

    x: jax.Array
    scale: jax.Array | None
    offset: jax.Array | None
    axes: tuple[int, ...]
    epsilon: float
    subtract_mean: bool
    dtype: jnp.dtype

    def with_parameters(self, scale: jax.Array | None, offset: jax.Array | None) -> Prepared:
        """The norm with its parameters in place of stand-ins of the same sizes."""
        pairs = ((scale, self.scale), (offset, self.offset))
        scale, offset = (None if a is None or like is None else a.reshape(like.shape) for a, like in pairs)
        return dataclasses.replace(self, scale=scale, offset=offset)

    def value(self, read: Arrays) -> Arrays:
        """The norm's results for `read`: x, or x and a residual.

        A module's dtype may be wider than x's (bfloat16 x, float32 parameters) or narrower; the result is still rounded
        once. The frameworks' own layers can be differentiated in forward mode, so these can.
        """
        return call(
            self._with_own(read),
            subtract_mean=self.subtract_mean,
            axis=self.axes,
            epsilon=self.epsilon,
            dtype=self.dtype,
            forward_mode=True,
        )

    def linears(self, linears: Sequence[Linear], read: Arrays, quantize: Quantize) -> Arrays:
        """The products of the norm of `read` and the Linears, as one operator; of a residual with the total.

        The caller has checked that nothing keeps them from being one.
        """
        return call(
            self._with_own(read)._replace(
                kernel=tuple(a.kernel.astype(self.dtype) for a in linears),
                bias=tuple(None if a.bias is None else a.bias.astype(self.dtype) for a in linears),
            ),
            subtract_mean=self.subtract_mean,
            epsilon=self.epsilon,
            precision=linears[0].precision,
            quantize=quantize,
            forward_mode=quantize is None,
        )

    def _with_own(self, read: Arrays) -> Arrays:
        return read._replace(scale=self._parameter(self.scale), offset=self._parameter(self.offset))

    def _parameter(self, a: jax.Array | None) -> jax.Array | None:
        """A parameter in the shape of the normalised axes."""
        if a is None:
            return None
        normalised_shape = tuple(self.x.shape[i] for i in self.axes)
        a = a.reshape([a.shape[i] for i in self.axes])
        if a.shape != normalised_shape:  # its gradient is a sum, which 16 bits would round again and again
            a = jnp.broadcast_to(a.astype(jnp.promote_types(a.dtype, jnp.float32)), normalised_shape)
        return a

    def linear_obstacle(self, linear: Linear) -> str | None:
        """The reason why a Linear cannot be one operator with the norm; None where it can."""
        if self.axes != (self.x.ndim - 1,):
            return "the norm is not over the last axis"
        if linear.kernel.ndim < 2 or linear.kernel.shape[0] != self.x.shape[-1]:
            return "the kernel does not have the shape that the last axis asks for"
        product_dtype = jnp.dtype(linear.dtype)
        if self.dtype != product_dtype or jnp.promote_types(self.x.dtype, product_dtype) != product_dtype:
            dtypes = f"x is {self.x.dtype}, the norm's result {self.dtype}, the product {product_dtype}"
            return f"{dtypes}: one operator would round differently"
        return None


class Linear(NamedTuple):
    """A Linear in the operators' terms.

    dtype: that in which it multiplies.
    """

    kernel: jax.Array
    bias: jax.Array | None
    dtype: Any
    precision: Any


Parameter = jax.Array | np.ndarray | jax.ShapeDtypeStruct


def prepare(
    x: Any,
    scale: Parameter | None,
    offset: Parameter | None,
    *,
    axes: Sequence[int],
    parameter_axes: Sequence[int] | None = None,
    epsilon: Any,
    subtract_mean: bool,
    y_dtype: Any,
) -> Prepared | str:
    """The norm of `x` in the operators' terms, or the reason why they cannot compute it.

    scale, offset: where they are not known yet, their shapes and dtypes, to be replaced by `with_parameters`.
    axes: the normalised axes, in any order, negative ones counted from the end. What is wrong with them, or with any
      other argument, is for the framework to say.
    parameter_axes: the axes over which the parameters are spread, in ascending order. None: they broadcast against x.
    """
    if not isinstance(x, jax.Array | np.ndarray):
        return f"x is a {type(x).__name__}, not an array"
    x = jnp.asarray(x)
    if x.size == 0:
        return "x is empty"
    positive = sorted({a + x.ndim if a < 0 else a for a in axes})
    if not positive or not all(0 <= a < x.ndim for a in positive):
        return f"x of shape {x.shape} has no axes {tuple(axes)}"
    if not _checks.is_number(epsilon) or not 0 <= epsilon < math.inf:
        return f"epsilon is {epsilon!r}, not a static number that is finite and not negative"
    if (fault := _checks.too_large(float(epsilon), x.dtype)) is not None:
        return fault
    spread: dict[str, Any] = {"scale": scale, "offset": offset}
    for name, a in spread.items():
        if a is None:
            continue
        shape = _shape_against(x.shape, a.shape, parameter_axes)
        if shape is None:
            return f"{name} of shape {a.shape} does not fit x of shape {x.shape}"
        if any(shape[i] != 1 for i in range(x.ndim) if i not in positive):
            return f"{name} varies along axes that are not normalised"
        spread[name] = _reshaped(a, shape)
    dtypes = [jnp.dtype(d) for d in (x.dtype, y_dtype, *(a.dtype for a in spread.values() if a is not None))]
    for dtype in dtypes:
        if dtype not in _checks.DTYPES or dtype != jax.dtypes.canonicalize_dtype(dtype):
            return f"{dtype} is not a dtype of the operators"
    if jnp.float64 in dtypes and len(set(dtypes)) > 1:
        return f"float64 with {min(dtypes, key=lambda d: d.itemsize)}: some of it would lose float64's digits"
    return Prepared(
        x, **spread, axes=tuple(positive), epsilon=float(epsilon), subtract_mean=subtract_mean, dtype=jnp.dtype(y_dtype)
    )


def _reshaped(a: Parameter, shape: tuple[int, ...]) -> Parameter:
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, a.dtype)
    return jnp.asarray(a).reshape(shape)


def _shape_against(
    x: tuple[int, ...], parameter: tuple[int, ...], axes: Sequence[int] | None
) -> tuple[int, ...] | None:
    """The shape of x's rank with which a parameter broadcasts against x; None where there is none."""
    if axes is None:
        shape = (1,) * (len(x) - len(parameter)) + parameter
        fits = len(shape) == len(x) and all(n in (1, m) for n, m in zip(shape, x, strict=True))
        return shape if fits else None
    axes = [a + len(x) if a < 0 else a for a in axes]
    if not all(0 <= a < len(x) for a in axes):
        return None
    shape = tuple(n if i in axes else 1 for i, n in enumerate(x))
    return shape if math.prod(shape) == math.prod(parameter) else None
