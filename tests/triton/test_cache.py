"""Tests of the files of compiled kernels: where and whose they are, and that a file with anything wrong does no harm.

What their names depend on is tested in tests/program/test_launch.py.
"""

import concurrent.futures
import errno
import json
import multiprocessing
import os
import pathlib
import pwd
import resource
import stat
import zlib

import pytest

from jln._triton import cache

ENTRY = {"name": "kernel", "shared": 0, "ptx": "é" + "code" * 1000}
KEY, OTHER_KEY = "a" * 64, "b" * 64


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "some" / "folder"))
    return tmp_path / "some" / "folder"


def fails(number):
    def call(*_, **__):
        raise OSError(number, os.strerror(number))

    return call


def test_what_was_stored_is_loaded_and_nobody_elses_business(folder):
    assert cache.load(KEY) is None and not folder.exists()  # nothing is made by asking
    before = os.umask(0)
    try:
        cache.store(KEY, ENTRY)
    finally:
        os.umask(before)
    assert cache.load(KEY) == ENTRY and cache.load(OTHER_KEY) is None
    assert cache.entries() == [folder / f"{KEY}.jln"] == list(folder.iterdir())
    assert len(list(folder.parent.iterdir())) == 1
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())] == [0o700, 0o600]


# The variable, XDG_CACHE_HOME, and where the folder is then.
PLACES = {
    "named": ("~/kernels", None, pathlib.Path.home() / "kernels"),
    "the user's": (None, None, pathlib.Path.home() / ".cache" / "jln"),
    "another of the user's": (None, "/xdg", pathlib.Path("/xdg/jln")),
    "relative": (None, "relative", None),
    "off": ("", "/xdg", None),
}


@pytest.mark.parametrize("case", PLACES)
def test_folder_is_named_or_in_the_users_cache(case, monkeypatch):
    *given, folder = PLACES[case]
    for name, value in zip((cache.VARIABLE, "XDG_CACHE_HOME"), given, strict=True):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert cache.folder() == folder


@pytest.mark.parametrize("named", [None, "~/kernels", "~nobody-of-this-name/kernels", ""])
def test_where_there_is_no_folder_nothing_is_kept(named, monkeypatch, tmp_path):
    """A cache is switched off, or the system does not know the user: none is in the current folder."""

    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", cache.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv(cache.VARIABLE, named)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    cache.store(KEY, ENTRY)
    assert cache.folder() is None and cache.load(KEY) is None and cache.entries() == []
    assert list(tmp_path.iterdir()) == []


def written(content):
    return lambda path: path.write_bytes(zlib.compress(content.encode()))


NO_ENTRIES = {
    "another key's": written(json.dumps([OTHER_KEY, ENTRY])),  # renamed, or linked, by whom the folder lets
    "no key's": written(json.dumps(ENTRY)),
    "too deep": written("[" * 100_000),
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),  # which is not waited for
    "of other bytes": lambda path: path.write_bytes(path.read_bytes()[:40] + b"?" + path.read_bytes()[41:]),
}


@pytest.mark.parametrize("case", NO_ENTRIES)
def test_what_is_no_entry_of_the_key_is_as_none(case, folder):
    cache.store(KEY, ENTRY)
    NO_ENTRIES[case](folder / f"{KEY}.jln")
    assert cache.load(KEY) is None
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


@pytest.mark.parametrize("where", ["file", "file/folder", "/proc/folder"])
def test_folder_that_cannot_be_written_is_no_error(where, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / where))
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) is None and cache.entries() == []


def test_folder_that_can_only_be_read_is_read(folder, monkeypatch):
    """A read-only file system is simulated, as root may run the test and may write everywhere else."""
    cache.store(KEY, ENTRY)
    open_, refuse = os.open, fails(errno.EROFS)
    monkeypatch.setattr(
        os, "open", lambda path, flags, *a, **k: (refuse if flags & os.O_CREAT else open_)(path, flags, *a, **k)
    )
    monkeypatch.setattr(os, "utime", refuse)
    cache.store(OTHER_KEY, ENTRY)
    assert cache.load(KEY) == ENTRY and cache.load(OTHER_KEY) is None


@pytest.mark.parametrize("call", ["replace", "write"])
def test_full_disk_leaves_nothing_behind(call, folder, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if call == "replace":
        monkeypatch.setattr(os, "replace", fails(errno.ENOSPC))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # bytes of a file
    try:
        cache.store(KEY, ENTRY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(folder.iterdir()) == []


def _write_and_read(folder, seed):
    os.environ[cache.VARIABLE] = folder
    for i in range(30):
        cache.store(KEY, ENTRY | {"shared": seed, "ptx": str(seed) * 100_000})
        read = cache.load(KEY)
        assert read is not None and read["ptx"] == str(read["shared"]) * 100_000, i
    return True


def test_processes_that_write_at_once_read_whole_entries(folder):
    with concurrent.futures.ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert all(pool.map(_write_and_read, [str(folder)] * 3, range(3)))
    assert len(list(folder.iterdir())) == 1


def test_of_many_entries_the_latest_stay(folder, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 20)
    for i in range(50):
        cache.store(f"{i:064}", ENTRY)
        os.utime(folder / f"{i:064}.jln", (i, i))  # seconds since 1970
        if i == 30:
            cache.load(f"{25:064}")  # asked for just now
    kept = {int(path.stem) for path in cache.entries()}
    assert len(kept) <= 20 and {25, 49, 48, 47, 46} <= kept and not kept & set(range(25))


def test_what_a_killed_process_leaves_is_removed_in_its_turn(folder, monkeypatch):
    """Files that cannot be removed, here a folder, keeps no entry out."""
    monkeypatch.setattr(cache, "LIMIT", 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_, **__: None)  # the process ends here
        cache.store(OTHER_KEY, ENTRY)
    (left,) = folder.iterdir()
    (folder / "folder.jln").mkdir()
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    for key in "cdef":
        cache.store(key * 64, ENTRY)
    assert not left.exists() and cache.load("f" * 64) == ENTRY


SOMEBODY = 54321  # the number of a user that nobody here is


@pytest.fixture
def belongs(monkeypatch):
    """Return a function that has `os.fstat` say that a file belongs to another user, as root alone could give it."""
    owners, fstat = {}, os.fstat

    def seen(descriptor):
        status = fstat(descriptor)
        return os.stat_result([*status[:4], owners.get(status.st_ino, status.st_uid), *status[5:10]])

    monkeypatch.setattr(os, "fstat", seen)
    return lambda path, user: owners.update({path.stat().st_ino: user})


def test_root_makes_no_folder_in_a_users_home(monkeypatch, tmp_path):
    """Keep out of a HOME that sudo has left the user's."""
    if os.geteuid() == 0:
        os.chown(tmp_path, SOMEBODY, SOMEBODY)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / ".cache" / "jln"))
    cache.store(KEY, ENTRY)
    assert list(tmp_path.iterdir()) == [] and cache.load(KEY) is None


@pytest.mark.parametrize("rights", [0o620, 0o602])
def test_entry_that_others_may_write_is_not_taken_but_replaced(rights, folder):
    cache.store(KEY, ENTRY)
    (folder / f"{KEY}.jln").chmod(rights)
    assert cache.load(KEY) is None
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


def test_entry_of_another_user_is_not_taken_but_replaced(folder, belongs):
    """Users of a folder of all take the entries that are its own."""
    folder.mkdir(parents=True)
    folder.chmod(0o1777)
    cache.store(KEY, ENTRY)
    cache.store(OTHER_KEY, ENTRY)
    belongs(folder / f"{OTHER_KEY}.jln", SOMEBODY)
    assert cache.load(KEY) == ENTRY and cache.load(OTHER_KEY) is None
    cache.store(OTHER_KEY, ENTRY)
    assert cache.load(OTHER_KEY) == ENTRY


def test_entry_of_root_is_taken(folder, belongs, monkeypatch):
    cache.store(KEY, ENTRY)
    belongs(folder / f"{KEY}.jln", 0)
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert cache.load(KEY) == ENTRY
