"""Pages of cards: each number is the run's own, none is rounded in our favour, and what is wrong is said."""

import io
import json
import re
import shlex
import tarfile

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import card
import predictions
from workloads import WORKLOADS

LARGE, LINEAR = "layer-norm-4096", "linear-4096-256"


def record(workload, peer, direction, median, **more):
    rates = {"gb_per_s": 2999.9, "tflop_per_s": 456.99, "product_flops": 10**9 if workload == LINEAR else 0}
    named = {"workload": workload, "peer": peer, "direction": direction, "status": "timed", "clock": "device"}
    return named | {"median": median * 1e-6, "of_ceiling": 0.28999, **rates} | more


RECORDS = [
    record(LARGE, "jln", "forward", 36.71),
    record(LARGE, "jln", "backward", 59.06, of_ceiling=0.29),
    record(LARGE, "jln", "both", 1085.4),
    *(record(LARGE, "jnp", "forward", 48.46), record(LARGE, "jnp", "backward", 166.2)),
    record(LINEAR, "jln", "forward", 7.777, of_ceiling=1.999),
    record(LINEAR, "jnp", "forward", 9.99, status="wrong", reason="y is off", clock="wall"),
    record(LARGE, "flax", "forward", 31, clock="events"),
]
WHERE = {"chip": "NVIDIA H100 80GB HBM3", "platform": "gpu", "time": "2027-01-02T03:04:05", "commit": "abc"}
WHERE |= {"repetitions": 30, "cold": True, "versions": {"jln": "0", "jax": "1", "torch": None}}
BENCH = {"environment": WHERE, "ceilings": {"bytes_per_s": 3.1e12, "flop_per_s": 8e14}, "records": RECORDS}
STEP = {"layers": 8, "tokens": 5, "width": 2, "errors": {"jln": 1e-3, "jnp": 0}}
STEP |= {"seconds": {"jln": 8411e-7, "jnp": 1e-3}}


def made(folder, capsys, *options, **files):
    """Return the exit status of `page`, what it prints, and the page."""
    (folder / "run").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / "run" / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as end:
        card.app(["page", str(folder / "run"), "--into", str(folder / "cards"), *options])
    pages = list((folder / "cards").rglob("README.md"))
    return end.value.code, capsys.readouterr(), pages[0].read_text() if pages else None


def packed(content):
    """The bytes of an archive with a report of tests."""
    with tarfile.open(fileobj=(made := io.BytesIO()), mode="w:gz") as tar:
        (info := tarfile.TarInfo("tests-kernels.xml")).size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


WRONG = BENCH | {"records": [RECORDS[0] | {"status": "wrong", "reason": "dx is off"}]}
REPORT = b"""<t><testcase classname="a" name="b"><failure message="AssertionError: &#10;Not equal: 1&#10; +  where 2"/>
</testcase><testcase name="c"/></t>"""
# A file of a run, and what the page says of it.
FAULTS = {
    "a step": ("small_step.json", json.dumps(STEP | {"errors": {"jln": 0.5, "jnp": 0}}).encode(),
               "**WRONG**: small step: jln is off by 5.0e-01"),
    "a time": ("bench.json", json.dumps(WRONG).encode(), "**WRONG**: jln wrong at layer-norm-4096 forward: dx is off"),
    "a check": ("check.jsonl", b'{"of": "a", "ok": true}\n{"of": "b", "ok": false}\n{"cut',
                'check: {"of": "b", "ok": false}'),
    "a test": ("tests.tgz", packed(REPORT), "**WRONG**: a.b: AssertionError: Not equal: 1\n"),
    "a stage": ("log.txt", b"== facts ended with 0 after 1 s\n== first ended with 1 after 3 s\n",
                "the stage first ended with 1"),
}  # fmt: skip


def test_numbers_are_the_runs_and_rounded_down(tmp_path, capsys):
    status, printed, page = made(tmp_path, capsys, bench=BENCH, small_step=STEP)
    line = "takes 36.7 us forward and 59.1 backward (28 and 29 % of its copy bandwidth), plain jnp 48.5 and 166\n"
    assert printed.out == f"On one {WHERE['chip']}: `layer_norm` of 8192 x 4096 in bfloat16 {line}" and status == 0
    guess = predictions.predictions()["h100"]["workloads"][LARGE]["jln"]["microseconds"]
    expected = f"""
        | `{LARGE}` | forward |  | 36.7 | 2999 GB/s | 28 | 48.5 | 31.0 (events) |
        | `{LARGE}` | backward |  | 59.1 | 2999 GB/s | 29 | 166 |  |
        | `{LARGE}` | both | {guess:.0f} | 1085 | 2999 GB/s | 28 |  |  |
        | `{LINEAR}` | forward |  | 7.78 | 456 TFLOP/s | 199 | 9.99 (wall) WRONG |  |
        | jln | 841 | 0.85 | 1.0e-03 |
        - plain jnp wrong at {LINEAR} forward: y is off
        - Missing: no check.jsonl, no facts.json, no log.txt, no tests.tgz.
    """
    assert [said.strip() for said in expected.splitlines() if said.strip() not in page.splitlines()] == []
    assert "9.99" not in (tmp_path / "cards" / "h100" / "card.svg").read_text()


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_of_ours_is_said_and_an_exit_status_of_1(fault, tmp_path, capsys):
    name, content, said = FAULTS[fault]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(content)
    status, _, page = made(tmp_path, capsys, "--chip", "h100")
    assert status == 1 and said in page


def test_another_runs_times_are_replaced_only_when_asked(tmp_path, capsys):
    assert made(tmp_path, capsys, bench=BENCH)[0] == 0
    status, printed, page = made(tmp_path, capsys, bench=BENCH | {"environment": WHERE | {"commit": "def"}})
    assert status == 2 and "has a run of abc" in " ".join(printed.err.split()) and "abc" in page
    assert "def" in made(tmp_path, capsys, "--replace")[2]


def test_the_table_of_predictions_is_the_files():
    found = predictions.predictions()
    assert all(list(of["workloads"]) == predictions.workloads() for of in found.values())
    assert "\n".join(predictions.table(*predictions.rows(found))) in (card.HERE / "README.md").read_text()


def test_the_names_in_pictures_are_those_of_commands():
    models = re.findall(r'^    "(.*)": Model', (card.HERE.parent / "examples/zoo/models.py").read_text(), re.M)
    for picture, names in (("saves", WORKLOADS), ("steps", models)):
        drawn = (card.HERE / "pictures" / f"{picture}.svg").read_text()
        rows = [shlex.split(row)[0] for row in re.findall(r"^(.*): (?:jln|\+0\.0 %) ", drawn, re.M)]
        assert len(rows) == 14 and [row for row in rows if row not in names] == []
