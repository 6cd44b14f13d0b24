"""House rules: imports run downwards and never in a circle (jln/README.md has the map); docstrings stand alone."""

import ast
import graphlib
import pathlib
import re

import grimp
import pytest

import jln

ROOT = pathlib.Path(jln.__file__).parent
FOLDERS = ("jln", "benchmarks", "examples", "tests")
# From the top floor down. A room is a file or a folder; it may import what is below it, never beside or above.
FLOORS = (
    {"__main__"},
    {"doctor", "nnx", "linen", "haiku", "equinox"},
    {"testing", "_modules"},  # and jln's own __init__.py
    {"_explain"},
    {"_fuse"},
    {"_operators"},
    {"_junction", "_routes", "checkpoint_policies"},
    {"_core", "_triton", "_checks", "reference"},
)
ROOMS = set().union(*FLOORS)
GRAPH = grimp.build_graph("jln", exclude_type_checking_imports=True, cache_dir=None)
# The most lines of Python in each folder. A change may lower a number, to what is there then, and never raise one.
CEILINGS = {"jln": 12801, "tests": 21970, "benchmarks": 5439}
# A docstring that begins so is the rest of a sentence, a question, or about something said elsewhere.
NO_BEGINNINGS = """
about after also and as at because before behind beside between but by during for from in into of on onto only or over
per since so than through to under until unless via with within without not nor neither else otherwise likewise
how if what when where whether which while who whom whose why
he her here his it its she that their them then there these they this those we you
"""


def rooms(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name != "jln"}


def upwards(floors) -> set[tuple[str, str]]:
    """The pairs of rooms of which the first imports the second from beside or above."""
    layers = [grimp.Layer(*on_one_floor) for on_one_floor in floors]
    return {(w.importer, w.imported) for w in GRAPH.find_illegal_dependencies_for_layers(layers, containers={"jln"})}


def test_every_room_has_a_floor():
    assert rooms(GRAPH.find_children("jln")) == ROOMS


def test_the_map_has_every_room():
    """The map in jln/README.md names every room of the package, and none that is gone."""
    page = (ROOT / "README.md").read_text().split("## The house")[1].split("\n## ")[0]
    names = [line[4:].split("  ")[0] for line in page.splitlines() if line.startswith("    jln/")]
    drawn = {name.removeprefix("jln/").removesuffix(".py").rstrip("/") for line in names for name in line.split(", ")}
    assert drawn <= {*ROOMS, "__init__"}
    assert [room for room in ROOMS if not re.search(rf"\b{room}(/|\.py\b)", page)] == []


def test_arrows_run_downwards():
    assert upwards(FLOORS) == set()
    assert rooms(GRAPH.find_modules_that_directly_import("jln")) <= set().union(*FLOORS[:2])
    assert rooms(GRAPH.find_modules_directly_imported_by("jln")) <= set().union(*FLOORS[3:])


def test_an_arrow_upwards_or_beside_is_seen():
    assert ("jln._fuse", "jln._operators") in upwards([{"_operators"}, {"_fuse"}])
    assert ("jln._fuse", "jln._operators") in upwards([{"_operators", "_fuse"}])


def test_no_circles():
    """The files of a room may import each other, one way; a package may import what is in it."""
    imports = {module: GRAPH.find_modules_directly_imported_by(module) for module in GRAPH.modules}
    others = {module: {o for o in of if not o.startswith(f"{module}.")} for module, of in imports.items()}
    graphlib.TopologicalSorter(others).prepare()


def test_no_circles_among_the_benchmarks():
    texts = {path.stem: path.read_text() for path in (ROOT.parent / "benchmarks").glob("*.py")}
    imports = {name: {*re.findall(r"^ *(?:from|import) (\w+)", text, re.M)} & {*texts} for name, text in texts.items()}
    assert len(imports) > 20 and imports["peers"] > {"composition", "torch_peers"}
    graphlib.TopologicalSorter(imports).prepare()


@pytest.mark.parametrize("path", sorted((ROOT / "_junction/kernels").glob("*.py")), ids=lambda path: path.stem)
def test_a_kernel_has_no_more_parameters_than_one_can_hold(path):
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if len(f.args.args) > 20] == [], "a record holds pointers"


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


def stray(text: str) -> list[str]:
    """The first words of docstrings that are neither code nor a capital letter and a verb or a noun."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    docs = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    words = [doc.split()[0] for doc in docs if doc]
    fine = [w[0] == "`" or (w[0].isupper() and w.rstrip(".,:;").lower() not in NO_BEGINNINGS.split()) for w in words]
    return [word for word, is_fine in zip(words, fine, strict=True) if not is_fine]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder):
    files = sorted((ROOT.parent / folder).rglob("*.py"))
    assert {str(f): words for f in files if (words := stray(f.read_text()))} == {}


def test_a_docstring_that_does_not_stand_alone_is_seen():
    for doc in ("Of a result.", "What it takes.", "Likewise.", "-> rows", "x: of a row.", "(31)"):
        for text in (f'"""{doc}"""', f'def f():\n    """{doc}"""', f'class A:\n    def f(self):\n        """{doc}"""'):
            assert stray(text) == [doc.split()[0]]
