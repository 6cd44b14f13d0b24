"""The fuzzer: some of its cases, and that it notices what is wrong."""

import jax
import pytest

from called import answered
from drawn import draw
from jln._junction import eight_bits, formulas, gradients
from judged import judge


def is_wrong(seed):
    _, wrong = judge(*answered(draw(seed)))
    return bool(wrong)


# Cases that were wrong once:
WRONG = {
    15858: "several Linears whose scale alone examples have of their own",
    16732: "eight bits of a row without others, of a product that sums over rows",
    27537: "eight bits by two launches of a norm whose parameters are of heads",
    729296812: "eight bits behind a gate of rows that no kernel takes",
    524643189: "a cotangent of 16 bits, added up over examples that share the rows, in front of gradients in float32",
    1153: "a residual alone under a mean over rows",
    200000050: "more rows than a row has elements, by the sums that are right for fewer",
    900000092: "a second derivative outside of jit of a norm and few features, on JAX 0.12",
    994436056: "an offset alone, two loops, and a cotangent of one number, in some of the fuzzer's processes",
}


@pytest.mark.parametrize("seed", [*range(8), 10, *WRONG])
def test_some_cases(seed):
    assert "eight bits" not in WRONG.get(seed, "") or draw(seed).quantize is not None
    assert not is_wrong(seed)


@pytest.fixture
def recompiled():
    """Programs of before the test and of the test, kept apart."""
    jax.clear_caches()
    yield
    jax.clear_caches()


LARGEST = eight_bits.largest
# The function that is wrong, what it does, and the seed of a case that it makes wrong.
SLIPS = {
    "silu' without its second term": ("silu", lambda z, dtype: (z * jax.nn.sigmoid(z), jax.nn.sigmoid(z)), 3),
    "scale for 1 + scale": ("effective_scale", lambda a, dtype, _: 1.0 if a is None else a.astype(dtype), 10),
    "a largest number that is too small": ("largest", lambda y, axis=None: 0.99 * LARGEST(y, axis), 2),
}


@pytest.mark.parametrize(("name", "wrong", "seed"), SLIPS.values(), ids=SLIPS)
def test_a_slip_is_noticed(name, wrong, seed, monkeypatch, recompiled):
    for module in (formulas, gradients, eight_bits):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, wrong)
    assert is_wrong(seed)
