"""A plugin of pytest for runs that go on: the tests that the file `$PASSED` names are left out."""

import os
import pathlib


def pytest_collection_modifyitems(config, items):
    """Deselect what passed in an earlier run."""
    path = pathlib.Path(os.environ["PASSED"])
    passed = set(path.read_text().splitlines()) if path.exists() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]
