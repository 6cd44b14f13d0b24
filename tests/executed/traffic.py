"""Traffic of a call: how it reached memory, and how busy its instructions kept the schedulers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import linecache
import pathlib
import re

import jln
from ptx.statistics import H200

# The kernels that add up shares, which are small.
OF_SHARES = ("jln_reduce_kernel", "jln_parameters_kernel")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic of one call.

    widths: bytes that its loads of large arrays asked for, by width.
    sectors: the bytes that its loads and stores of large arrays moved, in sectors of 32, for a byte asked for.
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


def of(program, axes: tuple[int, int] = (-2, -1)) -> list[Traffic]:
    """The traffic of each call of a program that ran.

    axes: those on which large arrays have several elements, and any other array has one.
    """
    return [_traffic(call.ptx, stats, axes) for call, stats in zip(program.calls, program.stats, strict=True)]


def _traffic(ptx, stats, axes):
    source = sources(ptx)
    widths, narrow = collections.Counter(), collections.Counter()
    sectors = asked = 0
    for (kind, buffer, line, width), (_, moved, wanted) in stats.accesses.items():
        if stats.name in OF_SHARES or not _is_large(stats.shapes[buffer], axes):
            continue
        sectors, asked = sectors + 32 * int(moved), asked + int(wanted)
        if kind == "read":
            widths[width] += int(wanted)
            if width < 16:
                narrow[source.get(line, ""), width] += int(wanted)
    return Traffic(stats.name, dict(widths), sectors / max(1, asked), dict(narrow), stats.issued)


def _is_large(shape: tuple[int, ...], axes: tuple[int, int]) -> bool:
    """True for an array of rows and a Linear's matrix.

    A norm's parameter has one row, a row's statistic one element. They are small, and met again and again, in L1 or L2.
    """
    return len(shape) >= -min(axes) and all(shape[axis] > 1 for axis in axes)


def _here(path: str) -> str:
    """The path of a kernel's file in this package: Triton's cache may have PTX of a copy that is elsewhere, or gone."""
    _, found, inside = path.rpartition("/jln/")
    return str(pathlib.Path(jln.__file__).parent / inside) if found else path


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
