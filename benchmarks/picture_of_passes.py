"""The picture of the tile and the passes of each kernel, for `pictures.py`: what the launchers would launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jln._bench import launchers
from jln._bench.canvas import INK, MARGIN, OURS, SOFT, WIDTH, Canvas
from jln._bench.workloads import WORKLOADS
from jln._triton.chip import named_chip
from jln._triton.target import Recorder

_ROWS, _COLUMNS = 12, 16  # cells of the grids that stand for [rows, H]
_CELL = 9
_GAP = 10
_PANEL = (WIDTH - 2 * MARGIN - 3 * _GAP) / 4
_HEIGHT = 282
_EMPTY, _LATER = "#e5e7eb", "#8ecac4"
Cell = tuple[int, int]  # row, column

WORDS = {
    "row": "what is normalised: H elements",
    "tile": "the rows and columns that a program has in registers at a time",
    "chunk": "a tile's columns, where a row is wider than the tile",
    "share": "a program's own sum, of its rows; a last kernel adds up all shares",
    "part": "of a tile's chunks, where several programs have the same rows",
    "split": "of the rows, where several programs have the same columns",
    "group": "one of vmap's examples: all of this once for each",
}


def recorded(name: str, direction: str) -> list[Any]:
    """The launches of a workload's operator on an H200, none made."""
    recorder = Recorder(named_chip("h200"))
    function, operands = launchers.call(WORKLOADS[name], direction, recorder)
    jax.eval_shape(function, operands)
    return recorder.launches


def passes() -> Canvas:
    """What one program of each kernel has of `[rows, H]`, and what it does with it."""
    (forward,), (backward, reduce) = (recorded("layer-norm-4096", d) for d in ("forward", "backward"))
    (fused,), (sums, gradient, parameters) = (recorded("linear-4096-256", d) for d in ("forward", "backward"))
    shares, splits = backward.scalars["programs"], gradient.scalars["splits"]
    n = fused.constants["N"]
    canvas = Canvas(122 + 2 * _HEIGHT)
    canvas.title(
        "What one program of each kernel has, and how often it reads it",
        "Grids are [rows, H], dark is one program's tile, light what it takes next. Sizes are those of x [8192, 4096] in",
        "bfloat16 on an H200. The numbers in brackets are the equations of the derivation.",
    )
    every_fourth = [(row, column) for row in range(1, _ROWS, 4) for column in range(_COLUMNS)]
    band = [(row, column) for column in range(0, _COLUMNS, 2) for row in (4, 5)]
    column = [(row, column) for row in range(0, _ROWS, 4) for column in (6, 7)]
    column = [(row + more, c) for row, c in column for more in (0, 1)]
    strip = [(row, c) for row in range(_ROWS) for c in (6, 7)]
    top = 92
    canvas.text(MARGIN, top, "A norm", size=12, bold=True, colour=OURS)
    _panel(canvas, 0, top, forward, "a row", [(4, c) for c in range(_COLUMNS)], (), (
        "x is read once:", "  its mean (1)", "  its variance, of x - mean (2)", "  y, mean and rstd stored (4)",
        "all of it in registers. Rows of", "over 16384: twice, in chunks",
    ))  # fmt: skip
    _panel(canvas, 1, top, backward, f"every {shares}th row", every_fourth[:_COLUMNS], every_fourth[_COLUMNS:], (
        "dy and x are read once:", "  the row's c1 and c2 (7) (8)", "  dx stored (9)", "  dscale += dy * x_hat (6)",
        "  doffset += dy (5)", "in the end its shares stored",
    ))  # fmt: skip
    _panel(canvas, 2, top, reduce, f"{reduce.tile.columns} columns of a sum", strip[:6], strip[6:], (
        f"grid: [{shares} shares, H]", "the shares are read once:", f"  {reduce.tile.rows} of them at a time,",
        "  always in the same order,", "dscale and doffset stored:", "no atomics, the same bits",
    ))  # fmt: skip
    _words(canvas, MARGIN + 3 * (_PANEL + _GAP), top)
    top += _HEIGHT + 14
    canvas.text(
        MARGIN, top, f"A norm and the Linear behind it, where features are few: N = {n}", size=12, bold=True, colour=OURS
    )
    size = f"{fused.tile.rows} rows"
    _panel(canvas, 0, top, fused, size, band[:4], band[4:], (
        "x is read once, by chunks:", "  mean, rstd so far (1) (2)", "  product so far moved with them",
        "  product += z @ kernel (3) (4)", f"y [{fused.tile.rows}, {n}], mean, rstd stored;", "z is never in memory",
    ))  # fmt: skip
    _panel(canvas, 1, top, sums, f"{sums.tile.rows} rows, in parts if few", band[:4], band[4:], (
        "x is read once, by chunks:", "  dz = dy @ kernel^T (14)", "  c1, c2 so far (7) (8)",
        "  dbias += dy (12)", "c1, c2, its share of dbias", "stored; dz never in memory",
    ))  # fmt: skip
    _panel(canvas, 2, top, gradient, f"{gradient.tile.columns} columns, 1 of {splits} splits", column[:4], column[4:], (
        "x is read once more:", "  dz = dy @ kernel^T (14)", "  dx stored (17)", "  G += x_hat^T @ dy (21)",
        "  dscale += dz * x_hat (16)", "in the end its shares stored",
    ))  # fmt: skip
    _panel(canvas, 3, top, parameters, f"{parameters.tile.columns} columns of H", strip[:6], strip[6:], (
        f"grid: [{splits} shares of N, H]", "the shares are read once,", "  always in the same order:",
        "dkernel of G (22), dscale,", "dbias (12), doffset (15)", "stored",
    ))  # fmt: skip
    return canvas


def _panel(
    canvas: Canvas, place: int, top: float, launch: Any, has: str, now: Iterable[Cell], later: Iterable[Cell],
    lines: Iterable[str],
) -> None:  # fmt: skip
    """A kernel's name, its grid, and its passes."""
    left = MARGIN + place * (_PANEL + _GAP)
    tile = f"{launch.tile.rows} x {launch.tile.columns}"
    canvas.text(left, top + 24, launch.kernel.__name__, size=11, bold=True, fixed=True)
    canvas.text(left, top + 42, f"{launch.programs} programs of {has},", size=10, colour=SOFT)
    canvas.text(left, top + 55, f"a tile of {tile} at a time", size=10, colour=SOFT)
    cells = dict.fromkeys(later, _LATER) | dict.fromkeys(now, OURS)
    canvas.box(left, top + 68, _CELL * _COLUMNS + 1, _CELL * _ROWS + 1, _EMPTY)
    for (row, first, last), colour in _runs(cells):
        canvas.box(left + 1 + _CELL * first, top + 69 + _CELL * row, _CELL * (last - first + 1) - 1, _CELL - 1, colour)
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        canvas.text(left + 5 * indent, top + 190 + 14 * i, line.lstrip(), size=10, colour=INK if not indent else SOFT)


def _runs(cells: dict[Cell, str]) -> list[tuple[tuple[int, int, int], str]]:
    """Cells of one colour side by side as one: row, first and last column."""
    runs: list[tuple[tuple[int, int, int], str]] = []
    for (row, column), colour in sorted(cells.items()):
        if runs and runs[-1][1] == colour and runs[-1][0][0] == row and runs[-1][0][2] == column - 1:
            runs[-1] = ((row, runs[-1][0][1], column), colour)
        else:
            runs.append(((row, column, column), colour))
    return runs


def _words(canvas: Canvas, left: float, top: float) -> None:
    y = top + 24
    canvas.text(left, y, "the words", size=11, bold=True)
    for word, meaning in WORDS.items():
        y += 18
        canvas.text(left, y, word, size=10, bold=True, colour=OURS)
        for line in _wrapped(meaning, 27):
            canvas.text(left + 40, y, line, size=10, colour=SOFT)
            y += 13
        y -= 13


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return lines
