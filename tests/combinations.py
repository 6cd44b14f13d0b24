"""A pytest plugin: of a test with many parameters, run by default as few combinations as have every pair of values.

Few bugs take more than two parameters to show (Kuhn, Wallace and Gallo, "Software fault interactions and implications
for software testing", 2004). The other combinations get the mark `combination`, which the default run deselects:
`pytest -m 'not heavy'` runs all of them, and a test that is named with its parameters always runs.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence

import pytest


def covering(combinations: Sequence[Mapping[str, str]]) -> set[int]:
    """The places of a few of the combinations that have every pair of values of two parameters which occurs in any.

    combinations: from each parameter's name to its value.

    Greedy, and the same whenever the combinations are: the first of those that bring the most new pairs.
    """
    pairs = [set(itertools.combinations(sorted(values.items()), 2)) or {*values.items()} for values in combinations]
    missing, chosen = set().union(*pairs), set()
    while missing:
        best = max(range(len(pairs)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("[" in argument for argument in config.args):
        return
    tests = collections.defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            is_heavy = item.get_closest_marker("heavy") is not None  # what is light has its own pairs
            tests[item.parent, item.originalname, is_heavy].append(item)
    for same in tests.values():
        kept = covering([{name: repr(value) for name, value in i.callspec.params.items()} for i in same])
        for i, item in enumerate(same):
            if i not in kept:
                item.add_marker("combination")
