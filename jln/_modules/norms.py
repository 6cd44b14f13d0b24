"""A framework's norm and Linears in the operators' terms, before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jln import _checks
from jln._junction.arrays import Arrays
from jln._operators.call import call


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
        """The norm's results for `read`: x, addends, x and z, or x and an array to which y is added.

        A module's dtype may be wider than x's (bfloat16 x, float32 parameters) or narrower; the result is still rounded
        once. The frameworks' own layers can be differentiated in forward mode, so these can.
        """
        return call(
            self._with_own(read),
            subtract_mean=self.subtract_mean,
            axis=self.axes,
            epsilon=self.epsilon,
            dtype=self.dtype if read.added is None else self.dtype_added_to(read.added),
            forward_mode=True,
        )

    def dtype_added_to(self, residual: jax.Array) -> jnp.dtype:
        """The dtype of the sum of `residual` and the norm's result."""
        return _checks.promoted(residual.dtype, self.dtype)

    def followed_by(self, norm: Prepared, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (y, total) of `norm` of `total = residual +` this norm, as one operator.

        The caller has checked that nothing keeps them from being one.
        """
        results = call(
            norm._with_own(Arrays(self.x, residual, x_scale=self._parameter(self.scale))),
            subtract_mean=False,
            axis=self.axes,
            epsilon=self.epsilon,
            both_sides=True,
            dtype=norm.dtype,
            forward_mode=True,
        )
        return results.y, results.total

    def linears(self, linears: Sequence[Linear], read: Arrays) -> Arrays:
        """The products of the norm of `read` and the Linears, as one operator; with the total where `read` has addends.

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
            forward_mode=True,
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
