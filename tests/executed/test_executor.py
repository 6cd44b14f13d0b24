"""Whole programs in the executor: calls inside of control flow, counts, and launches that were broken on purpose."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from cases import Case, check, execute
from ptx import Program, Violation

RANDOM = np.random.default_rng(0)
X, SCALE = RANDOM.standard_normal((8, 128), "f4"), RANDOM.standard_normal(128, "f4")


def block(x, scale):
    return jln.rms_norm(x, scale) + x


@pytest.mark.parametrize(
    ("f", "executions"),
    [
        (lambda x, s: jax.lax.while_loop(lambda c: c[1] < 4, lambda c: (block(c[0], s), c[1] + 1), (x, 0))[0], [4]),
        (lambda x, s: jax.lax.cond(x[0, 0] > 9, lambda: block(x, s), lambda: jln.layer_norm(x, s)), [1, 0]),
        (lambda x, s: jax.jit(block)(jax.jit(block)(x, s), s), [2]),
        # Rematerialised inside of a scan: the forward kernel runs once a step, and again in each step of the backward.
        (
            lambda x, s: jax.grad(
                lambda x: jnp.sum(jax.lax.scan(lambda x, _: (jax.checkpoint(block)(x, s), None), x, length=3)[0] ** 2)
            )(x),
            [3, 3, 3],
        ),
    ],
    ids=["while", "cond", "jit twice", "remat in scan"],
)
def test_calls_run_where_they_stand_as_often_as_they_are_reached(f, executions):
    program = Program(f, X, SCALE)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = jax.jit(f)(X, SCALE)
    error = np.max(np.abs(program.run(X, SCALE) - expected))
    assert error < 1e-5 * np.max(np.abs(expected))
    assert [s.executions for s in program.stats] == executions


def test_sectors_and_instructions_are_counted():
    """The statistics count x and y once and scale in every program, in whole sectors and by 16 bytes an access."""
    x, scale = RANDOM.standard_normal((64, 1024), "f4").astype(jnp.bfloat16), RANDOM.standard_normal(1024, "f4")
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
COMPOSED = Case("add_layer_norm_linear", (37, 128), "bfloat16", "small-h200", 300)


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
    "a program too few, which owns columns": (CHUNKS, "backward", add("grid", -1)),
    "a tile too few to reduce": (WHOLE, "reduce", add("grid", -1)),
    "a row too many of each head": (HEADS, "forward", scalars(lambda p: [p[0] + 1, *p[1:]])),
    "a row too few of each head": (HEADS, "forward", scalars(lambda p: [p[0] - 1, *p[1:]])),
    "a share too few": (WHOLE, "reduce", scalars(lambda p: [p[0] - 1, *p[1:]])),
    "rows and groups swapped": (GROUPS, "backward", scalars(lambda p: p[::-1])),
    "scale and offset swapped": (WHOLE, "forward", swap(2, 3)),
    "dy and dtotal swapped": (WHOLE, "backward", swap(4, 5)),
    "mean and rstd swapped": (CHUNKS, "row_sums", swap(2, 3)),
    "dtotal and the sum swapped, fused": (FUSED, "backward", swap(6, 2)),
    "dz and the sum swapped beside y": (COMPOSED, "backward", swap(5, 2)),
    "dx in the place of the scale": (
        WHOLE,
        "backward",
        lambda call: call.aliases.update({0: 0}),
    ),
    "half of the warps": (WHOLE, "forward", lambda call: setattr(call, "warps", call.warps // 2)),
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


# What orders threads, with its guard; with mbarrier.try_wait goes the branch of its loop, which is the next line.
ORDERING = [
    r"(?:@!?%\w+\s+)?" + kind
    for kind in (
        *(r"(?:bar|barrier)\.sync .*", r"cp\.async\.wait_group .*", r"cp\.async\.commit_group;"),
        *(r"fence\.proxy\.async.*", r"wgmma\.fence.*", r"wgmma\.commit_group.*", r"wgmma\.wait_group.*"),
        *(r"tcgen05\.wait::ld.*", r"tcgen05\.wait::st.*", r"tcgen05\.commit.*", r"mbarrier\.try_wait.*\n.*"),
    )
]


@pytest.mark.parametrize(
    "case",
    [
        CHUNKS,
        Case("rms_norm_linear", (100, 128), "float32", "a100", 128),
        FUSED,
        Case("layer_norm_linear", (100, 128), "bfloat16", "small-b200", 64),
    ],
    ids=["norm", "mma", "wgmma", "tcgen05"],
)
def test_what_orders_threads_is_missed_when_it_is_dropped(case):
    program = check(case).program
    dropped = [(call, kind) for call in program.calls for kind in ORDERING if re.search(kind, call.ptx)]
    assert dropped
    for call, kind in dropped:
        with changed(call, text(kind)):
            assert noticed(case, program), (call.name, kind)
