"""Tests of the API reference, jln/API.md: current, with every public name; and docstrings have every argument."""

import ast
import importlib
import re

import pytest

import api_reference
import jln
from api_reference import IN_PROSE, PAGE, SECTIONS


def test_the_page_is_what_the_source_says():
    assert PAGE.read_text() == api_reference.page(), "python tests/pages/api_reference.py writes it"


@pytest.mark.parametrize("path", {path: None for _, path, _ in SECTIONS})
def test_every_public_name_is_on_the_page(path):
    module = importlib.import_module(path)
    public = {*getattr(module, "__all__", ())} - {"reference"}  # a module with a section
    if module is jln.reference:
        public = {name for name in jln.__all__ if hasattr(module, name)}
    listed = {name for _, of, names in SECTIONS for name in names if of == path}
    assert public - listed == IN_PROSE.get(path, set())
    assert [name for name in public if not re.search(rf"`(\w+\.)*{name}[(`]", PAGE.read_text())] == []


CALLS = {
    (path, name): call
    for _, path, names in SECTIONS
    if path != "jln.reference"  # whose arguments are the operators'
    for public in names
    for name, call in api_reference.calls(path, public).items()
    if call[0] is not None
}


def named(text: str, path: str) -> list[str]:
    """The arguments of the entry, of this module or of jln, that "as of" names; none where that is a framework's."""
    of = re.search(r"\bas of `(?:jln\.)?(\w+)`", text)
    return api_reference.names((CALLS.get((path, of[1])) or CALLS["jln", of[1]])[0]) if of else []


@pytest.mark.parametrize(("path", "name"), CALLS)
def test_every_argument_is_said_here_or_in_the_entry_that_is_named(path, name):
    arguments, docstring = CALLS[path, name]
    said = api_reference.described(docstring)
    elsewhere = named(docstring.splitlines()[0], path)
    assert [a for a in api_reference.names(arguments) if a not in said and a not in elsewhere] == []
    for argument, description in said.items():
        if re.match("as of `", description) and (others := named(description, path)):
            assert argument in others, description


def test_what_a_docstring_says_of_arguments_is_found():
    docstring = "Do.\n\nArgs:\n  a, b: as of `f`.\n  *c: `[H]`: more\n    of it.\n\nReturns:\n  d: not this."
    assert api_reference.described(docstring) == {"a": "as of `f`.", "b": "as of `f`.", "c": "`[H]`: more of it."}
    function = ast.parse("def f(self, a: int, b=(1, 2), *c, d: str | None = None, e=_E, g=h.i, **k): pass").body[0]
    assert isinstance(function, ast.FunctionDef) and {*api_reference.names(function.args)} == {*"abcdegk"}
    assert api_reference.signature("f", function.args) == "f(a, b=(1, 2), *c, d=None, e=..., g=h.i, **k)"
