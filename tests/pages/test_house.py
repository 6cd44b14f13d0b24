"""House rules: imports run downwards and never in a circle (jln/README.md has the map); docstrings stand alone."""

import ast
import graphlib
import importlib.util
import pathlib
import re

import pytest

import jln

ROOT = pathlib.Path(jln.__file__).parent
# From the top floor down. A room is a file or a folder; it may import what is below it, never beside or above.
FLOORS = (
    {"__main__"},
    {"doctor", "nnx", "linen", "haiku", "equinox"},
    {"__init__", "testing", "_modules"},
    {"_fuse"},
    {"_operators"},
    {"_junction", "_explain", "checkpoint_policies"},
    {"_core", "_triton", "_checks", "reference"},
)
FLOOR = {room: i for i, rooms in enumerate(reversed(FLOORS)) for room in rooms}


def files():
    return sorted(ROOT.rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in files()}


ONLY_TYPE_CHECKERS = ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def executed(node: ast.AST):
    """Yield the node and those within it, without what only type checkers see."""
    yield node
    inner = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        if test in ONLY_TYPE_CHECKERS:
            inner = node.orelse
        elif test.removeprefix("not ") in ONLY_TYPE_CHECKERS:
            inner = node.body
    for child in inner:
        yield from executed(child)


def imported(name: str, text: str) -> set[str]:
    """Return the modules of jln that a module with this name and this text imports, at its top or inside a function."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in executed(ast.parse(text)):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                names = {f"{source}.{alias.name}" for alias in node.names}
                found |= {name if name in MODULES else source for name in names}
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(target)), *anchor],
            ):
                literal = bool(anchor) and isinstance(anchor[0], ast.Constant)
                found.add(importlib.util.resolve_name(target, anchor[0].value if literal else package))
    return {name for name in found if name in MODULES}


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_room_has_a_floor():
    assert {room(name) for name in MODULES} == set(FLOOR)


def test_the_map_has_every_room():
    """The map in jln/README.md names every room of the package, and none that is gone."""
    page = (ROOT / "README.md").read_text().split("## The house")[1].split("\n## ")[0]
    names = [line[4:].split("  ")[0] for line in page.splitlines() if line.startswith("    jln/")]
    drawn = {name.removeprefix("jln/").removesuffix(".py").rstrip("/") for line in names for name in line.split(", ")}
    assert drawn <= set(FLOOR)
    assert [room for room in FLOOR if not re.search(rf"\b{room}(/|\.py\b)", page)] == []


def upwards(name: str, text: str) -> set[str]:
    """Return what a module imports that is not below it."""
    others = {other for other in imported(name, text) if room(other) != room(name)}
    return {other for other in others if FLOOR[room(other)] >= FLOOR[room(name)]}


def in_order(texts: dict[str, str]) -> None:
    """Raise where files import each other in a circle. A room's own may import each other, one way."""
    within = {
        name: {other for other in imported(name, text) if other != name and not other.startswith(f"{name}.")}
        for name, text in texts.items()
    }
    graphlib.TopologicalSorter(within).prepare()


@pytest.mark.parametrize("path", sorted((ROOT / "_junction/kernels").glob("*.py")), ids=lambda path: path.stem)
def test_a_kernel_has_no_more_parameters_than_one_can_hold(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if len(f.args.args) > 20] == [], "a record holds pointers"


# The most lines of Python in each folder. A change may lower a number, to what is there then, and never raise one.
CEILINGS = {"jln": 12828, "tests": 35954, "benchmarks": 5442}


@pytest.mark.parametrize("folder", CEILINGS)
def test_the_house_does_not_grow(folder):
    files = (ROOT.parent / folder).rglob("*.py")
    lines = sum(len(path.read_text().splitlines()) for path in files)
    assert lines <= CEILINGS[folder], f"{folder}/ has {lines} lines: something else must go first"
    assert lines > CEILINGS[folder] - 100, f"{folder}/ has {lines} lines: lower its ceiling to that"


def test_ci_runs_every_script():
    """CI runs every script of benchmarks/ and examples/, so that none of them rots."""
    repository = ROOT.parent
    ran = (repository / ".ci/run").read_text()
    ran += "".join(f.read_text() for f in repository.glob("benchmarks/*.sh") if f"benchmarks/{f.name}" in ran)
    files = [*repository.glob("benchmarks/*.py"), *repository.glob("examples/*.py")]
    scripts = [str(f.relative_to(repository)) for f in files if "__main__" in f.read_text()]
    assert len(scripts) > 5 and [script for script in scripts if script not in ran] == []


@pytest.mark.parametrize("name", MODULES)
def test_arrows_run_downwards(name):
    assert upwards(name, MODULES[name].read_text()) == set(), f"{name} is below or beside what it imports"


def test_no_circles():
    in_order({name: path.read_text() for name, path in MODULES.items()})


def test_no_circles_among_the_benchmarks():
    texts = {path.stem: path.read_text() for path in (ROOT.parent / "benchmarks").glob("*.py")}
    imports = {name: {*re.findall(r"^ *(?:from|import) (\w+)", text, re.M)} & {*texts} for name, text in texts.items()}
    assert len(imports) > 20 and imports["peers"] > {"composition", "torch_peers"}
    graphlib.TopologicalSorter(imports).prepare()


# In jln/_junction/derivatives.py; {} is a module.
IMPORTS = {
    "a statement": "import {}",
    "another name": "import {} as launcher",
    "a name of it": "from {} import something",
    "within a function": "def later():\n    import {}",
    "where it may fail": "try:\n    import {}\nexcept ImportError:\n    pass",
    "import_module": "import importlib\nimportlib.import_module('{}')",
    "import_module by itself": "from importlib import import_module\nm = import_module('{}').run()",
    "__import__": "__import__('{}')",
    "else of TYPE_CHECKING": "if TYPE_CHECKING:\n    pass\nelse:\n    import {}",
    "elif of TYPE_CHECKING": "if typing.TYPE_CHECKING:\n    pass\nelif True:\n    import {}",
    "not TYPE_CHECKING": "if not TYPE_CHECKING:\n    import {}",
    "TYPE_CHECKING or more": "if TYPE_CHECKING or True:\n    import {}",
}
UPWARDS = {how: text.format("jln.testing.check") for how, text in IMPORTS.items()} | {
    "from jln": "from jln.testing import check",
    "relative": "from ..testing import check",
    "relative, a name of it": "from ..testing.check import check",
    "relative, within a function": "def later():\n    from ..testing.check import check",
    "import_module, relative": "import_module('..testing.check', __package__)",
    "import_module, relative to another": "import_module('.testing.check', 'jln')",
}
BESIDE = {how: text.format("jln._junction.launches") for how, text in IMPORTS.items()} | {
    "relative": "from . import launches",
    "relative, a name of it": "from .launches import forward",
    "import_module, relative": "import_module('.launches', __package__)",
}


@pytest.mark.parametrize("how", UPWARDS)
def test_an_arrow_upwards_is_seen(how):
    assert upwards("jln._junction.derivatives", UPWARDS[how]) == {"jln.testing.check"}


@pytest.mark.parametrize("how", BESIDE)
def test_a_circle_is_seen(how):
    with pytest.raises(graphlib.CycleError):
        in_order({"jln._junction.derivatives": BESIDE[how], "jln._junction.launches": "from . import derivatives"})


def test_a_package_is_what_its_own_relative_imports_start_from():
    assert imported("jln._junction", "from . import derivatives\nfrom .. import testing") == {
        "jln._junction.derivatives",
        "jln.testing",
    }


@pytest.mark.parametrize("text", ["if TYPE_CHECKING:\n    {}", "if not typing.TYPE_CHECKING:\n    pass\nelse:\n    {}"])
def test_what_only_type_checkers_see_is_no_arrow(text):
    assert upwards("jln._junction.derivatives", text.format("from ..testing import check")) == set()


# A docstring that begins so is the rest of a sentence, a question, or about something said elsewhere.
NO_BEGINNINGS = """
about after also and as at because before behind beside between but by during for from in into of on onto only or over
per since so than through to under until unless via with within without not nor neither else otherwise likewise
how if what when where whether which while who whom whose why
he her here his it its she that their them then there these they this those we you
"""


def beginnings(text: str):
    """Yield the first word of each docstring, with the name of the module, class or function that has it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            yield getattr(node, "name", "the module"), doc.split()[0]


def stands_alone(word: str) -> bool:
    """Tell whether a docstring may begin with this word: code, or a capital letter and a verb or a noun."""
    return (word[0] == "`" or word[0].isupper()) and word.rstrip(".,:;").lower() not in NO_BEGINNINGS.split()


FOLDERS = ("jln", "benchmarks", "examples", "tests")
READ = [path for folder in FOLDERS for path in sorted((ROOT.parent / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", READ, ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_docstrings_begin_with_a_verb_or_a_noun(path):
    assert [(of, word) for of, word in beginnings(path.read_text()) if not stands_alone(word)] == []


@pytest.mark.parametrize("doc", ["Of a result.", "What it takes.", "Likewise.", "-> rows", "x: of a row.", "(31)"])
def test_a_docstring_that_does_not_stand_alone_is_seen(doc):
    for text in (f'"""{doc}"""', f'def f():\n    """{doc}"""', f'class A:\n    def f(self):\n        """{doc}"""'):
        assert [stands_alone(word) for _, word in beginnings(text)] == [False]
