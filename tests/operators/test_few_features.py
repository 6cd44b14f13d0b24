"""The limit up to which one kernel multiplies the features behind a norm, too: when they are few."""

import jax
import pytest

import workbench
from jln._junction.arrays import Arrays, Junction, Norm, Switches
from jln._junction.linears.tiles import few_features
from workbench import LINEAR_OPERATORS

NORM = Norm(-1, workbench.EPSILON, Switches(subtract_mean=True))


def arguments(m, h, n, dtype):
    """Return (x, scale, offset, kernel, bias) for x of [m, h] and n features."""
    return workbench.arguments(LINEAR_OPERATORS["layer_norm_linear"], (m, h), dtype, features=(n,))


@pytest.mark.parametrize(
    ("precision", "fused"),
    [
        (None, True),
        (jax.lax.Precision.HIGHEST, True),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, True),
        (jax.lax.DotAlgorithmPreset.BF16_BF16_BF16, False),
        (jax.lax.DotAlgorithmPreset.F16_F16_F32, False),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, False),
    ],
)
def test_precision(precision, fused):
    """Algorithms of a product that the fused kernels do not have are left to XLA, to run or to refuse."""
    assert few("bfloat16", precision) == fused


@pytest.mark.parametrize(
    ("precision", "fused"),
    [
        (None, True),
        ((jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT), True),
        (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, True),
        ((jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST), False),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, False),
    ],
)
def test_precision_of_float32(precision, fused):
    """Float32 products that need more than TF32 are left to XLA, as on a GPU the fused kernels multiply in TF32."""
    assert few("float32", precision) == fused


def few(dtype, precision, n=16, implementation=None):
    """Return whether the operator leaves it to the launchers to fuse n features."""
    x, scale, offset, kernel, bias = arguments(16, 64, n, dtype)
    operands = Arrays(x, scale=scale, offset=offset, kernel=(kernel,), bias=(bias,))
    junction = Junction(NORM, implementation=implementation, precision=precision, features=(1,))
    return few_features(operands, junction)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 256), ("float16", 256), ("float32", 128), ("float64", 0)])
def test_few_features(dtype, most):
    """The limit of features counts all products behind a norm together, and depends on their dtype.

    With "xla" nothing is fused, nor are products that are multiplied in several dtypes.
    """
    for n in (16, 128, 129, 256, 257):
        assert few(dtype, None, n) == few(dtype, None, n, "triton") == (n <= most)
    assert not few(dtype, None, implementation="xla")
    x, scale, offset, kernel, _ = arguments(16, 64, most // 2 or 8, dtype)
    kernels = [(kernel,) * 2, (kernel,) * 3, (kernel, kernel.astype("float64"))]
    found = [
        few_features(
            Arrays(x, scale=scale, offset=offset, kernel=k, bias=(None,) * len(k)), Junction(NORM, features=(1,))
        )
        for k in kernels
    ]
    assert found == [most > 0, False, False]
