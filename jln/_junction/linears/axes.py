"""Labels for the axes of a product's arrays, as `jnp.einsum` takes them, and the product of arrays so labelled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


@dataclasses.dataclass(frozen=True)
class Axes:
    """Labels for the axes of a product's arrays: axes with one label are one axis."""

    z: tuple[int, ...]
    kernel: tuple[int, ...]
    bias: tuple[int, ...]
    y: tuple[int, ...]

    @classmethod
    def of(cls, ndim: int, batch_dims: int, features: int) -> "Axes":
        """The labels for a z with that many dimensions: their places in it, the features' behind them."""
        *rows, h = range(ndim)
        batch, n = rows[:batch_dims], range(ndim, ndim + features)
        return cls((*rows, h), (*batch, h, *n), (*batch, *n), (*rows, *n))

    @property
    def features(self) -> int:
        """The number of axes that the kernel has and z has not."""
        return sum(label not in self.z for label in self.kernel)

    def without(self, axes: Sequence[int]) -> list[int]:
        """The places in y of the axes that are not among these."""
        return [i for i, label in enumerate(self.y) if label not in axes]


def einsum(
    a: Array,
    a_axes: Sequence[int],
    b: Array,
    b_axes: Sequence[int],
    axes: Sequence[int],
    *,
    precision: Any,
    preferred_element_type: Any = None,
) -> Array:
    """The product of a and b, summed over the axes of both that are not in `axes`, by the steps of `jnp.einsum`.

    Libraries that quantise a model (qwix) put their own functions in place of `jnp.einsum` and `lax.dot_general` while
    it runs. JAX traces an operation then, or has before: one that called these would be another each time. `lax.dot` is
    JAX's primitive itself.
    """
    dtype = preferred_element_type or jnp.promote_types(a.dtype, b.dtype)
    of_a, of_b = (dict(zip(labels, x.shape, strict=True)) for labels, x in ((a_axes, a), (b_axes, b)))
    (a, a_axes), (b, b_axes) = _without_broadcasts(a, a_axes, of_b), _without_broadcasts(b, b_axes, of_a)
    both = [label for label in a_axes if label in b_axes]
    batch, summed = [label for label in axes if label in both], sorted(label for label in both if label not in axes)
    free = [[label for label in of if label not in both] for of in (a_axes, b_axes)]
    if [*batch, *free[0], *free[1]] != [*axes]:  # the other way round there may be nothing to transpose
        (a, a_axes), (b, b_axes), free = (b, b_axes), (a, a_axes), free[::-1]
    names = [*batch, *free[0], *free[1]]
    numbers: Any = [[[labels.index(n) for n in of] for labels in (a_axes, b_axes)] for of in (summed, batch)]
    y = lax.dot(a, b, dimension_numbers=numbers, precision=precision, preferred_element_type=dtype)
    return lax.transpose(y, [names.index(label) for label in axes])


def _without_broadcasts(a: Array, labels: Sequence[int], others: dict[int, int]) -> tuple[Array, list[int]]:
    """An array without its axes of size 1 that are longer in the other, whose sizes these are, and the labels left."""
    gone = [i for i, label in enumerate(labels) if a.shape[i] == 1 and others.get(label, 1) != 1]
    return lax.squeeze(a, gone), [label for i, label in enumerate(labels) if i not in gone]
