"""Results in eight bits, and their scales: the kinds that `quantize=` of the operators takes, and what it gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jln import _checks
from jln._junction.arrays import BLOCK, SCALE_OF, TABLE, Arrays, Shape

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

    With the scale of the step before (delayed scaling) one kernel makes the norm, its eight bits, and the largest
    `|y|`, of which the next scale is made: `amax / float(jnp.finfo(dtype).max)`. Micikevicius et al., "FP8 Formats for
    Deep Learning" (2022).

    Args:
      scale: a number, static or an array; positive and normal in float32. None: of this very result (current scaling),
        whose `amax` a first kernel finds: its operands, or with a residual the sum, are read again then. It is 1 where
        `amax` is 0, infinite or NaN. A function makes another one of `amax`, float32 `[]`, and of nothing else that is
        traced: `jln.Float8(lambda amax: jnp.maximum(amax, 1e-12) / 448)`.
      dtype: float8_e4m3fn or float8_e5m2.
    """

    scale: ArrayLike | Callable[[jax.Array], ArrayLike] | None = None
    dtype: DTypeLike = dataclasses.field(default=_E4M3, metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class MXFloat8(Kind["Quantized"]):
    """Eight bits with a scale for every 32 elements along the last axis, which is the normalised one, or along rows.

    These are the microscaling formats of the Open Compute Project (version 1.0, 2023). A scale is the least power of
    two with which none of its elements saturates, as cuDNN and `jax.nn.scaled_dot_general` choose it.

    Args:
      dtype: float8_e4m3fn or float8_e5m2.
      axis: -1, or -2 for blocks of 32 rows of a column, as the product reads them that makes a kernel's gradient. One
        kernel finds the rows' statistics, another reads `x`, or with a residual the sum, again. Not for operators with
        Linears, which make both for themselves; nor with parameters of examples.
    """

    dtype: DTypeLike = _E4M3
    axis: int = -1


Quantize = Float8 | MXFloat8 | None


class Quantized(NamedTuple):
    """An array in eight bits, and what its numbers are to be multiplied by.

    Attributes:
      values: `x`'s shape, in eight bits.
      scale: of `Float8` float32 `[]`. Of `MXFloat8` float8_e8m0fnu `[..., H / 32]`, as `jax.nn.scaled_matmul` takes it,
        or with `axis=-2` `[..., T / 32, H]`; NaN where one of the 32 is infinite or NaN.
      amax: of `Float8` the largest `|y|`, float32 `[]`; NaN if there is one. Of `MXFloat8` None.
      carrier: zeros of `x`'s shape, in the dtype that `y` has without `quantize`. It carries gradients straight
        through: its cotangent is taken for that of `y`. A program in which a product reads the others does not make
        it; one that returns it does, so leave it out of results, `q._replace(carrier=None)`. The others have no
        derivative: a cotangent of `values` is an error, those of `scale` and `amax` are zero.
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
            scale = jnp.repeat(scale, BLOCK, -1 if scale.shape[-1] != values.shape[-1] else -2)
        else:  # [], or with the axes of a loop's examples, which are in front
            scale = jnp.expand_dims(scale, range(scale.ndim, values.ndim))
        numbers = (values.astype(jnp.float32) * scale).astype(dtype)
        return numbers if self.carrier is None else _carried(numbers, self.carrier)


@jax.custom_jvp
def _carried(numbers: jax.Array, carrier: jax.Array) -> jax.Array:
    """The numbers, which move as the carrier does."""
    del carrier
    return numbers


_carried.defjvps(None, lambda tangent, numbers, *_: tangent.astype(numbers.dtype))


class Made(NamedTuple):
    """A norm's result in several ways, of one kernel, and what makes it again.

    Attributes:
      ways: a `Quantized` for each kind, all with one `amax` and one carrier, and the result itself for None.
      mean, rstd: the statistics of rows, float32 `[..., 1]`; mean is None where none is subtracted. No derivative.
    """

    ways: tuple[Any, ...]
    mean: jax.Array | None
    rstd: jax.Array


@dataclasses.dataclass(frozen=True)
class Ways(Kind[Made]):
    """A result in several ways, as `jln.fuse` asks for it, of a norm over the last axis.

    Args:
      kinds: up to three. The first is any kind in eight bits but blocks of rows, the others a `Float8` with a scale,
        or None.
    """

    kinds: tuple[Float8 | MXFloat8 | None, ...]


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
) -> tuple[dict[str, Any], dict[str, jax.Array]]:
    """The junction's settings of a result in eight bits, and the scales of all, of x's rank, by name."""
    if not isinstance(quantize, Ways):
        settled, scale = _settings(quantize, arrays, axes, dtype, forward_mode)
        return settled, {} if scale is None else {"y_scale": scale}
    settled, scales, more = {}, {}, []
    for name, kind in zip(SCALE_OF, quantize.kinds, strict=False):
        if kind is None:
            more.append(jnp.dtype(dtype).name)
            continue
        of_kind, scale = _settings(kind, arrays, axes, None, forward_mode)
        if scale is not None:
            scales[SCALE_OF[name]] = scale
        if name == "y":
            settled = of_kind
        else:
            more.append(of_kind["y_dtype"])
    return settled | {"more": tuple(more), "gives_statistics": True}, scales


def _settings(
    quantize: Any, arrays: Arrays, axes: tuple[int, ...], dtype: Any, forward_mode: bool
) -> tuple[dict[str, Any], jax.Array | None]:
    """The junction's y_dtype, eight_bits and scale_of, and the scale of all, of x's rank."""
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
        settled: dict[str, Any] = {"y_dtype": name, "eight_bits": "one"}
        if callable(quantize.scale):
            return settled | {"scale_of": quantize.scale}, None
        return settled, _scale_of(quantize.scale, x.ndim)
    if quantize.axis == -2:
        _check_blocks_of_rows(arrays, axes)
        return {"y_dtype": name, "eight_bits": "rows"}, None
    if not (_checks.is_number(quantize.axis) and quantize.axis == -1):
        raise ValueError(f"the axis of MXFloat8 must be -1 or -2; got {quantize.axis!r}")
    h = x.shape[-1]
    if axes != (x.ndim - 1,) or h % BLOCK:
        raise ValueError(
            f"MXFloat8 has a scale for every {BLOCK} elements of a last, normalised axis; got axes {axes} of x of "
            f"shape {x.shape}"
        )
    return {"y_dtype": name, "eight_bits": "blocks"}, None


def _check_blocks_of_rows(arrays: Arrays, axes: tuple[int, ...]) -> None:
    x = arrays.x
    if arrays.kernel is not None:
        raise ValueError("with Linears MXFloat8 has its blocks along what each product sums over; got axis=-2")
    if axes != (x.ndim - 1,) or x.ndim < 2 or x.shape[-2] % BLOCK:
        raise ValueError(
            f"MXFloat8(axis=-2) has a scale for every {BLOCK} rows, of the axis before a last, normalised one; got "
            f"axes {axes} of x of shape {x.shape}"
        )
    for name, a in arrays.present().items():
        if TABLE[name].shape is Shape.COLUMN and a.shape[-1] == x.shape[-1] and math.prod(a.shape[:-1]) > 1:
            raise ValueError(f"with MXFloat8(axis=-2) all rows must share the {name}; got shape {a.shape}")


def _scale_of(scale: Any, ndim: int) -> jax.Array | None:
    if scale is None:
        return None
    if _checks.is_number(scale) and not isinstance(scale, bool):
        numbers = jnp.finfo(jnp.float32)
        if not float(numbers.tiny) <= scale <= float(numbers.max):
            raise ValueError(f"the scale of Float8 must be positive, and normal in float32; got {scale}")
        scale = jnp.float32(scale)
    scale = _checks.array("scale of Float8", scale)
    if scale.ndim:
        raise ValueError(f"the scale of Float8 must be a number; got shape {scale.shape}")
    return jax.lax.stop_gradient(scale.astype(jnp.float32).reshape((1,) * ndim))


def made(results: Arrays, quantize: Any) -> Quantized | Made:
    """The result as it was asked for."""

    def one(kind: Any, name: str) -> Any:
        values, scale = getattr(results, name), getattr(results, SCALE_OF[name])
        if kind is None:
            return values
        if isinstance(kind, MXFloat8):
            scale = jax.lax.bitcast_convert_type(results.block_scale, jnp.float8_e8m0fnu)
            return Quantized(values, scale, None, results.carrier)
        return Quantized(values, scale, results.y_max, results.carrier)

    if not isinstance(quantize, Ways):
        return one(quantize, "y")
    ways = tuple(one(kind, name) for kind, name in zip(quantize.kinds, SCALE_OF, strict=False))
    return Made(ways, results.mean, results.rstd)
