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


@pytest.fixture
def small(monkeypatch):
    """Check one size: 100 is no power of two, so that a sum divided by it gives a mean that is not exact."""
    monkeypatch.setattr(operators, "SIZES", (((7, 100), (20,)),))


def operands(data, dtype):
    """Return x, scale and offset, and the cotangent of y, in a dtype."""
    random, shape = np.random.default_rng(0), (64, 1024)
    x, scale, offset, dy = (random.standard_normal(s) for s in (shape, shape[1:], shape[1:], shape))
    if data == "large mean":  # a variance in one pass loses it; c1 is large, and dx is not
        x, scale, dy = x + 1000, np.ones(shape[1:]), dy + 10
    x, scale, offset, dy = (a.astype(jnp.dtype(dtype)) for a in (x, scale + (data == "normal"), offset, dy))
    return [x, scale, offset], {"y": dy}


def slips(data, given, right):
    """Return results by name, each with a slip that the data shows.

    In 16 bits the rounding of c1 shows only where c1 is large beside dx, and one pass loses the variance only where the
    mean is large.
    """
    right = {name: np.asarray(a, "float64") for name, a in right.items()}
    if data == "normal":
        return [("dscale", 1.01 * right["dscale"]), ("dx", 1.01 * right["dx"])]
    x, scale, offset, dy = (np.asarray(a, "float64") for a in (*given[0], given[1]["y"]))
    narrow = x.astype(jnp.promote_types(given[0][0].dtype, "float32"))
    one_pass = np.maximum((narrow**2).mean(-1, keepdims=True) - narrow.mean(-1, keepdims=True) ** 2, 0)
    rstd, wrong_rstd = (1 / np.sqrt(v + EPSILON) for v in (x.var(-1, keepdims=True), one_pass))
    c1 = (dy * scale).mean(-1, keepdims=True)
    return [
        ("dx", right["dx"] + rstd * (c1 - c1.astype(jnp.bfloat16).astype("float64"))),
        ("y", (x - x.mean(-1, keepdims=True)) * wrong_rstd * scale + offset),
        ("doffset", right["doffset"] * np.where(np.arange(len(offset)) == 3, 1.1, 1.0)),  # an element alone
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slips_are_rejected_by_what_they_break(dtype):
    truth = step(FORMS["layer_norm"].function(reference), FORMS["layer_norm"].arrays)
    for data in ("normal", "large mean"):
        given = operands(data, dtype)
        right = truth(*given)
        judge = Judge(truth, right, given, dtype)
        assert all(error.ok for error in judge.errors(right))
        for name, wrong in slips(data, given, right):
            errors = judge.errors(right | {name: wrong.astype(jnp.dtype(dtype))})
            assert [error.name for error in errors if not error.ok] == [name], errors


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
    assert capsys.readouterr().out.splitlines()[1].startswith("1 of 1 checks: all is right on cpu")
    norm = jln.layer_norm
    monkeypatch.setattr(operators._operators, "layer_norm", lambda *, offset, **a: norm(offset=1.02 * offset, **a))
    assert operators.run(["layer_norm"], ["bfloat16", "float64"], ["xla"]) == 1
    first, second, last, _ = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"layer_norm, bfloat16, xla: WRONG: \w+: error .* of 7x100", first)
    assert second.startswith("layer_norm, float64, xla: WRONG: ") and last.startswith("2 of 2 checks: 2 WRONG on cpu")

    def crash(*_, **__):
        raise RuntimeError("a kernel\nfailed")

    monkeypatch.setattr(operators.Form, "function", crash)
    assert operators.run(["rms_norm"], ["float32"], ["xla"]) == 1
    assert capsys.readouterr().out.startswith("rms_norm, float32, xla: WRONG: RuntimeError: a kernel failed\n")


def test_an_end_of_the_time_and_an_estimate(capsys, monkeypatch):
    """A check takes 10 s here, and the estimate expects 30 of one of a Linear."""

    def checked(form, dtype, *_):
        assert jax.config.jax_enable_x64 == (dtype == "float64")  # and not in this thread alone
        return operators.Error("y", 0, 1, 0, 1), ""

    monkeypatch.setattr(operators, "check_form", checked)
    monkeypatch.setattr(operators, "time", types.SimpleNamespace(monotonic=iter(range(0, 1000, 10)).__next__))
    assert operators.run(["rms_norm", "rms_norm_linear"], DTYPES, ["xla"], seconds=55) == 0
    out, err = capsys.readouterr()
    assert err == "8 checks\nsome 160 s for all\n" and "\n6 of 8 checks: all is right on cpu" in out


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
    ("check", "layernorm"): "unknown operator 'layernorm'; did you mean layer_norm or ",
    ("check", "--dtype", "float8"): "invalid choice: 'float8' (choose from",
    ("check", "--implementation", "triton"): "triton cannot run: triton is not installed",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_bad_requests_have_status_2(arguments, monkeypatch, capsys):
    monkeypatch.setattr(__main__.target, "missing", lambda _: "triton is not installed")
    monkeypatch.setattr(sys, "argv", ["jln", *arguments])
    with pytest.raises(SystemExit, match=r"^2$"):
        __main__.main()
    out, err = capsys.readouterr()
    assert out == "" and ERRORS[arguments] in err


def process(*arguments, before="", **environment):
    """Run some code and then `python -m jln` in a process of its own."""
    code = f"import sys, runpy\n{before}\nsys.argv = ['jln', *{arguments!r}]\nrunpy.run_module('jln', None, '__main__')"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_xla_alone_runs_without_triton_and_what_is_asked_for_twice_runs_once():
    before = "sys.modules['triton'] = None\nfrom jln.testing import operators; operators.SIZES = (((3, 4), (2,)),)"
    ran = process("check", "rms_norm", "--dtype", "float32", "--dtype", "fp32", before=before)
    assert ran.returncode == 0 and ran.stdout.count("rms_norm, float32, xla: 0.") == 1, ran.stderr


def test_no_device_is_one_line_and_status_2():
    ran = process("doctor", JAX_PLATFORMS="nonsense")
    assert ran.returncode == 2 and ran.stdout.startswith("jln: no device: ") and len(ran.stdout.splitlines()) == 1
