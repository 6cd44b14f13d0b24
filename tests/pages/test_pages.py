"""The Markdown pages: their code prints what they show, and their links lead somewhere."""

import contextlib
import io
import linecache
import math
import os
import pathlib
import re

import jax
import pytest

import jln
from jln._triton.target import interpreting
from peers import PEERS
from workloads import ALL

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("jln", "examples", "benchmarks", "tests")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.md"))])
}
HISTORY = "CHANGELOG.md"  # what it names may be gone
# Pages whose code another test runs.
TESTED = {"examples/real_models.md": "tests/modules/test_real_models.py"}
CURRENT = [page for page in PAGES if page != HISTORY]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n*", re.M | re.S)


# Code


def blocks(text: str) -> list[tuple[str, str | None]]:
    """Return the blocks of Python of a page, each with the text that the page shows as its output, or None."""
    fences = [(m[1], m[2], m.start(), m.end()) for m in FENCE.finditer(text)]
    found = []
    for i, (language, code, _, end) in enumerate(fences):
        if language == "python":
            follows = fences[i + 1 : i + 2]
            shown = [text for kind, text, start, _ in follows if kind == "text" and start == end]
            found.append((code, *shown, None)[:2])
    return found


def agree(printed: str, shown: str) -> bool:
    """Return whether two texts have the same words on each line.

    Numbers such as 1.5e-03 may differ by 1 %, or by 1e-9, as their last digits depend on the machine.
    """
    lines = [[line.split() for line in text.strip().splitlines()] for text in (printed, shown)]
    return [len(words) for words in lines[0]] == [len(words) for words in lines[1]] and all(
        a == b or (is_number(a) and is_number(b) and math.isclose(float(a), float(b), rel_tol=0.01, abs_tol=1e-9))
        for got, wanted in zip(*lines, strict=True)
        for a, b in zip(got, wanted, strict=True)
    )


def is_number(word: str) -> bool:
    return re.fullmatch(r"-?\d\.\d+e[-+]\d+", word) is not None


@pytest.mark.usefixtures("promoted_ranks")
@pytest.mark.parametrize("page", [p for p, text in PAGES.items() if blocks(text) and p not in (HISTORY, *TESTED)])
def test_the_code_of_a_page_runs_and_prints_what_it_shows(page):
    """The blocks of a page, run in order with shared variables, print what the page shows."""
    if "triton.jit" in PAGES[page] and not interpreting():
        pytest.skip("the page's kernels are for the interpreter")
    names = {}
    with jax.enable_x64(False):
        for i, (code, shown) in enumerate(blocks(PAGES[page])):
            printed, file = io.StringIO(), f"{i}/{page}"
            linecache.cache[file] = len(code), None, code.splitlines(True), file  # Triton reads a kernel's source
            with contextlib.redirect_stdout(printed):
                exec(compile(code, file, "exec"), names)
            assert agree(re.sub(rf"\d+/{page}", page, printed.getvalue()), shown or "")


def test_what_is_not_run_here_is_run_elsewhere():
    assert all(pathlib.Path(page).name in (ROOT / test).read_text() for page, test in TESTED.items())


def test_other_output_is_seen():
    shown = "x  24  4.1e-13  ok\n"
    assert agree("x 24 9.9e-13 ok", shown)
    others = [shown.replace(*slip) for slip in (("24", "25"), ("e-13", "e-03"), ("ok", "WRONG"))]
    assert not any(agree(other, shown) for other in [*others, "", shown * 2])


def absent(text: str) -> list[str]:
    """Return the files and folders of the repository that a text names as code and that are not there."""
    named = re.findall(r"`((?:jln|tests|benchmarks|examples)/[\w./-]+)`", text)
    return [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", CURRENT)
def test_files_that_a_page_names_are_there(page):
    assert absent(PAGES[page]) == []


def test_a_file_that_is_not_there_is_seen():
    assert absent("`jln/_norm`, `jln/nnx.py`, [`jln/_norm_linear`](x.md)") == ["jln/_norm", "jln/_norm_linear"]


# Links


def slug(heading: str) -> str:
    """Return the anchor that websites for repositories make of a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def headings(text: str, level: str = "#+") -> list[str]:
    return [slug(title) for title in re.findall(rf"^{level} (.+)$", FENCE.sub("", text), re.M)]


def links(text: str) -> list[str]:
    text = re.sub(r"`[^`]*`", "`", re.sub(r"^    .*$", "", FENCE.sub("", text), flags=re.M))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def broken(page: str, link: str) -> bool:
    """Return whether a link leads nowhere in the repository; links out of it are not followed."""
    if re.match(r"https?://", link):
        return False
    path, _, anchor = link.partition("#")
    target = (ROOT / page).parent / path if path else ROOT / page
    if not target.exists():
        return True
    return bool(anchor) and (target.suffix != ".md" or anchor not in headings(target.read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    assert [link for link in links(PAGES[page]) if broken(page, link)] == []


def test_a_broken_link_is_seen():
    text = "# One `two`\n[a](tests/README.md#the-folders) ![b](x.png) [c](#two) [d](tests/README.md#rung) `[e](f)`"
    assert links(text)[1:] == ["x.png", "#two", "tests/README.md#rung"] and headings(text) == ["one-two"]
    assert [broken("README.md", link) for link in links(text)] == [False, True, True, True]


def test_every_page_is_reached_from_the_first():
    reached, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        targets = [os.path.normpath(ROOT / page / ".." / link.partition("#")[0]) for link in links(PAGES[page])]
        found = {str(pathlib.Path(target).relative_to(ROOT)) for target in targets if target.endswith(".md")}
        waiting += sorted((found & PAGES.keys()) - reached)
    assert PAGES.keys() - reached == set()


@pytest.mark.parametrize("page", [p for p in CURRENT if PAGES[p].count("\n") > 150])
def test_a_long_page_links_to_all_of_its_sections(page):
    assert [title for title in headings(PAGES[page], "##") if f"(#{title})" not in PAGES[page]] == []


# What is said in two places


def test_the_first_page_is_short_and_says_early_what_has_not_been_seen():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 130
    assert any(line.startswith("**Status.**") for line in lines[:25])


def test_the_newest_release_is_told_in_short_and_a_later_version_is_in_development():
    newest, told = re.findall(r"^## \[([\d.]+)\].*\n((?:(?!## ).*\n)*)", PAGES[HISTORY], re.M)[0]
    assert 10 < len(told.splitlines()) <= 40
    assert jln.__version__ == newest or (jln.__version__.endswith(".dev0") and jln.__version__ > newest)


def test_ci_runs_both_commands_of_the_first_page():
    ran = (ROOT / ".ci/run").read_text()
    learn, prove = re.findall(r"`(pip install [^`]*&&[^`]*)`", PAGES["README.md"])
    assert prove.replace("install", "install -q") in ran
    assert learn.partition(" && ")[2] in ran


def test_sizes_have_the_names_that_commands_know():
    names = re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", PAGES["benchmarks/README.md"])
    assert len(names) > 5 and [name for name in names if name not in {**ALL, **PEERS}] == []
