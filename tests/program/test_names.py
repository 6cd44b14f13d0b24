"""Tests: a program has the same text in every process, and another where its kernels are others."""

import os
import subprocess
import sys

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import program
from absent_gpu import struct
from jln._triton import cache

SHAPES = ((512, 1024), P("data")), ((1024,), P()), ((1024,), P()), ((1024, 64), P())


def step(x, scale, offset, kernel):
    y, norm = jax.vjp(jln.layer_norm, x, scale, offset)
    z, pair = jax.vjp(jln.layer_norm_linear, x, scale, offset, kernel)
    return norm(y), pair(z)


def manual(*operands):
    specs = {"in_specs": tuple(spec for _, spec in SHAPES), "out_specs": P("data")}
    return jax.shard_map(step, axis_names={"data"}, check_vma=False, **specs)(*operands)


def text(function, mesh=None):
    """Return the program for one GPU, in which the kernels are, or for several."""
    jax.clear_caches()
    on = [None if mesh is None else NamedSharding(mesh, spec) for _, spec in SHAPES]
    operands = [struct(*shape, sharding=sharding) for (shape, _), sharding in zip(SHAPES, on, strict=True)]
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def texts():
    """Return the programs for several GPUs: spread by JAX, and in a `shard_map` that leaves it an axis."""
    mesh = program.mesh("h200", (2, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        found = [text(function, mesh) for function in (step, manual)]
    assert all(0 < each.count("CustomSPMDPartitioning") == each.count('jln = "') for each in found)
    return found


PROCESS = """
import collections, hashlib
import test_names
from jln._triton import lowering

made = collections.Counter()
compile_ = lowering._compile
lowering._compile = lambda *args: made.update(["kernels"]) or compile_(*args)
found = [test_names.text(test_names.step), *test_names.texts()]
print(made["kernels"], hashlib.sha256("".join(found).encode()).hexdigest())
"""


def test_a_second_process_has_the_same_programs_and_compiles_no_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    path, found = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)]), []
    for seed in "12":
        environment = os.environ | {"JLN_CHIP": "h200", "PYTHONPATH": path, "PYTHONHASHSEED": seed}
        found.append(subprocess.check_output([sys.executable, "-c", PROCESS], env=environment, text=True).split())
    (compiled, first), again = found
    assert int(compiled) == len(cache.entries()) > 3 and again == ["0", first]


@pytest.fixture(scope="module")
def usual():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JLN_CHIP", "h200")
        first, again = texts(), texts()
        assert first == again and len({*first}) == 2
        return first


@pytest.mark.parametrize("change", ["Triton's switches", "chip"])
def test_other_kernels_make_another_program(change, usual, monkeypatch):
    changes = {"Triton's switches": ("DISABLE_LLVM_OPT", "1"), "chip": ("JLN_CHIP", "h100")}
    monkeypatch.setenv("JLN_CHIP", "h200")
    monkeypatch.setenv(*changes[change])
    assert not {*texts()} & {*usual}


@pytest.mark.parametrize("folder", ["/somewhere", None])
def test_jax_triton_leaves_tritons_own_cache_alone(folder):
    """The import of jax-triton empties or deletes TRITON_CACHE_DIR, and then `triton.compile` fails."""
    name = "TRITON_CACHE_DIR"
    code = f"from jln._triton import target; target.missing('cuda'); import os; print(os.environ.get({name!r}))"
    environment = {k: v for k, v in {**os.environ, name: folder}.items() if v is not None}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
    assert printed.strip() == str(folder)
