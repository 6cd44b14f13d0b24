"""Traffic of a call: how it reached memory, and how busy its instructions kept the schedulers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import linecache
import re

from ptx.statistics import H200

# Arrays of rows, and a Linear's matrix; what else there is, is small and met again and again, in L1 or L2.
LARGE = re.compile(r"\b(x|residual|added|total|dy|dtotal|dx|dresidual|y|kernel)_ptr\b")


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


def of(program) -> list[Traffic]:
    """The traffic of each call of a program that ran."""
    return [_traffic(call.ptx, stats) for call, stats in zip(program.calls, program.stats, strict=True)]


def _traffic(ptx, stats):
    source = sources(ptx)
    widths, narrow = collections.Counter(), collections.Counter()
    sectors = asked = 0
    for (kind, line, width), (_, moved, wanted) in stats.accesses.items():
        text = source.get(line, "x_ptr")  # what is from nowhere counts
        if not LARGE.search(_who_loads(text)):
            continue
        sectors, asked = sectors + 32 * int(moved), asked + int(wanted)
        if kind == "read":
            widths[width] += int(wanted)
            if width < 16:
                narrow[text, width] += int(wanted)
    return Traffic(stats.name, dict(widths), sectors / max(1, asked), dict(narrow), stats.issued)


def _who_loads(text: str) -> str:
    """The line that tells what is loaded: the line of the load if it names it, else the line from which it was called.

    A parameter's load that the compiler moved is where its function returns.
    """
    line = text.split(" <- ")[0]
    return line if "_ptr" in line or line.startswith("return") else text


@functools.lru_cache(64)
def sources(ptx: str) -> dict[int, str]:
    """The kernel's line that each line of PTX is from, and the line from which that was called."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M))
    found, text = {}, None
    for number, line in enumerate(ptx.splitlines(), 1):
        at = re.match(r"\s*\.loc\s+(\d+) (\d+) \d+(?:.*inlined_at (\d+) (\d+))?", line)
        if at:
            places = [(at[1], at[2]), (at[3], at[4])]
            text = " <- ".join(linecache.getline(files[f], int(n)).strip() for f, n in places if f in files)
        elif text is not None:
            found[number] = text
    return found
