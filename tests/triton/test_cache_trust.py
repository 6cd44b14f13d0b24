"""Tests of whose the files of compiled kernels may be: nobody else's, but root's and a group's that was named.

The owners of files are simulated, as root alone could give a file away.
"""

import grp
import os
import stat
import warnings

import pytest

from jln._triton import cache

ENTRY = {"name": "kernel", "shared": 0, "ptx": "code"}
KEY, OTHER_KEY = "a" * 64, "b" * 64
SOMEBODY = 54321  # the number of a user and of a group that nobody here is
# A group that this user may share with: for root any, for others one of their own.
MINE = SOMEBODY if os.geteuid() == 0 else [os.getegid(), *os.getgroups()][-1]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "some" / "folder"))
    monkeypatch.delenv(cache.GROUP_VARIABLE, raising=False)
    return tmp_path / "some" / "folder"


@pytest.fixture
def shared(folder, monkeypatch):
    """A folder that a group shares."""
    monkeypatch.setenv(cache.GROUP_VARIABLE, str(MINE))
    return folder


@pytest.fixture
def belongs(monkeypatch):
    """Return a function that has `os.fstat` say that a file belongs to another user."""
    owners, fstat = {}, os.fstat

    def seen(descriptor):
        status = fstat(descriptor)
        user, group = owners.get((status.st_dev, status.st_ino), (status.st_uid, status.st_gid))
        return os.stat_result([*status[:4], user, group, *status[6:10]])

    def give(path, user=SOMEBODY, group=SOMEBODY):
        status = path.stat()
        owners[status.st_dev, status.st_ino] = user, group

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
    assert f"{folder} belongs to user {SOMEBODY}. Name a folder of your own in JLN_CACHE_DIR, or name in " in text
    assert cache.fault() == text.partition(": ")[2].removesuffix(".")


@pytest.mark.parametrize("rights", [0o720, 0o702, 0o770, 0o1777])
def test_folder_that_others_may_write_is_not_used(rights, folder, said):
    cache.store(KEY, ENTRY)
    folder.chmod(rights)
    for _ in range(3):
        assert cache.load(KEY) is None
        cache.store(OTHER_KEY, ENTRY)
    assert len(list(folder.iterdir())) == 1
    assert f"{folder} may be written by others. Run `chmod go-w {folder}`, or name in " in str(said.pop().message)
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
        belongs(path, 0, 0)
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


# A folder that a group shares.


@pytest.mark.parametrize("mask", [0o077, 0o000])
def test_group_may_read_and_add_what_is_made(mask, shared, said):
    before = os.umask(mask)
    try:
        cache.store(KEY, ENTRY)
    finally:
        os.umask(before)
    (path,) = cache.entries()
    assert (mode(shared.parent), mode(shared), mode(path)) == ("0o2750", "0o2770", "0o640")
    assert shared.parent.stat().st_gid == shared.stat().st_gid == path.stat().st_gid == MINE
    assert cache.load(KEY) == ENTRY


def test_group_is_found_by_its_name(shared, monkeypatch, said):
    monkeypatch.setenv(cache.GROUP_VARIABLE, "lab")
    monkeypatch.setattr(grp, "getgrnam", lambda name: grp.struct_group([name, "x", MINE, []]))
    cache.store(KEY, ENTRY)
    assert shared.stat().st_gid == MINE and cache.load(KEY) == ENTRY


def test_folder_and_entries_of_other_members_are_taken(shared, belongs, said):
    cache.store(KEY, ENTRY)
    belongs(shared, SOMEBODY + 1, MINE)
    belongs(shared / f"{KEY}.jln", SOMEBODY + 2, MINE)
    cache.store(OTHER_KEY, ENTRY)
    assert cache.load(KEY) == ENTRY and cache.load(OTHER_KEY) == ENTRY


def test_without_the_variable_a_shared_folder_is_not_used(shared, belongs, monkeypatch, said):
    cache.store(KEY, ENTRY)
    monkeypatch.delenv(cache.GROUP_VARIABLE)
    assert cache.load(KEY) is None
    assert f"chmod go-w {shared}`, or name in JLN_CACHE_GROUP the group" in str(said.pop().message)


def test_entry_of_no_member_is_not_taken_but_replaced(shared, belongs, said):
    cache.store(KEY, ENTRY)
    belongs(shared / f"{KEY}.jln", SOMEBODY + 1, SOMEBODY + 1)
    assert cache.load(KEY) is None and "It is replaced" in str(said.pop().message)
    cache.store(KEY, ENTRY)
    assert cache.load(KEY) == ENTRY


def test_shared_folder_that_all_may_write_is_not_used(shared, said):
    cache.store(KEY, ENTRY)
    shared.chmod(0o2777)
    assert cache.load(KEY) is None
    assert f"Run `chmod o-w {shared}`." in str(said.pop().message)


def test_folder_of_another_group_is_not_used(shared, belongs, said):
    cache.store(KEY, ENTRY)
    belongs(shared, os.geteuid(), SOMEBODY + 1)
    assert cache.load(KEY) is None
    text = str(said.pop().message)
    assert f"{shared} of user {os.geteuid()} is not of the group that JLN_CACHE_GROUP names. Its owner can run " in text
    assert f" run `chgrp {MINE} {shared} && chmod 2770 {shared}`." in text


@pytest.mark.parametrize("named", ["no group of this name", "-1", str(2**32 - 1), "9" * 5000])
def test_group_that_is_not_there_is_said(named, shared, monkeypatch, said):
    monkeypatch.setenv(cache.GROUP_VARIABLE, named)
    for _ in range(2):
        cache.store(KEY, ENTRY)
        assert cache.load(KEY) is None
    assert "and there is no such group" in str(said.pop().message) and not shared.exists()


def test_group_of_others_is_said(shared, monkeypatch, said):
    monkeypatch.setenv(cache.GROUP_VARIABLE, str(SOMEBODY + 1))
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    cache.store(KEY, ENTRY)
    assert "a group that you are not in" in str(said.pop().message) and not shared.exists()
