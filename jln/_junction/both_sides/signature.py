"""Records of a norm on both sides of a sum: what goes in, what is kept for its derivatives, and what comes out.

Arrays lie as in `jln._junction.signature`. A name x_... is of the norm in front of the sum, any other of the norm
behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """The operands of the forward operation.

    x, residual: [*lead, H, *inner]. x_scale, scale: [1, ..., H, ..., 1], each of which may be None.
    """

    x: Any
    residual: Any
    x_scale: Any = None
    scale: Any = None


class Results(NamedTuple):
    """The operator's results: y and total, both [*lead, H, *inner]."""

    y: Any
    total: Any


class Outcome(NamedTuple):
    """The results of the forward operation, with x_rstd and rstd [*lead, 1, *inner] in the compute dtype."""

    y: Any
    total: Any
    x_rstd: Any = None
    rstd: Any = None


class Saved(NamedTuple):
    """The arrays kept between forward and backward."""

    total: Any
    scale: Any
    rstd: Any
    x: Any
    x_scale: Any
    x_rstd: Any


class Cotangents(NamedTuple):
    """The operands of the backward operation: the results' cotangents (dtotal may be None), and what was saved."""

    dy: Any
    dtotal: Any
    total: Any
    scale: Any
    rstd: Any
    x: Any
    x_scale: Any
    x_rstd: Any


class Gradients(NamedTuple):
    """The results of the backward operation, each like the operand that it is the gradient of."""

    dx: Any = None
    dresidual: Any = None
    dx_scale: Any = None
    dscale: Any = None
