"""A pytest plugin that bounds what a process of the tests holds, and prints the most that each held.

JAX keeps each program that it compiled: the tests would hold many GB. On systems without /proc it does nothing.
"""

from __future__ import annotations

import ctypes
import gc
import pathlib
import re

import jax
import pytest

ENOUGH = 950  # MB at which a process forgets its programs; what it imports takes 600 of them
MORE = 150  # MB that it may hold beyond what it could not give back before it does so again
STATUS = pathlib.Path("/proc/self/status")
held = {}  # by process, the most MB
left = 0  # what this process held after it last forgot its programs


def megabytes(field: str) -> int:
    """The memory of this process: `VmRSS` is held now, `VmHWM` was the most."""
    found = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) // 1000 if found else 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    global left
    if megabytes("VmRSS") > max(ENOUGH, left + MORE):
        jax.clear_caches()
        gc.collect()
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's, which else keeps what was freed
            trim(0)
        left = megabytes("VmRSS")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--most-memory", type=int, metavar="MB", help="fail if the processes held more than that together")


def pytest_testnodedown(node) -> None:
    held[node.gateway.id] = getattr(node, "workeroutput", {}).get("megabytes", 0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workeroutput"):  # a process of pytest-xdist
        config.workeroutput["megabytes"] = megabytes("VmHWM")
        return
    if not held:
        held["the process"] = megabytes("VmHWM")
    most = config.getoption("--most-memory")
    is_over = sum(held.values()) > most or 0 in held.values() if most else False  # 0 is of a process that did not tell
    if is_over and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    parts = ", ".join(f"{name} {most} MB" for name, most in sorted(held.items()))
    bound = f", of {most} MB that --most-memory allows" if (most := config.getoption("--most-memory")) else ""
    terminalreporter.write_line(f"The most memory held: {parts}, together {sum(held.values())} MB{bound}")
