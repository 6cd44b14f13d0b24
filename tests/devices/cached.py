"""Gradients of calls on four devices, with JAX's compilation cache in a folder: a script, for several processes.

    python tests/devices/cached.py FOLDER VARIANT [VARIANT ...]

It prints, as JSON, of each variant and kind of call how often its compilation was in the cache, and was not, and the
largest error of a gradient, as a part of the gradient's largest element in float64.
"""

import collections
import json
import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln

ROWS, H = 8, 64
# What two programs may differ in while all their arrays have the same shapes.
VARIANTS = {
    "as usual": {"epsilon": 1e-6, "zero_centered_scale": False},
    "another epsilon": {"epsilon": 1.0, "zero_centered_scale": False},
    "zero-centered": {"epsilon": 1e-6, "zero_centered_scale": True},
}


def kinds(settings):
    """Return of each kind of call a loss of four arrays, the same in plain jnp, and where x is split."""

    def of_norm(module):
        def loss(x, scale, offset, kernel):
            return jnp.sum(jnp.sin(module.layer_norm(x, scale, offset, **settings)) * x)

        return loss

    def of_linear(module):
        def loss(x, scale, offset, kernel):
            return jnp.sum(jnp.sin(module.layer_norm_linear(x, scale, offset, kernel, **settings)))

        return loss

    plain = of_norm(jln.reference)
    return {
        "rows": (of_norm(jln), plain, P("data")),
        "H": (of_norm(jln), plain, P(None, "model")),
        "few features": (of_linear(jln), of_linear(jln.reference), P("data")),
        "fuse": (jln.fuse(plain), plain, P("data")),
    }


def main():
    _, folder, *variants = sys.argv
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


if __name__ == "__main__":
    main()
