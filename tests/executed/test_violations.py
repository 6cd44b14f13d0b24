"""Small kernels that each do one thing that a GPU would let pass and the executor must notice."""

import numpy as np
import pytest
from handwritten import run

from ptx import Violation

X = np.arange(32, dtype="u4")
TWO_WARPS = np.arange(64, dtype="u4")

# Loads thread t's element of x into %r4. The address of its element of the result is in %rd32, that of its place in
# shared memory in %r3.
LOAD = """
    mul.wide.u32 %rd30, %r0, 4;
    add.s64 %rd31, %rd0, %rd30;
    add.s64 %rd32, %rd1, %rd30;
    shl.b32 %r1, %r0, 2;
    mov.b32 %r2, global_smem;
    add.s32 %r3, %r2, %r1;
    ld.global.b32 %r4, [%rd31];
"""
STORE = "st.global.b32 [%rd32], %r4;"
# Hands each element through shared memory to another thread: thread t of 64 gets that of thread 63 - t.
TURNED = """
    st.shared.b32 [%r3], %r4;
    bar.sync 0;
    sub.s32 %r5, 63, %r0;
    shl.b32 %r5, %r5, 2;
    add.s32 %r5, %r5, %r2;
    ld.shared.b32 %r4, [%r5];
"""
COPIED = """
    cp.async.ca.shared.global [%r3 + 0], [%rd31 + 0], 0x4, 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.b32 %r4, [%r3];
"""


@pytest.mark.parametrize(
    ("what", "body", "x"),
    [
        ("outside every buffer", "add.s64 %rd31, %rd31, 4; ld.global.b32 %r4, [%rd31];" + STORE, X),
        ("outside every buffer", "st.global.b32 [%rd32 + 4], %r4;" + STORE, X),
        ("no multiple", "ld.global.v2.b32 {%r4, %r5}, [%rd31];" + STORE, X),
        ("no multiple", "ld.shared.b32 %r4, [%r3 + 2];" + STORE, X),
        ("outside shared memory", "st.shared.b32 [%r3 + 256], %r4;" + STORE, X),
        ("to an operand", "st.global.b32 [%rd31], %r4;" + STORE, X),
        ("that nobody wrote", "ld.shared.b32 %r4, [%r3];" + STORE, X),
        ("that nobody wrote", "ld.global.b32 %r4, [%rd32];" + STORE, X),
        ("was never written", "add.s32 %r4, %r9, 1;" + STORE, X),
        ("bytes that were never written", "prmt.b32 %r4, %r4, %r9, 0x3240U;" + STORE, X),
        ("bytes that nobody wrote", "setp.lt.u32 %p1, %r0, 31; @%p1 " + STORE, X),
        ("no barrier between", TURNED.replace("bar.sync 0;", "") + STORE, TWO_WARPS),
        ("no barrier between", TURNED + "st.shared.b32 [%r3], %r4;" + STORE, TWO_WARPS),
        ("no barrier between", TURNED.replace("bar.sync 0;", "bar.warp.sync -1;") + STORE, TWO_WARPS),
        ("by several threads at once", "st.shared.b32 [%r2], %r4;" + STORE, X),
        ("by several threads at once", "st.global.b32 [%rd1], %r4;" + STORE, X),
        ("only some threads of the program", "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 0;" + STORE, TWO_WARPS),
        (
            "only some threads of a warp",
            "setp.lt.u32 %p1, %r0, 7; @%p1 shfl.sync.idx.b32 %r4, %r4, 0, 31, -1;" + STORE,
            X,
        ),
        ("cp.async may still be writing", COPIED.replace("cp.async.wait_group 0;", "") + STORE, X),
        ("cp.async may still be writing", COPIED.replace("wait_group 0", "wait_group 1") + STORE, X),
        ("cp.async may still be writing", COPIED.replace("cp.async.commit_group;", "") + STORE, X),
        ("nobody waited for", COPIED + "cp.async.ca.shared.global [%r3 + 0], [%rd31 + 0], 0x4, 4;" + STORE, X),
    ],
)
def test_a_kernel_that_may_not_do_this_is_noticed(what, body, x):
    with pytest.raises(Violation, match=what):
        run(LOAD + body, x, result=np.zeros_like(x), threads=len(x))


@pytest.mark.parametrize(
    "body", [STORE, TURNED + STORE, COPIED + STORE, TURNED + "bar.sync 0; st.shared.b32 [%r3], %r4;" + STORE]
)
def test_the_kernels_that_these_were_made_of_are_let_pass(body):
    got, _ = run(LOAD + body, TWO_WARPS, result=TWO_WARPS, threads=64)
    assert list(got) == list(TWO_WARPS[::-1] if "63" in body else TWO_WARPS)


def test_programs_of_a_grid_that_write_one_place_are_noticed():
    """Two programs whose threads store different values at one address are a race, as no barrier orders programs."""
    body = LOAD + "mov.u32 %r4, %ctaid.x;" + STORE
    run(body, X, result=X, grid=1)
    with pytest.raises(Violation, match=r"no barrier between|by several threads at once"):
        run(body, X, result=X, grid=2)
