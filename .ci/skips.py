"""A pytest plugin: a skipped test fails the run, unless it lacks a package that is large and named below.

`.ci/run` loads it into every run. Where all is installed, `--those-that-may-skip` runs these tests and no others.
"""

import importlib.util
import re

import pytest

# The test, and the package without which it may be skipped.
EXPECTED = {
    r"tests/tools/test_bench\.py::test_pytorch_.*": "torch",
    r"tests/tools/test_bench\.py::test_a_run_that_ends_early_.*": "matplotlib",
    r"tests/tools/test_card\.py(::.*)?": "matplotlib",
    r"tests/tools/test_doctor\.py::test_doctor_says_what_runs_on_a_gpu_and_why": "jax_triton",
}


def is_expected(test: str) -> bool:
    return any(
        re.fullmatch(pattern, test) and importlib.util.find_spec(package) is None
        for pattern, package in EXPECTED.items()
    )


class Skips:
    def __init__(self) -> None:
        self.unexpected: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not is_expected(report.nodeid):  # so is an xfail
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.unexpected[report.nodeid] = str(why)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, why in self.unexpected.items():
            terminalreporter.write_line(f"skipped, and not expected to be by .ci/skips.py: {test}: {why}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--those-that-may-skip", action="store_true", help="only the tests named in .ci/skips.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--those-that-may-skip"):
        items[:] = [item for item in items if any(re.fullmatch(pattern, item.nodeid) for pattern in EXPECTED)]


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker of xdist: its reports come here, too
        config.pluginmanager.register(Skips())
