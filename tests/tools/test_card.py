"""Pages of cards: each number is the run's own, none is rounded in our favour, and what is wrong is said."""

import io
import json
import tarfile

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import card
import predictions

LARGE, LINEAR = "layer-norm-4096", "linear-4096-256"


def record(workload, peer, direction, median, **more):
    rates = {"gb_per_s": 2999.9, "tflop_per_s": 456.99, "product_flops": 10**9 if workload == LINEAR else 0}
    named = {"workload": workload, "peer": peer, "direction": direction, "status": "timed", "clock": "device"}
    return named | {"median": median * 1e-6, "of_ceiling": 0.28999, **rates} | more


RECORDS = [
    record(LARGE, "jln", "forward", 36.71),
    record(LARGE, "jln", "backward", 59.06, of_ceiling=0.29),
    record(LARGE, "jln", "both", 1085.4, unprofiled="no | trace"),
    *(record(LARGE, "jnp", "forward", 48.46), record(LARGE, "jnp", "backward", 166.2)),
    record(LINEAR, "jln", "forward", 7.777, of_ceiling=1.999),
    record(LINEAR, "jnp", "forward", 9.99, status="wrong", reason="y is off", clock="wall"),
    record(LARGE, "flax", "forward", 31, clock="events"),
    {"workload": LINEAR, "peer": "flax", "direction": None, "status": "skipped", "reason": "it has none"},
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


def packed(name, content):
    """The bytes of an archive with one file."""
    with tarfile.open(fileobj=(made := io.BytesIO()), mode="w:gz") as tar:
        (info := tarfile.TarInfo(name)).size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def wrong(why):
    return json.dumps(BENCH | {"records": [RECORDS[0] | {"status": "wrong", "reason": why}]}).encode()


REPORT = b"""<t><testcase classname="a" name="b"><failure message="AssertionError: &#10;Not equal: 1&#10; +  where 2"/>
</testcase><testcase name="c"/></t>"""
# A file of a run, and what the page says of it.
FAULTS = {
    "a step": ("small_step.json", json.dumps(STEP | {"errors": {"jln": 0.5, "jnp": 0}}).encode(),
               "**WRONG**: small step: jln is off by 5.0e-01"),
    "a time": ("bench.json", wrong("dx is off"), "**WRONG**: jln wrong at layer-norm-4096 forward: dx is off"),
    "a fused kernel": ("fused.json", wrong("y is off"), "forward: y is off"),
    "a check": ("check.jsonl", b'{"of": "a", "ok": true}\n{"of": "b", "ok": false}\n{"cut',
                'check: {"of": "b", "ok": false}'),
    "a test": ("tests.tgz", packed("tests-kernels.xml", REPORT), "**WRONG**: a.b: AssertionError: Not equal: 1\n"),
    "a stage": ("log.txt", b"== facts ended with 0 after 1 s\n== first ended with 1 after 3 s\n",
                "the stage first ended with 1"),
    "a diagnosis": ("tests.tgz", packed("diagnosis/verbose.log", b"x" * 1000 + b"it is broken"), "it is broken"),
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
        - Flax skipped at {LINEAR}: it has none
        - The profiler could not be read: no \\| trace (jln at {LARGE}).
        - Missing: no check.jsonl, no facts.json, no log.txt, no tests.tgz.
        - Ceilings, measured in this run: copy 3100 GB/s, products 800 TFLOP/s. What is reached of them is rounded down.
    """
    assert [said.strip() for said in expected.splitlines() if said.strip() not in page.splitlines()] == []
    kept = {path.name: path.read_text() for path in (tmp_path / "cards" / "h100").iterdir()}
    assert kept.keys() == {"README.md", "card.svg", "times.json", "small_step.json"} and "9.99" not in kept["card.svg"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_of_ours_is_said_and_an_exit_status_of_1(fault, tmp_path, capsys):
    name, content, said = FAULTS[fault]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(content)
    status, _, page = made(tmp_path, capsys, "--chip", "h100")
    assert status == 1 and said in page
    (tmp_path / "cards" / "h100" / "README.md").unlink()
    with pytest.raises(SystemExit, match=r"^1$"):  # made again of what it keeps
        card.app(["page", str(tmp_path / "cards" / "h100"), "--into", str(tmp_path / "cards"), "--chip", "h100"])
    assert (tmp_path / "cards" / "h100" / "README.md").read_text() == page


def test_another_runs_times_are_replaced_only_when_asked(tmp_path, capsys):
    assert made(tmp_path, capsys, bench=BENCH)[0] == 0
    status, printed, page = made(tmp_path, capsys, bench=BENCH | {"environment": WHERE | {"commit": "def"}})
    assert status == 2 and "has a run of abc" in " ".join(printed.err.split()) and "abc" in page
    (tmp_path / "cards" / "h100" / "log.txt").write_text("== first ended with 1 after 3 s\n")  # as of the run of abc
    assert "def" in made(tmp_path, capsys, "--replace")[2]
    assert not (tmp_path / "cards" / "h100" / "log.txt").exists()


def test_a_rehearsal_has_a_folder_of_its_own_and_what_cannot_be_read_is_said(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    facts = {"path": "/secret", "product": "XlaError: no", "environment": WHERE | {"platform": "cpu"}}
    (tmp_path / "run" / "log.txt").write_text("== norms ended with 124 after 90 s\n== more NOT BEGUN: no time\n")
    row = '{{"case": "a", "implementation": "triton", "ok": {}}}\n'  # of which the last counts
    (tmp_path / "run" / "check.jsonl").write_text(row.format("false") + row.format("true"))
    status, _, page = made(tmp_path, capsys, facts=facts, bench="cut off")
    expected = "124 after 90 s; more NOT BEGUN: no time", "bench.json cannot be read", "- product: XlaError: no"
    expected += ("1 of 1 checks",)
    assert status == 0 and [said for said in expected if said not in page] == []
    assert "/secret" not in (tmp_path / "cards" / "cpu-rehearsal" / "facts.json").read_text()


def test_nothing_of_a_run_is_a_line_and_a_page_made_where_its_data_lie_leaves_them(tmp_path, capsys):
    status, printed, page = made(tmp_path, capsys)
    assert (status, page) == (2, None) and "has nothing of a run" in printed.err
    _, _, page = made(tmp_path, capsys, bench=BENCH)
    before = (times := tmp_path / "cards" / "h100" / "times.json").stat().st_mtime_ns
    with pytest.raises(SystemExit):
        card.app(["page", str(times.parent), "--into", str(tmp_path / "cards")])
    assert times.stat().st_mtime_ns == before and (times.parent / "README.md").read_text() == page


def test_the_table_of_predictions_is_the_files():
    found = predictions.predictions()
    assert all(list(of["workloads"]) == predictions.workloads() for of in found.values())
    assert "\n".join(predictions.table(*predictions.rows(found))) in (card.HERE / "README.md").read_text()
