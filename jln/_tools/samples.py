"""Samples of the operators for `check` and `doctor`: arguments of any size and kind, and their true results."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jln._tools import accuracy, catalogue
from jln._tools.accuracy import Accuracy, Judge
from jln._tools.catalogue import EPSILON, Array, Operator
from jln._tools.devices import Device
from jln._tools.workloads import Workload

Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Init = Literal["ones", "integers", "normal", "uniform", "large-mean"]
Implementation = Literal["xla", "triton"]
DTYPES: tuple[str, ...] = get_args(Dtype)


def _options(operator: Operator) -> dict[str, Any]:
    # A GPU's own default precision multiplies float32 with ten bits.
    return {"epsilon": EPSILON} | ({"precision": "highest"} if operator.is_linear else {})


# Equal calls give the same object, so that its programs are compiled once.
@functools.cache
def ours(operator: Operator, implementation: str | None) -> Callable[..., Any]:
    """The operator of this library as a function of its arguments in order."""
    return operator.in_order(operator.function, implementation=implementation, **_options(operator))


@functools.cache
def plain(operator: Operator, total_dtype: str | None = None) -> Callable[..., Any]:
    """The operator in plain jnp as a function of its arguments in order.

    total_dtype: the dtype to which a sum is rounded; None: the operator's own.
    """
    if total_dtype is not None and operator.adds:
        return operator.in_order(accuracy.of_sum(operator, total_dtype, epsilon=EPSILON))
    return operator.in_order(operator.reference, **_options(operator))


@dataclasses.dataclass(frozen=True)
class Sample:
    """One operator at one size, with its data.

    shape: x's, of which the last axis is normalised. features: N of a Linear, or a tuple of those of several.
    """

    operator: Operator
    shape: tuple[int, ...]
    features: int | tuple[int, ...]
    dtype: str
    init: Init = "normal"
    seed: int = 0

    def __str__(self) -> str:
        w = self._workload
        features = f" -> {w.features_text} features" if w.is_linear else ""
        return f"{w.entry.title} of {w.shape_text}{features} in {self.dtype}, {self.init} (seed {self.seed})"

    @property
    def _workload(self) -> Workload:
        """The workload of this size, with all arrays in one dtype."""
        name = self.operator.name
        how = {"dtype": self.dtype, "parameter_dtype": self.dtype, "extras": self.operator.given_extras}
        how["options"] = self.operator.options
        return Workload(name, name, self.shape, "", self.features, **how)

    @property
    def _shapes(self) -> dict[str, Any]:
        return self._workload.arrays()

    def _split(self, arrays: list[Any]) -> tuple[list[Any], Any]:
        count = len(self.operator.arguments)
        return arrays[:count], self.operator.packed(arrays[count:])

    def shapes(self) -> tuple[list[Any], Any]:
        """Return the shapes and dtypes of the arguments, and those of the cotangent."""
        return self._split(list(self._shapes.values()))

    def arrays(self) -> tuple[list[Any], Any]:
        """Return the arguments and the cotangent."""
        random = np.random.default_rng(self.seed)
        shapes = self._shapes

        def filled(array: Array) -> Any:
            return jax.tree.map(lambda a: self._filled(random, array, a.shape), shapes[array.name])

        return self._split(list(map(filled, self.operator.arrays)))

    def names(self) -> list[str]:
        """The names of the results and of the gradients, one for each array."""
        shapes = self._shapes
        results = [(a.name, shapes[a.name]) for a in self.operator.results]
        return catalogue.flat_names(results + [(f"d{a.name}", shapes[a.name]) for a in self.operator.arguments])

    def _filled(self, random: np.random.Generator, array: Array, shape: tuple[int, ...]) -> np.ndarray:
        """An array of the sample's kind of data.

        ones: every sum can be done in the head.
        integers: from -3 to 3, so that products and short sums are exact.
        normal, uniform: of spread 1, or from -1 to 1.
        large-mean: x's mean is 1000 times its spread, which a variance in one pass does not survive. The mean of y's
        cotangent is 10 times its spread, with a scale of 1, so that c1 is large and dx is not.
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
            if array.role == "scale":
                a = a + 1 if self.init != "large-mean" else np.ones(shape)
            elif array.role == "kernel":
                a = a / math.sqrt(shape[0])  # y is then of the size of z
            elif self.init == "large-mean":
                a = a + {"x": 1000, "y": 10}.get(array.name, 0)
        return a.astype(jnp.dtype(self.dtype))

    def bytes_once(self, direction: str) -> int:
        """The bytes that a direction reads and writes if it moves every tensor once."""
        return self._workload.bytes_once(direction)

    def operations(self, direction: str) -> int:
        """The operations of a direction; an addition and a multiplication are two."""
        return self.operator.operations(math.prod(self.shape), sum(self._workload.all_features), direction)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f: Callable[..., Any], arguments: list[Any], cotangent: Any) -> list[Any]:
    """The results of `f` and the gradients of its arguments."""
    results, pullback = jax.vjp(f, *arguments)
    return jax.tree.leaves((results, pullback(cotangent)))


class JudgedSample:
    """A sample on a device, and the judge of all implementations' results for it."""

    def __init__(self, sample: Sample, device: Device):
        self.sample, self._device, self._arrays = sample, device, sample.arrays()
        operator, dtype = sample.operator, sample.dtype
        exact = plain(operator, dtype)
        self.names = sample.names()
        wide = jax.device_put(jax.tree.map(lambda a: a.astype("float64"), self._arrays), device)
        true, nudged = (self._run(exact, a) for a in (wide, accuracy.nudged(wide, dtype)))
        self._judge = Judge(self.names, true, nudged, self._run(plain(operator), self._arrays), dtype)

    def _run(self, f: Callable[..., Any], arrays: Any) -> list[jax.Array]:
        return value_and_gradients(f, *jax.device_put(arrays, self._device))

    def accuracies(self, implementation: str) -> list[Accuracy]:
        """The accuracy of every result of an implementation."""
        return self.judged(ours(self.sample.operator, implementation))

    def judged(self, function: Callable[..., Any]) -> list[Accuracy]:
        """The accuracy of every result of a function of the operator's arguments in order."""
        return list(map(self._judge.accuracy, self.names, self._run(function, self._arrays)))
