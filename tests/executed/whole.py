"""The instructions of all kernels of a program, XLA's and ours: some programs of each grid are executed, on zeros."""

from __future__ import annotations

import itertools
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

import program
from jln._triton import target
from jln._triton.chip import CHIPS
from ptx import Call, Program, Stats, listing
from ptx.machine import Machine
from ptx.memory import Buffers
from ptx.operands import TYPES

_THREADS = 1 << 14  # to execute, about, of a kernel's many
_FEW = 1000  # programs: persistent ones, each of which goes through many tiles


def compiled(step: Callable[..., Any], *shapes: Any) -> tuple[program.CompiledProgram, dict[str, float]]:
    """Return the program for an H200, and {kernel: instructions, times warps}.

    Branches are left out, as in `Stats.issued`.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = program.compile_for(step, *shapes, compiler_options={"xla_dump_to": folder})
        with target.using(target.Gpu(CHIPS["h200"])):
            ours = Program(lambda *args: step(*args), *shapes).calls
        calls = [*ours, *_of_xla(pathlib.Path(folder))]
    assert len(calls) == found.launches, [call.name for call in calls]
    return found, {call.name: issued(call) for call in calls}


def _of_xla(folder: pathlib.Path) -> list[Call]:
    """XLA's own kernels, from its dumps: PTX, and the launches as text."""
    texts = {}
    for file in folder.glob("*.ptx"):
        # In the words of Triton's: no waits for the kernel before, one name for shared memory.
        text = re.sub(r"\bshared_\d+\b", "global_smem", re.sub(r"griddepcontrol\.\w+;", "", file.read_text()))
        text = text.replace("cvta.to.global.u64", "mov.b64").replace(".nc.", ".")
        texts |= dict.fromkeys(re.findall(r"\.visible \.entry (\w+)", text), text)
    (sequence,) = folder.glob("*.thunk_sequence.txt")
    launch = r"(\w+) grid: \[(\d+), 1, 1\] threads: \[(\d+), 1, 1\] +shared_memory: (\d+)"
    calls = []
    for name, grid, threads, shared in re.findall(launch, sequence.read_text()):
        if text := texts.get(name):
            fixed = sum(map(int, re.findall(r"\.shared .*\[(\d+)\]", text)))
            arrays = [None] * len(re.findall(r"\.param \.u64", text))
            calls.append(Call(name, name, text, int(threads) // 32, int(shared) + fixed, int(grid), arrays))
    return calls


class _Counting(Machine):
    """A machine whose global memory is zeros wherever it is read, so that the arrays may be as large as they are."""

    def load_global(self, argument: str, lanes: np.ndarray, width: int, what: str) -> np.ndarray:
        return np.zeros((len(lanes), width), np.uint8)

    def store_global(self, *_: Any) -> None:
        pass


def issued(call: Call) -> float:
    """The instructions of all programs of a call, from those of the first of them."""
    kernel = listing.parse(call.ptx, call.entry)
    programs = min(call.grid, 4 if call.grid < _FEW else _THREADS // kernel.threads)
    values = [("u64", 0) if p is None else p for p in call.parameters]
    given = {
        name: np.array(value, TYPES[ptx_type])
        for (name, _), (ptx_type, value) in itertools.zip_longest(kernel.parameters, values, fillvalue=("u64", 0))
    }
    stats = Stats(call.name)
    with np.errstate(all="ignore"):
        _Counting(call, kernel, Buffers([]), given, stats).run(0, programs)
    return stats.issued / programs * call.grid
