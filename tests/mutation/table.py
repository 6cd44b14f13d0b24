"""Print the mutants as a page, slip by slip, with the tests that must notice.

    python tests/mutation/table.py

Exits with the slips that the code has no place for any more.
"""

import pathlib
import sys
from collections.abc import Iterator

from mutants import MUTANTS
from targets import Mutant

HEAD = """\
# Slips, and the tests that notice

`python tests/mutation/table.py` made this page of {count} mutants, and `python tests/mutation/run.py`
breaks a copy of the code in each of these ways and sees the tests fail. A slip is of the kind that a person makes: a
term dropped, a mask swapped, a bound off by one, a wrong axis, sums in too few bits. Of a test with parameters one or a
few cases are run.

| file | slips |
|---|---|
{files}"""


def files() -> dict[str, list[Mutant]]:
    """The mutants by the file that they break, in the order of the tree."""
    found: dict[str, list[Mutant]] = {}
    for mutant in sorted(MUTANTS, key=lambda m: m.file):
        found.setdefault(mutant.file, []).append(mutant)
    return found


def tests(mutant: Mutant) -> str:
    """The names of a mutant's tests, without their parameters and the folder."""
    names = dict.fromkeys(test.partition("[")[0].removeprefix("tests/") for test in mutant.tests)
    return ", ".join(f"`{name}`" for name in names)


def row(mutant: Mutant) -> str:
    return f"| {mutant.what} | {tests(mutant)} |".replace("\\", "\\\\")


def lines() -> Iterator[str]:
    of_files = files()
    summary = "\n".join(f"| [{file}](#{anchor(file)}) | {len(of)} |" for file, of in of_files.items())
    yield HEAD.format(count=len(MUTANTS), files=summary)
    for file, of in of_files.items():
        yield f"\n## {file}\n\n| slip | test |\n|---|---|"
        yield from map(row, of)


def anchor(heading: str) -> str:
    """The anchor of a heading, where repositories are browsed."""
    return "".join(c for c in heading.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def stale() -> list[str]:
    """The slips whose old code is not at one place of their file."""
    root = pathlib.Path(__file__).parents[2]
    return [m.what for m in MUTANTS if (root / m.file).read_text().count(m.old) != 1]


if __name__ == "__main__":
    print(*lines(), sep="\n")
    if found := stale():
        sys.exit(f"not at one place: {', '.join(found)}")
