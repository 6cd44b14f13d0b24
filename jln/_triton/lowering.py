"""Lowering of a launch for a GPU: the one place that knows jax-triton.

The call is ours: a primitive whose lowering writes XLA's custom call. Of others' private names it takes jax-triton's
`compile_ttir_to_ptx_inplace`, which has Triton's backend make PTX, and from jaxlib's `gpu_triton` the protobuf that its
plugin launches. `tests/program/test_launch.py` holds their signatures. For AMD's chips Triton compiles alone.
"""

from __future__ import annotations

import atexit
import base64
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import shutil
import tempfile
import threading
import zlib
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib import gpu_triton

from jln._triton import cache
from jln._triton.launch import TRITON_CALLS, TYPE_NAMES, Launch, places

TYPED, UNTYPED = TRITON_CALLS


# The primitive of a launch on a GPU. A launch is compiled when the program is lowered, so that a program that is only
# traced costs nothing.
kernel_call = Primitive("jln_kernel")
kernel_call.multiple_results = True
kernel_call.def_abstract_eval(lambda *_, launch: [ShapedArray(r.shape, r.dtype) for r in launch.results.values()])


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, launch: Launch) -> Any:
    names, results = list(launch.arrays), list(launch.results)
    aliases = {names.index(operand): results.index(result) for operand, result in launch.in_place.items()}
    opaque = zlib.compress(_protobuf(launch, compile_kernel(launch)))
    if has_typed_call(launch.chip.platform):
        return jax.ffi.ffi_lowering(TYPED, operand_output_aliases=aliases)(ctx, *operands, opaque=opaque)
    rule = jax.ffi.ffi_lowering(UNTYPED, api_version=2, backend_config=opaque, operand_output_aliases=aliases)  # pyright: ignore[reportArgumentType]
    return rule(ctx, *operands)


for _platform in ("cuda", "rocm"):
    mlir.register_lowering(kernel_call, _lower, platform=_platform)


def missing(platform: str) -> str | None:
    """The reason why jax-triton or JAX's plugin for the platform cannot be used; None where both can."""
    if platform == "cuda":
        try:
            _jax_triton()
        except Exception as error:  # without a plugin 0.3.1 raises AttributeError, other versions ImportError
            return f"jax_triton cannot be used ({error!r})"
    return None if _plugin(platform) is not None else f"JAX uses no plugin for {platform} here"


def _plugin(platform: str) -> Any:
    """The part of a plugin that launches Triton's kernels; None where it is missing or cannot be imported."""
    return gpu_triton._hip_triton if platform == "rocm" else gpu_triton._cuda_triton


def has_typed_call(platform: str) -> bool:
    """True where the plugin has the call that XLA can put into graphs, as CUDA's has from jaxlib 0.10.1 on."""
    return TYPED in getattr(_plugin(platform), "registrations", dict)()


def _protobuf(launch: Launch, binary: Binary) -> bytes:
    plugin, chip = _plugin(launch.chip.platform), launch.chip
    parameters = [
        plugin.create_scalar_parameter(a, _type_name(a))
        if isinstance(a, int)
        else plugin.create_array_parameter(0, ALIGNMENT)  # 0: none of its bytes are zeroed
        for a in launch.arguments.values()
        if a != 1  # a constant of the kernel
    ]
    code, capability = (_file(binary), 0) if chip.is_amd else (binary.code, chip.capability)
    # 1 block a cluster. The plugin would carry Triton's own code along ("" here), at each launch, and reads it nowhere.
    facts = (launch.tile.warps_of(chip), 1, binary.shared, code, "", capability)
    kernel = plugin.TritonKernel(binary.name, *facts)
    call = plugin.TritonKernelCall(kernel, launch.programs, 1, 1, parameters)
    return call.to_proto(f"jln_{launch.kernel.fn.__name__}", b"")


def _file(binary: Binary) -> str:
    """The path of a file with an AMD code object.

    The ROCm plugin reads the file where the kernel is launched first, and deletes it. So each process has files of its
    own, in whose programs are their paths, and JAX's compilation cache knows no AMD program of another process.
    """
    code = base64.b64decode(binary.code)
    path = _folder() / f"{hashlib.sha256(code).hexdigest()}.hsaco"
    with _lock:  # the file is whole, whichever thread lowers or launches meanwhile
        if not path.exists():
            path.write_bytes(code)
    return str(path)


@functools.cache
def _folder() -> pathlib.Path:
    """The folder of this process's files, which lives as long as the process."""
    folder = tempfile.mkdtemp(prefix="jln-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


# The alignment in bytes that XLA promises for the address of every array.
ALIGNMENT = 16


def source(launch: Launch) -> Any:
    """Triton's ASTSource: arrays are aligned; of integers only 1 is known to the compiler."""
    from triton.compiler import ASTSource

    arguments, at = launch.arguments, places(launch.kernel)
    constants = launch.constants | {name: 1 for name, a in arguments.items() if isinstance(a, int) and a == 1}
    types = {name: "constexpr" if name in constants else _type_name(arguments[name]) for name in at}
    known = {at[name]: a for name, a in constants.items()}
    aligned = {at[name]: [["tt.divisibility", ALIGNMENT]] for name, of in types.items() if of.startswith("*")}
    return ASTSource(launch.kernel, signature=launch.by_parameter(types), constexprs=known, attrs=aligned)


def _type_name(argument: Any) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(argument, int):
        return "i32" if -(2**31) <= argument < 2**31 else "i64"
    return f"*{TYPE_NAMES[argument.dtype.name]}"


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel compiled for one kind of chip.

    name: that of its entry. shared: bytes. code: PTX, or AMD's code object in base 64.
    """

    name: str
    shared: int
    code: str


_binaries: dict[str, Binary] = {}
_lock = threading.Lock()


def compile_kernel(launch: Launch) -> Binary:
    """The launch's kernel, from memory, from `cache`'s files, or compiled.

    One thread compiles at a time: in Python 3.11 `ast.parse`, by which Triton reads kernels, fails now and then where
    several threads are in it (SystemError: AST constructor recursion depth mismatch).
    """
    with _lock:
        wanted, backend = source(launch), _backend(launch.chip.architecture)
        options = backend.parse_options(launch.tile.options(launch.chip))
        key = _key(wanted, backend, options)
        if key not in _binaries:
            try:
                _binaries[key] = Binary(**cache.load(key))
            except TypeError:  # there is no entry, or one with other fields
                _binaries[key] = _compile(wanted, backend, options)
                cache.store(key, dataclasses.asdict(_binaries[key]))
        return _binaries[key]


# Raise this number where a binary that was stored before is not what would be compiled now, or has other fields.
SCHEMA = 3


def _key(source: Any, backend: Any, options: Any) -> str:
    """A hash of all that a binary depends on.

    The source has the kernel's code with the functions it calls, types, constants and alignment; the backend has the
    capability and ptxas' version; the switches are Triton's environment variables.
    """
    parts = (SCHEMA, source.name, source.hash(), backend.hash(), options.hash(), switches())
    parts += _compilers(backend.target.backend)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def switches() -> list[tuple[str, str]]:
    """Triton's environment variables that change what it compiles, with their values."""
    from triton._C import libtriton

    return sorted(libtriton.get_cache_invalidating_env_vars().items())


@functools.cache
def _compilers(backend: str) -> tuple[str, ...]:
    """The versions of Triton and, for CUDA, of jax-triton, and what tells two builds of one Triton apart."""
    import triton
    from triton._C import libtriton

    library = os.stat(str(libtriton.__file__))
    jax_triton = importlib.metadata.version("jax-triton") if backend == "cuda" else ""
    return triton.__version__, jax_triton, f"{library.st_size} {library.st_mtime_ns}"


@functools.cache
def _backend(architecture: int | str) -> Any:
    from triton.compiler import make_backend

    return make_backend(triton_target(architecture))


def triton_target(architecture: int | str) -> Any:
    """Triton's GPUTarget."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", architecture, 32) if isinstance(architecture, int) else GPUTarget("hip", architecture, 64)


def _compile(source: Any, backend: Any, options: Any) -> Binary:
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, functions, backend.get_module_map(), context)
    if backend.target.backend == "hip":  # Triton compiles alone, as jax-triton 0.3.1 does not tell 3.9 all it asks for
        stages, known = {}, {"target": backend.target, **vars(options)}
        backend.add_stages(stages, options, source.language)
        for stage in stages.values():
            module = stage(module, known)
        return Binary(known["name"], known["shared"], base64.b64encode(module).decode())
    result = _jax_triton().compile_ttir_to_ptx_inplace(module, backend, options, backend.target.arch)
    return Binary(result.name, result.shared_mem_bytes, result.binary)


@functools.cache
def _jax_triton() -> Any:
    """The module of jax-triton that has Triton's backends compile, imported once.

    Its import empties or deletes TRITON_CACHE_DIR, which is not its own: with an empty one `triton.compile` fails.
    """
    name = "TRITON_CACHE_DIR"
    before = os.environ.get(name)
    try:
        from jax_triton import triton_lib
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    return triton_lib
