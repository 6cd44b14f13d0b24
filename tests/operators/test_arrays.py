"""The table of a junction's arrays: what follows from it agrees with what the formulas do."""

import jax
import jax.numpy as jnp
import pytest

import workbench
from jln._junction import launches, operations
from jln._junction.arrays import (
    OPERANDS,
    RESULTS,
    TABLE,
    Arrays,
    Norm,
    Shape,
    Switches,
    reads_of_gradients,
    reads_of_results,
)
from jln._triton.chip import CHIPS
from jln._triton.target import Recorder


def test_every_array_has_a_line_that_names_others():
    assert {*TABLE} == {*Arrays._fields} and {*OPERANDS}.isdisjoint(RESULTS)
    assert all(name in TABLE for array in TABLE.values() for name in (*array.made_of, *array.more))


# What a norm by itself has, and one on both sides of a sum.
ALONE = ("x", "residual", "scale", "offset", "x_bias", "gate", "z", "x_z")
BOTH = ("x", "residual", "scale", "x_scale", "gate")


@pytest.mark.parametrize(("operand", "both_sides"), [(n, False) for n in ALONE] + [(n, True) for n in BOTH])
def test_a_gradient_reads_what_its_line_says(operand, both_sides):
    """A gradient is not a number where an array of its line is not, and does not see the others."""
    of_row, of_column, of_number = (workbench.normal(i, s, "float32") for i, s in enumerate([(4, 8), (1, 8), (4, 1)]))
    norm = Norm(-1, 1e-6, Switches(subtract_mean=not both_sides), both_sides=both_sides)
    names = ["dy", "dy2", "dy3", "dtotal", "total", "rstd", "scale", "x", "gate"]
    names += ["x_scale", "x_rstd"] if both_sides else ["mean", "x_bias"]
    if operand in ("z", "x_z"):  # of no sum
        names = [*(name for name in names if name != "dtotal"), operand]
    if operand in ("z", "x_z", "residual") and not both_sides:  # without gates
        names = [name for name in names if name not in ("x_bias", "gate")]
    of = {"ROW": of_row, "COLUMN": of_column, "NUMBER": of_number}
    saved = Arrays(**{name: of[TABLE[name].shape.name] for name in names})
    wanted = Arrays(**{operand: "float32"})
    reads = reads_of_gradients(norm, wanted)
    for name in names:
        spoilt = saved._replace(**{name: getattr(saved, name) * jnp.nan})
        gradient = getattr(operations.backward._formula(spoilt, norm, wanted, 0), operand)
        assert bool(jnp.isnan(gradient).any()) == (name in reads), name


IN_EIGHT_BITS = {"one scale": "y_max", "blocks": "block_scale"}
# The sides, what y is in, and what is wanted: each result by itself and all; in eight bits a part alone, too, as the
# scales of blocks of which nobody reads the values are those of their dtype.
WANTED = []
for side, other in (("one side", "x_rstd"), ("both sides", "mean")):
    every = [name for name in RESULTS if name not in (*IN_EIGHT_BITS.values(), other)]
    WANTED += [(side, "float32", wanted) for wanted in (*([name] for name in every), every)]
    for kind, most in IN_EIGHT_BITS.items():
        WANTED += [(side, kind, wanted) for wanted in (["y"], ["y", most], [most], ["y", most, "total"])]


@pytest.mark.parametrize(("side", "kind", "wanted"), WANTED, ids=lambda a: a if isinstance(a, str) else "-".join(a))
def test_results_are_made_of_what_their_lines_say(side, kind, wanted):
    """Whatever results are wanted, their operands are enough for the formula and for the kernels' launches."""
    both_sides = side == "both sides"
    norm = Norm(-1, 1e-6, Switches(not both_sides), both_sides=both_sides, blocks="float8_e4m3fn" * (kind == "blocks"))
    sizes = {Shape.ROW: (4, 64), Shape.COLUMN: (1, 64), Shape.NUMBER: (4, 1)}
    others = ("offset", "x_bias") if both_sides else ("x_scale",)
    names = [n for n in OPERANDS if n not in ("z", "x_z", "added", "kernel", "bias", "y_scale", *others)]
    operands = Arrays(**{n: workbench.normal(i, sizes[TABLE[n].shape], "float32") for i, n in enumerate(names)})
    if kind == "one scale":
        operands = operands._replace(y_scale=jnp.full((1, 1), 0.25))
    dtypes = {} if kind == "float32" else {"y": "float8_e4m3fn", "block_scale": "uint8"}
    every = Arrays(**{name: dtypes.get(name, "float32") for name in wanted})
    read = operands.only(reads_of_results(every))
    expected, results = (operations.forward._formula(a, norm, every, 0) for a in (operands, read))
    recorder = Recorder(CHIPS["h200"])
    launched = jax.eval_shape(lambda read: launches.forward(read, norm, every, 0, recorder), read)
    assert recorder.launches
    for name in wanted:
        formula, kernels = (getattr(of, name) for of in (results, launched))
        assert jnp.array_equal(formula, getattr(expected, name))
        assert (formula.shape, formula.dtype) == (kernels.shape, kernels.dtype)


def test_results_are_made_of_operands():
    assert (
        reads_of_results(Arrays(y="float32"))
        > reads_of_results(Arrays(total="float32"))
        == reads_of_results(Arrays(rstd="float32"))
    )
    assert reads_of_results(Arrays()) == set() == reads_of_results(Arrays(y=(None, None)))
