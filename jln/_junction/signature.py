"""Records of the norm operators: what goes in, what is kept for their derivatives, and what comes out.

Large arrays are [*lead, H, *inner], with H at the negative `axis`. Parameters have the same rank, with 1 everywhere but
at `axis` and on the axes of examples. Arrays with one value a row have 1 at `axis`.

Inside of an operation the first `batch_dims` axes are vmap's: on them any operand may have size 1 instead of the
batch's, results always have the batch's, and parameter gradients are not summed over them. The next `examples` axes,
and the `interleaved` ones directly before H, are as vmap's, but every operand has their sizes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


class Switches(NamedTuple):
    """The static switches for which kernels are compiled: the constexpr NORM.

    norm_before_gate: whether silu(z), where there is a z, multiplies the norm's result, or x.
    """

    subtract_mean: bool
    zero_centered_scale: bool = False
    norm_before_gate: bool = True


@dataclasses.dataclass(frozen=True)
class Norm:
    """A norm, in all that is static about it.

    axis: negative. examples: how many of the first axes are those of examples with parameters of their own.
      interleaved: how many axes of examples are directly before the normalised one.
    """

    axis: int
    epsilon: float
    switches: Switches
    examples: int = 0
    interleaved: int = 0

    @property
    def of_examples(self) -> bool:
        return self.examples + self.interleaved > 0

    def axes_of_examples(self, ndim: int, batch_dims: int) -> list[int]:
        """The axes of examples of arrays with `ndim` axes, vmap's included."""
        h = ndim + self.axis
        return [*range(batch_dims + self.examples), *range(h - self.interleaved, h)]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The operator's static arguments, as its rules need them. y_dtype: a dtype's name."""

    norm: Norm
    y_dtype: str
    implementation: str | None


class Operands(NamedTuple):
    """The operands of the forward operation. All but x may be None.

    x, residual, z, added: [*lead, H, *inner]. residual: added to x in front of the norm. added: the array to which y is
      added.
    x_bias, gate, scale, offset: [1, ..., H, ..., 1].
    row_gate: [*lead, 1, *inner], the gate where it has one value a row.

    Without a residual there is neither gate nor x_bias; beside z there is neither a residual nor an offset.
    """

    x: Any
    residual: Any = None
    scale: Any = None
    offset: Any = None
    x_bias: Any = None
    gate: Any = None
    row_gate: Any = None
    z: Any = None
    added: Any = None

    @property
    def gated(self) -> bool:
        return self.gate is not None or self.row_gate is not None


class Results(NamedTuple):
    """The operator's results: y and total, both [*lead, H, *inner].

    total, the residual and what is added to it, is None where there is no residual.
    """

    y: Any
    total: Any


class Outcome(NamedTuple):
    """The results of the forward operation, with row statistics [*lead, 1, *inner] in the compute dtype.

    mean is None where none is subtracted, mean and rstd are None where they are not kept.
    """

    y: Any
    total: Any
    mean: Any
    rstd: Any


class Branch(NamedTuple):
    """The addend of the residual, as far as the gradients of its parts read it: x for the gates' alone."""

    x: Any = None
    x_bias: Any = None
    gate: Any = None
    row_gate: Any = None

    @property
    def gated(self) -> bool:
        return self.gate is not None or self.row_gate is not None


class Saved(NamedTuple):
    """The arrays kept between forward and backward.

    total: the array that was normalised; x itself where nothing was added, even where x * silu(z) was normalised.
      branch: a `Branch`.
    """

    total: Any
    scale: Any
    mean: Any
    rstd: Any
    branch: Any = Branch()
    z: Any = None


class Cotangents(NamedTuple):
    """The operands of the backward operation: the results' cotangents, what was saved, and an offset.

    dtotal may be None. offset: for a y that is made again.
    """

    dy: Any
    dtotal: Any
    total: Any
    scale: Any
    offset: Any
    mean: Any
    rstd: Any
    x: Any = None
    x_bias: Any = None
    gate: Any = None
    row_gate: Any = None
    z: Any = None


class Gradients(NamedTuple):
    """The results of the backward operation.

    dx: the gradient of total, and so of x and of residual alike, where there is no gate.
    dresidual: the gradient of total where there is a gate.
    y: the forward's result once more, from the same read of total, for an operator that did not keep it; never beside
      z.
    """

    dx: Any = None
    dscale: Any = None
    doffset: Any = None
    y: Any = None
    dresidual: Any = None
    dx_bias: Any = None
    dgate: Any = None
    drow_gate: Any = None
    dz: Any = None
