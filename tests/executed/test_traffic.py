"""Compiled kernels of norms issue their instructions in less time than memory takes to move their arrays."""

import math

import jax.numpy as jnp
import pytest

import traffic
from cases import Case, check

# Widths of real models, and so many rows that a program has four tiles or more and what it does once counts for little.
# With parameters in float32: heads, whose norms stand beside a rotary embedding (benchmarks/qk_norm.py).
ELEMENTS = 196_608
WIDTHS = [Case("layer_norm", (ELEMENTS // h, h), "bfloat16", "small-h200") for h in (128, 256, 768, 1024, 4096)]
HEADS = [
    Case(operator, (ELEMENTS // h, h), "bfloat16", "small-h200", parameters="float32")
    for operator in ("rms_norm", "layer_norm")
    for h in (64, 128, 256)
]
# The most that the forward and the backward kernel may take. The rest of the time is for what PTX does not show:
# addresses, waits, what the compiler adds.
LIMITS = {WIDTHS[2]: (0.69, 0.83), HEADS[1]: (0.35, 0.46), HEADS[3]: (0.49, 0.6)}
# How many arrays of rows a kernel reads and writes: x and y; dy, x and dx.
ARRAYS = {"jln_forward_kernel": 2, "jln_backward_kernel": 3}


def issue_shares(case, program) -> dict[str, float]:
    """Return {kernel: the time to issue its instructions, as a part of the time to move its arrays of rows}."""
    nbytes = math.prod(case.shape) * jnp.dtype(case.dtype).itemsize
    return {
        found.kernel: traffic.issue_share(found.issued, ARRAYS[found.kernel] * nbytes)
        for found in traffic.of(program, case.large)
        if found.kernel in ARRAYS
    }


@pytest.mark.parametrize("case", LIMITS, ids=str)
def test_instructions_take_less_time_than_memory(case):
    found = issue_shares(case, check(case).program)
    assert found.keys() == ARRAYS.keys()
    assert all(share < limit for share, limit in zip(found.values(), LIMITS[case], strict=True)), found
