"""Compare what the compiler is given, and makes, of every launch with another commit (rung 3).

    python tests/triton/same_kernels.py HEAD~1          # the launches of the working tree beside those of a commit
    python tests/triton/same_kernels.py HEAD~1 --ptx    # and PTX of all, not only of those whose Triton IR differs
    python tests/triton/same_kernels.py HEAD~1 --every 20    # of each 20 calls the first

Another Triton is taken from a folder on PYTHONPATH.

Calls of the public operators are lowered for several chips, and their launches recorded: grid, tile, operands, results
and Triton's IR, without names and places in the source. Launches with the same IR have the same PTX. Where it differs,
both are compiled, and PTX is compared without the names of parameters, labels and lines. Where that has other
instructions, in whatever order, or takes other registers, spills or shared memory, these are printed. Exits with 1 if
any launch differs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import itertools
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # behind PYTHONPATH, on which another commit's package is

import compiler  # noqa: E402
from catalogue import FORMS  # noqa: E402
from launches import Case, launches  # noqa: E402

# x's; the residual's, z's and the kernel's; the parameters'.
DTYPES = (
    ("bfloat16", "bfloat16", "bfloat16"),
    ("bfloat16", "float32", "float32"),
    ("float16", "float16", "float32"),
    ("float32", "float32", "float32"),
    ("float64", "float64", "float64"),
)
# Rows of one tile, many a tile and masked; of 16 warps; in two and in many chunks.
SHAPES = ((4096, 64), (515, 1000), (2048, 4096), (2048, 8192), (300, 16384), (64, 40000))
# Examples and heads, whose parameters are their own.
OF_GROUPS = (((4, 300, 768), (4, 1, 768)), ((300, 4, 256), (1, 4, 256)))
FEATURES = (7, 64, 136, 256, 512)
CHIPS = ("h200", "a100", "b200", "mi300x")


def cases() -> Iterator[Case]:
    """All calls that are compared."""
    for name, form in FORMS.items():
        if form.is_linear:
            for n, dtypes, chip in itertools.product(FEATURES, DTYPES[:4], CHIPS):
                for h in (768, 1023) if chip == "h200" else (768,):
                    yield Case(name, (8192, h), dtypes, chip, features=(n,))
            for wanted in ("x", "kernel", "bias", "scale"):
                yield Case(name, (8192, 768), DTYPES[0], "h200", wanted, features=(64,))
            continue
        for shape, dtypes in itertools.product(SHAPES, DTYPES):
            yield Case(name, shape, dtypes, "h200")
        for chip, shape in itertools.product(CHIPS[1:], SHAPES[1:]):
            yield Case(name, shape, DTYPES[0], chip)
        for wanted, shape in itertools.product(form.names, SHAPES[2:5]):
            yield Case(name, shape, DTYPES[0], "h200", wanted)
        for shape, of in OF_GROUPS:
            yield Case(name, shape, DTYPES[0], "h200", of_groups=of)
        for over in ((0, None), (None, 0)):
            yield Case(name, (300, 4096), DTYPES[0], "h200", over=over)


def triton_ir(launch: Any) -> str:
    """The IR that Triton makes of a kernel's text, without the places of its lines."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    from jln._triton.lowering import source, triton_target

    target = triton_target(launch.chip.architecture)
    backend = make_backend(target)
    options = backend.parse_options({**launch.tile.options(launch.chip)})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    given = source(launch)
    functions = backend.get_codegen_implementation(options)
    module = given.make_ir(target, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, given.language)
    return without_names(str(stages["ttir"](module, {})))


def without_names(text: str) -> str:
    """IR without locations and with parameters by number, and PTX without labels, lines and names."""
    text = re.sub(r"(?m)^#loc.*$|\s*//.*$|^\s*\.loc\s.*$|^\s*\.file\s.*$|^\$L__tmp\d+:$|^\.Ltmp\d+:$|;.*$", "", text)
    text = re.sub(r"\s*loc\([^()]*(\([^()]*\))*[^()]*\)", "", text)
    text = text.split(".section\t.debug", 1)[0]
    order: dict[str, str] = {}
    for name in re.findall(r"%[A-Za-z_][\w.]*|\$\w+|\b\w+_kernel\w*", text):
        order.setdefault(name, f"name{len(order)}")
    text = re.sub(r"%[A-Za-z_][\w.]*|\$\w+|\b\w+_kernel\w*", lambda m: order[m[0]], text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


_known: dict[Any, tuple[str, tuple[Any, ...] | None]] = {}


def described(case: Case, by_ptx: bool) -> list[dict[str, Any]]:
    """The description of each launch of a case: all that there is to compare."""
    from jln._triton.lowering import source

    made = []
    for launch in launches(case):
        of_arrays = [(a.shape, a.dtype.name) for a in (*launch.arrays.values(), *launch.results.values())]
        shape = {
            "grid": launch.programs, "tile": dataclasses.astuple(launch.tile), "arrays": sorted(of_arrays, key=str),
            "scalars": sorted(launch.scalars.values()), "in place": len(launch.in_place),
        }  # fmt: skip
        key = (source(launch).hash(), dataclasses.astuple(launch.tile), launch.chip, by_ptx)
        if key not in _known:
            facts = None
            if by_ptx:
                took = compiler.compile_launch(launch)
                facts = without_names(took.assembly), took.registers, took.spilled, took.shared
            _known[key] = hashlib.sha256(triton_ir(launch).encode()).hexdigest(), facts
        ir, facts = _known[key]
        made.append({"kernel": launch.kernel.fn.__name__, "shape": shape, "ir": ir, "made": facts})
    return made


def record(path: str, by_ptx: bool, only: set[Case] | None, every: int) -> None:
    """Describe the first of each `every` cases, in as many processes as there are cores, and write them to a file."""
    chosen = [case for case in cases() if only is None or case in only][::every]
    with compiler.workers() as pool:
        made = pool.map(described, chosen, [by_ptx] * len(chosen), chunksize=8)
        pathlib.Path(path).write_bytes(pickle.dumps(dict(zip(chosen, made, strict=True))))


def recorded(tree: pathlib.Path, by_ptx: bool, only: Any = None, every: int = 1) -> dict[Any, Any]:
    """The description of all cases, or of those in `only`, by the package in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        out, chosen = pathlib.Path(folder) / "out", pathlib.Path(folder) / "only"
        chosen.write_bytes(pickle.dumps(only))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]), "JAX_PLATFORMS": "cpu",
        }  # fmt: skip
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, __file__, "--record", str(out), "--only", str(chosen), "--every", str(every)]
        subprocess.run(command + ["--ptx"] * by_ptx, env=environment, cwd=folder, check=True)
        return pickle.loads(out.read_bytes())


def compared(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    """Sentences on what differs."""
    found = []
    for case in sorted({*before} | {*after}, key=str):
        old, new = before.get(case, []), after.get(case, [])
        if len(old) != len(new):
            found.append(f"{case}: {[a['kernel'] for a in old]} are now {[a['kernel'] for a in new]}")
            continue
        for a, b in zip(old, new, strict=True):
            found += [
                f"{case}: {b['kernel']}: {what} {a['shape'][what]} -> {b['shape'][what]}"
                for what in a["shape"] if a["shape"][what] != b["shape"][what]
            ]  # fmt: skip
            of_a, of_b = a["made"], b["made"]
            if of_a is None and a["ir"] != b["ir"]:
                found.append(f"{case}: {b['kernel']}: Triton's IR differs")
            elif of_a is not None and of_a[0] != of_b[0]:
                old_ptx, new_ptx = unordered(of_a[0]), unordered(of_b[0])
                if (old_ptx, of_a[1:]) != (new_ptx, of_b[1:]):
                    found.append(
                        f"{case}: {b['kernel']}: PTX differs: lines {old_ptx.total()} -> {new_ptx.total()}, "
                        f"registers, bytes spilled and shared {of_a[1:]} -> {of_b[1:]}"
                    )
    return found


def unordered(text: str) -> collections.Counter[str]:
    """The number of times that each line is in PTX, or in AMD's assembly, without the names and the registers in it."""
    return collections.Counter(
        re.sub(r"\bname\d+\b|%\w+|\b[sv]\d+\b|\b[sv]\[[\d:]+\]", "%", line) for line in text.splitlines()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", default="HEAD~1")
    parser.add_argument("--ptx", action="store_true")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--record")
    parser.add_argument("--only")
    given = parser.parse_args()
    if given.record:
        record(given.record, given.ptx, pickle.loads(pathlib.Path(given.only).read_bytes()), given.every)
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, given.commit], cwd=ROOT, check=True)
        try:
            before, after = (recorded(package, given.ptx, every=given.every) for package in (tree, ROOT))
            differ = compared(before, after)
            if differ and not given.ptx:
                of_cases = {case for case in before if any(line.startswith(f"{case}: ") for line in differ)}
                differ = compared(*(recorded(package, True, of_cases) for package in (tree, ROOT)))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    print(*differ, sep="\n")
    count = sum(map(len, after.values()))
    print(f"{count} launches of {len(after)} calls beside those of {given.commit}: {len(differ)} differ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
