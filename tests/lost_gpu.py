"""A hook of pytest for a test whose kernel has broken its process' GPU context.

Every later program of that process would fail, and dozens of tests with it. So the process ends: pytest-xdist says that
it crashed in this test, which is true, and begins another.
"""

import os

import pytest

ERRORS = ("illegal", "misaligned", "launch failed", "launch_failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    said = str(call.excinfo.value).lower() if call.excinfo is not None else ""
    lost = "cuda" in said and any(word in said for word in ERRORS)
    if lost and hasattr(item.config, "workerinput"):  # without xdist nothing would begin another process
        os.write(2, f"\n{item.nodeid} broke its GPU's context, and its process ends:\n{report.longreprtext}\n".encode())
        os._exit(70)
    return report
