"""Tiles of the fused LayerNorm+Linear kernels, and whether these run at all."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jln import _checks
from jln._junction.arrays import Arrays, Junction
from jln._triton.chip import Chip, triton_version
from jln._triton.target import INTERPRETED
from jln._triton.tile import Tile, ceil_div, is_aligned, next_power_of_2

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
# All that the fused kernels read.
_FUSED_OPERANDS = {"x", "residual", "scale", "offset", "kernel", "bias"}


def few_features(operands: Arrays, junction: Junction) -> bool:
    """True where one kernel may do norm and product at once, on a GPU: then they are one operation.

    Otherwise, as with several Linears, they are the norm's operation and products in plain sight of JAX and XLA.
    """
    if junction.implementation == "xla" or junction.eight_bits or operands.present().keys() - _FUSED_OPERANDS:
        return False
    norm = junction.norm
    if norm.has_groups or norm.both_sides or norm.remat or len(operands.kernel) > 1:
        return False
    (kernel,) = operands.kernel
    dtype = _checks.promote(operands.x.dtype, kernel.dtype).name
    if junction.y_dtype not in (None, operands.x.dtype.name):
        return False
    if dtype not in FUSED_FEATURES or math.prod(kernel.shape[1:]) > FUSED_FEATURES[dtype][0]:
        return False
    return _has_precision(junction.precision, dtype)


def _has_precision(precision: Any, dtype: str) -> bool:
    """True where the fused kernels multiply operands of this dtype as `precision` asks for on a GPU.

    There 16 bits are multiplied alike at all levels, and float32 by default in TF32, or on AMD's GPUs exactly.
    """
    if isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return precision == _ALGORITHMS[dtype]
    levels = precision if isinstance(precision, tuple) else (precision,)
    return jnp.dtype(dtype).itemsize == 2 or all(level in (None, jax.lax.Precision.DEFAULT) for level in levels)


# Estimates for an H200: the bytes a microsecond that one SM can take in from L2, an SM's share of the bytes that memory
# gives to all of them, and the microseconds that one launch more costs. `forward_tile` uses them to weigh long walks of
# few programs. A compute unit of an MI300X takes in as much from L2, and its share of memory's 5.3 TB/s is smaller.
L2_RATE, MEMORY_RATE, LAUNCH_TIME = 64_000, 36_000, 5
AMD_MEMORY_RATE = 17_000


def features(n: int) -> int:
    """The columns of a tile that holds all N of a product."""
    return max(16, next_power_of_2(n))


# Older versions of Triton leave out fences. 3.6.0 and 3.7.0 have none between the store of a tile to shared memory and
# the wgmma (sm_90) or tcgen05.mma (sm_100) that reads it in the fused forward, nor for sm_90 in one of two places of
# the backward in 16 bits. 3.7.1, 3.8.0 and 3.9.0 have all (`tests/triton/test_compiled_linears.py`).
FENCED_TRITON = (3, 7, 1)


def missing_fence(chip: Chip) -> str | None:
    """The reason why a product on `chip` might read its operands from shared memory too early; None where it waits."""
    if not chip.has_wgmma or chip.name == INTERPRETED.name or triton_version() >= FENCED_TRITON:
        return None
    return (
        f"Triton {'.'.join(map(str, triton_version()))} leaves out fences before the products of kernels for "
        f"{chip}: LayerNorm+Linear is composed of a norm's kernels and XLA's products, and with "
        f"triton>={'.'.join(map(str, FENCED_TRITON))} fused where that is faster"
    )


def _fused_tile(h: int, n: int, product_dtype: str, chip: Chip) -> Tile | None:
    """The tile of rows and columns of x that the fused LayerNorm+Linear kernels take; None where they cannot run.

    They do not take float64, which is XLA's business. Nor float32 on Blackwell, where `backward_kernel` at N = 128 has
    too few registers; nor its small chips, with less shared memory than an H100 and no wgmma. Nor a kernel [H, N] with
    2**31 elements, whose offsets have 32 bits. Nor do they run by a Triton that leaves out fences.
    """
    if product_dtype not in FUSED_FEATURES or missing_fence(chip):
        return None
    if not chip.is_amd and (chip.capability > 103 or (product_dtype == "float32" and chip.capability >= 100)):
        return None
    widest, widest_unaligned = FUSED_FEATURES[product_dtype]
    if n > (widest if is_aligned(h, 2) and is_aligned(n, 2) else widest_unaligned) or h * n >= 2**31:
        return None
    if chip.is_amd:
        # Where a SIMD has two waves, each of them has 256 vector registers. In 16 bits at N = 128 the backward kernel
        # takes up to 414 for 64 columns, 281 for 32 columns in two stages, and 230 for 32 columns in one stage. Where
        # that does not fit, 16 columns in two stages do.
        narrow = features(n) > 128 or product_dtype == "float32"
        return Tile(64, 16, 8, 2) if narrow else Tile(64, 32, 8, 1)
    # A stage is 8 KB of x, which comes from memory, and up to 32 KB of dy or kernel, which L2 has. Some 16 KB of x in
    # flight on each SM hide the latency. There are eight warps, as with four the backward kernel takes all 255
    # registers at N = 64.
    stages = 2 if not chip.has_wgmma or product_dtype == "float32" else 4 if features(n) <= 64 else 3
    return Tile(64, 64, 8, stages)


def forward_tile(rows: int, h: int, n: int, product_dtype: str, chip: Chip, adds: bool = False) -> Tile | None:
    """The tile of LayerNorm+Linear forward as one kernel; None where it is composed of the norm's and XLA's product.

    adds: whether there is a residual.

    A program walks over all H of its rows and of the kernel, which L2 gives it at its own pace, however few other
    programs there are. Composed, all SMs together read and write [M, H] three times instead of once, in one launch
    more. The faster of the two is chosen: with 132 SMs and H = 4096 the walk takes 41 us at N = 256, 16 at N = 64, so
    that it pays from 7200 rows on, or from 2200; at H = 768 and N = 64 it always does.
    """
    tile = _fused_tile(h, n, product_dtype, chip)
    if tile is None:
        return None
    if not chip.has_wgmma and not chip.is_amd and features(n) > 128:  # a wider tile for mma spills on sm_89
        tile = dataclasses.replace(tile, columns=32, stages=3)
    walks = ceil_div(ceil_div(rows, tile.rows), chip.cores)
    itemsize = 4 if product_dtype == "float32" else 2
    fused = walks * itemsize * h * (tile.rows + features(n)) / L2_RATE
    memory_rate = AMD_MEMORY_RATE if chip.is_amd else MEMORY_RATE
    composed = LAUNCH_TIME + 3 * itemsize * rows * h / (memory_rate * chip.cores)
    if fused > composed:
        return None
    if adds and h % tile.columns:
        # The masks of two more arrays take registers. 64 columns spill 24 bytes on an H200 at H = 1000 and N = 136, and
        # at H = 1023 and N = 7 they spill 64 bytes on a B200, and 72 bytes in float32 on an H200.
        tile = dataclasses.replace(tile, columns=min(tile.columns, 32))
    return tile


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The tiles and the grids of the fused LayerNorm+Linear backward.

    row_sums: `row_programs` programs take its tiles of rows in turns, `parts` of them sharing the columns of one.
    backward: `splits` programs take its tiles of rows in turns, for each tile of columns.
    parameters: `rows` of the splits are added up at a time.
    """

    row_sums: Tile
    row_programs: int
    parts: int
    backward: Tile
    splits: int
    parameters: Tile


def backward_plan(rows: int, h: int, n: int, product_dtype: str, chip: Chip) -> BackwardPlan | None:
    """The plan of LayerNorm+Linear backward as three kernels; None where it is composed of XLA's products and a norm's.

    It is fused for every number of rows: [M, H] crosses the memory bus 3 times (x twice, dx), composed 6 times and in
    six launches, and few rows leave no long walk, since programs share them by columns.
    """
    tile = _fused_tile(h, n, product_dtype, chip)
    if tile is None:
        return None
    # mma holds operands in registers, where wgmma reads them from shared memory, so that more rows spill on sm_80.
    # wgmma needs 64 rows: with fewer a product silently becomes mma.
    mma_rows = 32 if features(n) <= 128 and is_aligned(h, 2) else 16
    backward = dataclasses.replace(tile, rows=64 if chip.has_wgmma else mma_rows)
    row_sums = tile
    if product_dtype == "float32" and not chip.has_wgmma and not chip.is_amd:
        # 64 columns take all 128 registers at N = 64 and at 104, where an operand has 16 bits. 32 in three stages keep
        # as much of x in flight; of more features an L4 has no room for the third.
        row_sums = dataclasses.replace(tile, columns=32, stages=3 if features(n) <= 64 else 2)
    row_programs = min(ceil_div(rows, row_sums.rows), chip.cores)
    # The parts are a power of 2, so that there are fewer variants to compile, and not more than 8, as every program of
    # `backward_kernel` has to read the sums of all parts.
    parts = next_power_of_2(min(8, chip.cores // row_programs, ceil_div(h, row_sums.columns)) + 1) // 2
    splits = _splits(ceil_div(rows, backward.rows), ceil_div(h, backward.columns), chip.cores)
    # `parameters_kernel` has a program or more for most SMs, and takes 4096 elements at a time, so that it does not
    # meet the shares one after another.
    columns = min(32, next_power_of_2(ceil_div(h, chip.cores)))
    shares = min(next_power_of_2(splits), max(1, 4096 // (columns * features(n))))
    return BackwardPlan(row_sums, row_programs, parts, backward, splits, Tile(shares, columns, 8))


def _splits(row_tiles: int, chunks: int, cores: int) -> int:
    """The number of programs that share the rows of each of `chunks` tiles of columns, for the least time.

    An SM runs a program a round, each with its trips over tiles of rows and its share of G, which is written and read
    again like 4 more.
    """

    def time(splits: int) -> int:
        return ceil_div(splits * chunks, cores) * (ceil_div(row_tiles, splits) + 4)

    return min(range(1, min(row_tiles, cores) + 1), key=time)
