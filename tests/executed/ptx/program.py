"""A JAX function lowered for CUDA, which runs on the CPU with its Triton calls executed by `launch.execute`."""

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
from ptx import launch
from ptx.operands import TYPES
from ptx.statistics import Stats

_CALLBACK = "xla_ffi_python_cpu_callback"  # what jax.pure_callback is on the CPU


class Program:
    """A function lowered for CUDA at these shapes. `edit` may change each `Call` first, to see that it is noticed.

    Each Triton call becomes a call back to the executor, where it stands: within a `scan`, a `while` or a branch it is
    executed as often as it is reached.
    """

    def __init__(self, f: Callable[..., Any], *shapes: Any, edit: Callable[[calls.Call], None] | None = None):
        lowered = jax.jit(f, keep_unused=True).trace(*shapes).lower(lowering_platforms=("cuda",))
        self._tree = lowered.out_tree
        self._lock = threading.Lock()  # XLA may call from several threads
        self._sites: list[_Site] = []
        self.stats: list[Stats] = []
        original = lowered.compiler_ir("stablehlo")  # JAX keeps it, so what is changed here is a copy
        with original.context, ir.Location.unknown():
            module = ir.Module.parse(str(original))
            # Inlined, a value that reaches a call by two ways is one value.
            PassManager.parse("builtin.module(inline)").run(module.operation)
            for operation in _triton_calls(module.operation):
                site = _Site(operation)
                if edit is not None:
                    edit(site.call)
                _replace(operation, index=len(self._sites))
                self._sites.append(site)
            self._callbacks = [self._callback(i) for i in range(len(self._sites))]  # XLA does not keep them alive
            cpu = xla_bridge.get_backend("cpu")
            self._executable = cpu.compile_and_load(
                module,
                executable_devices=xla_client.DeviceList(tuple(cpu.local_devices()[:1])),
                compile_options=xla_client.CompileOptions(),
                host_callbacks=self._callbacks,
            )

    @property
    def calls(self) -> list[calls.Call]:
        """The Triton calls, in the order of the program's text."""
        return [site.call for site in self._sites]

    def run(self, *arrays: Any, first_wins: bool = False, allow_contended: bool = False) -> Any:
        """Run the function on these arrays. Afterwards `stats` has what each of `calls` did, however often it ran.

        Of several threads that store different values to one place at once PTX leaves open which one's stays. That is a
        Violation; `allow_contended` counts it instead, where the values are as good as equal. The last thread's value
        stays, or with `first_wins` the first one's.
        """
        self.stats = [Stats(site.call.name) for site in self._sites]
        self._options = {"first_wins": first_wins, "allow_contended": allow_contended}
        self._error: Exception | None = None
        cpu = jax.local_devices(backend="cpu")[0]
        given = [jax.device_put(np.asarray(a), cpu) for a in jax.tree.leaves(arrays)]
        try:
            shards = self._executable.execute_sharded(given).disassemble_into_single_device_arrays()
            results = [np.asarray(shard[0]) for shard in shards]
        except jax.errors.JaxRuntimeError:
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error
        return jax.tree.unflatten(self._tree, results)

    def _callback(self, index: int) -> Callable[..., tuple[np.ndarray, ...]]:
        """The function that XLA calls in the place of a Triton call.

        Its error is kept for `run`, as XLA hands on only the text.
        """
        site = self._sites[index]

        def execute(*operands):
            with self._lock:
                try:
                    arrays = [np.array(a) for a in operands]  # XLA's memory is gone when an error is shown
                    options = {"same": site.buffers, "stats": self.stats[index], **self._options}
                    return tuple(launch.execute(site.call, arrays, site.results, **options))
                except Exception as error:
                    self._error = self._error or error
                    raise

        return execute


class _Site:
    """A Triton call, its results' shapes and dtypes, and the buffer of each operand: one value is one buffer."""

    def __init__(self, operation: Any):
        self.call = calls.of_operation(operation)
        self.results = [(tuple(r.type.shape), _dtype(r.type.element_type)) for r in operation.results]
        numbers: dict[Any, int] = {}
        self.buffers = [numbers.setdefault(value, len(numbers)) for value in operation.operands]


def _triton_calls(operation: Any) -> list[Any]:
    found = []

    def visit(inner):
        if calls.is_call(inner):
            found.append(inner)
        return ir.WalkResult.ADVANCE

    operation.walk(visit)
    return found


def _replace(operation: Any, index: int) -> None:
    """Put XLA's call back to Python in the place of a Triton call."""
    attributes = {
        "call_target_name": ir.StringAttr.get(_CALLBACK),
        "has_side_effect": ir.BoolAttr.get(False),
        "backend_config": ir.StringAttr.get(""),
        "mhlo.backend_config": ir.DictAttr.get({"index": ir.IntegerAttr.get(ir.IntegerType.get_unsigned(64), index)}),
    }
    for layouts in ("operand_layouts", "result_layouts"):
        if layouts in operation.attributes:
            attributes[layouts] = operation.attributes[layouts]
    with ir.InsertionPoint(operation):
        new = ir.Operation.create(
            "stablehlo.custom_call",
            results=[r.type for r in operation.results],
            operands=list(operation.operands),
            attributes=attributes,
        )
    for old, result in zip(operation.results, new.results, strict=True):
        old.replace_all_uses_with(result)
    operation.erase()


def _dtype(element_type: Any) -> np.dtype:
    """The dtype of an MLIR type: i1, i32, ui8, bf16, f32."""
    name = str(element_type)
    return TYPES["pred"] if name == "i1" else TYPES[name.replace("ui", "u").replace("i", "s")]
