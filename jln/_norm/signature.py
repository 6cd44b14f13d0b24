"""What goes into the norm operators, what is kept for their derivatives, and what comes out.

Large arrays are [*lead, H, *inner], with H at the negative `axis`; `scale` and `offset` have the same rank, with 1
everywhere but at `axis`; `mean` and `rstd` have 1 at `axis`. Inside of an operation the first `batch_dims` axes are
vmap's: on them any operand may have size 1 instead of the batch's, results always have the batch's, and parameter
gradients are not summed over them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Norm:
    """Which norm: everything about it that is static. axis: negative."""

    axis: int
    epsilon: float
    subtract_mean: bool
    zero_centered_scale: bool


@dataclasses.dataclass(frozen=True)
class Settings:
    """The operator's static arguments, as its rules need them. y_dtype: a dtype's name."""

    norm: Norm
    y_dtype: str
    implementation: str | None


class Operands(NamedTuple):
    """x, residual [*lead, H, *inner]; scale, offset [1, ..., H, ..., 1]. All but x may be None."""

    x: Any
    residual: Any
    scale: Any
    offset: Any


class Results(NamedTuple):
    """y, total [*lead, H, *inner]; total, x + residual, is None where there is no residual."""

    y: Any
    total: Any


class Outcome(NamedTuple):
    """What the forward operation returns: the results, and row statistics [*lead, 1, *inner] in the compute dtype.

    mean is None where none is subtracted, both where they are not kept.
    """

    y: Any
    total: Any
    mean: Any
    rstd: Any


class Saved(NamedTuple):
    """What is kept between forward and backward. total: what was normalised, x itself where nothing was added."""

    total: Any
    scale: Any
    mean: Any
    rstd: Any


class Cotangents(NamedTuple):
    """What the backward operation reads: the cotangents of the results (dtotal may be None), what was saved, and the
    offset for a y that is made again.
    """

    dy: Any
    dtotal: Any
    total: Any
    scale: Any
    offset: Any
    mean: Any
    rstd: Any


class Gradients(NamedTuple):
    """What the backward operation returns. dx: of total, and so of x and of residual alike. y: the forward's once more,
    from the same read of total, for whoever did not keep it.
    """

    dx: Any
    dscale: Any
    doffset: Any
    y: Any
