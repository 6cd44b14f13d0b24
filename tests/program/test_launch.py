"""Rung 4: the call that XLA is given for a kernel, and what the compilation of that kernel depends on."""

import collections
import concurrent.futures
import dataclasses
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir

import absent_gpu  # noqa: F401
import jln
import program
from jln._triton import cache, lowering, target, tile
from jln._triton.chip import CHIPS, Chip
from jln._triton.launch import launch
from jln._triton.tile import Tile

# isort: split
import triton
import triton.language as tl

from jln._junction.kernels import records
from jln._junction.kernels.forward import forward_kernel

H200 = CHIPS["h200"]
ON_H200 = target.Gpu(H200)
TILE = Tile(rows=1, columns=128, warps=4)
X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


@pytest.fixture(scope="module", autouse=True)
def toolchain():
    program.mesh("h200", (1,), ("x",))


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(lowering, "_binaries", {})


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _thrice(x):
    return x + x + x


@triton.jit
def add_kernel(
    x_ptr, rows, y_ptr, out_ptr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = index < rows * BLOCK_H
    tl.store(out_ptr + index, _twice(tl.load(x_ptr + index, valid)) + tl.load(y_ptr + index, valid), valid)


@triton.jit
def other_function_kernel(
    x_ptr, rows, y_ptr, out_ptr, BLOCK_ROWS: tl.constexpr, BLOCK_H: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = index < rows * BLOCK_H
    tl.store(out_ptr + index, _thrice(tl.load(x_ptr + index, valid)) + tl.load(y_ptr + index, valid), valid)


def add(x, y, kernel=add_kernel, tile=TILE, on=ON_H200, in_place=None):
    results = {"out": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    options = {"programs": x.shape[0], "tile": tile, "compute": jnp.dtype("float32"), "in_place": in_place}
    return launch(on, kernel, {"x": x, "rows": x.shape[0], "y": y}, results, **options)["out"]


def custom_calls(function, *shapes):
    """Return the attributes of each custom call in the program that XLA is given, as texts, the kernel's as bytes."""
    module = (
        jax.jit(lambda *arrays: function(*arrays))
        .trace(*shapes)
        .lower(lowering_platforms=("cuda",))
        .compiler_ir("stablehlo")
    )
    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call":
            found.append({name: str(op.attributes[name]) for name in op.attributes})
            typed = "mhlo.backend_config" in op.attributes
            config = op.attributes["mhlo.backend_config"]["opaque"] if typed else op.attributes["backend_config"]
            found[-1]["opaque"] = config.value_bytes
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def recorded(*, chip=H200, shape=X, scalars=None, **options):
    """Return the recorded launch of `add`, with some of it replaced."""
    recorder = target.Recorder(chip)
    jax.eval_shape(lambda x, y: add(x, y, on=recorder, **options), shape, shape)
    (made,) = recorder.launches
    return made if scalars is None else dataclasses.replace(made, scalars=scalars)


def key(launched):
    backend = lowering._backend(launched.chip.architecture)
    return lowering._key(
        lowering.source(launched), backend, backend.parse_options(launched.tile.options(launched.chip))
    )


def test_call_is_typed_with_the_kernel_as_its_attribute():
    (call,) = custom_calls(add, X, X)
    assert call["call_target_name"] == '"triton_kernel_call_ffi"'
    protobuf = zlib.decompress(call["opaque"])
    for part in (b"jln_add_kernel", b".visible .entry add_kernel(", b".target sm_90a"):
        assert part in protobuf, part
    assert b"tt.func" not in protobuf  # Triton's own code, which the plugin would carry along at each launch
    row_major = "dense<[1, 0]> : tensor<2xindex>"
    assert (call["operand_layouts"], call["result_layouts"]) == (f"[{row_major}, {row_major}]", f"[{row_major}]")
    assert call.get("output_operand_aliases", "[]") == "[]"


def test_call_is_the_old_one_where_the_plugin_has_no_other(monkeypatch):
    (typed,) = custom_calls(add, X, X)
    monkeypatch.setattr(lowering, "has_typed_call", lambda platform: False)
    (call,) = custom_calls(add, X, X)
    assert (call["call_target_name"], call["api_version"]) == ('"triton_kernel_call"', "2 : i32")
    for name in ("opaque", "operand_layouts", "result_layouts"):
        assert call[name] == typed[name]


@pytest.mark.parametrize("typed", [True, False])
def test_result_in_place_of_an_operand_is_an_alias_of_arrays(typed, monkeypatch):
    """The alias names y as array 1, though it is the launch's operand 2: XLA does not see the integer in between."""
    monkeypatch.setattr(lowering, "has_typed_call", lambda platform: typed)
    (call,) = custom_calls(lambda x, y: add(x, y, in_place={"y": "out"}), X, X)
    (alias,) = re.findall(r"output_tuple_indices = \[(.*?)\], operand_index = (\d+)", call["output_operand_aliases"])
    assert alias == ("", "1")


def command_buffers(tmp_path):
    """Return (kinds of our calls, command buffers, our calls in them, our calls) in a block's compiled step."""

    def step(x, scale, kernel):
        def loss(x, scale, kernel):
            for _ in range(2):
                x = x + jax.nn.gelu(jln.rms_norm(x, scale) @ kernel)
            return jnp.sum(x)

        return jax.grad(loss, argnums=(0, 1, 2))(x, scale, kernel)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 128), (128,), (128, 128))]
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    report = program.compile_for(step, *shapes, compiler_options=options)
    # Where there is no buffer, the passes that make them change nothing, and XLA writes the sequence once.
    (dump, *_) = (*tmp_path.glob("*thunk_sequence_after_thunk_passes.txt"), *tmp_path.glob("*thunk_sequence.txt"))
    lines = dump.read_text().splitlines()  # calls in a buffer are indented
    ours = [line for line in lines if re.search(r"\d: kCustomCall", line)]
    assert len(ours) == sum(k.is_triton for k in report.kernels) > 0
    versions = set(re.findall(r"api_version=API_VERSION_(\w+)", report.hlo))
    buffers = sum("kCommandBuffer" in line for line in lines)
    inside = sum(line.startswith(" ") for line in lines)
    print(f"{versions}: {len(lines) - buffers} kernels, {inside} of them in {buffers} graphs")
    return versions, buffers, sum(line[0] == " " for line in ours), len(ours)


def test_xla_puts_every_kernel_into_one_cuda_graph(tmp_path):
    if not lowering.has_typed_call("cuda"):
        pytest.skip("this plugin has only the call that no graph can hold")
    versions, buffers, captured, ours = command_buffers(tmp_path)
    assert versions == {"TYPED_FFI"} and buffers == 1 and captured == ours


def test_xla_puts_the_old_call_into_none(tmp_path, monkeypatch):
    monkeypatch.setattr(lowering, "has_typed_call", lambda platform: False)
    versions, _, captured, _ = command_buffers(tmp_path)
    assert versions == {"STATUS_RETURNING"} and captured == 0


def test_porting_to_a_new_jax_triton():
    """The interfaces of jax-triton and jaxlib that `lowering` uses are those that it was written for.

    Where this fails, mend `_compile` or `_protobuf`: see how jax-triton's own `triton_kernel_call_lowering` does the
    same by now, and widen pyproject.toml's bounds afterwards.
    """
    from jax_triton import triton_lib
    from jaxlib import gpu_triton

    compile_ = inspect.signature(triton_lib.compile_ttir_to_ptx_inplace)
    assert list(compile_.parameters) == ["ttir", "cuda_backend", "cuda_options", "compute_capability"]
    fields = {f.name for f in dataclasses.fields(triton_lib.CompilationResult)}
    assert {"binary", "name", "shared_mem_bytes"} <= fields
    array, scalar = gpu_triton.create_array_parameter(0, 16), gpu_triton.create_scalar_parameter(3, "i32")
    kernel = gpu_triton.TritonKernel("name", 4, 1, 0, "ptx", "", 90)
    assert b"ptx" in gpu_triton.TritonKernelCall(kernel, 2, 1, 1, [array, scalar]).to_proto("call", b"")


def test_one_thread_at_a_time_is_inside_of_triton(monkeypatch):
    """One thread at a time is in Triton, whose use of Python 3.11's `ast.parse` can fail where two threads are."""
    inside, most = [], []

    def alone(function):
        def call(*args):
            inside.append(None)
            most.append(len(inside))
            time.sleep(0.02)
            result = function(*args)
            inside.pop()
            return result

        return call

    for name in ("_key", "_compile"):
        monkeypatch.setattr(lowering, name, alone(getattr(lowering, name)))
    kernels = [jax.ShapeDtypeStruct((rows, 128), dtype) for rows in (1, 2) for dtype in ("float32", "bfloat16")]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [len(calls) for calls in pool.map(lambda shape: custom_calls(add, shape, shape), kernels)] == [1] * 4
    assert len(most) == 8 and max(most) == 1


def test_key_has_all_that_a_binary_depends_on(monkeypatch):
    keys = collections.Counter(
        key(recorded(**options))
        for options in (
            {},
            {"kernel": other_function_kernel},  # a function that the kernel calls
            {"shape": jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)},  # a dtype
            {"shape": jax.ShapeDtypeStruct((1, 128), jnp.float32)},  # an integer that is 1
            {"scalars": {"rows": 2**31}},  # an integer that needs 64 bits
            {"tile": dataclasses.replace(TILE, columns=64)},  # a constant
            {"tile": dataclasses.replace(TILE, warps=8)},
            {"tile": dataclasses.replace(TILE, stages=2)},
            {"chip": CHIPS["a100"]},
        )
    )
    base = key(recorded())
    fusion = not tile.FP_FUSION
    for owner, name, other in ((tile, "FP_FUSION", fusion), (Chip, "ptx_version", 87), (lowering, "ALIGNMENT", 8)):
        monkeypatch.setattr(owner, name, other)
        keys[key(recorded())] += 1
        monkeypatch.undo()
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")  # one of Triton's switches
    keys[key(recorded())] += 1
    monkeypatch.undo()
    for i, version in enumerate(lowering._compilers("cuda")):
        others = [*lowering._compilers("cuda")]
        others[i] = version + "1"
        monkeypatch.setattr(lowering, "_compilers", lambda backend, others=others: tuple(others))
        keys[key(recorded())] += 1
        monkeypatch.undo()
    monkeypatch.setattr(type(lowering._backend(90)), "hash", lambda self: "another ptxas")
    keys[key(recorded())] += 1
    monkeypatch.undo()
    assert set(keys.values()) == {1} and base in keys and len(keys) == 17


@pytest.mark.parametrize("known", ["NAMES", "SHAPES", "FIELDS"])
def test_key_has_the_table(known, monkeypatch):
    """A table with other lines makes another kernel of the same text, as Triton hashes the constants that it reads."""

    def hashed():
        for function in (records.place, forward_kernel):
            monkeypatch.setattr(function, "hash", None)
        return forward_kernel.cache_key

    before = hashed()
    assert before == hashed()
    value = getattr(records, known).value
    other = tl.constexpr(value - 1 if known == "FIELDS" else value[::-1])
    for module in (records, sys.modules[forward_kernel.fn.__module__]):
        monkeypatch.setattr(module, known, other, raising=False)
    assert before != hashed()


def test_key_has_nothing_else():
    """Another number of rows, which is only an argument, or a result in an operand's place is the same kernel."""
    other = jax.ShapeDtypeStruct((24, 128), jnp.float32)
    assert key(recorded()) == key(recorded(shape=other)) == key(recorded(in_place={"y": "out"}))


LOWER = """
import collections, time
import jax, jax.numpy as jnp
import jln
from jln._triton import lowering

made = collections.Counter()
compile_ = lowering._compile
lowering._compile = lambda *args: made.update(["kernels"]) or compile_(*args)


def step(x, scale, offset, kernel):
    y, norm = jax.vjp(jln.layer_norm, x, scale, offset)
    z, pair = jax.vjp(jln.layer_norm_linear, x, scale, offset, kernel)
    return norm(y), pair(z)


shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 1024), (1024,), (1024,), (1024, 64))]
began = time.process_time()
text = jax.jit(step).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
print(made["kernels"], round(time.process_time() - began, 2), hash(text))
"""


def lower_in_another_process(**environment):
    """Return (number of kernels compiled, seconds of CPU, hash of the program's text) of a process of its own."""
    environment = os.environ | {"JLN_CHIP": "h200", "PYTHONHASHSEED": "0", **environment}
    ran = subprocess.run([sys.executable, "-c", LOWER], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    compiled, seconds, text = ran.stdout.split()
    return int(compiled), float(seconds), text


def test_second_process_compiles_nothing():
    first = lower_in_another_process()
    second = lower_in_another_process()
    print(f"a norm and a fused pair, forward and backward: {first[1]} s of CPU, then {second[1]} s")
    assert (first[0], second[0]) == (len(cache.entries()), 0) and first[0] > 3
    assert first[2] == second[2]  # the programs are the same
    assert lower_in_another_process(**{cache.VARIABLE: ""})[0] == first[0]


def test_what_is_wrong_in_the_cache_is_compiled_again():
    launched = recorded()
    binary = lowering.compile_kernel(launched)
    (entry,) = cache.entries()
    good = entry.read_bytes()
    other = zlib.compress(json.dumps([entry.stem, {"name": "kernel"}]).encode())
    for bad in (b"", good[:-1], good[:20], b"x" + good[1:], zlib.compress(b"not json"), other):
        entry.write_bytes(bad)
        lowering._binaries.clear()
        assert lowering.compile_kernel(launched) == binary
        assert entry.read_bytes() == good


def test_programs_that_are_there_are_loaded(monkeypatch):
    launched = recorded()
    binary = lowering.compile_kernel(launched)
    lowering._binaries.clear()
    monkeypatch.setattr(lowering, "_compile", None)
    assert lowering.compile_kernel(launched) == binary


def test_jax_triton_leaves_tritons_own_cache_alone():
    """TRITON_CACHE_DIR is as before once jax-triton has been imported, whose import empties or deletes it.

    Without that variable `triton.compile` fails in the same process.
    """
    code = (
        "from jln._triton import target; target.missing('cuda'); import os; print(os.environ.get('TRITON_CACHE_DIR'))"
    )
    for value in ("/somewhere", None):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
        environment |= {} if value is None else {"TRITON_CACHE_DIR": value}
        printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
        assert printed.strip() == str(value)


def test_only_one_file_knows_jax_triton():
    folder = pathlib.Path(jln.__file__).parent
    knows = {p.name for p in folder.rglob("*.py") if re.search(r"import jax_triton|from jax_triton", p.read_text())}
    assert knows == {"lowering.py"}
