"""What a launch depends on: the chip, and the tile sizes of each kernel, as plain data and pure functions.

Every choice is a function of the row length `H`, the element type, the chip and the memory layout, and never of
the number of rows: that is what makes a row's result independent of how many others it is computed with. What was
measured goes first: the launchers ask `tuning`, which asks here.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
import re
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Chip:
    """An NVIDIA GPU as the launchers see it.

    capability: compute capability as an integer, 90 for 9.0.
    sms: streaming multiprocessors, one `sm` running several programs at a time.
    """

    name: str
    capability: int
    sms: int


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("a100", 80, 108),
        Chip("l4", 89, 58),
        Chip("l40s", 89, 142),
        Chip("h100", 90, 132),
        Chip("h200", 90, 132),
        Chip("b200", 100, 148),
    )
}

# Triton's interpreter runs programs one after another; three "SMs" make every program of the
# backward kernel loop over several tiles, and leave some loops one trip shorter than others.
INTERPRETER = Chip("interpreter", 90, 3)

CHIP_VARIABLE = "JLN_CHIP"
_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("jln_target_chip", default=None)


@contextlib.contextmanager
def target(name: str) -> Iterator[Chip]:
    """Lower Triton calls for the chip `name` while the context is active, whatever GPU is present.

    For ahead-of-time compilation. Raises ValueError where the chip is unknown.
    """
    chip = named_chip(name)
    token = _target.set(name)
    try:
        yield chip
    finally:
        _target.reset(token)


def named_chip(name: str) -> Chip:
    try:
        return CHIPS[name]
    except KeyError:
        raise ValueError(f"unknown chip {name!r}; known are {', '.join(sorted(CHIPS))}") from None


def target_chip() -> Chip | None:
    """The chip to lower for: `target`, else the environment variable JLN_CHIP, else the first local GPU, else None."""
    name = _target.get() or os.environ.get(CHIP_VARIABLE)
    return named_chip(name) if name else _local_chip()


def _local_chip() -> Chip | None:
    import jax

    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # no CUDA backend in this process
        return None
    capability = int(str(device.compute_capability).replace(".", ""))
    return Chip(device.device_kind, capability, device.core_count)


# Whether LLVM may contract `a * b + c` to one instruction with one rounding. No: where a thread holds one element of a
# sum of products, the two threads of a shuffle would each round the other's product and not its own, and store two
# results at one address. So what may round once is written `tl.fma`: all but sums of products within a tile, which take
# one instruction an element more (2 % of the forward's at H = 128 to 4096, on an H200 in 16 bits; the backward has as
# many as before, where letting it contract nothing at all would be 11 % more). Their accuracy is the same.
FP_FUSION = False


@dataclasses.dataclass(frozen=True)
class Tile:
    """One program's tile of `rows` by `columns` elements of `[M, H]`, and the warps that share it.

    programs_per_sm: how many persistent programs the grid has for each SM (kernels that loop over tiles).
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1
    programs_per_sm: int = 1

    def options(self) -> dict[str, int]:
        """What Triton's compiler is asked for.

        Programs that share an SM share its 65536 registers; unasked, the compiler takes 155 of the 128 that a thread of
        16 warps can have, for 4096 columns of float32 in `backward_kernel`, and every other program would wait.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": FP_FUSION}
        if self.programs_per_sm > 1 and self.warps * self.programs_per_sm <= 16:
            options["maxnreg"] = 128
        return options


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# Columns have 32-bit numbers, and a loop over chunks of them ends at a multiple of a chunk of up to 2**15.
LONGEST_ROW = 2**31 - 2**16

# Elements a thread may hold, found by compiling every choice for sm_80, sm_90 and sm_100 and looking at the spills
# (tests/test_compiler.py keeps them honest): the forward kernel holds one value an element, the backward kernel four.
# float64 takes more than twice the registers; where rows do not start on 16 bytes every element has an address of its
# own; and operands of several dtypes are laid out in several ways.
FORWARD_ELEMENTS = 16
BACKWARD_ELEMENTS = 16


def _aligned(h: int, inner: int, itemsize: int) -> bool:
    return (h if inner == 1 else inner) * itemsize % 16 == 0


def _per_thread(elements: int, h: int, inner: int, itemsize: int, mixed: bool) -> int:
    easy = _aligned(h, inner, itemsize) and not mixed
    return elements // (1 if easy else 2) // (4 if itemsize == 8 else 1)


def _tile(rows: int, columns: int, per_thread: int, stages: int = 1, programs_per_sm: int = 1) -> Tile:
    warps = min(32, max(1, rows * columns // (32 * max(1, per_thread))))
    return Tile(rows, columns, warps, stages, programs_per_sm)


def _side_by_side(columns: int, inner: int, itemsize: int, limit: int) -> int:
    """Rows that a tile takes where rows are neighbours in memory: a 128-byte line of them, if `columns` leave room."""
    return min(128 // itemsize, next_power_of_2(inner), max(1, limit // columns))


def forward_tile(h: int, inner: int, itemsize: int, mixed: bool = False) -> Tile:
    """The tile of `forward_kernel`: whole rows while they fit, chunks of wider ones.

    h: row length. inner: distance between a row's elements. itemsize: bytes of the widest element moved. mixed: whether
    the arrays of rows have several dtypes.
    """
    columns = next_power_of_2(h)
    per_thread = _per_thread(FORWARD_ELEMENTS, h, inner, itemsize, mixed)
    if inner == 1:
        if per_thread == FORWARD_ELEMENTS and columns <= 32 * 32 * per_thread:
            # The fewest instructions, which in 16 bits take longer than memory does: with 8 elements a thread 0.99,
            # 1.39 and 0.98 of an H200's time to move the bytes at H = 128, 768 and 1024, so 0.56, 0.61 and 0.57. A row
            # of up to 1024 elements is one warp's, so that nothing passes through shared memory, and where warps come
            # round more than once, as for 768 of 1024 columns, the compiler leaves out a round that has no columns.
            if columns <= 512:
                return _tile(4096 // itemsize // columns, columns, 128 // itemsize)
            return _tile(1, columns, 32 if columns <= 1024 else 64 // itemsize)
        if columns <= 1024:
            return _tile(1024 // columns, columns, min(8, per_thread))
        if columns <= 32 * 32 * per_thread:
            return _tile(1, columns, per_thread)
        return _tile(1, 256 * per_thread, per_thread // 2)
    limit = 256 * per_thread  # 8 warps, which may have twice the registers of 16
    rows = _side_by_side(columns, inner, itemsize, limit)
    if rows * itemsize < 32 and rows < inner:  # less than a sector of each line
        rows = _side_by_side(1, inner, itemsize, limit)
        columns = 1024 // rows
    return _tile(rows, columns, per_thread)


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """How dx, dscale and doffset are found.

    tile: of `backward_kernel`. sums: the tile of `row_sums_kernel`, or None where `backward_kernel` adds up the rows.
    """

    tile: Tile
    sums: Tile | None


def backward_plan(h: int, inner: int, itemsize: int, mixed: bool = False, *, wants_y: bool = False) -> BackwardPlan:
    """Whole rows in registers while 16 warps can hold them; rows twice as wide shared by four programs; beyond that a
    pass for the row sums, then programs that own a few columns of all rows.

    wants_y: whether `backward_kernel` writes the norm's output too.
    """
    columns = next_power_of_2(h)
    per_thread = _per_thread(BACKWARD_ELEMENTS, h, inner, itemsize, mixed)
    limit = 512 * per_thread
    aligned = _aligned(h, inner, itemsize) and not mixed
    stages = 2 if aligned and columns <= 4096 else 1  # to fetch the next row ahead takes registers too
    if inner == 1:
        rows = max(1, (2048 if aligned and itemsize < 8 else 1024) // columns)
        whole = columns <= limit
    else:
        rows = _side_by_side(columns, inner, itemsize, limit // 2)
        whole = rows * columns <= limit // 2 and (rows * itemsize >= 32 or rows >= inner)
    if whole:
        crowded = inner > 1 or (not aligned and itemsize < 8)
        if few := wants_y and not crowded and itemsize < 8:
            # One program of 16 warps where there would be four of 4, for a quarter of the partial sums; and two tiles
            # ahead, so that half of the SMs keep memory busy (`busy_programs`), for half of them again: 1 MB and not 9
            # in the 725 that (16384, 1024, 3072) in bfloat16 may move. Masked columns leave no registers for the third.
            rows = max(rows, 16384 // itemsize // columns)
            stages += stages > 1 and columns == h
        tile = _tile(rows, columns, per_thread // 2 if crowded else per_thread, stages)
        # 16 warps an SM hide the latency; more than 4 programs an SM would pay for it in partial sums.
        programs_per_sm = 1 if few else max(1, min(4, 16 // tile.warps))
        return BackwardPlan(dataclasses.replace(tile, programs_per_sm=programs_per_sm), None)
    if inner == 1 and columns == 2 * limit and itemsize < 8:
        # With y too, half of that tile: 4096 columns in float32 spill on sm_89.
        return BackwardPlan(
            _tile(1, limit // 4, per_thread // 4) if wants_y else _tile(1, limit // 2, per_thread // 2), None
        )
    if inner == 1:  # whole lines of columns, and as many rows at a time as 16 warps hold
        tile = _tile(2 * per_thread, 128, per_thread // 2, stages, programs_per_sm=2)
        return BackwardPlan(tile, _tile(1, 256 * per_thread, per_thread // 2))
    rows = _side_by_side(1, inner, itemsize, limit)
    # As few elements a thread as one load takes, so that many warps hide the latency.
    tile = _tile(rows, 1024 // rows, max(per_thread // 4, 16 // itemsize if aligned else 1), stages, programs_per_sm=4)
    return BackwardPlan(tile, _tile(rows, 1024 // rows, per_thread // 2))


# Of an H200, estimates: bytes a microsecond that one SM can take in, and its share of what memory gives to all; what a
# launch more costs, in microseconds. By them `fused_forward` weighs long walks of few programs.
L2_RATE, MEMORY_RATE, LAUNCH_TIME = 64_000, 36_000, 5


def busy_programs(tile: Tile, itemsize: int, chip: Chip) -> int:
    """How many programs have enough in flight to cover the latency of memory, at `itemsize` bytes an element.

    34 KB an SM are 4.5 MB on an H200, as much as it moves in 0.9 us.
    """
    return ceil_div(34_000 * chip.sms, max(1, tile.stages - 1) * tile.rows * tile.columns * itemsize)


def reduce_tile(h: int) -> Tile:
    """The tile of `reduce_kernel`: 32 columns a program, so that there is a program for most SMs."""
    return Tile(32, min(32, next_power_of_2(h)), 4)


# By its operands' dtype, the widest product that one program can hold (64 rows of sums, float32) beside a tile of x and
# one of the kernel; and where rows do not start on 16 bytes, and pairs of elements take registers for their addresses.
FUSED_FEATURES = {"bfloat16": (256, 64), "float16": (256, 64), "float32": (128, 32)}


def features(n: int) -> int:
    """The columns of a tile that holds all N of a product."""
    return max(16, next_power_of_2(n))


# Before it, Triton leaves out fences: 3.6.0 and 3.7.0 have none between the store of a tile to shared memory and the
# wgmma (sm_90) or tcgen05.mma (sm_100) that reads it in the fused forward, nor for sm_90 in one of two places of the
# backward in 16 bits; 3.7.1, 3.8.0 and 3.9.0 have all (`test_products_wait_for_what_is_stored_to_shared_memory`).
FENCED_TRITON = (3, 7, 1)


def unfenced(chip: Chip) -> str | None:
    """Why a product on `chip` might read its operands from shared memory before they are there; None where it waits."""
    if chip.capability < 90 or chip.name == INTERPRETER.name or _triton_version() >= FENCED_TRITON:
        return None
    return (
        f"Triton {'.'.join(map(str, _triton_version()))} leaves out fences before the products of kernels for "
        f"sm_{chip.capability}: LayerNorm+Linear is composed of a norm's kernels and XLA's products, and with "
        f"triton>={'.'.join(map(str, FENCED_TRITON))} fused where that is faster"
    )


@functools.cache
def _triton_version() -> tuple[int, ...]:
    try:
        import triton
    except ImportError:  # nothing will be compiled
        return FENCED_TRITON
    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:3]))


def _fused_tile(h: int, n: int, product_dtype: str, chip: Chip) -> Tile | None:
    """The tile of rows and columns of x that the fused LayerNorm+Linear kernels take; None where they cannot run.

    Not float64, which is XLA's business. Nor float32 on Blackwell, where `backward_kernel` at N = 128 has too few
    registers; nor its small chips, with less shared memory than an H100 and no wgmma. Nor a kernel [H, N] with 2**31
    elements, whose offsets have 32 bits. Nor by a Triton that leaves out fences.
    """
    if product_dtype not in FUSED_FEATURES or chip.capability > 103 or unfenced(chip):
        return None
    if product_dtype == "float32" and chip.capability >= 100:
        return None
    aligned, unaligned = FUSED_FEATURES[product_dtype]
    if n > (aligned if _aligned(h, 1, 2) and _aligned(n, 1, 2) else unaligned) or h * n >= 2**31:
        return None
    # A stage is 8 KB of x, which comes from memory, and up to 32 KB of dy or kernel, which L2 has; some 16 KB of x in
    # flight an SM hide the latency. Eight warps: with four the backward kernel takes all 255 registers at N = 64.
    stages = 2 if chip.capability < 90 or product_dtype == "float32" else 4 if features(n) <= 64 else 3
    return Tile(64, 64, 8, stages)


def fused_forward(rows: int, h: int, n: int, product_dtype: str, chip: Chip) -> Tile | None:
    """How LayerNorm+Linear forward runs as one kernel; None where it is composed: the norm's kernel and XLA's product.

    A program walks over all H of its rows and of the kernel, which L2 gives it at its own pace, however few other
    programs there are; all SMs together read and write [M, H] three times instead of once, in one launch more. The
    faster of the two is chosen: with 132 SMs and H = 4096 the walk takes 41 us at N = 256, 16 at N = 64, so that it
    pays from 7200 rows on, or from 2200; at H = 768 and N = 64 it always does.
    """
    tile = _fused_tile(h, n, product_dtype, chip)
    if tile is None:
        return None
    if chip.capability < 90 and features(n) > 128:  # by mma, as below, a wider tile spills on sm_89
        tile = dataclasses.replace(tile, columns=32, stages=3)
    walks = ceil_div(ceil_div(rows, tile.rows), chip.sms)
    itemsize = 4 if product_dtype == "float32" else 2
    fused = walks * itemsize * h * (tile.rows + features(n)) / L2_RATE
    composed = LAUNCH_TIME + 3 * itemsize * rows * h / (MEMORY_RATE * chip.sms)
    return tile if fused <= composed else None


@dataclasses.dataclass(frozen=True)
class FusedBackward:
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


def fused_backward(rows: int, h: int, n: int, product_dtype: str, chip: Chip) -> FusedBackward | None:
    """How LayerNorm+Linear backward runs as three kernels; None where it is composed: XLA's products, a norm's kernel.

    Fused for every number of rows: [M, H] crosses the memory bus 3 times (x twice, dx), composed 6 times and in six
    launches, and few rows leave no long walk, since programs share them by columns.
    """
    tiles = fused_backward_tiles(h, n, product_dtype, chip)
    return None if tiles is None else fused_backward_grid(rows, h, n, chip, *tiles)


def fused_backward_tiles(h: int, n: int, product_dtype: str, chip: Chip) -> tuple[Tile, Tile] | None:
    """Those of the row sums and of `backward_kernel`."""
    tile = _fused_tile(h, n, product_dtype, chip)
    if tile is None:
        return None
    # mma holds operands in registers, where wgmma reads shared memory: more rows spill on sm_80. wgmma wants the 64,
    # below which a product silently becomes mma.
    mma_rows = 32 if features(n) <= 128 and _aligned(h, 1, 2) else 16
    return tile, dataclasses.replace(tile, rows=64 if chip.capability >= 90 else mma_rows)


def fused_backward_grid(rows: int, h: int, n: int, chip: Chip, row_sums: Tile, backward: Tile) -> FusedBackward:
    row_programs = min(ceil_div(rows, row_sums.rows), chip.sms)
    # A power of 2, for fewer variants to compile; not more than the sums of 8, which every program has to read.
    parts = next_power_of_2(min(8, chip.sms // row_programs, ceil_div(h, row_sums.columns)) + 1) // 2
    splits = _splits(ceil_div(rows, backward.rows), ceil_div(h, backward.columns), chip.sms)
    # A program or more for most SMs, and 4096 elements at a time, so that the shares are not met one after another.
    columns = min(32, next_power_of_2(ceil_div(h, chip.sms)))
    shares = min(next_power_of_2(splits), max(1, 4096 // (columns * features(n))))
    return FusedBackward(row_sums, row_programs, parts, backward, splits, Tile(shares, columns, 8))


def _splits(row_tiles: int, chunks: int, sms: int) -> int:
    """Among how many programs to share the rows of each of `chunks` tiles of columns, for the least time: a program a
    round and SM, each with its trips over tiles of rows and its share of G, written and read again like 4 more.
    """
    return min(
        range(1, min(row_tiles, sms) + 1),
        key=lambda splits: ceil_div(splits * chunks, sms) * (ceil_div(row_tiles, splits) + 4),
    )
