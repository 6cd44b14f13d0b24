"""Compiled kernels in files, so that only the first process that needs one compiles it.

JLN_CACHE_DIR names the folder, by its whole path, and set to nothing turns this off; without it the folder is `jln` in
the user's cache.

An entry's name is its key, a hash of all that its content depends on. The key is in the content, too, and zlib's
checksum says whether that is whole. So an entry is never wrong, only old: past `LIMIT` of them the ones that nobody has
asked for the longest are removed. Whatever goes wrong with a file, the kernel is compiled.

A kernel does with the user's arrays what its author liked. So a file counts only if nobody but the user and root may
have written it, which is judged when it is open. Triton's own cache does not ask whose a file is or whether it is
whole, and keeps nothing where jax-triton has emptied TRITON_CACHE_DIR.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import stat
import tempfile
import zlib
from typing import Any

VARIABLE = "JLN_CACHE_DIR"
LIMIT = 2000  # entries of 5 to 30 kB: some 30 MB
_SUFFIX = ".jln"


def folder() -> pathlib.Path | None:
    """The folder of the entries, there or not yet; None where entries are not kept."""
    named = os.environ.get(VARIABLE)
    if named == "":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = pathlib.Path(os.path.expanduser(named or f"{base}/jln"))
    return path if path.is_absolute() else None  # without a home it is not, and XDG's rule leaves out relative ones


def entries() -> list[pathlib.Path]:
    """The files of all entries."""
    where = folder()
    try:
        return [] if where is None else [path for path in where.iterdir() if path.suffix == _SUFFIX]
    except OSError:
        return []


def load(key: str) -> Any:
    """The entry stored under the key; None where there is none that is whole and the user's or root's."""
    if (where := folder()) is None:
        return None
    path = where / (key + _SUFFIX)
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # or a pipe would wait for its writer
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            name, entry = json.loads(zlib.decompress(file.read()))
        with contextlib.suppress(OSError):  # of root's
            os.utime(path)
        return entry if name == key else None
    except (OSError, ValueError, TypeError, RecursionError, zlib.error):
        return None


def store(key: str, entry: dict[str, Any]) -> None:
    """Write an entry, whole or not at all, whoever else writes or reads it; nothing where none can be written."""
    if (where := folder()) is None:
        return
    with contextlib.suppress(OSError):
        if not where.exists():
            near = next(path for path in where.parents if path.exists())
            if os.geteuid() == 0 != near.stat().st_uid:  # sudo may keep HOME, of which root would take away a part
                return
        where.mkdir(0o700, parents=True, exist_ok=True)
        if len(kept := entries()) >= LIMIT:  # a tenth of all make room, so that most calls look at none
            for path in sorted(kept, key=lambda path: path.lstat().st_mtime)[: len(kept) - LIMIT + 1 + LIMIT // 10]:
                with contextlib.suppress(OSError):  # another process removes them too
                    path.unlink()
        # The user's alone, whatever the umask. What a killed process leaves is removed in its turn, as an entry.
        descriptor, scratch = tempfile.mkstemp(_SUFFIX, dir=where)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(zlib.compress(json.dumps([key, entry]).encode()))
            os.replace(scratch, where / (key + _SUFFIX))
        except BaseException:
            os.unlink(scratch)
            raise
