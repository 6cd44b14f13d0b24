"""Whether instructions keep up with memory, where memory is what a norm waits for."""

import math

import jax.numpy as jnp
import pytest

import traffic
from cases import Case, check, cases

# Widths of real models, and enough rows for sixteen tiles a program, so that what a program does once counts for little.
WIDTHS = (128, 256, 768, 1024, 4096)
ELEMENTS = 786_432
MEMORY = [Case("layer_norm", (ELEMENTS // h, h), d, "small-h200") for h in WIDTHS for d in ("bfloat16", "float32")]
# x and y; dy, x and dx.
ARRAYS = {"jln_forward_kernel": 2, "jln_backward_kernel": 3}
LIMIT = 0.6  # the rest is for what PTX does not show: addresses, waits, what the compiler adds
# Over the limit, and by how much: a value more than this is a step back, one below the limit a line to strike out here.
OVER = {}


def issue_shares(case, program) -> dict[str, float]:
    """By kernel: the part of the time in which memory moves the arrays of rows that instructions take to issue."""
    nbytes = math.prod(case.shape) * jnp.dtype(case.dtype).itemsize
    return {
        found.kernel: found.issue_share(ARRAYS[found.kernel] * nbytes)
        for found in traffic.of(program)
        if found.kernel in ARRAYS
    }


@cases(MEMORY, quick=(4, 8))
def test_instructions_take_less_time_than_memory(case):
    h = case.shape[-1]
    found = issue_shares(case, check(case).program)
    assert found.keys() == ARRAYS.keys()
    for kernel, share in found.items():
        allowed = OVER.get((kernel, h, case.dtype))
        assert share < (allowed or LIMIT), found
        assert not allowed or share >= LIMIT, "under the limit: take it out of OVER"


@pytest.mark.parametrize("h", [128, 4096])
def test_what_is_narrow_or_scattered_is_seen(h):
    """Rows that start anywhere are read by 2 bytes, and that a line of the kernel is to blame is found out."""
    from cases import execute

    found = traffic.of(execute(Case("layer_norm", (40, h + 1), "bfloat16", "small-h200")).program)[0]
    assert found.wide == 0
    assert all(width == 2 and "x_ptr" in line for line, width in found.narrow)
