"""Tests of the derivation in jln/README.md: formulas as in the docstrings, and cited where they are computed."""

import math
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
JUNCTION = ROOT / "jln/_junction"
JNP = [JUNCTION / name for name in ("formulas.py", "gradients.py", "eight_bits.py", "linears/formulas.py")]
KERNELS = sorted((JUNCTION / "kernels").glob("*.py"))
PAGE = (ROOT / "jln/README.md").read_text()
# (21) and (22) are the kernels' form of (13).
IN_KERNELS_ALONE, IN_JNP_ALONE = {21, 22}, {13}


def formulas(text: str, indent: str = "") -> dict[int, str]:
    """The formula of each number at the start of a line, without a remark that stands apart from it."""
    terms: dict[int, str] = {}
    for number, line in re.findall(rf"^{indent}\((\d+)\) (.*=.*)", text, re.M):
        assert int(number) not in terms, f"({number}) is two terms"
        line = re.sub(" +=", " =", line, count=1)
        terms[int(number)] = " ".join(re.sub(r" {4,}.*| {3}\(.*", "", line).split())
    return terms


def cited(text: str) -> set[int]:
    """The numbers with which a comment behind a line of code starts."""
    comments = re.findall(r"^ *[^#\s].*  # (\(\d+\)(?:, \(\d+\))*)", text, re.M)
    return {int(number) for comment in comments for number in re.findall(r"\d+", comment)}


DERIVED = formulas("\n".join(path.read_text() for path in JNP), indent="    ")
BY = {"jnp": JNP, "kernels": KERNELS}
CITED = {who: set().union(*(cited(path.read_text()) for path in paths)) for who, paths in BY.items()}


def test_the_page_has_the_formulas_of_the_docstrings():
    assert formulas(PAGE) == DERIVED and len(DERIVED) > 30
    said = re.findall(r"^    ((?:branch|total|y) += .*)", (JUNCTION / "arrays.py").read_text(), re.M)
    assert len(said) == 3 and "\n".join(said) in PAGE


@pytest.mark.parametrize(("who", "others"), [("jnp", IN_KERNELS_ALONE), ("kernels", IN_JNP_ALONE)])
def test_every_term_is_cited_where_it_is_computed(who, others):
    assert CITED[who] == {*DERIVED} - others


NUMBER = r"(?<![\w.])(?:\d{3,}|\d+\.\d+)(?![\d.]*\d)"  # of three digits and more, or with a point


def test_what_was_measured_stands_together_where_it_is_kept():
    """The figures of a sentence are in one row, or one paragraph, of a source; what is reckoned is right."""
    names = ("benchmarks/README.md", "jln/_junction/tiles.py", "jln/_triton/chip.py")
    found = [p for name in names for p in re.split(r"\n\s*#?\s*\n", (ROOT / name).read_text())]
    rows = [row for p in found for row in (p.splitlines() if p.lstrip().startswith("|") else [p])]
    kept = [{*re.findall(NUMBER, row)} for row in rows]
    text = re.sub(r"```.*?```|\([^)]*\)", "", PAGE.split("## From there to ours")[1].split("\n## ")[0], flags=re.S)
    reckoned = re.findall(r"`([\d* ]+?)`? ?(?:= |bytes, )([\d.]+)\s+MB", text)
    assert len(reckoned) > 4
    for product, result in reckoned:
        exact = math.prod(int(factor) for factor in product.split("*"))
        assert float(result) == pytest.approx(exact if exact < 1e6 else exact / 1e6, rel=0.01)
    sentences = [{*re.findall(NUMBER, s)} for s in re.split(r"(?<=[.:])\s", re.sub("`[^`]*`", "", text))]
    assert len({*set().union(*sentences)}) > 20
    assert [s for s in sentences if s and not any(s <= row for row in kept)] == []


def test_slips_are_seen():
    derived = formulas("    (1) a_m = b * c     (0 for RMSNorm)\n    (2) d    = a_m,   e = 2\n", indent="    ")
    assert derived == formulas("(1) a_m = b * c\n(2) d = a_m, e = 2") == {1: "a_m = b * c", 2: "d = a_m, e = 2"}
    assert cited("y = f(  # (1), (2), rounded\n    x)\n# (3) is prose\nz = y  # by (4)\n") == {1, 2}
    with pytest.raises(AssertionError, match="two terms"):
        formulas("(1) a = b\n(1) a = c")
