"""Compiled kernels in files, so that only the first process that needs one compiles it.

JLN_CACHE_DIR names the folder, and set to nothing turns this off; without it the folder is `jln` in the user's cache.
An entry's name is its key, a hash of all that its content depends on. It begins with that key and with a hash of its
content, and counts only with both: neither another's entry nor a part of one is taken. So an entry is never wrong, only
old: past `LIMIT` of them the ones that nobody has asked for the longest are removed. Whatever goes wrong with a file,
the kernel is compiled.

A hash does not say who wrote an entry, and a kernel does with the user's arrays what its author liked. So the folder
and a file in it count only where nobody may have written them but the user, root and the group that JLN_CACHE_GROUP
names; else a warning says once what to do. Both are judged when they are open, and a file is opened by its name in the
open folder: who may rename folders above it can put nothing in its place that is not judged as well.
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
from typing import Any, NamedTuple

from jln._triton import files

VARIABLE = "JLN_CACHE_DIR"
GROUP_VARIABLE = "JLN_CACHE_GROUP"
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
    with _harmless(), _opened() as opened:
        content = files.content(key + _SUFFIX, LARGEST, opened.descriptor, lambda status: opened.judge(status, key))
        head, _, packed = (b"" if isinstance(content, str) else content).partition(b"\n")
        if head != _head(key, packed):
            return None
        try:
            unpacked = zlib.decompressobj()
            entry = json.loads(unpacked.decompress(packed, LARGEST))
        except (zlib.error, ValueError, RecursionError):
            return None
        if not unpacked.eof or not isinstance(entry, dict):  # too much, or nothing of ours
            return None
        with contextlib.suppress(OSError):  # a member of the group may read an entry of another, and no more
            os.utime(key + _SUFFIX, dir_fd=opened.descriptor, follow_symlinks=False)
        return entry
    return None


def store(key: str, entry: dict[str, Any]) -> None:
    """Write an entry, whole or not at all, whoever else writes or reads it; nothing where none can be written."""
    with _harmless(), _opened(make=True) as opened:
        where = opened.descriptor
        _remove_oldest(where)
        # An entry's name at its end, so that what a killed process leaves is removed in its turn, too.
        scratch = f"{key}.{secrets.token_hex(8)}{_SUFFIX}"
        packed = zlib.compress(json.dumps(entry).encode())
        with open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, 0o600, dir_fd=where)) as file:
            try:
                if opened.group is not None:
                    os.fchown(file.fileno(), -1, opened.group)
                    os.fchmod(file.fileno(), 0o640)  # whatever the umask
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


class Opened(NamedTuple):
    """The folder, open. group: the number of the group that shares it, None where none does."""

    path: pathlib.Path
    descriptor: int
    group: int | None

    def judge(self, status: os.stat_result, key: str | None = None) -> None:
        """Raise Untrusted where others may have written what has this status: the folder, or the entry of a key."""
        path = shlex.quote(str(self.path if key is None else self.path / (key + _SUFFIX)))
        shared = self.group is not None and status.st_gid == self.group
        if key is None and self.group is not None and not shared:
            of = f"of user {status.st_uid} is not of the group that {GROUP_VARIABLE} names"
            raise Untrusted(f"{path} {of}. Its owner can run `chgrp {self.group} {path} && chmod 2770 {path}`")
        share = f"name in {GROUP_VARIABLE} the group that shares it"
        replaced = "It is replaced; see who may write to the folder"
        if status.st_uid not in (0, os.geteuid()) and not shared:
            own = f"Name a folder of your own in {VARIABLE}, or {share}" if key is None else replaced
            raise Untrusted(f"{path} belongs to user {status.st_uid}. {own}")
        if status.st_mode & (stat.S_IWOTH if shared else stat.S_IWGRP | stat.S_IWOTH):
            who, more = ("o", "") if shared else ("go", f", or {share}")
            own = f"Run `chmod {who}-w {path}`{more}" if key is None else replaced
            raise Untrusted(f"{path} may be written by others. {own}")


@contextlib.contextmanager
def _opened(make: bool = False) -> Iterator[Opened]:
    """Open the folder. Raises OSError where there is none that can be opened, and Untrusted."""
    where = folder()
    if where is None:
        raise FileNotFoundError
    group = _group()
    if make and not where.exists():
        _make(where, group)
    descriptor = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    try:
        opened = Opened(where, descriptor, group)
        opened.judge(os.fstat(descriptor))
        yield opened
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


def _group() -> int | None:
    """The number of the group that shares the folder; None where none does. Raises Untrusted where it cannot be."""
    named = os.environ.get(GROUP_VARIABLE)
    if not named:
        return None
    import grp  # POSIX alone has it

    try:
        number = int(named) if named.isdecimal() else grp.getgrnam(named).gr_gid
    except (KeyError, ValueError):
        number = -1
    if not 0 <= number < 2**32 - 1:
        raise Untrusted(f"{GROUP_VARIABLE} names {named!r}, and there is no such group")
    if os.geteuid() != 0 and number not in (os.getegid(), *os.getgroups()):
        raise Untrusted(f"{GROUP_VARIABLE} names {named!r}, a group that you are not in")
    return number


def _make(where: pathlib.Path, group: int | None) -> None:
    """Make the folder and those above it, with their rights from the first moment: other processes may look there.

    Those above a group may only go through: one of them may be `~/.cache`, where other programs trust what they find.
    """
    missing = [path for path in (where, *where.parents) if not path.exists()]
    if os.geteuid() == 0 and VARIABLE not in os.environ:  # sudo may leave HOME the user's
        above = missing[-1].parent
        if (owner := above.stat().st_uid) != 0:
            why = f"{shlex.quote(str(above))} belongs to user {owner}, who could not use a folder that root makes there"
            raise Untrusted(f"{why}. Run sudo with -H, or name a folder in {VARIABLE}")
    for path in reversed(missing):
        folder = tempfile.mkdtemp(prefix=".jln-", dir=path.parent)  # its owner's alone, whatever the umask
        try:
            if group is not None:
                _share(folder, group, 0o2770 if path == where else 0o2750)
            os.rename(folder, path)
        except OSError:  # another process may have made it, and put something there
            os.rmdir(folder)
            if not path.exists():
                raise


def _share(path: str, group: int, rights: int) -> None:
    """Let a group use a folder by these rights, and nothing that somebody puts in its place meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchown(descriptor, -1, group)
        os.fchmod(descriptor, rights)
    finally:
        os.close(descriptor)


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
