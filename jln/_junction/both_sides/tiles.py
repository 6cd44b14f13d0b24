"""Tiles of a norm on both sides of a sum, and whether one kernel takes a row at all."""

from __future__ import annotations

from jln._junction import tiles as norms
from jln._triton.chip import Chip
from jln._triton.target import Target
from jln._triton.tile import Tile, aligned, next_power_of_2


def forward(h: int, itemsize: int, mixed: bool, target: Target) -> Tile | None:
    """The norm's tile, whose kernel reads a residual too; None where that takes a row in several chunks."""
    tile = norms.forward(h, 1, itemsize, mixed, target)
    return tile if tile.columns >= h else None


def backward(h: int, itemsize: int, mixed: bool, chip: Chip) -> Tile | None:
    """The tile of `backward_kernel`, whole rows; None where 16 warps cannot hold a row.

    The next row's four arrays are fetched ahead where shared memory has room. Found by compiling: 16 elements a thread
    with the sums of both scales take 127 registers of the 128 that 16 warps may have, with 8 111; rows that do not
    start on 16 bytes spill with 16, and with 8 where the next is fetched ahead.
    """
    columns = next_power_of_2(h)
    easy = aligned(h, 1, itemsize) and not mixed
    most = (16 if easy else 8) // (4 if itemsize == 8 else 1)
    if columns > 512 * most:
        return None
    rows = max(1, 1024 // columns)
    per_thread = most if columns > 256 * most else max(1, most // 2)
    warps = max(1, rows * columns // (32 * per_thread))
    ahead = 2 * 4 * rows * columns * itemsize + 1024  # four arrays ahead, and the four being read
    # A third of shared memory is left to L1, which has the scales. So an H200 fetches a row of 8192 in 16 bits ahead,
    # and an A100 does not, where it would spill 64 bytes.
    stages = 2 if easy and 3 * ahead <= 2 * chip.shared else 1
    return Tile(rows, columns, warps, stages, max(1, min(4, 16 // warps)))
