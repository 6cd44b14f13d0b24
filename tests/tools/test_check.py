"""`python -m jln check`: what it computes, what it finds wrong, and with which implementations."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import types
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("typer")

from command_line import process, run
from jln._tools import accuracy, check, check_all, controls
from jln._tools.catalogue import OPERATORS
from jln._tools.workload import Init, Workload


def test_one_operator_at_one_size(capsys):
    status, out, _ = run(capsys, "check", "layer_norm", "--shape", "5x7", "--dtype", "bfloat16")
    assert status == 0 and out.startswith("layer_norm of 5x7 in bfloat16, normal (seed 0)\n")
    assert "xla on cpu:0" in out and "triton on cpu:0" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("ok")] == ["y", "dx", "dscale", "doffset"] * 2
    assert out.endswith("all within their limits\n")


INITS = get_args(Init)


# Every operator with all of them: tests/tools/test_limits.py.
@pytest.mark.parametrize(
    ("name", "init"), [(name, INITS[0]) for name in OPERATORS] + [("layer_norm", init) for init in INITS[1:]]
)
def test_every_operator_and_all_data(capsys, name, init):
    # A width that is no power of two, and a mean that its sum does not give exactly.
    status, out, _ = run(capsys, "check", name, "--shape", "3x100", "--init", init, "--dtype", "bfloat16", "--json")
    assert status == 0, out
    found = json.loads(out)
    operator = OPERATORS[name]
    names = [a.name for a in operator.results] + [f"d{a}" for a in operator.names]
    assert {r["device"] for r in found["accuracy"]} == {"cpu:0"}
    for implementation in ("triton", "xla"):
        assert [r["name"] for r in found["accuracy"] if r["implementation"] == implementation] == names


def test_data_is_what_it_is_called():
    def x(init):
        return Workload.sized(OPERATORS["layer_norm"], (50, 400), 1, "float32").draw(init)[0][0]

    assert (x("ones") == 1).all()
    assert set(x("integers").flat) == {-3, -2, -1, 0, 1, 2, 3}
    assert abs(x("normal").mean()) < 0.03 and abs(x("normal").std() - 1) < 0.03
    assert -1 <= x("uniform").min() < -0.99 and 0.99 < x("uniform").max() < 1
    assert abs(x("large-mean").mean() - 1000) < 0.1 and abs(x("large-mean").std() - 1) < 0.03


def test_timing(capsys):
    arguments = ("check", "layer_norm_linear", "--shape", "64x256", "--features", "32", "--time", "--json")
    status, out, _ = run(capsys, *arguments, "--implementation", "xla")
    times = json.loads(out)["times"]
    assert status == 0 and [time["direction"] for time in times] == ["forward", "backward"]
    workload = Workload.sized(OPERATORS["layer_norm_linear"], (64, 256), 32, "float32")
    # x, y, and scale, offset, kernel, bias; then dy, x, dx, scale, offset and kernel again, and their gradients.
    x, y, parameters = 64 * 256, 64 * 32, 2 * 256 + 256 * 32 + 32
    moved = {"forward": 4 * (x + y + parameters), "backward": 4 * (y + 2 * x + 2 * 256 + 256 * 32 + parameters)}
    operations = {"forward": 7 * x + 2 * x * 32, "backward": 13 * x + 4 * x * 32}
    for time in times:
        direction = time["direction"]
        counted = workload.bytes_once(direction), workload.operations(direction)
        assert counted == (moved[direction], operations[direction])
        assert 1e-7 < time["seconds"] < 1
        assert time["gb_per_s"] == pytest.approx(moved[direction] / time["seconds"] / 1e9)
        assert time["tflop_per_s"] == pytest.approx(operations[direction] / time["seconds"] / 1e12)


def test_the_interpreter_is_not_timed(capsys):
    status, out, _ = run(capsys, "check", "rms_norm", "--shape", "4x64", "--time")
    assert status == 0 and "triton on cpu:0: checked, and not timed" in out
    assert "xla on cpu:0, timed" in out and "GB/s  TFLOP/s" in out


def break_it(monkeypatch, name="layer_norm"):
    """Have an operator's dscale off by a percent."""
    original = check_all.exact

    @functools.cache
    def broken(workload, **how):
        ours = original(workload, **how)
        if workload.title != name or how.get("implementation") != "xla":
            return ours

        @jax.custom_vjp
        def f(*args):
            return ours(*args)

        def backward(pullback, dy):
            dx, dscale, *others = pullback(dy)
            return dx, dscale * 1.01, *others

        f.defvjp(lambda *args: jax.vjp(ours, *args), backward)
        return f

    for module in (check, check_all):
        monkeypatch.setattr(module, "exact", broken)


def test_a_wrong_gradient_is_found_at_one_size(capsys, monkeypatch):
    break_it(monkeypatch)
    status, out, _ = run(capsys, "check", "layer_norm", "--shape", "5x100")
    assert status == 1 and out.endswith("some are NOT within their limits\n")
    assert [line.split()[0] for line in out.splitlines() if line.endswith("WRONG")] == ["dscale"]


@pytest.fixture
def small(monkeypatch):
    """Cut the whole check down to two operators in two dtypes at a small size."""
    monkeypatch.setattr(check_all, "FORMS", {n: OPERATORS[n] for n in ("layer_norm", "rms_norm_linear")})
    monkeypatch.setattr(check_all, "CHECKS", ("bfloat16", "float64", "gradients", "second order"))
    monkeypatch.setattr(check_all, "NORM_SIZES", (((5, 9), 0),))
    monkeypatch.setattr(controls, "WRONG", dict(list(controls.WRONG.items())[:2]))
    monkeypatch.setattr(check_all, "LINEAR_SIZES", (((5, 9), 3),))


HERE = ("check", "--processes", "1")


def test_everything(capsys, small):
    status, out, err = run(capsys, *HERE)
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("  ")] == [
        ["operator", "implementation"],
        ["layer_norm", "xla"],
        ["layer_norm", "triton"],
        ["rms_norm_linear", "xla"],
        ["rms_norm_linear", "triton"],
    ]
    assert "3 of 3 controls were judged rightly" in out and out.endswith("all is right\n")
    begun, *told = err.splitlines()
    assert (
        begun == "9 checks to run, 0 were right before"
        and len(told) == 9
        and told[0].startswith("layer_norm, bfloat16 on cpu:0: xla 0.")
    )
    assert [line.split("; ")[-1].split(",")[0] for line in told] == [f"{i} of 9" for i in range(1, 10)]


def test_what_is_wrong_is_found_and_said(capsys, small, monkeypatch):
    break_it(monkeypatch)
    monkeypatch.setitem(controls.WRONG, "one that is right", controls.RIGHT)

    def crash(*_, **__):
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(check_all, "check_hvp", crash)
    status, out, _ = run(capsys, *HERE, "--json")
    found = json.loads(out)
    assert status == 1 and not found["ok"] and not found["controls_judged_rightly"]["one that is right"]
    bad = [c for c in found["checks"] if not c["ok"]]
    by_accuracy = {(c["operator"], c["implementation"], c["check"]) for c in bad if c["check"] != "second order"}
    assert by_accuracy == {("layer_norm", "xla", check) for check in ("bfloat16", "float64", "gradients")}
    assert {c["where"] for c in bad if c["check"] == "second order"} == {"RuntimeError: a kernel failed"}
    status, out, err = run(capsys, *HERE, "--implementation", "xla")
    assert "WRONG: misjudged one that is right" in out and "WRONG: layer_norm, xla, gradients: argument 1[" in out
    assert status == 1 and out.endswith("something is WRONG\n") and "layer_norm, bfloat16 on cpu:0: xla WRONG" in err


def test_a_check_that_ends_early_is_taken_up_again(capsys, small, monkeypatch, tmp_path):
    """The same command runs again what was wrong, not what was right, and all of it for another version of jln."""
    output = tmp_path / "found" / "check.jsonl"
    asked = (*HERE, "--dtype", "bfloat16", "--implementation", "xla", "--output", str(output))
    status, out, _ = run(capsys, *asked, "--seconds", "0")
    assert status == 3 and out.endswith("all is right; out of time before 2 checks: run it again\n")
    with monkeypatch.context() as patch:
        break_it(patch)
        status, _, err = run(capsys, *asked)
        assert status == 1 and len(err.splitlines()) == 3
    output.write_text(output.read_text() + '{"a line that was cut')
    status, out, err = run(capsys, *asked)
    assert status == 0 and [line.split(",")[0] for line in err.splitlines()[1:]] == ["layer_norm"]
    assert "rms_norm_linear" in out  # the table has what was found before
    status, _, err = run(capsys, *asked)
    assert (status, err) == (0, "0 checks to run, 2 were right before\n")
    monkeypatch.setattr(check_all, "identity", lambda *facts: f"of another version {facts}")
    status, _, err = run(capsys, *asked)
    assert status == 0 and len(err.splitlines()) == 3
    output.write_text("no JSON\n")
    status, _, err = run(capsys, *asked)
    assert status == 2 and "cannot go on from" in err and len(err.splitlines()) == 1


def test_processes_find_the_same_side_by_side():
    """Two processes check one dtype's first operators, with the order of their lines and no more left to chance."""
    before = "from jln._tools import check_all; check_all.FORMS = dict(list(check_all.FORMS.items())[:2])"
    asked = ("check", "--dtype", "float64", "--implementation", "xla", "--json", "--processes")
    several, one = (process(*asked, number, before=before) for number in ("2", "1"))
    assert several.returncode == one.returncode == 0, several.stderr + one.stderr

    def checks(ran):
        return [{k: v for k, v in c.items() if k != "seconds"} for c in json.loads(ran.stdout)["checks"]]

    assert checks(several) == checks(one) and len(checks(one)) == 2


def test_a_kernel_whose_bits_differ_is_wrong_on_a_gpu(monkeypatch):
    """Programs of kernels run twice on a GPU, the memory for the results poisoned between; a CPU stands in for it."""
    cpu = jax.devices("cpu")[0]
    numbers = iter(range(9))

    def exact(workload, **how):
        right = accuracy.exact(workload, implementation="xla")
        return right if how["implementation"] == "xla" else lambda *a: jax.tree.map(drift, right(*a))

    @jax.custom_jvp
    def drift(y):
        return y + jax.pure_callback(lambda: np.asarray(next(numbers), y.dtype), jax.ShapeDtypeStruct((), y.dtype))

    drift.defjvp(lambda primals, tangents: (drift(*primals), *tangents))
    gpu = types.SimpleNamespace(platform="gpu")
    monkeypatch.setattr(check_all, "exact", exact)
    monkeypatch.setattr(check_all, "ON_A_GPU", (((2, 4), 3),))
    monkeypatch.setattr(check_all, "NORM_SIZES", ())
    monkeypatch.setattr(check_all, "devices", lambda *_: [cpu])
    monkeypatch.setattr(jax, "device_put", lambda a, *_: jax.tree.map(jnp.asarray, a))
    monkeypatch.setattr(jax, "default_device", lambda _: contextlib.nullcontext())
    poisoned, full = [], jnp.full
    monkeypatch.setattr(jnp, "full", lambda size, *a: poisoned.append(full(size, *a)) or poisoned[-1])
    run = check_all._accuracy(OPERATORS["layer_norm"], gpu, "float32", 0)
    assert run("xla")[0] is True and not poisoned
    assert run("triton") == (False, float("inf"), "layer_norm of 2x4 in float32: not the same bits twice")
    held = [a.nbytes for a in poisoned]
    assert all(held.count(n) >= 3 for n in (36, 20)), held  # y and dx, dscale and doffset, and what rounds them up
    assert all(np.isnan(np.asarray(a).view(dtype)).all() for a in poisoned for dtype in ("float16", "float32"))


def test_without_triton_it_checks_what_there_is():
    ran = process("check", "rms_norm", "--shape", "3x4", before="sys.modules['triton'] = None", TRITON_INTERPRET="0")
    assert ran.returncode == 0, ran.stderr
    assert "xla on cpu:0" in ran.stdout and "triton on cpu:0: triton is not installed" in ran.stdout
    ran = process("check", "rms_norm", "--implementation", "triton", before="sys.modules['triton'] = None")
    assert ran.returncode == 2 and ran.stderr.startswith("jln: triton cannot run: triton is not installed")


def test_the_interpreter_runs_the_kernels_unasked():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jln", "check", "rms_norm", "--shape", "3x4"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0 and "triton on cpu:0\n" in ran.stdout
