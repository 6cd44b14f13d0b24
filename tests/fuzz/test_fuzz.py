"""The fuzzer: some of its cases, and that it notices what is wrong."""

import dataclasses
import pathlib
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import workbench
from called import answered
from case import Array, Case, Level, made
from catalogue import FORMS
from drawn import draw
from jln._core.one_by_one import WRONG
from jln._core.operation import Operation
from jln._junction import eight_bits, formulas, gradients, operations
from judged import expected, judge


def is_wrong(seed):
    return bool(judge(*answered(draw(seed))).wrong)


# The last one is of several Linears whose scale alone examples have of their own.
@pytest.mark.parametrize("seed", [*range(16), 15858])
def test_some_cases(seed):
    assert not is_wrong(seed)


# A row without others, of a product that sums over rows; two launches of a norm whose parameters are of heads; a gate
# of rows that no kernel takes.
@pytest.mark.parametrize("seed", [16732, 27537, 729296812])
def test_cases_in_eight_bits_that_were_wrong(seed):
    assert draw(seed).quantize is not None
    assert not is_wrong(seed)


def test_eight_bits_are_drawn_with_everything():
    cases = [case for case in map(draw, range(2, 5000, 5)) if case.quantize is not None]
    kinds = {(c.form.is_linear, type(c.quantize), getattr(c.quantize, "scale", None) is None) for c in cases}
    assert len(kinds) == 6 and {c.form.title for c in cases} == {*FORMS}
    assert {c.implementation for c in cases} == {None, "xla", "triton"}
    assert any(c.policy and c.levels and c.asks == "gradient" for c in cases)


def test_the_sum_of_one_number_over_examples():
    """A case that was wrong: an offset alone, two loops, and a cotangent of one number.

    XLA gets such sums wrong (`jln._core.one_by_one`) in some processes, and so did it in one of the fuzzer's.
    """
    script = pathlib.Path(__file__).with_name("run.py")
    run = subprocess.run([sys.executable, script, "--seed", "994436056"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_the_sum_of_one_number_for_a_bias_of_one_number():
    """A case that was wrong, and that no seed draws now: a cotangent of one number, and a bias that is one, too.

    XLA makes one sum of 8160 equal numbers, which were allowed what sums of 96 and of 85 err by.
    """
    operands = {
        "x": Array("float32", (2, 48, 64, 5), (None, 3), (2, 48, 1, 5), spread=30.0),
        "kernel": Array("float32", (1, 64, 17), (0, None), (1, 64, 17), spread=0.125),
        "bias": Array("float32", (17,), (None, None), (1,)),
    }
    case = Case(
        524643758, FORMS["rms_norm_linear"], (2, 48, 64), (2,), (Level("vmap", 1, 0), Level("vmap", 5, 0)), 0, operands,
        {"y": Array("result's", (1, 5, 2, 48, 17), (0, 0), (1,) * 5)}, ("kernel", "bias"), "gradient",
        {"forward_mode": True}, implementation="xla", policy="everything_again", by_loss=True,
    )  # fmt: skip
    assert not judge(*answered(case)).wrong


PARAMETERS = ("scale", "x_scale", "offset", "gate")


def is_one_of_the_workbenchs(case):
    """Return whether `workbench.truth` takes a case: rows of x [M, H], parameters that all of them share."""
    rank_two = len(case.shape) == 2 and case.axes == (1,) and not case.levels
    complete = case.asks == "gradient" and len(case.cotangents) == 1 + case.form.adds and case.number is None
    if not rank_two or not complete or case.several or case.quantize is not None:
        return False
    m, h = case.shape
    of_rows = ("x", "residual", "z", "kernel")
    return all(
        a.small == a.shape
        and (n in of_rows or a.shape in ((h,), (1, h)) or (n, a.shape) == ("gate", (m, 1)) or n == "bias")
        and len(case.example_shape(n)) <= 2
        for n, a in case.operands.items()
    )


def test_the_truth_is_that_of_the_workbench():
    compared = Counter()
    for seed in range(20_000):
        case = dataclasses.replace(draw(seed), values_too=True)
        if not is_one_of_the_workbenchs(case):
            continue
        true = expected(case)
        operator = workbench.Operator(case.form)
        operands, cotangents, _ = made(case)
        operands = {
            n: a.ravel() if a.shape == (1, case.shape[1]) and n in PARAMETERS else a for n, a in operands.items()
        }
        dy = [np.broadcast_to(cotangents[n], case.cotangents[n].shape) for n in ("y", "total") if n in cotangents]
        values, _ = workbench.truth(
            operator,
            [operands.get(n) for n in operator.kind.names],
            tuple(dy) if len(dy) > 1 else dy[0],
            total=true["total"][0] if case.form.adds else None,
            zero_centered_scale=case.static.get("zero_centered_scale", False),
            epsilon=case.epsilon,
        )
        for name, (value, allowed, _) in true.items():
            if name == "total":  # the workbench's is not rounded
                continue
            other = np.reshape(values[name], value.shape)
            # They are in the same wide dtype, whose roundings are a millionth of those allowed, or less.
            assert np.all(np.abs(value - other) <= 1e-6 * allowed + 1e-12 * np.abs(other)), (seed, name)
            compared[case.form.title, name] += 1
    assert {title for title, _ in compared} == {*FORMS}


@pytest.fixture
def recompiled():
    """Programs of before the test and of the test, kept apart."""
    jax.clear_caches()
    yield
    jax.clear_caches()


SLIPS = {
    "silu' without its second term": ("silu", lambda z, dtype: (z * jax.nn.sigmoid(z), jax.nn.sigmoid(z))),
    "no gate": ("apply_gate", lambda a, arrays: a),
    "scale for 1 + scale": (
        "effective_scale",
        lambda scale, dtype, _: 1.0 if scale is None else scale.astype(dtype),
    ),
}


IN_EIGHT_BITS = {
    "a largest number that is too small": ("largest", lambda y, axis=None: 0.99 * LARGEST(y, axis)),
    "y by another scale": ("by_scale", lambda y, scale, dtype: BY_SCALE(y * 1.25, scale, dtype)),
    "blocks of the wrong numbers": ("by_block_scales", lambda y, *how: BY_BLOCK_SCALES(jnp.flip(y), *how)),
}
LARGEST, BY_SCALE, BY_BLOCK_SCALES = eight_bits.largest, eight_bits.by_scale, eight_bits.by_block_scales


@pytest.mark.parametrize("slip", IN_EIGHT_BITS)
def test_a_slip_in_eight_bits_is_noticed(slip, monkeypatch, recompiled):
    monkeypatch.setattr(eight_bits, *IN_EIGHT_BITS[slip])
    cases = [case for case in map(draw, range(2, 1000, 5)) if case.quantize is not None and not case.form.is_linear]
    assert any(is_wrong(case.seed) for case in cases if case.implementation != "triton")


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_noticed(slip, monkeypatch, recompiled):
    name, wrong = SLIPS[slip]
    modules = [module for module in (formulas, gradients) if hasattr(module, name)]
    for module in modules:
        monkeypatch.setattr(module, name, wrong)
    assert modules and any(is_wrong(seed) for seed in range(60))


# A cotangent of 16 bits, added up over examples that share the rows, was rounded in front of gradients in float32.
@pytest.mark.parametrize("seed", [524643189, 524643623, 52484])
def test_gradients_in_float32_of_what_examples_share_are_not_rounded(seed):
    assert not is_wrong(seed)


def test_what_the_jaxlibs_that_are_wrong_do_is_noticed(monkeypatch, recompiled):
    """Cases are wrong without the detour of `jln._core.one_by_one`, on the jaxlibs that it is for."""
    for operation in vars(operations).values():
        if isinstance(operation, Operation):
            plain = getattr(operation._formula_cpu, "__wrapped__", operation._formula_cpu)
            monkeypatch.setattr(operation, "_formula_cpu", plain)
    assert any(is_wrong(seed) for seed in (413, 457, 555)) == (jaxlib.version.__version_info__[:3] in WRONG)
