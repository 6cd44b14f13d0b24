"""Reports of gradient checks, as data and as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

# An error of this many times what the differences may be off is no fault of theirs. Their estimate counts one rounding
# of each result, and a function makes many more.
SURE = 100
UNSURE = "unsure: the differences lack the digits to tell (is x far from 1, or f float32 inside?); give a reference"


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
      against: "reference", "differences", "direction" (of all elements at once), or of `check_fuse` "untouched".
      index: of the worst element.
      got, expected: the value under test, and the one that it is compared with.
      error, tolerance: the distance between the two, and the largest that is allowed.
      compared, size: how many elements were compared, and how many there are.
      ok: whether all of them are within their tolerance.
      unsure: whether it is not `ok` for want of digits in the differences, and may yet be right.
    """

    name: str
    against: str
    index: tuple[int, ...]
    got: float
    expected: float
    error: float
    tolerance: float
    compared: int
    size: int
    ok: bool
    unsure: bool = False

    @classmethod
    def worst(
        cls, name: str, against: str, got: Any, expected: Any, tolerance: Tolerance, indices: Any = None, off: Any = 0.0
    ) -> Row:
        """Find the worst of the flattened elements at `indices`, of which `expected` may be `off` by so much."""
        shape, size = np.shape(got), np.size(got)
        indices = np.arange(size) if indices is None else indices
        a = np.asarray(got, "float64").reshape(-1)[indices]
        t = np.asarray(expected, "float64").reshape(-1)
        if not len(indices):
            return cls(name, against, (), 0.0, 0.0, 0.0, tolerance.absolute, 0, size, True)
        with np.errstate(all="ignore"):  # infinities and NaN are judged below
            error = np.where(a == t, 0.0, np.abs(a - t))  # equal infinities too
            limit = tolerance.absolute + tolerance.relative * np.abs(t)
            good = (error <= limit) & (np.isfinite(limit) | (a == t))  # an infinity is within its tolerance of nothing
            part = np.where(error == 0, 0.0, error / limit)
            # The last where no step had a difference that is finite.
            unsure = (off > limit) & (error <= SURE * off) | ~np.isfinite(t) & np.isposinf(off)
        unsure &= ~good & np.isfinite(a)
        badness = np.where(np.isfinite(part), part, np.inf)  # NaN, which compares with nothing, is the worst
        wrong = ~good & ~unsure  # for sure, which goes first
        at = int(np.argmax(np.where(wrong | ~wrong.any(), badness, -1)))
        index = tuple(int(i) for i in np.unravel_index(indices[at], shape))
        worst, true, distance, allowed = (float(b[at]) for b in (a, t, error, limit))
        verdict = bool(good.all()), bool(unsure[at])
        return cls(name, against, index, worst, true, distance, allowed, len(indices), size, *verdict)

    def beside(self, got: Any, direction: np.ndarray, slope: np.ndarray, tolerance: Tolerance) -> Row:
        """Return this row, or where it is right that of the derivative along a direction, if that is surely wrong.

        Errors as large as the tolerance, under independent signs, add up to four times the root of the sum of their
        squares with a probability of 2 exp(-8), by Hoeffding's inequality.

        slope: the derivative by differences, and how far off it may be.
        """
        a, ((expected,), (off,)) = np.asarray(got, "float64"), slope
        limit = 4 * np.linalg.norm(((tolerance.absolute + tolerance.relative * np.abs(a)) * direction).reshape(-1))
        all_of_it = Tolerance(0.0, float(limit))
        whole = Row.worst(self.name, "direction", np.sum(a * direction), expected, all_of_it, off=off)
        is_worse = self.ok and np.isfinite(a).all() and whole.verdict == "WRONG"
        return dataclasses.replace(whole, compared=self.size, size=self.size) if is_worse else self

    @property
    def verdict(self) -> str:
        return "ok" if self.ok else "unsure" if self.unsure else "WRONG"


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a check; `str()` of it is a table.

    Attributes:
      title: the function, the kind of derivative and the dtype.
      rows: a `Row` for each argument, and with a reference one for each result of the function.
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
        lines = [["", "against", "compared", "worst at", "got", "expected", "error", "allowed", ""]]
        for r in self.rows:
            numbers = (f"{r.got:.6e}", f"{r.expected:.6e}", f"{r.error:.1e}", f"{r.tolerance:.1e}")
            compared = f"{r.compared}" if r.compared == r.size else f"{r.compared} of {r.size}"
            shown = numbers if r.compared else ("-",) * len(numbers)
            lines.append([r.name, r.against, compared, str(list(r.index)), *shown, r.verdict])
        note = [UNSURE] if any(r.unsure for r in self.rows) else []
        return "\n".join([self.title, *align(lines, left=(0, 1, 3, 8)), *note])


def align(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Write rows of cells as lines, columns two blanks apart; those in `left` are aligned left, the others right."""
    columns = []
    for i, column in enumerate(zip(*lines, strict=True)):
        width = max(map(len, column))
        columns.append([cell.ljust(width) if i in left else cell.rjust(width) for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
