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


def test_what_was_stored_is_loaded(folder):
    assert cache.load(KEY) is None and not folder.exists()  # nothing is made by asking
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY and cache.load(OTHER_KEY) is None
    assert [path.parent for path in cache.entries()] == [folder] and len(list(folder.iterdir())) == 1
    assert len(list(folder.parent.iterdir())) == 1


def test_folder_is_named_or_in_the_users_cache(monkeypatch):
    monkeypatch.setenv(cache.VARIABLE, "~/kernels")
    assert cache.folder() == pathlib.Path.home() / "kernels"
    monkeypatch.delenv(cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.folder() == pathlib.Path("/xdg/jln")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.folder() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == pathlib.Path.home() / ".cache" / "jln"


@pytest.mark.parametrize("named", [None, "~/kernels", "~nobody-of-this-name/kernels"])
def test_user_without_a_home_keeps_none(named, monkeypatch, tmp_path):
    """A user whom the system does not know, as in a container, has no home, and none is made in the current folder."""

    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", cache.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv(cache.VARIABLE, named)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    cache.store(KEY, ENTRY)
    assert cache.folder() is None and cache.load(KEY) is None and list(tmp_path.iterdir()) == []


def test_set_to_nothing_it_is_off(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(cache.VARIABLE, "")
    cache.store(KEY, ENTRY)
    assert cache.folder() is None and cache.load(KEY) is None and cache.entries() == []
    assert list(tmp_path.iterdir()) == []


NO_ENTRIES = {
    "another key's": [OTHER_KEY, ENTRY],
    "no key's": ENTRY,
    "a number": 1,
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", NO_ENTRIES.values(), ids=NO_ENTRIES)
def test_what_is_no_entry_of_the_key_is_as_none(content, folder):
    cache.store(KEY, ENTRY)  # which is renamed, or linked, by whom the folder lets
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / f"{KEY}.jln").write_bytes(zlib.compress(text.encode()))
    assert cache.load(KEY) is None


DAMAGES = (lambda b: b"", lambda b: b[:-1], lambda b: b[:9], lambda b: b[:40] + b"?" + b[41:])


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_as_none_and_written_again(damage, folder):
    cache.store(KEY, ENTRY)
    (path,) = cache.entries()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load(KEY) is None
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


def test_a_pipe_is_not_waited_for(folder):
    cache.store(KEY, ENTRY)
    (path,) = cache.entries()
    path.unlink()
    os.mkfifo(path)
    assert cache.load(KEY) is None


def test_folder_may_be_a_link(folder, tmp_path):
    """A folder may be a link, as where homes are small, but not one to nothing."""
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "large")
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) is None and [path.name for path in folder.parent.iterdir()] == ["folder"]
    (tmp_path / "large").mkdir(mode=0o700)
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY and len(list((tmp_path / "large").iterdir())) == 1


@pytest.mark.parametrize("where", ["file", "file/folder", "/dev/null/folder", "/proc/folder"])
def test_folder_that_cannot_be_written_is_no_error(where, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / where))
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) is None and cache.entries() == []


def test_folder_that_can_only_be_read_is_read(folder, monkeypatch):
    """A read-only file system is simulated, as root may run the test and may write everywhere else."""
    cache.store(KEY, ENTRY)
    open_ = os.open

    def read_only(path, flags, *args, **options):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return open_(path, flags, *args, **options)

    def no_times(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", no_times)
    cache.store(OTHER_KEY, ENTRY)
    assert cache.load(KEY) == ENTRY and cache.load(OTHER_KEY) is None


@pytest.mark.parametrize("call", ["replace", "write"])
def test_full_disk_leaves_nothing_behind(call, folder, monkeypatch):
    folder.mkdir(0o700, parents=True)
    if call == "replace":

        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        cache.store(KEY, ENTRY)
    else:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))  # bytes of a file
        try:
            cache.store(KEY, ENTRY)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(folder.iterdir()) == []


def _write_and_read(folder, seed):
    os.environ[cache.VARIABLE] = folder
    for i in range(100):
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
    monkeypatch.setattr(cache, "LIMIT", 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_, **__: None)  # the process ends here
        cache.store(OTHER_KEY, ENTRY)
    (left,) = folder.iterdir()
    os.utime(left, (0, 0))
    for key in "cdef":
        cache.store(key * 64, ENTRY)
    assert not left.exists() and cache.load("f" * 64) == ENTRY


def test_what_cannot_be_removed_keeps_no_entry_out(folder, monkeypatch):
    monkeypatch.setattr(cache, "LIMIT", 3)
    (folder / "folder.jln").mkdir(parents=True)
    folder.chmod(0o700)
    os.utime(folder / "folder.jln", (0, 0))
    for key in "cdef":
        cache.store(key * 64, ENTRY)
    assert cache.load("f" * 64) == ENTRY


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


def test_nobody_else_may_do_anything_with_what_is_made(folder):
    before = os.umask(0)
    try:
        cache.store(KEY, ENTRY)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / f"{KEY}.jln")] == [0o700, 0o600]


def test_root_makes_no_folder_in_a_users_home(monkeypatch, tmp_path):
    """Keep out of a HOME that sudo has left the user's."""
    if os.geteuid() == 0:
        os.chown(tmp_path, SOMEBODY, SOMEBODY)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / ".cache" / "jln"))
    cache.store(KEY, ENTRY)
    assert list(tmp_path.iterdir()) == [] and cache.load(KEY) is None


def test_entry_of_another_user_is_not_taken_but_replaced(folder, belongs):
    cache.store(KEY, ENTRY)
    belongs(folder / f"{KEY}.jln", SOMEBODY)
    assert cache.load(KEY) is None
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


@pytest.mark.parametrize("rights", [0o620, 0o602])
def test_entry_that_others_may_write_is_not_taken_but_replaced(rights, folder):
    cache.store(KEY, ENTRY)
    (folder / f"{KEY}.jln").chmod(rights)
    assert cache.load(KEY) is None
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


def test_entry_of_root_is_taken(folder, belongs, monkeypatch):
    cache.store(KEY, ENTRY)
    belongs(folder / f"{KEY}.jln", 0)
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert cache.load(KEY) == ENTRY


def test_several_users_share_a_folder(folder, belongs):
    """Each takes the entries that are its own, and leaves the others in their places."""
    folder.mkdir(parents=True)
    folder.chmod(0o1777)
    cache.store(KEY, ENTRY)
    cache.store(OTHER_KEY, ENTRY)
    belongs(folder / f"{OTHER_KEY}.jln", SOMEBODY)
    assert cache.load(KEY) == ENTRY and cache.load(OTHER_KEY) is None
