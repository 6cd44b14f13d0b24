"""Who imports whom: arrows run downwards, and nothing runs in a circle. CONTRIBUTING.md has the map."""

import ast
import graphlib
import pathlib
import re

import pytest

import jln

ROOT = pathlib.Path(jln.__file__).parent
# From the top floor down. A room is a file or a folder; it may import what is below it, never beside or above.
FLOORS = (
    {"__main__"},
    {"_cli"},
    {"_bench"},
    {"_accuracy"},
    {"convert"},
    {"nnx"},
    {"linen", "haiku", "equinox"},
    {"_modules"},
    {"_catalogue"},
    {"__init__"},
    {"checkpoint_policies"},
    {"_norm_linear"},
    {"_norm"},
    {"_core", "program"},
    {"_hlo"},
    {"_triton"},
    {"testing"},
    {"_testing", "_checks", "_routes", "reference", "_interrupt"},
)
FLOOR = {room: i for i, rooms in enumerate(reversed(FLOORS)) for room in rooms}


def files():
    return sorted(ROOT.rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in files()}


def imported(text: str) -> set[str]:
    """The modules of jln that a file imports, wherever in it, but for those that only type checkers see."""
    tree = ast.parse(text)
    unseen = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return {name for name in found if name in MODULES}


def room(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_room_has_a_floor():
    assert {room(name) for name in MODULES} == set(FLOOR)


def test_the_map_has_every_room():
    """And not one that is no more."""
    page = (ROOT.parent / "CONTRIBUTING.md").read_text().split("## The house")[1].split("\n## ")[0]
    names = [line[4:].split("  ")[0] for line in page.splitlines() if line.startswith("    jln/")]
    drawn = {name.removeprefix("jln/").removesuffix(".py").rstrip("/") for line in names for name in line.split(", ")}
    assert drawn <= set(FLOOR)
    assert [room for room in FLOOR if not re.search(rf"\b{room}(/|\.py\b)", page)] == []


@pytest.mark.parametrize("name", MODULES)
def test_arrows_run_downwards(name):
    upwards = {
        other
        for other in imported(MODULES[name].read_text())
        if room(other) != room(name) and FLOOR[room(other)] >= FLOOR[room(name)]
    }
    assert upwards == set(), f"{name} is below or beside what it imports"


def test_no_circles():
    """Of files: a room's own may import each other, one way."""
    within = {
        name: {other for other in imported(path.read_text()) if other != name and not other.startswith(f"{name}.")}
        for name, path in MODULES.items()
    }
    graphlib.TopologicalSorter(within).prepare()


def test_ci_runs_every_script():
    """Or it rots."""
    repository = ROOT.parent
    ran = (repository / ".ci/run").read_text()
    ran += (repository / "benchmarks/gpu_run.sh").read_text() if "benchmarks/gpu_run.sh" in ran else ""
    files = [*repository.glob("benchmarks/*.py"), *repository.glob("examples/*.py")]
    scripts = [str(f.relative_to(repository)) for f in files if "__main__" in f.read_text()]
    assert len(scripts) > 5 and [script for script in scripts if script not in ran] == []


def test_a_circle_and_an_arrow_upwards_are_seen():
    text = "def later():\n    from jln._norm import launcher\n    import jln._cli\n"
    assert imported(text) == {"jln._norm.launcher", "jln._cli"}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
