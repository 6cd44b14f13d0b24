"""Small kernels in PTX, written by hand: what an instruction does at its edges, and what a kernel may not do."""

import ml_dtypes
import numpy as np
import pytest

from ptx import Call, Stats, Violation
from ptx.program import execute


def run(body, *operands, result, threads=32, shared=512, grid=1):
    """Run a kernel of this body, and return what it wrote to a result like `result`.

    It finds its thread in %r0 and array i at %rd<i>; the registers behind them are free.
    """
    arrays = len(operands) + 1
    parameters = ",\n".join(f"\t.param .u64 .ptr .global .align 1 k_param_{i}" for i in range(arrays + 2))
    pointers = "\n".join(f"\tld.param.b64 \t%rd{i}, [k_param_{i}];" for i in range(arrays))
    ptx = f""".version 8.7
.target sm_90a
.visible .entry k(
{parameters}
)
.reqntid {threads}
{{
\tmov.u32 \t%r0, %tid.x;
{pointers}
{body}
\tret;
}}
"""
    call = Call("k", "k", ptx, threads // 32, shared, grid, [None] * arrays)
    return execute(call, list(operands), [(result.shape, result.dtype)], list(range(arrays - 1)), Stats("k"))[0]


def elementwise(instruction, *operands, dtype):
    """One instruction in each thread: {d} is its result, {0}, {1}, ... its elements of the operands."""
    result = np.zeros(len(operands[0]), dtype)
    lines, names = [], []
    for i, array in enumerate((*operands, result)):
        size = array.dtype.itemsize
        names.append(f"{ ({2: '%rs', 4: '%r', 8: '%rd'}[size]) }{50 + i}")
        lines += [f"mul.wide.u32 \t%rd30, %r0, {size};", f"add.s64 \t%rd{40 + i}, %rd{i}, %rd30;"]
        if array is not result:
            lines.append(f"ld.global.b{8 * size} \t{names[i]}, [%rd{40 + i}];")
    lines.append(instruction.format(*names, d=names[-1]))
    lines.append(f"st.global.b{8 * result.dtype.itemsize} \t[%rd{40 + len(operands)}], {names[-1]};")
    return run("\n".join(lines), *operands, result=result, threads=len(result))


RANDOM = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)


def integers(dtype):
    limits = np.iinfo(dtype)
    values = RANDOM.integers(limits.min, limits.max, 32, dtype, endpoint=True)
    values[:4] = 0, 1, limits.min, limits.max
    return values


# Floats of many magnitudes and both signs, and those at the edges.
F = (RANDOM.standard_normal(32) * 10.0 ** RANDOM.integers(-3, 4, 32)).astype("f4")
F[:6] = 0, -0.0, np.inf, -np.inf, np.nan, 1
S, U, W, G = integers("i4"), integers("u4"), integers("u8"), F[::-1].copy()
V, T = U[::-1].copy(), S[::-1].copy()


@pytest.mark.parametrize(
    ("instruction", "operands", "expected"),
    [
        ("max.f32 {d}, {0}, {1}", (F, G), np.fmax),  # where one operand is a NaN, the other one
        ("max.NaN.f32 {d}, {0}, {1}", (F, G), np.maximum),  # the NaN
        (
            "min.NaN.xorsign.abs.f32 {d}, {0}, {1}",
            (F, G),
            lambda a, b: np.copysign(np.minimum(abs(a), abs(b)), np.copysign(1, a) * np.copysign(1, b)),
        ),
        ("fma.rn.f32 {d}, {0}, {1}, {0}", (F, G), lambda a, b: (a.astype("f8") * b + a).astype("f4")),
        ("rsqrt.approx.ftz.f32 {d}, {0}", (abs(F) * 1e-43,), lambda a: 1 / np.sqrt(np.where(a < 1, a * 0, a))),
        ("mul.hi.u32 {d}, {0}, {1}", (U, V), lambda a, b: (a.astype("u8") * b >> np.uint64(32)).astype("u4")),
        ("mul.wide.s32 {d}, {0}, {1}", (S, T), lambda a, b: a.astype("i8") * b),
        ("mad.wide.u32 {d}, {0}, 12, {1}", (U, W), lambda a, b: a.astype("u8") * np.uint64(12) + b),
        ("div.s32 {d}, {0}, 7", (S,), lambda a: np.trunc(a / 7).astype("i4")),  # rounded towards 0, not down
        ("shr.s32 {d}, {0}, 35", (S,), lambda a: a >> 31),  # a shift by 32 or more leaves the sign, or no bits
        ("shl.b32 {d}, {0}, 33", (U,), lambda a: a * np.uint32(0)),
        ("bfe.s32 {d}, {0}, 3, 5", (S,), lambda a: a << 24 >> 27),
        ("prmt.b32 {d}, {0}, {1}, 0x5490", (U, V), lambda a, b: a & 255 | (a >> 15 & 1) * 0xFF00 | b << 16),
        ("cvt.rn.bf16.f32 {d}, {0}", (F,), lambda a: a.astype(BF16)),
        ("cvt.s64.s32 {d}, {0}", (S,), lambda a: a.astype("i8")),
        (
            "setp.lt.s32 %p2, {0}, 9; setp.gt.s32 %p1, {0}, {1}; and.pred %p1, %p1, %p2; selp.b32 {d}, 1, 0, %p1",
            (S, T),
            lambda a, b: ((a > b) & (a < 9)).astype("u4"),
        ),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)
def test_an_instruction_computes_what_numpy_does(instruction, operands, expected):
    with np.errstate(all="ignore"):
        expected = expected(*operands)
    got = elementwise(instruction + ";", *operands, dtype=expected.dtype)
    bits = [np.where(v != v, 0, v.view(f"u{v.itemsize}")) for v in (got, expected)]
    np.testing.assert_array_equal(*bits)
    np.testing.assert_array_equal(got != got, expected != expected)


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


def test_threads_that_part_meet_again():
    """Threads that go round a loop a different number of times, each its own, all pass the barrier behind it."""
    body = """
    mov.b32 %r5, 0;
    mov.b32 %r4, 0;
    $again:
    setp.ge.u32 %p1, %r5, %r0;
    @%p1 bra $done;
    add.s32 %r5, %r5, 1;
    add.s32 %r4, %r4, %r5;
    bra.uni $again;
    $done:
    bar.sync 0;
    """
    n = np.arange(64, dtype="u4")
    np.testing.assert_array_equal(run(LOAD + body + STORE, n, result=n, threads=64), n * (n + 1) // 2)


def test_threads_wait_at_a_barrier_for_those_that_are_sent_further_down():
    body = """
    setp.eq.u32 %p1, %r0, 0;
    @%p1 bra $one;
    $back:
    bar.sync 0;
    ld.shared.b32 %r4, [%r2];
    st.global.b32 [%rd32], %r4;
    ret;
    $one:
    st.shared.b32 [%r2], 7;
    bra.uni $back;
    """
    n = np.zeros(64, "u4")
    np.testing.assert_array_equal(run(LOAD + body, n, result=n, threads=64), n + 7)


X, TWO_WARPS = np.arange(32, dtype="u4"), np.arange(64, dtype="u4")
# Hands each element through shared memory to another thread: thread t of 64 gets that of thread 63 - t.
TURNED = """
    st.shared.b32 [%r3], %r4;
    bar.sync 0;
    sub.s32 %r5, 63, %r0;
    shl.b32 %r5, %r5, 2;
    add.s32 %r5, %r5, %r2;
    ld.shared.b32 %r4, [%r5];
"""
# Only the first 20 threads copy; the others get zeros.
COPIED = """
    setp.lt.u32 %p1, %r0, 20;
    selp.b32 %r6, 4, 0, %p1;
    cp.async.ca.shared.global [%r3 + 0], [%rd31 + 0], 0x4, %r6;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    ld.shared.b32 %r4, [%r3];
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (STORE, TWO_WARPS),
        (TURNED + STORE, TWO_WARPS[::-1]),
        (COPIED + STORE, np.where(TWO_WARPS < 20, TWO_WARPS, 0)),
        (TURNED + "bar.sync 0; st.shared.b32 [%r3], %r4;" + STORE, TWO_WARPS[::-1]),
    ],
)
def test_kernels_that_do_no_harm_are_let_pass(body, expected):
    np.testing.assert_array_equal(run(LOAD + body, TWO_WARPS, result=TWO_WARPS, threads=64), expected)


@pytest.mark.parametrize(
    ("what", "body", "x"),
    [
        ("outside every buffer", "add.s64 %rd31, %rd31, 4; ld.global.b32 %r4, [%rd31];" + STORE, X),
        ("outside every buffer", "st.global.b32 [%rd32 + 4], %r4;" + STORE, X),
        ("no multiple", "ld.global.v2.b32 {%r4, %r5}, [%rd31];" + STORE, X),
        ("no multiple", "ld.shared.b32 %r4, [%r3 + 2];" + STORE, X),
        ("outside shared memory", "st.shared.b32 [%r3 + 512], %r4;" + STORE, X),
        ("to an operand", "st.global.b32 [%rd31], %r4;" + STORE, X),
        ("that nobody wrote", "ld.shared.b32 %r4, [%r3];" + STORE, X),
        ("that nobody wrote", "ld.global.b32 %r4, [%rd32];" + STORE, X),
        ("was never written", "add.s32 %r4, %r9, 1;" + STORE, X),
        ("nobody wrote", "setp.lt.u32 %p1, %r0, 31; @%p1 " + STORE, X),
        ("no barrier between", TURNED.replace("bar.sync 0;", "") + STORE, TWO_WARPS),
        ("no barrier between", TURNED + "st.shared.b32 [%r3], %r4;" + STORE, TWO_WARPS),
        ("no barrier between", TURNED.replace("bar.sync 0;", "bar.warp.sync -1;") + STORE, TWO_WARPS),
        ("by several threads at once", "st.shared.b32 [%r2], %r4;" + STORE, X),
        ("by several threads at once", "st.global.b32 [%rd1], %r4;" + STORE, X),
        ("only some threads of the program", "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 0;" + STORE, TWO_WARPS),
        ("some threads of a warp", "setp.lt.u32 %p1, %r0, 7; @%p1 shfl.sync.idx.b32 %r4, %r4, 0, 31, -1;" + STORE, X),
        ("cp.async may still be writing", COPIED.replace("cp.async.wait_group 0;", "") + STORE, X),
        ("cp.async may still be writing", COPIED.replace("wait_group 0", "wait_group 1") + STORE, X),
        ("cp.async may still be writing", COPIED.replace("cp.async.commit_group;", "") + STORE, X),
        ("nobody waited for", COPIED + "cp.async.ca.shared.global [%r3 + 0], [%rd31 + 0], 0x4, 4;" + STORE, X),
    ],
)
def test_a_kernel_that_may_not_do_this_is_noticed(what, body, x):
    with pytest.raises(Violation, match=what):
        run(LOAD + body, x, result=x, threads=len(x))


def test_programs_of_a_grid_that_write_one_place_are_noticed():
    """Two programs whose threads store different values at one address are a race, as no barrier orders programs."""
    body = LOAD + "mov.u32 %r4, %ctaid.x;" + STORE
    run(body, X, result=X, grid=1)
    with pytest.raises(Violation, match=r"no barrier between|by several threads at once"):
        run(body, X, result=X, grid=2)
