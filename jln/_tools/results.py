"""Results of a benchmark with the machine and the versions that they are from: as JSON, and as a summary."""

from __future__ import annotations

import datetime
import json
import math
import os
import pathlib
import platform
import subprocess
from typing import Any

import jln
from jln._tools.blocks import BLOCKS
from jln._tools.parts import version
from jln._tools.peers import PEERS
from jln._tools.workloads import CPU_WORKLOADS, WORKLOADS, Workload
from jln._triton import tuning
from jln._triton.target import target_chip

ALL: dict[str, Workload] = {**WORKLOADS, **BLOCKS, **CPU_WORKLOADS}
VERSIONED = ("jaxlib", "jax-triton", "triton", "numpy")


def environment(device: Any) -> dict[str, Any]:
    versions = {p.distribution: version(p.distribution) for p in PEERS.values()} | {"jln": jln.__version__}
    versions |= {name: version(name) for name in VERSIONED} | {"python": platform.python_version()}
    kind = device.device_kind
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # A copy of the files, without a repository, has no commit: then the caller must name it.
        "commit": os.environ.get("JLN_COMMIT")
        or _printed("git", "-C", str(pathlib.Path(jln.__file__).parent), "describe", "--always", "--dirty"),
        "platform": device.platform,
        "chip": kind if kind != device.platform else _processor(),
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        or _printed("cat", "/sys/module/amdgpu/version"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": versions,
        "tuning": tuning.in_force(chip) if device.platform == "gpu" and (chip := target_chip()) else None,
    }


def _printed(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def add_ceiling(record: dict[str, Any], ceilings: dict[str, float] | None) -> dict[str, Any]:
    """The record with the part of the machine's ceiling that it reached: the least possible time over the time taken.

    The least time is that for the bytes or for the arithmetic, whichever is longer.
    """
    if "median" not in record or ceilings is None:
        return record
    least = max(record["bytes_once"] / ceilings["bytes_per_s"], record["product_flops"] / ceilings["flop_per_s"])
    return record | {"of_ceiling": least / record["median"]}


def save(results: dict[str, Any], path: pathlib.Path) -> None:
    """Write the results at once or not at all, so that an interrupted run leaves the file of before.

    Raises OSError where the file cannot be written, and ValueError for a NaN.
    """
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.part")  # of this process: another may write the same file
    try:
        scratch.write_text(text)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


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


def geometric_mean(numbers: list[float]) -> float:
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


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
