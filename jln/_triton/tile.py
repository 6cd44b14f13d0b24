"""Tiles, and what the rules that choose them share: pure functions of sizes and chips.

Every choice is a function of the row length `H`, the element type, the chip and the memory layout, and never of the
number of rows: that is what makes a row's result independent of how many others it is computed with.
"""

from __future__ import annotations

import dataclasses


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
        return {"num_warps": self.warps, "num_stages": self.stages}


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def aligned(h: int, inner: int, itemsize: int) -> bool:
    """Whether every row, or every group of rows that lie side by side, starts on 16 bytes."""
    return (h if inner == 1 else inner) * itemsize % 16 == 0
