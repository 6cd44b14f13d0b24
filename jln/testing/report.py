"""Reports of gradient checks, as data and as tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

# An error of this many times what the differences may be off is no fault of theirs. Their estimate counts one rounding
# of each result, and a function makes many more.
SURE = 100
SMALL = "ok would be zeros too, for all that is expected is within the absolute tolerance of 0: give another tolerance"
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
# roundings, which is what a chain of elementwise operations gathers; that of the others leaves room for long sums.
# bfloat16 has three bits fewer than float16, so both of its numbers are 2^3 times float16's.
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
      against: "reference", "differences", or "direction": the derivative along a random direction of all elements,
        where differences of some of them told nothing.
      index: of the worst element; empty for a direction.
      got: the value under test.
      expected: the value that it is compared with.
      error: the distance between the two.
      tolerance: the largest error allowed.
      compared: how many elements were compared.
      size: how many elements there are.
      ok: whether all of them are within their tolerance.
      unsure: whether it is not `ok` for want of digits in the differences, and may yet be right.
      seed: the seed with which it was found.
      small: whether it is `ok` and so would zeros be, which it is not, in every seed.
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
    seed: int | None = None
    small: bool = False

    @classmethod
    def worst(
        cls,
        name: str,
        against: str,
        got: Any,
        expected: Any,
        tolerance: Tolerance,
        indices: np.ndarray | None = None,
        uncertainty: Any = 0.0,
        seed: int | None = None,
    ) -> Row:
        """The row of the worst element.

        indices: those of the flattened elements that `expected` has; None: all. uncertainty: how far `expected` may be
          off.
        """
        shape, size = np.shape(got), np.size(got)
        indices = np.arange(size) if indices is None else indices
        a = np.asarray(got, "float64").reshape(-1)[indices]
        t = np.asarray(expected, "float64").reshape(-1)
        if not len(indices):
            return cls(name, against, (), 0.0, 0.0, 0.0, tolerance.absolute, 0, size, True, seed=seed)
        with np.errstate(all="ignore"):  # infinities and NaN are judged below
            error = np.where(a == t, 0.0, np.abs(a - t))  # equal infinities too
            limit = tolerance.absolute + tolerance.relative * np.abs(t)
            good = (error <= limit) & (np.isfinite(limit) | (a == t))  # an infinity is within its tolerance of nothing
            part = np.where(error == 0, 0.0, error / limit)
            unsure = ~good & (uncertainty > limit) & (error <= SURE * uncertainty)
            unsure |= ~np.isfinite(t) & np.isposinf(uncertainty)  # no step had a difference that is finite
        badness = np.where(np.isfinite(part), part, np.inf)  # NaN, which compares with nothing, is the worst
        wrong = ~good & ~unsure  # for sure, which goes first
        at = int(np.argmax(np.where(wrong | ~wrong.any(), badness, -1)))
        index = tuple(int(i) for i in np.unravel_index(indices[at], shape))
        worst_got, worst_expected, worst_error, allowed = (float(b[at]) for b in (a, t, error, limit))
        small = bool(good.all() and np.any(t) and np.all(np.abs(t) <= tolerance.absolute))
        verdict = len(indices), size, bool(good.all()), bool(unsure[at]), seed, small
        return cls(name, against, index, worst_got, worst_expected, worst_error, allowed, *verdict)

    @classmethod
    def along(
        cls, row: Row, got: Any, direction: np.ndarray, expected: Any, tolerance: Tolerance, uncertainty: Any
    ) -> Row:
        """The row of a derivative along a direction, of the argument of `row`.

        Errors of the size of the tolerance, under independent signs, add up to four times the root of the sum of their
        squares with a probability of 2 exp(-8), by Hoeffding's inequality.
        """
        a, d = np.asarray(got, "float64"), np.asarray(direction)
        with np.errstate(all="ignore"):
            limit = 4 * np.linalg.norm(((tolerance.absolute + tolerance.relative * np.abs(a)) * d).reshape(-1))
            slope = np.sum(a * d)
        allowed = Tolerance(0.0, float(limit))
        whole = cls.worst(row.name, "direction", slope, expected, allowed, None, uncertainty, row.seed)
        return dataclasses.replace(whole, compared=row.size, size=row.size)

    @property
    def badness(self) -> float:
        """The error as a part of the tolerance; at most 1 where the row passes."""
        if self.error == 0:
            return 0.0
        return self.error / self.tolerance if self.tolerance and math.isfinite(self.error) else math.inf

    @property
    def verdict(self) -> str:
        return "ok" if self.ok else "unsure" if self.unsure else "WRONG"

    @staticmethod
    def of_one_seed(rows: Iterable[Row]) -> tuple[Row, ...]:
        """One row for each name, in order: the worse one; if one of two is unsure, the other."""
        return _worst(rows, lambda row: (not row.unsure, not row.ok, row.badness))

    @staticmethod
    def of_seeds(rows: Iterable[Row]) -> tuple[Row, ...]:
        """One row for each name, in order: the worst one, where a wrong row is worse than an unsure one."""
        return _worst(rows, lambda row: (not row.ok, not row.unsure, row.badness))


def _worst(rows: Iterable[Row], rank: Callable[[Row], Any]) -> tuple[Row, ...]:
    worst: dict[str, Row] = {}
    for row in rows:
        other = worst.get(row.name, row)
        worse = row if rank(row) > rank(other) else other
        worst[row.name] = dataclasses.replace(worse, small=row.small and other.small)
    return tuple(worst.values())


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a check; `str()` of it is a table.

    Attributes:
      title: the function, the kind of derivative and the dtype.
      rows: a `Row` for each argument, and with a reference one for each result of the function; with several seeds the
        worst of all of them.
      by_seed: the report of each seed, where there are several.
      ok: whether every row is.
    """

    title: str
    rows: tuple[Row, ...]
    by_seed: Mapping[int, Report] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def row(self, name: str) -> Row:
        """The row of an argument or result by name. Raises KeyError where there is none.

        Args:
          name: of the row.
        """
        return {row.name: row for row in self.rows}[name]

    def __str__(self) -> str:
        seed = ("seed",) if self.by_seed else ()
        header = ("", "against", "compared", *seed, "worst at", "got", "expected", "error", "allowed", "")
        lines: list[tuple[str, ...]] = [header]
        for r in self.rows:
            numbers = (f"{r.got:.6e}", f"{r.expected:.6e}", f"{r.error:.1e}", f"{r.tolerance:.1e}")
            compared = f"{r.compared}" if r.compared == r.size else f"{r.compared} of {r.size}"
            if not r.compared:
                numbers = ("-",) * len(numbers)
            seed = (str(r.seed),) if self.by_seed else ()
            where = "all" if r.against == "direction" else str(list(r.index))
            lines.append((r.name, r.against, compared, *seed, where, *numbers, r.verdict))
        notes = [UNSURE] if any(r.unsure for r in self.rows) else []
        notes += [f"{r.name}: {SMALL}" for r in self.rows if r.ok and r.small]
        return "\n".join([self.title, *aligned(lines, left=(0, 1, header.index("worst at"), len(header) - 1)), *notes])


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Rows of cells as lines of text, columns two blanks apart; those in `left` are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
