"""The table of a junction's arrays: what follows from it agrees with what the formulas do."""

import jax
import jax.numpy as jnp
import pytest

import workbench
from jln._junction import launches, operations
from jln._junction.arrays import OPERANDS, TABLE, Arrays, Norm, Shape, Switches, reads_of_results
from jln._triton.chip import CHIPS
from jln._triton.target import Recorder

IN_EIGHT_BITS = {"one scale": "y_max", "blocks": "block_scale"}
# The sides, what y is in, and what is wanted: each result by itself and all; in eight bits a part alone, too, as the
# scales of blocks of which nobody reads the values are those of their dtype.
RESULTS = [name for name, array in TABLE.items() if array.made_of and not array.is_operand]
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
    y, total, rstd = (reads_of_results(Arrays(**{name: "float32"})) for name in ("y", "total", "rstd"))
    assert y > total == rstd
    assert reads_of_results(Arrays()) == set() == reads_of_results(Arrays(y=(None, None)))
