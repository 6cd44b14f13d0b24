"""Print what executing the kernels came to: errors, and of large arrays sectors, widths of loads, instructions.

python tests/executed/table.py                # all cases of tests/executed, two minutes
python tests/executed/table.py 768 of_heads   # those whose name has one of these words
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE),
    *(str(HERE.parent / folder) for folder in ("operators", "transformations", "checker", "")),
    *(str(HERE.parents[1] / folder) for folder in ("benchmarks", "")),
]
import conftest  # noqa: E402, F401  # it chooses the environment, before JAX loads
import test_linears  # noqa: E402
import test_norms  # noqa: E402
import test_traffic  # noqa: E402

import traffic  # noqa: E402
from cases import execute  # noqa: E402

LARGE = [*test_traffic.WIDTHS, *test_traffic.HEADS]
CASES = [*LARGE, *test_norms.CASES, *test_linears.FUSED, *test_linears.COMPOSED, *test_linears.SOME]


def rows(case):
    """A row for each call. Instructions are counted where there are many rows."""
    ran = execute(case)
    issued = test_traffic.issue_shares(case, ran.program) if case in LARGE else {}
    for found in traffic.of(ran.program, case.large):
        widths = " ".join(f"{w}:{n / sum(found.widths.values()):.0%}" for w, n in sorted(found.widths.items()))
        issue = f"{issued[found.kernel]:.2f}" if found.kernel in issued else ""
        yield str(case), found.kernel, f"{max(ran.shares.values()):.2f}", f"{found.sectors:.2f}", widths, issue


if __name__ == "__main__":
    words = sys.argv[1:]
    print("case | kernel | error / allowed | sectors | loads, by bytes | issue: 1 is all that the schedulers can")
    for case in CASES:
        if not words or any(word in str(case) for word in words):
            for row in rows(case):
                print(" | ".join(row), flush=True)
