"""A JAX function lowered for CUDA, which runs on the CPU with the PTX of its Triton calls executed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax._src.lib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from ptx import call as calls
from ptx import listing
from ptx.call import Call, Stats, Violation
from ptx.machine import Machine
from ptx.memory import READABLE, WRITABLE, WRITTEN, Buffers
from ptx.operands import TYPES

_CALLBACK = "xla_ffi_python_cpu_callback"  # what jax.pure_callback is on the CPU
_THREADS = 1 << 14  # that run at once, about: more make numpy's arrays leave the processor's caches
_SCRATCH = 2  # null pointers that jaxlib's launcher adds: Triton's scratch memory, and its profiler's


class Program:
    """A function lowered for CUDA at these shapes.

    Each Triton call becomes a call back to the executor, where it stands: within a `scan`, a `while` or a branch it is
    executed as often as it is reached.
    """

    def __init__(self, f: Callable[..., Any], *shapes: Any):
        lowered = jax.jit(f, keep_unused=True).trace(*shapes).lower(lowering_platforms=("cuda",))
        self._tree = lowered.out_tree
        self._lock = threading.Lock()  # XLA may call from several threads
        self.calls: list[Call] = []  # in the order of the program's text; a test may change them before `run`
        self.stats: list[Stats] = []
        original = lowered.compiler_ir("stablehlo")  # JAX keeps it, so what is changed here is a copy
        with original.context, ir.Location.unknown():
            module = ir.Module.parse(str(original))
            # Inlined, a value that reaches a call by two ways is one value.
            PassManager.parse("builtin.module(inline)").run(module.operation)
            self._callbacks = [self._replaced(operation) for operation in _triton_calls(module.operation)]
            cpu = xla_bridge.get_backend("cpu")
            self._executable = cpu.compile_and_load(
                module,
                executable_devices=xla_client.DeviceList(tuple(cpu.local_devices()[:1])),
                compile_options=xla_client.CompileOptions(),
                host_callbacks=self._callbacks,  # XLA does not keep them alive
            )

    def run(self, *arrays: Any) -> Any:
        """Run the function on these arrays. Afterwards `stats` has what each of `calls` did, however often it ran."""
        self.stats = [Stats(call.name) for call in self.calls]
        self._error: Exception | None = None
        cpu = jax.local_devices(backend="cpu")[0]
        given = [jax.device_put(np.asarray(a), cpu) for a in jax.tree.leaves(arrays)]
        try:
            shards = self._executable.execute_sharded(given).disassemble_into_single_device_arrays()
            results = [np.asarray(shard[0]) for shard in shards]
        except jax.errors.JaxRuntimeError as error:  # which has only the text of ours
            raise self._error or error from None
        return jax.tree.unflatten(self._tree, results)

    def _replaced(self, operation: Any) -> Callable[..., tuple[np.ndarray, ...]]:
        """Put XLA's call back to Python in the place of a Triton call, and return the function that it calls."""
        index, call = len(self.calls), calls.of_operation(operation)
        self.calls.append(call)
        results = [(tuple(r.type.shape), _dtype(r.type.element_type)) for r in operation.results]
        numbers: dict[Any, int] = {}
        same = [numbers.setdefault(value, len(numbers)) for value in operation.operands]

        def called(*operands):
            with self._lock:
                try:
                    arrays = [np.array(a) for a in operands]  # XLA's memory is gone when an error is shown
                    return tuple(execute(call, arrays, results, same, self.stats[index]))
                except Exception as error:
                    self._error = self._error or error
                    raise

        number = ir.IntegerAttr.get(ir.IntegerType.get_unsigned(64), index)
        attributes = {
            "call_target_name": ir.StringAttr.get(_CALLBACK),
            "has_side_effect": ir.BoolAttr.get(False),
            "backend_config": ir.StringAttr.get(""),
            "mhlo.backend_config": ir.DictAttr.get({"index": number}),
        }
        layouts = ("operand_layouts", "result_layouts")
        attributes |= {name: operation.attributes[name] for name in layouts if name in operation.attributes}
        with ir.InsertionPoint(operation):
            new = ir.Operation.create(
                operation.name,
                results=[r.type for r in operation.results],
                operands=list(operation.operands),
                attributes=attributes,
            )
        for old, result in zip(operation.results, new.results, strict=True):
            old.replace_all_uses_with(result)
        operation.erase()
        return called


def _triton_calls(operation: Any) -> list[Any]:
    found = []

    def visit(inner):
        if inner.name == "stablehlo.custom_call" and inner.attributes["call_target_name"].value in calls.TARGETS:
            found.append(inner)
        return ir.WalkResult.ADVANCE

    operation.walk(visit)
    return found


def _dtype(element_type: Any) -> np.dtype:
    """The dtype of an MLIR type: i1, i32, ui8, bf16, f32."""
    name = str(element_type)
    return TYPES["pred"] if name == "i1" else TYPES[name.replace("ui", "u").replace("i", "s")]


def execute(
    call: Call,
    operands: list[np.ndarray],
    results: list[tuple[tuple[int, ...], np.dtype]],
    same: list[int],
    stats: Stats,
) -> list[np.ndarray]:
    """Execute a call and return what the kernel wrote, at the shapes and dtypes of `results`.

    Operands with one number in `same` are one buffer, but for those that a result takes the place of.
    """
    numbers: dict[Any, int] = {}  # of each buffer, by what it is

    def buffer(*what):
        return numbers.setdefault(what, len(numbers))

    inputs = [buffer("in place", i) if i in call.aliases else buffer("value", n) for i, n in enumerate(same)]
    taken = {result: inputs[operand] for operand, result in call.aliases.items()}
    outputs = [taken[i] if i in taken else buffer("result", i) for i in range(len(results))]
    made = [np.empty(*result) for result in results]
    sizes = {i: array.nbytes for i, array in zip(inputs + outputs, operands + made, strict=True)}
    stats.shapes |= {i: array.shape for i, array in zip(inputs + outputs, operands + made, strict=True)}
    buffers = Buffers([sizes[i] for i in range(len(numbers))])
    for i, array in zip(inputs, operands, strict=True):
        span = buffers.span(i, array.nbytes)
        buffers.bytes[span] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        buffers.state[span] |= READABLE
    places = [buffers.span(i, array.nbytes) for i, array in zip(outputs, made, strict=True)]
    for span in places:
        buffers.state[span] |= WRITABLE

    kernel = listing.parse(call.ptx, call.entry)
    given = _given(call, kernel, [buffers.address(i) for i in inputs + outputs])
    machine = Machine(call, kernel, buffers, given, stats)
    at_once = max(1, _THREADS // kernel.threads)
    with np.errstate(all="ignore"):
        for first in range(0, call.grid, at_once):
            machine.run(first, min(at_once, call.grid - first))

    missing = [int((buffers.state[span] & WRITTEN == 0).sum()) for span in places]
    if any(missing):
        raise Violation(f"{call.name}: bytes of its results that nobody wrote, how many of each: {missing}")
    return [buffers.bytes[span].view(a.dtype).reshape(a.shape) for span, a in zip(places, made, strict=True)]


def _given(call: Call, kernel: listing.Listing, addresses: list[int]) -> dict[str, np.ndarray]:
    """The kernel's parameters by name."""
    if kernel.threads != 32 * call.warps:
        raise Violation(f"{call.name}: compiled for {kernel.threads} threads, launched with {call.warps} warps")
    if (arrays := call.parameters.count(None)) != len(addresses):
        raise Violation(f"{call.name}: the launch has {arrays} pointers for {len(addresses)} operands and results")
    pointers = iter(addresses)
    values = [("u64", next(pointers)) if p is None else p for p in call.parameters] + [("u64", 0)] * _SCRATCH
    sizes = [TYPES[ptx_type].itemsize for ptx_type, _ in values]
    if sizes != [size for _, size in kernel.parameters]:
        raise Violation(f"{call.name}: the kernel has {kernel.parameters} of so many bytes, the launch {sizes}")
    return {
        name: np.array(value, TYPES[ptx_type])
        for (name, _), (ptx_type, value) in zip(kernel.parameters, values, strict=True)
    }
