"""The API reference, jln/API.md, made from the docstrings by griffe2md.

    python tests/pages/api_reference.py           # write the page
    python tests/pages/api_reference.py --print   # print it

griffe2md renders each docstring. This file chooses what the page has and in which order, and makes the output fit for
Markdown alone: public names, links within the page, and signatures that are wrapped.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys
import textwrap
from collections.abc import Collection
from typing import Any

import griffe
from griffe2md import render_object_docs

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "jln/API.md"

OPERATORS = (
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm_add",
    "rms_norm_add",
    "rms_norm_add_rms_norm",
    "rms_norm_gated",
    "layer_norm_linear",
    "rms_norm_linear",
    "add_layer_norm_linear",
    "add_rms_norm_linear",
    "rms_norm_add_rms_norm_linear",
)
NORMS, PAIRS = ("LayerNorm", "RMSNorm"), ("LayerNormLinear", "RMSNormLinear")
# Title, module, and what the page has of it: (name, the methods that it has, too).
SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Models as they are", "jln", ("fuse",)),
    ("Operators", "jln", OPERATORS),
    ("Eight bits", "jln", ("Float8", "MXFloat8", "Quantized", "Scaled")),
    ("References", "jln.reference", OPERATORS),
    ("Flax NNX", "jln.nnx", ("fuse", *NORMS, *PAIRS)),
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
    ("Checkpoint policies", "jln.checkpoint_policies", ("offload_dots_with_no_batch_dims",)),
)
# Public, and said in the docstring of its module.
IN_PROSE = {
    "jln": {"PRODUCT", "STATISTICS", "reference"},
    "jln.testing": {"TOLERANCES"},
    "jln.checkpoint_policies": {
        "dots_and_statistics_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_and_statistics_saveable",
        "dots_with_no_batch_dims_saveable",
    },
}
# Of classes; what else is public there is for the library's own use.
METHODS = ("__call__", "row", "dequantized")
CONFIG = {
    "heading_level": 3,
    "members": [],
    "show_bases": False,
    "summary": False,
    "separate_signature": True,
    "inherited_members": False,
}
WIDTH = 100
HEAD = """# API reference

Made from the docstrings by `python tests/pages/api_reference.py`, which writes this file; a test holds it current.

Shapes: `M` rows (all leading axes together), `H` elements of a row (the normalised axis), `N` output features of a
Linear. "As of" another entry means: the same shapes, dtypes, default and errors.
"""


@functools.cache
def loaded() -> griffe.Module:
    # Several arguments in one line, which griffe would warn of, are held to the signatures by a test.
    options: Any = {"warnings": False}
    loader = griffe.GriffeLoader(
        search_paths=[str(ROOT)], docstring_parser=griffe.Parser.google, docstring_options=options
    )
    package = loader.load("jln")
    loader.resolve_aliases(external=False)
    return package


def target(found: griffe.Object | griffe.Alias) -> griffe.Object:
    return found.final_target if isinstance(found, griffe.Alias) else found


def method(cls: griffe.Class, name: str) -> griffe.Function | None:
    """The method of a class, its own or an inherited one."""
    for owner in (cls, *cls.mro()):
        found = owner.members.get(name)
        if found is not None and found.is_function:
            return target(found)
    return None


def parameters(function: griffe.Function) -> list[griffe.Parameter]:
    """The parameters of a function but self."""
    return [p for p in function.parameters if p.name != "self"]


def signature(name: str, function: griffe.Function) -> str:
    """A call with the names of the parameters and their defaults, in lines of at most `WIDTH`."""
    kinds, parts = griffe.ParameterKind, []
    for p in parameters(function):
        if p.kind is kinds.keyword_only and not any(part.startswith("*") for part in parts):
            parts.append("*")
        star = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(p.kind, "")
        has_default = p.default is not None and not star
        parts.append(f"{star}{p.name}" + (f"={shown(str(p.default))}" if has_default else ""))
    line = f"{name}({', '.join(parts)})"
    if len(line) > WIDTH:
        inner = textwrap.wrap(f"{', '.join(parts)},", WIDTH - 4, break_long_words=False, break_on_hyphens=False)
        line = "\n".join([f"{name}(", *(f"    {part}" for part in inner), ")"])
    return f"```\n{line}\n```"


def shown(default: str) -> str:
    """A default value; of a private name nothing but that there is one."""
    return "..." if default.startswith("_") else default


def rendered(found: griffe.Object) -> str:
    """The docstring in Markdown, without heading, signature, types (the text has shapes and dtypes) and dead links."""
    for section in found.docstring.parsed if found.docstring else ():
        if section.kind.value in ("parameters", "returns", "attributes", "raises"):
            for item in section.value:
                item.description = " ".join(item.description.split())
                if section.kind.value == "attributes" and item.name.endswith(","):
                    item.name += f" {str(item.annotation).strip('()')}"  # griffe's type of the first of several names
                item.annotation = item.annotation if section.kind.value == "raises" else None
        if section.kind.value in ("parameters", "attributes"):
            section.value = together(section.value)
    text = render_object_docs(found, CONFIG)
    text = re.sub(r"\A#+ [^\n]*\n+(```python\n.*?```\n)?", "", text, flags=re.S)
    text = re.sub(r"\[([^\]\n]*)\]\(#[^)]*\)", r"\1", text)
    text = re.sub(r"<code>(\w+)</code>", r"`\1`", text)
    text = re.sub(r"^- +\u2013 ", "- ", text, flags=re.M)
    text = re.sub(r"^- [*`]{1,2}([*\w, ]+?)[*`]{1,2} \u2013", lambda m: f"- {in_code(m[1])}:", text, flags=re.M)
    text = text.replace("**Parameters:**", "**Arguments**").replace(":**\n", "**\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def together(items: list[Any]) -> list[Any]:
    """The items of a list of arguments, those with one description as one."""
    found: dict[str, Any] = {}
    for item in items:
        if item.description in found:
            found[item.description].name += f", {item.name}"
        else:
            found[item.description] = item
    return list(found.values())


def in_code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def anchor(heading: str) -> str:
    """The anchor of a heading on GitHub."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def linked(text: str, module: str, names: Collection[str], own: str) -> str:
    """The text with every other entry that it names in code, but as an argument, as a link to that entry."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        candidates = (name,) if "." in name else (f"{module}.{name}", f"jln.{name}")
        full = next((n for n in candidates if n in names), own)
        return match[0] if full == own else f"[`{name}`](#{anchor(full)})"

    blocks = re.split(r"(```.*?```|^    [^\n]*$|^- `[^:\n]*`: )", text, flags=re.S | re.M)
    return "".join(b if i % 2 else re.sub(r"(?<![`\[])`([\w.]+)`(?!`)", link, b) for i, b in enumerate(blocks))


def described(found: griffe.Object) -> dict[str, str]:
    """The text that a docstring has on each argument, by its name."""
    rendered(found)  # which takes lists of names in one line apart
    sections = found.docstring.parsed if found.docstring else ()
    items = [item for s in sections if s.kind.value in ("parameters", "attributes") for item in s.value]
    return {name.strip("*"): item.description for item in items for name in item.name.split(", ")}


def calls(path: str, name: str) -> dict[str, tuple[griffe.Function, griffe.Object]]:
    """The calls of a public name by their own: itself or its constructor, and methods; with what has the docstring."""
    found = target(loaded()[f"{path}.{name}".removeprefix("jln.")])
    if not found.is_class:
        return {name: (found, found)}
    methods = {f"{name}.{its}": method(found, its) for its in ("__init__", *METHODS)}
    return {its: (call, found if "__init__" in its else call) for its, call in methods.items() if call is not None}


def entry(module: griffe.Module, path: str, name: str, names: Collection[str]) -> list[str]:
    """The parts of the page on one public name: heading, signature and docstring, of a class its methods' too."""
    found, full = target(module[name]), f"{path}.{name}"
    call = method(found, "__init__") if found.is_class else found
    parts = [f"### `{full}`", *([] if call is None else [signature(full, call)]), rendered(found)]
    for its in METHODS if found.is_class else ():
        if (own := method(found, its)) is not None:
            called = "layer" if its == "__call__" else f"{name[0].lower()}{name[1:]}.{its}"
            parts += [f"#### `{name}.{its}`", signature(called, own), rendered(own)]
    return [part if part.startswith(("#", "```")) else linked(part, path, names, full) for part in parts]


def page() -> str:
    package = loaded()
    names = {f"{path}.{name}": None for _, path, found in SECTIONS for name in found}
    titles = [title for title, _, _ in SECTIONS]
    parts = [HEAD, "\n".join(f"- [{title}](#{anchor(title)})" for title in titles)]
    for title, path, found in SECTIONS:
        module = package if path == "jln" else target(package[path.removeprefix("jln.")])
        parts.append(f"## {title}")
        if path != "jln":
            parts.append(linked(f"Module `{path}`. {rendered(module)}", path, names, ""))
        parts.append(" · ".join(f"[`{name}`](#{anchor(f'{path}.{name}')})" for name in found))
        parts += [part for name in found for part in entry(module, path, name, names)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(page(), end="")
    else:
        PAGE.write_text(page())
