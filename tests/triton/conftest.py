"""Fixtures of compilers and of measured tiles."""

import pytest


@pytest.fixture(scope="session")
def worker():
    """A process that compiles, whatever this one does."""
    import compiler

    with compiler.workers(1) as pool:
        yield pool


@pytest.fixture
def compile_all(worker):
    """Return a function that compiles the launches of cases."""
    from launches import compiled

    return lambda cases: worker.submit(compiled, list(cases)).result()


@pytest.fixture
def tuning_file(tmp_path, monkeypatch):
    """A file of measured tiles, in force and not there yet."""
    from jln._triton import tuning

    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "mine.json"))
    return tmp_path / "mine.json"
