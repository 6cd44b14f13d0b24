"""What goes into LayerNorm+Linear, what is kept for its derivatives, and what comes out.

Inside of an operation the first axes of every array, *batch, are vmap's: on them any operand may have size 1 instead of
the batch's, results always have the batch's, and parameter gradients are not summed over them. *lead are x's rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jln._norm.signature import Norm


@dataclasses.dataclass(frozen=True)
class NormLinear:
    """Which norm and which product: all about them that is static.

    precision: as `jax.lax.dot_general` has it. features: how many axes of features the kernel has.
    """

    norm: Norm
    precision: Any
    features: int


@dataclasses.dataclass(frozen=True)
class Settings:
    """The operator's static arguments, as its rules need them."""

    norm_linear: NormLinear
    implementation: str | None


class Operands(NamedTuple):
    """x [*batch, *lead, H]; scale, offset [*batch, H]; kernel [*batch, H, *features]; bias [*batch, *features].

    scale, offset and bias may be None.
    """

    x: Any
    scale: Any
    offset: Any
    kernel: Any
    bias: Any


class Results(NamedTuple):
    """y [*batch, *lead, *features]."""

    y: Any


class Outcome(NamedTuple):
    """What the forward operation returns: y, and mean and rstd [*batch, *lead, 1] as in `jln._norm.signature`."""

    y: Any
    mean: Any
    rstd: Any


class Saved(NamedTuple):
    """What is kept between forward and backward, None where no wanted gradient reads it."""

    x: Any
    scale: Any
    offset: Any
    kernel: Any
    mean: Any
    rstd: Any


class Cotangents(NamedTuple):
    """What the backward operation reads: dy, like y, and what was saved."""

    dy: Any
    x: Any
    scale: Any
    offset: Any
    kernel: Any
    mean: Any
    rstd: Any


class Gradients(NamedTuple):
    """What the backward operation returns, each like what it is the gradient of."""

    dx: Any
    dscale: Any
    doffset: Any
    dkernel: Any
    dbias: Any


# The arrays whose last axes are features.
_WITH_FEATURES = {"y", "dy", "kernel", "dkernel", "bias", "dbias"}


def _mapped(arrays: Any, function: Callable[[Any], Any]) -> Any:
    """Over those of a NamedTuple's arrays that have features, or of several NamedTuples'."""
    if type(arrays) is tuple:
        return tuple(_mapped(a, function) for a in arrays)
    pairs = zip(arrays._fields, arrays, strict=True)
    return type(arrays)(*(function(a) if a is not None and name in _WITH_FEATURES else a for name, a in pairs))


def on_matrix(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute`, which knows one axis of features, for several. They are merged only inside of an operation, since they
    may be split over devices one by one.
    """

    def call(operands, settings: NormLinear, dtypes, batch_dims: int, **where):
        features: tuple[int, ...] = ()  # where only statistics are wanted, nothing has any

        def merged(a):
            nonlocal features
            features = a.shape[a.ndim - settings.features :]
            return a.reshape(*a.shape[: a.ndim - settings.features], math.prod(features))

        results = compute(_mapped(operands, merged), settings, dtypes, batch_dims, **where)
        return _mapped(results, lambda a: a.reshape(*a.shape[:-1], *features))

    return call
