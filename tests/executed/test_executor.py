"""Whole programs in the executor: calls inside of control flow, statistics, and launches that were changed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from ptx import Program, Violation


def draw(*shape, dtype="float32"):
    return np.random.default_rng(0).standard_normal(shape).astype(jnp.dtype(dtype))


def structs(*arrays):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def block(x, scale):
    return jln.rms_norm(x, scale) + x


X, SCALE = draw(8, 128), draw(128)


@pytest.mark.parametrize(
    ("f", "executions"),
    [
        (lambda x, s: jax.lax.scan(lambda x, _: (block(x, s), None), x, length=3)[0], [3]),
        (lambda x, s: jax.lax.while_loop(lambda c: c[1] < 4, lambda c: (block(c[0], s), c[1] + 1), (x, 0))[0], [4]),
        (lambda x, s: jax.lax.cond(x[0, 0] > 9, lambda: block(x, s), lambda: jln.layer_norm(x, s)), [1, 0]),
        (lambda x, s: jax.jit(block)(jax.jit(block)(x, s), s), [2]),
        (lambda x, s: jax.lax.map(lambda row: block(row, s), x), [8]),
        # Rematerialised inside of a scan: the forward kernel runs once a step, and again in each step of the backward.
        (
            lambda x, s: jax.grad(
                lambda x: jnp.sum(jax.lax.scan(lambda x, _: (jax.checkpoint(block)(x, s), None), x, length=3)[0] ** 2)
            )(x),
            [3, 3, 3],
        ),
    ],
    ids=["scan", "while", "cond", "jit twice", "map", "remat in scan"],
)
def test_calls_run_where_they_stand_as_often_as_they_are_reached(f, executions):
    program = Program(f, *structs(X, SCALE))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = jax.jit(f)(X, SCALE)
    error = np.max(np.abs(program.run(X, SCALE) - expected))
    assert error < 1e-5 * np.max(np.abs(expected))
    assert [s.executions for s in program.stats] == executions


def gradients(x, scale, offset, dy):
    y, pullback = jax.vjp(jln.layer_norm, x, scale, offset)
    return y, *pullback(dy)


OPERANDS = (draw(99, 256), draw(256), draw(256) + 1, draw(99, 256) * 2)  # the last tile of rows is ragged


def edited(change):
    return Program(gradients, *structs(*OPERANDS), edit=change)


def different(change):
    """Return whether a change of the calls is noticed, by a Violation or by different results."""
    try:
        got = edited(change).run(*OPERANDS, allow_contended=True)
    except Violation:
        return True
    right = edited(lambda call: None).run(*OPERANDS, allow_contended=True)
    return not all(np.array_equal(a, b) for a, b in zip(got, right, strict=True))


def change_of(name):
    """Return a decorator that restricts a change to the calls whose names contain `name`."""
    return lambda change: lambda call: change(call) if name in call.name else None


@pytest.mark.parametrize("name", ["forward", "backward", "reduce"])
def test_a_grid_that_is_too_small_is_noticed(name):
    @change_of(name)
    def smaller(call):
        call.grid = (call.grid[0] - 1, 1, 1)

    with pytest.raises(Violation, match="nobody wrote"):
        edited(smaller).run(*OPERANDS, allow_contended=True)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_swapped_pointers_and_scalars_are_noticed(name):
    @change_of(name)
    def swapped(call):
        pointers = re.findall(r"ld\.param\.b64 \t(%rd\d+), \[(\w+)\];", call.ptx)
        (a, first), (b, second) = pointers[:2]
        call.ptx = call.ptx.replace(f"{a}, [{first}]", f"{a}, [{second}]").replace(
            f"{b}, [{second}]", f"{b}, [{first}]"
        )

    @change_of(name)
    def more_rows(call):
        call.parameters = [p and (p[0], p[1] + 1) for p in call.parameters]

    assert different(swapped)
    with pytest.raises(Violation):
        edited(more_rows).run(*OPERANDS, allow_contended=True)


def test_another_number_of_warps_than_the_kernel_was_compiled_for_is_noticed():
    @change_of("forward")
    def wider(call):
        call.warps *= 2

    with pytest.raises(Violation, match="compiled for"):
        edited(wider).run(*OPERANDS)


def test_less_shared_memory_than_the_kernel_uses_is_noticed():
    @change_of("forward")
    def less(call):
        call.shared //= 2

    with pytest.raises(Violation, match="outside shared memory"):
        edited(less).run(*OPERANDS)


def test_a_result_in_the_place_of_an_operand_that_others_read_is_noticed():
    """The backward kernel may not write dx into scale's memory, as every program reads scale."""

    @change_of("backward")
    def in_place(call):
        call.aliases = {3: 0}  # dx in scale's place

    assert different(in_place)


def test_a_hint_of_alignment_that_does_not_hold_is_noticed():
    """Loads of 4 bytes are misaligned in rows of 127 bfloat16 elements, as rows start on multiples of 2 bytes only."""
    x = draw(4, 127, dtype="bfloat16")

    def wide(call):
        call.ptx = re.sub(
            r"ld\.global\.b16\s+\{?\s*(%rs\d+)\s*\}?, (\[[^\]]*\])",
            r"ld.global.b32 \t%r9999, \2;\n mov.b16 \1, 0",
            call.ptx,
            count=1,
        )

    program = Program(jln.rms_norm, *structs(x), edit=wide)
    with pytest.raises(Violation, match="no multiple"):
        program.run(x)


def test_sectors_and_instructions_are_counted():
    """The statistics count x and y once and scale in every program, in whole sectors and by 16 bytes an access."""
    x, scale = draw(64, 1024, dtype="bfloat16"), draw(1024)
    program = Program(jln.rms_norm, *structs(x, scale))
    program.run(x, scale)
    (stats,), (call,) = program.stats, program.calls
    assert stats.moved("written") == (x.nbytes, x.nbytes, {16: x.nbytes})
    read = x.nbytes + call.grid[0] * scale.nbytes
    assert stats.moved("read") == (read, read, {16: read})
    assert stats.issued == call.warps * call.grid[0] * stats.instructions
    assert 0.1 < stats.issue_share() < 1
