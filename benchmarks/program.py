"""Compiled programs for a GPU that is not here: their kernels, the kernels' bytes, their memory and their collectives.

    print(program.compile_for(fn, *args, chip="h200"))

XLA compiles the function for the named chip and everything is read from the optimised HLO: facts of the program, not
measurements. A kernel reads its distinct operands (of one that is only sliced, the slices) and writes its results (of
an update in place, the update). Sizes are bytes on one device. Needs the packages of the extra `cuda13` and no GPU.

`CHIPS` has the chips that programs are compiled for, by name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from hlo import Collective, Kernel, launches
from jln._triton import chip as chips
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
        """The description of the GPU as a text proto."""
        own = " ".join(f"{k}: {v}" for k, v in vars(self).items() if k not in ("chip", "description"))
        major, minor = divmod(self.chip.capability, 10)
        return f"""gpu_device_info {{ {own} core_count: {self.chip.cores}
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
class CompiledProgram:
    """A compiled program, as each of its devices runs it; `str()` of it is a table. Sizes are in bytes on one device.

    kernels, collectives: what it launches that computes, and what it communicates, in order.
    hlo: the text of the optimised HLO.
    launches, bytes_read, bytes_written, bytes_total: of all kernels of a run.
    product_bytes: what matrix products and attention read and write.
    """

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
    product_bytes = property(lambda s: sum(k.times * (k.bytes_read + k.bytes_written) for k in s.kernels if k.product))

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
    """A mesh of `prod(shape)` absent GPUs, for the shardings of `compile_for`'s arguments; raises as that does."""
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

    Of a jitted function its donations and static arguments are not taken over. With no GPU there is no autotuning, and
    XLA's own Triton kernels do most products; `{"xla_gpu_enable_triton_gemm": False}` gives them to cuBLAS. A tuned
    program gives it most, too, but after XLA has fused what is around the products: a sum of them stays a kernel.
    Raises ValueError for an unknown chip or where the arguments lie on none of the GPUs, and RuntimeError where JAX's
    CUDA packages are not installed.

    args: arrays or `jax.ShapeDtypeStruct`; if `devices > 1` with shardings over a `program.mesh` of that many.
    """
    gpus = _devices(chip, devices)
    args = jax.tree.map(functools.partial(_place, gpus=gpus), args)
    if all(leaf.sharding is None for leaf in jax.tree.leaves(args)):
        raise ValueError(f"no argument lies on the {devices} GPUs: shard one over program.mesh({chip!r}, ...)")
    with using(Gpu(chips.chip_by_name(chip))):  # a new function each time, since JAX's caches do not know the chip
        compiled = jax.jit(lambda *args: fn(*args)).lower(*args).compile(compiler_options)
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    assert hlo is not None and memory is not None  # as some other backends' are
    kernels = tuple(item for item in launches(hlo) if isinstance(item, Kernel))
    sizes = (memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes)
    return CompiledProgram(chip, kernels, collectives(hlo), *sizes, hlo)


def collectives(hlo: str) -> tuple[Collective, ...]:
    """The collectives, in order, of a program for any platform, from `jitted.lower(...).compile().as_text()`."""
    return tuple(item for item in launches(hlo) if isinstance(item, Collective))


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
        how = 'pip install -e ".[cuda13]" in a clone of jln'
        raise RuntimeError(f"compiling for a GPU needs the CUDA packages of JAX: {how}")
    # XLA runs the first ptxas on PATH, and one older than the plugin rejects its PTX.
    os.environ["PATH"] = os.pathsep.join([f"{folder}/bin" for folder in _folders("nvidia.cu13")] + [os.environ["PATH"]])
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    options = {"topology": f"1x1x{count}", "target_config": CHIPS[chip].target_config()}
    try:
        return tuple(topologies.get_topology_desc(chip, "cuda", **options).devices)
    except NotImplementedError:  # JAX met its plugins before the variable was set, and turned this one away
        importlib.import_module(_PLUGIN).initialize()
        _tell_plugin()
        return tuple(topologies.get_topology_desc(chip, "cuda", **options).devices)


def _tell_plugin() -> None:
    """Tell the plugin what JAX tells plugins when it meets them: who partitions its custom calls, above all."""
    from jax._src import xla_bridge

    for callback in xla_bridge._plugin_callbacks:
        callback(c_api=xla_bridge._backend_factories["cuda"].c_api)


def _folders(package: str) -> list[str]:
    """The folders where a package is installed; none where it is not."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # nor its parent
        return []
    return list(spec.submodule_search_locations or ()) if spec else []
