"""Batch invariance, for the tests of several operators."""

import jax
import numpy as np

import jln
import workbench
from workbench import OPERATORS


def assert_rows_are_independent(rows, width):
    """Assert that y and dx of one row, and of some, by themselves are bit for bit what they are among all rows.

    In float32: 16 bits would round away what another order of additions changes.
    """
    x, _, scale, offset = workbench.arguments(OPERATORS["layer_norm"], (rows, width), "float32")
    dy = workbench.normal(9, x.shape, x.dtype)

    def run(some):
        y, pullback = jax.vjp(lambda x: jln.layer_norm(x, scale, offset, implementation="triton"), x[some])
        return y, *pullback(dy[some])

    everything = run(slice(None))
    for some in (slice(rows // 2, rows // 2 + 1), slice(rows // 4, rows - 4)):
        for alone, among in zip(run(some), everything, strict=True):
            np.testing.assert_array_equal(alone, among[some])
