"""Tests of the API reference, jln/API.md: it is what the docstrings say, and has every public name."""

import importlib
import re

import pytest

pytest.importorskip("griffe2md")

import api_reference
import jln
from api_reference import IN_PROSE, PAGE, SECTIONS


def test_the_page_is_what_the_docstrings_say():
    assert PAGE.read_text() == api_reference.page(), "python tests/pages/api_reference.py writes it"


@pytest.mark.parametrize("path", {path: None for _, path, _ in SECTIONS})
def test_every_public_name_is_on_the_page(path):
    module = importlib.import_module(path)
    public = getattr(module, "__all__", jln.__all__ if module is jln else ())
    if module is jln.reference:
        public = [name for name in jln.__all__ if hasattr(module, name)]
    described = {name for _, of, found in SECTIONS for name in found if of == path}
    assert {*public} - described == IN_PROSE.get(path, set())


CALLS = {
    f"{path}.{name}": call
    for _, path, found in SECTIONS
    if path != "jln.reference"  # whose arguments are the operators'
    for public in found
    for name, call in api_reference.calls(path, public).items()
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_said_here_or_in_the_entry_that_is_named(name):
    call, documented = CALLS[name]
    said = api_reference.described(documented)
    assert [p.name for p in api_reference.parameters(call) if p.name not in said] == []
    modules = [name.rpartition(".")[0], name.rpartition(".")[0].rpartition(".")[0], "jln"]
    for argument, description in said.items():
        if of := re.match(r"as of `(?:jln\.)?(\w+)`[.,]", description):
            entries = [f"{module}.{of[1]}{init}" for module in modules for init in ("", ".__init__")]
            other = next((CALLS[entry][0] for entry in entries if entry in CALLS), None)
            assert other is not None and argument in {p.name for p in api_reference.parameters(other)}, description


def test_every_link_leads_to_a_heading():
    text = PAGE.read_text()
    anchors = [api_reference.anchor(heading) for heading in re.findall(r"^#{1,4} (.*)$", text, flags=re.M)]
    links = re.findall(r"\]\(#([^)]*)\)", text)
    assert len(links) > 100 and {*links} <= {*anchors}
    assert all(anchors.count(link) == 1 for link in links), "GitHub numbers headings that are alike"


def test_nothing_but_markdown_is_left():
    """The page has no HTML, which griffe2md makes of types and of docstring paragraphs that look like a section."""
    assert re.findall(r"</?[a-z]+[^>\n]*>", re.sub(r"`[^`]*`", "", PAGE.read_text())) == []
