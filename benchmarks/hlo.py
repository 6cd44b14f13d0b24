"""The kernels and collectives of a compiled program, read from the text of its optimised HLO."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jln._triton.launch import TRITON_CALLS


@dataclass(frozen=True)
class Kernel:
    """One kernel of a compiled program, with the bytes that one launch reads and writes on one device.

    kind: HLO's opcode ("fusion", "copy"), or a custom call's target.
    bytes_read: of its distinct operands; of one that is only sliced, those of the slices.
    bytes_written: of its results; of an update in place, those of the update.
    times: launches per run. exact: False where data decide it; then a loop is counted as one trip, a conditional as all
      of its branches.
    product: whether it is a matrix product or an attention, XLA's own kernel or a library's.
    """

    name: str
    kind: str
    bytes_read: int
    bytes_written: int
    times: int = 1
    exact: bool = True
    product: bool = False

    is_triton = property(lambda self: self.kind in TRITON_CALLS)


@dataclass(frozen=True)
class Collective:
    """One communication of a compiled program.

    bytes: those that go in or that come out on one device, whichever is more.
    times, exact: as of `Kernel`.
    group: the numbers, in the mesh's order, of the devices of one group; None where HLO does not say it.
    """

    kind: str
    bytes: int
    name: str
    times: int = 1
    exact: bool = True
    group: tuple[int, ...] | None = None

    devices = property(lambda self: self.group and len(self.group))  # how many communicate with each other


def launches(hlo: str) -> list[Kernel | Collective]:
    """The kernels and collectives that a run of the program launches, in order."""
    return list(_of(_parse(hlo)))


# HLO text: lines `%name = shape opcode(%operand, ...), attributes`, operands and callees before their users.
_COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r" +(ROOT )?%(\S+) = (.+?) ([a-z][\w\-]*)\((.*?)\)(.*)$")
_CALLEES = re.compile(r"(?:calls|to_apply|condition|body|\w+_computations?)=\{?(%[^\s},]+(?:, ?%[^\s},]+)*)")
_NAME = re.compile(r"%([^\s,]+)")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([^\]]*)\]")  # bf16[8,128], f8e4m3fn[<=4], pred[], token[]
_SILENT = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier", "async-update"}
_COLLECTIVE = re.compile(r"all-reduce|all-gather|reduce-scatter|(ragged-)?all-to-all|collective-\w+|send|recv")
_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand is written into the first


@dataclass(eq=False)
class _Value:
    """The result of one line of HLO.

    kind: its opcode, `x` for `x-start`. users: the values that read it, each with the index of the operand that it is.
    """

    name: str
    kind: str
    bytes: int
    attributes: str
    operands: list[_Value]
    callees: list[_Computation]
    users: list[tuple[_Value, int]] = field(default_factory=list)

    def buffer(self) -> tuple[str, str]:
        """A name of the memory that holds the value."""
        if self.kind in {"bitcast", "opt-barrier"}:
            return self.operands[0].buffer()
        if self.kind == "get-tuple-element":
            of, index = self.operands[0], self.attributes.split(",")[1]
            while of.kind == "opt-barrier":
                of = of.operands[0]
            return of.operands[int(index.partition("=")[2])].buffer() if of.kind == "tuple" else (of.name, index)
        return self.name, ""

    def updated_bytes(self) -> int:
        """The bytes that an update in place writes."""
        return self.operands[_UPDATES[self.kind]].bytes


@dataclass(eq=False)
class _Computation:
    values: dict[str, _Value] = field(default_factory=dict)  # in the order they run
    parameters: dict[int, _Value] = field(default_factory=dict)
    outputs: list[_Value] = field(default_factory=list)


def _parse(hlo: str) -> _Computation:
    """The entry computation, linked to those it calls."""
    computations: dict[str, _Computation] = {}
    entry = current = _Computation()
    for line in hlo.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations[head[2]] = _Computation()
            entry = current if head[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, shape, opcode, inside, attributes = match.groups()
            operands = [current.values[n] for n in _NAME.findall(inside)]
            callees = [computations[n] for names in _CALLEES.findall(attributes) for n in _NAME.findall(names)]
            kind = opcode.removesuffix("-start")
            value = current.values[name] = _Value(name, kind, _bytes(shape), attributes, operands, callees)
            for index, operand in enumerate(operands):
                operand.users.append((value, index))
            if opcode == "parameter":
                current.parameters[int(inside)] = value
            if opcode.endswith("-done"):  # the shape of the start has its operands and more in it
                operands[0].bytes = value.bytes
            if root:
                current.outputs = operands if opcode == "tuple" else [value]
    return entry


def _bytes(shape: str) -> int:
    """The bytes of an array or of a tuple of arrays, from its shape in HLO.

    The first number in a dtype is its bits; pred has none, and a token has no bytes.
    """
    total = 0
    for dtype, bits, dims in _ARRAY.findall(shape):
        count = math.prod(int(size) for size in re.findall(r"\d+", dims))
        total += math.ceil(count * int(bits or 8 * (dtype == "pred")) / 8)
    return total


def _of(computation: _Computation, times: int = 1, exact: bool = True) -> Iterator[Kernel | Collective]:
    """The kernels and collectives that a run of the computation launches, in order."""
    for value in computation.values.values():
        if value.kind in _SILENT or value.kind.endswith("-done"):
            continue
        if value.kind == "while":  # XLA does not run the condition, the first callee, of a loop whose trips it knows
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', value.attributes)
            for callee in value.callees[1:] if trips else value.callees:
                yield from _of(callee, times * int(trips[1]) if trips else times, exact and trips is not None)
        elif value.kind in {"call", "async", "conditional"}:
            for callee in value.callees:
                yield from _of(callee, times, exact and value.kind != "conditional")
        elif _COLLECTIVE.fullmatch(value.kind):
            size = max(value.bytes, sum(operand.bytes for operand in value.operands))
            yield Collective(value.kind, size, value.name, times, exact, _group(value.attributes))
        else:
            target = re.search(r'custom_call_target="([^"]*)"', value.attributes)
            kind = target[1] if target else value.kind
            yield Kernel(value.name, kind, _read(value), _written(value), times, exact, _is_product(value, kind))


def _is_product(kernel: _Value, kind: str) -> bool:
    if kind.startswith(("__cublas", "__cudnn$fmha", "__cudnn$blockScaledDot")) or kernel.kind == "dot":
        return True
    return kernel.kind == "fusion" and any(value.kind == "dot" for value in kernel.callees[0].values.values())


def _group(attributes: str) -> tuple[int, ...] | None:
    """The first group of devices of a collective, in any of HLO's notations.

    {{0,1},{2,3}}, [2,2]<=[4], or mesh['a'=2,'b'=2] ... {'b'}, where a part of an axis may stand for it: 'b':(1)2.
    """
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", attributes):
        return tuple(int(device) for device in listed[1].split(","))
    if counted := re.search(rf"replica_groups=\[\d+,(\d+)\]<={_ORDER}", attributes):
        return tuple(_ordered(*counted.groups()[1:])[: int(counted[1])].tolist())
    if named := re.search(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_ORDER}\))? \{{([^}}]*)\}}", attributes):
        mesh, dims, order, within = named.groups()
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
        parts = {a: (b, p) for a, b, p in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", within)}
        shape, index = [], []
        for axis, size in sizes.items():
            before, part = parts.get(axis, ("", ""))
            before, part = int(before or 1), int(part or size)
            shape += [before, part, size // before // part]
            index += [0, slice(None) if axis in parts else 0, 0]
        devices = _ordered(dims or f"{math.prod(sizes.values())}", order)
        return tuple(devices.reshape(shape)[tuple(index)].ravel().tolist())
    return None


_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _ordered(dims: str, order: str | None) -> np.ndarray:
    """The devices' numbers in the order of HLO's notation, as [4,2]T(1,0)."""
    numbers = np.arange(math.prod(shape := [int(size) for size in dims.split(",")])).reshape(shape)
    return (numbers.transpose([int(axis) for axis in order.split(",")]) if order else numbers).ravel()


def _read(kernel: _Value) -> int:
    """Bytes that one launch reads."""
    return sum(reads(kernel).values())


def reads(kernel: _Value) -> dict[tuple[str, str], int]:
    """Return the bytes that one launch reads of each of its operands, by what names their memory."""
    shares: dict[tuple[str, str], tuple[float, int]] = {}
    for index, operand in enumerate(kernel.operands):
        share = _share(kernel, index, {kernel}) + shares.get(operand.buffer(), (0.0, 0))[0]
        shares[operand.buffer()] = min(share, 1.0), operand.bytes
    return {buffer: round(share * size) for buffer, (share, size) in shares.items()}


def _share(user: _Value, index: int, updates: set[_Value]) -> float:
    """The part of an operand that `user` reads, from 0 to 1; `updates` are those that happen in place."""
    operand, uses = user.operands[index], user.users
    if index == 0 and user.kind in _SLICES:
        return user.bytes / operand.bytes
    if index == 0 and user.kind in _UPDATES and user in updates:  # a scatter combines: it reads what it writes
        return user.updated_bytes() / operand.bytes if user.kind == "scatter" else 0.0
    if user.kind == "fusion":
        (body,) = user.callees
        updates = {update for output in body.outputs for update in _updates(output)}
        uses = body.parameters[index].users
    elif user.kind not in {"bitcast", "convert"} or not uses:  # what is sliced after these is sliced before them
        return 1.0
    return min(1.0, sum(_share(*use, updates) for use in uses))


def _written(kernel: _Value) -> int:
    """The bytes that one launch writes."""
    if kernel.kind in _UPDATES:
        return kernel.updated_bytes()
    if kernel.kind != "fusion":
        return kernel.bytes
    outputs = {output: _updates(output) for output in kernel.callees[0].outputs}
    return sum(sum(u.updated_bytes() for u in updates) if updates else o.bytes for o, updates in outputs.items())


def _updates(output: _Value) -> list[_Value]:
    """The updates in place that turn a parameter of a fused computation into its output; none if it is made anew."""
    updates = []
    while output.kind in {"bitcast", *_UPDATES}:
        updates += [output] if output.kind in _UPDATES else []
        output = output.operands[0]
    return updates if output.kind == "parameter" else []
