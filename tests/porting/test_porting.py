"""The page beside lists the names that the package uses of JAX and of Triton beyond their public interfaces."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
UNSTABLE = (
    *("jax._src", "jax.core", "jax.custom_derivatives", "jax.experimental", "jax.extend", "jax.interpreters"),
    *("jaxlib", "jax_triton", "triton._C", "triton.backends", "triton.compiler", "triton.runtime"),
)


def is_unstable(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in UNSTABLE)


def taken(text: str) -> set[str]:
    """Return the names that a file uses of modules which promise no stability.

    They are what it imports of these modules, their underscored names that it reads, and what it names in a string.
    """
    found, imported = set(), set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if is_unstable(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names if is_unstable(f"{node.module}.{alias.name}")}
            found |= names
            imported |= names
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            found |= {node.value} if is_unstable(node.value) and "." in node.value else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            found |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in imported else set()
    return found


PAGE = pathlib.Path(__file__).with_name("README.md").read_text()
TABLE = [line.split("|")[2:4] for line in PAGE.splitlines() if line.startswith("| ")]  # what, and where


def listed(name: str, path: str) -> bool:
    return any(
        re.search(rf"`{re.escape(name)}`", what)
        and any(path == place or path.startswith(f"{place}/") for place in re.findall("`([^`]+)`", where))
        for what, where in TABLE
    )


def test_the_page_on_porting_lists_what_the_package_takes():
    paths = {path.relative_to(ROOT).as_posix(): taken(path.read_text()) for path in (ROOT / "jln").rglob("*.py")}
    assert sum(map(len, paths.values())) > 20
    assert [(path, name) for path, names in paths.items() for name in names if not listed(name, path)] == []


def test_what_is_taken_is_seen_wherever_it_stands():
    text = """
def later():
    from jax._src import core
    from jaxlib import gpu_triton
    import triton.backends.nvidia
    logging.getLogger("jax._src.xla_bridge")
    return gpu_triton._cuda_triton, self._own
"""
    expected = {"core", "gpu_triton", "triton.backends.nvidia", "jax._src.xla_bridge", "_cuda_triton"}
    assert taken(text) == expected
    assert not any(listed(name, "jln/nowhere.py") for name in expected)
