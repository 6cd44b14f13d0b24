"""Output of all commands: rows, printed as tables or JSON, notes, progress, files, errors.

It is pleasant in a terminal and plain in a pipe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import rich.progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jln.testing.report import aligned

STYLES = {"WRONG": "bold red", "no": "bold red", "ok": "green"}


class UserError(Exception):
    """An error that the user can mend: one line on stderr, exit status 2."""


def known(what: str, names: Iterable[str], among: Iterable[str], hint: str | None = None) -> list[str]:
    """The names, each once. Raises UserError, which lists those of `among`, for a name that is not one of them."""
    among = list(among)
    for name in names:
        if name not in among:
            raise UserError(f"unknown {what} {name!r}; " + (hint or f"known are {', '.join(among)}"))
    return list(dict.fromkeys(names))


def one_line(error: Exception) -> str:
    """The message of an error of another library on one line, however many it has."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def complain(message: str, status: int = 2) -> int:
    try:
        print(f"jln: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:  # a full disk
        drop(sys.stderr)
    return status


def drop(stream: Any) -> None:
    """Send a stream's buffered output nowhere: at its end Python would try again to write it, and print a traceback."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table of rows.

    form: how its values are written, as `format` takes it, or a function. unit: what they are divided by before.
    absent: what stands for None, or for nothing.
    """

    title: str
    form: str | Callable[[Any], str] = ""
    unit: float | None = None
    absent: str = ""

    def cell(self, value: Any) -> str:
        if value is None or value in ("", []):
            return self.absent
        if isinstance(value, str):
            return value
        value = value if self.unit is None else value / self.unit
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Findings of a command, as flat records.

    title: that of their table. It may name fields, as in "{workload} by {peer}": rows of another title are another
      table. Without columns each title is a sentence by itself.
    columns: by field. key: the rows' name in JSON; None: they are not in it. wrong: whether their sentences are bad
      news.
    """

    rows: Sequence[Mapping[str, Any]]
    title: str = ""
    columns: Mapping[str, Column] | None = None
    key: str | None = None
    wrong: bool = False

    def show(self) -> None:
        tables: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.rows if self.title else ():
            tables.setdefault(self.title.format(**row), []).append(row)
        for title, rows in tables.items():
            if self.columns is None:
                print_note(title, wrong=self.wrong)
                continue
            cells = [[column.cell(row.get(field)) for field, column in self.columns.items()] for row in rows]
            values = zip(*([row.get(field) for field in self.columns] for row in rows), strict=True)
            left = [
                i for i, column in enumerate(values) if all(isinstance(value, str | list | None) for value in column)
            ]
            print_table(title, [column.title for column in self.columns.values()], cells, left=left)


@dataclasses.dataclass(frozen=True)
class Note:
    """A sentence about all that was found. wrong: whether it is bad news."""

    text: str
    wrong: bool = False

    def show(self) -> None:
        print_note(self.text, wrong=self.wrong)


def document(facts: Mapping[str, Any], parts: Iterable[Rows | Note]) -> dict[str, Any]:
    """Facts, and the rows that have a key, as one document for JSON."""
    return {**facts, **{part.key: list(part.rows) for part in parts if isinstance(part, Rows) and part.key}}


def show(facts: Mapping[str, Any], parts: Sequence[Rows | Note], as_json: bool) -> None:
    """Print what was found: as JSON, or its rows as tables, and the notes."""
    if as_json:
        print(json.dumps(document(facts, parts), indent=2, allow_nan=False))
    for part in () if as_json else parts:
        part.show()


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> None:
    """Print a table. left: the columns of text; the other columns, of numbers, are aligned to the right."""
    console = Console()
    if not console.is_terminal:
        print("\n".join([title, *(f"  {line}" for line in aligned([header, *rows], left)), ""]))
        return
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i in left else "right")
    for row in rows:
        table.add_row(*(Text(cell, _style([cell])) for cell in row))
    unlimited = console.options.update(max_width=10_000)
    if console.measure(table, options=unlimited).maximum <= console.width:
        console.print(table)
        return
    # A table cut to the width would lose the exponents of its numbers; lines go on in the next.
    console.print(Text(title, "bold"))
    heading, *lines = aligned([header, *rows], left)
    for line, style in [(heading, "bold"), *((line, _style(row)) for line, row in zip(lines, rows, strict=True))]:
        console.print(Text(line, style), soft_wrap=True)
    console.print()


def _style(cells: Sequence[str]) -> str:
    """The style of the first cell that has one."""
    return next((STYLES[word] for cell in cells if (word := cell.split(" ")[0]) in STYLES), "")


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}" if size >= 1e8 else f"{size / 1e6:.1f}" if size >= 1e6 else f"{size / 1e6:.3f}"


def print_note(text: str, *, wrong: bool = False, stderr: bool = False) -> None:
    console = Console(stderr=stderr)
    if console.is_terminal:
        console.print(Text(text, "bold red" if wrong else ""))
    else:
        print(text, file=console.file)


def for_output(folder: pathlib.Path | None) -> None:
    """Make a folder for what is about to be found. Raises UserError where nothing can be written there."""
    if folder is None:
        return
    with _writing(folder, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def save(document: dict[str, Any], path: pathlib.Path) -> None:
    """Write what was found to a file, at once or not at all: an interrupted run leaves the file of before.

    Raises UserError where that fails.
    """
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")  # of this process: another may write the same file
    with _writing(path, OSError, ValueError):  # the latter of a NaN in a file that somebody has edited
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_text(text)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def _writing(path: pathlib.Path, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def draw_plots(kind: str, document: dict[str, Any], folder: pathlib.Path) -> None:
    """Draw what was found by a function of `jln._tools.plots`, if there is a library to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        print_note('no plots: matplotlib is not installed; pip install -e ".[bench]"', stderr=True)
        return
    from jln._tools import plots

    with _writing(folder, OSError):
        getattr(plots, kind)(document, folder)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, if that is a terminal.

    The function that it yields is to be called `total` times, with what is about to be done.
    """
    console = Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def begin(what: str) -> None:
            nonlocal begun
            bar.update(task, description=what, advance=1 if begun else 0)
            begun = True

        yield begin
