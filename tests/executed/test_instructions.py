"""Each kind of PTX instruction in the executor, against numpy or against what the PTX ISA says of it."""

import ml_dtypes
import numpy as np
import pytest
from handwritten import elementwise, run

RANDOM = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)


def floats(dtype="float32", n=32):
    """Return floats of many magnitudes and both signs; the first six are 0, -0, inf, -inf, NaN and 1."""
    values = RANDOM.standard_normal(n) * 10.0 ** RANDOM.integers(-3, 4, n)
    values[:6] = 0, -0.0, np.inf, -np.inf, np.nan, 1
    return values.astype(dtype)


def integers(dtype="int32", n=32):
    limits = np.iinfo(dtype)
    values = RANDOM.integers(limits.min, limits.max, n, dtype, endpoint=True)
    values[:4] = 0, 1, limits.min, limits.max
    return values


def same(a, b):
    """Assert that two arrays are the same bit for bit, except that any NaN equals any other."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    bits = [np.where(v != v, 0, v.view(f"u{v.itemsize}")) for v in (a, b)]
    np.testing.assert_array_equal(*bits)
    np.testing.assert_array_equal(a != a, b != b)


F, G = floats(), floats()[::-1].copy()
S, T = integers(), integers()[::-1].copy()
U, V = S.view("uint32"), T.view("uint32")
L, K = integers("int64"), integers("int64")[::-1].copy()
D, W, H = F.astype("f8"), K.view("u8"), F.astype(BF16)


@pytest.mark.parametrize(
    ("instruction", "operands", "expected"),
    [
        ("add.f32 {d}, {0}, {1}", (F, G), lambda a, b: a + b),
        ("sub.f64 {d}, {0}, {1}", (D, D[::-1].copy()), lambda a, b: a - b),
        ("mul.rn.f32 {d}, {0}, {1}", (F, G), lambda a, b: a * b),
        ("div.full.f32 {d}, {0}, {1}", (F, G), lambda a, b: a / b),
        ("max.f32 {d}, {0}, {1}", (F, G), np.fmax),  # where one operand is a NaN, the other one
        ("max.NaN.f32 {d}, {0}, {1}", (F, G), np.maximum),  # the NaN
        (
            "min.NaN.xorsign.abs.f32 {d}, {0}, {1}",
            (F, G),
            lambda a, b: np.copysign(np.minimum(abs(a), abs(b)), np.copysign(1, a) * np.copysign(1, b)),
        ),
        ("fma.rn.f32 {d}, {0}, {1}, {0}", (F, G), lambda a, b: (a.astype("f8") * b + a).astype("f4")),
        ("rsqrt.approx.ftz.f32 {d}, {0}", (abs(F),), lambda a: (1 / np.sqrt(a.astype("f8"))).astype("f4")),
        ("ex2.approx.f32 {d}, {0}", (F,), lambda a: np.exp2(a.astype("f8")).astype("f4")),
        ("add.s32 {d}, {0}, {1}", (S, T), lambda a, b: a + b),
        ("mul.lo.s32 {d}, {0}, {1}", (S, T), lambda a, b: a * b),
        ("mul.hi.u32 {d}, {0}, {1}", (U, V), lambda a, b: (a.astype("u8") * b >> np.uint64(32)).astype("u4")),
        ("mul.hi.s64 {d}, {0}, {1}", (L, K), lambda a, b: (a.astype(object) * b.astype(object) >> 64).astype("i8")),
        ("mul.wide.s32 {d}, {0}, {1}", (S, T), lambda a, b: a.astype("i8") * b),
        ("mad.wide.u32 {d}, {0}, 12, {1}", (U, W), lambda a, b: a.astype("u8") * np.uint64(12) + b),
        ("div.s32 {d}, {0}, 7", (S,), lambda a: np.trunc(a / 7).astype("i4")),  # rounded towards 0, not down
        ("rem.s32 {d}, {0}, 7", (S,), lambda a: np.fmod(a, np.int32(7))),
        ("shr.s32 {d}, {0}, 5", (S,), lambda a: a >> 5),
        ("shr.u32 {d}, {0}, 5", (U,), lambda a: a >> np.uint32(5)),
        ("shl.b32 {d}, {0}, 33", (U,), lambda a: a * np.uint32(0)),  # a shift by 32 or more leaves no bits
        ("bfe.s32 {d}, {0}, 3, 5", (S,), lambda a: a << 24 >> 27),
        ("lop3.b32 {d}, {0}, {1}, 255, 0x1b", (U, V), lambda a, b: lop3(a, b, np.uint32(255), 0x1B)),
        # A register that nobody wrote, of which no byte comes to the end.
        (
            "prmt.b32 %r60, {0}, %r61, 0x3340; prmt.b32 {d}, {1}, %r60, 0x6410",
            (U, V),
            lambda a, b: b & np.uint32(0xFFFF) | (a & np.uint32(0xFF)) << np.uint32(16) | a & np.uint32(0xFF000000),
        ),
        ("prmt.b32 {d}, {0}, {1}, 0x5410", (U, V), lambda a, b: a & np.uint32(0xFFFF) | b << np.uint32(16)),
        ("shf.l.wrap.b32 {d}, {0}, {1}, 8", (U, V), lambda a, b: b << np.uint32(8) | a >> np.uint32(24)),
        ("cvt.rn.bf16.f32 {d}, {0}", (F,), lambda a: a.astype(BF16)),
        ("cvt.f32.bf16 {d}, {0}", (H,), lambda a: a.astype("f4")),
        ("cvt.rn.f32.s32 {d}, {0}", (S,), lambda a: a.astype("f4")),
        ("cvt.s64.s32 {d}, {0}", (S,), lambda a: a.astype("i8")),
        ("cvt.u32.u64 {d}, {0}", (W,), lambda a: a.astype("u4")),
        ("setp.ne.f32 %p1, {0}, {1}; selp.b32 {d}, 1, 0, %p1", (F, G), lambda a, b: ((a < b) | (a > b)).astype("u4")),
        ("setp.neu.f32 %p1, {0}, {1}; selp.b32 {d}, 1, 0, %p1", (F, G), lambda a, b: (a != b).astype("u4")),
        (
            "setp.lt.s32 %p2, {0}, 9; setp.gt.and.s32 %p1, {0}, {1}, %p2; selp.b32 {d}, 1, 0, %p1",
            (S, T),
            lambda a, b: ((a > b) & (a < 9)).astype("u4"),
        ),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)
def test_an_instruction_computes_what_numpy_does(instruction, operands, expected):
    with np.errstate(all="ignore"):
        expected = expected(*operands)
    same(elementwise(instruction + ";", *operands, dtype=expected.dtype), expected)


def lop3(a, b, c, table):
    bits = [(x[:, None] if np.ndim(x) else x) >> np.arange(32, dtype="u4") & 1 for x in (a, b, c)]
    return ((table >> (4 * bits[0] + 2 * bits[1] + bits[2]) & 1) << np.arange(32)).sum(1).astype("u4")


def test_two_narrow_numbers_in_a_register_are_computed_each():
    a, b = floats(BF16, 64), floats(BF16, 64)[::-1].copy()
    got = elementwise("fma.rn.bf16x2 {d}, {0}, {1}, {0};", a.view("u4"), b.view("u4"), dtype=np.dtype("u4"))
    a4, b4 = a.astype("f4"), b.astype("f4")
    with np.errstate(all="ignore"):
        expected = (a4.astype("f8") * b4 + a4).astype("f4").astype(BF16)
    same(got.view(BF16), expected)


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("bfly.b32 {d}, {0}, 5, 31, -1", lambda lane: lane ^ 5),
        ("up.b32 {d}, {0}, 3, 0, -1", lambda lane: np.where(lane < 3, lane, lane - 3)),
        ("down.b32 {d}, {0}, 3, 31, -1", lambda lane: np.where(lane > 28, lane, lane + 3)),
        ("idx.b32 {d}, {0}, 7, 31, -1", lambda lane: lane * 0 + 7),
    ],
)
def test_shfl_takes_another_threads_value(how, source):
    lane = np.arange(64) % 32
    values = integers("uint32", 64)
    same(elementwise(f"shfl.sync.{how};", values, dtype=values.dtype), values[np.arange(64) - lane + source(lane)])


@pytest.mark.parametrize(
    ("how", "function"), [("max.s32", np.max), ("add.u32", np.sum), ("and.b32", np.bitwise_and.reduce)]
)
def test_redux_makes_one_integer_of_a_warp(how, function):
    values = integers("int32" if how == "max.s32" else "uint32", 64)
    expected = np.repeat(function(values.reshape(2, 32), axis=1).astype(values.dtype), 32)
    same(elementwise(f"redux.sync.{how} {{d}}, {{0}}, -1;", values, dtype=values.dtype), expected)


@pytest.mark.parametrize(("to", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)])
def test_two_numbers_of_eight_bits(to, dtype):
    """The first is in the upper half; what is larger than the largest number becomes that, infinities too."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    upper, lower = (np.clip(a, -largest, largest).astype(dtype).view("u1").astype("u2") for a in (F, G))
    got = elementwise(f"cvt.rn.satfinite.{to}.f32 {{d}}, {{0}}, {{1}};", F, G, dtype=np.dtype("u2"))
    np.testing.assert_array_equal(got, upper << 8 | lower)


TO_SHARED = """
    mul.wide.u32 %rd30, %r0, 16;
    add.s64 %rd31, %rd0, %rd30;
    shl.b32 %r1, %r0, 4;
    mov.b32 %r2, global_smem;
    add.s32 %r3, %r2, %r1;
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_spreads_eight_by_eight_elements_over_a_warp(transposed):
    matrices = np.arange(256, dtype="u2").reshape(4, 8, 8)
    body = (
        TO_SHARED
        + f"""
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd31];
    st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{".trans" * transposed}.shared.b16 {{%r8, %r9, %r10, %r11}}, [%r3];
    add.s64 %rd32, %rd1, %rd30;
    st.global.v4.b32 [%rd32], {{%r8, %r9, %r10, %r11}};
    """
    )
    got, _ = run(body, matrices, result=np.zeros((32, 4, 2), "u2"), shared=512)
    expected = matrices.transpose(0, 2, 1) if transposed else matrices
    same(got.transpose(1, 0, 2).reshape(4, 8, 8), expected)


def test_cp_async_brings_what_it_is_told_and_zeros():
    x = integers("uint32", 128)
    body = (
        TO_SHARED
        + """
    setp.lt.u32 %p1, %r0, 20;
    selp.b32 %r4, 16, 0, %p1;
    cp.async.cg.shared.global [%r3 + 0], [%rd31 + 0], 0x10, %r4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    bar.sync 0;
    xor.b32 %r5, %r3, 16;
    ld.shared.v4.b32 {%r6, %r7, %r8, %r9}, [%r5];
    add.s64 %rd32, %rd1, %rd30;
    st.global.v4.b32 [%rd32], {%r6, %r7, %r8, %r9};
    """
    )
    got, stats = run(body, x, result=np.zeros(128, "u4"), shared=512)
    came = np.where(np.arange(128) < 80, x, 0).reshape(32, 4)
    same(got, came[np.arange(32) ^ 1].reshape(-1))
    assert stats.moved("read") == (320, 320, {16: 320}) and stats.moved("written") == (512, 512, {16: 512})


@pytest.mark.parametrize(("dtype", "size", "one"), [("f4", 32, "0f3F800000"), ("f8", 64, "0d3FF0000000000000")])
def test_a_constant_is_stored_beside_a_register_bit_by_bit(dtype, size, one):
    x = integers("uint32", 32).astype(dtype)
    register = "r" if size == 32 else "rd"
    body = f"""
    mul.wide.u32 %rd30, %r0, {size // 8};
    add.s64 %rd31, %rd0, %rd30;
    ld.global.b{size} {{%{register}4}}, [%rd31];
    add.s64 %rd32, %rd1, %rd30;
    add.s64 %rd32, %rd32, %rd30;
    st.global.v2.b{size} [%rd32], {{%{register}4, {one}}};
    """
    got, _ = run(body, x, result=np.zeros((32, 2), dtype))
    same(got, np.stack([x, np.ones_like(x)], 1))


def test_threads_that_part_meet_again():
    """Threads that go round a loop a different number of times, each its own, all pass the barrier behind it."""
    body = """
    mov.b32 %r1, 0;
    mov.b32 %r2, 0;
    $again:
    setp.ge.u32 %p1, %r1, %r0;
    @%p1 bra $done;
    add.s32 %r1, %r1, 1;
    add.s32 %r2, %r2, %r1;
    bra.uni $again;
    $done:
    bar.sync 0;
    mul.wide.u32 %rd30, %r0, 4;
    add.s64 %rd31, %rd1, %rd30;
    st.global.b32 [%rd31], %r2;
    """
    n = np.arange(64, dtype="u4")
    got, _ = run(body, n, result=n, threads=64)
    same(got, n * (n + 1) // 2)


def test_threads_wait_at_a_barrier_for_those_that_are_sent_further_down():
    body = """
    setp.eq.u32 %p1, %r0, 0;
    mov.b32 %r2, global_smem;
    @%p1 bra $one;
    $back:
    bar.sync 0;
    ld.shared.b32 %r3, [%r2];
    mul.wide.u32 %rd30, %r0, 4;
    add.s64 %rd31, %rd1, %rd30;
    st.global.b32 [%rd31], %r3;
    ret;
    $one:
    st.shared.b32 [%r2], 7;
    bra.uni $back;
    """
    got, _ = run(body, np.zeros(1, "u4"), result=np.zeros(64, "u4"), threads=64)
    same(got, np.full(64, 7, "u4"))
