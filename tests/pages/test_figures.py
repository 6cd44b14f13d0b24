"""The figures of the pages on benchmarks, beside the results in `benchmarks/results`."""

import json
import pathlib
import re

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text()
STEPS = {
    (step["name"], step["products"]): step["programs"]
    for step in json.loads((BENCHMARKS / "results" / "h200" / "steps.json").read_text())["steps"]
}
# What a column shows: the number of a program, as text, and whether its change beside Flax follows in brackets.
COLUMNS = {
    "kernels": ("kernels", str, False),
    "all, GB": ("bytes", lambda n: f"{n / 1e9:.1f}", False),
    "elsewhere, GB": ("bytes_outside_products", lambda n: f"{n / 1e9:.1f}", True),
    "temporary, GB": ("temporary_bytes", lambda n: f"{n / 1e9:.2f}", True),
}


def expected(header, step, variant):
    """The cells of a row. From the first column that names cuBLAS on they are of the programs with its products."""
    cells, products = [], "XLA"
    for column in header:
        products = "cuBLAS" if "cuBLAS" in column else products
        fact, shown, is_compared = COLUMNS[column.removesuffix(", cuBLAS")]
        programs = STEPS[step, products]
        found, flax = (programs[name][fact] for name in (variant, "flax"))
        change = f" ({found / flax - 1:+.1%})".replace("%", " %")
        cells.append(shown(found) + (change if is_compared and variant != "flax" else ""))
    return cells


@pytest.mark.parametrize("step", sorted({step for step, _ in STEPS}))
def test_the_table_of_a_whole_step_has_those_of_the_results(step):
    (table,) = re.findall(rf"^\| `{step}` (\|.*kernels.*|\|.*GB.*)\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
    header = [cell.strip() for cell in table[0].strip("| ").split("|")]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table[1].splitlines()]
    assert len(rows) > 4
    for variant, *cells in rows:
        assert cells == expected(header, step, variant.removesuffix(", and plain jnp")), variant
