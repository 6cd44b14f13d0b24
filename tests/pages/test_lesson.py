"""Tests of the derivation in jln/README.md: it is what docstrings and comments say, and has every numbered term."""

import re

import lesson

BLOCKS = re.findall(r"```text\n(\(\d+\).*?)```", lesson.PAGE.read_text(), re.S)
IN_KERNELS_ALONE = {21, 22}  # another form of (13)


def test_the_page_is_what_the_sources_say():
    assert lesson.PAGE.read_text() == lesson.page(), "python tests/pages/lesson.py writes it"


def test_the_page_has_every_term_once():
    numbers = [int(number) for block in BLOCKS for number in re.findall(r"^\((\d+)\)", block, re.M)]
    assert sorted(numbers) == sorted(lesson.formulas()) and len(numbers) > 30


def test_every_term_is_cited_where_it_is_computed():
    quoted = lesson.quotations()
    assert {*quoted} == {*lesson.formulas()}, "a term that no line cites, or a number that is no term's"
    in_kernels_alone = {number for number, lines in quoted.items() if all(who != "jnp" for who, _ in lines)}
    assert in_kernels_alone == IN_KERNELS_ALONE


def test_what_is_quoted_is_the_whole_statement(tmp_path):
    source = tmp_path / "source.py"
    source.write_text("y = f(  # (1), (2), rounded\n    x,\n    g(x),\n)\n# (3) is prose\nz = (y,)  # by (4)\n")
    assert [*lesson.citations(source)] == [(1, "y = f(x, g(x))"), (2, "y = f(x, g(x))")]
