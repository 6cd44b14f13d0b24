"""Tiles, and the common part of the rules that choose them: pure functions of sizes and chips.

Every choice is a function of the row length `H`, the element type, the chip and the memory layout, and never of the
number of rows: that is what makes a row's result independent of how many others it is computed with.
"""

from __future__ import annotations

import dataclasses

from jln._triton.chip import Chip

# Whether LLVM may contract `a * b + c` to one instruction with one rounding. No: where a thread holds one element of a
# sum of products, the two threads of a shuffle would each round the other's product and not its own, and store two
# results at one address. So what may round once is written `tl.fma`: all but sums of products within a tile, which take
# one instruction an element more (2 % of the forward's at H = 128 to 4096, on an H200 in 16 bits; the backward has as
# many as before, where letting it contract nothing at all would be 11 % more). Their accuracy is the same.
FP_FUSION = False


@dataclasses.dataclass(frozen=True)
class Tile:
    """One program's tile of `rows` by `columns` elements of `[M, H]`, and the warps that share it.

    warps: of 32 threads each, or half as many waves of 64.
    programs_per_core: how many persistent programs the grid has for each core (kernels that loop over tiles).
    """

    rows: int
    columns: int
    warps: int
    stages: int = 1
    programs_per_core: int = 1

    def warps_of(self, chip: Chip) -> int:
        """The number of warps or waves that have as many threads as `warps` of 32."""
        return max(1, self.warps * 32 // chip.threads)

    def options(self, chip: Chip) -> dict[str, int | None]:
        """The options for Triton's compiler.

        Programs that share one of NVIDIA's cores share its 65536 registers; unasked, the compiler takes 155 of the 128
        that a thread of 16 warps can have, for 4096 columns of float32 in `backward_kernel`, and every other program
        would wait.
        """
        options: dict[str, int | None]
        options = {"num_warps": self.warps_of(chip), "num_stages": self.stages, "enable_fp_fusion": FP_FUSION}
        if chip.is_amd:
            return options
        options["ptx_version"] = chip.ptx_version
        if self.programs_per_core > 1 and self.warps * self.programs_per_core <= 16:
            options["maxnreg"] = 128
        return options


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def is_aligned(h: int, itemsize: int) -> bool:
    """True where every row of h elements starts on 16 bytes."""
    return h * itemsize % 16 == 0
