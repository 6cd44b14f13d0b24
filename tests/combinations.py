"""A pytest plugin: of a test with many parameters, run by default as few combinations as have every pair of values.

Few bugs take more than two parameters to show (Kuhn, Wallace and Gallo, "Software fault interactions and implications
for software testing", 2004). In a pair, operators of one family stand for each other, as they share their rules and
kernels; each is in a combination all the same. The other combinations get the mark `combination`, which the default
run deselects: `pytest -m 'not heavy'` runs all of them, and a test that is named with its parameters always runs.
"""

from __future__ import annotations

import collections
import heapq
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from catalogue import OPERATORS

FAMILIES = {
    name: "linears" if operator.is_linear else "both sides" if operator.both_sides else "norms"
    for name, operator in OPERATORS.items()
}


def kind(value: Any) -> str:
    """The family of the operator that the value names or begins with; any other value by itself."""
    of = [name for name in FAMILIES if isinstance(value, str) and value.startswith(name)]
    return FAMILIES[max(of, key=len)] if of else repr(value)


def covering(combinations: Sequence[Mapping[str, Any]]) -> set[int]:
    """The places of a few of the combinations that have every value, and every pair of kinds that occurs in any.

    combinations: from each parameter's name to its value.

    Greedy, and the same whenever the combinations are: the first of those that bring the most that is new.
    """
    brought = []
    for values in combinations:
        kinds = sorted((name, kind(value)) for name, value in values.items())
        alone = {(name, repr(value)) for name, value in values.items()} - ({*kinds} if len(kinds) > 1 else set())
        brought.append(alone.union(itertools.combinations(kinds, 2)))
    missing, chosen = set().union(*brought), set()
    queue = [(-len(of), i) for i, of in enumerate(brought)]  # by what each brought when it was last looked at: no less
    heapq.heapify(queue)
    while missing:
        expected, best = queue[0]
        new = len(brought[best] & missing)
        if new == -expected:
            heapq.heappop(queue)
            chosen.add(best)
            missing -= brought[best]
        else:
            heapq.heapreplace(queue, (-new, best))
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
        kept = covering([item.callspec.params for item in same])
        for i, item in enumerate(same):
            if i not in kept:
                item.add_marker("combination")
