"""The Linears' products in eight bits: each sums over axes along which both of its operands are quantised.

The norm that makes z quantises it along H. The kernel is quantised along H for (11) and along the features for (14), dy
along the features for (14) and along the rows for (13), and z, made again, along the rows for (13), by terms (50) to
(53) of `jln._junction.eight_bits`. All sums are in float32. Gradients go straight through: those of the quantised
operands are taken for those of the operands, saturated or not.

- One scale: those of the kernel and of dy are made of their own largest element. dy has e5m2, the kernel e4m3. XLA's
  GPU backend multiplies in eight bits, by its Triton kernels or by cuBLASLt. The scale of an operand with an infinity
  or a NaN is one, too, so that the product is NaN.
- Blocks: dy and the kernel have e4m3, as in NVIDIA's recipe. On Blackwell cuDNN multiplies blocks by their scales.
  Elsewhere the numbers that they stand for, which bfloat16 holds exactly, are multiplied, in bfloat16 where the product
  has it, else in float32. Blocks that the axis does not fill are filled with zeros, which take no part in a largest
  element or in a sum.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jln._core.operation import vary_together
from jln._junction.arrays import BLOCK, Arrays, Junction
from jln._junction.eight_bits import by_block_scales, by_scale, largest
from jln._triton.chip import Chip

KERNEL = "float8_e4m3fn"
COTANGENT = {"one": "float8_e5m2", "blocks": "float8_e4m3fn"}


def multiplies_blocks(chip: Chip | None) -> bool:
    """True where XLA has cuDNN multiply blocks in eight bits: on NVIDIA's GPUs from Blackwell on."""
    return chip is not None and not chip.is_amd and chip.capability >= 100


class Eight(NamedTuple):
    """An operand in eight bits.

    scale: of all, float32 []; or of the blocks along the last of `axes`, in the bits of float8_e8m0fnu.
    axes: those over which the product sums, one behind the other.
    """

    values: Array
    scale: Array
    axes: tuple[int, ...]


def forward(z: Arrays, operands: Arrays, junction: Junction, dtypes: Sequence[str]) -> tuple[Array, ...]:
    """Term (11) of the norm's results in eight bits, rounded as `affine` of the other products rounds it."""
    scale = z.y_scale if z.block_scale is None else z.block_scale
    z_eight = Eight(z.y, scale, (z.y.ndim - 1,))
    results = []
    for kernel, bias, dtype in zip(operands.kernel, operands.bias, dtypes, strict=True):
        sums = dtype if bias is None or dtype == bias.dtype.name == "bfloat16" else jnp.float32
        y = _product(z_eight, quantise(kernel, (0,), KERNEL, junction), junction, sums)  # (11)
        if bias is not None:
            y = y + jnp.expand_dims(bias.astype(sums), range(y.ndim - bias.ndim))  # (11)
        results.append(y.astype(dtype))
    return tuple(results)


def dz(dy: Array, kernel: Array, features: int, junction: Junction, dtype: Any) -> Array:
    """Term (14) of one Linear, in `dtype`."""
    of_dy, of_kernel = (tuple(range(a.ndim - features, a.ndim)) for a in (dy, kernel))
    dy_eight = quantise(dy, of_dy, COTANGENT[junction.eight_bits], junction)
    return _product(dy_eight, quantise(kernel, of_kernel, KERNEL, junction), junction, dtype)  # (14)


def dkernel(dy: Array, features: int, z: Eight, junction: Junction, dtype: Any) -> Array:
    """Term (13) of one Linear, `[*features, H]`, in `dtype`."""
    return _product(_along_rows(dy, features, COTANGENT[junction.eight_bits], junction), z, junction, dtype)  # (13)


def z_along_rows(z: Array, operands: Arrays, junction: Junction) -> Eight:
    """The norm's result, made again, for (13)."""
    assert junction.y_dtype is not None
    scale = None if operands.y_scale is None else operands.y_scale.reshape(())
    return _along_rows(z, 1, junction.y_dtype, junction, scale)


def _along_rows(a: Array, others: int, dtype: str, junction: Junction, scale: Array | None = None) -> Eight:
    """The operand that is summed over rows. others: how many axes are behind them."""
    a = a if a.ndim > others else a[None]
    return quantise(a, tuple(range(a.ndim - others)), dtype, junction, scale)


def quantise(a: Array, axes: tuple[int, ...], dtype: str, junction: Junction, scale: Array | None = None) -> Eight:
    """The operand in eight bits of a product that sums over `axes`."""
    if junction.by_cudnn:  # which sums over last axes: transposed first, XLA writes it in no more than eight bits
        kept = [i for i in range(a.ndim) if i not in axes]
        a, axes = jnp.transpose(a, (*kept, *axes)), tuple(range(len(kept), a.ndim))
    a = a.astype(jnp.float32)
    if junction.eight_bits == "one":
        if scale is None:
            scale = largest(a) / float(jnp.finfo(dtype).max)
            scale = jnp.where(scale < float(jnp.finfo(jnp.float32).tiny), 1, scale)
        return Eight(_in_dtype(dtype, by_scale(a, scale, dtype)), scale, axes)  # (50)
    if a.shape[axes[-1]] % BLOCK:
        first, end = axes[0], axes[-1] + 1
        n = math.prod(a.shape[first:end])
        a = a.reshape(*a.shape[:first], n, *a.shape[end:])
        a = jnp.pad(a, [(0, -n % BLOCK if i == first else 0) for i in range(a.ndim)])
        axes = (first,)
    values, scale = by_block_scales(a, dtype, axes[-1], _bits_of_largest)  # (52), (53)
    return Eight(_in_dtype(dtype, values), scale, axes)


def _bits_of_largest(blocks: Array, axis: int) -> Array:
    """The bits of the largest magnitude as a number: of bits XLA's GPU backend writes out what is transposed.

    XLA's CPU backend may overlook a NaN here, which is NaN in eight bits, too.
    """
    return lax.bitcast_convert_type(jnp.max(jnp.abs(blocks), axis), jnp.int32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _in_dtype(dtype: str, a: Array) -> Array:
    return a.astype(dtype)


@_in_dtype.defjvp
def _refuse(*_: Any) -> Any:
    raise TypeError("gradients of products in eight bits have no derivatives: what they are made of was rounded")


def _product(a: Eight, b: Eight, junction: Junction, dtype: Any) -> Array:
    """The sum over the operands' axes, in `dtype`: the other axes of a, then those of b."""

    def dot(of_a: Array, of_b: Array, sums: Any) -> Array:
        numbers = ((a.axes, b.axes), ((), ()))
        return lax.dot(of_a, of_b, dimension_numbers=numbers, preferred_element_type=sums)  # as `axes.einsum` says

    if junction.eight_bits == "one":
        return (dot(a.values, b.values, jnp.float32) * (a.scale * b.scale)).astype(dtype)

    # A GPU multiplies float32 in TF32, which holds them, too. XLA's CPU backend (jaxlib 0.10.2) refuses some products
    # of bfloat16 in float32.
    exact = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32

    def multiply(a_values: Array, a_scale: Array, b_values: Array, b_scale: Array) -> Array:
        of_a = _dequantise(a_values, a_scale, a.axes[-1], exact)
        return dot(of_a, _dequantise(b_values, b_scale, b.axes[-1], exact), dtype)

    def by_cudnn(a_values: Array, a_scale: Array, b_values: Array, b_scale: Array) -> Array:
        rows, columns = (side.values.shape[: side.axes[0]] for side in (a, b))
        of_a = (v.reshape(1, math.prod(rows), -1) for v in (a_values, a_scale))
        of_b = (v.reshape(1, math.prod(columns), -1) for v in (b_values, b_scale))
        y = cudnn_product(jnp.dtype(dtype).name)(*of_a, *of_b).reshape(*rows, *columns)
        return vary_together((y, a_values, b_values))[0]  # which JAX forgets of that product inside of shard_map

    given = (a.values, a.scale, b.values, b.scale)
    if not junction.by_cudnn:
        return multiply(*given)
    return lax.platform_dependent(*given, cuda=by_cudnn, default=multiply)


def _dequantise(values: Array, scale: Array, axis: int, dtype: Any) -> Array:
    shape = values.shape
    blocks = values.reshape(*shape[:axis], shape[axis] // BLOCK, BLOCK, *shape[axis + 1 :]).astype(dtype)
    scale = lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu).astype(dtype)
    return (blocks * jnp.expand_dims(scale, axis + 1)).reshape(values.shape)


@functools.cache
def cudnn_product(dtype: str) -> Callable[[Array, Array, Array, Array], Array]:
    """The product of a `[B, M, K]`, its scales, b `[B, N, K]` and its scales.

    What the examples of a `vmap` share is written out: JAX 0.10 refuses one of `jax.nn.scaled_matmul` over one side.
    """

    @jax.custom_batching.custom_vmap
    def product(a: Array, a_scale: Array, b: Array, b_scale: Array) -> Array:
        a_scale, b_scale = (lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu) for scale in (a_scale, b_scale))
        return jax.nn.scaled_matmul(a, b, a_scale, b_scale, preferred_element_type=jnp.dtype(dtype))

    @product.def_vmap
    def multiply_examples(size: int, batched: Sequence[bool], *given: Array) -> tuple[Array, bool]:
        whole = [v if own else jnp.broadcast_to(v, (size, *v.shape)) for v, own in zip(given, batched, strict=True)]
        y = product(*(v.reshape(-1, *v.shape[2:]) for v in whole))
        return y.reshape(size, -1, *y.shape[1:]), True

    return product
