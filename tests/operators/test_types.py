"""Types of the norms' results: as the annotations say, which pyright checks of this file, and as they are."""

from typing import assert_type

import jax

import jln
import workbench


def test_results_are_arrays_unless_they_are_quantized():
    x = workbench.normal(0, (4, 64), "float32")
    y, by_none = assert_type(jln.rms_norm(x), jax.Array), assert_type(jln.rms_norm(x, quantize=None), jax.Array)
    one_scale = assert_type(jln.layer_norm(x, quantize=jln.Float8(0.1)), jln.Quantized)
    z, total = assert_type(jln.add_rms_norm(x, x, quantize=jln.MXFloat8()), tuple[jln.Quantized, jax.Array])
    assert all(isinstance(a, jax.Array) for a in (y, by_none, total, one_scale.values))
    assert isinstance(one_scale, jln.Quantized) and isinstance(z, jln.Quantized)
