"""JAX's compilation cache tells programs on several devices apart, and knows a program again in another process."""

import collections
import gc
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from jln._core import identity as names

ROWS, H = 8, 64
# What two programs may differ in while all their arrays have the same shapes.
VARIANTS = {
    "as usual": {"epsilon": 1e-6, "zero_centered_scale": False},
    "another epsilon": {"epsilon": 1.0, "zero_centered_scale": False},
    "zero-centered": {"epsilon": 1e-6, "zero_centered_scale": True},
}
FLAG = "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"


def kinds(settings):
    """Return of each kind of call a loss of four arrays, the same in plain jnp, and where x is split."""

    def of_norm(module):
        return lambda x, *row_and_kernel: jnp.sum(jnp.sin(module.layer_norm(x, *row_and_kernel[:2], **settings)) * x)

    def of_linear(module):
        return lambda *arrays: jnp.sum(jnp.sin(module.layer_norm_linear(*arrays, **settings)))

    plain = of_norm(jln.reference)
    return {
        "rows": (of_norm(jln), plain, P("data")),
        "H": (of_norm(jln), plain, P(None, "model")),
        "few features": (of_linear(jln), of_linear(jln.reference), P("data")),
        "fuse": (jln.fuse(plain), plain, P("data")),
    }


def main(folder, *variants):
    """Print, as JSON, of each variant and kind of call how often its compilation was in the cache, and was not.

    Beside it stands the largest error of a gradient, as a part of the gradient's largest element in float64.
    """
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    seen = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
    r = np.random.default_rng(0)
    arrays = [r.normal(size=shape) for shape in ((ROWS, H), (H,), (H,), (H, 16))]

    def measured(loss, plain, spec):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        places = [NamedSharding(mesh, s) for s in (spec, P(), P(), P())]
        operands = jax.device_put([a.astype("float32") for a in arrays], places)
        seen.clear()
        got = jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*operands))
        counts = {"hits": seen["cache_hits"], "misses": seen["cache_misses"]}
        with jax.enable_x64(True):
            wanted = jax.grad(plain, (0, 1, 2))(*arrays)
        errors = [np.abs(np.asarray(g) - w).max() / np.abs(w).max() for g, w in zip(got, wanted, strict=True)]
        return {**counts, "error": float(max(errors))}

    found = {v: {kind: measured(*of) for kind, of in kinds(VARIANTS[v]).items()} for v in variants}
    json.dump(found, sys.stdout)


def in_a_process(folder, flag, seed, *variants, **environment):
    """Run this file as a script with one order of Python's sets. seed: of that order."""
    environment |= os.environ | {FLAG: flag, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = environment.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    command = [sys.executable, __file__, folder, *variants]
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


if __name__ == "__main__":
    main(*sys.argv[1:])
