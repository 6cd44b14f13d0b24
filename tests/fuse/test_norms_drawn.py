"""A few norms and near-norms that `fuzz.py` writes, always the same."""

import numpy as np
import pytest

import fuzz


@pytest.mark.usefixtures("promoted_ranks")
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("off", [False, True], ids=["norm", "near-norm"])
def test_norms_are_found_and_near_norms_left(seed, off):
    plan = fuzz.drawn(np.random.default_rng([seed, 1, off]), off)
    assert fuzz.check(plan) == [], plan
