"""The tables of `steps.py --mesh`: what a step sharded over absent GPUs communicates, and keeps on each."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any, NamedTuple

from jln import program
from jln._tools.console import UserError, known, megabytes, print_table
from layouts import AXES, Layout
from stacks import STACKS, Stack

SHARDED = tuple(stack.name for stack in STACKS.values() if stack.apart)
BLOCKS = 2  # of each stage; the fewest that have a norm between two blocks. More are more of the same
MOST = 1 << 14
Key = tuple[str, tuple[str, ...]]  # a collective's kind, and the axes along which devices communicate


class Step(NamedTuple):
    """A stack on a mesh, and its compiled programs by variant."""

    stack: Stack
    layout: Layout
    programs: dict[str, program.CompiledProgram]


def parsed(text: str, chip: str, sequence: bool) -> Layout:
    """The layout in a text such as "data=2,tensor=4". Raises UserError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        known("axis of --mesh", [axis], AXES)
        if axis in sizes or not size.isdecimal() or len(size) > 9 or int(size) < 1:
            raise UserError(f"--mesh {text}: each axis once and with a size, as in data=2,tensor=4")
        sizes[axis] = int(size)
    if math.prod(sizes.values()) > MOST:
        raise UserError(f"--mesh {text}: of more than {MOST} GPUs")
    if sequence and sizes.get("tensor", 1) == 1:
        raise UserError(f"--mesh {text}: --sequence splits tokens over an axis tensor=...")
    sizes = {axis: sizes[axis] for axis in AXES if axis in sizes}
    return Layout(program.mesh(chip, tuple(sizes.values()), tuple(sizes)), sequence)


def fitted(name: str, layout: Layout) -> Stack:
    """The stack of that name with `BLOCKS` a stage. Raises UserError for what the mesh cannot split."""
    try:
        return layout.fitted(dataclasses.replace(STACKS[name], layers=BLOCKS * layout.stages))
    except ValueError as error:
        raise UserError(str(error)) from None


def collective_counts(report: program.CompiledProgram, layout: Layout) -> Counter[tuple[Key, int]]:
    """The number of collectives by kind, mesh axes and bytes."""
    counts: Counter[tuple[Key, int]] = Counter()
    for each in report.collectives:
        counts[(each.kind, layout.among(each.group)), each.bytes] += each.times
    return counts


def totals(report: program.CompiledProgram, layout: Layout) -> dict[Key, tuple[int, int]]:
    """The collectives by kind and mesh axes: how many, and the bytes of all together."""
    counts = collective_counts(report, layout)
    return {
        key: (
            sum(times for (other, _), times in counts.items() if other == key),
            sum(times * size for (other, size), times in counts.items() if other == key),
        )
        for key in sorted({key for key, _ in counts})
    }


def facts(step: Step) -> dict[str, Any]:
    stack, layout = step.stack, step.layout
    return {
        "name": stack.name,
        "mesh": dict(layout.mesh.shape),
        "sequence": layout.sequence,
        "layers": stack.layers,
        "shape": stack.shape,
        "programs": {
            name: {
                "kernels": report.launches,
                "argument_bytes": report.argument_bytes,
                "temporary_bytes": report.temp_bytes,
                "collectives": [
                    {"kind": kind, "among": axes, "bytes": size, "times": times}
                    for ((kind, axes), size), times in sorted(collective_counts(report, layout).items())
                ],
            }
            for name, report in step.programs.items()
        },
    }


def print_step(step: Step, chip: str) -> None:
    """Print a table of a step, with a column for each variant."""
    stack, layout = step.stack, step.layout
    microbatches = f"{layout.stages} microbatches of " if layout.stages > 1 else ""
    tokens = "; the stream split by its tokens over tensor" if layout.sequence else ""
    title = (
        f"{stack.name}: {layout.mesh.size} x {chip}, {layout.sizes}{tokens}; {stack.layers} "
        f"blocks, x {microbatches}{'x'.join(map(str, stack.shape))}; times / MB on one device"
    )
    print_table(title, ("collective", "among", *step.programs), rows(step), left=(0, 1))


def rows(step: Step) -> list[tuple[str, ...]]:
    """The rows of a step's table: each kind of collective, all of them, and what each device launches and keeps."""
    reports = step.programs.values()
    all_totals = [totals(report, step.layout) for report in reports]

    def cell(times: int, size: int) -> str:
        return f"{times} / {megabytes(size) if size >= 1000 else f'{size} B'}" if times else "-"

    of_kinds = [
        (key[0], " x ".join(key[1]), *(cell(*each.get(key, (0, 0))) for each in all_totals))
        for key in sorted({key for each in all_totals for key in each})
    ]
    added = [cell(sum(t for t, _ in each.values()), sum(size for _, size in each.values())) for each in all_totals]
    return [
        *of_kinds,
        ("all of them", "", *added),
        ("kernels", "", *(f"{report.launches}" for report in reports)),
        ("arguments, MB", "", *(megabytes(report.argument_bytes) for report in reports)),
        ("temporary, MB", "", *(megabytes(report.temp_bytes) for report in reports)),
    ]
