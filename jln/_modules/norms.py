"""A framework's norm and Linears in the operators' terms, before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jln import _checks
from jln._norm.arguments import Given
from jln._norm.operator import normalised
from jln._norm.signature import Results
from jln._norm_add_norm.operator import rms_norm_add_rms_norm
from jln._norm_linear.operator import linear_of_normalised, normalised_linear
from jln._routes import listening


@dataclasses.dataclass(frozen=True)
class NormCall:
    """The static arguments of a norm in the operators' terms. axes: not negative, ascending."""

    axes: tuple[int, ...]
    epsilon: float
    subtract_mean: bool
    y_dtype: jnp.dtype
    zero_centered_scale: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The operators' keyword arguments beside the axes and the dtype."""
        names = ("epsilon", "subtract_mean", "zero_centered_scale")
        return {name: getattr(self, name) for name in names}

    @property
    def name(self) -> str:
        return "LayerNorm" if self.subtract_mean else "RMSNorm"


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A norm, ready for the operators.

    scale, offset: of x's rank, with 1 on the axes that are not normalised; or None.
    """

    x: jax.Array
    scale: jax.Array | None
    offset: jax.Array | None
    call: NormCall

    @property
    def dtype(self) -> jnp.dtype:
        return self.call.y_dtype

    def mapped(self, axes: int) -> Prepared:
        """The norm of an x that has `axes` more axes in front, over which the norm is mapped."""
        if axes == 0:
            return self
        call = dataclasses.replace(self.call, axes=tuple(a + axes for a in self.call.axes))
        scale, offset = (None if a is None else jnp.expand_dims(a, range(axes)) for a in (self.scale, self.offset))
        return Prepared(self.x, scale, offset, call)

    def with_parameters(self, scale: jax.Array | None, offset: jax.Array | None) -> Prepared:
        """The norm with its parameters in place of stand-ins of the same sizes."""
        given = ((scale, self.scale), (offset, self.offset))
        scale, offset = (None if a is None or like is None else a.reshape(like.shape) for a, like in given)
        return dataclasses.replace(self, scale=scale, offset=offset)

    def value(self, read: Given | None = None, norm_before_gate: bool = True) -> Results:
        """The norm's results for x, or for `read`: addends, x and z, or x and an array to which y is added."""
        n = self.call
        read = Given(self.x) if read is None else read
        dtype = n.y_dtype if read.added is None else self.dtype_added_to(read.added)
        how = n.options | {"dtype": dtype, "norm_before_gate": norm_before_gate}
        return normalised(self._with_own(read), axis=n.axes, **how)

    def dtype_added_to(self, residual: jax.Array) -> jnp.dtype:
        """The dtype of the sum of `residual` and the norm's result."""
        return _checks.promoted(residual.dtype, self.dtype)

    def followed_by(self, norm: Prepared, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (y, total) of `norm` of `total = residual +` this norm, as one operator.

        The caller has checked that nothing keeps them from being one.
        """
        scales = self._parameter(self.scale), norm._parameter(norm.scale)
        n = {"axis": self.call.axes, "epsilon": self.call.epsilon, "dtype": norm.dtype, "forward_mode": True}
        with listening():  # it is listed as a layer
            return rms_norm_add_rms_norm(self.x, residual, *scales, **n)

    def linears(self, linears: Sequence[Linear], read: Given) -> Any:
        """The products of the norm of `read` and the Linears, as one operator; with the total where `read` has addends.

        The caller has checked that nothing keeps them from being one.
        """
        n = self.call
        return normalised_linear(
            self._with_own(read),
            tuple(a.kernel.astype(n.y_dtype) for a in linears),
            tuple(None if a.bias is None else a.bias.astype(n.y_dtype) for a in linears),
            precision=linears[0].precision,
            **n.options,
        )

    def _with_own(self, read: Given) -> Given:
        return read._replace(scale=self._parameter(self.scale), offset=self._parameter(self.offset))

    def _parameter(self, a: jax.Array | None) -> jax.Array | None:
        """A parameter in the shape of the normalised axes."""
        if a is None:
            return None
        axes = self.call.axes
        normalised_shape = tuple(self.x.shape[i] for i in axes)
        a = a.reshape([a.shape[i] for i in axes])
        if a.shape != normalised_shape:  # its gradient is a sum, which 16 bits would round again and again
            a = jnp.broadcast_to(a.astype(jnp.promote_types(a.dtype, jnp.float32)), normalised_shape)
        return a

    def linear(self, z: jax.Array, linear: Linear) -> jax.Array:
        """The product of a Linear and `z`, this norm's result; what z was made of is kept for the gradients.

        The caller has checked that `reading_obstacle` is None.
        """
        read = self._with_own(Given(self.x))
        bias = None if linear.bias is None else linear.bias.astype(linear.dtype)
        how = self.call.options | {"precision": linear.precision}
        y = linear_of_normalised(z, read, linear.kernel.astype(linear.dtype), bias, **how)
        return y if linear.result_axes is None else y.transpose(linear.result_axes)

    def reading_obstacle(self, linear: Linear) -> str | None:
        """The reason why a Linear that reads this norm's result cannot be told what it is made of; None: it can."""
        if self.call.axes != (self.x.ndim - 1,):
            return "the norm is not over the last axis"
        if linear.kernel.ndim < 2 or linear.kernel.shape[0] != self.x.shape[-1]:
            return "the kernel does not have the shape that the last axis asks for"
        if jnp.dtype(linear.dtype) not in _checks.DTYPES:
            return f"the product is {jnp.dtype(linear.dtype)}, not of the operators' dtypes"
        return None

    def linear_obstacle(self, linear: Linear) -> str | None:
        """The reason why a Linear cannot be one operator with the norm; None where it can."""
        if (obstacle := self.reading_obstacle(linear)) is not None:
            return obstacle
        if linear.result_axes is not None:
            return "the result has its axes in another order"
        product_dtype = linear.dtype
        if self.dtype != product_dtype or jnp.promote_types(self.x.dtype, product_dtype) != product_dtype:
            dtypes = f"x is {self.x.dtype}, the norm's result {self.dtype}, the product {jnp.dtype(product_dtype)}"
            return f"{dtypes}: one operator would round differently"
        return None


class Linear(NamedTuple):
    """A Linear in the operators' terms.

    dtype: that in which it multiplies.
    result_axes: the axes of the product, rows before features, in the result's order; None where they stay.
    """

    kernel: jax.Array
    bias: jax.Array | None
    dtype: Any
    precision: Any
    result_axes: tuple[int, ...] | None = None


class ProductAxes(NamedTuple):
    """The axes of an einsum that is a Linear.

    kernel: the axes of its kernel that are `[H, *features]`, in that order. result: as `Linear.result_axes`.
    """

    kernel: tuple[int, ...]
    result: tuple[int, ...]


def product_of_last_axis(equation: str, x_ndim: int) -> ProductAxes | None:
    """The axes of an einsum of x and a kernel, if it is a sum over the last axis of x alone; else None."""
    operands, _, result = equation.replace(" ", "").partition("->")
    x, _, kernel = operands.partition(",")
    if "..." in kernel:
        return None
    rest = "".join(map(str, range(x_ndim - len(x.replace("...", "")))))
    x, result = x.replace("...", rest), result.replace("...", rest)
    h, rows = x[-1:], x[:-1]
    features = [c for c in result if c in kernel]
    once = all(len(set(labels)) == len(labels) for labels in (x, kernel, result))
    if not once or len(x) != x_ndim or {*x} & {*kernel} != {h} or {*result} != {*rows} | {*kernel} - {h}:
        return None
    made = [*rows, *features]
    return ProductAxes(tuple(kernel.index(c) for c in (h, *features)), tuple(made.index(c) for c in result))
