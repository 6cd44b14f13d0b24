"""Print what executing the kernels came to: errors, sectors, widths of loads, instructions, seconds.

python tests/executed/table.py                # what tests/executed holds to limits, a few minutes
python tests/executed/table.py 768 of_heads   # of all cases those whose name has one of these words
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE),
    *(str(HERE.parent / folder) for folder in ("operators", "transformations", "")),
    *(str(HERE.parents[1] / folder) for folder in ("benchmarks", "")),
]
import conftest  # noqa: E402, F401  # it chooses the environment, before JAX loads
import test_gated  # noqa: E402
import test_linears  # noqa: E402
import test_norms  # noqa: E402
import test_traffic  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import traffic  # noqa: E402
from cases import execute  # noqa: E402
from ptx import Violation  # noqa: E402

EVERY = [
    *test_traffic.MEMORY, *test_traffic.HEADS, *test_norms.SIZES, *test_norms.OPTIONS, *test_norms.MIXED,
    *test_gated.HEADS, *test_norms.VMAP, *test_linears.FUSED, *test_linears.COMPOSED, *test_linears.VMAP,
    *test_linears.FUSED_SUMS, *test_linears.FUSED_SOME, *test_linears.COMPOSED_SUMS,
    *test_linears.COMPOSED_SEVERAL, *test_linears.COMPOSED_SOME,
]  # fmt: skip
BY_DEFAULT = [*test_traffic.MEMORY, *test_traffic.HEADS, *test_gated.HEADS, *test_linears.FUSED]


def rows(case):
    """A row for each call: kernel, worst error of the case, sectors, the narrowest loads, instructions, seconds."""
    try:
        ran = execute(case)
    except Violation as violation:
        yield [str(case), str(violation)[:60], *[""] * 5]
        return
    issued = test_traffic.issue_shares(case, ran.program) if case in (*test_traffic.MEMORY, *test_traffic.HEADS) else {}
    for i, found in enumerate(traffic.of(ran.program, case.large)):
        share = issued.get(found.kernel)
        yield [
            "" if i else str(case),
            found.kernel.removeprefix("jln_").removesuffix("_kernel"),
            "" if i else f"{ran.worst:.2f}",
            f"{found.sectors:.2f}" if found.widths else "",
            " ".join(
                f"{width}:{nbytes / sum(found.widths.values()):.0%}" for width, nbytes in sorted(found.widths.items())
            ),
            "" if share is None else f"{share:.2f}",
            "" if i else f"{ran.seconds:.1f}",
        ]


def main() -> None:
    words = sys.argv[1:]
    chosen = [case for case in EVERY if any(w in str(case) for w in words)] if words else BY_DEFAULT
    table = Table(title="Executed: large arrays only in sectors and loads; issue: 1 is all that the schedulers can")
    for heading in ("case", "kernel", "error / allowed", "sectors", "loads, by bytes", "issue", "seconds"):
        table.add_column(heading, **({"width": 60, "overflow": "fold"} if heading == "case" else {"no_wrap": True}))
    for case in chosen:
        for row in rows(case):
            table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
