"""Statistics of a call, counted while it is executed."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

SECTOR = 32  # bytes that a GPU moves at least


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """The bytes and the instructions of a chip in a second, by its maker's data sheet."""

    sms: int
    clock: float  # Hz, the highest
    memory: float  # bytes a second
    schedulers: int = 4  # of an SM; each issues one instruction of a warp a cycle

    @property
    def issues(self) -> float:
        return self.sms * self.schedulers * self.clock


H200 = DataSheet(sms=132, clock=1.98e9, memory=4.8e12)


@dataclasses.dataclass
class Stats:
    """The counts of one call of a program, over all its executions."""

    name: str
    executions: int = 0
    instructions: int = 0  # steps taken together, however many threads took them
    issued: int = 0  # instructions times warps, as a scheduler would count
    unwaited: int = 0  # batches of programs that ended with copies that nobody waited for
    contended: dict[int, int] = dataclasses.field(default_factory=collections.Counter)  # {line: stores that were lost}
    unwritten: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (result, bytes)
    shapes: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)  # {buffer: the shape of its array}
    # {("read" or "written", buffer, line, width in bytes): [instructions of warps, sectors, bytes asked for]}
    accesses: dict[tuple[str, int, int, int], np.ndarray] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(lambda: np.zeros(3, np.int64))
    )

    def moved(self, kind: str) -> tuple[int, int, dict[int, int]]:
        """Return the bytes of sectors, the bytes asked for, and these by width, "read" or "written" globally."""
        sectors, widths = 0, collections.Counter()
        for (of, _, _, width), (_, moved, asked) in self.accesses.items():
            if of == kind:
                sectors += int(moved)
                widths[width] += int(asked)
        return SECTOR * sectors, sum(widths.values()), dict(widths)

    def issue_share(self, chip: DataSheet = H200) -> float:
        """The time that the schedulers need for the instructions, as a part of what the memory needs for the sectors.

        Counted are PTX's instructions but for branches, each once for a warp that has any thread in it; and all sectors
        that loads, stores and copies asked for, those that a cache may have kept (scale and offset, in every program)
        too.
        """
        moved = sum(self.moved(kind)[0] for kind in ("read", "written"))
        return self.issued / chip.issues / (moved / chip.memory)

    def count(self, kind: str, buffer: int, line: int, addresses: np.ndarray, width: int) -> None:
        """Add the accesses of `width` bytes to a buffer at [warps, 32] addresses, 2**63 where a thread makes none."""
        ordered = np.sort(addresses, 1)
        real = ordered < 2**63

        def distinct(a: np.ndarray) -> int:
            return int(real[:, 0].sum() + ((a[:, 1:] != a[:, :-1]) & real[:, 1:]).sum())

        sectors = distinct(ordered // np.uint64(SECTOR))
        self.accesses[kind, buffer, line, width] += (int(real.any(1).sum()), sectors, distinct(ordered) * width)
