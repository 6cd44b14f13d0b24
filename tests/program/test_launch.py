"""Tests: the call that XLA is given for a kernel, what the kernel depends on, and that all dtypes lower."""

import collections
import concurrent.futures
import dataclasses
import itertools
import json
import re
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import pytest

import catalogue
import jln
import program
from absent_gpu import custom_calls, struct, triton_kernels, with_gradients
from catalogue import OPERATORS
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


@pytest.fixture
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


def add(x, y, tile=TILE, on=ON_H200, in_place=None):
    results = {"out": jax.ShapeDtypeStruct(x.shape, x.dtype)}
    options = {"programs": x.shape[0], "tile": tile, "compute": jnp.dtype("float32"), "in_place": in_place}
    return launch(on, add_kernel, {"x": x, "rows": x.shape[0], "y": y}, results, **options)["out"]


def recorded(*, chip=H200, shape=X, scalars=None, **options):
    """Return the recorded launch of `add`, with some of it replaced."""
    recorder = target.Recorder(chip)
    jax.eval_shape(lambda x, y: add(x, y, on=recorder, **options), shape, shape)
    (made,) = recorder.launches
    return made if scalars is None else dataclasses.replace(made, scalars=scalars)


def key(launched):
    backend = lowering._backend(launched.chip.architecture)
    options = backend.parse_options(launched.tile.options(launched.chip))
    return lowering._key(lowering.source(launched), backend, options)


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
    """A result in place of an operand is an alias of arrays: y is array 1 in either call, as XLA sees no integers."""

    def in_place(x, y):
        return add(x, y, in_place={"y": "out"})

    (typed,) = custom_calls(in_place, X, X)
    monkeypatch.setattr(lowering, "has_typed_call", lambda platform: False)
    (call,) = custom_calls(in_place, X, X)
    assert (call["call_target_name"], call["api_version"]) == ('"triton_kernel_call"', "2 : i32")
    for name in ("opaque", "operand_layouts", "result_layouts", "output_operand_aliases"):
        assert call[name] == typed[name]
    (alias,) = re.findall(r"output_tuple_indices = \[(.*?)\], operand_index = (\d+)", call["output_operand_aliases"])
    assert alias == ("", "1")


@pytest.mark.parametrize("typed", [True, False])
def test_xla_puts_every_kernel_into_one_cuda_graph(typed, tmp_path, monkeypatch):
    """The old call is put into none."""
    if not typed:
        monkeypatch.setattr(lowering, "has_typed_call", lambda platform: False)

    def loss(x, scale, kernel):
        for _ in range(2):
            x = x + jax.nn.gelu(jln.rms_norm(x, scale) @ kernel)
        return jnp.sum(x)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 128), (128,), (128, 128))]
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    report = program.compile_for(jax.grad(loss, (0, 1, 2)), *shapes, compiler_options=options)
    # Where there is no buffer, the passes that make them change nothing, and XLA writes the sequence once.
    (dump, *_) = (*tmp_path.glob("*thunk_sequence_after_thunk_passes.txt"), *tmp_path.glob("*thunk_sequence.txt"))
    lines = dump.read_text().splitlines()  # calls in a buffer are indented
    ours = [line for line in lines if re.search(r"\d: kCustomCall", line)]
    assert len(ours) == len(triton_kernels(report)) > 0
    assert {line[0] == " " for line in ours} == {typed}
    assert not typed or sum("kCommandBuffer" in line for line in lines) == 1
    versions = set(re.findall(r"api_version=API_VERSION_(\w+)", report.hlo))
    assert versions == {"TYPED_FFI" if typed else "STATUS_RETURNING"}


@pytest.mark.usefixtures("empty_cache")
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
            {"shape": jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)},  # a dtype
            {"shape": jax.ShapeDtypeStruct((1, 128), jnp.float32)},  # an integer that is 1
            {"scalars": {"rows": 2**31}},  # an integer that needs 64 bits
            {"tile": dataclasses.replace(TILE, columns=64)},  # a constant
            {"tile": dataclasses.replace(TILE, warps=8)},
            {"tile": dataclasses.replace(TILE, stages=2)},
            {"chip": CHIPS["a100"]},
        )
    )
    compilers = lowering._compilers("cuda")
    others = [(*compilers[:i], version + "1", *compilers[i + 1 :]) for i, version in enumerate(compilers)]
    for changes in (
        [(add_kernel, "hash", None), (sys.modules[__name__], "_twice", _thrice)],  # a function that the kernel calls
        [(tile, "FP_FUSION", not tile.FP_FUSION)],
        [(Chip, "ptx_version", 87)],
        [(lowering, "ALIGNMENT", 8)],
        [(type(lowering._backend(90)), "hash", lambda self: "another ptxas")],
        *([(lowering, "_compilers", lambda backend, other=other: other)] for other in others),
    ):
        for change in changes:
            monkeypatch.setattr(*change)
        keys[key(recorded())] += 1
        monkeypatch.undo()
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")  # one of Triton's switches
    keys[key(recorded())] += 1
    assert set(keys.values()) == {1} and len(keys) == 17


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


@pytest.mark.usefixtures("empty_cache")
def test_what_is_wrong_in_the_cache_is_compiled_again_and_the_rest_loaded(monkeypatch):
    launched = recorded()
    binary = lowering.compile_kernel(launched)
    (entry,) = cache.entries()
    good = entry.read_bytes()
    entry.write_bytes(zlib.compress(json.dumps([entry.stem, {"name": "kernel"}]).encode()))
    lowering._binaries.clear()
    assert lowering.compile_kernel(launched) == binary and entry.read_bytes() == good
    lowering._binaries.clear()
    monkeypatch.setattr(lowering, "_compile", None)
    assert lowering.compile_kernel(launched) == binary


DTYPES = ("float16", "bfloat16", "float32", "float64")
ROWS, H, N = 64, 128, 512  # in 16 bits the product is composed, and the norm's backward works in place
# Operators, x's dtype and the parameters': as few as have every pair.
CASES = [
    (name, dtype, of_parameters)
    for (i, name), (j, dtype), (k, of_parameters) in itertools.product(*map(enumerate, (OPERATORS, DTYPES, DTYPES)))
    if (i + j + k) % len(DTYPES) == 0
]


def kernels(function, *operands):
    """Return how many kernels a step has."""
    with target.using(ON_H200):
        traced = jax.jit(with_gradients(function)).trace(jax.eval_shape(function, *operands), *operands)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @triton_kernel_call")


@pytest.mark.parametrize(("name", "dtype", "parameter_dtype"), CASES)
def test_parameters_of_every_dtype(name, dtype, parameter_dtype):
    sizes = catalogue.sizes((ROWS, H), -1, (N,))
    with jax.enable_x64(True):
        operands = [
            a.of(sizes, dtype if a.role == "activation" else parameter_dtype, parameter_dtype)
            for a in OPERATORS[name].arguments
        ]
        assert kernels(getattr(jln, name), *operands) >= 2


@pytest.mark.parametrize("rows", [2**31 - 1, 2**31, 2**32])  # on either side of an int32 and a uint32
def test_many_rows(rows):
    with jax.enable_x64(True):
        assert kernels(jln.rms_norm, struct(rows, 16), struct(16)) >= 2
        assert rows > 2**31 or kernels(jln.rms_norm_linear, struct(rows, 16), struct(16), struct(16, 8)) == 4
