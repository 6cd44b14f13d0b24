"""Rung 4: pages of cards: each number is the run's own, none is rounded in our favour, and what is wrong is said."""

import copy
import io
import json
import pathlib
import tarfile

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

import card
import predictions

BENCHMARKS = pathlib.Path(card.__file__).parent
LARGE, LINEAR = "layer-norm-4096", "linear-4096-256"


def record(workload, peer, direction, median, **more):
    """Return a record of a time in microseconds, at 28.999 % of the ceiling unless `more` says otherwise."""
    flops = 10**9 if workload == LINEAR else 0
    rates = {"gb_per_s": 2999.9, "tflop_per_s": 456.99 if flops else 0.0, "product_flops": flops}
    named = {"workload": workload, "peer": peer, "direction": direction, "status": "timed", "clock": "device"}
    return named | {"median": median * 1e-6, "of_ceiling": 0.28999, **rates} | more


RECORDS = [
    record(LARGE, "jln", "forward", 36.71),
    record(LARGE, "jln", "backward", 59.06, of_ceiling=0.29),
    record(LARGE, "jln", "both", 1085.4, unprofiled="no | trace"),
    record(LARGE, "jnp", "forward", 48.46),
    record(LARGE, "jnp", "backward", 166.2),
    record(LINEAR, "jln", "forward", 7.777, of_ceiling=1.999),
    record(LINEAR, "jnp", "forward", 9.999, status="wrong", reason="y is off", clock="wall"),
    {"workload": LINEAR, "peer": "flax", "direction": None, "status": "skipped", "reason": "it has none"},
]
WHERE = {
    "chip": "NVIDIA H100 80GB HBM3",
    "platform": "gpu",
    "time": "2027-01-02T03:04:05",
    "commit": "abc",
    "driver": "1",
}
WHERE |= {"repetitions": 30, "cold": True, "versions": {"jln": "0", "jax": "1", "torch": None}}
BENCH = {"environment": WHERE, "ceilings": {"bytes_per_s": 3.1e12, "flop_per_s": 8e14}, "records": RECORDS}
STEP = {"environment": WHERE, "layers": 8, "tokens": 512, "width": 256, "errors": {"jnp": 0.0, "jln": 1e-3}}
STEP |= {"seconds": {"jnp": 1e-3, "jln": 0.8411e-3}}


def made(folder, capsys, *options, **files):
    """Return the exit status of `page`, what it prints, and the page."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    for name, content in files.items():
        (run / name.replace("_json", ".json").replace("_txt", ".txt")).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    with pytest.raises(SystemExit) as end:
        card.main(["page", str(run), "--into", str(folder / "cards"), *options])
    pages = list((folder / "cards").rglob("README.md"))
    return end.value.code, capsys.readouterr(), pages[0].read_text() if pages else None


def cells(page, name, direction):
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` | {direction} |"))
    return [text.strip() for text in row.split("|")[3:-1]]


def test_numbers_are_the_runs_and_rounded_down(tmp_path, capsys):
    status, printed, page = made(tmp_path, capsys, bench_json=BENCH, small_step_json=STEP)
    guess = predictions.predictions()["h100"]["workloads"][LARGE]["jln"]["microseconds"]
    assert cells(page, LARGE, "forward") == ["", "36.7", "2999 GB/s", "28", "48.5"]
    assert cells(page, LARGE, "backward") == ["", "59.1", "2999 GB/s", "29", "166"]
    assert cells(page, LARGE, "both") == [f"{guess:.0f}", "1085", "2999 GB/s", "28", ""]
    assert cells(page, LINEAR, "forward") == ["", "7.78", "456 TFLOP/s", "199", "10.00 (wall) WRONG"]
    assert "| jln | 841 | 0.85 | 1.0e-03 |" in page
    line = "`layer_norm` of 8192 x 4096 in bfloat16 takes 36.7 us forward and 59.1 backward (28 and 29 % of its copy"
    assert printed.out == f"On one NVIDIA H100 80GB HBM3: {line} bandwidth), plain jnp 48.5 and 166\n" and status == 0
    for said in (
        "- plain jnp wrong at linear-4096-256 forward: y is off",
        "- Flax skipped at linear-4096-256: it has none",
        "- The profiler could not be read: no \\| trace (jln at layer-norm-4096).",
        "- Missing: no check.jsonl, no facts.json, no log.txt, no tests.tgz.",
        "copy 3100 GB/s, products 800 TFLOP/s",
    ):
        assert said in page
    kept = {path.name for path in (tmp_path / "cards" / "h100").iterdir()}
    assert kept == {"README.md", "card.svg", "times.json", "small_step.json"}
    assert "10.00" not in (tmp_path / "cards" / "h100" / "card.svg").read_text()


def test_what_is_wrong_of_ours_is_an_exit_status_of_1(tmp_path, capsys):
    bench, step = copy.deepcopy(BENCH), STEP | {"errors": {"jnp": 0.0, "jln": 0.5}}
    bench["records"][0] |= {"status": "wrong", "reason": "dx is off"}
    check = '{"operator": "rms_norm", "ok": true}\n{"operator": "layer_norm", "ok": false}\n{"operator": "cut o'
    report = b'<t><testcase classname="a" name="b"><failure message="no"/></testcase><testcase name="c"/></t>'
    (tmp_path / "run").mkdir()
    with tarfile.open(tmp_path / "run" / "tests.tgz", "w:gz") as tar:
        info = tarfile.TarInfo("tests-kernels.xml")
        info.size = len(report)
        tar.addfile(info, io.BytesIO(report))
    (tmp_path / "run" / "check.jsonl").write_text(check)
    for wrong, said in (
        (
            {},
            [
                "1 of 2 checks",
                '**WRONG**: check: {"operator": "layer_norm", "ok": false}',
                "1 of 2 did not fail",
                "a.b: no",
            ],
        ),
        ({"bench_json": bench}, ["**WRONG**: jln wrong at layer-norm-4096 forward: dx is off", "36.7 WRONG"]),
        ({"small_step_json": step}, ["**WRONG**: small step: jln is off by 5.0e-01"]),
    ):
        status, printed, page = made(tmp_path, capsys, "--chip", "h100", **wrong)
        assert status == 1 and [text for text in said if text not in page] == []
        for name in ("check.jsonl", "tests.tgz"):
            (tmp_path / "run" / name).unlink(missing_ok=True)
    bench["records"] = bench["records"][:1]
    assert "no time of jln's that is right" in made(tmp_path, capsys, bench_json=bench)[1].out


def test_a_rehearsal_has_a_folder_of_its_own_and_no_paths(tmp_path, capsys):
    facts = {
        "path": "/secret",
        "argv": ["/secret"],
        "product": "XlaError: no",
        "environment": WHERE | {"platform": "cpu"},
    }
    log = "== norms, at 3 s\n== norms ended with 124 after 90 s\n== more NOT BEGUN: no time\n"
    status, _, page = made(tmp_path, capsys, facts_json=facts, log_txt=log, bench_json="{")
    assert status == 0 and "norms ended with 124 after 90 s; more NOT BEGUN: no time" in page
    assert "bench.json cannot be read" in page and "- product: XlaError: no" in page
    assert "/secret" not in (tmp_path / "cards" / "cpu-rehearsal" / "facts.json").read_text()


def test_nothing_of_a_run_is_one_line_and_status_2(tmp_path, capsys):
    status, printed, page = made(tmp_path, capsys)
    assert (status, page) == (2, None) and printed.err.count("\n") == 1
    assert made(tmp_path, capsys, log_txt="")[0] == 2  # of which chip?


def test_a_page_in_its_place_leaves_its_data_and_the_pages_say_what_is_predicted(tmp_path, capsys):
    _, _, page = made(tmp_path, capsys, bench_json=BENCH)
    times = tmp_path / "cards" / "h100" / "times.json"
    (tmp_path / "run").rename(tmp_path / "gone")
    before = times.stat().st_mtime_ns
    with pytest.raises(SystemExit):
        card.main(["page", str(times.parent), "--into", str(tmp_path / "cards")])
    assert times.stat().st_mtime_ns == before and (times.parent / "README.md").read_text() == page
    found = predictions.predictions()
    assert all(list(of["workloads"]) == predictions.workloads() for of in found.values()) and set(found) == {
        "h100",
        "h200",
    }
    shown = (BENCHMARKS / "README.md").read_text()
    assert "\n".join(predictions.table(*predictions.rows(found))) in shown
