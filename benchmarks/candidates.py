"""Compile candidates of tiles for a chip, without one, and time them where it is: a thousand in ten seconds.

    python benchmarks/candidates.py compile FILE layer-norm-4096:backward gpt2-small:forward ...
    python benchmarks/candidates.py time FILE [--output found.json] [--tiles h100.json]

The first command needs Triton, and writes the machine code of each candidate's launches. The second needs the card, and
PyTorch for memory and events. A question is a workload and a direction. The first candidate of each is what the rules
of `jln._junction.tiles` choose; the others' numbers are compared with its own. Times are of CUDA's events, 256 MB
written before each run, and have some 2 us more than the kernels' own.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import gzip
import json
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

import typer

app = typer.Typer(add_completion=False)
DIRECTIONS = ("forward", "backward")
RIGHT = 0.05  # of the largest element, by which results may differ from those of the rules' tiles
SPILLED = 16  # bytes a thread, beyond which a candidate is left out
COLD_BYTES = 2**28
BETWEEN = ("shares", "c1", "c2")  # arrays that a kernel makes for the next

# A candidate's tiles: of the kernel and, where rows are wider than it, of the row sums. None are the rules' own.
Candidate = tuple[Any, ...]


def answers(direction: str, candidate: Candidate) -> contextlib.AbstractContextManager[Any]:
    """A context in which the rules answer with the candidate's tiles."""
    from jln._junction import tiles

    if not candidate:
        return contextlib.nullcontext()
    if direction == "forward":
        return mock.patch.object(tiles, "forward", lambda *a, **how: candidate[0])
    plan = tiles.BackwardPlan(*candidate, *[None] * (2 - len(candidate)))
    return mock.patch.multiple(tiles, backward=lambda *a, **how: plan, both_sides=lambda *a, **how: candidate[0])


def recorded(name: str, direction: str, candidate: Candidate, chip: str) -> list[Any]:
    """The launches of a workload's direction with the candidate's tiles."""
    import jax

    from jln._triton import chip as chips
    from jln._triton import target
    from workloads import WORKLOADS

    workload = WORKLOADS[name]
    step = workload.step(workload.function(implementation="triton"))
    with answers(direction, candidate), target.using(recorder := target.Recorder(chips.named_chip(chip))):
        jax.jit(lambda *arrays: step(*arrays)).lower(*workload.step_arguments())
    is_forward = direction == "forward"
    return [a for a in recorder.launches if (a.kernel.fn.__name__ == "forward_kernel") == is_forward]


def candidates(name: str, direction: str) -> list[Candidate]:
    """The rules' own tiles, then those of a grid of rows, warps, stages and programs; more than a chip can run."""
    from jln._triton.tile import Tile, next_power_of_2
    from workloads import WORKLOADS

    h = WORKLOADS[name].width
    columns = next_power_of_2(h)
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
                (name, a) if isinstance(a, int) else (name.removesuffix("_ptr"), (tuple(a.shape), str(a.dtype)))
                for name, a in launch.arguments.items()
                if not (isinstance(a, int) and a == 1)  # a constant of the kernel
            ]
            entry = re.search(r"\.visible \.entry (\w+)", made.assembly)
            assert entry is not None
            facts = {"kernel": launch.kernel.fn.__name__, "entry": entry.group(1), "code": made.binary}
            facts |= {"shared": made.shared, "registers": made.registers, "warps": launch.tile.warps}
            facts |= {"programs": launch.programs, "arguments": arguments, "results": list(launch.results)}
            launches.append(facts | {"in_place": dict(launch.in_place)})
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
        if direction not in DIRECTIONS:
            raise typer.BadParameter(f"{text!r} is not WORKLOAD:DIRECTION, with a direction of {', '.join(DIRECTIONS)}")
        jobs += [(name, direction, c, chip) for c in ([()] if rules else candidates(name, direction))]
    kept = []
    with concurrent.futures.ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        for (name, direction, candidate, _), made in zip(jobs, pool.map(packed, jobs, chunksize=4), strict=True):
            if isinstance(made, str) and not candidate:
                raise typer.BadParameter(f"{name} {direction}: what the rules choose {made}")
            if not isinstance(made, str):
                kept.append((name, direction, [dataclasses.astuple(tile) for tile in candidate], made))
    file.write_bytes(gzip.compress(pickle.dumps(kept)))
    print(f"{len(kept)} of {len(jobs)} candidates, {file.stat().st_size / 1e6:.1f} MB in {file}")


def described(tiles: list[tuple[int, ...]]) -> str:
    """A candidate in words: each tile's rows x columns, warps, stages, and programs on an SM."""
    words = [f"{r}x{c}, {w} warps, {s} stages, {p} programs" for r, c, w, s, p in tiles]
    return " after sums by ".join(words) or "by rule"


class Kernel:
    """A launch's machine code, loaded, with its arguments.

    buffer: from an argument's name, shape and dtype to a PyTorch tensor.
    """

    def __init__(self, launch: dict[str, Any], buffer: Callable[[str, Any, str], Any]):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self._do("cuModuleLoadData", ctypes.byref(self.module), launch["code"])
        self._do("cuModuleGetFunction", ctypes.byref(self.function), self.module, launch["entry"].encode())
        self._do("cuFuncSetAttribute", self.function, 8, launch["shared"])  # the largest dynamic shared memory
        values: list[Any] = []
        for name, a in launch["arguments"]:
            if isinstance(a, int):
                values.append(ctypes.c_int32(a) if abs(a) < 2**31 else ctypes.c_int64(a))
            else:
                values.append(ctypes.c_void_p(buffer(name, *a).data_ptr()))
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


def timed(runs: dict[Any, Callable[[], None]], repetitions: int, chill: Any) -> dict[Any, float]:
    """The median time of each run in microseconds, in rounds that have an order of their own each."""
    import torch

    events: list[tuple[Any, Any, Any]] = []
    for number in range(repetitions):
        for key in random.Random(number).sample(list(runs), len(runs)):
            chill.add_(1)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            runs[key]()
            end.record()
            events.append((key, start, end))
    torch.cuda.synchronize()
    taken: dict[Any, list[float]] = {}
    for key, start, end in events:
        taken.setdefault(key, []).append(start.elapsed_time(end) * 1e3)
    return {key: statistics.median(times) for key, times in taken.items()}


class Question:
    """The candidates of one workload and direction, with their arrays on the card."""

    def __init__(self) -> None:
        import torch

        self.torch, self.generator = torch, torch.Generator(device="cuda").manual_seed(0)
        self.tensors: dict[Any, Any] = {}
        self.expected: dict[Any, Any] = {}

    def prepared(self, launches: list[dict[str, Any]]) -> tuple[Callable[[], None], float]:
        """A run of the launches, and how far its results are from the first candidate's, of their largest."""
        written: dict[Any, Any] = {}

        def loaded(launch: dict[str, Any]) -> Kernel:
            aliases = {result: operand for operand, result in launch["in_place"].items()}

            def buffer(name: str, shape: Any, dtype: str) -> Any:
                key = aliases.get(name, name), shape, dtype
                if key not in self.tensors:
                    drawn = self.torch.randn(shape, generator=self.generator, device="cuda")
                    drawn = drawn.abs() + 0.5 if name == "rstd" else drawn
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
        return run, max(float((got[k] - e).abs().max() / e.abs().max()) for k, e in self.expected.items())

    @property
    def bytes(self) -> int:
        """The bytes of every array once, without what kernels hand to each other."""
        return sum(t.numel() * t.element_size() for key, t in self.tensors.items() if key[0] not in BETWEEN)


@app.command("time")
def time_all(
    file: Annotated[pathlib.Path, typer.Argument(help="As `compile` wrote it.", exists=True)],
    output: Annotated[pathlib.Path | None, typer.Option(help="A file, for all of it as JSON.", dir_okay=False)] = None,
    tiles: Annotated[pathlib.Path | None, typer.Option(help="A file for JLN_TUNING, of what is 2 % faster.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Of each candidate.")] = 15,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no question after so many.")] = 60,
) -> None:
    """Time the candidates of each question on the card that is here."""
    import torch

    started, found = time.monotonic(), []
    chill = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device="cuda")
    questions: dict[tuple[str, str], list[Any]] = {}
    for name, direction, numbers, launches in pickle.loads(gzip.decompress(file.read_bytes())):
        questions.setdefault((name, direction), []).append((numbers, launches))
    for (name, direction), members in questions.items():
        if time.monotonic() - started > seconds:
            print(f"{name} {direction}: not begun")
            continue
        question, runs, facts, moved = Question(), {}, {}, 0
        for numbers, launches in members:
            candidate = described(numbers)
            try:
                runs[candidate], error = question.prepared(launches)
            except RuntimeError as raised:
                print(f"{name} {direction}: {candidate}: {raised}")
                continue
            moved = moved or question.bytes
            counts = {fact: [launch[fact] for launch in launches] for fact in ("registers", "programs")}
            facts[candidate] = {"error": error, "tiles": numbers, **counts}
        timed(runs, 2, chill)
        times = timed(runs, repetitions, chill)
        rule = times.get("by rule", float("nan"))
        print(f"{name} {direction}: {len(runs)} candidates, {moved / 1e6:.0f} MB; by rule {rule:.1f} us")
        for candidate in sorted(times, key=times.__getitem__)[:5]:
            wrong = "" if facts[candidate]["error"] < RIGHT else f"  WRONG by {facts[candidate]['error']:.1e}"
            rate = moved / times[candidate] / 1e3
            print(f"    {times[candidate]:8.2f} us {rate:7.0f} GB/s  {candidate}{wrong}", flush=True)
        same = {"workload": name, "direction": direction, "bytes": moved}
        found += [same | {"candidate": c, "microseconds": us} | facts[c] for c, us in times.items()]
    device = torch.cuda.get_device_name()
    if tiles is not None:
        tiles.write_text(json.dumps(measured(found, device), indent=1) + "\n")
    if output is not None:
        output.write_text(json.dumps({"device": device, "candidates": found}, indent=0) + "\n")


def measured(found: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """The file of the fastest right candidates of each question that are 2 % faster than the rule's own tiles."""
    import jax.numpy as jnp

    import jln
    from jln._triton.chip import Chip
    from jln._triton.tuning import chip_name
    from workloads import WORKLOADS

    entries = []
    for question in dict.fromkeys((c["workload"], c["direction"]) for c in found):
        own = [c for c in found if (c["workload"], c["direction"]) == question]
        best = min((c for c in own if c["error"] < RIGHT), key=lambda c: c["microseconds"])
        rule = next((c["microseconds"] for c in own if c["candidate"] == "by rule"), 0.0)
        w = WORKLOADS[question[0]]
        if w.entry.name in ("layer_norm", "rms_norm") and best["microseconds"] < 0.98 * rule:
            size = {"choice": question[1], "h": [w.width], "itemsize": jnp.dtype(w.dtype).itemsize}
            rate = {"mb_per_s": round(best["bytes"] / best["microseconds"])}
            entries.append(size | {"tiles": best["tiles"]} | rate)
    return {"chip": chip_name(Chip(device, 0, 0)), "versions": {"jln": jln.__version__}, "entries": entries}


if __name__ == "__main__":
    app()
