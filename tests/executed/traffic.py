"""Traffic of a call: how it reached memory, and how busy its instructions kept the schedulers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import linecache
import math
import pathlib
import re

import jln
from ptx.statistics import H200

# The kernels that add up shares.
OF_SHARES = ("jln_reduce_kernel", "jln_parameters_kernel")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one call.

    widths: bytes that its loads of large arrays asked for, by width.
    sectors: the bytes that it moved, in sectors of 32, for a byte it asked for, of that large array where it is most.
    narrow: {(line of the kernel, width): bytes} of loads of less than 16.
    issued: instructions, times warps.
    """

    kernel: str
    widths: dict[int, int]
    sectors: float
    narrow: dict[tuple[str, int], int]
    issued: int

    @property
    def wide(self) -> float:
        """The part of the bytes loaded that came by 16 at a time."""
        return self.widths.get(16, 0) / max(1, sum(self.widths.values()))

    def issue_share(self, nbytes: int) -> float:
        """The time that an H200's schedulers take for the instructions, as a part of its memory's for `nbytes`.

        Unlike in `Stats.issue_share` of all sectors asked for, scale and offset come from a cache.
        """
        return self.issued / H200.issues / (nbytes / H200.memory)


def of(program, large: frozenset[int]) -> list[Traffic]:
    """The traffic of each call of a program that ran.

    large: the numbers of elements of arrays of rows and of a Linear's matrix. All else is small, and met again and
    again, in L1 or L2.
    """
    return [_traffic(call.ptx, stats, large) for call, stats in zip(program.calls, program.stats, strict=True)]


def _traffic(ptx, stats, large):
    source = sources(ptx)
    widths, narrow = collections.Counter(), collections.Counter()
    moved, asked = collections.Counter(), collections.Counter()
    for (kind, buffer, line, width), (_, sectors, nbytes) in stats.accesses.items():
        if math.prod(stats.shapes[buffer]) not in large:
            continue
        moved[kind, buffer] += 32 * int(sectors)
        asked[kind, buffer] += int(nbytes)
        if kind == "read":
            widths[width] += int(nbytes)
            if width < 16:
                narrow[source.get(line, ""), width] += int(nbytes)
    worst = max((moved[array] / asked[array] for array in asked), default=0)
    return Traffic(stats.name, dict(widths), worst, dict(narrow), stats.issued)


def _here(path: str) -> str:
    """The path of a kernel's file in this package: Triton's cache may have PTX of a copy that is elsewhere, or gone."""
    here = pathlib.Path(jln.__file__).parent / path.rpartition("/jln/")[2]
    return str(here) if here.is_file() else path


@functools.lru_cache(64)
def sources(ptx: str) -> dict[int, str]:
    """The kernel's line that each line of PTX is from, and the line from which that was called."""
    files = {n: _here(path) for n, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M)}
    found, text = {}, None
    for number, line in enumerate(ptx.splitlines(), 1):
        at = re.match(r"\s*\.loc\s+(\d+) (\d+) \d+(?:.*inlined_at (\d+) (\d+))?", line)
        if at:
            places = [(at[1], at[2]), (at[3], at[4])]
            text = " <- ".join(linecache.getline(files[f], int(n)).strip() for f, n in places if f in files)
        elif text is not None:
            found[number] = text
    return found
