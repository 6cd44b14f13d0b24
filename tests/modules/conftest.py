import pytest


@pytest.fixture(autouse=True)
def fast(compile_fast):
    """All of them are such tests."""
