"""The fuzzer: some of its cases, and that it notices what is wrong."""

import dataclasses
import pathlib
import subprocess
import sys
from collections import Counter

import jax
import jaxlib
import numpy as np
import pytest

import workbench
from called import answered
from case import made
from catalogue import FORMS
from drawn import draw
from jln._core import one_by_one
from jln._core.operation import Operation
from jln._junction import eight_bits, formulas, gradients, operations
from judged import expected, judge


def is_wrong(seed):
    return bool(judge(*answered(draw(seed))).wrong)


# Cases that were wrong once:
WRONG = {
    15858: "several Linears whose scale alone examples have of their own",
    16732: "eight bits of a row without others, of a product that sums over rows",
    27537: "eight bits by two launches of a norm whose parameters are of heads",
    729296812: "eight bits behind a gate of rows that no kernel takes",
    524643189: "a cotangent of 16 bits, added up over examples that share the rows, in front of gradients in float32",
    524643623: "the same",
    52484: "the same",
}


@pytest.mark.parametrize("seed", [*range(8), *WRONG])
def test_some_cases(seed):
    assert "eight bits" not in WRONG.get(seed, "") or draw(seed).quantize is not None
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
    for seed in range(6000):
        case = dataclasses.replace(draw(seed), values_too=True)
        if not is_one_of_the_workbenchs(case):
            continue
        true = expected(case)
        operator = workbench.Operator(case.form)
        operands, cotangents, _ = made(case)
        operands |= {n: a.ravel() for n, a in operands.items() if n in PARAMETERS and a.shape == (1, case.shape[1])}
        dy = [np.broadcast_to(cotangents[n], case.cotangents[n].shape) for n in ("y", "total") if n in cotangents]
        options = {"zero_centered_scale": case.static.get("zero_centered_scale", False), "epsilon": case.epsilon}
        options["total"] = true["total"][0] if case.form.adds else None
        given = [operands.get(n) for n in operator.kind.names]
        values, _ = workbench.truth(operator, given, tuple(dy) if len(dy) > 1 else dy[0], **options)
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


LARGEST, BY_SCALE = eight_bits.largest, eight_bits.by_scale
# The function that is wrong, and what it does.
SLIPS = {
    "silu' without its second term": ("silu", lambda z, dtype: (z * jax.nn.sigmoid(z), jax.nn.sigmoid(z))),
    "scale for 1 + scale": ("effective_scale", lambda scale, dtype, _: 1.0 if scale is None else scale.astype(dtype)),
}
IN_EIGHT_BITS = {
    "a largest number that is too small": ("largest", lambda y, axis=None: 0.99 * LARGEST(y, axis)),
    "y by another scale": ("by_scale", lambda y, scale, dtype: BY_SCALE(y * 1.25, scale, dtype)),
}


@pytest.mark.parametrize("slip", [*SLIPS, *IN_EIGHT_BITS])
def test_a_slip_is_noticed(slip, monkeypatch, recompiled):
    name, wrong = (SLIPS | IN_EIGHT_BITS)[slip]
    modules = [module for module in (formulas, gradients, eight_bits) if hasattr(module, name)]
    assert modules
    for module in modules:
        monkeypatch.setattr(module, name, wrong)
    seeds = range(60)
    if slip in IN_EIGHT_BITS:
        cases = [case for case in map(draw, range(2, 1000, 5)) if case.quantize is not None and not case.form.is_linear]
        seeds = [case.seed for case in cases if case.implementation != "triton"]
    assert any(is_wrong(seed) for seed in seeds)


def test_what_the_jaxlibs_that_are_wrong_do_is_noticed(monkeypatch, recompiled):
    """Cases are wrong without the detour of `jln._core.one_by_one`, on the jaxlibs that it is for."""
    for operation in vars(operations).values():
        if isinstance(operation, Operation):
            plain = getattr(operation._formula_cpu, "__wrapped__", operation._formula_cpu)
            monkeypatch.setattr(operation, "_formula_cpu", plain)
    assert any(is_wrong(seed) for seed in (413, 457, 555)) == (jaxlib.version.__version_info__[:3] in one_by_one.WRONG)
