"""Numbers that know how far off a program may be that computes them in a narrower dtype.

A running error analysis (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 3), with the worst case of
each step and no probabilities: whatever is outside was not computed by these steps.

- An operation is off by at most one unit in the last place of its result, `eps` times it: IEEE 754 allows half of one,
  XLA's and LLVM's `rsqrt` and `exp` one.
- A sum of n terms, added up in whatever order, by at most n times eps times the sum of their magnitudes.
- What is stored in a narrower dtype by half a unit of that.
- What an operand is off by goes through: of a product `|a| eb + |b| ea + ea eb`, of a function that is not linear what
  it may do on the whole interval. So a row without spread, whose rstd is large and uncertain, brings its own allowance.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def unit(dtype) -> float:
    return float(jnp.finfo(dtype).eps)


def cast(a: np.ndarray, dtype) -> np.ndarray:
    """The values of an array rounded to a dtype, in the array's own."""
    return a.astype("float64").astype(jnp.dtype(dtype)).astype(a.dtype)


class Tracked:
    """An array, how far a program's may be from it, and its derivative along one direction.

    value, error: arrays that broadcast with each other.
    eps: the unit of the program's arithmetic.
    tangent: the derivative; None for zero.
    """

    def __init__(self, value, error, eps: float, tangent: Tracked | None = None):
        self.value, self.error, self.eps, self.tangent = np.asarray(value), np.asarray(error), eps, tangent

    shape = property(lambda self: self.value.shape)
    magnitude = property(lambda self: np.abs(self.value))
    without_tangent = property(lambda self: Tracked(self.value, self.error, self.eps))

    def _made(self, value, error, *tangents: Tracked | None) -> Tracked:
        """The result of one operation."""
        return Tracked(value, error + self.eps * np.abs(value), self.eps, total(tangents))

    def _other(self, other) -> Tracked:
        return other if isinstance(other, Tracked) else Tracked(np.asarray(other, self.value.dtype), 0, self.eps)

    def __add__(self, other) -> Tracked:
        other = self._other(other)
        return self._made(self.value + other.value, self.error + other.error, self.tangent, other.tangent)

    def __neg__(self) -> Tracked:
        return Tracked(-self.value, self.error, self.eps, None if self.tangent is None else -self.tangent)

    def __sub__(self, other) -> Tracked:
        return self + -self._other(other)

    def __mul__(self, other) -> Tracked:
        return self._bilinear(self._other(other), np.multiply, Tracked.__mul__, 1)

    __radd__, __rmul__ = __add__, __mul__

    def __matmul__(self, other: Tracked) -> Tracked:
        return self._bilinear(other, np.matmul, Tracked.__matmul__, self.shape[-1])

    def _bilinear(self, other: Tracked, of_arrays, of_tracked, terms: int) -> Tracked:
        a, b = self.magnitude, other.magnitude
        error = of_arrays(self.error + 0 * a, b + other.error) + of_arrays(a, other.error + 0 * b)
        if terms > 1:
            error = error + terms * self.eps * of_arrays(a, b)
        tangents = []
        if self.tangent is not None:
            tangents.append(of_tracked(self.tangent, other.without_tangent))
        if other.tangent is not None:
            tangents.append(of_tracked(self.without_tangent, other.tangent))
        return self._made(of_arrays(self.value, other.value), error, *tangents)

    def swapped(self) -> Tracked:
        """The transposed matrices."""
        a, error = np.broadcast_arrays(self.value, self.error)
        tangent = None if self.tangent is None else self.tangent.swapped()
        return Tracked(a.swapaxes(-1, -2), error.swapaxes(-1, -2), self.eps, tangent)

    def sum(self, axis) -> Tracked:
        value, error = np.broadcast_arrays(self.value, self.error)
        terms = np.prod([self.shape[i] for i in np.atleast_1d(axis)], initial=1)
        error = error.sum(axis, keepdims=True) + terms * self.eps * np.abs(value).sum(axis, keepdims=True)
        return self._made(
            value.sum(axis, keepdims=True), error, None if self.tangent is None else self.tangent.sum(axis)
        )

    def mean(self) -> Tracked:
        return self.sum(-1) * (1 / self.value.dtype.type(self.shape[-1]))

    def broadcast_to(self, shape) -> Tracked:
        tangent = None if self.tangent is None else self.tangent.broadcast_to(shape)
        return Tracked(np.broadcast_to(self.value, shape), np.broadcast_to(self.error, shape), self.eps, tangent)

    def reshape(self, *shape) -> Tracked:
        value, error = np.broadcast_arrays(self.value, self.error)
        tangent = None if self.tangent is None else self.tangent.reshape(*shape)
        return Tracked(value.reshape(*shape), error.reshape(*shape), self.eps, tangent)

    def sum_to(self, shape) -> Tracked:
        """The sum over all axes on which `shape` has 1; written out on the others."""
        full = self.broadcast_to(np.broadcast_shapes(self.shape, shape))
        axes = tuple(i for i, (n, m) in enumerate(zip(full.shape, shape, strict=True)) if n != m)
        return full.sum(axes) if axes else full

    def off_by(self, error) -> Tracked:
        """The same, and further off."""
        return Tracked(self.value, self.error + error, self.eps, self.tangent)

    def stored(self, dtype, share: float = 0.5) -> Tracked:
        """Return what a program has that writes this in `dtype`. share: of a unit."""
        if unit(dtype) < self.eps:
            return self
        error = share * unit(dtype) * (self.magnitude + self.error) + float(jnp.finfo(dtype).smallest_subnormal)
        error = np.where(self.magnitude + self.error < float(jnp.finfo(dtype).max), error, np.inf)
        tangent = None if self.tangent is None else self.tangent.stored(dtype, share)
        return Tracked(self.value, self.error + error, self.eps, tangent)

    def rounded(self, dtype) -> Tracked:
        """Round to `dtype`, to a value of its own: off where the error decides the way. XLA rounds subnormals twice."""
        off = self.error + (self.magnitude < float(jnp.finfo(dtype).tiny)) * unit(dtype) / 2 * self.magnitude
        value, low, high = (cast(a, dtype) for a in (self.value, self.value - off, self.value + off))
        error = np.maximum(high - value, value - low)
        tangent = None if self.tangent is None else self.tangent.stored(dtype)
        return Tracked(value, np.where(np.isfinite(error), error, np.inf), self.eps, tangent)

    def rsqrt(self) -> Tracked:
        """Return 1 / sqrt, without a tangent, of a mean of squares and epsilon: not negative, whatever the errors."""
        wide = self.value.dtype.type
        value = 1 / np.sqrt(self.value)
        low = np.maximum(self.value - self.error, wide(1e-300))
        error = np.maximum(1 / np.sqrt(low) - value, value - 1 / np.sqrt(self.value + self.error))
        return self._made(value, error)

    def silu(self) -> tuple[Tracked, Tracked, np.ndarray]:
        """The value of silu, its derivative, and the magnitude of the two terms of that, which cancel near z = -1.28.

        Their own derivatives are at most 1.1, 0.5 and 0.5.
        """
        share = 1 / (1 + np.exp(-self.value))
        rest = 1 / (1 + np.exp(self.value))
        value, slope = self.value * share, share * (1 + self.value * rest)
        curve = share * rest * (2 + self.value * (rest - share))
        e = self.error
        # A few operations of terms not larger than these.
        u = self._made(value, (np.abs(slope) + e / 2) * e + 3 * self.eps * np.abs(value))
        by_slope = self._made(slope, e / 2 + 4 * self.eps * share * (1 + self.magnitude * rest))
        if self.tangent is not None:
            by_curve = self._made(curve, e / 2 + 8 * self.eps * share * rest * (2 + self.magnitude))
            u.tangent, by_slope.tangent = by_slope * self.tangent, by_curve * self.tangent
        return u, by_slope, share * (1 + self.magnitude * rest)


def total(terms) -> Tracked | None:
    """The sum of those that are not None; None without any."""
    result = None
    for term in terms:
        if term is not None:
            result = term if result is None else result + term
    return result
