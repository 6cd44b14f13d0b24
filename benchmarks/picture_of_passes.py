"""The picture of the tile and the passes of each kernel, for `pictures.py`: what the launchers would launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jln._tools import launchers
from jln._tools.canvas import INK, MARGIN, OURS, SOFT, WIDTH, Canvas
from jln._tools.workloads import WORKLOADS
from jln._triton.chip import named_chip
from jln._triton.target import Recorder

_GAP = 10
_PANEL = (WIDTH - 2 * MARGIN - 3 * _GAP) / 4
_GRID = (180, 104)  # pixels that stand for [rows, H]
_ROW, _COLUMN = 8, 15  # of a tile's sides in it
_HEIGHT = 288
_EMPTY, _LATER = "#e5e7eb", "#8ecac4"
# The tiles of a program in the order it takes them: x, y, width, height.
Tiles = Sequence[tuple[float, float, float, float]]
ONE_ROW = ((0, 40, 180, 5),)
SOME_ROWS = tuple((0, y, 180, 5) for y in (8, 42, 76))
ALONG_ROWS = tuple((_COLUMN * i, 40, _COLUMN, 2 * _ROW) for i in range(12))
SOME_OF_COLUMNS = tuple((75, y, _COLUMN, 2 * _ROW) for y in (8, 40, 72))
ALL_OF_COLUMNS = tuple((75, 13 * i, _COLUMN, 13) for i in range(8))

WORDS = {
    "row": "what is normalised: H elements",
    "tile": "the rows and columns that a program has at a time; those of a wider row are its chunks",
    "share": "what one program has: of the rows or a row's chunks, or of a sum; a last kernel adds up the sum's",
    "group": "the rows of one example: all of this once for each",
}


def recorded(name: str, direction: str) -> list[Any]:
    """Return the launches of a workload's operator on an H200, none made."""
    recorder = Recorder(named_chip("h200"))
    function, operands = launchers.call(WORKLOADS[name], direction, recorder)
    jax.eval_shape(function, operands)
    return recorder.launches


def passes() -> Canvas:
    """Draw what one program of each kernel has of `[rows, H]`, and what it does with it."""
    (forward,), (backward, reduce) = (recorded("layer-norm-4096", d) for d in ("forward", "backward"))
    (fused,), (sums, gradient, parameters) = (recorded("linear-4096-256", d) for d in ("forward", "backward"))
    shares, splits = backward.scalars["programs"], gradient.scalars["splits"]
    n = fused.constants["N"]
    canvas = Canvas(122 + 2 * _HEIGHT)
    canvas.title(
        "What one program of each kernel has, and how often it reads it",
        "Grids are [rows, H], dark is one program's tile, light what it takes next; as of x [8192, 4096] in bfloat16",
        "on an H200. The numbers in brackets are the equations of the derivation.",
    )
    top = 92
    canvas.text(MARGIN, top, "A norm", size=12, bold=True, colour=OURS)
    _panel(canvas, 0, top, forward, ("a row each", "in a tile"), ONE_ROW, (
        "x is read once:", "  its mean (1)", "  its variance, of x - mean (2)", "  y, mean and rstd stored (4)",
        "all of it in registers. Rows of", "over 16384: twice, in chunks",
    ))  # fmt: skip
    _panel(canvas, 1, top, backward, (f"every {shares}th row", "in tiles"), SOME_ROWS, (
        "dy and x are read once:", "  the row's c1 and c2 (7) (8)", "  dx stored (9)", "  dscale += dy * x_hat (6)",
        "  doffset += dy (5)", "in the end its shares are stored",
    ))  # fmt: skip
    _panel(canvas, 2, top, reduce, (f"{reduce.tile.columns} columns of a sum", "in tiles"), ALL_OF_COLUMNS, (
        f"grid: [{shares} shares, H]", "the shares are read once:", f"  {reduce.tile.rows} of them at a time,",
        "  always in the same order", "dscale and doffset are stored:", "no atomics, the same bits",
    ))  # fmt: skip
    _words(canvas, MARGIN + 3 * (_PANEL + _GAP), top)
    top += _HEIGHT + 14
    head = f"A norm and the Linear behind it, where features are few: here N = {n}"
    canvas.text(MARGIN, top, head, size=12, bold=True, colour=OURS)
    _panel(canvas, 0, top, fused, (f"{fused.tile.rows} rows each", "in chunks"), ALONG_ROWS, (
        "x is read once, by chunks:", "  mean, rstd so far (1) (2)", "  product so far moved with them",
        "  product += z @ kernel (10) (11)", f"y [{fused.tile.rows}, {n}], mean, rstd stored;", "z is never in memory",
    ))  # fmt: skip
    _panel(canvas, 1, top, sums, (f"{sums.tile.rows} rows each", "in chunks"), ALONG_ROWS, (
        "x is read once, by chunks:", "  dz = dy @ kernel^T (14)", "  c1, c2 so far (7) (8)",
        "  dbias += dy (12)", "stored, dbias as a share. If rows", "are few, a program has a share",
    ))  # fmt: skip
    what = (f"{gradient.tile.columns} columns each", f"1 of {splits} shares, in tiles")
    _panel(canvas, 2, top, gradient, what, SOME_OF_COLUMNS, (
        "x is read once more:", "  dz = dy @ kernel^T (14)", "  dx stored (17)", "  G += x_hat^T @ dy (21)",
        "  dscale += dz * x_hat (16)", "in the end its shares are stored",
    ))  # fmt: skip
    height = _GRID[1] / splits
    all_shares = [(75, height * i, _COLUMN, height) for i in range(splits)]
    _panel(canvas, 3, top, parameters, (f"{parameters.tile.columns} columns each", "in tiles"), all_shares, (
        f"grid: [{splits} shares of {n}, H]", "the shares are read once,", "  always in the same order",
        "dkernel, of G (22), dscale,", "dbias (12) and doffset (15)", "are stored",
    ))  # fmt: skip
    return canvas


def _panel(
    canvas: Canvas, place: int, top: float, launch: Any, has: tuple[str, str], tiles: Tiles, lines: Iterable[str]
) -> None:
    """Draw a kernel's name, what a program has of the grid, and its passes."""
    left = MARGIN + place * (_PANEL + _GAP)
    canvas.text(left, top + 24, launch.kernel.__name__, size=11, bold=True, fixed=True)
    canvas.text(left, top + 42, f"{launch.programs} programs, {has[0]},", size=10, colour=SOFT)
    canvas.text(left, top + 55, f"{has[1]} of {launch.tile.rows} x {launch.tile.columns}", size=10, colour=SOFT)
    top += 68
    canvas.box(left, top, *_GRID, _EMPTY)
    for i, (x, y, width, height) in enumerate(tiles):
        canvas.box(left + x + 0.5, top + y + 0.5, width - 1, height - 1, _LATER if i else OURS)
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        colour = SOFT if indent else INK
        canvas.text(left + 5 * indent, top + _GRID[1] + 18 + 14 * i, line.lstrip(), size=10, colour=colour)


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
