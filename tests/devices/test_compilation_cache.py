"""JAX's compilation cache tells programs on several devices apart, and knows a program again in another process."""

import gc
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from jln._core import identity as names

SCRIPT = pathlib.Path(__file__).with_name("cached.py")
FLAG = "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"


def in_a_process(folder, flag, seed, *variants, **environment):
    """Run the script with one order of Python's sets. seed: of that order."""
    environment |= os.environ | {FLAG: flag, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, SCRIPT, folder, *variants]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("flag", ["false", "true"])
def test_a_second_process_finds_its_own_programs_and_no_others(flag, tmp_path):
    first = in_a_process(tmp_path, flag, "1", "as usual")
    second = in_a_process(tmp_path, flag, "2", "as usual", "another epsilon", "zero-centered")
    for variant, found in (*first.items(), *second.items()):
        assert len(found) == 4
        for kind, facts in found.items():
            assert facts["error"] < 1e-5, f"{variant}, {kind}: another program's answer"
    hits = {kind: facts["hits"] for kind, facts in second["as usual"].items()}
    assert set(hits.values()) == {1}, hits
    assert all(facts["misses"] == 0 for facts in second["as usual"].values())


def test_the_partitioner_before_shardy(tmp_path):
    """Gradients are right with GSPMD. A mistake in what GSPMD is told ends the process."""
    found = in_a_process(tmp_path, "false", "1", "as usual", JAX_USE_SHARDY_PARTITIONER="0")
    assert max(facts["error"] for facts in found["as usual"].values()) < 1e-5


def lower(devices, scale=1.0, **settings):
    """Lower a norm, multiplied by a scale, on a mesh of these devices."""
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return jax.jit(lambda x: scale * jln.layer_norm(x, None, None, **settings)).lower(x)


def named(lowered):
    """Return the names of what a program computes on several devices."""
    text = lowered.as_text()
    assert "CustomSPMDPartitioning" in text
    return [part.partition('"')[0] for part in text.split('jln = "')[1:]]


def test_a_name_is_that_of_what_is_computed():
    devices = jax.devices()
    usual = named(lower(devices[:2]))
    assert len(usual) == 1 and usual == named(lower(devices[:2], scale=2.0))
    assert usual[0] in lower(devices[:2]).as_text().partition("backend_config = ")[2].splitlines()[0]
    with jax.default_matmul_precision("float32"):
        of_precision = lower(devices[:2])
    others = [
        of_precision,
        lower(devices[:2], epsilon=1.0),
        lower(devices[:2], implementation="xla"),
        lower(devices[:4]),
        lower(devices[1::-1]),
    ]
    found = [usual, *map(named, others)]
    assert len({name for (name,) in found}) == len(found)


def test_programs_that_share_a_name_are_each_compiled_as_their_own():
    """A program is compiled after another one that computes the same is gone, and on its own devices."""
    first, second = jax.devices()[:2], jax.devices()[2:4]
    early = lower(first)
    late, elsewhere = lower(first, scale=2.0), lower(second)
    del early
    gc.collect()
    x = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    wanted = np.asarray(jln.layer_norm(x, None, None))
    for lowered, scale, devices in ((late, 2, first), (elsewhere, 1, second)):
        compiled = lowered.compile()
        (sharding,) = jax.tree.leaves(compiled.input_shardings)
        got = compiled(jax.device_put(x, sharding))
        np.testing.assert_allclose(np.asarray(got), scale * wanted, rtol=1e-6)
        assert got.sharding.device_set == set(devices)


def test_what_cannot_be_told_in_full_never_has_the_same_name():
    assert names.identity(1.0, ("a", None)) == names.identity(1.0, ("a", None))
    assert names.identity(1.0) != names.identity(1)
    assert names.identity(object) == names.identity(object)
    for unknown in (object(), lambda: None, np.zeros(2)):
        assert names.identity(unknown) != names.identity(unknown)
