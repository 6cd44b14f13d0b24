"""Tests of the rules for a TPU on a CPU, against float64: `benchmarks/tpu.py` compiles them for TPUs not here."""

import jax
import pytest

import jln
import workbench
from jln._junction import operations

OPERATORS = workbench.OPERATORS | workbench.LINEAR_OPERATORS | workbench.GATED | workbench.FORMS
# Rows of a ragged length; few features and many, which are one operation and several.
ROWS, H, FEATURES = 37, 100, (16, 700)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    for operation in (
        operations.forward,
        operations.backward,
        operations.forward_in_one,
        operations.backward_in_one,
    ):
        assert operation._formula_tpu is not operation._formula
        monkeypatch.setattr(operation, "_formula_cpu", operation._formula_tpu)


DTYPES = ("float32", "float16", "float64", "bfloat16")
CASES = [
    (name, features, DTYPES[i % 4], mean)  # an operator in one dtype, its neighbours in others
    for i, (name, operator) in enumerate(OPERATORS.items())
    for features in (FEATURES if operator.entry.is_linear else (0,))
    for mean in ((0.0,) if operator.entry.is_gated else (0.0, 1000.0))
]


@pytest.mark.usefixtures("as_on_a_tpu")
@pytest.mark.parametrize(("name", "features", "dtype", "mean"), CASES)
def test_accuracy(name, features, dtype, mean):
    """The rules are as accurate as all implementations must be, for rows whose mean is 1000 times their spread, too."""
    operator = OPERATORS[name]
    operands = workbench.arguments(operator, (ROWS, H), dtype, features=(features,) * bool(features), mean=mean)
    workbench.check(operator, operands, "xla")


def test_a_program_for_a_tpu_has_these_rules():
    """A program that is lowered for a TPU has no barrier behind a sum, as one for a CPU has."""
    x = jax.ShapeDtypeStruct((ROWS, H), "bfloat16")

    def lowered(platform):
        return jax.jit(jln.add_rms_norm).trace(x, x).lower(lowering_platforms=(platform,)).as_text()

    assert "optimization_barrier" in lowered("cpu") and "optimization_barrier" not in lowered("tpu")
