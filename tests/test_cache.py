"""Tests of the files of compiled kernels: where they are, and that a file with anything wrong does no harm.

What the files' names depend on is tested in tests/program/test_launch.py.
"""

import concurrent.futures
import multiprocessing
import os
import pathlib
import zlib

import pytest

from jln._triton import cache

ENTRY = {"name": "kernel", "shared": 0, "ptx": "code" * 1000, "ttir": "é"}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "some" / "folder"))
    return tmp_path / "some" / "folder"


def test_what_was_stored_is_loaded(folder):
    assert cache.load("a" * 64) is None and not folder.exists()  # nothing is made by asking
    cache.store("a" * 64, ENTRY)
    assert cache.load("a" * 64) == ENTRY and cache.load("b" * 64) is None
    assert [path.parent for path in cache.entries()] == [folder] and len(list(folder.iterdir())) == 1


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


def test_set_to_nothing_it_is_off(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(cache.VARIABLE, "")
    cache.store("a" * 64, ENTRY)
    assert cache.folder() is None and cache.load("a" * 64) is None and cache.entries() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-1], lambda b: b[:9], lambda b: b[:30] + b"?" + b[31:]])
def test_damaged_entry_is_as_none_and_written_again(damage, folder):
    cache.store("a" * 64, ENTRY)
    (path,) = cache.entries()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load("a" * 64) is None
    cache.store("a" * 64, ENTRY)
    assert cache.load("a" * 64) == ENTRY


@pytest.mark.parametrize("entry", [[1, 2], 3, None, "kernel"])
def test_what_is_no_entry_is_as_none(entry, folder):
    cache.store("a" * 64, entry)
    assert len(cache.entries()) == 1 and cache.load("a" * 64) is None


@pytest.mark.parametrize("text", [b"[" * 100_000, b" " * 2**25])
def test_what_would_take_all_memory_or_all_of_the_stack_is_as_none(text, folder):
    cache.store("a" * 64, ENTRY)
    (path,) = cache.entries()
    path.write_bytes(zlib.compress(text))
    assert cache.load("a" * 64) is None


def test_a_pipe_is_not_waited_for(folder):
    cache.store("a" * 64, ENTRY)
    (path,) = cache.entries()
    path.unlink()
    os.mkfifo(path)
    assert cache.load("a" * 64) is None


@pytest.mark.parametrize("where", ["file", "file/folder", "/dev/null/folder", "/proc/folder"])
def test_folder_that_cannot_be_written_is_no_error(where, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / where))
    cache.store("a" * 64, ENTRY)
    assert cache.load("a" * 64) is None and cache.entries() == []


def test_full_disk_leaves_nothing_behind(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.store("a" * 64, ENTRY)
    assert list(folder.iterdir()) == []


def _write_and_read(folder, seed):
    os.environ[cache.VARIABLE] = folder
    for i in range(100):
        cache.store("a" * 64, ENTRY | {"shared": seed, "ptx": str(seed) * 100_000})
        read = cache.load("a" * 64)
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
