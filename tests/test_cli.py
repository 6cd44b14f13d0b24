"""The command line: what it finds, its exit statuses, its errors in one line, JSON, and what it says without a GPU."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import pytest

pytest.importorskip("typer")

from jln._catalogue import OPERATORS
from jln._cli import app, check, controls, doctor, samples
from jln._cli.samples import Sample
from jln._triton import cache
from jln._triton.chip import CHIP_VARIABLE


def run(capsys, *arguments):
    """-> (exit status, stdout, stderr)"""
    status = app.run(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def process(*arguments, before="", **environment):
    """The same in a process of its own: `python -m jln`, after some code."""
    code = (
        f"import sys, runpy\n{before}\nsys.argv = ['jln', *{arguments!r}]\nrunpy.run_module('jln', run_name='__main__')"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_one_operator_at_one_size(capsys):
    status, out, _ = run(capsys, "check", "layer_norm", "--shape", "5x7", "--dtype", "bfloat16")
    assert status == 0 and out.startswith("layer_norm of 5x7 in bfloat16, normal (seed 0)\n")
    assert "xla on cpu:0" in out and "triton on cpu:0" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("ok")] == ["y", "dx", "dscale", "doffset"] * 2
    assert out.endswith("all within their limits\n")


def test_several_linears_at_one_size(capsys):
    arguments = ("check", "add_rms_norm_linear", "--shape", "5x16", "--features", "8+3", "--implementation", "xla")
    status, out, _ = run(capsys, *arguments)
    assert status == 0 and out.startswith("add_rms_norm_linear of 5x16 -> 8+3 features in float32, normal (seed 0)\n")
    found = [line.split()[0] for line in out.splitlines() if line.endswith("ok")]
    both = [f"{name}[{i}]" for name in ("dkernel", "dbias") for i in (0, 1)]
    assert found == ["y[0]", "y[1]", "total", "dx", "dresidual", "dscale", *both]


def test_pleasant_in_a_terminal_and_plain_in_a_pipe(capsys, monkeypatch):
    arguments = ("check", "rms_norm", "--shape", "3x4", "--implementation", "xla")
    _, plain, err = run(capsys, *arguments)
    assert plain.isascii() and err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    _, pleasant, err = run(capsys, *arguments)
    assert "│" in pleasant and "\x1b[32mok" in pleasant and "xla on cpu:0" in err


def test_a_narrow_terminal_cuts_no_number(capsys, monkeypatch):
    arguments = ("check", "rms_norm", "--shape", "3x4", "--implementation", "xla")
    _, plain, _ = run(capsys, *arguments)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    status, narrow, _ = run(capsys, *arguments)
    assert status == 0 and "\u2026" not in narrow and "\x1b[32m" in narrow
    assert set(plain.split()) <= set(re.sub(r"\x1b\[\d+m", "", narrow).split())


@pytest.mark.parametrize("init", samples.get_args(samples.Init))
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_with_all_data(capsys, name, init):
    # A width that is no power of two, and a mean that its sum does not give exactly.
    status, out, _ = run(capsys, "check", name, "--shape", "3x100", "--init", init, "--dtype", "bfloat16", "--json")
    assert status == 0, out
    found = json.loads(out)
    operator = OPERATORS[name]
    names = [a.name for a in operator.results] + [f"d{a}" for a in operator.names]
    assert [r["name"] for r in found["runs"][0]["accuracy"]] == names


def test_data_is_what_it_is_called():
    def x(init):
        return Sample(OPERATORS["layer_norm"], (50, 400), 1, "float32", init).arrays()[0][0]

    assert (x("ones") == 1).all()
    assert set(x("integers").flat) == {-3, -2, -1, 0, 1, 2, 3}
    assert abs(x("normal").mean()) < 0.03 and abs(x("normal").std() - 1) < 0.03
    assert -1 <= x("uniform").min() < -0.99 and 0.99 < x("uniform").max() < 1
    assert abs(x("large-mean").mean() - 1000) < 0.1 and abs(x("large-mean").std() - 1) < 0.03


def test_timing(capsys):
    arguments = ("check", "layer_norm_linear", "--shape", "64x256", "--features", "32", "--time", "--json")
    status, out, _ = run(capsys, *arguments, "--implementation", "xla")
    (only,) = json.loads(out)["runs"]
    assert status == 0
    sample = Sample(OPERATORS["layer_norm_linear"], (64, 256), 32, "float32")
    # x, y, and scale, offset, kernel, bias; then dy, x, dx, scale and kernel again, and their gradients.
    x, y, parameters = 64 * 256, 64 * 32, 2 * 256 + 256 * 32 + 32
    moved = {"forward": 4 * (x + y + parameters), "backward": 4 * (y + 2 * x + 256 + 256 * 32 + parameters)}
    operations = {"forward": 7 * x + 2 * x * 32, "backward": 13 * x + 4 * x * 32}
    for direction, time in only["time"].items():
        assert (sample.bytes_once(direction), sample.operations(direction)) == (moved[direction], operations[direction])
        assert 1e-7 < time["seconds"] < 1
        assert time["gb_per_s"] == pytest.approx(moved[direction] / time["seconds"] / 1e9)
        assert time["tflop_per_s"] == pytest.approx(operations[direction] / time["seconds"] / 1e12)


def test_the_interpreter_is_not_timed(capsys):
    status, out, _ = run(capsys, "check", "rms_norm", "--shape", "4x64", "--time")
    assert status == 0 and "triton on cpu:0: checked, and not timed" in out
    assert "xla on cpu:0, timed" in out and "GB/s  TFLOP/s" in out


def break_it(monkeypatch, name="layer_norm"):
    """Have an operator's dscale off by a percent."""
    original = samples.ours

    def broken(operator, implementation):
        ours = original(operator, implementation)
        if operator != name or implementation != "xla":
            return ours

        @jax.custom_vjp
        def f(*args):
            return ours(*args)

        def backward(pullback, dy):
            dx, dscale, *others = pullback(dy)
            return dx, dscale * 1.01, *others

        f.defvjp(lambda *args: jax.vjp(ours, *args), backward)
        return f

    for module in (check, samples):
        monkeypatch.setattr(module, "ours", broken)


def test_a_wrong_gradient_is_found_at_one_size(capsys, monkeypatch):
    break_it(monkeypatch)
    status, out, _ = run(capsys, "check", "layer_norm", "--shape", "5x100")
    assert status == 1 and out.endswith("some are NOT within their limits\n")
    assert [line.split()[0] for line in out.splitlines() if line.endswith("WRONG")] == ["dscale"]


@pytest.fixture
def small(monkeypatch):
    """The whole check, of two operators in two dtypes at a small size."""
    monkeypatch.setattr(check, "OPERATORS", {n: OPERATORS[n] for n in ("layer_norm", "rms_norm_linear")})
    monkeypatch.setattr(check, "DTYPES", ("bfloat16", "float64"))
    monkeypatch.setattr(check, "NORM_SIZES", (((5, 9), 0),))
    monkeypatch.setattr(controls, "WRONG", dict(list(controls.WRONG.items())[:2]))
    monkeypatch.setattr(check, "LINEAR_SIZES", (((5, 9), 3),))


def test_everything(capsys, small):
    status, out, _ = run(capsys, "check")
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("  ")] == [
        ["operator", "implementation"],
        ["layer_norm", "triton"],
        ["layer_norm", "xla"],
        ["rms_norm_linear", "triton"],
        ["rms_norm_linear", "xla"],
    ]
    assert "3 of 3 controls were judged rightly" in out and out.endswith("all is right\n")


def test_what_is_wrong_is_found_and_said(capsys, small, monkeypatch):
    break_it(monkeypatch)
    monkeypatch.setitem(controls.WRONG, "one that is right", controls.RIGHT)

    def crash(*_, **__):
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(check, "check_hvp", crash)
    status, out, _ = run(capsys, "check", "--json")
    found = json.loads(out)
    assert status == 1 and not found["ok"] and not found["controls_judged_rightly"]["one that is right"]
    bad = [c for c in found["devices"][0]["checks"] if not c["ok"]]
    by_accuracy = {(c["operator"], c["implementation"], c["check"]) for c in bad if c["check"] != "second order"}
    assert by_accuracy == {("layer_norm", "xla", check) for check in ("bfloat16", "float64", "gradients")}
    assert {c["where"] for c in bad if c["check"] == "second order"} == {"RuntimeError: a kernel failed"}
    status, out, _ = run(capsys, "check")
    assert "WRONG: misjudged one that is right" in out and "WRONG: layer_norm, xla, gradients: argument 1[" in out
    assert status == 1 and out.endswith("something is WRONG\n")


ERRORS = {
    "unknown command": (["chekc"], "No such command 'chekc'"),
    "unknown option": (["check", "layer_norm", "--bogus"], "No such option"),
    "unknown operator": (["check", "layernorm"], "unknown operator 'layernorm'; known are layer_norm, rms_norm"),
    "unknown dtype": (["check", "layer_norm", "--dtype", "float8"], "'float8' is not one of 'float16'"),
    "unknown data": (["check", "layer_norm", "--init", "zeros"], "'zeros' is not one of 'ones'"),
    "shape is no shape": (["check", "layer_norm", "--shape", "8192,4096"], "a shape is written as 8192x4096"),
    "no shape": (["check", "layer_norm", "--shape", ""], "of positive sizes; got ''"),
    "shape is empty": (["check", "layer_norm", "--shape", "0x8"], "of positive sizes; got '0x8'"),
    "no features": (["check", "layer_norm_linear", "--features", "0"], "64+16+16, all positive; got '0'"),
    "no features of the second": (["check", "layer_norm_linear", "--features", "4+"], "positive; got '4+'"),
    "features of a norm": (["check", "layer_norm", "--features", "8"], "layer_norm has none"),
    "shape of nothing": (["check", "--shape", "8x8"], "--shape needs an operator"),
    "time of nothing": (["check", "--time"], "--time needs an operator"),
    "no such device": (["check", "layer_norm", "--device", "gpu:7"], "no device 'gpu:7'; there are cpu:0"),
    "too large": (["check", "layer_norm", "--shape", "10000000x10000000"], "not enough memory"),
    "absurdly large": (["check", "layer_norm", "--shape", "1000000000x1000000"], "too large: 1000000000x1000000"),
    "too many axes": (["check", "layer_norm", "--shape", "x".join("2" * 40)], "too large: 2x2"),
    "too many features": (["check", "rms_norm_linear", "--features", "9" * 18], "too large: 64x1024 to 9999"),
    "too many digits": (["check", "layer_norm", "--shape", "9" * 5000], "a shape is written as 8192x4096"),
    "unknown workload": (["report", "--workload", "gpt2"], "unknown workload 'gpt2'; known are layer-norm-1024, "),
    "unknown chip": (["report", "--chip", "v100"], "unknown chip 'v100'; known are a100, h100, h200, b200"),
    "unknown peer": (["report", "--peer", "apex"], "unknown peer 'apex'; known are jln, jln-norm, jnp, flax, tokamax"),
    "nothing to compile": (["report"], "jln's kernels cannot be compiled: "),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_requests_are_one_line_and_status_2(capsys, case):
    arguments, message = ERRORS[case]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and message in err and err.startswith("jln: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_no_device_is_one_line_and_status_2(command):
    ran = process(command, JAX_PLATFORMS="nonsense")
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("jln: no device: ") and len(ran.stderr.splitlines()) == 1


def piped(command, **options):
    """-> (exit status, stderr) of `python -m jln`, whose reader is gone before it writes, or as options say."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-m", "jln", *command]
    ran = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment, **options)
    if ran.stdout is not None:
        ran.stdout.close()
    _, err = ran.communicate()
    return ran.returncode, err


# doctor prints; check asked for help has rich print.
@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"], ["check", "--help"]])
def test_a_reader_that_has_gone_is_no_error(command):
    assert piped(command, stdout=subprocess.PIPE) == (128 + signal.SIGPIPE, "")


def test_a_reader_that_goes_early_is_no_error():
    """As of `| head -1`, with more lines to come, and no buffer to hold them."""
    command = (
        f"{sys.executable} -u -m jln check rms_norm --shape 3x4 --implementation xla | head -1; exit ${{PIPESTATUS[0]}}"
    )
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("rms_norm of 3x4 in float32, normal (seed 0)\n", "")
    assert ran.returncode in (0, 128 + signal.SIGPIPE)  # 0: it was faster than head


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["doctor"], ["check", "--help"]])
def test_a_full_disk_is_one_line_and_status_2(command):
    with open("/dev/full", "w") as full:
        status, err = piped(command, stdout=full)
    assert (status, err) == (2, "jln: cannot write the output: No space left on device\n")


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_complaint_that_cannot_be_written_is_status_2():
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-m", "jln", "check", "nope"], stdout=full, stderr=full, check=False)
    assert ran.returncode == 2


def test_no_stdout_is_no_error():
    ran = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m jln doctor >&-"],
        capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")


def test_without_the_extra_it_says_which():
    ran = process("doctor", before="sys.modules['typer'] = None")
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr == 'jln: the command line needs typer: pip install "jln[cli]"\n'


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


def test_doctor(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and out.endswith("nothing is broken\n")
    assert f"jax                {jax.__version__}" in out
    status, out, _ = run(capsys, "doctor", "--json")
    found = json.loads(out)
    assert found["versions"]["jax"] == jax.__version__ and found["devices"][0]["device"] == "cpu:0"
    assert {o["runs"] for o in found["operators"]} == {"xla"}
    assert {o["operator"].split(",")[0] for o in found["operators"]} == set(OPERATORS)


class Gpu:
    platform, id, device_kind = "gpu", 0, "NVIDIA H200"


def test_doctor_says_where_tiles_are_from(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "choices", lambda *_: [])
    assert "Tiles of the kernels: heuristics, as there is no GPU." in run(capsys, "doctor")[1]
    monkeypatch.setenv(CHIP_VARIABLE, "h200")
    (tmp_path / "a.json").write_text('{"schema": 1, "entries": []}')
    monkeypatch.setenv("JLN_TUNING", str(tmp_path / "a.json"))
    out = run(capsys, "doctor", "--json")[1]
    assert json.loads(out)["tuning"].startswith(f"0 choices for h200 in {tmp_path / 'a.json'}, else ")
    (tmp_path / "a.json").write_text("{")
    found = run(capsys, "doctor")
    assert found[0] == 1 and f"BROKEN: {tmp_path / 'a.json'} is ignored in part: all of it: Expecting" in found[1]
    monkeypatch.setenv(CHIP_VARIABLE, "h2000")
    assert "BROKEN: JLN_CHIP: unknown chip 'h2000'" in run(capsys, "doctor")[1]


def test_doctor_says_where_compiled_kernels_are(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "choices", lambda *_: [])
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    cache.store("key", {})
    assert f"Compiled kernels: 1 of at most {cache.LIMIT} in {tmp_path}." in run(capsys, "doctor")[1]
    monkeypatch.setenv(cache.VARIABLE, "")
    assert "Compiled kernels: not kept, as JLN_CACHE_DIR says." in run(capsys, "doctor")[1]


@pytest.mark.filterwarnings("ignore:jln runs")
def test_doctor_says_what_runs_on_a_gpu_and_why(monkeypatch):
    """Lowered for CUDA as JAX would; this machine has none."""
    import importlib

    if importlib.util.find_spec("jax_triton") is None:
        pytest.skip("needs jax-triton")
    monkeypatch.setenv(CHIP_VARIABLE, "h200")
    monkeypatch.setattr(doctor.target, "missing", lambda: None)
    rows = {row["operator"]: row for row in doctor.choices(Gpu())}
    assert rows["layer_norm"]["runs"] == "triton"
    assert rows["layer_norm"]["forward"] == ["forward_kernel"]
    assert rows["layer_norm"]["backward"] == ["backward_kernel", "reduce_kernel"]
    fused = ["row_sums_kernel", "backward_kernel", "parameters_kernel"]
    assert rows["layer_norm_linear, few features"]["backward"] == fused
    assert rows["layer_norm_linear"]["backward"][:2] == ["backward_kernel", "reduce_kernel"]
    monkeypatch.setattr(doctor.target, "missing", lambda: "jax_triton is not installed")
    row = doctor.choices(Gpu())[0]
    assert row["runs"] == "xla" and row["forward"] == row["backward"] == []
    assert row["why_not_the_other"] == "Why not triton on gpu:0 (NVIDIA H200): jax_triton is not installed."


GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.6", "jax-triton": "0.3.1", "triton": "3.9.0"}


@pytest.mark.parametrize(
    ("versions", "count"),
    [
        ({}, 0),
        ({"jax": "0.12.0", "jaxlib": "0.12.0"}, 0),
        ({"jax-triton": "0.4.1"}, 0),
        ({"triton": "3.6.0", "numpy": "2.3.1"}, 0),
        ({"jax-triton": "0.4.1", "jax": "0.12.0", "jaxlib": "0.12.0"}, 0),
        ({"jax-triton": "0.4.1", "triton": "3.6.0", "numpy": "2.3.1"}, 0),
        ({"triton": "3.6.0"}, 1),
        ({"jax-cuda13-plugin": "0.10.1"}, 1),
        ({"jax-cuda13-plugin": "0.10.2.dev1"}, 0),
        ({"triton": "3.6.0", "jax-cuda13-plugin": "0.10.1"}, 2),
    ],
)
def test_doctor_knows_bad_pairs(capsys, monkeypatch, versions, count):
    monkeypatch.setattr(doctor, "installed", lambda: dict.fromkeys(doctor.PACKAGES) | GOOD | versions)
    monkeypatch.setattr(doctor, "choices", lambda *_: [])
    status, out, _ = run(capsys, "doctor")
    assert status == (1 if count else 0) and out.count("BROKEN: ") == count
    assert f"{count} of {len(doctor.BAD_PAIRS)} are here" in out


def test_doctor_finds_a_gpu_that_is_not_used(capsys, monkeypatch):
    monkeypatch.setattr(doctor.pathlib.Path, "exists", lambda path: True)
    monkeypatch.setattr(doctor, "choices", lambda *_: [])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    status, out, _ = run(capsys, "doctor")
    assert status == 1 and "JAX_PLATFORMS=cpu hides it" in out
    monkeypatch.delenv("JAX_PLATFORMS")
    assert "JAX does not see it: pip install" in run(capsys, "doctor")[1]
    assert doctor._idle_gpu([Gpu()])[0].startswith("the GPU runs jln without its Triton kernels: ")


def interrupted_in(package, folder):
    """`python -m jln tune --dry-run`, which ^C meets while it imports a package."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-m", "jln", "tune", "--dry-run", "decode-1"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("package", ["numpy", "jax", "typer"])
def test_an_interrupt_while_it_starts_ends_it_without_a_word(package, tmp_path):
    """These are what the time goes to. (numpy makes an ImportError of a KeyboardInterrupt.)"""
    ran = interrupted_in(package, tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")


def test_an_interrupt_of_a_command_is_one_line(tmp_path):
    """It is the command that imports this one."""
    ran = interrupted_in("triton", tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "jln: interrupted\n")
