"""The operators as the commands see them: arguments of any size, and the bytes and operations that a size takes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

import jln

Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Init = Literal["ones", "integers", "normal", "uniform", "large-mean"]
Implementation = Literal["xla", "triton"]
DTYPES: tuple[str, ...] = get_args(Dtype)
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Operator:
    """One of the public functions. arguments: the names of its arrays."""

    name: str
    arguments: tuple[str, ...]

    @property
    def subtracts_mean(self) -> bool:
        return "offset" in self.arguments

    @property
    def adds(self) -> bool:
        return "residual" in self.arguments

    @property
    def is_linear(self) -> bool:
        return "kernel" in self.arguments

    @property
    def results(self) -> tuple[str, ...]:
        return ("y", "total") if self.adds else ("y",)

    def ours(self, implementation: str | None) -> Callable[..., Any]:
        """The operator itself; equal calls give the same object, so that its programs are compiled once."""
        return _ours(self, implementation)

    def reference(self, total_dtype: str | None = None) -> Callable[..., Any]:
        """Plain jnp. total_dtype: that `x + residual` is rounded to, its gradient passing through, in the wider dtype
        that the arguments have. None: as the operator does.
        """
        if total_dtype is None or not self.adds:
            return _reference(self)
        return _of_rounded_sum(self, total_dtype)


OPERATORS = {
    o.name: o
    for o in (
        Operator("layer_norm", ("x", "scale", "offset")),
        Operator("rms_norm", ("x", "scale")),
        Operator("add_layer_norm", ("x", "residual", "scale", "offset")),
        Operator("add_rms_norm", ("x", "residual", "scale")),
        Operator("layer_norm_linear", ("x", "scale", "offset", "kernel", "bias")),
        Operator("rms_norm_linear", ("x", "scale", "kernel", "bias")),
    )
}


def _options(operator: Operator) -> dict[str, Any]:
    # A GPU's own default precision multiplies float32 with ten bits.
    return {"epsilon": EPSILON} | ({"precision": "highest"} if operator.is_linear else {})


@functools.cache
def _ours(operator: Operator, implementation: str | None) -> Callable[..., Any]:
    return functools.partial(getattr(jln, operator.name), implementation=implementation, **_options(operator))


@functools.cache
def _reference(operator: Operator) -> Callable[..., Any]:
    return functools.partial(getattr(jln.reference, operator.name), **_options(operator))


@functools.cache
def _of_rounded_sum(operator: Operator, total_dtype: str) -> Callable[..., Any]:
    norm = functools.partial(getattr(jln.reference, operator.name.removeprefix("add_")), epsilon=EPSILON)

    def reference(x, residual, *parameters):
        total = x + residual
        # The barrier keeps XLA from leaving the rounding out. (`reduce_precision` would flush float16's denormals.)
        rounded = jax.lax.optimization_barrier(total.astype(total_dtype)).astype(total.dtype)
        total = total + jax.lax.stop_gradient(rounded - total)
        return norm(total, *parameters), total

    return reference


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator at one size. shape: x's, its last axis normalised. features: N of a Linear."""

    operator: Operator
    shape: tuple[int, ...]
    features: int
    dtype: str
    init: Init = "normal"
    seed: int = 0

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        features = f" -> {self.features} features" if self.operator.is_linear else ""
        return f"{self.operator.name} of {size}{features} in {self.dtype}, {self.init} (seed {self.seed})"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of arguments and results."""
        h, n = self.shape[-1], self.features
        all_shapes = {
            "x": self.shape,
            "residual": self.shape,
            "scale": (h,),
            "offset": (h,),
            "kernel": (h, n),
            "bias": (n,),
            "y": (*self.shape[:-1], n) if self.operator.is_linear else self.shape,
            "total": self.shape,
        }
        return {name: all_shapes[name] for name in (*self.operator.arguments, *self.operator.results)}

    def arrays(self) -> tuple[list[np.ndarray], Any]:
        """-> (arguments, cotangent)"""
        random = np.random.default_rng(self.seed)
        made = {name: self._filled(random, name, shape) for name, shape in self.shapes().items()}
        cotangents = tuple(made[name] for name in self.operator.results)
        return [made[name] for name in self.operator.arguments], cotangents if self.operator.adds else cotangents[0]

    def _filled(self, random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """ones: every sum can be done in the head. integers: -3 to 3, so products and short sums are exact. normal,
        uniform: spread 1, or -1 to 1. large-mean: x has 1000 times its spread for a mean, which a variance in one pass
        does not survive, and y's cotangent 10 times, with a scale of 1, so that c1 is large and dx is not.
        """
        if self.init == "ones":
            a = np.ones(shape)
        elif self.init == "integers":
            a = random.integers(-3, 4, shape).astype(float)
        elif self.init == "uniform":
            a = random.uniform(-1, 1, shape)
        else:
            a = random.standard_normal(shape)
        if self.init in ("normal", "uniform", "large-mean"):
            if name == "scale":
                a = a + 1 if self.init != "large-mean" else np.ones(shape)
            elif name == "kernel":
                a = a / math.sqrt(shape[0])  # y is then of the size of z
            elif name == "x" and self.init == "large-mean":
                a = a + 1000
            elif name == "y" and self.init == "large-mean":
                a = a + 10
        return a.astype(jnp.dtype(self.dtype))

    def bytes_moved(self) -> tuple[int, int]:
        """Forward and backward, every tensor once: what is read, and written, if nothing is read twice."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes().items()}
        parameters = sum(sizes[name] for name in self.operator.arguments if name not in ("x", "residual"))
        results = sum(sizes[name] for name in self.operator.results)
        residual = sizes.get("residual", 0)
        forward = sizes["x"] + residual + parameters + results
        # The cotangents and what was normalised in; dx, which is dresidual too, and the parameters' gradients out. Of
        # the parameters scale and kernel are read again.
        reread = sizes["scale"] + sizes.get("kernel", 0)
        backward = results + sizes["x"] + reread + sizes["x"] + parameters
        return forward * self._itemsize, backward * self._itemsize

    def operations(self) -> tuple[int, int]:
        """Forward and backward, each addition and each multiplication counted as one.

        A norm's element forward: mean 1, x - mean 1, its square summed 2, times rstd 1, scale 1, offset 1. Backward:
        x_hat 2, g 1, c1 1, c2 2, dx 4, dscale 2, doffset 1. An RMSNorm has neither mean, c1 nor offset.
        """
        forward, backward = (7, 13) if self.operator.subtracts_mean else (4, 9)
        elements = math.prod(self.shape)
        product = 2 * elements * self.features if self.operator.is_linear else 0
        extra = 1 if self.operator.adds else 0
        return (forward + extra) * elements + product, (backward + extra) * elements + 2 * product

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f: Callable[..., Any], arguments: list[Any], cotangent: Any) -> list[Any]:
    """The results of `f` and the gradients of its arguments."""
    results, pullback = jax.vjp(f, *arguments)
    return [*jax.tree.leaves(results), *pullback(cotangent)]
