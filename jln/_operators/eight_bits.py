"""Results in eight bits, and their scales: the kinds that `quantize=` of the operators takes, and what it gives."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jln import _checks
from jln._junction.arrays import BLOCK, Arrays

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # whose default typing's has from Python 3.13 on

    Result = TypeVar("Result", default=jax.Array)
else:
    from typing import TypeVar

    Result = TypeVar("Result")

_E4M3 = jnp.float8_e4m3fn


class Kind(Generic[Result]):
    """A kind of result of a norm, for who checks types: without one the result is an array."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Float8(Kind["Quantized"]):
    """Eight bits with one scale for all of a result: `y * (1 / scale)`, rounded to the nearest and saturated.

    The next step's scale is made of the largest `|y|` (delayed scaling): `amax / float(jnp.finfo(dtype).max)`.
    Micikevicius et al., "FP8 Formats for Deep Learning" (2022).

    Args:
      scale: a number, static or an array; positive and normal in float32. None: of this very result (current scaling),
        or 1 where `amax` is 0, infinite or NaN.
      dtype: float8_e4m3fn or float8_e5m2.
    """

    scale: ArrayLike | None = None
    dtype: DTypeLike = dataclasses.field(default=_E4M3, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class MXFloat8(Kind["Quantized"]):
    """Eight bits with a scale for every 32 elements along the last axis, which is the normalised one.

    These are the microscaling formats of the Open Compute Project (version 1.0, 2023). A scale is the least power of
    two with which none of its elements saturates.

    Args:
      dtype: float8_e4m3fn or float8_e5m2.
    """

    dtype: DTypeLike = _E4M3


Quantize = Float8 | MXFloat8 | None


class Quantized(NamedTuple):
    """An array in eight bits, and what its numbers are to be multiplied by.

    Attributes:
      values: `x`'s shape, in eight bits.
      scale: of `Float8` float32 `[]`. Of `MXFloat8` float8_e8m0fnu `[..., H / 32]`, as `jax.nn.scaled_matmul` takes it;
        NaN where one of the 32 is infinite or NaN.
      amax: of `Float8` the largest `|y|`, float32 `[]`; NaN if there is one. Of `MXFloat8` None.
      carrier: zeros of `x`'s shape, in the dtype that `y` has without `quantize`. Its cotangent is taken for that of
        `y`. A program that returns it makes it, so leave it out of results, `q._replace(carrier=None)`. The others have
        no derivative: a cotangent of `values` is an error, those of `scale` and `amax` are zero.
    """

    values: jax.Array
    scale: jax.Array
    amax: jax.Array | None = None
    carrier: jax.Array | None = None

    def dequantized(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The numbers that the eight bits and their scales stand for; their cotangent is that of `carrier`.

        Args:
          dtype: of the numbers, which float32 holds exactly.
        """
        values, scale = self.values, self.scale.astype(jnp.float32)
        if self.carrier is not None:
            values, scale = jax.lax.stop_gradient((values, scale))
        if self.scale.dtype == jnp.float8_e8m0fnu:
            scale = jnp.repeat(scale, BLOCK, -1)
        else:  # [], or with the axes of a loop's examples, which are in front
            scale = jnp.expand_dims(scale, range(scale.ndim, values.ndim))
        numbers = (values.astype(jnp.float32) * scale).astype(dtype)
        return numbers if self.carrier is None else _follow(numbers, self.carrier)


@jax.custom_jvp
def _follow(numbers: jax.Array, carrier: jax.Array) -> jax.Array:
    """Give numbers the tangent and the cotangent of the carrier."""
    del carrier
    return numbers


_follow.defjvps(None, lambda tangent, numbers, *_: tangent.astype(numbers.dtype))


class Scaled(NamedTuple):
    """The result of Linears whose operand was quantised by a given scale (delayed scaling).

    Attributes:
      y: as without `quantize`.
      amax: the largest `|z|` of the norm's result, float32 `[]`, of which the next scale is made; NaN if there is one.
        It has no derivative.
    """

    y: Any
    amax: jax.Array


def settings(
    quantize: Any, arrays: Arrays, axes: tuple[int, ...], dtype: Any, forward_mode: bool
) -> tuple[dict[str, Any], jax.Array | None]:
    """The junction's y_dtype and eight_bits, and the scale of all, of x's rank."""
    x = arrays.x
    if not isinstance(quantize, Float8 | MXFloat8):
        raise TypeError(f"quantize must be jln.Float8(...), jln.MXFloat8(...) or None; got {quantize!r}")
    if dtype is not None:
        raise ValueError(f"with quantize= the result's dtype is that of {type(quantize).__name__}; got dtype={dtype!r}")
    if forward_mode:
        raise ValueError("with quantize= there is no forward_mode: gradients go straight through in reverse mode alone")
    for given, a in arrays.present().items():
        if any(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(a)):
            raise TypeError(f"with quantize= the arithmetic is in float32; got {given} in float64")
    name = jnp.dtype(quantize.dtype).name
    if name not in ("float8_e4m3fn", "float8_e5m2"):
        raise TypeError(f"the dtype of quantize must be float8_e4m3fn or float8_e5m2; got {name}")
    if isinstance(quantize, Float8):
        return {"y_dtype": name, "eight_bits": "one"}, _scale_of(quantize.scale, x.ndim)
    h = x.shape[-1]
    if axes != (x.ndim - 1,) or h % BLOCK:
        raise ValueError(
            f"MXFloat8 has a scale for every {BLOCK} elements of a last, normalised axis; got axes {axes} of x of "
            f"shape {x.shape}"
        )
    return {"y_dtype": name, "eight_bits": "blocks"}, None


def _scale_of(scale: Any, ndim: int) -> jax.Array | None:
    if scale is None:
        return None
    if _checks.is_number(scale):
        numbers = jnp.finfo(jnp.float32)
        if not float(numbers.tiny) <= scale <= float(numbers.max):
            raise ValueError(f"the scale of Float8 must be positive, and normal in float32; got {scale}")
        scale = jnp.float32(scale)
    scale = _checks.array("scale of Float8", scale)
    if scale.ndim:
        raise ValueError(f"the scale of Float8 must be a number; got shape {scale.shape}")
    return jax.lax.stop_gradient(scale.astype(jnp.float32).reshape((1,) * ndim))


def pack(results: Arrays, quantize: Any) -> Quantized:
    """Make the result that was asked for."""
    scale = results.y_scale
    if isinstance(quantize, MXFloat8):
        scale = jax.lax.bitcast_convert_type(results.block_scale, jnp.float8_e8m0fnu)
    return Quantized(results.y, scale, results.y_max, results.carrier)
