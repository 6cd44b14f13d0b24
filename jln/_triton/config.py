"""What a launch depends on: the chip, and the tile sizes of each kernel, as plain data and pure functions.

Every choice is a function of the row length `H`, the element type, the chip and the memory layout, and never of
the number of rows: that is what makes a row's result independent of how many others it is computed with.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
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


# Register limits, in elements of a tile, found by compiling for sm_80, sm_90 and sm_100 (tests/test_compiler.py keeps
# them honest): forward holds one value an element, so 32 warps of 16 elements fit and 32 warps of 32 spill; backward
# holds four, so 16 warps of 16 elements fit and anything larger spills. float64 takes twice the registers.
FORWARD_LIMIT = 16384
BACKWARD_LIMIT = 8192


def _warps(elements: int, per_thread: int) -> int:
    return min(32, max(1, elements // (32 * per_thread)))


def _line(itemsize: int) -> int:
    """Elements in a 128-byte line: how many rows to take side by side where rows are neighbours in memory."""
    return 128 // itemsize


def forward_tile(h: int, inner: int, itemsize: int) -> Tile:
    """The tile of `forward_kernel`: whole rows while they fit, chunks of wider ones.

    h: row length. inner: distance between a row's elements. itemsize: bytes of the widest element moved.
    """
    limit = FORWARD_LIMIT // (2 if itemsize == 8 else 1)
    if inner > 1:
        rows = min(_line(itemsize), next_power_of_2(inner))
        limit //= 2 * rows
    else:
        rows = max(1, 1024 // next_power_of_2(h))
    columns = next_power_of_2(h)
    if columns > limit:
        columns = limit // 2
    return Tile(rows, columns, _warps(rows * columns, 8 if rows * columns <= 2048 else 16))


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """How dx, dscale and doffset are found.

    tile: of `backward_kernel`. sums: the tile of `row_sums_kernel`, or None where `backward_kernel` adds up the rows.
    """

    tile: Tile
    sums: Tile | None


def backward_plan(h: int, inner: int, itemsize: int) -> BackwardPlan:
    """Whole rows in registers up to BACKWARD_LIMIT elements a tile; rows shared by two programs up to twice as many;
    beyond that a pass for the row sums, then programs that own a few columns of all rows.
    """
    limit = BACKWARD_LIMIT // (2 if itemsize == 8 else 1)
    columns = next_power_of_2(h)
    rows = min(_line(itemsize), next_power_of_2(inner)) if inner > 1 else max(1, 2048 // columns)
    if rows * columns <= limit:
        warps = _warps(rows * columns, 16)
        return BackwardPlan(Tile(rows, columns, warps, stages=2, programs_per_sm=max(1, 16 // warps)), None)
    if inner == 1 and columns == 2 * limit:
        return BackwardPlan(Tile(1, limit, _warps(limit, 16)), None)
    # Whole 128-byte lines of columns; 32 rows at a time keep enough loads in flight.
    if inner == 1:
        columns = 128 if itemsize <= 4 else 64
        tile = Tile(32, columns, _warps(32 * columns, 16), stages=2, programs_per_sm=2)
        sums = Tile(1, limit // 2, 16)
    else:
        tile = Tile(rows, 1024 // rows, 4, stages=2)
        sums = Tile(rows, 2048 // rows, 4)
    return BackwardPlan(tile, sums)


def reduce_tile(h: int) -> Tile:
    """The tile of `reduce_kernel`: 32 columns a program, so that there is a program for most SMs."""
    return Tile(32, min(32, next_power_of_2(h)), 4)
