"""Compiled kernels in files, so that only the first process that needs one compiles it.

JLN_CACHE_DIR names the folder, and set to nothing turns this off; without it the folder is `jln` in the user's cache.
An entry's name is its key, a hash of all that its content depends on. It begins with that key and with a hash of its
content, and counts only with both: neither another's entry nor a part of one is taken. So an entry is never wrong, only
old: past `LIMIT` of them the ones that nobody has asked for the longest are removed. Whatever goes wrong with a file,
the kernel is compiled.

A hash does not say who wrote an entry, and a kernel does with the user's arrays what its author liked. So the folder
and a file in it count only where nobody may have written them but the user and root; else a warning says once what to
do. Both are judged when they are open, and a file is opened by its name in the open folder: who may rename folders
above it can put nothing in its place that is not judged as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import secrets
import shlex
import stat
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

VARIABLE = "JLN_CACHE_DIR"
LIMIT = 2000  # entries of 5 to 30 kB: some 30 MB
LARGEST = 2**24  # bytes of one
_SUFFIX = ".jln"


def folder() -> pathlib.Path | None:
    """The folder of the entries, there or not yet; None where entries are not kept."""
    named = os.environ.get(VARIABLE)
    if named == "" or os.name != "posix":  # elsewhere files do not tell who may have written them
        return None
    if named is not None:
        named = os.path.expanduser(named)
        return None if named.startswith("~") else pathlib.Path(named)  # there is no home
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return base / "jln" if base.is_absolute() else None  # there is no home, or XDG's rule: a relative one is ignored


def entries() -> list[pathlib.Path]:
    """The files of all entries."""
    where = folder()
    try:
        return [] if where is None else [path for path in where.iterdir() if path.suffix == _SUFFIX]
    except OSError:
        return []


def fault() -> str | None:
    """The reason why the folder is not trusted, and what to do; None where it is, or is not there."""
    try:
        with _opened():
            return None
    except OSError:
        return None
    except Untrusted as error:
        return str(error)


def load(key: str) -> dict[str, Any] | None:
    """The entry stored under the key; None where there is none, or where it cannot be read or is not trusted."""
    with _harmless(), _opened() as (path, where):
        name = key + _SUFFIX
        head, _, packed = _content(path / name, where).partition(b"\n")
        if head != _head(key, packed):
            return None
        try:
            unpacked = zlib.decompressobj()
            entry = json.loads(unpacked.decompress(packed, LARGEST))
        except (zlib.error, ValueError, RecursionError):
            return None
        if not unpacked.eof or not isinstance(entry, dict):  # too much, or nothing of ours
            return None
        with contextlib.suppress(OSError):  # of root's
            os.utime(name, dir_fd=where, follow_symlinks=False)
        return entry
    return None


def _content(path: pathlib.Path, where: int) -> bytes:
    """An entry's bytes, of a file in the open folder, judged when it is open; none of what is larger or no file."""
    flags = os.O_NONBLOCK | os.O_NOFOLLOW  # or a pipe would wait for its writer
    with open(path.name, "rb", opener=lambda name, mode: os.open(name, mode | flags, dir_fd=where)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            return b""
        _judge(status, path, _REPLACED, _REPLACED)
        return file.read(status.st_size)


def store(key: str, entry: dict[str, Any]) -> None:
    """Write an entry, whole or not at all, whoever else writes or reads it; nothing where none can be written."""
    with _harmless(), _opened(make=True) as (_, where):
        _remove_oldest(where)
        # An entry's name at its end, so that what a killed process leaves is removed in its turn, too.
        scratch = f"{key}.{secrets.token_hex(8)}{_SUFFIX}"
        packed = zlib.compress(json.dumps(entry).encode())
        with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, 0o600, dir_fd=where)) as file:
            try:
                file.write(_head(key, packed) + b"\n" + packed)
                file.close()
                os.replace(scratch, key + _SUFFIX, src_dir_fd=where, dst_dir_fd=where)
            except BaseException:
                os.unlink(scratch, dir_fd=where)
                raise


def _head(key: str, packed: bytes) -> bytes:
    """The first line of an entry's file."""
    return f"jln {key} {hashlib.sha256(packed).hexdigest()}".encode()


class Untrusted(Exception):
    """A reason not to use the folder or a file in it, and what to do about it."""


_REPLACED = "It is replaced; see who may write to the folder"


def _judge(status: os.stat_result, path: pathlib.Path, belongs: str, written: str) -> None:
    """Raise Untrusted where others may have written what has this status.

    belongs, written: what to do about a path that belongs to another user, and about one that others may write.
    """
    if status.st_uid not in (0, os.geteuid()):
        raise Untrusted(f"{shlex.quote(str(path))} belongs to user {status.st_uid}. {belongs}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Untrusted(f"{shlex.quote(str(path))} may be written by others. {written}")


@contextlib.contextmanager
def _opened(make: bool = False) -> Iterator[tuple[pathlib.Path, int]]:
    """Open the folder: its path and descriptor. Raises OSError where none can be opened, and Untrusted."""
    where = folder()
    if where is None:
        raise FileNotFoundError
    if make and not where.exists():
        _make(where)
    descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mine = f"Name a folder of your own in {VARIABLE}"
        _judge(os.fstat(descriptor), where, mine, f"Run `chmod go-w {shlex.quote(str(where))}`")
        yield where, descriptor
    finally:
        os.close(descriptor)


_said: set[pathlib.Path | None] = set()


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """Let nothing that is wrong with files stop the caller's caller; that they are not trusted is said once."""
    try:
        yield
    except OSError:
        pass
    except Untrusted as error:
        if folder() not in _said:
            _said.add(folder())
            warnings.warn(f"jln compiles kernels instead of taking them from its cache: {error}.", stacklevel=4)


def _make(where: pathlib.Path) -> None:
    """Make the folder and those above it, with their rights from the first moment: other processes may look there."""
    missing = [path for path in (where, *where.parents) if not path.exists()]
    if os.geteuid() == 0 and VARIABLE not in os.environ:  # sudo may leave HOME the user's
        above = missing[-1].parent
        if (owner := above.stat().st_uid) != 0:
            why = f"{shlex.quote(str(above))} belongs to user {owner}, who could not use a folder that root makes there"
            raise Untrusted(f"{why}. Run sudo with -H, or name a folder in {VARIABLE}")
    for path in reversed(missing):
        folder = tempfile.mkdtemp(prefix=".jln-", dir=path.parent)  # its owner's alone, whatever the umask
        try:
            os.rename(folder, path)
        except OSError:  # another process may have made it, and put something there
            os.rmdir(folder)
            if not path.exists():
                raise


def _remove_oldest(where: int) -> None:
    """Make room for one more entry, and for as many as a tenth of all: looking at all of them is then rare."""
    names = [name for name in os.listdir(where) if name.endswith(_SUFFIX)]
    if len(names) < LIMIT:
        return
    asked_for = {}
    for name in names:
        with contextlib.suppress(OSError):  # another process removes them too
            asked_for[name] = os.stat(name, dir_fd=where, follow_symlinks=False).st_mtime
    for name in sorted(asked_for, key=asked_for.__getitem__)[: len(names) - LIMIT + 1 + LIMIT // 10]:
        with contextlib.suppress(OSError):  # or it is a folder
            os.unlink(name, dir_fd=where)
