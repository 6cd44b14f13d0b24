"""The one place that knows jax-triton: a kernel, its operands and its tile become a GPU call or an interpreted one.

The call is ours: a primitive whose lowering writes XLA's custom call. Of others' private names it takes jax-triton's
`compile_ttir_to_ptx_inplace`, which has Triton's backend make PTX, and from jaxlib's `gpu_triton` the protobuf that its
CUDA plugin launches. `tests/test_launch.py` holds their signatures.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib import gpu_triton

from jln._triton import cache, config

INSTALL = 'pip install "jln[cuda13]" (or "jln[cuda12]")'
CALLS = TYPED, UNTYPED = "triton_kernel_call_ffi", "triton_kernel_call"  # of jaxlib's CUDA plugin
TYPE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


@dataclasses.dataclass(frozen=True, eq=False)  # a primitive's parameter: it must hash, and `constants` does not
class Launch:
    """One kernel launch: what `launch` was asked for, with stand-ins for what was absent."""

    kernel: Any
    arguments: tuple[jax.ShapeDtypeStruct | int, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    programs: int
    tile: config.Tile
    chip: config.Chip
    constants: dict[str, Any]


_record: contextvars.ContextVar[list[Launch] | None] = contextvars.ContextVar("jln_record", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches that would be made, and make none: their results are zeros."""
    launches: list[Launch] = []
    token = _record.set(launches)
    try:
        yield launches
    finally:
        _record.reset(token)


def interpreting() -> bool:
    """Whether Triton's interpreter was asked for, by TRITON_INTERPRET=1."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def missing() -> str | None:
    """Why a Triton kernel cannot be lowered for CUDA in this process; None where it can."""
    for package in ("triton", "jax_triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: {INSTALL}"
    if interpreting():
        return "TRITON_INTERPRET=1 is set, which leaves nothing to compile: unset it"
    try:
        _compile_to_ptx()
    except Exception as error:  # 0.3.1 raises AttributeError without a CUDA plugin, others ImportError
        return f"jax_triton cannot be used ({error!r}): {INSTALL}"
    if not hasattr(gpu_triton, "TritonKernelCall"):
        return f"JAX has no CUDA plugin here: {INSTALL}"
    if config.target_chip() is None:
        return (
            "there is no GPU in this process and no chip was named: "
            f"set {config.CHIP_VARIABLE} to one of {', '.join(sorted(config.CHIPS))}"
        )
    return None


def launch(
    kernel: Any,
    operands: Sequence[jax.Array | int | None],
    results: Sequence[jax.ShapeDtypeStruct | None],
    *,
    programs: int,
    tile: config.Tile,
    chip: config.Chip,
    compute: jnp.dtype,
    in_place: dict[int, int] | None = None,
    **constants: Any,
) -> list[jax.Array | None]:
    """Call `kernel(*operands, *results)` on a grid of `programs`, and return the results it wrote.

    An operand or a result may be None where the constants tell the kernel not to touch its pointer. Integers are
    passed by value. `compute` is the dtype of the arithmetic, `constants` are the kernel's other constexprs. `in_place`
    says which operand's memory a result may take, if nobody else needs it: every program must have read what it
    overwrites. (The interpreter always lets it.)
    """
    stand_in = next(a for a in reversed(operands) if isinstance(a, jax.Array))  # one that is not worked on in place
    arguments = [stand_in if a is None else a for a in operands]
    shapes = [jax.ShapeDtypeStruct((0,), jnp.float32) if r is None else r for r in results]
    in_place = in_place or {}
    for operand, result in in_place.items():
        pair: tuple[Any, Any] = operands[operand], results[result]
        before, after = (None if a is None else (a.shape, a.dtype) for a in pair)
        assert before == after, f"result {result}, {after}, cannot take the place of operand {operand}, {before}"
    import triton.language as tl

    constants |= {"BLOCK_ROWS": tile.rows, "BLOCK_H": tile.columns, "COMPUTE": getattr(tl, jnp.dtype(compute).name)}
    if "STAGES" in kernel.arg_names:
        constants["STAGES"] = tile.stages
    types = [a if isinstance(a, int) else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    arrays = [a for a in arguments if not isinstance(a, int)]
    made = Launch(kernel, tuple(types), tuple(shapes), programs, tile, chip, constants)
    if (launches := _record.get()) is not None:
        launches.append(made)
        written = [jnp.zeros(r.shape, r.dtype) for r in shapes]
    elif chip.name == config.INTERPRETER.name:
        written = _interpret(made, arrays, in_place)
    else:
        written = _call.bind(*arrays, launch=made, in_place=tuple(in_place.items()))
    return [None if r is None else w for r, w in zip(results, written, strict=True)]


def _interpret(launch: Launch, arrays: Sequence[jax.Array], in_place: dict[int, int]) -> Sequence[jax.Array]:
    from jln._triton import interpreter

    def run(*arrays):
        given = iter(arrays)
        arguments = [a if isinstance(a, int) else next(given) for a in launch.arguments]
        settings = {"programs": launch.programs, "constants": launch.constants, "in_place": in_place}
        return interpreter.run(launch.kernel, arguments, launch.results, **settings)

    return jax.pure_callback(run, launch.results, *arrays, vmap_method="sequential")


# Of a launch on a GPU, which is compiled when the program is lowered: what is only traced costs nothing.
_call = Primitive("jln_kernel")
_call.multiple_results = True
_call.def_abstract_eval(lambda *_, launch, in_place: [ShapedArray(r.shape, r.dtype) for r in launch.results])


def _lower(ctx: mlir.LoweringRuleContext, *operands: Any, launch: Launch, in_place: tuple[tuple[int, int], ...]) -> Any:
    among_arrays = {i: sum(not isinstance(a, int) for a in launch.arguments[:i]) for i, _ in in_place}
    aliases = {among_arrays[operand]: result for operand, result in in_place}
    opaque = zlib.compress(_protobuf(launch, compiled(launch)))
    if has_typed_call():
        return jax.ffi.ffi_lowering(TYPED, operand_output_aliases=aliases)(ctx, *operands, opaque=opaque)
    rule = jax.ffi.ffi_lowering(UNTYPED, api_version=2, backend_config=opaque, operand_output_aliases=aliases)  # pyright: ignore[reportArgumentType]
    return rule(ctx, *operands)


mlir.register_lowering(_call, _lower, platform="cuda")


def has_typed_call() -> bool:
    """Whether the CUDA plugin has the call that XLA can put into CUDA graphs, as it has from jaxlib 0.10.1 on."""
    return TYPED in getattr(gpu_triton._cuda_triton, "registrations", dict)()


def _protobuf(launch: Launch, binary: Binary) -> bytes:
    parameters = [
        gpu_triton.create_scalar_parameter(a, _type_name(a))
        if isinstance(a, int)
        else gpu_triton.create_array_parameter(0, ALIGNMENT)  # none of its bytes to be zeroed
        for a in (*launch.arguments, *launch.results)
        if a != 1  # a constant of the kernel
    ]
    facts = (launch.tile.warps, 1, binary.shared, binary.ptx, binary.ttir, launch.chip.capability)  # 1 block a cluster
    kernel = gpu_triton.TritonKernel(binary.name, *facts)
    call = gpu_triton.TritonKernelCall(kernel, launch.programs, 1, 1, parameters)
    return call.to_proto(f"jln_{launch.kernel.fn.__name__}", b"")


# What XLA promises of every array's address, in bytes.
ALIGNMENT = 16


def source(launch: Launch) -> Any:
    """Triton's ASTSource: arrays are aligned; of integers only 1 is known to the compiler."""
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    arguments = dict(zip(names, (*launch.arguments, *launch.results), strict=False))
    constants = launch.constants | {name: 1 for name, a in arguments.items() if isinstance(a, int) and a == 1}
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        assert name in constants or name in arguments, f"{name} is neither an argument nor a constant"
        signature[name] = "constexpr" if name in constants else _type_name(arguments[name])
        if signature[name].startswith("*"):
            attributes[(i,)] = [["tt.divisibility", ALIGNMENT]]
    return ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=attributes)


def _type_name(argument: Any) -> str:
    """As Triton has it."""
    if isinstance(argument, int):
        return "i32" if -(2**31) <= argument < 2**31 else "i64"
    return f"*{TYPE_NAMES[argument.dtype.name]}"


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel for one kind of chip. name: of its entry. shared: bytes. ttir: what it was made of, for debuggers."""

    name: str
    shared: int
    ptx: str
    ttir: str


_binaries: dict[str, Binary] = {}
_lock = threading.Lock()


def compiled(launch: Launch) -> Binary:
    """The launch's kernel, from memory, from `cache`'s files, or compiled.

    One thread at a time: in Python 3.11 `ast.parse`, by which Triton reads kernels, fails now and then where several
    are in it (SystemError: AST constructor recursion depth mismatch).
    """
    with _lock:
        wanted, backend = source(launch), _backend(launch.chip.capability)
        options = backend.parse_options(launch.tile.options())
        key = _key(wanted, backend, options)
        if key not in _binaries:
            stored = cache.load(key)
            _binaries[key] = _compile(wanted, backend, options) if stored is None else Binary(**stored)
            if stored is None:
                cache.store(key, dataclasses.asdict(_binaries[key]))
        return _binaries[key]


def _key(source: Any, backend: Any, options: Any) -> str:
    """All that a binary depends on. The source has the kernel's code with the functions it calls, types, constants and
    alignment; the backend has the capability and ptxas' version; the switches are Triton's environment variables.
    """
    from triton._C import libtriton

    switches = sorted(libtriton.get_cache_invalidating_env_vars().items())
    parts = (source.name, source.hash(), backend.hash(), options.hash(), switches, *_compilers())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.cache
def _compilers() -> tuple[str, ...]:
    """Triton's and jax-triton's versions, and of Triton's library what tells two builds of one version apart."""
    import triton
    from triton._C import libtriton

    library = os.stat(str(libtriton.__file__))
    return triton.__version__, importlib.metadata.version("jax-triton"), f"{library.st_size} {library.st_mtime_ns}"


@functools.cache
def _backend(capability: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return make_backend(GPUTarget("cuda", capability, 32))


def _compile(source: Any, backend: Any, options: Any) -> Binary:
    from triton._C.libtriton import ir

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(backend.target, options, functions, backend.get_module_map(), context)
    ttir = str(module)  # before it is overwritten
    made = _compile_to_ptx()(module, backend, options, backend.target.arch)
    return Binary(made.name, made.shared_mem_bytes, made.binary, ttir)


def _compile_to_ptx() -> Any:
    """jax-triton's function. Its import empties or deletes TRITON_CACHE_DIR, which is not its own: with an empty one
    `triton.compile` fails.
    """
    name = "TRITON_CACHE_DIR"
    before = os.environ.get(name)
    try:
        from jax_triton import triton_lib
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    return triton_lib.compile_ttir_to_ptx_inplace
