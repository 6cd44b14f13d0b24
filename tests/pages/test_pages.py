"""The Markdown pages: their code prints what they show, their commands exist, and their links lead somewhere."""

import contextlib
import importlib
import io
import linecache
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import jax
import pytest
import typer

from catalogue import OPERATORS
from jln.__main__ import parser
from jln._triton.target import interpreting
from jln.testing.operators import DTYPES
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
# The package's files, as their messages tell what to type, too.
MESSAGES = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "jln").rglob("*.py"))}
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


def samples(text: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a page that are shown with their output, each with the lines of that."""
    shown = re.findall(r"^    \$ (.*)\n((?:(?:    .*)?\n)*)", text, re.M)
    return [(command, output.splitlines()) for command, output in shown]


def masked(line: str) -> str:
    """Return a line of output without what depends on the machine: numbers, versions, paths and widths."""
    return " ".join(re.sub(r"^(/.*|v?[\d.]+(e[-+]\d+)?)$", "#", word) for word in line.split())


# The others take minutes: CI runs them.
QUICK = [s for s in samples(PAGES["examples/command_line.md"]) if re.search("doctor|check layer_norm", s[0])]


@pytest.mark.parametrize(("command", "shown"), QUICK, ids=[command for command, _ in QUICK])
def test_a_command_prints_what_a_page_shows(command, shown):
    """Each line that the page shows is among those that the command prints, in this order."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("JLN_", "TRITON_"))}
    words = [sys.executable, *shlex.split(command)[1:]]
    printed = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout
    lines = iter(map(masked, printed.splitlines()))
    assert [line for line in shown if line.strip() not in ("", "...") and masked(line) not in lines] == []


# Commands

PROGRAMS = ("python", "pytest", "pip", "bash", "export", "source ", "benchmarks/", "JLN_", "JAX_", "TRITON_")
PYTEST = {"-n0", "-s", "--durations=25", "--ignore", "--dist", "worksteal"}


def commands(text: str) -> set[str]:
    """Return the commands that a page tells to type, in indented blocks and in inline code."""
    text = FENCE.sub("\n", text)
    indented = re.findall(r"^    (?:\$ )?(\S.*)$", text, re.M)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", text, flags=re.M))]
    inline = [code.replace("\\|", "|") for code in inline]
    return {code for code in [*indented, *inline] if code.startswith(PROGRAMS)}


def simple(command: str) -> list[list[str]]:
    """Return the words of each of the simple commands that `&&` and `|` join.

    `...`, which stands for more words, and redirections of output are left out.
    """
    found = [[]]
    for word in shlex.split(command, comments=True):
        if word in ("&&", "|"):
            found.append([])
        elif word != "...":
            found[-1].append(word)
    return [words[: words.index(">")] if ">" in words else words for words in found]


def complaints(words: list[str]) -> list[str]:
    """Return messages about what is wrong with a simple command, or an empty list."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    match words:
        case [] | ["python"] | ["pip", *_] | ["head", *_] | ["pre-commit", "install"]:
            return []  # `badly_installed` judges pip
        case ["python3.11", "-m", "venv", _] | ["source", _]:
            return []
        case ["export", variable] | [variable] if variable.partition("=")[0].isupper():
            name = variable.partition("=")[0]
            return [] if any(name in text for text in MESSAGES.values()) else [f"no {name}"]
        case ["python", "-m", "jln"]:
            return []
        case ["python", "-m", "jln", *rest]:
            return of_ours(rest)
        case ["python", "benchmarks/report.py" | "benchmarks/bench.py" as script, *rest]:
            return of_workloads(script, rest)
        case ["pytest", *rest]:
            return of_pytest(rest)
        case ["bash", script, *rest] | ["python", script, *rest]:
            return of_script(script, rest)
        case [script, *rest] if script.startswith("benchmarks/"):
            return of_script(script, rest)
    return [f"what is {words}?"]


def of_ours(words: list[str]) -> list[str]:
    try:
        given = parser().parse_args(words)
    except SystemExit:
        return [f"no command {words}"]
    asked = {"operators": OPERATORS, "dtype": DTYPES, "implementation": ("xla", "triton")}
    return [f"no {w}" for field, known in asked.items() for w in getattr(given, field, None) or () if w not in known]


def of_workloads(script: str, rest: list[str]) -> list[str]:
    app = typer.Typer()
    app.command()(importlib.import_module(pathlib.Path(script).stem).main)
    try:
        given = typer.main.get_command(app).make_context(script, rest).params
    except typer.BadParameter.__mro__[1] as error:
        return [error.format_message()]
    return [f"no workload {w}" for w in given["workloads"] or () if w not in {**ALL, "NAME": ...}]


def of_pytest(rest: list[str]) -> list[str]:
    wrong, files, rest = [], [], iter(rest)
    for word in rest:
        if word == "-k":
            names = [w for w in re.findall(r"\w+", next(rest)) if w not in ("and", "not", "or")]
            texts = "".join(p.read_text() for f in files for p in [f, *f.rglob("*.py")] if p.is_file())
            wrong += [f"no {name} in {files}" for name in names if name not in texts]
        elif word == "-m":
            marks = re.findall(r"\w+", next(rest))
            wrong += [f"no marker {m}" for m in marks if m not in ("and", "not", "or", "heavy", "combination")]
        elif word not in PYTEST:
            file, _, test = word.removeprefix("--confcutdir=").partition("::")
            files.append(ROOT / file)
            if not files[-1].exists() or test not in (files[-1].read_text() if test else ""):
                wrong.append(f"no {word}")
    return wrong


def of_script(script: str, rest: list[str]) -> list[str]:
    """Return messages about a script that does not exist, or about options that it does not have.

    An option stands in the script's text, or is a parameter of its `main`.
    """
    if not (ROOT / script).is_file():
        return [f"no {script}"]
    text = (ROOT / script).read_text()
    options = [word for word in rest if word.startswith("--")]
    return [
        f"{script} has no {option}"
        for option in options
        if not re.search(rf"{option}\b|^    {option[2:].replace('-', '_')}: Annotated", text, re.M)
    ]


@pytest.mark.parametrize("page", CURRENT)
def test_what_a_page_tells_to_type_exists(page):
    assert [wrong for command in commands(PAGES[page]) for part in simple(command) for wrong in complaints(part)] == []


@pytest.mark.parametrize(
    "command",
    [
        "python -m jln chek",
        "python benchmarks/bench.py --peer jln",
        "python benchmarks/report.py layer-norm-4097",
        "python -m jln check layer_norm --dtype float8",
        "python -m jln check layernorm",
        "python examples/train.py",
        "python examples/train_lm.py --step 3",
        "pytest tests/test_page.py",
        "pytest tests/operators/test_errors.py -k nothing_of_this_name",
        "pytest tests/operators/test_errors.py::test_nothing_of_this_name",
        "pytest -m heav",
        "pytest -x",
        "export JLN_TILES=h200.json",
        "bash .ci/runs",
        "make",
    ],
)
def test_what_does_not_exist_is_seen(command):
    assert [wrong for part in simple(command) for wrong in complaints(part)] != []


def test_commands_are_found_wherever_they_stand():
    text = "Do `python -m\njln check`:\n\n    $ pytest tests  # all\n    python x.py && pytest\n"
    text += "\n```python\npython = 1\n```\n"
    assert commands(text) == {"python -m jln check", "pytest tests  # all", "python x.py && pytest"}


# Installing

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Other packages that a message may tell to install by their names.
OTHERS = r"(-U )?\"?(jax|jaxlib|numpy|triton|tokamax|\{n)"


def badly_installed(text: str) -> list[str]:
    """Return what a text tells to install otherwise than by `pip install -e ".[extra,extra]"` with known extras.

    Other packages may be installed by their names.
    """
    found = re.findall(r"pip install ([^\n`]*)", text)
    return [line for line in found if not (is_form(line) or re.match(OTHERS, line))] + re.findall(r"jln\[\w*", text)


def is_form(line: str) -> bool:
    match = re.match(r'-e "\.\[([\w,{}]+)\]"', line)
    return match is not None and all(extra in {*EXTRAS, "{extra}"} for extra in match[1].split(","))


@pytest.mark.parametrize(
    "file", [f for f, text in {**PAGES, **MESSAGES}.items() if f != HISTORY and re.search(r"pip install|jln\[", text)]
)
def test_pages_and_messages_agree_on_one_install_line(file):
    assert badly_installed({**PAGES, **MESSAGES}[file]) == []


def test_another_install_line_is_seen():
    for wrong in ['"jln[cuda13]"', "jln", ".", '".[cuda13]"', '-e ".[cuda14]"', "-e .", '-e ".[flax, cuda13]"']:
        assert badly_installed(f"pip install {wrong}") != []
    assert badly_installed('pip install -e ".[cuda13,flax]" && pytest') == []


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
    text = "# One `two`\n[a](tests/README.md#the-rungs) ![b](x.png) [c](#two) [d](tests/README.md#rung) `[e](f)`"
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


def test_ci_runs_both_commands_of_the_first_page():
    ran = (ROOT / ".ci/run").read_text()
    _, learn, prove = re.findall(r"^    (pip install .*)$", PAGES["README.md"], re.M)
    assert prove.replace("install", "install -q") in ran
    assert learn.partition(" && ")[2] in ran


def test_the_first_pages_figures_are_those_of_the_page_on_benchmarks():
    table = PAGES["README.md"].split("## What it saves")[1]
    figures = re.findall(r"(?<=\| )[\d.]+(?: / \d+)?(?= \|)", table)
    assert len(figures) > 20
    assert [figure for figure in figures if f" {figure} " not in PAGES["benchmarks/README.md"]] == []


@pytest.mark.parametrize("page", ["README.md", "benchmarks/README.md"])
def test_sizes_have_the_names_that_commands_know(page):
    names = re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", PAGES[page])
    assert len(names) > 5 and [name for name in names if name not in {**ALL, **PEERS}] == []


def test_the_mutants_of_the_page_on_tests_are_there():
    made = subprocess.run(
        [sys.executable, "tests/mutation/table.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    picked = [line for line in PAGES["tests/README.md"].split("## Breaking")[1].splitlines() if line.startswith("| ")]
    assert [line for line in picked[1:] if line not in made.splitlines()] == []
