"""Tiles of the norm kernels: rules found by compiling and on a card."""

from __future__ import annotations

import dataclasses

from jln._triton.chip import Chip
from jln._triton.target import Target
from jln._triton.tile import Tile, is_aligned, next_power_of_2

# Columns have 32-bit numbers, and a loop over chunks of them ends at a multiple of a chunk of up to 2**15.
LONGEST_ROW = 2**31 - 2**16

# Elements a thread may hold, found by compiling every choice for sm_80, sm_90 and sm_100 and looking at the spills
# (tests/triton/test_compiler.py keeps them honest): the forward kernel holds one value an element, the backward kernel
# four. float64 takes more than twice the registers; where rows do not start on 16 bytes every element has an address of
# its own; and operands of several dtypes are laid out in several ways.
FORWARD_ELEMENTS = 16
BACKWARD_ELEMENTS = 16


def _per_thread(elements: int, h: int, itemsize: int, mixed: bool) -> int:
    easy = is_aligned(h, itemsize) and not mixed
    return elements // (1 if easy else 2) // (4 if itemsize == 8 else 1)


def _tile(rows: int, columns: int, per_thread: int, stages: int = 1, programs_per_core: int = 1) -> Tile:
    warps = min(32, max(1, rows * columns // (32 * max(1, per_thread))))
    return Tile(rows, columns, warps, stages, programs_per_core)


def forward_tile(h: int, itemsize: int, mixed: bool = False) -> Tile:
    """The tile of `forward_kernel`: whole rows while they fit, chunks of wider ones.

    h: row length. itemsize: bytes of the widest element moved. mixed: whether the arrays of rows have several dtypes.
    """
    columns = next_power_of_2(h)
    per_thread = _per_thread(FORWARD_ELEMENTS, h, itemsize, mixed)
    if per_thread == FORWARD_ELEMENTS and columns <= 32 * 32 * per_thread:
        # These tiles take the fewest instructions, which in 16 bits may take longer than memory. With 8 elements a
        # thread they took 0.99, 1.39 and 0.98 of the time in which an H200 moves the bytes, at H = 128, 768 and
        # 1024. With these tiles they take 0.47, 0.66 and 0.51 (`python tests/executed/table.py bfloat16`), as many
        # elements share a thread's scale, offset and addresses. A row of up to 1024 elements is one warp's, so that
        # nothing passes through shared memory. Where warps come round more than once, as for 768 of 1024 columns,
        # the compiler leaves out a round that has no columns.
        if columns <= 512:
            return _tile(4096 // itemsize // columns, columns, 128 // itemsize)
        return _tile(1, columns, 32 if columns <= 1024 else 64 // itemsize)
    if columns <= 1024 and mixed and itemsize < 8 and is_aligned(h, itemsize):
        # A row is one warp's here too. With 8 elements a thread two warps had a row of 256 of bfloat16 and float32,
        # of which a thread takes 4 together (`VECTOR`), and issued for 0.39 of the time that the bytes take; this
        # is 0.23, and 0.26 for 0.40 at H = 768. Registers are 41 to 89 of the 128 that 16 such warps may have.
        return _tile(max(1, 512 // columns), columns, 32 if columns == 1024 else 16)
    if columns <= 1024:
        return _tile(1024 // columns, columns, min(8, per_thread))
    if columns <= 32 * 32 * per_thread:
        return _tile(1, columns, per_thread)
    return _tile(1, 256 * per_thread, per_thread // 2)


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """A plan for dx, dscale and doffset.

    tile: of `backward_kernel`. sums: the tile of `row_sums_kernel`, or None where `backward_kernel` adds up the rows.
    """

    tile: Tile
    sums: Tile | None


def backward_plan(h: int, itemsize: int, mixed: bool = False, *, more: int = 0, crammed: bool = False) -> BackwardPlan:
    """The plan of the backward pass for rows of length h.

    Whole rows stay in registers while 16 warps can hold them; beyond that there is a pass for the row sums, then
    programs that own some columns of all rows. Where loops can read ahead they have two stages here, and as many as
    `read_ahead` says when they are launched.

    more: values an element that `backward_kernel` holds beside four: sums over rows after the second, a gate. crammed:
    whether it makes y again and reads another cotangent beside dy, in float32, where whole rows of 8192 spill 32 bytes.

    2^25 elements in bfloat16 took an H200, in us: rows of 4096 by two rows and one program of 16 warps 64, by a row and
    two programs of 8 warps 64, of RMSNorms 61 and 63, with a residual 79 and 81, where y is made again 82 and 86; rows
    of 16384 by the pass for the row sums and chunks of 4096 101, and 182 by programs that had whole rows, chunk by
    chunk; rows of 8192 with a gate 98 by whole rows, and 427 by programs that shared a row, whose sums each made alone.
    Half as many elements, where y is made again, took 45 in rows of 1024 by two rows and four programs of 4 warps, and
    55 by eight rows and one program of 16.
    """
    columns, easy = next_power_of_2(h), is_aligned(h, itemsize)
    per_thread = _per_thread(BACKWARD_ELEMENTS, h, itemsize, mixed)
    of_sums = per_thread  # `row_sums_kernel` holds none of what `more` counts
    if easy and not mixed and (more > 2 or (more and (columns <= 4096 or itemsize == 4))):
        # With 16 elements a thread the kernel spilled up to 40 bytes with the sum for x's bias (8 where 16 warps hold
        # 8192 columns of 16 bits) and up to 192 with a gate; with 8 elements it spills at most 8 bytes.
        per_thread //= 2
    if crammed and columns > 4096:
        per_thread = min(per_thread, BACKWARD_ELEMENTS // 2)
    elif easy and mixed and not more and columns == 8192 and itemsize == 4:
        per_thread *= 2
    limit = 512 * per_thread
    stages = 2 if easy else 1
    if columns <= limit:
        rows = max(1, (limit if columns > 2048 else 128 * per_thread) // columns)
        crowded = not easy and itemsize < 8
        tile = _tile(rows, columns, per_thread // 2 if crowded else per_thread, stages)
        # 16 warps an SM hide the latency; more than 4 programs an SM would pay for it in partial sums.
        return BackwardPlan(dataclasses.replace(tile, programs_per_core=max(1, min(4, 16 // tile.warps))), None)
    # A tile has as much of some rows as 16 warps hold.
    each = per_thread if easy else max(1, per_thread // 2)
    columns = min(4096, 512 * each)
    tile = _tile(512 * each // columns, columns, each, stages)
    ahead = {2: 3, 4: 2}.get(itemsize, 1) if easy else 1  # stages, for which an L4 has room
    return BackwardPlan(tile, _tile(max(1, of_sums // 8), 2048, of_sums, ahead))


# Bytes that an SM should read ahead, of all its programs, by at least three stages. On an H200, whose latency times
# bandwidth is 29 KB an SM, the backward pass of layer_norm at 4096 columns in bfloat16 took 78 us with 32 KB, 64 with
# 64 KB and 66 with 96 KB; with a bias and a gate 165, 111 and 113; of a float32 result 142 with nothing, 78 with 72.
# The forward pass of add_layer_norm at 16384 columns took 87 us by two stages of 64 KB, and 79 by three.
AHEAD = 2**16


def read_ahead(tile: Tile, itemsize: int, reads: tuple[int, int], chip: Chip) -> Tile:
    """The tile with three or four stages, as AHEAD bytes take, or as few as shared memory has room for.

    reads: how many arrays of rows are read for each tile, and how many of columns. AMD's chips hold in registers what
    is read ahead, and have two stages.
    """
    of_rows = reads[0] * tile.rows * tile.columns * itemsize * tile.programs_per_core
    wanted = 2 if chip.is_amd else 3 if 2 * of_rows >= AHEAD else 4
    return _with_room(dataclasses.replace(tile, stages=wanted), itemsize, reads, chip)


def _with_room(tile: Tile, itemsize: int, reads: tuple[int, int], chip: Chip) -> Tile:
    """The tile with no more stages than shared memory has room for, of all programs of a core."""
    rows, columns = reads
    of_stage = (rows * tile.rows * itemsize + columns * max(4, itemsize)) * tile.columns * tile.programs_per_core
    room = 1 + (chip.shared - 1024 * tile.programs_per_core) // of_stage
    return dataclasses.replace(tile, stages=max(1, min(tile.stages, room)))


def both_sides(h: int, itemsize: int, mixed: bool, chip: Chip, gated: bool, beside: int = 0) -> Tile | None:
    """The tile of `backward_kernel` with a norm of x, too, whole rows; None where 16 warps cannot hold a row.

    gated: whether a gate is between the norms. beside: how many cotangents are read beside dy.

    The next row's four arrays are fetched ahead where shared memory has room. Found by compiling: 16 elements a thread
    with the sums of both scales take 127 registers of the 128 that 16 warps may have, with 8 111; rows that do not
    start on 16 bytes spill with 16, and with 8 where the next is fetched ahead. With a gate 16 spill 8 bytes in 16 bits
    and 64 in float32. Beside a float32 stream x and dy are half as wide, and a round of 2048 columns that are not there
    is left out: of 16 elements in 3 rounds a gate spills 16 bytes at most, in 4 up to 136.
    """
    columns = next_power_of_2(h)
    easy = is_aligned(h, itemsize)
    if mixed and (itemsize == 8 or columns <= 2048):  # fetched ahead, some of these would spill up to 24 bytes
        easy = False
    if not easy:
        most = 4 if gated else 8
    elif mixed:
        most = 8 if gated and h > 3 * 2048 else 16
    else:
        most = 8 if gated and itemsize == 4 else 16
    most //= 4 if itemsize == 8 else 1
    if columns > 512 * most:
        return None
    rows = max(1, 1024 // columns)
    per_thread = most if columns > 256 * most else max(1, most // 2)
    per_thread = max(per_thread, 16 // itemsize if easy else 1)  # as many as one load takes
    warps = max(1, rows * columns // (32 * per_thread))
    ahead = 2 * 4 * rows * columns * itemsize + 1024  # four arrays ahead, and the four being read
    # A third of shared memory is left to L1, which has the scales. So an H200 fetches a row of 8192 in 16 bits ahead,
    # and an A100 does not, where it would spill 64 bytes.
    has_room = 3 * ahead <= 2 * chip.shared
    if mixed:
        # As compiled: 20 or 24 bytes an element. An H200 has the row of a float32 stream ahead, for 35 KB of L1: the
        # two scales that came from L2 would be half as many bytes again as the row's own from memory, which takes less
        # time than to wait for each row.
        ahead = 24 * rows * columns + 1024
        has_room = ahead + 32_000 <= chip.shared
    tile = Tile(rows, columns, warps, 2 if easy and has_room else 1, max(1, min(4, 16 // warps)))
    return tile if mixed or tile.stages == 1 else read_ahead(tile, itemsize, (4 + beside, 2 + gated), chip)


def reduce_tile(h: int, shares: int | None = None) -> Tile:
    """The tile of `reduce_kernel`: 128 rows of shares, or as many as each of many groups has, and few columns.

    A loop over more shares waits for memory at each turn: with 32 rows and columns an H200 took 12.0 us for 528 shares
    of 1024 columns, with 128 rows of 16 columns 7.6, of which 7 are for what comes from memory.
    """
    rows = 128 if shares is None else min(128, next_power_of_2(shares))
    columns = min(max(16, min(128, 2048 // rows)), next_power_of_2(h))
    return Tile(rows, columns, max(1, min(8, rows * columns // 256)))


def forward(
    h: int, itemsize: int, mixed: bool, target: Target, parameters: tuple[int, ...] = (), adds: bool = False
) -> Tile:
    """The tile of `forward_kernel`: by `forward_tile`, and of programs with several rows where that is worth it.

    parameters: the bytes of a column's scale and offset where no more is read than x, and a residual if it `adds`.
    """
    tile = forward_tile(h, itemsize, mixed)
    easy = is_aligned(h, itemsize) and not mixed and not target.chip.is_amd
    if parameters and easy and 1024 <= tile.columns >= h and tile.warps <= 16:
        return _persistent(tile, itemsize, parameters, adds, target.chip)
    return tile


def _persistent(tile: Tile, itemsize: int, parameters: tuple[int, ...], adds: bool, chip: Chip) -> Tile:
    """The tile of programs that have several rows each, where that is worth it; else `tile`.

    parameters, adds: as of `forward`.

    Such a program holds scale and offset, and reads the next rows ahead. An H200 took for layer_norm in bfloat16 at
    768, 1024, 4096, 8192 and 16384 columns 18.4, 39.1, 42.1, 42.4 and 44.4 us, where a program for each row took 19.7,
    40.8, 52.7, 56.1 and 77.1: each reads 8 bytes of parameters from L1 for 2 of x. RMSNorm reads 4. It lost at 4096
    columns, 41.4 us for 39.7, and gained at 16384, 41.5 for 60.4, where an SM has one row at a time. There its sums
    have such programs, too; those of LayerNorm have not: they took 79 us for 100, but spill 24 bytes with Triton 3.9.
    """
    pays = not adds and sum(parameters) > 2 * itemsize if tile.columns <= 8192 else not adds or len(parameters) == 1
    if not pays:
        return tile
    tile = dataclasses.replace(tile, programs_per_core=16 // tile.warps)
    return read_ahead(tile, itemsize, (1 + adds, 0), chip)


def backward(
    h: int,
    itemsize: int,
    mixed: bool,
    wants_y: bool,
    target: Target,
    *,
    beside: int = 0,
    more: int = 0,
    reads: tuple[int, int] = (2, 0),
) -> BackwardPlan:
    """The plan of the backward pass, with stages for what is read.

    beside: how many cotangents `backward_kernel` reads beside dy. reads: as of `read_ahead`.
    """
    crammed = wants_y and beside > 0 and itemsize == 4
    plan = backward_plan(h, itemsize, mixed, more=more, crammed=crammed)
    if plan.tile.stages > 1:
        plan = dataclasses.replace(plan, tile=read_ahead(plan.tile, itemsize, reads, target.chip))
    return plan
