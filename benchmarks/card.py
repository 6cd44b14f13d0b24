"""Make a page of what `benchmarks/first_light.sh` left of a run on a card, and predict times of cards not yet run.

    python benchmarks/card.py page RESULTS [--into FOLDER] [--chip NAME] [--replace]
    python benchmarks/card.py predict [--chip h100 --chip h200]   # pip install -e ".[cuda13,bench]"; no GPU; minutes

page: README.md, card.svg and the data of both, into FOLDER/NAME; what RESULTS lacks it says. A line for the first page
is printed. The exit status is 1 where anything of jln's is wrong. predict: see benchmarks/predictions.py.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
import shutil
import tarfile
import textwrap
from collections.abc import Callable
from typing import Annotated, Any
from xml.etree import ElementTree

import typer

import pictures
from bench import CLOCKS, load
from jln._triton.chip import Chip, chip_name
from peers import PEERS
from pictures import NAMES
from predictions import number, places, predict, predictions, table
from rows import UserError, save
from small_step import TOLERANCE
from workloads import ALL

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Pages of cards, and predictions.")
app.command()(predict)
HERE = pathlib.Path(__file__).resolve().parent
LEADING = "layer-norm-4096"  # whose times the first page has
DIRECTIONS = ("forward", "backward", "gradient", "both")


def checks(path: pathlib.Path) -> list[dict[str, Any]]:
    """Read a check a line, but for a last one that was cut off. Of a check that ran again the last line counts."""
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return list({(c["case"], c["implementation"]) if "case" in c else i: c for i, c in enumerate(lines)}.values())


def tests(path: pathlib.Path) -> dict[str, Any]:
    """Read from pytest's reports how many tests did not fail, by each one's last report, and what is wrong with others.

    Of a first kernel that failed it is what each diagnosis ended with.
    """
    if path.suffix == ".json":
        return json.loads(path.read_text())
    outcomes: dict[str, str | None] = {}
    with tarfile.open(path) as tar:
        for member in sorted(tar, key=lambda member: member.name):
            if not (file := tar.extractfile(member)):
                continue
            if member.name.startswith("diagnosis/") and member.name.endswith(".log"):
                outcomes[member.name.removesuffix(".log")] = file.read().decode(errors="replace")[-300:] or "nothing"
            for case in ElementTree.parse(file).iter("testcase") if member.name.endswith(".xml") else ():
                bad = [child.get("message") for child in case if child.tag in ("failure", "error")]
                why = re.split(r"\n +\+ ", str(bad[0]))[0].split() if bad else None  # without where values come from
                outcomes[f"{case.get('classname')}.{case.get('name')}"] = None if why is None else " ".join(why)[:800]
    failed = {test: why for test, why in outcomes.items() if why is not None}
    return {"right": len(outcomes) - len(failed), "failed": failed}


def stages(path: pathlib.Path) -> dict[str, str]:
    """Read the last that a log says of each stage."""
    return dict(re.findall(r"^== (\w+) (ended with .*|NOT BEGUN.*|passed before)$", path.read_text(), re.M))


# By the name under which the page keeps a file: how it is read, and the names under which runs leave it.
FILES: dict[str, tuple[Callable[[pathlib.Path], Any], *tuple[str, ...]]] = {
    "times.json": (load, "bench.json", "times.json"),
    "check.jsonl": (checks, "check.jsonl"),
    "facts.json": (lambda p: json.loads(p.read_text()), "facts.json"),
    "small_step.json": (lambda p: json.loads(p.read_text()), "small_step.json"),
    "fused.json": (lambda p: json.loads(p.read_text()), "fused.json"),
    "tiles.json": (lambda p: json.loads(p.read_text()), "tiles.json"),
    "log.txt": (stages, "log.txt"),
    "tests.json": (tests, "tests.tgz", "tests.json"),
}


def read(folder: pathlib.Path) -> tuple[dict[str, pathlib.Path], dict[str, Any], list[str]]:
    """Read a run: files and contents by the page's names, and what is missing. Raises UserError where all is."""
    files, contents, missing = {}, {}, []
    for name, (reader, *names) in FILES.items():
        path = next((folder / n for n in names if (folder / n).is_file()), None)
        if path is None:
            missing += [f"no {names[0]}"] if name not in ("fused.json", "tiles.json") else []  # which few runs leave
            continue
        try:
            contents[name], files[name] = reader(path), path
        except (OSError, ValueError, UserError, tarfile.TarError, ElementTree.ParseError) as error:
            missing.append(f"{path.name} cannot be read: {error}")
    if not contents:
        raise UserError(f"{folder} has nothing of a run: {', '.join(missing)}")
    return files, contents, missing


def environment(contents: dict[str, Any]) -> dict[str, Any]:
    """Return what the first file that says it says of the machine: the times', the facts', the small step's."""
    said = [content.get("environment") for name, content in contents.items() if name.endswith(".json")]
    return next((where for where in said if isinstance(where, dict)), {})  # a fact that failed is a sentence


def faults(contents: dict[str, Any]) -> list[tuple[bool, str]]:
    """List what is not right or was not timed, and why, jln's first; with each whether the run fails by it."""
    alike: dict[tuple[bool, str, str], list[str]] = {}
    records = [r for name in ("times.json", "fused.json") for r in contents.get(name, {"records": []})["records"]]
    for r in records:
        if r["status"] != "timed":
            is_ours = r["peer"] == "jln" and r["status"] in ("wrong", "failed")
            key = is_ours, f"{NAMES[r['peer']]} {r['status']}", r.get("reason", "no reason given")
            alike.setdefault(key, []).append(" ".join(filter(None, [r["workload"], r["direction"]])))
    found = [(is_ours, f"{what} at {', '.join(where)}: {why}") for (is_ours, what, why), where in alike.items()]
    found += [(True, f"check: {json.dumps(c)}") for c in contents.get("check.jsonl", []) if c.get("ok") is not True]
    off = contents.get("small_step.json", {"errors": {}})["errors"]
    found += [(True, f"small step: {of} is off by {error:.1e}") for of, error in off.items() if not error <= TOLERANCE]
    ends, bad = contents.get("log.txt", {}), re.compile(r"ended with (?!(0|3|124|137) )")
    found += [(True, f"the stage {stage} {said}") for stage, said in ends.items() if bad.match(said)]
    found += [(True, f"{t}: {why}") for t, why in contents.get("tests.json", {"failed": {}})["failed"].items()]
    return sorted(found, key=lambda fault: not fault[0])


def rounded_down(value: float) -> str:
    """Write a number as `number` does, but rounded down."""
    scale = 10 ** places(value)
    return f"{math.floor(round(value * scale, 6)) / scale:.{places(value)}f}"  # 28.9999999 is 29 in exact arithmetic


def part_of_ceiling(record: dict[str, Any]) -> str:
    """Write the percent of the ceiling that a record reaches, rounded down; nothing where it is not known."""
    return f"{math.floor(round(100 * record['of_ceiling'], 6))}" if "of_ceiling" in record else ""


def drawn(results: dict[str, Any]) -> bool:
    return any(r["status"] == "timed" and "of_ceiling" in r for r in results["records"])


def us(record: dict[str, Any]) -> str:
    return number(record["median"] * 1e6)


def cell(text: Any) -> str:
    """Write a text as one line without markup; of a long one, its two ends."""
    line = " ".join(str(text).split())
    line = line if len(line) <= 800 else f"{line[:400]} ... {line[-400:]}"
    return line.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def times(records: list[dict[str, Any]], predicted: dict[str, Any]) -> list[str]:
    """Make a table with a row for each workload and direction. Clocks are named where they are not jln's."""
    by: dict[tuple[str, str], dict[str, Any]] = {}
    for record in (r for r in records if "median" in r):
        by.setdefault((record["workload"], record["direction"]), {})[record["peer"]] = record
    peers = [peer for peer in PEERS if peer != "jln" and any(peer in of for of in by.values())]
    rows = [["workload", "", "predicted", "jln", "it reaches", "of the ceiling, %", *(NAMES[peer] for peer in peers)]]
    for name in dict.fromkeys(name for name, _ in by):
        for direction in [d for d in DIRECTIONS if (name, d) in by]:
            of, guess, cells = by[name, direction], predicted.get(name, {}), dict.fromkeys(("jln", *peers), "")
            ours = of.get("jln", {})
            for peer, record in of.items():
                clock = f" ({record['clock']})" if record["clock"] != ours.get("clock", "device") else ""
                cells[peer] = us(record) + clock + (" WRONG" if record["status"] != "timed" else "")
            right = ours.get("status") == "timed"
            field, unit = ("tflop_per_s", "TFLOP/s") if ours.get("product_flops") else ("gb_per_s", "GB/s")
            reached = [f"{rounded_down(ours[field])} {unit}", part_of_ceiling(ours)] if right else ["", ""]
            said = number(guess["jln"]["microseconds"]) if guess.get("direction") == direction else ""
            rows.append([f"`{name}`", direction, said, cells.pop("jln"), *reached, *cells.values()])
    return table(*rows)


def headline(results: dict[str, Any]) -> str:
    """Say the leading workload's times in a line: those that are right, and by the clock that jln's are by."""
    timed = [r for r in results["records"] if r["status"] == "timed" and r["direction"] in ("forward", "backward")]
    names, on = [r["workload"] for r in timed if r["peer"] == "jln"], f"On one {results['environment']['chip']}:"
    if not names:
        return f"{on} no time of jln's that is right"
    workload = ALL[LEADING if LEADING in names else names[0]]
    of = {peer: [r for r in timed if (r["workload"], r["peer"]) == (workload.name, peer)] for peer in PEERS}
    ways, ours = {peer: [(r["direction"], r["clock"]) for r in records] for peer, records in of.items()}, of.pop("jln")
    takes = " and ".join(f"{us(r)}{'' if i else ' us'} {r['direction']}" for i, r in enumerate(ours))
    ceiling = "product rate" if ours[0]["product_flops"] else "copy bandwidth"
    parts = f" ({' and '.join(map(part_of_ceiling, ours))} % of its {ceiling})" if "of_ceiling" in ours[0] else ""
    others = [f", {NAMES[p]} {' and '.join(map(us, r))}" for p, r in of.items() if ways[p] == ways["jln"]]
    clock = "" if ours[0]["clock"] == "device" else f", by {CLOCKS[ours[0]['clock']]}"
    what = f"`{workload.operator}` of {' x '.join(map(str, workload.shape))} in {workload.dtype}"
    return f"{on} {what} takes {takes}{parts}{''.join(others)}{clock}"


def measured(results: dict[str, Any], predicted: dict[str, Any], data: str) -> list[str]:
    """Write the times: the picture, the table, and how they were taken."""
    records, ceilings, ways = results["records"], results["ceilings"], {}
    for r in records:
        if "clock" in r:
            ways.setdefault(f"The clock: {CLOCKS[r['clock']]}", {})[NAMES[r["peer"]]] = None
        if why := cell(r.get("unprofiled", "")):
            whose = f"{NAMES[r['peer']]} at {r['workload']}"
            ways.setdefault(f"The profiler could not be read: {why}", {})[whose] = None
    where = results["environment"]
    cache = "the L2 cold" if where["platform"] == "gpu" else "caches as the run before left them"
    lines = [f"Microseconds, medians of {where['repetitions']} runs, {cache} ([data]({data})).", ""]
    if drawn(results):
        about = "Bars of the part of the machine's ceiling that each peer reaches, forward and backward"
        lines += [f"![{about}: the numbers are in the table.](card.svg)", ""]
    lines += [*times(records, predicted.get("workloads", {})), ""]
    lines += [f"- {way} ({', '.join(whose)})." for way, whose in ways.items()]
    if ceilings:
        rates = f"copy {ceilings['bytes_per_s'] / 1e9:.0f} GB/s, products {ceilings['flop_per_s'] / 1e12:.3g} TFLOP/s"
        lines.append(f"- Ceilings, measured in this run: {rates}. What is reached of them is rounded down.")
    if predicted:
        lines.append(
            f"- Predicted, by the bytes of jln's program or by its products, whichever take longer: {predicted['why']}."
        )
    return lines


def told(contents: dict[str, Any], names: dict[str, str], missing: list[str], chip: str) -> list[str]:
    """Write the page. names: of the files beside it, by what they are."""
    where, step = environment(contents), contents.get("small_step.json")
    versions = ", ".join(f"{name} {version}" for name, version in where.get("versions", {}).items() if version)
    lines = [f"# {where.get('chip', chip)}, {where.get('time', 'date unknown')[:10]}", ""]
    driver = f", driver {where['driver']}" if where.get("driver") else ""
    lines += [textwrap.fill(f"Commit {where.get('commit')}{driver}; {versions}.", 120)]
    lines += ["", "Made of what a run left by `python benchmarks/card.py page RESULTS`.", ""]
    if "check.jsonl" in contents:
        right = [check.get("ok") is True for check in contents["check.jsonl"]]
        lines += [f"- **Right**: {sum(right)} of {len(right)} checks ([data]({names['check.jsonl']}))."]
    if "tests.json" in contents:
        right, failed = contents["tests.json"]["right"], contents["tests.json"]["failed"]
        ran = right + sum(not test.startswith("diagnosis/") for test in failed)
        lines += [f"- **Tests**: {right} of {ran} did not fail."] if ran else []
    if "log.txt" in contents:
        lines += [f"- Stages: {'; '.join(map(' '.join, contents['log.txt'].items()))}."]
    lines += [f"- Missing: {cell(', '.join(missing))}."] if missing else []
    failed = {name: fact for name, fact in contents.get("facts.json", {}).items() if isinstance(fact, str)}
    lines += [f"- {name}: {cell(fact)}" for name, fact in failed.items() if re.match(r"\w+(Error|Exception): ", fact)]
    lines += [f"- {'**WRONG**: ' if is_ours else ''}{cell(fault)}" for is_ours, fault in faults(contents)]
    if results := contents.get("times.json"):
        lines += ["", "## Times", "", *measured(results, predictions().get(chip, {}), names["times.json"])]
    if "fused.json" in contents:
        lines += ["", "## Few features, by kernels of a newer Triton", ""]
        lines += [f"Microseconds ([data]({names['fused.json']})).", "", *times(contents["fused.json"]["records"], {})]
    if "tiles.json" in contents:
        lines += ["", f"Times of other tiles: [data]({names['tiles.json']})."]
    if step:
        lines += ["", f"## A step of {step['layers']} layers, {step['tokens']} tokens of {step['width']}", ""]
        rows = [["", "us", "of plain jnp's", "off by"]]
        for name, seconds in step["seconds"].items():
            ratio = round(100 * seconds / step["seconds"]["jnp"], 6)
            ratio = math.ceil(ratio) if name.startswith("jln") else math.floor(ratio)  # never in jln's favour
            rows.append([name, number(seconds * 1e6), f"{ratio / 100:.2f}", f"{step['errors'][name]:.1e}"])
        lines += table(*rows)
    return lines


@app.command()
def page(
    results: Annotated[pathlib.Path, typer.Argument(help="The folder that a run left, or that a page was made in.")],
    into: Annotated[pathlib.Path, typer.Option(help="The folder of all cards.")] = HERE / "results",
    chip: Annotated[str | None, typer.Option(help="The folder in it. [default: as the run names the chip]")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace another run.")] = False,
) -> None:
    """Make the page of a run on a card."""
    files, contents, missing = read(results)
    where, names = environment(contents), {}
    if chip is None and "chip" not in where:
        raise UserError(f"no file in {results} names the chip: --chip does")
    # A rehearsal is no result of a CPU, which has a folder of its own.
    of = "cpu-rehearsal" if where.get("platform") == "cpu" else chip_name(Chip(where.get("chip", ""), 0, 0))
    folder = into / (chip or of)
    another = [folder / name for name in FILES if (folder / name).exists() and folder.resolve() != results.resolve()]
    if another and not replace:
        has = environment(read(folder)[1]).get("commit")
        raise UserError(f"{folder} has a run of {has}: --replace, or --chip with another name")
    folder.mkdir(parents=True, exist_ok=True)
    for path in another:
        path.unlink()
    for name, path in files.items():
        if path.parent.resolve() == folder.resolve():  # what is in its place stays as it is
            names[name] = path.name
        elif name in ("facts.json", "tests.json"):  # not the machine's paths
            save({n: fact for n, fact in contents[name].items() if n not in ("argv", "path")}, folder / name)
        elif name == "log.txt":
            (folder / name).write_text("".join(f"== {stage} {said}\n" for stage, said in contents[name].items()))
        elif name.endswith(("json", "jsonl")):
            names[name] = shutil.copyfile(path, folder / name).name
    if timed := contents.get("times.json"):
        if drawn(timed):
            pictures.times(timed, "of_ceiling", folder / "card.svg")
        print(headline(timed))
    (folder / "README.md").write_text("\n".join(told(contents, names, missing, folder.name)) + "\n")
    raise typer.Exit(int(any(is_ours for is_ours, _ in faults(contents))))


if __name__ == "__main__":
    app()
