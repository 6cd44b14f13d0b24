"""Gradients of calls on four devices, with JAX's compilation cache in a folder: a script, for several processes.

    python tests/devices/cached.py FOLDER VARIANT [VARIANT ...]

It prints, as JSON, of each variant and kind of call how often its compilation was in the cache, and was not, and the
largest error of a gradient, as a part of the gradient's largest element in float64.
"""

from __future__ import annotations

import collections
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Kind(NamedTuple):
    """A loss of x, scale, offset and kernel, the same in plain jnp, where x is split, and what its mesh's axes are."""

    loss: Callable[..., jax.Array]
    plain: Callable[..., jax.Array]
    x: P = P("data")
    axes: AxisType = AxisType.Auto


def kinds(settings: dict[str, Any]) -> dict[str, Kind]:
    norm, linear = (jln.layer_norm, jln.layer_norm_linear)

    def plain_norm(x, scale, offset):
        centered = x - jnp.mean(x, -1, keepdims=True)
        rstd = jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + settings["epsilon"])
        return centered * rstd * (scale + settings["zero_centered_scale"]) + offset

    def of_norm(y):
        return jnp.sum(jnp.sin(y) * y)

    def plain(x, scale, offset, kernel):
        return of_norm(plain_norm(x, scale, offset))

    def called(**more):
        return lambda x, scale, offset, kernel: of_norm(norm(x, scale, offset, **settings, **more))

    def mapped(x, scale, offset, kernel):
        return of_norm(jax.vmap(lambda x: norm(x, scale, offset, **settings))(x))

    def manual(x, scale, offset, kernel):
        def part(x, scale, offset):
            return norm(x, scale, offset, **settings)

        specs = P("data"), P(), P()
        return of_norm(jax.shard_map(part, in_specs=specs, out_specs=P("data"))(x, scale, offset))

    def with_linear(features):
        def loss(x, scale, offset, kernel):
            return of_norm(linear(x, scale, offset, kernel[:, :features], **settings))

        return Kind(loss, lambda x, scale, offset, kernel: of_norm(plain_norm(x, scale, offset) @ kernel[:, :features]))

    return {
        "rows": Kind(called(), plain),
        "H": Kind(called(), plain, P(None, "model")),
        "replicated": Kind(called(), plain, P()),
        'implementation="xla"': Kind(called(implementation="xla"), plain),
        "explicit axes": Kind(called(), plain, axes=AxisType.Explicit),
        "few features": with_linear(16),
        "many features": with_linear(256),
        "fuse": Kind(jln.fuse(plain), plain),
        "vmap": Kind(mapped, plain),
        "shard_map": Kind(manual, plain),
        "plain jnp": Kind(plain, plain),
    }


def main() -> None:
    _, folder, *variants = sys.argv
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    seen = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
    r = np.random.default_rng(0)
    arrays = [r.normal(size=shape) for shape in ((ROWS, H), (H,), (H,), (H, 256))]

    def measured(kind: Kind) -> dict[str, Any]:
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind.axes,) * 2)
        with jax.set_mesh(mesh):
            specs = kind.x, P(), P(), P()
            operands = [
                jax.device_put(a.astype("float32"), NamedSharding(mesh, spec))
                for a, spec in zip(arrays, specs, strict=True)
            ]
            seen.clear()
            got = jax.block_until_ready(jax.jit(jax.grad(kind.loss, (0, 1, 2)))(*operands))
            counts = {"hits": seen["cache_hits"], "misses": seen["cache_misses"]}
        with jax.enable_x64(True):
            wanted = jax.grad(kind.plain, (0, 1, 2))(*arrays)
        errors = [np.abs(np.asarray(g) - w).max() / np.abs(w).max() for g, w in zip(got, wanted, strict=True)]
        return {**counts, "error": float(max(errors))}

    found = {variant: {name: measured(kind) for name, kind in kinds(VARIANTS[variant]).items()} for variant in variants}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
