"""What goes into the operator of a norm on both sides of a sum, what is kept for its derivatives, and what comes out.

Arrays lie as in `jln._norm.signature`. What is named x_... is of the norm in front of the sum, the rest of the one
behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """x, residual [*lead, H, *inner]; x_scale, scale [1, ..., H, ..., 1], each of which may be None."""

    x: Any
    residual: Any
    x_scale: Any = None
    scale: Any = None


class Results(NamedTuple):
    """y, total [*lead, H, *inner]"""

    y: Any
    total: Any


class Outcome(NamedTuple):
    """What the forward operation returns: the results, and x_rstd, rstd [*lead, 1, *inner] in the compute dtype."""

    y: Any
    total: Any
    x_rstd: Any = None
    rstd: Any = None


class Saved(NamedTuple):
    """What is kept between forward and backward."""

    total: Any
    scale: Any
    rstd: Any
    x: Any
    x_scale: Any
    x_rstd: Any


class Cotangents(NamedTuple):
    """What the backward operation reads: the cotangents of the results (dtotal may be None), and what was saved."""

    dy: Any
    dtotal: Any
    total: Any
    scale: Any
    rstd: Any
    x: Any
    x_scale: Any
    x_rstd: Any


class Gradients(NamedTuple):
    """What the backward operation returns, each like what it is the gradient of."""

    dx: Any = None
    dresidual: Any = None
    dx_scale: Any = None
    dscale: Any = None
