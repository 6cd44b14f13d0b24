"""Tests of whose the files of compiled kernels may be: nobody else's but root's.

The owners of files are simulated, as root alone could give a file away.
"""

import os
import stat
import warnings

import pytest

from jln._triton import cache

ENTRY = {"name": "kernel", "shared": 0, "ptx": "code"}
KEY, OTHER_KEY = "a" * 64, "b" * 64
SOMEBODY = 54321  # the number of a user that nobody here is


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "some" / "folder"))
    return tmp_path / "some" / "folder"


@pytest.fixture
def belongs(monkeypatch):
    """Return a function that has `os.fstat` say that a file belongs to another user."""
    owners, fstat = {}, os.fstat

    def seen(descriptor):
        status = fstat(descriptor)
        user = owners.get((status.st_dev, status.st_ino), status.st_uid)
        return os.stat_result([*status[:4], user, *status[5:10]])

    def give(path, user=SOMEBODY):
        status = path.stat()
        owners[status.st_dev, status.st_ino] = user

    monkeypatch.setattr(os, "fstat", seen)
    return give


@pytest.fixture
def said():
    """The warnings of the test, of which there must be no more than it takes from here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    assert [str(w.message) for w in caught] == []


def mode(path):
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_nobody_else_may_do_anything_with_what_is_made(folder):
    before = os.umask(0)
    try:
        cache.store(KEY, ENTRY)
    finally:
        os.umask(before)
    assert (mode(folder.parent), mode(folder), mode(folder / f"{KEY}.jln")) == ("0o700", "0o700", "0o600")


def test_folder_of_another_user_is_not_used(folder, belongs, said):
    """A warning says so once, and names the folder and what to do."""
    cache.store(KEY, ENTRY)
    belongs(folder)
    for _ in range(3):
        assert cache.load(KEY) is None
        cache.store(OTHER_KEY, ENTRY)
    assert len(list(folder.iterdir())) == 1
    text = str(said.pop().message)
    assert f"{folder} belongs to user {SOMEBODY}. Name a folder of your own in JLN_CACHE_DIR" in text
    assert cache.fault() == text.partition(": ")[2].removesuffix(".")


@pytest.mark.parametrize("rights", [0o720, 0o702, 0o770, 0o1777])
def test_folder_that_others_may_write_is_not_used(rights, folder, said):
    cache.store(KEY, ENTRY)
    folder.chmod(rights)
    for _ in range(3):
        assert cache.load(KEY) is None
        cache.store(OTHER_KEY, ENTRY)
    assert len(list(folder.iterdir())) == 1
    assert f"{folder} may be written by others. Run `chmod go-w {folder}`" in str(said.pop().message)
    folder.chmod(rights & ~0o022)  # as it says
    assert cache.load(KEY) == ENTRY and cache.fault() is None


def test_entry_of_another_user_is_not_taken_but_replaced(folder, belongs, said):
    for key in (KEY, OTHER_KEY):
        cache.store(key, ENTRY)
        belongs(folder / f"{key}.jln")
    assert cache.load(KEY) is None and cache.load(OTHER_KEY) is None
    assert f"{folder / KEY}.jln belongs to user {SOMEBODY}. It is replaced" in str(said.pop().message)
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


@pytest.mark.parametrize("rights", [0o620, 0o602])
def test_entry_that_others_may_write_is_not_taken_but_replaced(rights, folder, said):
    cache.store(KEY, ENTRY)
    (folder / f"{KEY}.jln").chmod(rights)
    assert cache.load(KEY) is None
    assert f"{folder / KEY}.jln may be written by others. It is replaced" in str(said.pop().message)
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


def test_roots_folder_and_entries_are_taken(folder, belongs, monkeypatch, said):
    cache.store(KEY, ENTRY)
    for path in (folder, folder / f"{KEY}.jln"):
        belongs(path, 0)
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert cache.load(KEY) == ENTRY


def test_root_makes_no_folder_in_a_users_home(monkeypatch, tmp_path, said):
    """Root, whom sudo left the user's HOME, makes no folder there, as the user could not write to it."""
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if os.geteuid() == 0:
        os.chown(tmp_path, SOMEBODY, -1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 0)
        for _ in range(2):
            cache.store(KEY, ENTRY)
    assert f"{tmp_path} belongs to user " in str(said.pop().message) and list(tmp_path.iterdir()) == []
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "named"))  # that is asked for
    cache.store(KEY, ENTRY)
    assert len(cache.entries()) == 1
