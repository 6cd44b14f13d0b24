"""Gradients of calls on four devices, with JAX's compilation cache in a folder: a script for several processes.

    python tests/devices/cached.py FOLDER [--epsilon 1.0] [--zero-centered] [KIND ...]

It prints, of each kind of call, the hits and misses of its compilation and the largest error against float64, as JSON.
"""

from __future__ import annotations

import argparse
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
RNG = np.random.default_rng(0)
X, DY = (RNG.normal(size=(ROWS, H)) for _ in range(2))
SCALE, OFFSET = 1 + RNG.normal(size=H) / 9, RNG.normal(size=H)


def kernel(features):
    return np.random.default_rng(features).normal(size=(H, features)) / 8


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--epsilon", type=float, default=1e-6)
    parser.add_argument("--zero-centered", action="store_true")
    parser.add_argument("kinds", nargs="*")
    return parser.parse_args()


def made(arguments):
    """From each kind's name to its loss, where its operands are split, and the axes' types of its mesh."""
    options = {"epsilon": arguments.epsilon, "zero_centered_scale": arguments.zero_centered}

    def norm(**more):
        return lambda x, scale, offset: jnp.sum(jln.layer_norm(x, scale, offset, **options, **more) * dy(x))

    def dy(x):
        return jnp.asarray(DY, x.dtype)

    def plain(x, scale, offset):
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
        factor = scale + 1 if arguments.zero_centered else scale
        return (x - mean) * jax.lax.rsqrt(variance + arguments.epsilon) * factor + offset

    def plain_loss(x, scale, offset):
        return jnp.sum(plain(x, scale, offset) * dy(x))

    def linear(features):
        def loss(x, scale, offset):
            w = jnp.asarray(kernel(features), x.dtype)
            return jnp.sum(jln.layer_norm_linear(x, scale, offset, w, **options) ** 2)

        def plain_one(x, scale, offset):
            return jnp.sum((plain(x, scale, offset) @ kernel(features)) ** 2)

        return loss, plain_one

    def mapped(x, scale, offset):
        one = jax.vmap(lambda x: jln.layer_norm(x, scale, offset, **options))
        return jnp.sum(one(x) * dy(x))

    def manual(x, scale, offset):
        def part(x, scale, offset):
            return jln.layer_norm(x, scale, offset, **options)

        specs = (P("data"), P(), P())
        y = jax.shard_map(part, in_specs=specs, out_specs=P("data"), axis_names={"data"})(x, scale, offset)
        return jnp.sum(y * dy(x))

    auto, explicit = AxisType.Auto, AxisType.Explicit
    rows, hidden, none = P("data", None), P(None, "model"), P()
    return {
        "rows": (norm(), plain_loss, rows, auto),
        "hidden": (norm(), plain_loss, hidden, auto),
        "replicated": (norm(), plain_loss, none, auto),
        "xla": (norm(implementation="xla"), plain_loss, rows, auto),
        "explicit": (norm(), plain_loss, rows, explicit),
        "few features": (*linear(16), rows, auto),
        "many features": (*linear(256), rows, auto),
        "fuse": (jln.fuse(plain_loss), plain_loss, rows, auto),
        "vmap": (mapped, plain_loss, rows, auto),
        "shard_map": (manual, plain_loss, rows, auto),
        "plain": (plain_loss, plain_loss, rows, auto),
    }


def main():
    arguments = parse()
    jax.config.update("jax_compilation_cache_dir", arguments.folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    seen = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition("/")[2]]))
    found = {}
    for kind, (loss, plain, spec, axis_type) in made(arguments).items():
        if arguments.kinds and kind not in arguments.kinds:
            continue
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        with jax.set_mesh(mesh):
            operands = [jnp.asarray(a, jnp.float32) for a in (X, SCALE, OFFSET)]
            operands[0] = jax.device_put(operands[0], NamedSharding(mesh, spec))
            operands[1:] = [jax.device_put(a, NamedSharding(mesh, P())) for a in operands[1:]]
            seen.clear()
            gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
            gradient.__name__ = kind
            got = jax.block_until_ready(gradient(*operands))
            counted = {"hits": seen["cache_hits"], "misses": seen["cache_misses"]}
        with jax.enable_x64(True):
            wanted = jax.grad(plain, (0, 1, 2))(*(jnp.asarray(a, jnp.float64) for a in (X, SCALE, OFFSET)))
        errors = [float(np.abs(np.asarray(g, float) - w).max() / np.abs(w).max()) for g, w in zip(got, wanted, strict=True)]
        found[kind] = {**counted, "error": max(errors)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
