"""A framework's norm and its Linears in the operators' terms, as they are before anything is computed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from jln import _checks
from jln._norm.arguments import Given
from jln._norm.operator import normalised
from jln._norm.signature import Results
from jln._norm_add_norm.operator import rms_norm_add_rms_norm
from jln._norm_linear.operator import normalised_linear


@dataclasses.dataclass(frozen=True)
class NormCall:
    """A norm in the operators' terms.

    axes: not negative, ascending. shapes: of x, scale and offset as they were when the norm was called.
    """

    axes: tuple[int, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    epsilon: float
    subtract_mean: bool
    y_dtype: jnp.dtype

    @property
    def name(self) -> str:
        return "LayerNorm" if self.subtract_mean else "RMSNorm"


def no_array(deferred: object) -> TypeError:
    return TypeError(f"{deferred!r} is no array: only the Linear with which the norm was fused can read it")


class NoArray:
    """A norm's result that is not there yet: it has the sizes of the norm's input `x`, and no numbers."""

    x: jax.Array

    def __repr__(self) -> str:
        return f"Deferred({self.x.dtype}{list(self.x.shape)}, a norm left to the Linear with which it was fused)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "x":  # a protocol's name, or of an object that is being made
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        raise _NoSuchAttribute(str(no_array(self)))

    @property
    def __jax_array__(self) -> Any:
        raise no_array(self)  # a method that JAX could call would not be called everywhere

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def ndim(self) -> int:
        return self.x.ndim


class _NoSuchAttribute(TypeError, AttributeError):
    """What `hasattr` takes for its answer, and who wants the numbers for `no_array`."""


def _refuse(deferred: Any, *_: Any, **__: Any) -> NoReturn:
    raise no_array(deferred)


# What Python, NumPy and JAX ask for numbers by. Python's own answers, as False of `z == y`, would count as numbers.
_CONVERSIONS = "array bool int float complex index round floor ceil trunc hash len iter contains getitem setitem"
_OPERATORS = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OF_ONE = "neg pos abs invert eq ne lt le gt ge"
for _name in (*_CONVERSIONS.split(), *_OF_ONE.split(), *_OPERATORS.split(), *(f"r{n}" for n in _OPERATORS.split())):
    setattr(NoArray, f"__{_name}__", _refuse)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "scale", "offset"], meta_fields=["call"])
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Deferred(NoArray):
    """A norm that has not been computed yet, because the Linear behind it may do that. Its sizes and its dtype are
    known; who wants its numbers gets a TypeError.

    scale, offset: of x's rank, with 1 on the axes that are not normalised; or None.
    """

    x: jax.Array
    scale: jax.Array | None
    offset: jax.Array | None
    call: NormCall

    @property
    def dtype(self) -> jnp.dtype:
        return self.call.y_dtype

    def with_parameters(self, scale: jax.Array | None, offset: jax.Array | None) -> Deferred:
        """In place of stand-ins of the same sizes."""
        given = ((scale, self.scale), (offset, self.offset))
        scale, offset = (None if a is None or like is None else a.reshape(like.shape) for a, like in given)
        return dataclasses.replace(self, scale=scale, offset=offset)

    def value(self, read: Given | None = None, norm_before_gate: bool = True) -> Results:
        """The norm by itself, of x or of what is read in its place: addends, x and z, or x and what y is added to."""
        n = self.call
        read = Given(self.x) if read is None else read
        dtype = n.y_dtype if read.added is None else self.dtype_added_to(read.added)
        options = {"epsilon": n.epsilon, "subtract_mean": n.subtract_mean, "dtype": dtype}
        options |= {"norm_before_gate": norm_before_gate}
        return normalised(self._with_own(read), axis=n.axes, **options)

    def dtype_added_to(self, residual: jax.Array) -> jnp.dtype:
        """Of the sum of the norm's result and this."""
        return _checks.promoted(residual.dtype, self.dtype)

    def followed_by(self, norm: Deferred, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`norm` of `residual +` this norm as one operator, which nothing must keep from being one. -> (y, total)"""
        scales = self._parameter(self.scale), norm._parameter(norm.scale)
        n = {"axis": self.call.axes, "epsilon": self.call.epsilon, "dtype": norm.dtype, "forward_mode": True}
        return rms_norm_add_rms_norm(self.x, residual, *scales, **n)

    def linears(self, linears: Sequence[Linear], read: Given) -> Any:
        """The norm of what is read, x or addends, and the Linears as one operator, which nothing must keep from being
        one. -> the products, and of addends the total.
        """
        n = self.call
        return normalised_linear(
            self._with_own(read),
            tuple(a.kernel.astype(n.y_dtype) for a in linears),
            tuple(None if a.bias is None else a.bias.astype(n.y_dtype) for a in linears),
            epsilon=n.epsilon,
            subtract_mean=n.subtract_mean,
            precision=linears[0].precision,
        )

    def _with_own(self, read: Given) -> Given:
        return read._replace(scale=self._parameter(self.scale), offset=self._parameter(self.offset))

    def _parameter(self, a: jax.Array | None) -> jax.Array | None:
        """In the shape of the normalised axes."""
        if a is None:
            return None
        axes = self.call.axes
        normalised_shape = tuple(self.x.shape[i] for i in axes)
        a = a.reshape([a.shape[i] for i in axes])
        if a.shape != normalised_shape:  # its gradient is a sum, which 16 bits would round again and again
            a = jnp.broadcast_to(a.astype(jnp.promote_types(a.dtype, jnp.float32)), normalised_shape)
        return a

    def linear_obstacle(self, kernel_shape: tuple[int, ...], product_dtype: Any) -> str | None:
        """Why a Linear that multiplies in `product_dtype` cannot be fused with the norm; None where it can."""
        if self.call.axes != (self.x.ndim - 1,):
            return "the norm is not over the last axis"
        if len(kernel_shape) < 2 or kernel_shape[0] != self.x.shape[-1]:
            return "the kernel does not have the shape that the last axis asks for"
        if self.dtype != product_dtype or jnp.promote_types(self.x.dtype, product_dtype) != product_dtype:
            dtypes = f"x is {self.x.dtype}, the norm's result {self.dtype}, the product {jnp.dtype(product_dtype)}"
            return f"{dtypes}: one operator would round differently"
        return None


class Linear(NamedTuple):
    """A Linear in the operators' terms. dtype: in which it multiplies."""

    kernel: jax.Array
    bias: jax.Array | None
    dtype: Any
    precision: Any
