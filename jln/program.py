"""What a compiled program does on a GPU that is not here: its kernels, their bytes, its memory and its collectives.

    print(program.compile_for(fn, *args, chip="h200"))

XLA compiles the function for the named chip and everything is read from the optimised HLO: facts of the program, not
measurements. A kernel reads its distinct operands (of one that is only sliced, the slices) and writes its results (of
an update in place, the update). Sizes are bytes on one device. Needs the packages of `jln[cuda13]` and no GPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jln._triton import chip as chips
from jln._triton.launch import TRITON_CALLS
from jln._triton.target import Gpu, using

_PLUGIN = "jax_plugins.xla_cuda13"


@dataclass(frozen=True)
class XlaChip:
    """A GPU as `stream_executor.GpuTargetConfigProto` describes it to XLA. Sizes in bytes, bandwidth in bytes/s."""

    chip: chips.Chip
    description: str
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    memory_bandwidth: int
    l2_cache_size: int
    clock_rate_ghz: float
    device_memory_size: int

    def target_config(self) -> str:
        """The text proto."""
        own = " ".join(f"{k}: {v}" for k, v in vars(self).items() if k not in ("chip", "description"))
        major, minor = divmod(self.chip.capability, 10)
        return f"""gpu_device_info {{ {own} core_count: {self.chip.sms}
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
            shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
            driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            cuda_compute_capability {{ major: {major} minor: {minor} }} }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.description}" """


CHIPS = {
    name: XlaChip(chips.CHIPS[name], *facts)
    for name, facts in {
        "a100": ("NVIDIA A100-SXM4-80GB", 64, 167936, 166912, 2039 * 10**9, 40 << 20, 1.41, 85 * 10**9),
        "h100": ("NVIDIA H100 80GB HBM3", 128, 233472, 232448, 3352 * 10**9, 50 << 20, 1.98, 85 * 10**9),
        "h200": ("NVIDIA H200", 128, 233472, 232448, 4800 * 10**9, 60 << 20, 1.98, 150 * 10**9),
        "b200": ("NVIDIA B200", 128, 233472, 232448, 7672 * 10**9, 126 << 20, 1.965, 191 * 10**9),
    }.items()
}


@dataclass(frozen=True)
class Kernel:
    """One kernel and the bytes of one launch. kind: HLO's opcode ("fusion", "copy"), or a custom call's target.

    times: launches per run. exact: False where data decides them; then a loop is counted as one trip, a conditional as
    all of its branches. product: a matrix product or an attention, as XLA's own kernel or a library's. is_triton: a
    kernel of this library or another's, by either of the calls that jaxlib has for them.
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
    """One communication. bytes: what goes in or what comes out on one device, whichever is more.

    devices: how many communicate with each other; None where HLO does not say it as groups.
    """

    kind: str
    bytes: int
    name: str
    times: int = 1
    exact: bool = True
    devices: int | None = None


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, as each of its devices runs it. The totals are over `kernels`, each times its launches."""

    chip: str
    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    hlo: str = field(repr=False)

    launches = property(lambda self: sum(k.times for k in self.kernels))
    bytes_read = property(lambda self: sum(k.times * k.bytes_read for k in self.kernels))
    bytes_written = property(lambda self: sum(k.times * k.bytes_written for k in self.kernels))
    bytes_total = property(lambda self: self.bytes_read + self.bytes_written)
    product_bytes = property(
        lambda self: sum(k.times * (k.bytes_read + k.bytes_written) for k in self.kernels if k.product)
    )

    def __str__(self) -> str:
        sizes = {k: (k.bytes_read, k.bytes_written) for k in self.kernels} | {c: (c.bytes,) for c in self.collectives}
        rows = [(i.name, i.kind, f"{i.times}{'' if i.exact else '?'}", *size) for i, size in sizes.items()]
        rows += [("all kernels", "", f"{self.launches}", self.bytes_read, self.bytes_written)]
        rows += [(name, "", "", getattr(self, f"{name}_bytes")) for name in ("temp", "argument", "output")]
        lines = [f"{self.chip:<36} {'kind':<24} {'times':>6} {'read MB':>11} {'written MB':>11}"]
        for name, kind, times, *mb in rows:
            lines += [f"{name:<36.36} {kind:<24.24} {times:>6}" + "".join(f" {size / 1e6:>11.3f}" for size in mb)]
        return "\n".join(lines)


def mesh(chip: str, shape: Sequence[int], names: Sequence[str], axis_types: Any = None) -> jax.sharding.Mesh:
    """A mesh of `prod(shape)` absent GPUs, for the shardings of `compile_for`'s arguments. Raises as it does."""
    gpus = np.array(_devices(chip, math.prod(shape))).reshape(shape)
    return jax.sharding.Mesh(gpus, tuple(names), axis_types=axis_types)


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    chip: str = "h200",
    devices: int = 1,
    compiler_options: dict[str, Any] | None = None,
) -> CompiledProgram:
    """Compile `fn(*args)` for a number of GPUs of one kind, and say what the program does.

    fn: a function, jitted or not (a jitted one's donations and static arguments are not taken over).
    args: pytrees of arrays or `jax.ShapeDtypeStruct`, whose values do not matter; if `devices > 1` they carry shardings
        over a `program.mesh(chip, ...)` of that many.
    compiler_options: XLA's, as `jax.jit` takes them. With no GPU there is no autotuning, and XLA's own Triton kernels
        do most products; `{"xla_gpu_enable_triton_gemm": False}` gives them to cuBLAS, as a tuned program would most.
    Raises ValueError for an unknown chip or arguments that lie on none of the GPUs, RuntimeError without CUDA packages.
    """
    gpus = _devices(chip, devices)
    args = jax.tree.map(functools.partial(_place, gpus=gpus), args)
    if all(leaf.sharding is None for leaf in jax.tree.leaves(args)):
        raise ValueError(f"no argument lies on the {devices} GPUs: shard one over program.mesh({chip!r}, ...)")
    with using(Gpu(chips.named_chip(chip))):  # a new function each time, since JAX's caches do not know the chip
        compiled = jax.jit(lambda *args: fn(*args)).lower(*args).compile(compiler_options)
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    assert hlo is not None and memory is not None  # as some other backends' are
    kernels = tuple(item for item in _launches(_parse(hlo)) if isinstance(item, Kernel))
    sizes = (memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes)
    return CompiledProgram(chip, kernels, collectives(hlo), *sizes, hlo)


def collectives(hlo: str) -> tuple[Collective, ...]:
    """Those of a program compiled for any platform, from `jax.jit(fn).lower(...).compile().as_text()`."""
    return tuple(item for item in _launches(_parse(hlo)) if isinstance(item, Collective))


def _place(leaf: Any, gpus: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """An argument without its values, on the GPUs that its sharding names, or on the only one."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None and not sharding.device_set <= set(gpus):
        if len(sharding.device_set) > 1:
            raise ValueError(f"an argument of shape {aval.shape} is sharded over other devices than the program's")
        sharding = None  # it just happens to lie on this machine
    if sharding is None and len(gpus) == 1:
        sharding = jax.sharding.SingleDeviceSharding(gpus[0])
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


@functools.cache
def _devices(chip: str, count: int) -> tuple[Any, ...]:
    """`count` JAX devices of a kind that only the compiler knows; the same ones at each call."""
    if chip not in CHIPS:
        raise ValueError(f"unknown chip {chip!r}; known are {', '.join(CHIPS)}")
    if count < 1:
        raise ValueError(f"a program needs at least one device, not {count}")
    if not _folders(_PLUGIN):
        raise RuntimeError('compiling for a GPU needs the CUDA packages of JAX: pip install "jln[cuda13]"')
    # XLA runs the first ptxas on PATH, and one older than the plugin rejects its PTX.
    os.environ["PATH"] = os.pathsep.join([f"{folder}/bin" for folder in _folders("nvidia.cu13")] + [os.environ["PATH"]])
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    options = {"topology": f"1x1x{count}", "target_config": CHIPS[chip].target_config()}
    try:
        return tuple(topologies.get_topology_desc(chip, "cuda", **options).devices)
    except NotImplementedError:  # JAX met its plugins before the variable was set, and turned this one away
        importlib.import_module(_PLUGIN).initialize()
        return tuple(topologies.get_topology_desc(chip, "cuda", **options).devices)


def _folders(package: str) -> list[str]:
    """Where a package is installed, if it is."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # nor its parent
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


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
    """The result of one line. kind: its opcode, `x` for `x-start`. users: and as which of their operands."""

    name: str
    kind: str
    bytes: int
    attributes: str
    operands: list[_Value]
    callees: list[_Computation]
    users: list[tuple[_Value, int]] = field(default_factory=list)

    def buffer(self) -> tuple[str, str]:
        """What names the memory that holds it."""
        if self.kind == "bitcast":
            return self.operands[0].buffer()
        if self.kind == "get-tuple-element":
            return self.operands[0].name, self.attributes.split(",")[1]
        return self.name, ""

    def updated_bytes(self) -> int:
        """Of an update in place, the bytes written."""
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
    """Of an array or a tuple of them. The first number in a dtype is its bits; pred has none, a token no bytes."""
    total = 0
    for dtype, bits, dims in _ARRAY.findall(shape):
        count = math.prod(int(size) for size in re.findall(r"\d+", dims))
        total += math.ceil(count * int(bits or 8 * (dtype == "pred")) / 8)
    return total


def _launches(computation: _Computation, times: int = 1, exact: bool = True) -> Iterator[Kernel | Collective]:
    """What running the computation launches, in order."""
    for value in computation.values.values():
        if value.kind in _SILENT or value.kind.endswith("-done"):
            continue
        if value.kind == "while":  # XLA does not run the condition, the first callee, of a loop whose trips it knows
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', value.attributes)
            for callee in value.callees[1:] if trips else value.callees:
                yield from _launches(callee, times * int(trips[1]) if trips else times, exact and trips is not None)
        elif value.kind in {"call", "async", "conditional"}:
            for callee in value.callees:
                yield from _launches(callee, times, exact and value.kind != "conditional")
        elif _COLLECTIVE.fullmatch(value.kind):
            size = max(value.bytes, sum(operand.bytes for operand in value.operands))
            yield Collective(value.kind, size, value.name, times, exact, _group(value.attributes))
        else:
            target = re.search(r'custom_call_target="([^"]*)"', value.attributes)
            kind = target[1] if target else value.kind
            yield Kernel(value.name, kind, _read(value), _written(value), times, exact, _is_product(value, kind))


def _is_product(kernel: _Value, kind: str) -> bool:
    if kind.startswith(("__cublas", "__cudnn$fmha")) or kernel.kind == "dot":
        return True
    return kernel.kind == "fusion" and any(value.kind == "dot" for value in kernel.callees[0].values.values())


def _group(attributes: str) -> int | None:
    """How many devices a group has, in any of HLO's notations: {{0,1},{2,3}}, [2,2]<=[4], mesh['a'=2,'b'=2] ... {'b'},
    where an axis that is split may stand for a part of it: 'b':(1)2.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return listed[1].count(",") + 1
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", named[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return None


def _read(kernel: _Value) -> int:
    """Bytes that one launch reads."""
    shares: dict[tuple[str, str], tuple[float, int]] = {}
    for index, operand in enumerate(kernel.operands):
        share = _share(kernel, index, {kernel}) + shares.get(operand.buffer(), (0.0, 0))[0]
        shares[operand.buffer()] = min(share, 1.0), operand.bytes
    return sum(round(share * size) for share, size in shares.values())


def _share(user: _Value, index: int, updates: set[_Value]) -> float:
    """The part of an operand that `user` reads, 0 to 1; `updates` are those that happen in place."""
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
    """Bytes that one launch writes."""
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
