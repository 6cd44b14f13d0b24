"""Rows: what a script found, printed as a plain table or written as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import typer

from jln.testing.operators import ALIASES
from jln.testing.report import align, unknown

UserError = typer.BadParameter  # what the user can mend: a sentence on stderr, exit status 2


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: its title, how its values are written (`format` takes it, or a function), and their unit."""

    title: str
    form: str | Callable[[Any], str] = ""
    unit: float | None = None

    def cell(self, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        value = value if self.unit is None else value / self.unit
        return format(value, self.form) if isinstance(self.form, str) else self.form(value)


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Column]) -> None:
    """Print rows as a table without its empty columns, texts to the left and numbers to the right; no rows: nothing."""
    columns = {field: column for field, column in columns.items() if any(column.cell(row.get(field)) for row in rows)}
    if not columns:
        return
    cells = [[column.cell(row.get(field)) for field, column in columns.items()] for row in rows]
    texts = [i for i, field in enumerate(columns) if all(isinstance(row.get(field), str | None) for row in rows)]
    lines = align([[column.title for column in columns.values()], *cells], texts)
    print("\n".join([title, *(f"  {line}" for line in lines), ""]), flush=True)


def known(what: str, names: Iterable[str], among: Iterable[str]) -> list[str]:
    """The names, each once, bfloat16 for bf16. Raises UserError for one that is not among those that there are."""
    names, among = list(dict.fromkeys(ALIASES.get(name, name) for name in names)), list(among)
    for name in names:
        if name not in among:
            raise UserError(unknown(what, name, among))
    return names


def one_line(error: Exception) -> str:
    """The message of an error of another library on one line, however many it has."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.0f}" if size >= 1e8 else f"{size / 1e6:.1f}" if size >= 1e6 else f"{size / 1e6:.3f}"


def save(document: Any, path: pathlib.Path) -> None:
    """Write JSON to a file at once or not at all: an interrupted run leaves the file of before."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")  # of this process: another may write the same file
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        scratch.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
