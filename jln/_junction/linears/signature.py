"""Records of LayerNorm+Linear: what goes in, what is kept for its derivatives, and what comes out.

There may be several Linears behind one norm: kernel, bias and y, and what belongs to them, are tuples of arrays, one
for each. `Results` and `Outcome` are the norm's, with a tuple y: [*batch, *lead, *features] of each product. Inside of
an operation the first axes of every array, *batch, are vmap's: on them any operand may have size 1 instead of the
batch's, results always have the batch's, and parameter gradients are not summed over them. *lead are x's rows. Where
the norm has parameters for each example, products are still over all rows.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jln import _checks
from jln._junction import signature as norm
from jln._junction.signature import Outcome as Outcome
from jln._junction.signature import Results as Results


@dataclasses.dataclass(frozen=True)
class NormLinear:
    """A norm and the products behind it, in all that is static about them.

    precision: as `jax.lax.dot_general` takes it. features: how many axes of features each kernel has. in_one: whether
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
    """The operands of norm and products.

    of_norm: those of the norm, of which the last axis is normalised.
    kernel: for each product [*batch, H, *features].
    bias: for each product [*batch, *features] or None.
    """

    of_norm: norm.Operands
    kernel: Any
    bias: Any


class Saved(NamedTuple):
    """The arrays kept between forward and backward, None where no wanted gradient reads them.

    of_norm: what the norm keeps, as in `jln._junction.signature`.
    """

    of_norm: Any
    offset: Any
    kernel: Any


class Cotangents(NamedTuple):
    """The operands of the backward operation.

    dy: for each product, None where y was not used. kernel: those of the products.
    of_norm: what the norm's backward operation reads, without its own dy, that of the norm's result, which is made
      here.
    """

    dy: Any
    of_norm: norm.Cotangents
    kernel: Any


class Gradients(NamedTuple):
    """The results of the backward operation. of_norm: the norm's gradients, without y."""

    of_norm: norm.Gradients
    dkernel: Any
    dbias: Any


class Rows(NamedTuple):
    """The rows of a column sum: [*batch, *lead, *features], to be added up over *lead."""

    rows: Any


class ColumnSums(NamedTuple):
    """The sums over rows: [*batch, *features]."""

    sums: Any


# The most features that one program can hold (64 rows of sums, float32) beside a tile of x and one of the kernel, by
# the operands' dtype; and the most where rows do not start on 16 bytes, and pairs of elements take registers for their
# addresses.
FUSED_FEATURES = {"bfloat16": (256, 64), "float16": (256, 64), "float32": (128, 32)}

# The presets of `jax.lax.DotAlgorithmPreset` that name what the fused kernels do.
_ALGORITHMS = {
    "bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
    "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32,
    "float32": jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
}


def few_features(operands: Operands, of_norm: norm.Norm, precision: Any, implementation: str | None) -> bool:
    """True where one kernel may do norm and products at once, on a GPU: then they are one operation.

    Otherwise they are the norm's operation and products in plain sight of JAX and XLA.
    """
    given, kernels = operands.of_norm, operands.kernel
    if implementation == "xla" or of_norm.of_examples or given.x_bias is not None or given.gated:
        return False
    dtypes = {_checks.promoted(given.x.dtype, kernel.dtype).name for kernel in kernels}
    dtype = dtypes.pop()
    n = sum(math.prod(kernel.shape[1:]) for kernel in kernels)
    if dtypes or dtype not in FUSED_FEATURES or n > FUSED_FEATURES[dtype][0]:
        return False
    return _multiplied_as_asked(precision, dtype)


def _multiplied_as_asked(precision: Any, dtype: str) -> bool:
    """True where the fused kernels multiply operands of this dtype as `precision` asks for on a GPU.

    There 16 bits are multiplied alike at all levels, and float32 by default in TF32, or on AMD's GPUs exactly.
    """
    if isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return precision == _ALGORITHMS[dtype]
    levels = precision if isinstance(precision, tuple) else (precision,)
    return jnp.dtype(dtype).itemsize == 2 or all(level in (None, jax.lax.Precision.DEFAULT) for level in levels)
