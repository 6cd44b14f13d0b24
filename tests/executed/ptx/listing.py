"""The text of a kernel as instructions, each with the function that executes it.

Those functions take the machine, and act for all of its threads at once; compiling looks at the text once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from ptx import arithmetic, asynchronous, moves, tcgen05, tensor_cores

_TABLE = arithmetic.TABLE | moves.TABLE | asynchronous.TABLE | tensor_cores.TABLE | tcgen05.TABLE
_OF_A_WARP = {"shfl", "redux", "elect", "ldmatrix", "stmatrix", "mma"}


@dataclasses.dataclass
class Instruction:
    """One line: `@guard op.op args`. `run` executes it on a machine, for all threads at once."""

    line: int  # of the PTX, from 1
    text: str
    guard: tuple[str, bool] | None  # (register, whether it is negated)
    op: list[str]  # at its dots
    args: list[str]
    together: int  # that many threads must come here at once: 1, a warp's, four warps', or 0 for all of the program
    run: Callable[[Any], None] = lambda machine: None


@dataclasses.dataclass
class Listing:
    """A kernel: instructions, its labels' places among them, (name, bytes) of its parameters, threads of a program."""

    code: list[Instruction]
    labels: dict[str, int]
    parameters: list[tuple[str, int]]
    threads: int


# An argument: {registers}, [address], or anything else up to a comma.
_ARGUMENT = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$")


@functools.lru_cache(256)
def parse(ptx: str, entry: str) -> Listing:
    """Read the kernel `entry`."""
    ptx = re.sub(r"\b(ld|st)\.shared::cta\b", r"\1.shared", ptx)  # Triton 3.8 writes out what is the default
    lines = _without_blocks(_without_tables(ptx).splitlines())
    head = next(n for n, text in enumerate(lines) if re.match(rf"\.visible \.entry {re.escape(entry)}\b", text))
    body = next(n for n in range(head, len(lines)) if lines[n].startswith("{"))
    declared = "\n".join(lines[head:body])
    parameters = [
        (name, int(bits) // 8) for bits, name in re.findall(r"\.param \.[bus](\d+).*?(\w+),?\s*$", declared, re.M)
    ]
    code, labels = [], {}
    for n in range(body + 1, len(lines)):
        text = lines[n].split("//")[0].strip()
        if text == "}":
            break
        if label := re.match(r"(\$\w+):", text):
            labels[label[1]] = len(code)
            text = text[label.end() :]
        for part in filter(None, map(str.strip, text.split(";"))):
            if part[0] != ".":  # a declaration
                code.append(_instruction(part, n + 1))
    return Listing(code, labels, parameters, threads=int(re.search(r"\.reqntid (\d+)", declared)[1]))


def _without_tables(ptx: str) -> str:
    """The text with each table of labels where it is branched by, and as many lines."""
    table = re.compile(r"^(\w+):\s*\.branchtargets([^;]*);", re.M)
    tables = {name: ", ".join(re.findall(r"\$\w+", labels)) for name, labels in table.findall(ptx)}
    ptx = table.sub(lambda found: "\n" * found[0].count("\n"), ptx)
    return re.sub(r"(brx\.idx\s+%\w+),\s*(\w+);", lambda found: f"{found[1]}, {tables[found[2]]};", ptx)


def _without_blocks(lines: list[str]) -> list[str]:
    """The lines with what is declared in a block of inline assembly under names of its own, as if outside of it."""
    lines, inside, start = list(lines), False, 0
    for n, text in enumerate(lines):
        if text.strip() == "{" and not lines[n - 1].startswith((".reqntid", ".maxnreg", ")")):
            inside, start = True, n
        elif text.strip() == "}" and inside:
            block = "\n".join(lines[start + 1 : n])
            for name in re.findall(r"\.reg\s+\.\w+\s+(\w+)", block):
                block = re.sub(rf"(?<![\w%$]){name}\b", f"%p{name}", block)
            for name in re.findall(r"^\s*(\w+):(?!:)", block, re.M):
                block = re.sub(rf"(?<![\w%$]){name}\b", f"$block{start}_{name}", block)
            lines[start : n + 1] = ["", *block.split("\n"), ""]
            inside = False
    return lines


def _instruction(text: str, line: int) -> Instruction:
    match = _INSTRUCTION.match(text)
    op = match[3].split(".") if match else [""]
    if op[0] not in _TABLE:
        raise NotImplementedError(f"line {line}: {text}")
    arguments = [a.strip() for a in _ARGUMENT.findall(match[4])]
    guard = (match[2], match[1] == "!") if match[2] else None
    instruction = Instruction(line, text, guard, op, arguments, _together(op))
    instruction.run = _TABLE[op[0]](instruction)
    return instruction


def _together(op: list[str]) -> int:
    """The number of threads that must execute an instruction together; 0 for all threads of the program."""
    if op[0] == "wgmma":
        return 128
    if op[0] in _OF_A_WARP or op[:2] == ["bar", "warp"] or (op[0] == "tcgen05" and "sync" in op):
        return 32
    return 0 if op[0] in ("bar", "barrier", "fence") or op[:2] == ["mbarrier", "try_wait"] else 1
