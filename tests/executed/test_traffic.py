"""Compiled kernels of norms issue their instructions in less time than memory takes to move their arrays."""

import math

import jax.numpy as jnp

import traffic
from cases import Case, cases, check, execute

# Widths of real models, and so many rows that a program has four tiles or more and what it does once counts for little.
WIDTHS = (128, 256, 768, 1024, 4096)
ELEMENTS = 196_608
MEMORY = [Case("layer_norm", (ELEMENTS // h, h), d, "small-h200") for h in WIDTHS for d in ("bfloat16", "float32")]
# Attention heads, whose norms stand beside a rotary embedding (benchmarks/qk_norm.py).
HEADS = [Case(operator, (ELEMENTS // h, h), "bfloat16", "small-h200", parameters="float32")
         for operator in ("rms_norm", "layer_norm") for h in (64, 128, 256)]  # fmt: skip
HEADS_LIMITS = {
    ("rms_norm", "jln_forward_kernel"): 0.35,
    ("rms_norm", "jln_backward_kernel"): 0.46,
    ("layer_norm", "jln_forward_kernel"): 0.49,
    ("layer_norm", "jln_backward_kernel"): 0.54,
}
# How many arrays of rows a kernel reads and writes: x and y; dy, x and dx.
ARRAYS = {"jln_forward_kernel": 2, "jln_backward_kernel": 3}
LIMIT = 0.6  # the rest of the time is for what PTX does not show: addresses, waits, what the compiler adds
# Kernels over LIMIT, and the most that each may take. One that comes to less than LIMIT is to be struck out here.
OVER = {
    ("jln_forward_kernel", 768, "bfloat16"): 0.69,
    ("jln_backward_kernel", 768, "bfloat16"): 0.83,
    ("jln_backward_kernel", 4096, "bfloat16"): 0.63,
}


def issue_shares(case, program) -> dict[str, float]:
    """Return {kernel: the time to issue its instructions, as a part of the time to move its arrays of rows}."""
    nbytes = math.prod(case.shape) * jnp.dtype(case.dtype).itemsize
    return {
        found.kernel: found.issue_share(ARRAYS[found.kernel] * nbytes)
        for found in traffic.of(program, case.large)
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


@cases(HEADS, quick=(1,))
def test_norms_of_heads_leave_the_schedulers_half_of_the_time(case):
    found = issue_shares(case, check(case).program)
    assert found.keys() == ARRAYS.keys()
    for kernel, share in found.items():
        assert share < HEADS_LIMITS[case.operator, kernel], found


def test_what_is_narrow_is_seen():
    """Rows of 1001 bfloat16 elements are read by 2 bytes at a time, and the kernel's line that does so is named."""
    case = Case("layer_norm", (29, 1001), "bfloat16", "small-h200")
    found = traffic.of(execute(case).program, case.large)[0]
    assert found.wide == 0 and found.narrow
    assert all(width == 2 and "a.x " in line for line, width in found.narrow)
