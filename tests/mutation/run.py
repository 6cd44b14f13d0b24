"""Break the code in every way of `mutants.py`, in a copy, and see the tests fail.

    python tests/mutation/run.py            # all
    python tests/mutation/run.py c2 dbias   # those whose description has one of these words

Exits with 1 if a mutant survives or its tests fail without it. Before anything is run it also does so if of any mutant,
chosen or not, the description is another's too, the text is not in its file exactly once, or a test is not there.
"""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable

from mutants import MUTANTS
from targets import EXECUTED, PROGRAM, Mutant

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIMEOUT = 300  # a mutant may loop forever, which is noticed too


def copied() -> pathlib.Path:
    """The files under version control, and those not yet, in a temporary folder."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    tree = pathlib.Path(tempfile.mkdtemp(prefix="jln-mutants-"))
    for name in names:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


def processes(ids: Iterable[str]) -> list[list[str]]:
    """The arguments of pytest, a list for each process.

    The tests that execute compiled kernels, and those of compiled programs, have processes of their own: in the others'
    Triton interprets.
    """
    alone = {folder: [test for test in ids if test.startswith(folder)] for folder in (EXECUTED, PROGRAM)}
    others = [test for test in ids if not test.startswith(tuple(alone))]
    return [others] * bool(others) + [[f"--confcutdir={folder}", *own] for folder, own in alone.items() if own]


def tests(tree: pathlib.Path, ids: Iterable[str], timeout: int | None = None) -> tuple[int | None, str]:
    """Run tests, and return pytest's exit status (None when it took longer than timeout seconds) and its output."""
    status, output = 0, ""
    for arguments in processes(ids):
        if status == 0:
            status, output = pytest(tree, arguments, timeout)
    return status, output


def pytest(tree: pathlib.Path, arguments: list[str], timeout: int | None = None) -> tuple[int | None, str]:
    options = ["-x", "-q", "-n0", "-m", "", "--tb=line", "-p", "no:cacheprovider"]  # -m: heavy ones too, if listed
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, ""
    return ran.returncode, ran.stdout + ran.stderr[-2000:]


def stale() -> bool:
    """Print the mutants that are none any more. Returns whether there are any."""
    wrong = [f"two mutants are described as {what!r}" for what, n in Counter(m.what for m in MUTANTS).items() if n > 1]
    for m in MUTANTS:
        if (count := (ROOT / m.file).read_text().count(m.old)) != 1:
            wrong.append(f"the text of {m.what!r} is in {m.file} {count} times: {m.old!r}")
    there = set()
    for arguments in processes({test.partition("::")[0] for m in MUTANTS for test in m.tests}):
        status, output = pytest(ROOT, ["--collect-only", *arguments])
        lines = output.splitlines()
        there.update(lines, (line.partition("[")[0] for line in lines))  # of a function all, too
        if status != 0:
            wrong.append(f"tests cannot be collected\n{output[-2000:]}")
    wrong += [
        f"{m.what!r} needs a test that is not there: {test}" for m in MUTANTS for test in m.tests if test not in there
    ]
    for line in wrong:
        print(f"ERROR: {line}")
    return bool(wrong)


def verdict(tree: pathlib.Path, mutant: Mutant) -> str:
    """The verdict on a mutant: "killed", or what is amiss."""
    path = tree / mutant.file
    text = path.read_text()
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        status, output = tests(tree, mutant.tests, TIMEOUT)
    finally:
        path.write_text(text)
    if status is None:
        return "killed (by the clock)"
    if status == 0:
        return "SURVIVED"
    return "killed" if status == 1 else f"ERROR: pytest exits with {status}\n{output[-4000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only the mutants whose description has one of these")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    arguments = parser.parse_args()
    if stale():
        return 1
    chosen = [m for m in MUTANTS if not arguments.words or any(word in m.what for word in arguments.words)]
    if not chosen:
        print("no mutant is described so", file=sys.stderr)
        return 2

    trees: queue.Queue[pathlib.Path] = queue.Queue()
    for _ in range(arguments.jobs):
        trees.put(copied())

    def judged(mutant: Mutant) -> tuple[str, float]:
        tree, start = trees.get(), time.monotonic()
        try:
            return verdict(tree, mutant), time.monotonic() - start
        finally:
            trees.put(tree)

    try:
        tree = trees.get()
        status, output = tests(tree, sorted({test for mutant in chosen for test in mutant.tests}))
        trees.put(tree)
        if status != 0:
            print(f"the tests fail without a mutant\n{output[-4000:]}")
            return 1
        bad = by_clock = 0
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for mutant, (found, seconds) in zip(chosen, pool.map(judged, chosen), strict=True):
                bad += not found.startswith("killed")
                by_clock += "clock" in found
                file = mutant.file.removeprefix("jln/")
                print(f"{file:38} {mutant.what:52} {seconds:4.0f} s  {found}", flush=True)
    finally:
        while not trees.empty():
            shutil.rmtree(trees.get())
    print(f"{len(chosen) - bad} of {len(chosen)} mutants killed, {by_clock} of them by the clock")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
