"""`python -m jln check`: it accepts what is right, rejects what is wrong, and says so."""

import contextlib
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from catalogue import EPSILON
from jln import __main__, reference
from jln.testing import operators
from jln.testing.operators import DTYPES, FORMS, Judge, step

SMALL = (((7, 100), (20,)),)  # 100 is no power of two, so that a sum divided by it gives a mean that is not exact


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(operators, "SIZES", SMALL)


NAMES = FORMS["layer_norm"].arrays


def plain(*arrays):
    return {"y": reference.layer_norm(*arrays, epsilon=EPSILON)}


def operands(data, dtype):
    """Return x, scale and offset, and the cotangent of y, in a dtype."""
    random, shape = np.random.default_rng(0), (64, 1024)
    x, scale, offset, dy = (random.standard_normal(s) for s in (shape, shape[1:], shape[1:], shape))
    if data == "large mean":  # a variance in one pass loses it; c1 is large, and dx is not
        x, scale, dy = x + 1000, np.ones(shape[1:]), dy + 10
    x, scale, offset, dy = (a.astype(jnp.dtype(dtype)) for a in (x, scale + (data == "normal"), offset, dy))
    return [x, scale, offset], {"y": dy}


def slips(given, right):
    """Return by slip the data that shows it, and the results that are off then.

    In 16 bits the rounding of c1 shows only where c1 is large beside dx, and one pass loses the variance only where the
    mean is large.
    """
    x, scale, offset, dy = (np.asarray(a, "float64") for a in (*given[0], given[1]["y"]))
    narrow = x.astype(jnp.promote_types(given[0][0].dtype, "float32"))
    one_pass = np.maximum((narrow**2).mean(-1, keepdims=True) - narrow.mean(-1, keepdims=True) ** 2, 0)
    centred, variance = x - x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    rstd, wrong_rstd = (1 / np.sqrt(v + EPSILON) for v in (variance, one_pass))
    x_hat = centred * rstd
    c1, c2 = ((dy * scale * a).mean(-1, keepdims=True) for a in (1, x_hat))
    rounded = c1.astype(jnp.bfloat16).astype("float64")
    dx, dscale, doffset = (np.asarray(right[name], "float64") for name in ("dx", "dscale", "doffset"))
    element = np.where(np.arange(len(doffset)) == 3, 1.1, 1.0)
    return {
        "dscale off by a percent": ("normal", {"dscale": 1.01 * dscale}),
        "dx off by a percent": ("normal", {"dx": 1.01 * dx}),
        "c2 dropped": ("normal", {"dx": dx + rstd * x_hat * c2}),
        "c1 rounded to bfloat16": ("large mean", {"dx": dx + rstd * (c1 - rounded)}),
        "one-pass variance": ("large mean", {"y": centred * wrong_rstd * scale + offset}),
        "an element of doffset off": ("large mean", {"doffset": element * doffset}),
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_slips_are_rejected_by_what_they_break(dtype):
    truth = step(plain, NAMES)
    for data in ("normal", "large mean"):
        given = operands(data, dtype)
        right = truth(*given)
        judge = Judge(truth, right, given, dtype)
        assert all(error.ok for error in judge.errors(right))
        for slip, (shows, wrong) in slips(given, right).items():
            if shows == data:
                errors = judge.errors(right | {name: a.astype(jnp.dtype(dtype)) for name, a in wrong.items()})
                assert {error.name for error in errors if not error.ok} == {*wrong}, (slip, errors)


def test_sizes_of_errors():
    """Overflow is no error where the truth overflows, too, and the squares of large numbers do not overflow."""
    true = np.array([1e6, 2.0])
    right, wrong = np.array([np.inf, 2], "float16"), np.array([-np.inf, 2], "float16")
    assert operators._sizes(right, true) == (0, 0)
    assert operators._sizes(wrong, true)[0] == np.inf
    assert np.isnan(operators._sizes(np.array([np.nan, 2]), true)[0])
    assert operators._sizes(np.array([3e200, -4e200]), np.zeros(2)) == (4e200, pytest.approx(np.sqrt(12.5) * 1e200))


def test_what_is_wrong_is_found_and_said(small, capsys, monkeypatch):
    assert operators.run(["layer_norm"], ["bfloat16"], ["xla"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("all is right on cpu")
    norm = jln.layer_norm
    monkeypatch.setattr(operators._operators, "layer_norm", lambda *, offset, **a: norm(offset=1.02 * offset, **a))
    assert operators.run(["layer_norm"], ["bfloat16", "float64"], ["xla"]) == 1
    first, second, last, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"layer_norm, bfloat16, xla: WRONG: \w+: error .* of 7x100", first)
    assert second.startswith("layer_norm, float64, xla: WRONG: ") and last.startswith("2 WRONG on cpu")

    def crash(*_, **__):
        raise RuntimeError("a kernel\nfailed")

    monkeypatch.setattr(operators.Form, "function", crash)
    assert operators.run(["rms_norm"], ["float32"], ["xla"]) == 1
    assert capsys.readouterr().out.startswith("rms_norm, float32, xla: WRONG: RuntimeError: a kernel failed\n")


def test_a_kernel_whose_bits_differ_is_wrong_on_a_gpu(small, monkeypatch):
    """Kernels' programs run twice on a GPU; a CPU stands in for it."""
    numbers, original = iter(range(1, 9)), operators.step
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(operators, "ON_A_GPU", ())
    monkeypatch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
    form = FORMS["rms_norm"]
    assert operators.check_form(form, "float32", "triton", gpu)[0].ok

    def drifting(function, names):
        run = original(function, names)
        return lambda *a: {n: r * (1 + 1e-6 * next(numbers)) if n == "y" else r for n, r in run(*a).items()}

    monkeypatch.setattr(operators, "step", drifting)
    with pytest.raises(RuntimeError, match=r"not the same bits twice, of \(7, 100\)"):
        operators.check_form(form, "float32", "triton", gpu)


ERRORS = {
    ("chekc",): "invalid choice: 'chekc'",
    ("check", "layernorm"): "unknown operator layernorm; known are add_layer_norm",
    ("check", "--dtype", "float8"): "invalid choice: 'float8' (choose from",
    ("check", "--implementation", "triton"): "triton cannot run: triton is not installed",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_bad_requests_have_status_2(arguments, monkeypatch, capsys):
    reasons = {"triton": "triton is not installed", "xla": None}
    monkeypatch.setattr(__main__.doctor, "implementations", lambda _: reasons)
    monkeypatch.setattr(sys, "argv", ["jln", *arguments])
    with pytest.raises(SystemExit, match=r"^2$"):
        __main__.main()
    out, err = capsys.readouterr()
    assert out == "" and ERRORS[arguments] in err


def process(*arguments, before="", **environment):
    """Run some code and then `python -m jln` in a process of its own."""
    code = (
        f"import sys, runpy\n{before}\nsys.argv = ['jln', *{arguments!r}]\nrunpy.run_module('jln', run_name='__main__')"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


QUICK = """
import os; os.environ.pop("TRITON_INTERPRET", None)
from jln.testing import operators; operators.SIZES = (((3, 4), (2,)),)
"""


@pytest.mark.parametrize(("before", "runs"), [("", "triton"), ("sys.modules['triton'] = None", "xla")])
def test_it_checks_what_there_is_and_interprets_unasked(before, runs):
    """XLA alone runs without Triton; what is asked for twice runs once."""
    asked = ("--dtype", "float32", *("--implementation", "triton") * (runs == "triton")) * 2
    ran = process("check", "rms_norm", *asked, before=f"{before}\n{QUICK}")
    assert ran.returncode == 0 and ran.stdout.count("rms_norm, float32, ") == 1, ran.stderr
    assert ran.stdout.startswith(f"rms_norm, float32, {runs}: 0.")


def test_no_device_is_one_line_and_status_2():
    ran = process("doctor", JAX_PLATFORMS="nonsense")
    assert ran.returncode == 2 and ran.stdout.startswith("jln: no device: ") and len(ran.stdout.splitlines()) == 1
