"""How large the tiles of a norm on both sides of a sum are, and whether one kernel takes a row at all."""

from __future__ import annotations

from jln._norm import tiles as norms
from jln._triton.target import Target
from jln._triton.tile import Tile, aligned, next_power_of_2


def forward(h: int, itemsize: int, mixed: bool, target: Target) -> Tile | None:
    """As the norm's, whose kernel reads a residual too; None where that takes a row in several chunks."""
    tile = norms.forward(h, 1, itemsize, mixed, target)
    return tile if tile.columns >= h else None


def backward(h: int, itemsize: int, mixed: bool) -> Tile | None:
    """Whole rows; None where 16 warps cannot hold one."""
    columns = next_power_of_2(h)
    easy = aligned(h, 1, itemsize) and not mixed
    per_thread = (16 if easy else 8) // (4 if itemsize == 8 else 1)
    if columns > 512 * per_thread:
        return None
    per_thread = min(per_thread, 8) if columns <= 256 * per_thread else per_thread
    rows = max(1, 1024 // columns)
    warps = min(16, max(1, rows * columns // (32 * per_thread)))
    return Tile(rows, columns, warps, 1, max(1, min(4, 16 // warps)))
