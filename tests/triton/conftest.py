"""Fixtures of compilers and of tuned tiles."""

import pytest


@pytest.fixture(scope="module")
def worker():
    """A process that compiles, whatever this one does."""
    from jln._triton import compiler

    with compiler.workers(1) as pool:
        yield pool


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """The package's folder of tuned tiles, empty."""
    from jln._triton import tuning

    monkeypatch.setattr(tuning, "PACKAGED", tmp_path / "tuned")
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    (tmp_path / "tuned").mkdir()
    return tmp_path / "tuned"


@pytest.fixture
def tuning_file(packaged, tmp_path, monkeypatch):
    """A user's file of tuned tiles, in force and not there yet."""
    from jln._triton import tuning

    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "mine.json"))
    return tmp_path / "mine.json"
