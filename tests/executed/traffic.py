"""Traffic of a call: how it reached memory, and how busy its instructions kept the schedulers."""

from __future__ import annotations

import collections
import dataclasses
import math

# The kernels that add up shares.
OF_SHARES = ("jln_reduce_kernel", "jln_parameters_kernel")
# Of an H200 by its data sheet: instructions of warps, by 132 SMs of four schedulers, and bytes, both in a second.
ISSUES, MEMORY = 132 * 4 * 1.98e9, 4.8e12


def issue_share(issued: float, nbytes: float) -> float:
    """The time that an H200's schedulers take for the instructions, as a part of its memory's for `nbytes`."""
    return issued / ISSUES / (nbytes / MEMORY)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one call.

    widths: bytes that its loads of large arrays asked for, by width.
    sectors: the bytes that it moved, in sectors of 32, for a byte it asked for, of that large array where it is most.
    issued: instructions, times warps.
    """

    kernel: str
    widths: dict[int, int]
    sectors: float
    issued: int


def of(program, large: frozenset[int]) -> list[Traffic]:
    """The traffic of each call of a program that ran.

    large: the numbers of elements of arrays of rows and of a Linear's matrix. All else is small, and met again and
    again, in L1 or L2.
    """
    return [_traffic(stats, large) for stats in program.stats]


def _traffic(stats, large):
    widths, moved, asked = (collections.Counter() for _ in range(3))
    for (kind, buffer, width), (sectors, nbytes) in stats.accesses.items():
        if math.prod(stats.shapes[buffer]) not in large:
            continue
        moved[kind, buffer] += int(sectors)
        asked[kind, buffer] += int(nbytes)
        if kind == "read":
            widths[width] += int(nbytes)
    worst = max((moved[array] / asked[array] for array in asked), default=0)
    return Traffic(stats.name, dict(widths), worst, stats.issued)
