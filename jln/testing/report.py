"""Reports of gradient checks, as data and as tables."""

from __future__ import annotations

import dataclasses
import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """A tolerance: an element passes if `|got - expected| <= absolute + relative * |expected|`.

    Attributes:
      relative: allowed error as a part of the expected value.
      absolute: allowed error beside that.
    """

    relative: float
    absolute: float


# By the coarsest dtype among a function's arguments and results. The relative tolerance of the 16-bit types is some ten
# roundings, as of a chain of elementwise operations; that of the others leaves room for long sums. bfloat16 has three
# bits fewer than float16, so both of its numbers are 2^3 times float16's.
TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        "float16": Tolerance(relative=1e-2, absolute=1e-4),
        "bfloat16": Tolerance(relative=8e-2, absolute=8e-4),
        "float32": Tolerance(relative=1e-4, absolute=1e-7),
        "float64": Tolerance(relative=1e-7, absolute=1e-10),
    }
)


@dataclasses.dataclass(frozen=True)
class Row:
    """The worst element of one argument's gradient, or of one result: the element whose error is most of its tolerance.

    Attributes:
      name: the argument or result.
      index: of the worst element.
      got, expected: the value under test, and the one that it is compared with.
      error, tolerance: the distance between the two, and the largest that is allowed.
      size: how many elements there are.
      ok: whether all of them are within their tolerance.
    """

    name: str
    index: tuple[int, ...]
    got: float
    expected: float
    error: float
    tolerance: float
    size: int
    ok: bool

    @classmethod
    def worst(cls, name: str, got: Any, expected: Any, tolerance: Tolerance) -> Row:
        """Find the worst element of an array."""
        a, t = np.asarray(got, "float64"), np.asarray(expected, "float64")
        if not a.size:
            return cls(name, (), 0.0, 0.0, 0.0, tolerance.absolute, 0, True)
        with np.errstate(all="ignore"):  # an infinity is near itself alone, a NaN is near nothing
            error = np.where(a == t, 0.0, np.abs(a - t))
            limit = tolerance.absolute + tolerance.relative * np.abs(t)
            part = np.where(error == 0, 0.0, np.where(np.isfinite(limit), error / limit, np.inf))
        index = tuple(map(int, np.unravel_index(np.argmax(part), a.shape)))  # of a NaN, if there is one
        worst, true, distance, allowed = (float(b[index]) for b in (a, t, error, limit))
        return cls(name, index, worst, true, distance, allowed, a.size, bool(part[index] <= 1))


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a check; `str()` of it is a table.

    Attributes:
      title: the function, the kind of derivative and the dtype.
      rows: a `Row` for each result of the function and one for each argument.
      ok: whether every row is.
    """

    title: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def row(self, name: str) -> Row:
        """The row of an argument or result. Raises KeyError where there is none.

        Args:
          name: of the row.
        """
        return {row.name: row for row in self.rows}[name]

    def __str__(self) -> str:
        lines = [["", "elements", "worst at", "got", "expected", "error", "allowed", ""]]
        for r in self.rows:
            numbers = (f"{r.got:.6e}", f"{r.expected:.6e}", f"{r.error:.1e}", f"{r.tolerance:.1e}")
            shown = numbers if r.size else ("-",) * len(numbers)
            lines.append([r.name, f"{r.size}", str(list(r.index)), *shown, "ok" if r.ok else "WRONG"])
        return "\n".join([self.title, *align(lines, left=(0, 2, 7))])


def align(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Write rows of cells as lines, columns two blanks apart; those in `left` are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust if i in left else str.rjust for i in range(len(widths))]
    padded = ([side(cell, n) for side, cell, n in zip(sides, line, widths, strict=True)] for line in lines)
    return ["  ".join(cells).rstrip() for cells in padded]


def unknown(what: str, name: str, among: Iterable[str]) -> str:
    """Word the refusal of a name: the known ones that are like it, or else all, as a shell takes them."""
    by_case = {each.casefold(): shlex.quote(each) for each in among}
    near = [by_case[each] for each in difflib.get_close_matches(name.casefold(), by_case)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(by_case.values())}"
    return f"unknown {what} {name!r}; {hint}"
