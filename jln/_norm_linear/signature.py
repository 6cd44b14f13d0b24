"""What goes into LayerNorm+Linear, what is kept for its derivatives, and what comes out.

There may be several Linears behind one norm: kernel, bias and y, and what belongs to them, are tuples of arrays, one
for each. Inside of an operation the first axes of every array, *batch, are vmap's: on them any operand may have size 1
instead of the batch's, results always have the batch's, and parameter gradients are not summed over them. *lead are
x's rows. Where the norm has parameters for each example, products are still over all rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jln._norm import signature as norm


@dataclasses.dataclass(frozen=True)
class NormLinear:
    """Which norm and which products: all about them that is static.

    precision: as `jax.lax.dot_general` has it. features: how many axes of features each kernel has. in_one: whether
    norm and products are one operation, as `few_features` says.
    """

    norm: norm.Norm
    precision: Any
    features: tuple[int, ...]
    in_one: bool = False


@dataclasses.dataclass(frozen=True)
class Settings:
    """The operator's static arguments, as its rules need them."""

    norm_linear: NormLinear
    implementation: str | None


class Operands(NamedTuple):
    """Those of `jln._norm.signature`, the normalised axis the last; of each product kernel [*batch, H, *features] and
    bias [*batch, *features], which may be None.
    """

    x: Any
    residual: Any
    scale: Any
    offset: Any
    kernel: Any
    bias: Any
    x_bias: Any = None
    gate: Any = None
    row_gate: Any = None

    @classmethod
    def of(cls, of_norm: norm.Operands, *, kernel: Any, bias: Any) -> Operands:
        """of_norm: what is the norm's, of which some only a norm without a product takes."""
        taken = {name: a for name, a in of_norm._asdict().items() if name in cls._fields}
        return cls(**taken, kernel=kernel, bias=bias)

    @property
    def of_norm(self) -> norm.Operands:
        return norm.Operands(**{n: a for n, a in self._asdict().items() if n in norm.Operands._fields})


class Results(NamedTuple):
    """Of each product y [*batch, *lead, *features]; total, like x, None where there is no residual."""

    y: Any
    total: Any


class Outcome(NamedTuple):
    """What the forward operation returns: results, and mean and rstd [*batch, *lead, 1] as in `jln._norm.signature`."""

    y: Any
    total: Any
    mean: Any
    rstd: Any


class Saved(NamedTuple):
    """What is kept between forward and backward, None where no wanted gradient reads it. of_norm: what the norm keeps,
    as in `jln._norm.signature`.
    """

    of_norm: Any
    offset: Any
    kernel: Any


class Cotangents(NamedTuple):
    """What the backward operation reads: the cotangents of the results, None where one was not used, and what was
    saved.
    """

    dy: Any
    dtotal: Any
    total: Any
    scale: Any
    offset: Any
    kernel: Any
    mean: Any
    rstd: Any
    x: Any = None
    x_bias: Any = None
    gate: Any = None
    row_gate: Any = None


class Gradients(NamedTuple):
    """What the backward operation returns, each like what it is the gradient of; dx and dresidual as in
    `jln._norm.signature`.
    """

    dx: Any
    dscale: Any
    doffset: Any
    dkernel: Any
    dbias: Any
    dresidual: Any = None
    dx_bias: Any = None
    dgate: Any = None
    drow_gate: Any = None


class Rows(NamedTuple):
    """[*batch, *lead, *features], to be added up over *lead."""

    rows: Any


class ColumnSums(NamedTuple):
    """[*batch, *features]."""

    sums: Any


# By their operands' dtype, the most features that one program can hold (64 rows of sums, float32) beside a tile of x
# and one of the kernel; and where rows do not start on 16 bytes, and pairs of elements take registers for their
# addresses.
FUSED_FEATURES = {"bfloat16": (256, 64), "float16": (256, 64), "float32": (128, 32)}

# The presets of `jax.lax.DotAlgorithmPreset` that name what the fused kernels do.
_ALGORITHMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
    "float32": jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
}


def few_features(operands: Operands, of_norm: norm.Norm, precision: Any, implementation: str | None) -> bool:
    """Whether a kernel of ours may do norm and products at once, where the program is compiled for a GPU: then they are
    one operation. Else they are the norm's operation and products in plain sight of JAX and XLA.
    """
    x, kernels = operands.x, operands.kernel
    if implementation == "xla" or of_norm.examples or operands.x_bias is not None or operands.of_norm.gated:
        return False
    dtypes = {jnp.promote_types(x.dtype, kernel.dtype).name for kernel in kernels}
    dtype = dtypes.pop()
    n = sum(math.prod(kernel.shape[1:]) for kernel in kernels)
    if dtypes or dtype not in FUSED_FEATURES or n > FUSED_FEATURES[dtype][0]:
        return False
    return _multiplied_as_asked(precision, dtype)


def _multiplied_as_asked(precision: Any, dtype: str) -> bool:
    """Whether the fused kernels' products of operands of this dtype are what `precision` means on a GPU, where float32
    is multiplied in TF32 by default, and 16 bits alike at all levels.
    """
    if isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return precision == _ALGORITHMS[dtype]
    levels = precision if isinstance(precision, tuple) else (precision,)
    return jnp.dtype(dtype).itemsize == 2 or all(level in (None, jax.lax.Precision.DEFAULT) for level in levels)
