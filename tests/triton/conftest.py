"""Fixtures of compilers."""

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
