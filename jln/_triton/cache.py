"""Compiled kernels in files, so that only the first process that needs one compiles it.

JLN_CACHE_DIR names the folder, and set to nothing turns this off; without it the folder is `jln` in the user's cache.
An entry's name is a hash of all that its content depends on, so an entry is never wrong, only old: past `LIMIT` of them
the ones that nobody has asked for the longest are removed. Whatever goes wrong with a file, the kernel is compiled.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
import zlib
from typing import Any

from jln._triton import files

VARIABLE = "JLN_CACHE_DIR"
LIMIT = 2000  # entries of 5 to 30 kB: some 30 MB
LARGEST = 2**24  # bytes of one
_SUFFIX = ".jln"


def folder() -> pathlib.Path | None:
    """The folder of the entries, there or not yet; None where entries are not kept."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return pathlib.Path(os.path.expanduser(named)) if named else None
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return base / "jln" if base.is_absolute() else None  # there is no home, or XDG's rule: a relative one is ignored


def entries() -> list[pathlib.Path]:
    """The files of all entries."""
    where = folder()
    try:
        return [] if where is None else [path for path in where.iterdir() if path.suffix == _SUFFIX]
    except OSError:
        return []


def load(key: str) -> dict[str, Any] | None:
    """The entry stored under the key; None where there is none, or where it cannot be read."""
    where = folder()
    if where is None:
        return None
    path = where / (key + _SUFFIX)
    found = files.content(path, LARGEST)
    if isinstance(found, str):
        return None
    try:
        unpacked = zlib.decompressobj()
        entry = json.loads(unpacked.decompress(found, LARGEST))
    except (zlib.error, ValueError, RecursionError):
        return None
    if not unpacked.eof or not isinstance(entry, dict):  # cut short, or nothing of ours
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return entry


def store(key: str, entry: dict[str, Any]) -> None:
    """Write an entry, whole or not at all, whoever else writes or reads it; nothing where none can be written."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        _remove_oldest()
        with tempfile.NamedTemporaryFile(dir=where, delete=False) as file:
            try:
                file.write(zlib.compress(json.dumps(entry).encode()))
                file.close()
                os.replace(file.name, where / (key + _SUFFIX))
            except BaseException:
                os.unlink(file.name)
                raise


def _remove_oldest() -> None:
    """Make room for one more entry, and for as many as a tenth of all: looking at all of them is then rare."""
    found = entries()
    if len(found) < LIMIT:
        return
    asked_for = {}
    for path in found:
        with contextlib.suppress(OSError):  # another process removes them too
            asked_for[path] = path.stat().st_mtime
    for path in sorted(asked_for, key=asked_for.__getitem__)[: len(found) - LIMIT + 1 + LIMIT // 10]:
        path.unlink(missing_ok=True)
