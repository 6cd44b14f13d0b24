"""Tests of the command line: exit statuses, errors in one line, terminals, pipes, full disks and interrupts."""

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from command_line import process, run


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
    "unknown chip": (["report", "--chip", "v100"], "unknown chip 'v100'; known are a100, h100, h200, b200\n"),
    "kernels for no chip": (
        ["report", "--kernels", "--chip", "v100"],
        "known are a100, l4, l40s, h100, h200, b200, mi",
    ),
    "a program for no such chip": (
        ["report", "--chip", "l4"],
        "a whole program for l4 is none of a100, h100, h200, b200",
    ),
    "unknown peer": (["report", "--peer", "apex"], "unknown peer 'apex'; known are jln, jln-norm, jnp, flax, tokamax"),
    "benchmark of nothing": (["bench", "gpt5"], "unknown workload 'gpt5'"),
    "benchmark against nothing": (
        ["bench", "--peers", "jln,flux"],
        "unknown peer 'flux'; known are jln, jln-norm, jnp, cudnn",
    ),
    "benchmark on no device": (["bench", "--device", "gpu:7"], "no device 'gpu:7'"),
    "no repetitions": (["bench", "--repetitions", "0"], "greater than or equal to 1"),
    "resume what": (["bench", "--resume"], "--resume needs --output"),
    "bench into a file": (["bench", "--output", __file__], f"cannot write {__file__}: "),
    "report into a file": (["report", "--output", f"{__file__}/x"], f"cannot write {__file__}/x: "),
    "tune for nothing": (["tune", "gpt5", "--dry-run"], "unknown workload 'gpt5'"),
    "tune for the CPU": (["tune", "cpu-1024x4096-float32", "--dry-run"], "unknown workload 'cpu-1024x4096-float32'"),
    "tune for no chip": (["tune", "--chip", "h2000", "--dry-run"], "unknown chip 'h2000'; known are a100"),
    "tune on no chip": (["tune", "--chip", "h2000"], "unknown chip 'h2000'; --dry-run takes a100, l4, l40s"),
    "tune in no dtype": (["tune", "--dtype", "float64", "--dry-run"], "unknown dtype 'float64'; known are bfloat16"),
    "tune without timing": (["tune", "--repetitions", "0"], "greater than or equal to 1"),
    "nothing to compile": (["report"], "jln's kernels cannot be compiled: "),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_requests_are_one_line_and_status_2(capsys, case):
    arguments, message = ERRORS[case]
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and message in err and err.startswith("jln: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", ["report", "report --kernels", "bench --device cpu"])
def test_a_chip_that_nobody_knows_is_one_line_and_status_2(capsys, monkeypatch, arguments):
    monkeypatch.setenv("JLN_CHIP", "h2000")
    status, out, err = run(capsys, *arguments.split())
    assert (status, out) == (2, "") and err.startswith("jln: unknown JLN_CHIP 'h2000'; known are a100")


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_no_device_is_one_line_and_status_2(command):
    ran = process(command, JAX_PLATFORMS="nonsense")
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr.startswith("jln: no device: ") and len(ran.stderr.splitlines()) == 1


def piped(command, **options):
    """Run `python -m jln` with some options of `Popen` and return (exit status, stderr).

    Where stdout is a pipe its reader is gone before anything is written.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-m", "jln", *command]
    ran = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment, **options)
    if ran.stdout is not None:
        ran.stdout.close()
    _, err = ran.communicate()
    return ran.returncode, err


# doctor prints by itself; check prints its help by rich.
@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"], ["check", "--help"]])
def test_a_reader_that_has_gone_is_no_error(command):
    assert piped(command, stdout=subprocess.PIPE) == (128 + signal.SIGPIPE, "")


def test_a_reader_that_goes_early_is_no_error():
    """A reader that goes while more lines are to come, as in `| head -1`, is no error.

    Python runs with -u, so that no buffer holds those lines.
    """
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
    assert ran.stderr == 'jln: the command line needs typer: pip install -e ".[cli]" in a clone of jln\n'


def interrupted_in(package, folder):
    """Run `python -m jln tune --dry-run` where importing `package` sends ^C to the process, and return how it ended."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n"
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-m", "jln", "tune", "--dry-run", "decode-1"]
    # A process that a shell runs in the background ignores SIGINT, and so would its child: set it to its default.
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-S", "-c", heard, *command], capture_output=True, text=True, env=environment
    )


def test_an_interrupt_while_the_commands_load_ends_without_a_word(tmp_path):
    ran = interrupted_in("typer", tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_an_interrupt_of_a_command_is_one_line(tmp_path):
    """An interrupt of a running command is one line and status 130.

    It comes while triton is imported, which the command does and not the start.
    """
    ran = interrupted_in("triton", tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "jln: interrupted\n")
