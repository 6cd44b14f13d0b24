"""Rung 4: a program for several GPUs has the same text in every process, and another where its kernels are others."""

import json
import os
import subprocess
import sys

import pytest

LOWER = """
import hashlib
import jax, jax.numpy as jnp
import jln
from jax.sharding import NamedSharding, PartitionSpec as P
import program

mesh = program.mesh("h200", (2, 2), ("data", "model"))


def step(x, scale, offset, kernel):
    y, norm = jax.vjp(jln.layer_norm, x, scale, offset)
    z, pair = jax.vjp(jln.layer_norm_linear, x, scale, offset, kernel)
    return norm(y), pair(z)


def manual(*operands):
    return jax.shard_map(step, in_specs=(P("data"), P(), P(), P()), out_specs=P("data"), axis_names={"data"},
                         check_vma=False)(*operands)


def text(function):
    shapes = ((512, 1024), P("data")), ((1024,), P()), ((1024,), P()), ((1024, 64), P())
    operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, p)) for s, p in shapes]
    with jax.set_mesh(mesh):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


for function in (step, manual):
    made = text(function)
    assert "CustomSPMDPartitioning" in made
    assert made.count("CustomSPMDPartitioning") == made.count('jln = "')
    print(hashlib.sha256(made.encode()).hexdigest())
"""


def texts(**environment):
    """Return hashes of a process's programs: spread by JAX, and in a `shard_map` that leaves it an axis."""
    found = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"JLN_CHIP": "h200", "PYTHONPATH": found, **environment}
    ran = subprocess.run([sys.executable, "-c", LOWER], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


@pytest.fixture(scope="module")
def usual():
    return texts(PYTHONHASHSEED="1")


def test_another_process_has_the_same_programs(usual):
    assert len(set(usual)) == 2 and texts(PYTHONHASHSEED="2") == usual


@pytest.mark.parametrize("change", ["tiles", "Triton's switches", "chip"])
def test_other_kernels_make_another_program(change, usual, tmp_path):
    entry = {"choice": "forward", "h": [1024], "itemsize": 2, "tiles": [[2, 1024, 8, 1, 1]]}
    (tmp_path / "tuned.json").write_text(json.dumps({"chip": "h200", "entries": [entry]}))
    environment = {
        "tiles": {"JLN_TUNING": str(tmp_path / "tuned.json")},
        "Triton's switches": {"DISABLE_LLVM_OPT": "1"},
        "chip": {"JLN_CHIP": "h100"},
    }[change]
    assert not set(texts(**environment)) & set(usual)
