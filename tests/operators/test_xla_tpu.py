"""Tests on a CPU, against float64, of XLA's rules for a TPU and for a GPU.

`benchmarks/tpu.py` compiles them for TPUs that are not here, `tests/program` for GPUs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from jln._junction import operations

OPERATORS = workbench.OPERATORS | workbench.LINEAR_OPERATORS | workbench.GATED | workbench.FORMS
# Rows of a ragged length; few features and many, which are one operation and several.
ROWS, H, FEATURES = 37, 100, (16, 700)


@pytest.fixture(params=["_formula_tpu", "_formula"], ids=["TPU", "GPU"])
def elsewhere(request, monkeypatch):
    for operation in (operations.forward, operations.backward, operations.forward_in_one, operations.backward_in_one):
        assert operation._formula_tpu is not operation._formula
        monkeypatch.setattr(operation, "_formula_cpu", getattr(operation, request.param))


DTYPES = ("float32", "float16", "float64", "bfloat16")
CASES = [
    (name, features, DTYPES[i % 4], mean)  # an operator in one dtype, its neighbours in others
    for i, (name, operator) in enumerate(OPERATORS.items())
    for features in (FEATURES if operator.entry.is_linear else (0,))
    for mean in ((0.0,) if operator.entry.is_gated else (0.0, 1000.0))
]


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("name", "features", "dtype", "mean"), CASES)
def test_accuracy(name, features, dtype, mean):
    """The rules are as accurate as all implementations must be, for rows whose mean is 1000 times their spread, too."""
    operator = OPERATORS[name]
    operands = workbench.arguments(operator, (ROWS, H), dtype, features=(features,) * bool(features), mean=mean)
    workbench.check(operator, operands, "xla")


@pytest.mark.usefixtures("elsewhere")
def test_small_cotangents_in_float16():
    """A gate's gradient is made of what is less than float16 has, where rows are large."""
    x, residual = (4096 * workbench.normal(i, (ROWS, H), "float16") for i in range(2))
    gate, weights = workbench.normal(2, (H,), "float32"), workbench.normal(3, (ROWS, H), "float32")

    def dgate(module, wide=lambda a: a, **how):
        def f(gate, residual):
            return jnp.sum(1e-4 * weights * module.add_rms_norm(wide(x), residual, gate=wide(gate), **how)[0])

        return jax.jit(jax.grad(f, (0, 1)))(gate, wide(residual))[0]

    true = dgate(jln.reference, lambda a: a.astype("float64"))
    np.testing.assert_allclose(dgate(jln, implementation="xla"), true, rtol=0.02, atol=0.01 * np.max(np.abs(true)))


def test_a_program_for_a_tpu_has_these_rules():
    """A program that is lowered for a TPU has no barrier behind a sum, as one for a CPU has."""
    x = jax.ShapeDtypeStruct((ROWS, H), "bfloat16")

    def lowered(platform):
        return jax.jit(jln.add_rms_norm).trace(x, x).lower(lowering_platforms=(platform,)).as_text()

    assert "optimization_barrier" in lowered("cpu") and "optimization_barrier" not in lowered("tpu")
