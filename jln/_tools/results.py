"""Records of a benchmark: read again, compared with jln's, and summed up."""

from __future__ import annotations

import json
import pathlib
from statistics import geometric_mean
from typing import Any

from jln._tools.peers import PEERS
from jln._tools.workloads import ALL, BLOCKS


def add_ceiling(record: dict[str, Any], ceilings: dict[str, float]) -> dict[str, Any]:
    """The record with the part of the machine's ceiling that it reached: the least possible time over the time taken.

    The least time is that for the bytes or for the arithmetic, whichever is longer.
    """
    if "median" not in record:
        return record
    least = max(record["bytes_once"] / ceilings["bytes_per_s"], record["product_flops"] / ceilings["flop_per_s"])
    return record | {"of_ceiling": least / record["median"]}


def load(path: pathlib.Path) -> dict[str, Any]:
    """The results in a file that `save` has written. Raises ValueError for any other file."""
    document = json.loads(path.read_text())
    if not isinstance(document, dict) or not {"environment", "ceilings", "records"} <= document.keys():
        raise ValueError("it is not what this command writes")
    return document


def relative(records: list[dict[str, Any]], statistic: str = "median") -> dict[tuple[str, str], dict[str, float]]:
    """The time of each peer over jln's, by (workload, direction), where both were timed."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        if "median" in record:
            times.setdefault((record["workload"], record["direction"]), {})[record["peer"]] = record[statistic]
    return {
        key: {peer: taken / by["jln"] for peer, taken in by.items() if peer != "jln"}
        for key, by in times.items()
        if "jln" in by
    }


def summary(records: list[dict[str, Any]]) -> list[str]:
    """A summary in lines: the norms beside the fastest JAX peer, peers that are faster than jln, and wrong numbers."""
    lines = []
    ratios = relative(records)
    norms = {k: v for k, v in ratios.items() if k[0] in ALL and not ALL[k[0]].is_linear and k[0] not in BLOCKS}
    for direction in ("forward", "backward", "both", "gradient"):
        fastest = [
            min(ratio for peer, ratio in by.items() if PEERS[peer].framework == "jax")
            for (_, d), by in norms.items()
            if d == direction and any(PEERS[peer].framework == "jax" for peer in by)
        ]
        if fastest:
            lines.append(
                f"{direction}: the fastest JAX peer takes {geometric_mean(fastest):.2f} times as long as jln "
                f"(geometric mean of {len(fastest)} norm workloads)"
            )
    behind = [
        f"{workload} {direction}: {peer} takes {ratio:.2f} of jln's time"
        for (workload, direction), by in ratios.items()
        for peer, ratio in by.items()
        if ratio < 1 / 1.03
    ]
    lines += [f"slower than a peer by more than 3 %: {line}" for line in behind]
    wrong = {(r["workload"], r["peer"]): r["reason"] for r in records if r["status"] in ("wrong", "failed")}
    lines += [f"WRONG: {peer} in {workload}: {reason}" for (workload, peer), reason in sorted(wrong.items())]
    return lines


def ours_is_wrong(records: list[dict[str, Any]]) -> bool:
    return any(r["peer"] == "jln" and r["status"] in ("wrong", "failed") for r in records)
