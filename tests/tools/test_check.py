"""`python -m jln check`: it accepts what is right, rejects what is wrong, and says so."""

import contextlib
import functools
import itertools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from catalogue import EPSILON
from jln import reference
from jln.testing import operators
from jln.testing.operators import DTYPES, FORMS, Judge, step

SMALL = (((7, 100), (20,)),)  # 100 is no power of two, so that a sum divided by it gives a mean that is not exact


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(operators, "SIZES", SMALL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_right_rules_are_accepted(form, dtype, small):
    for seed in range(3):
        error, size = operators.check_form(FORMS[form], dtype, "xla", jax.devices()[0], seed)
        assert error.ok, (seed, error, size)


def test_right_kernels_are_accepted(small):
    for form in ("layer_norm", "add_rms_norm", "layer_norm_linear"):
        error, _ = operators.check_form(FORMS[form], "bfloat16", "triton", jax.devices()[0])
        assert error.ok and 0 < error.part <= 1, error


def test_the_sizes_reach_every_kind_of_kernel():
    """A ragged last tile, a row in chunks, few features and several Linears that are not few."""
    (norm, _), (wide, several) = operators.SIZES
    assert norm[0] % 2 and norm[1] % 16 and wide[1] > 16384 and len(several) > 1 and sum(several) > 256


def layer_norm(slip=None):
    """Return LayerNorm in plain jnp with one slip in it, or none.

    Its result and each gradient are rounded once.
    """

    def terms(x, scale):
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean = jnp.mean(wide, -1, keepdims=True)
        two_passes = jnp.mean((wide - mean) ** 2, -1, keepdims=True)
        one_pass = jnp.mean(wide * wide, -1, keepdims=True) - mean**2
        variance = jnp.maximum(one_pass, 0) if slip == "one-pass variance" else two_passes
        rstd = jax.lax.rsqrt(variance + EPSILON)
        return (wide - mean) * rstd, rstd, scale.astype(wide.dtype)[None, :]

    @jax.custom_vjp
    def norm(x, scale, offset):
        x_hat, _, s = terms(x, scale)
        return (x_hat * s + offset.astype(s.dtype)[None, :]).astype(x.dtype)

    def backward(saved, dy):
        x, scale = saved
        x_hat, rstd, s = terms(x, scale)
        dy = dy.astype(s.dtype)
        c1, c2 = (jnp.mean(dy * s * a, -1, keepdims=True) for a in (1, x_hat))
        if slip == "c1 rounded to bfloat16":
            c1 = jax.lax.reduce_precision(c1, exponent_bits=8, mantissa_bits=7)
        if slip == "c2 dropped":
            c2 = 0 * c2
        dx, dscale, doffset = rstd * (dy * s - c1 - x_hat * c2), jnp.sum(dy * x_hat, 0), jnp.sum(dy, 0)
        if slip == "dscale off by a percent":
            dscale = 1.01 * dscale
        if slip == "dx off by a percent":
            dx = 1.01 * dx
        if slip == "an element of doffset off":
            doffset = doffset.at[3].mul(1.1)
        return dx.astype(x.dtype), dscale.astype(scale.dtype), doffset.astype(x.dtype)

    norm.defvjp(lambda x, scale, offset: (norm(x, scale, offset), (x, scale)), backward)
    return lambda *arrays: {"y": norm(*arrays)}


# For each slip the data that shows it, and the results that are off then. In 16 bits the rounding of c1 shows only
# where c1 is large beside dx, and one pass loses the variance only where the mean is large.
SLIPS = {
    "dscale off by a percent": ("normal", {"dscale"}),
    "dx off by a percent": ("normal", {"dx"}),
    "c2 dropped": ("normal", {"dx"}),
    "c1 rounded to bfloat16": ("large mean", {"dx"}),
    "one-pass variance": ("large mean", {"y", "dx", "dscale"}),
    "an element of doffset off": ("large mean", {"doffset"}),
}
NAMES = FORMS["layer_norm"].arrays


def plain(*arrays):
    return {"y": reference.layer_norm(*arrays, epsilon=EPSILON)}


def operands(data, dtype, seed, shape=(64, 1024)):
    """Return x, scale and offset, and the cotangent of y, in a dtype."""
    random = np.random.default_rng(seed)
    x, scale, offset, dy = (random.standard_normal(s) for s in (shape, shape[1:], shape[1:], shape))
    if data == "large mean":  # a variance in one pass loses it; c1 is large, and dx is not
        x, scale, dy = x + 1000, np.ones(shape[1:]), dy + 10
    x, scale, offset, dy = (a.astype(jnp.dtype(dtype)) for a in (x, scale + (data == "normal"), offset, dy))
    return [x, scale, offset], {"y": dy}


@pytest.mark.parametrize("dtype", DTYPES)
def test_slips_are_rejected_by_what_they_break(dtype):
    rules = {slip: step(layer_norm(slip), NAMES) for slip in (None, *SLIPS)}
    for data, seed in itertools.product(("normal", "large mean"), range(2)):
        given = operands(data, dtype, seed)
        judge = Judge(step(plain, NAMES), step(plain, NAMES)(*given), given, dtype)
        assert all(error.ok for error in judge.errors(rules[None](*given)))
        for slip, (shows, results) in SLIPS.items():
            if shows == data:
                errors = judge.errors(rules[slip](*given))
                assert {error.name for error in errors if not error.ok} == results, (slip, seed, errors)


def test_limits_are_no_wider_than_what_they_are_made_of():
    """The limits for well-conditioned float32 data are at most plain jnp's error twice and some thirty roundings."""
    given = operands("normal", "float32", 0, (16, 128))
    own = step(plain, NAMES)(*given)
    judge = Judge(step(plain, NAMES), own, given, "float32")
    for error in judge.errors(own):
        true = judge.true[error.name]
        assert error.limit - 2 * error.error < 4e-6 * np.max(np.abs(true)), error
        assert error.rms_limit - 2 * error.rms_error < 1e-6 * np.max(np.abs(true)), error


def test_a_sum_in_any_order_may_be_off_by_more():
    given = operands("normal", "float32", 0, (64, 128))
    own = step(plain, NAMES)(*given)
    strict, mild = (
        Judge(step(plain, NAMES), own, given, "float32", sums).errors(own) for sums in (None, {"dscale": 64})
    )
    wider = {a.name for a, b in zip(strict, mild, strict=True) if b.limit > a.limit}
    assert wider == {"dscale"}


def test_overflow_is_no_error_where_the_truth_overflows_too():
    true = np.array([1e6, 2.0])
    right, wrong = np.array([np.inf, 2], "float16"), np.array([-np.inf, 2], "float16")
    assert operators._sizes(right, true) == (0, 0)
    assert operators._sizes(wrong, true)[0] == np.inf
    assert np.isnan(operators._sizes(np.array([np.nan, 2]), true)[0])


def test_the_root_mean_square_of_large_numbers_does_not_overflow():
    largest, rms = operators._sizes(np.array([3e200, -4e200]), np.zeros(2))
    assert largest == 4e200 and rms == pytest.approx(np.sqrt(12.5) * 1e200)


def broken(function, module=None, **options):
    """`Form.function` with the first parameter's gradient off by a percent, but in the reference."""
    ours = function(module or jln, **options)
    if module is reference:
        return ours

    @jax.custom_vjp
    def f(*arrays):
        return ours(*arrays)

    def backward(pullback, dy):
        dx, dscale, *others = pullback(dy)
        return dx, dscale * 1.01, *others

    f.defvjp(lambda *arrays: jax.vjp(ours, *arrays), backward)
    return f


def test_what_is_wrong_is_found_and_said(small, capsys, monkeypatch):
    assert operators.run(["layer_norm"], ["bfloat16"], ["xla"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("all is right on cpu")
    original = operators.Form.function
    monkeypatch.setattr(
        operators.Form, "function", lambda form, *a, **k: broken(functools.partial(original, form), *a, **k)
    )
    assert operators.run(["layer_norm"], ["bfloat16", "float64"], ["xla"]) == 1
    first, second, last, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("layer_norm, bfloat16, xla: WRONG: dscale: error") and first.endswith("of 7x100")
    assert second.startswith("layer_norm, float64, xla: WRONG: dscale") and last.startswith("2 WRONG on cpu")

    def crash(*_, **__):
        raise RuntimeError("a kernel\nfailed")

    monkeypatch.setattr(operators.Form, "function", crash)
    assert operators.run(["rms_norm"], ["float32"], ["xla"]) == 1
    assert capsys.readouterr().out.startswith("rms_norm, float32, xla: WRONG: RuntimeError: a kernel failed\n")


def test_a_kernel_whose_bits_differ_is_wrong_on_a_gpu(small, monkeypatch):
    """Kernels' programs run twice on a GPU, memory for the results full of NaN between; a CPU stands in for it."""
    numbers, held, full = iter(range(1, 9)), [], jnp.full
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(operators, "ON_A_GPU", ())
    monkeypatch.setattr(jnp, "full", lambda size, *a: held.append(full(size, *a)) or held[-1])
    monkeypatch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
    form = FORMS["rms_norm"]
    assert operators.check_form(form, "float32", "xla", gpu)[0].ok and not held
    assert operators.check_form(form, "float32", "triton", gpu)[0].ok and len(held) == 3 * 3  # y, dx, dscale
    assert all(np.isnan(np.asarray(a).view(dtype)).all() for a in held for dtype in ("float16", "float32"))
    original = operators.step

    def drifting(function, names):
        run = original(function, names)
        return lambda *a: {n: r * (1 + 1e-6 * next(numbers)) if n == "y" else r for n, r in run(*a).items()}

    monkeypatch.setattr(operators, "step", drifting)
    with pytest.raises(RuntimeError, match=r"not the same bits twice, of \(7, 100\)"):
        operators.check_form(form, "float32", "triton", gpu)


def process(*arguments, before="", **environment):
    """Run some code and then `python -m jln` in a process of its own."""
    code = (
        f"import sys, runpy\n{before}\nsys.argv = ['jln', *{arguments!r}]\nrunpy.run_module('jln', run_name='__main__')"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


QUICK = "from jln.testing import operators; operators.SIZES = (((3, 4), (2,)),)"
ERRORS = {
    ("chekc",): "invalid choice: 'chekc'",
    ("check", "layernorm"): "unknown operator layernorm; known are add_layer_norm",
    ("check", "--dtype", "float8"): "invalid choice: 'float8' (choose from",
    ("check", "--implementation", "cuda"): "invalid choice: 'cuda' (choose from",
}


@pytest.mark.parametrize("arguments", ERRORS)
def test_bad_requests_have_status_2(arguments):
    ran = process(*arguments)
    assert ran.returncode == 2 and ran.stdout == "" and ERRORS[arguments] in ran.stderr


def test_without_triton_it_checks_what_there_is():
    asked = ("check", "rms_norm", "--dtype", "float32")
    ran = process(*asked, before=f"sys.modules['triton'] = None; {QUICK}", TRITON_INTERPRET="0")
    assert ran.returncode == 0 and ran.stdout.startswith("rms_norm, float32, xla: 0.") and "triton" not in ran.stdout
    ran = process(*asked, "--implementation", "triton", before="sys.modules['triton'] = None")
    assert ran.returncode == 2 and "triton cannot run: triton is not installed" in ran.stderr


def test_the_interpreter_runs_the_kernels_unasked():
    twice = ("--dtype", "float32", "--implementation", "triton") * 2  # and it runs once
    ran = process("check", "rms_norm", *twice, before=f"import os; os.environ.pop('TRITON_INTERPRET', 0); {QUICK}")
    assert ran.returncode == 0 and ran.stdout.count("rms_norm, float32, triton: 0.") == 1, ran.stderr


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_no_device_is_one_line_and_status_2(command):
    ran = process(command, JAX_PLATFORMS="nonsense")
    assert ran.returncode == 2 and ran.stdout.startswith("jln: no device: ") and len(ran.stdout.splitlines()) == 1


def test_a_reader_that_has_gone_is_no_error():
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m jln doctor | head -1; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False,
    )  # fmt: skip
    assert ran.stderr == "" and ran.returncode in (0, 141)  # 0: it was faster than head
