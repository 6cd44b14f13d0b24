"""Compile candidates of tiles for a chip, without one, and time them where it is: a thousand in ten seconds.

    python benchmarks/candidates.py compile FILE layer-norm-4096:backward gpt2-small:forward ...
    python benchmarks/candidates.py time FILE [--output h100.json]

The first needs Triton, the second the card, and PyTorch for memory and events. Of each question, a workload and a
direction, the first candidate is what the rules choose; the others' numbers are compared with its own. Times are of
CUDA's events, 256 MB written before each run, and have some 2 us more than the kernels' own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import gzip
import multiprocessing
import pathlib
import pickle
import random
import re
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any
from unittest import mock

import jax
import jax.numpy as jnp
import typer

import jln
from catalogue import DIRECTIONS
from jln._junction import tiles
from jln._triton.chip import Chip, chip_by_name, chip_name
from jln._triton.target import Recorder, using
from jln._triton.tile import Tile, next_power_of_2
from machine import version
from rows import known, save
from workloads import WORKLOADS

app = typer.Typer(add_completion=False)
RIGHT = 0.05  # of the largest element, by which results may differ from those of the rules' tiles
SPILLED = 16  # bytes a thread, beyond which a candidate is left out
COLD_BYTES, REPETITIONS = 2**28, 15
BETWEEN = ("shares", "c1", "c2")  # arrays that a kernel makes for the next

# A candidate's tiles: of the kernel and, where rows are wider than it, of the row sums. None are the rules' own.
Candidate = tuple[Any, ...]


def answers(direction: str, candidate: Candidate) -> contextlib.AbstractContextManager[Any]:
    """A context in which the rules answer with the candidate's tiles."""
    if not candidate:
        return contextlib.nullcontext()
    if direction == "forward":
        return mock.patch.object(tiles, "forward", lambda *a, **how: candidate[0])
    plan = tiles.BackwardPlan(candidate[0], next(iter(candidate[1:]), None))
    return mock.patch.multiple(tiles, backward=lambda *a, **how: plan, both_sides=lambda *a, **how: candidate[0])


def recorded(name: str, direction: str, candidate: Candidate, chip: str) -> list[Any]:
    """The launches of a workload's direction with the candidate's tiles."""
    workload = WORKLOADS[name]
    step = workload.step(workload.function(implementation="triton"))
    with answers(direction, candidate), using(recorder := Recorder(chip_by_name(chip))):
        jax.jit(lambda *arrays: step(*arrays)).lower(*workload.step_arguments())
    return [a for a in recorder.launches if (a.kernel.fn.__name__ == "forward_kernel") == (direction == "forward")]


def candidates(name: str, direction: str) -> list[Candidate]:
    """The rules' own tiles, then those of a grid of rows, warps, stages and programs; more than a chip can run."""
    columns = next_power_of_2(h := WORKLOADS[name].width)
    found: list[Candidate] = [()]
    if direction == "backward" and h > 8192:
        sums = [Tile(r, c, w, s) for r, c, w in ((1, 4096, 8), (2, 2048, 8), (1, 2048, 4)) for s in (1, 2, 3, 4)]
        chunks = [Tile(2, 4096, 16, 3), Tile(1, 4096, 8, 3, 2), Tile(32, 128, 8, 3, 2), Tile(4, 1024, 8, 3, 2)]
        return [*found, *((chunk, tile) for chunk in chunks for tile in sums)]
    for rows in (1, 2, 4, 8, 16):
        for each in (4, 8, 16, 32):  # elements of a thread
            warps = rows * columns // (32 * each)
            if warps not in (1, 2, 4, 8, 16, 32) or (rows > 2 and rows * columns > 8192):
                continue
            if direction == "forward":
                found.append((Tile(rows, columns, warps),))
            for stages in (2, 3, 4, 5):
                for programs in (1, 2, 3, 4, 6, 8, 12, 16):
                    ahead = 2 * rows * columns * (stages - 1) * programs
                    if 8 <= warps * programs <= 32 and 16_000 <= ahead <= 200_000:
                        found.append((Tile(rows, columns, warps, stages, programs),))
    return found


def packed(job: tuple[str, str, Candidate, str]) -> list[dict[str, Any]] | str:
    """The machine code of a candidate's launches, and what they are launched with; or why there is none."""
    from compiler import compile_launch

    launches = []
    try:
        for launch in recorded(*job):
            made = compile_launch(launch)
            if made.spilled > SPILLED or made.shared * launch.tile.programs_per_core > launch.chip.shared:
                return f"spills {made.spilled} bytes, and has {made.shared} of shared memory"
            arguments = [
                (name, a if isinstance(a, int) else (tuple(a.shape), str(a.dtype)))
                for name, a in launch.arguments.items()
                if not (isinstance(a, int) and a == 1)  # a constant of the kernel
            ]
            (entry,) = re.findall(r"\.visible \.entry (\w+)", made.assembly)
            facts = {"entry": entry, "code": made.binary, "shared": made.shared, "registers": made.registers}
            facts |= {"warps": launch.tile.warps, "programs": launch.programs, "arguments": arguments}
            launches.append(facts | {"results": list(launch.results), "in_place": dict(launch.in_place)})
    except Exception as error:  # of the compiler's, about one candidate
        return f"{type(error).__name__}: {error}"[:200]
    return launches


@app.command("compile")
def compile_all(
    file: Annotated[pathlib.Path, typer.Argument(help="To write.")],
    asked: Annotated[list[str], typer.Argument(help="WORKLOAD:DIRECTION, as layer-norm-4096:backward.")],
    chip: Annotated[str, typer.Option(help="To compile for, by name.")] = "h200",
    rules: Annotated[bool, typer.Option("--rules", help="What the rules choose, and nothing else.")] = False,
) -> None:
    """Compile the candidates of each question, without a GPU."""
    jobs = []
    for text in asked:
        name, _, direction = text.partition(":")
        known("workload", [name], WORKLOADS)
        known("direction", [direction], DIRECTIONS)
        jobs += [(name, direction, c, chip) for c in ([()] if rules else candidates(name, direction))]
    kept = []
    file.parent.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for (name, direction, candidate, _), made in zip(jobs, pool.map(packed, jobs, chunksize=4), strict=True):
            if isinstance(made, str) and not candidate:
                raise typer.BadParameter(f"{name} {direction}: what the rules choose {made}")
            if not isinstance(made, str):
                kept.append((name, direction, [dataclasses.astuple(tile) for tile in candidate], made))
    file.write_bytes(gzip.compress(pickle.dumps((version("triton"), kept))))
    print(f"{len(kept)} of {len(jobs)} candidates, {file.stat().st_size / 1e6:.1f} MB in {file}")


def described(tiles: list[tuple[int, ...]]) -> str:
    """A candidate in words: each tile's rows x columns, warps, stages, and programs on an SM."""
    words = [f"{r}x{c}, {w} warps, {s} stages, {p} programs" for r, c, w, s, p in tiles]
    return " after sums by ".join(words) or "by rule"


class Kernel:
    """A launch's machine code, loaded. buffer: from an argument's name, shape and dtype to its tensor."""

    def __init__(self, launch: dict[str, Any], buffer: Callable[[str, Any, str], Any]):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self._do("cuModuleLoadData", ctypes.byref(self.module), launch["code"])
        self._do("cuModuleGetFunction", ctypes.byref(self.function), self.module, launch["entry"].encode())
        self._do("cuFuncSetAttribute", self.function, 8, launch["shared"])  # the largest dynamic shared memory
        values: list[Any] = [
            ctypes.c_void_p(buffer(name, *a).data_ptr())
            if not isinstance(a, int)
            else (ctypes.c_int32 if abs(a) < 2**31 else ctypes.c_int64)(a)
            for name, a in launch["arguments"]
        ]
        values += [ctypes.c_void_p(0)] * 2  # Triton's own scratch memory, of which these kernels need none
        self.values = values  # they must live as long as the pointers to them
        pointers = [ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values]
        self.parameters = (ctypes.c_void_p * len(values))(*pointers)
        self.size = launch["programs"], 1, 1, 32 * launch["warps"], 1, 1, launch["shared"]

    def __call__(self, stream: int) -> None:
        self._do("cuLaunchKernel", self.function, *self.size, ctypes.c_void_p(stream), self.parameters, None)

    def _do(self, name: str, *arguments: Any) -> None:
        if error := getattr(self.cuda, name)(*arguments):
            raise RuntimeError(f"{name} returned CUDA's error {error}")


def timed(torch: Any, runs: dict[Any, Callable[[], None]], repetitions: int, chill: Any) -> dict[Any, float]:
    """The median time of each run in microseconds, in rounds that have an order of their own each."""
    events, taken = [], {}
    for number in range(repetitions):
        for key in random.Random(number).sample(list(runs), len(runs)):
            chill.add_(1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[key]()
            end.record()
            events.append((key, start, end))
    torch.cuda.synchronize()
    for key, start, end in events:
        taken.setdefault(key, []).append(start.elapsed_time(end) * 1e3)
    return {key: statistics.median(times) for key, times in taken.items()}


class Question:
    """The candidates of one workload and direction, with their arrays on the card."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.generator = torch, torch.Generator(device="cuda").manual_seed(0)
        self.tensors, self.expected = {}, {}

    def prepared(self, launches: list[dict[str, Any]]) -> tuple[Callable[[], None], float]:
        """A run of the launches, and how far its results are from the first candidate's, of their largest."""
        written: dict[Any, Any] = {}

        def loaded(launch: dict[str, Any]) -> Kernel:
            aliases = {result: operand for operand, result in launch["in_place"].items()}

            def buffer(name: str, shape: Any, dtype: str) -> Any:
                key = aliases.get(name, name), shape, dtype
                if key not in self.tensors:
                    drawn = self.torch.randn(shape, generator=self.generator, device="cuda")
                    drawn = drawn.abs() + 0.5 if name.endswith("rstd") else drawn
                    self.tensors[key] = drawn.to(getattr(self.torch, dtype))
                if name in launch["results"]:
                    written[key] = self.tensors[key]
                return self.tensors[key]

            return Kernel(launch, buffer)

        kernels = [loaded(launch) for launch in launches]

        def run() -> None:
            stream = self.torch.cuda.current_stream().cuda_stream
            for kernel in kernels:
                kernel(stream)

        taken = {operand for launch in launches for operand in launch["in_place"]}  # whose place a result takes
        before = {key: tensor.clone() for key, tensor in written.items() if key[0] in taken}
        for key in written.keys() - before.keys():
            written[key].fill_(float("nan"))
        run()
        self.torch.cuda.synchronize()
        got = {key: tensor.double() for key, tensor in written.items() if key[0] not in BETWEEN}
        for key, tensor in before.items():
            written[key].copy_(tensor)
        self.expected = self.expected or got
        errors = [float((got[k] - e).abs().max() / e.abs().max()) for k, e in self.expected.items()]
        return run, max(error if error < 1e9 else 1e9 for error in errors)  # max() would pass over a NaN


@app.command("time")
def time_all(
    file: Annotated[pathlib.Path, typer.Argument(help="As `compile` wrote it.", exists=True)],
    output: Annotated[pathlib.Path | None, typer.Option(help="A JSON file of all, the fastest first.")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no question after so many.")] = 60,
) -> None:
    """Time the candidates of each question on the card that is here."""
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("PyTorch sees no GPU here")
    started, found = time.monotonic(), []
    chill = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device="cuda")
    questions: dict[tuple[str, str], list[Any]] = {}
    triton, kept = pickle.loads(gzip.decompress(file.read_bytes()))
    for name, direction, numbers, launches in kept:
        questions.setdefault((name, direction), []).append((numbers, launches))
    for (name, direction), members in questions.items():
        if time.monotonic() - started > seconds:
            print(f"{name} {direction}: not begun")
            continue
        question, runs, facts, moved = Question(torch), {}, {}, 0
        for numbers, launches in members:
            candidate = described(numbers)
            try:
                runs[candidate], error = question.prepared(launches)
            except RuntimeError as raised:
                print(f"{name} {direction}: {candidate}: {raised}")
                continue
            arrays = [a for key, a in question.tensors.items() if key[0] not in BETWEEN]
            moved = moved or sum(a.numel() * a.element_size() for a in arrays)
            counts = {fact: [launch[fact] for launch in launches] for fact in ("registers", "programs")}
            facts[candidate] = {"error": error, "tiles": numbers, **counts}
        timed(torch, runs, 2, chill)
        times = timed(torch, runs, REPETITIONS, chill)
        print(f"{name} {direction}: {len(runs)} tried, {moved / 1e6:.0f} MB; by rule {times.get('by rule', 0):.1f} us")
        for c in sorted(times, key=times.__getitem__)[:5]:
            wrong = "" if facts[c]["error"] < RIGHT else f"  WRONG by {facts[c]['error']:.1e}"
            print(f"    {times[c]:8.2f} us {moved / times[c] / 1e3:7.0f} GB/s  {c}{wrong}", flush=True)
        same = {"workload": name, "direction": direction, "bytes": moved}
        found += [same | {"candidate": c, "microseconds": us} | facts[c] for c, us in times.items()]
    if output is not None:
        save(measured(found, torch.cuda.get_device_name(), triton), output)


def measured(found: list[dict[str, Any]], device: str, triton: str) -> dict[str, Any]:
    """The file: all candidates, and the fastest right ones, if by 2 % faster than the rule's, of a row's first norm.

    Tiles are chosen by direction, row length and bytes of an element alone, so that this norm speaks for the others.
    """
    entries: dict[Any, Any] = {}
    for name, direction in dict.fromkeys((c["workload"], c["direction"]) for c in found):
        own = [c for c in found if (c["workload"], c["direction"]) == (name, direction) and c["error"] < RIGHT]
        best, w = min(own, key=lambda c: c["microseconds"], default=None), WORKLOADS[name]
        rule = next((c["microseconds"] for c in own if c["candidate"] == "by rule"), 0.0)
        key = direction, w.width, jnp.dtype(w.dtype).itemsize
        if w.entry.name in ("layer_norm", "rms_norm") and key not in entries:
            entries[key] = None
            if best is not None and best["microseconds"] < 0.98 * rule:
                entries[key] = {"choice": direction, "h": [w.width], "itemsize": key[2], "tiles": best["tiles"]}
                entries[key]["mb_per_s"] = round(best["bytes"] / best["microseconds"])
    facts = {"chip": chip_name(Chip(device, 0, 0)), "versions": {"jln": jln.__version__, "triton": triton}}
    return facts | {"entries": [*filter(None, entries.values())], "candidates": found}


if __name__ == "__main__":
    app()
