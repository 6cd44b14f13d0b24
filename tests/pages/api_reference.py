"""The API reference, jln/API.md: every public name's call and the first line of its docstring, read from the source.

python tests/pages/api_reference.py           # write the page
python tests/pages/api_reference.py --print   # print it
"""

import ast
import copy
import functools
import importlib.util
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "jln/API.md"


@functools.cache
def parsed(path: str) -> ast.Module:
    spec = importlib.util.find_spec(path)
    assert spec is not None and spec.origin is not None
    return ast.parse(pathlib.Path(spec.origin).read_text())


OPERATORS = tuple(
    node.name for node in parsed("jln.reference").body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"
)
NORMS, PAIRS = ("LayerNorm", "RMSNorm"), ("LayerNormLinear", "RMSNormLinear")
# Title, module, and what the page has of it.
SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Models as they are", "jln", ("fuse",)),
    ("Operators", "jln", OPERATORS),
    ("Eight bits", "jln", ("Float8", "MXFloat8", "Quantized", "Scaled")),
    ("References", "jln.reference", OPERATORS),
    ("Flax NNX", "jln.nnx", (*NORMS, *PAIRS)),
    ("Flax Linen", "jln.linen", (*NORMS, "LayerNormDense", "RMSNormDense")),
    ("Haiku", "jln.haiku", (*NORMS, *PAIRS)),
    ("Equinox", "jln.equinox", NORMS),
    ("What a model runs", "jln", ("explain", "Route")),
    (
        "Gradient checking",
        "jln.testing",
        (
            *("assert_vjp", "check_vjp", "assert_hvp", "check_hvp"),
            *("check_fuse", "assert_operators", "Report", "Row", "Tolerance"),
        ),
    ),
)
# Public, and described in the docstring of its module.
IN_PROSE = {
    "jln": {"PRODUCT", "STATISTICS"},
    "jln.testing": {"TOLERANCES"},
    "jln.checkpoint_policies": {
        "dots_and_statistics_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_and_statistics_saveable",
        "dots_with_no_batch_dims_saveable",
    },
}
CONSTANTS = "Constants and policies"
# Of classes; what else is public there is for the library's own use.
METHODS = ("__call__", "row", "dequantized")
HEAD = """# API reference

Every public name: how it is called, and the first line of its docstring. The rest of the docstring says each argument's
shapes and dtypes, what is returned and what is raised: `help(jln.layer_norm)`. There "as of" another entry means the
same shapes, dtypes, default and errors. `python tests/pages/api_reference.py` writes this page.
"""


@functools.cache
def definition(path: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The function or class with this name of a module of jln, which may import it from another."""
    for node in reversed(parsed(path).body):  # behind a function's overloads
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jln."):
            taken = {alias.name for alias in node.names} & {name, "*"}
            if taken and (found := definition(str(node.module), name)):
                return found
    return None


def ancestry(path: str, cls: ast.ClassDef) -> list[ast.ClassDef]:
    """The classes of the module that a class is made of, itself last; none of its framework's."""
    bases = [definition(path, base.id) for base in cls.bases if isinstance(base, ast.Name)]
    return [*(c for base in bases if isinstance(base, ast.ClassDef) for c in ancestry(path, base)), cls]


def calls(path: str, name: str) -> dict[str, tuple[ast.arguments | None, str]]:
    """The calls of a public name by their own: itself or its constructor, and methods; arguments and docstring of each.

    A class whose constructor is its framework's has no arguments here.
    """
    found = definition(path, name)
    assert found is not None, f"{path} has no {name}"
    if isinstance(found, ast.FunctionDef):
        return {name: (found.args, ast.get_docstring(found) or "")}
    members = [member for cls in ancestry(path, found) for member in cls.body]
    methods = {member.name: member for member in members if isinstance(member, ast.FunctionDef)}
    fields = [member for member in members if isinstance(member, ast.AnnAssign)]
    made = methods["__init__"].args if "__init__" in methods else of_fields(fields) if fields else None
    own = {f"{name}.{its}": methods[its] for its in METHODS if its in methods}
    return {
        name: (made, ast.get_docstring(found) or ""),
        **{its: (method.args, ast.get_docstring(method) or "") for its, method in own.items()},
    }


def of_fields(fields: list[ast.AnnAssign]) -> ast.arguments:
    """The arguments of a dataclass or a NamedTuple with these fields."""
    args = [ast.arg(ast.unparse(field.target)) for field in fields]
    defaults = [field.value for field in fields if field.value is not None]
    return ast.arguments([], args, None, [], [], None, defaults)


def names(arguments: ast.arguments) -> list[str]:
    """The names of the arguments but self."""
    return [node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg) and node.arg != "self"]


def signature(name: str, arguments: ast.arguments | None) -> str:
    """A call with the arguments' names and defaults; of a default that is private or made, that there is one."""
    if arguments is None:
        return name
    plain = copy.deepcopy(arguments)
    plain.args = [arg for arg in plain.args if arg.arg != "self"]
    for node in ast.walk(plain):
        if isinstance(node, ast.arg):
            node.annotation = None
    for defaults in (plain.defaults, plain.kw_defaults):
        hidden = [isinstance(d, ast.Call) or (isinstance(d, ast.Name) and d.id.startswith("_")) for d in defaults]
        defaults[:] = [ast.Constant(...) if hide else d for d, hide in zip(defaults, hidden, strict=True)]
    return f"{name}({ast.unparse(plain)})"


def described(docstring: str) -> dict[str, str]:
    """The text that a docstring has on each argument, by its name."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:  .*\n)+)", f"{docstring}\n", re.M)
    items = re.findall(r"^  (\S[^:]*): (.*(?:\n {4}.*)*)", "".join(sections), re.M)
    return {name.strip("*"): " ".join(text.split()) for each, text in items for name in each.split(", ")}


def wrapped(text: str) -> str:
    """The text in lines. Short code stays in one: a line with its "*" in front would be another item of a list."""
    text = re.sub(r"(?<=[\s(])`[^`]{,90}`|\[[^]]*\]", lambda code: code[0].replace(" ", "\0"), text)
    indent = "  " * text.startswith("- ")
    lines = textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def entry(path: str, name: str) -> str:
    """The item of the page on one public name: its call, of a class those of its methods, too, and what it is."""
    found = calls(path, name)
    called = {name: name, f"{name}.__call__": "layer"}
    signatures = [signature(called.get(its, its.lower()), arguments) for its, (arguments, _) in found.items()]
    return wrapped(f"- {', '.join(f'`{each}`' for each in signatures)}: {found[name][1].splitlines()[0]}")


def page() -> str:
    titles = [*(title for title, _, _ in SECTIONS), CONSTANTS]
    links = " · ".join(f"[{title}](#{title.lower().replace(' ', '-')})" for title in titles)
    parts = [HEAD.strip(), wrapped(links)]
    for title, path, public in SECTIONS:
        about, _, more = (ast.get_docstring(parsed(path)) or "").partition("\n")
        parts += [f"## {title}", *([] if path == "jln" else [wrapped(f"`{path}`: {about}")])]
        if path == "jln.reference":
            parts.append(wrapped(f"{', '.join(f'`{name}`' for name in public)}. {more.split('. ')[0].strip()}."))
        else:
            parts.append("\n".join(entry(path, name) for name in public))
    parts.append(
        f"## {CONSTANTS}\n\nThey are described in the docstrings of `jln.checkpoint_policies` and `jln.testing`."
    )
    items = (", ".join(f"`{path}.{name}`" for name in sorted(names)) for path, names in IN_PROSE.items())
    return "\n\n".join([*parts, "\n".join(wrapped(f"- {item}") for item in items)]) + "\n"


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(page(), end="")
    else:
        PAGE.write_text(page())
