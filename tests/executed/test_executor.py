"""Tests of what the executor counts and notices: launches broken on purpose, and small kernels written by hand."""

import contextlib
import dataclasses
import re

import numpy as np
import pytest

import jln
import workbench
from cases import Case, check, execute
from ptx import Call, Program, Stats, Violation
from ptx.program import execute as execute_call


def test_sectors_and_instructions_are_counted():
    """The statistics count x and y once and scale in every program, in whole sectors and by 16 bytes an access."""
    x, scale = workbench.normal(0, (64, 1024), "bfloat16"), workbench.normal(1, (1024,), "float32")
    program = Program(jln.rms_norm, x, scale)
    program.run(x, scale)
    (stats,), (call,) = program.stats, program.calls
    moved = {("read", 0, 16): x.nbytes, ("read", 1, 16): call.grid * scale.nbytes, ("written", 2, 16): x.nbytes}
    assert {access: tuple(nbytes) for access, nbytes in stats.accesses.items()} == {a: (n, n) for a, n in moved.items()}
    instructions, left = divmod(stats.issued, call.warps * call.grid)
    assert 100 < instructions < 10_000 and not left


# In turn: several tiles, the last one ragged; rows that start off 16 bytes; rows in chunks; several groups; several
# groups of heads, which share some operands.
WHOLE = Case("add_layer_norm", (29, 1000), "float32", "small-l4")
UNALIGNED = Case("layer_norm", (29, 1001), "bfloat16", "small-h200")
CHUNKS = Case("layer_norm", (3, 16401), "bfloat16", "small-h200")
GROUPS = Case("add_layer_norm", (9, 40), "float32", "small-h200", over="rsd")
HEADS = Case("layer_norm", (21, 3, 64), "bfloat16", "small-h200", of_heads=True, over="sd")
FUSED = Case("add_layer_norm_linear", (100, 128), "bfloat16", "small-h200", 32)


def noticed(case, program):
    """Return what is wrong with the execution of a case's program, or nothing."""
    try:
        return {name: share for name, share in execute(case, program).shares.items() if not share <= 1}
    except Violation as violation:
        return str(violation)


@contextlib.contextmanager
def changed(call, change):
    """Change a call while the context is open."""
    before = dataclasses.replace(call, aliases=dict(call.aliases), parameters=list(call.parameters))
    change(call)
    assert call != before, "nothing was changed"
    try:
        yield
    finally:
        vars(call).update(vars(before))


def add(field, more):
    return lambda call: setattr(call, field, getattr(call, field) + more)


def scalars(change):
    """Return a change of the values of a call's scalars."""

    def edit(call):
        where = [i for i, p in enumerate(call.parameters) if p is not None]
        new = change([call.parameters[i][1] for i in where])
        for i, value in zip(where, new, strict=True):
            call.parameters[i] = (call.parameters[i][0], value)

    return edit


def swap(a, b):
    """Return a change by which the kernel takes its parameters `a` and `b` for each other."""

    def edit(call):
        names = {f"[{call.entry}_param_{i}]": f"[{call.entry}_param_{j}]" for i, j in ((a, b), (b, a))}
        call.ptx = re.sub(r"\[\w+_param_\d+\]", lambda m: names.get(m[0], m[0]), call.ptx)

    return edit


def text(pattern, new=""):
    return lambda call: setattr(call, "ptx", re.sub(pattern, new, call.ptx))


LAUNCHES = {
    "a program too many": (GROUPS, "forward", add("grid", 1)),
    "a program too few": (WHOLE, "forward", add("grid", -1)),
    "a row too few of each head": (HEADS, "forward", scalars(lambda p: [p[0] - 1, *p[1:]])),
    "a share too few": (WHOLE, "reduce", scalars(lambda p: [p[0] - 1, *p[1:]])),
    "rows and groups swapped": (GROUPS, "backward", scalars(lambda p: p[::-1])),
    "scale and offset swapped": (WHOLE, "forward", swap(2, 3)),
    "dy and dtotal swapped": (WHOLE, "backward", swap(4, 5)),
    "too little shared memory": (WHOLE, "backward", add("shared", -16)),
    "wide loads off their 16 bytes": (WHOLE, "forward", text(r"(ld\.global\.v4\.b32 .*, \[ %rd\d+ \+ )0", r"\g<1>4")),
    "loads without a mask": (UNALIGNED, "forward", text(r"@%p\d+ (ld\.global\.b16)", r"\1")),
}


@pytest.mark.parametrize("slip", LAUNCHES)
def test_a_broken_launch_is_noticed(slip):
    case, kernel, change = LAUNCHES[slip]
    program = check(case).program
    (call,) = (call for call in program.calls if call.name == f"jln_{kernel}_kernel")
    with changed(call, change):
        assert noticed(case, program)


# What orders threads, with its guard.
ORDERING = [
    r"(?:@!?%\w+\s+)?" + kind
    for kind in (
        *(r"(?:bar|barrier)\.sync .*", r"cp\.async\.wait_group .*", r"cp\.async\.commit_group;"),
        *(r"fence\.proxy\.async.*", r"wgmma\.fence.*", r"wgmma\.commit_group.*", r"wgmma\.wait_group.*"),
    )
]


@pytest.mark.parametrize(
    "case", [CHUNKS, Case("rms_norm_linear", (100, 128), "float32", "a100", 128), FUSED], ids=["norm", "mma", "wgmma"]
)
def test_what_orders_threads_is_missed_when_it_is_dropped(case):
    program = check(case).program
    dropped = [(call, kind) for call in program.calls for kind in ORDERING if re.search(kind, call.ptx)]
    assert dropped
    for call, kind in dropped:
        with changed(call, text(kind)):
            assert noticed(case, program), (call.name, kind)


# Each thread has its number in %r0, its element of x in %r4, the addresses of its elements of x and of the result in
# %rd31 and %rd32, and its place in shared memory, which is at %r2, in %r3.
KERNEL = """.version 8.7
.target sm_90a
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .u64 .ptr .global .align 1 k_param_1,
	.param .u64 .ptr .global .align 1 k_param_2,
	.param .u64 .ptr .global .align 1 k_param_3
)
.reqntid 64
{
    mov.u32 %r0, %tid.x;
    ld.param.b64 %rd0, [k_param_0];
    ld.param.b64 %rd1, [k_param_1];
    mul.wide.u32 %rd30, %r0, 4;
    add.s64 %rd31, %rd0, %rd30;
    add.s64 %rd32, %rd1, %rd30;
    shl.b32 %r1, %r0, 2;
    mov.b32 %r2, global_smem;
    add.s32 %r3, %r2, %r1;
    ld.global.b32 %r4, [%rd31];
    BODY
    ret;
}
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


def run(body, grid=1):
    """Run a kernel of 64 threads a program on x = 0, 1, ..., and return its result."""
    x = np.arange(64, dtype="u4")
    call = Call("k", "k", KERNEL.replace("BODY", body), 2, 512, grid, [None, None])
    return execute_call(call, [x], [(x.shape, x.dtype)], [0], Stats("k"))[0]


def test_a_kernel_that_does_no_harm_is_let_pass():
    np.testing.assert_array_equal(run(TURNED + STORE), np.arange(64)[::-1])


@pytest.mark.parametrize(
    ("what", "body"),
    [
        ("outside every buffer", "st.global.b32 [%rd32 + 4], %r4;" + STORE),
        ("no multiple", "ld.global.v2.b32 {%r4, %r5}, [%rd31];" + STORE),
        ("no multiple", "ld.shared.b32 %r4, [%r3 + 2];" + STORE),
        ("outside shared memory", "st.shared.b32 [%r3 + 512], %r4;" + STORE),
        ("to an operand", "st.global.b32 [%rd31], %r4;" + STORE),
        ("that nobody wrote", "ld.shared.b32 %r4, [%r3];" + STORE),
        ("that nobody wrote", "ld.global.b32 %r4, [%rd32];" + STORE),
        ("was never written", "add.s32 %r4, %r9, 1;" + STORE),
        ("nobody wrote", "setp.lt.u32 %p1, %r0, 31; @%p1 " + STORE),
        ("no barrier between", TURNED + "st.shared.b32 [%r3], %r4;" + STORE),
        ("no barrier between", TURNED.replace("bar.sync 0;", "bar.warp.sync -1;") + STORE),
        ("by several threads at once", "st.shared.b32 [%r2], %r4;" + STORE),
        ("by several threads at once", "st.global.b32 [%rd1], %r4;" + STORE),
        ("only some threads of the program", "setp.lt.u32 %p1, %r0, 32; @%p1 bar.sync 0;" + STORE),
        ("some threads of a warp", "setp.lt.u32 %p1, %r0, 7; @%p1 shfl.sync.idx.b32 %r4, %r4, 0, 31, -1;" + STORE),
    ],
)
def test_a_kernel_that_may_not_do_this_is_noticed(what, body):
    with pytest.raises(Violation, match=what):
        run(body)


def test_programs_of_a_grid_that_write_one_place_are_noticed():
    """Two programs whose threads store different values at one address are a race, as no barrier orders programs."""
    body = "mov.u32 %r4, %ctaid.x;" + STORE
    run(body, grid=1)
    with pytest.raises(Violation, match=r"no barrier between|by several threads at once"):
        run(body, grid=2)
