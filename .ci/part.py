"""A pytest plugin: `--every N` runs of each test the first case and every N-th after it, of those not deselected.

For what another run of CI has whole, on another version.
"""

import collections

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1, metavar="N", help="of each test, every N-th case")


@pytest.hookimpl(trylast=True)  # when marks have been looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    kept = {item for cases in tests.values() for item in cases[:: config.getoption("--every")]}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
