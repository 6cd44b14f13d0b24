"""The derivation in jln/README.md: it has every numbered term, and quotes formulas and kernels as they are."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "jln/README.md").read_text()
LESSON = re.findall(r"^\((\d+)\) (.*)\n((?:      (?:jnp|kernel) .*\n)+)", PAGE.split("## The derivation")[1], re.M)
SOURCES = {
    who: "".join(p.read_text() for files in of for p in sorted((ROOT / "jln/_junction").glob(files)))
    for who, of in {"jnp": ("**/formulas.py", "gradients.py"), "kernel": ("kernels/*.py",)}.items()
}


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_lesson_has_every_numbered_term():
    defined = re.findall(r"^    \((\d+)\) .*=", SOURCES["jnp"], re.M)
    assert sorted(number for number, _, _ in LESSON) == sorted(defined) and len(defined) > 30


@pytest.mark.parametrize(("number", "formula", "quoted"), LESSON, ids=[number for number, _, _ in LESSON])
def test_the_lesson_quotes_what_is_there(number, formula, quoted):
    assert words(f"({number}) {formula}") in words(SOURCES["jnp"])
    for who, code in re.findall(r"(jnp|kernel) +(.*)", quoted):
        assert code.removesuffix("...").rstrip() in SOURCES[who]
    cited = re.search(rf"# (\(\d+\), )*\({number}\)", SOURCES["kernel"])
    assert cited is None or "kernel" in quoted
