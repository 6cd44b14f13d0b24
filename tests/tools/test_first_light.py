"""`benchmarks/first_light.sh` where something is missing or breaks: it says what, and spends no more of the time."""

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

pytest.importorskip("typer")
pytest.importorskip("triton")

import first_light

SCRIPT = pathlib.Path(first_light.__file__).with_suffix(".sh")
HAS_GPU = any(any(pathlib.Path("/dev").glob(files)) for files in ("nvidia[0-9]*", "kfd"))
pytestmark = pytest.mark.skipif(shutil.which("timeout") is None or HAS_GPU, reason="needs GNU's timeout, and no GPU")


def run(tmp_path, *arguments, **environment):
    given = {"OUT": str(tmp_path / "out"), "STATE": str(tmp_path / "state"), "PYTHON": sys.executable, **environment}
    command = ["bash", SCRIPT, *arguments]
    return subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "there is no NVIDIA or AMD GPU here; --cpu rehearses without one"),
        (("--cpu", "--minutes", "soon"), "--minutes is a positive whole number, not 'soon'"),
        (("--cpu", "--stages", "facts fist"), "there is no stage 'fist'"),
        (("--cpu", "--wheels", "nowhere"), "there is no folder 'nowhere'"),
    ],
)
def test_a_bad_request_is_one_line(tmp_path, arguments, said):
    ran = run(tmp_path, *arguments)
    assert (ran.returncode, ran.stderr) == (2, f"first_light.sh: {said}\n")
    assert not (tmp_path / "out").exists()


def test_facts_say_why_no_kernel_can_run(monkeypatch):
    monkeypatch.setattr(first_light, "CPU", False)
    for device, ours, why in (
        ({"platform": "gpu"}, {"missing": "jaxlib finds no ptxas"}, "jaxlib finds no ptxas"),
        ({"platform": "gpu"}, "RuntimeError: no chip", "RuntimeError: no chip"),
        ({"platform": "cpu"}, {"missing": None}, "JAX sees a cpu and no GPU"),
        ({"platform": "gpu"}, {"missing": None}, None),
    ):
        assert first_light.obstacle({"device": device, "jln": ours}) == why


def test_facts_that_fail_end_the_script(tmp_path):
    """The first kernel would fail for the same reason, and its causes take more than a minute."""
    (tmp_path / "sitecustomize.py").write_text("import jax\njax.devices = lambda *_: 1 / 0\n")
    ran = run(tmp_path, "--cpu", "--stages", "facts first", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1 and "no kernel can run here: ZeroDivisionError" in ran.stdout
    assert "== first" not in ran.stdout


def test_a_kernel_that_raises_has_its_causes_collected(tmp_path):
    """The script then ends, so that time is left; what was collected comes back, and no later stage begins."""
    (tmp_path / "sitecustomize.py").write_text("""
import os
if "TRITON_INTERPRET" in os.environ:
    from jln._triton import interpreter
    def fail(*_):
        raise RuntimeError("the kernel is broken")
    interpreter.run = fail
""")
    ran = run(tmp_path, "--cpu", "--stages", "facts first check", PYTHONPATH=str(tmp_path))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "the first kernel failed: the causes are collected" in ran.stdout
    assert "diagnosis verbose: 1" in ran.stdout and "diagnosis sanitizer: " in ran.stdout  # which is not installed
    assert "== check" not in ran.stdout
    with tarfile.open(tmp_path / "out" / "tests.tgz") as tar:
        (log,) = [tar.extractfile(m) for m in tar if m.name.endswith("verbose.log")]
        assert b"the kernel is broken" in log.read()


def test_a_stage_that_is_cut_off_is_taken_up_again(tmp_path):
    """The next call skips what has passed, and status 3 asks for one. `python` is a script here."""
    fake = tmp_path / "python"
    fake.write_text(
        '#!/bin/bash\n[[ "$*" != *first_light.py\\ facts* ]] || echo "{}" >"${@: -1}"\n'
        f'[[ "$*" != *check_card* || -e {tmp_path}/again ]] || {{ touch {tmp_path}/again; exit 3; }}\n'
    )
    fake.chmod(0o755)
    asked = ("--cpu", "--stages", "facts first check")
    ran = run(tmp_path, *asked, PYTHON=str(fake))
    assert ran.returncode == 3 and "== check ended with 3" in ran.stdout
    ran = run(tmp_path, *asked, PYTHON=str(fake))
    assert ran.returncode == 0 and "== facts passed before" in ran.stdout and "== check ended with 0" in ran.stdout


def test_tests_that_passed_are_left_out_of_the_next_call(tmp_path):
    """The second call runs what was cut off or failed, beside the first call's report; the third has nothing left."""
    (tmp_path / "test_it.py").write_text(
        "import os\ndef test_a(): pass\ndef test_b(): assert os.path.exists(__file__ + '.mended')\n"
    )
    functions = SCRIPT.read_text().partition("flags() {")[2].partition("export -f")[0]
    call = "tests it test_it.py; echo status $?; sleep 1.1; touch test_it.py.mended"
    script = f"flags() {{{functions}\nfor i in 1 2 3; do {call}; done"
    given = {"state": str(tmp_path), "cpu": "1", "python": sys.executable, "STAGE_SECONDS": "100"}
    given |= {"PYTHONPATH": "", "root": str(SCRIPT.parents[1])}
    ran = subprocess.run(
        ["bash", "-c", script], env=os.environ | given, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert [line for line in ran.stdout.splitlines() if line.startswith("status")] == [f"status {n}" for n in (1, 0, 0)]
    passed = (tmp_path / "tests-it.passed").read_text().splitlines()
    assert [line.rpartition("::")[2] for line in passed] == ["test_a", "test_b"]
    assert len(list(tmp_path.glob("tests-it-*.xml"))) == 3
