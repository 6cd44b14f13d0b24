"""Draw calls of the operators at random, and judge each by the truth.

    python tests/fuzz/run.py --seconds 120              # new ones each time
    python tests/fuzz/run.py --cases 20000 --processes 2
    python tests/fuzz/run.py --seed 5106                # the one case of a seed, in words

Exits with 1 if a case was wrong, after the seeds that run it again. With implementation="triton" Triton's interpreter
runs the kernels, wherever this is run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import pathlib
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator

TESTS = pathlib.Path(__file__).resolve().parents[1]
CHUNK = 250  # cases that a process runs, before what JAX keeps of them grows too large


def settings(seed: int) -> dict[str, str]:
    """The environment of the case of a seed.

    As in `tests/conftest.py` XLA compiles without LLVM's optimisations; of each sixteenth process as users have it.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if (seed // CHUNK) % 16 != 3:
        flags += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        if importlib.metadata.version("jaxlib").startswith("0.10."):
            flags += " --xla_cpu_use_fusion_emitters=false"
    return {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def judged(seed: int, say=None) -> dict:
    """Run and judge the case of a seed. say: called with the case in words before it runs."""
    root = TESTS.parent
    sys.path[:0] = [p for p in (str(root), str(root / "benchmarks"), str(TESTS)) if p not in sys.path]
    from called import answered
    from drawn import draw
    from judged import judge

    case = draw(seed)
    if say is not None:
        say(case.in_words())
    try:
        share, wrong = judge(*answered(case))
    except Exception:
        share, wrong = 0.0, ["it raised", *traceback.format_exc(limit=-3).strip().splitlines()[-12:]]
    return {"seed": seed, "share": share, "wrong": wrong, "words": case.in_words()}


def in_a_process(first: int, last: int, until: float) -> Iterator[dict]:
    """Yield what `judged` tells of some seeds of one chunk, by a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, f"--first={first}", f"--last={last}", f"--until={until}"]
    environment, seed = os.environ | settings(first), first
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
                seed += 1
        error = process.stderr.read()
    if process.returncode:
        wrong = [f"its process ended with {process.returncode}", *error.strip().splitlines()[-12:]]
        yield {"seed": seed, "share": 0.0, "wrong": wrong, "words": f"seed {seed}"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="so many cases")
    parser.add_argument("--seconds", type=float, help="cases for so many seconds")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, help="the case of this seed alone")
    parser.add_argument("--first", type=int, help="the first case's seed; random by default")
    parser.add_argument("--last", type=int, help=argparse.SUPPRESS)  # the next two are for this script's own processes
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()

    if given.seed is not None:
        os.environ.update(settings(given.seed))
        found = judged(given.seed, say=print)
        print(*found["wrong"] or [f"right, the largest error {found['share']:.3g} of what is allowed"], sep="\n")
        return bool(found["wrong"])
    if given.last is not None:
        for seed in range(given.first, given.last):
            if time.time() < given.until:
                print(json.dumps(judged(seed)), flush=True)
        return 0

    begin = time.time()
    first = given.first if given.first is not None else random.SystemRandom().randrange(10**9) // CHUNK * CHUNK
    until = begin + given.seconds if given.seconds else 2 * begin
    count = given.cases or (10**6 if given.seconds else 500)
    print(f"cases from seed {first} on", flush=True)
    starts = [n for n in range(first, first + count) if n == first or n % CHUNK == 0]
    shares, wrong = [], []

    def run(start):
        if time.time() >= until:
            return
        for found in in_a_process(start, min(start // CHUNK * CHUNK + CHUNK, first + count), until):
            shares.append(0.0 if found["wrong"] else found["share"])
            if found["wrong"]:
                print(found["words"], *(f"    {line}" for line in found["wrong"]), sep="\n")
                print(f"  again: python tests/fuzz/run.py --seed {found['seed']}\n", flush=True)
                wrong.append(found["seed"])

    with concurrent.futures.ThreadPoolExecutor(given.processes) as pool:
        list(pool.map(run, starts))
    largest = max(shares, default=0.0)
    print(f"{len(shares)} cases in {time.time() - begin:.0f} s, the largest error {largest:.3g} of what is allowed")
    print(f"{len(wrong)} wrong: {sorted(wrong)}" if wrong else "all right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
