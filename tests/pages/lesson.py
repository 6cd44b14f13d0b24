"""The numbered terms in jln/README.md, made from the docstrings and the lines that cite a term's number.

    python tests/pages/lesson.py           # write the page
    python tests/pages/lesson.py --print   # print it

The prose of the page is written by hand. A block that starts with a number, such as "(7)", is written here. For each
number in it the block gets the formula, from the docstring, and the statements of jnp and of the kernels that cite it:
whose first line has a comment that starts with it. For a new term write its number into a block.
"""

import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "jln/README.md"
JUNCTION = ROOT / "jln/_junction"
JNP = tuple(JUNCTION / name for name in ("formulas.py", "gradients.py", "eight_bits.py", "linears/formulas.py"))
KERNELS = tuple(
    JUNCTION / "kernels" / f"{name}.py"
    for name in (
        "terms",
        "forward",
        "eight_bits",
        "row_terms",
        "backward",
        "with_linear",
        "with_linear_backward",
    )
)
WIDTH = 110  # of a quotation


def formulas() -> dict[int, str]:
    """The formula of each number, from the docstrings. A remark that stands apart from it there is left out."""
    terms: dict[int, str] = {}
    for path in JNP:
        for number, text in re.findall(r"^    \((\d+)\) (.*=.*)", path.read_text(), re.M):
            if int(number) in terms:
                raise ValueError(f"({number}) is two terms")
            formula = re.sub(r" {4,}.*| {3}\(.*", "", re.sub(r" +=", " =", text, count=1))
            terms[int(number)] = " ".join(formula.split())
    return terms


def citations(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """The numbers with which comments behind a line start, each with the statement there, in one line."""
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        cited = re.match(r" *([^# ].*?)  # (\(\d+\)(?:, \(\d+\))*)", line)
        if cited is not None:
            code, following = cited[1], iter(lines[i + 1 :])
            while code.count("(") > code.count(")"):
                code += f" {next(following).strip()}"
            code = re.sub(r",? \)", ")", code.replace("( ", "("))
            for number in re.findall(r"\d+", cited[2]):
                yield int(number), shortened(code)


def shortened(code: str) -> str:
    return code if len(code) <= WIDTH else code[:WIDTH].rpartition(" ")[0] + " ..."


def quotations() -> dict[int, list[tuple[str, str]]]:
    """The statements that cite each number, each with "jnp" or the name of its file of kernels."""
    quoted: dict[int, list[tuple[str, str]]] = {}
    for path in (*JNP, *KERNELS):
        who = "jnp" if path in JNP else path.stem
        for number, code in citations(path):
            if (who, code) not in quoted.setdefault(number, []):
                quoted[number].append((who, code))
    return quoted


def page() -> str:
    """The page as it should be."""
    terms, quoted = formulas(), quotations()

    def block(match: re.Match[str]) -> str:
        lines = ["```text"]
        for number in map(int, re.findall(r"^\((\d+)\)", match[1], re.M)):
            lines.append(f"({number}) {terms[number]}")
            lines += [f"      {who:11}  {code}" for who, code in quoted.get(number, ())]
        return "\n".join([*lines, "```"])

    return re.sub(r"```text\n(\(\d+\).*?)\n```", block, PAGE.read_text(), flags=re.S)


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(page(), end="")
    else:
        PAGE.write_text(page())
