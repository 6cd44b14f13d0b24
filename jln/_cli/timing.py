"""How long a jitted call takes, the dispatch of one hidden behind the run of another."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

BATCHES = 7
BATCH_SECONDS = 0.1


def seconds(run: Callable[[], Any]) -> float:
    """Of one call: the best of several batches of calls, each waited for once. The caches are as the last call left
    them.
    """
    jax.block_until_ready(run())  # compiles
    start = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(1, round(BATCH_SECONDS / (time.perf_counter() - start)))

    def batch() -> float:
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)][-1])
        return (time.perf_counter() - start) / calls

    return min(batch() for _ in range(BATCHES))
