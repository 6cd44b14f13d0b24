"""Tests of the limits by which `python -m jln check` judges: they accept what is right and reject what is wrong."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jln._tools import accuracy
from jln._tools.catalogue import EPSILON, OPERATORS
from jln._tools.check_all import DTYPES
from jln._tools.workload import Init, Workload

INITS = get_args(Init)
SEEDS = range(3)


def judge(name, shape, dtype, init="normal", seed=0, features=20):
    workload = Workload.sized(OPERATORS[name], shape, features, dtype)
    return workload, accuracy.Judge(workload, *workload.draw(init, seed))


def all_are_right(name, dtype, implementation, seeds):
    """Check that every result of x of 7x100 is accepted, for each kind of data and each seed.

    100 is no power of two, so that a sum divided by it gives a mean that is not exact.
    """
    for init in INITS:
        for seed in seeds:
            workload, of = judge(name, (7, 100), dtype, init, seed)
            for line in of.accuracies(accuracy.exact(workload, implementation=implementation)):
                assert line.ok, (init, seed, line)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_right_rules_are_accepted(name, dtype):
    all_are_right(name, dtype, "xla", SEEDS)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_right_rules_and_kernels_are_accepted_over_many_seeds(name, dtype, implementation):
    all_are_right(name, dtype, implementation, range(20))


def layer_norm(slip=None):
    """Return LayerNorm in plain jnp with one slip in it, or none.

    Its result and each gradient are rounded once.
    """

    def terms(x, scale):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(wide, -1, keepdims=True)
        two_passes = jnp.mean((wide - mean) ** 2, -1, keepdims=True)
        one_pass = jnp.mean(wide * wide, -1, keepdims=True) - mean**2
        variance = jnp.maximum(one_pass, 0) if slip == "one-pass variance" else two_passes
        rstd = jax.lax.rsqrt(variance + EPSILON)
        return (wide - mean) * rstd, rstd, scale.astype(wide.dtype)[None, :]

    @jax.custom_vjp
    def norm(x, scale, offset):
        x_hat, _, s = terms(x, scale)
        return (x_hat * s + offset.astype(s.dtype)[None, :]).astype(x.dtype)

    def backward(saved, dy):
        x, scale = saved
        x_hat, rstd, s = terms(x, scale)
        dy = dy.astype(s.dtype)
        c1, c2 = (jnp.mean(dy * s * a, -1, keepdims=True) for a in (1, x_hat))
        if slip == "c1 rounded to bfloat16":
            c1 = jax.lax.reduce_precision(c1, exponent_bits=8, mantissa_bits=7)
        if slip == "c2 dropped":
            c2 = 0 * c2
        dx, dscale, doffset = rstd * (dy * s - c1 - x_hat * c2), jnp.sum(dy * x_hat, 0), jnp.sum(dy, 0)
        if slip == "dscale off by a percent":
            dscale = 1.01 * dscale
        if slip == "dx off by a percent":
            dx = 1.01 * dx
        if slip == "an element of doffset off":
            doffset = doffset.at[3].mul(1.1)
        return dx.astype(x.dtype), dscale.astype(scale.dtype), doffset.astype(x.dtype)

    norm.defvjp(lambda x, scale, offset: (norm(x, scale, offset), (x, scale)), backward)
    return norm


# For each slip the data that shows it, and the results that are off then. In 16 bits the rounding of c1 shows only
# where c1 is large beside dx, and one pass loses the variance only where the mean is large.
SLIPS = {
    "dscale off by a percent": ("normal", {"dscale"}),
    "dx off by a percent": ("normal", {"dx"}),
    "c2 dropped": ("normal", {"dx"}),
    "c1 rounded to bfloat16": ("large-mean", {"dx"}),
    "one-pass variance": ("large-mean", {"y", "dx", "dscale"}),
    "an element of doffset off": ("large-mean", {"doffset"}),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_slips_are_rejected_by_what_they_break(dtype):
    rules = {slip: layer_norm(slip) for slip in (None, *SLIPS)}
    for seed in SEEDS:
        known = {init: judge("layer_norm", (64, 1024), dtype, init, seed)[1] for init in ("normal", "large-mean")}
        for init in known:
            assert all(line.ok for line in known[init].accuracies(rules[None]))
        for slip, (init, results) in SLIPS.items():
            lines = known[init].accuracies(rules[slip])
            assert {line.name for line in lines if not line.ok} == results, (slip, seed, lines)


def test_limits_are_no_wider_than_what_they_are_made_of():
    """The limits for well-conditioned float32 data are at most plain jnp's error twice and some thirty roundings."""
    workload, of = judge("layer_norm", (16, 128), "float32")
    for line in of.accuracies(accuracy.exact(workload, implementation="xla")):
        assert line.limit - 2 * line.plain_error < 4e-6 * line.largest, line
        assert line.rms_limit - 2 * line.rms_plain_error < 1e-6 * line.largest, line


def test_overflow_is_no_error_where_the_truth_overflows_too():
    true = np.array([1e6, 2.0])
    right, wrong = np.array([np.inf, 2], "float16"), np.array([-np.inf, 2], "float16")
    assert accuracy.deviation(right, true) == (0, 0)
    assert accuracy.deviation(wrong, true) == (np.inf, np.inf)


def test_the_root_mean_square_of_large_numbers_does_not_overflow():
    largest, rms = accuracy.deviation(np.array([3e200, -4e200]), np.zeros(2))
    assert largest == 4e200 and rms == pytest.approx(np.sqrt(12.5) * 1e200)
