"""The commands that pages and messages tell to type: they exist, print what is shown, and install in one way."""

import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
from test_pages import CURRENT, FENCE, HISTORY, PAGES, ROOT

from catalogue import OPERATORS
from jln.__main__ import parser
from jln.testing.operators import DTYPES

# The package's files, as their messages tell what to type, too.
MESSAGES = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "jln").rglob("*.py"))}
PROGRAMS = ("python", "pytest", "pip", "bash", "export", "source ", "benchmarks/", "JLN_", "JAX_", "TRITON_")
PYTEST = {"-n0", "-s"}
MARKS = {"heavy", "combination", "and", "not", "or"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Other packages that a message may tell to install by their names.
OTHERS = r"(-U )?\"?(jax|jaxlib|numpy|triton|tokamax|\{n)"


def commands(text: str) -> set[str]:
    """The commands that a page tells to type, in indented blocks and in inline code."""
    text = FENCE.sub("\n", text)
    indented = re.findall(r"^    (?:\$ )?(\S.*)$", text, re.M)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", text, flags=re.M))]
    return {code.replace("\\|", "|") for code in [*indented, *inline] if code.startswith(PROGRAMS)}


def simple(command: str) -> list[list[str]]:
    """The words of each of the simple commands that `&&` and `|` join.

    `...`, which stands for more words, and redirections of output are left out.
    """
    found = [[]]
    for word in shlex.split(command, comments=True):
        if word in ("&&", "|"):
            found.append([])
        elif word != "...":
            found[-1].append(word)
    return [words[: words.index(">")] if ">" in words else words for words in found]


def complaints(command: str) -> list[str]:
    """The faults of a command, in words."""
    return [wrong for words in simple(command) for wrong in _complaints(words)]


def _complaints(words: list[str]) -> list[str]:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    match words:
        case [] | ["python"] | ["pip" | "head" | "source", *_] | ["pre-commit", "install"]:
            return []  # `badly_installed` judges pip
        case ["python3.11", "-m", "venv", _] | ["python", "-m", "jln"]:
            return []
        case ["export", variable] | [variable] if variable.partition("=")[0].isupper():
            name = variable.partition("=")[0]
            return [] if any(name in text for text in MESSAGES.values()) else [f"no {name}"]
        case ["python", "-m", "jln", *rest]:
            return of_ours(rest)
        case ["pytest", *rest]:
            return of_pytest(rest)
        case ["bash" | "python", script, *rest]:
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


def of_pytest(words: list[str]) -> list[str]:
    wrong, texts, words = [], "", iter(words)
    for word in words:
        if word in ("-k", "-m"):
            names = {*re.findall(r"\w+", next(words))} - MARKS
            wrong += [f"no {name}" for name in names if word == "-m" or name not in texts]
        elif word not in PYTEST:
            name, _, test = word.removeprefix("--confcutdir=").partition("::")
            files = [ROOT / name, *(ROOT / name).rglob("*.py")]
            texts += "".join(file.read_text() for file in files if file.is_file())
            wrong += [f"no {word}"] if not files[0].exists() or test not in texts else []
    return wrong


def of_script(script: str, words: list[str]) -> list[str]:
    """The faults of a script's command: no such file, or an option that no file beside it names."""
    if not (ROOT / script).is_file():
        return [f"no {script}"]
    text = "".join(file.read_text() for file in (ROOT / script).parent.glob("*.py"))
    options = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
    return [f"{script} has no {o}" for o in options if not re.search(rf"\b{o}\b|--{o.replace('_', '-')}\b", text)]


@pytest.mark.parametrize("page", CURRENT)
def test_what_a_page_tells_to_type_exists(page):
    assert [wrong for command in commands(PAGES[page]) for wrong in complaints(command)] == []


@pytest.mark.parametrize(
    "command",
    [
        "python -m jln chek",
        "python -m jln check layer_norm --dtype float8",
        "python examples/train_lm.py --stap 3",
        "pytest tests/operators/test_errors.py -k nothing_of_this_name",
        "pytest tests/operators/test_errors.py::test_nothing_of_this_name",
        "pytest -m heav",
        "pytest -x",
        "export JLN_TILES=h200.json",
        "bash .ci/runs",
    ],
)
def test_what_does_not_exist_is_seen(command):
    assert complaints(command) != []


def test_commands_are_found_wherever_they_stand():
    text = "Do `python -m\njln check`:\n\n    $ pytest tests  # all\n    python x.py && pytest\n"
    text += "\n```python\npython = 1\n```\n"
    assert commands(text) == {"python -m jln check", "pytest tests  # all", "python x.py && pytest"}


# The page's other samples take minutes: CI runs them.
SAMPLES = re.findall(r"^    \$ (.*)\n((?:(?:    .*)?\n)*)", PAGES["examples/command_line.md"], re.M)
QUICK = [sample for sample in SAMPLES if re.search("doctor|check layer_norm", sample[0])]


@pytest.mark.parametrize(("command", "shown"), QUICK, ids=[command for command, _ in QUICK])
def test_a_command_prints_what_a_page_shows(command, shown):
    """Each line that the page shows is among those that the command prints, in this order."""

    def masked(line: str) -> str:
        """The line without what depends on the machine: numbers, versions, paths and widths."""
        return " ".join(re.sub(r"^(/.*|v?[\d.]+(e[-+]\d+)?)$", "#", word) for word in line.split())

    variables = {name: value for name, value in os.environ.items() if not name.startswith(("JLN_", "TRITON_"))}
    words = [sys.executable, *shlex.split(command)[1:]]
    printed = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout
    lines = iter(map(masked, printed.splitlines()))
    assert [s for s in shown.splitlines() if s.strip() not in ("", "...") and masked(s) not in lines] == []


def badly_installed(text: str) -> list[str]:
    """Install lines of a text other than `pip install -e ".[extra,extra]"` with known extras.

    Other packages may be installed by their names.
    """

    def is_form(line: str) -> bool:
        match = re.match(r'-e "\.\[([\w,{}]+)\]"', line)
        return match is not None and {*match[1].split(",")} <= {*EXTRAS, "{extra}"}

    found = re.findall(r"pip install ([^\n`]*)", text)
    return [line for line in found if not (is_form(line) or re.match(OTHERS, line))] + re.findall(r"jln\[\w*", text)


def test_pages_and_messages_agree_on_one_install_line():
    texts = {name: text for name, text in {**PAGES, **MESSAGES}.items() if name != HISTORY}
    assert {name: wrong for name, text in texts.items() if (wrong := badly_installed(text))} == {}


def test_another_install_line_is_seen():
    for wrong in ['"jln[cuda13]"', "jln", ".", '".[cuda13]"', '-e ".[cuda14]"', "-e .", '-e ".[flax, cuda13]"']:
        assert badly_installed(f"pip install {wrong}") != []
    assert badly_installed('pip install -e ".[cuda13,flax]" && pytest') == []
