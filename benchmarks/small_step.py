"""Time the step of a model so small that launches are what counts, beside plain jnp's.

    python benchmarks/small_step.py [--layers 8] [--tokens 512] [--width 256] [--output FOLDER]

Seconds are the wall clock's, one step's dispatch behind the run of the one before, as in training. On a GPU also with
the call to a kernel that no CUDA graph can hold, which cuts the step's graphs at every norm, and with no graphs at all.
Losses and parameters are compared with plain jnp's first; the exit status is 1 where one differs.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import clocks
import jln
import machine
from jln._triton import lowering
from peers import kernels_asked_for

RATE = 1e-3
TOLERANCE = 2e-2  # of the largest value, after one step in bfloat16


def parameters(layers: int, width: int) -> list[dict[str, jax.Array]]:
    shapes = {"scale": (width,), "offset": (width,), "up": (width, 4 * width), "down": (4 * width, width)}
    made = []
    for key in jax.random.split(jax.random.key(0), layers):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        made.append({n: jax.random.normal(keys[n], s, jnp.bfloat16) * s[0] ** -0.5 for n, s in shapes.items()})
    return made


def step_of(norm: Any) -> Any:
    def loss(parameters, x):
        for p in parameters:
            x = x + jax.nn.gelu(norm(x, p["scale"], p["offset"]) @ p["up"]) @ p["down"]
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(parameters, x):
        value, gradients = jax.value_and_grad(loss)(parameters, x)
        return value, jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)

    return step


def compiled(norm: Any, given: tuple[Any, ...], *, typed: bool = True, graphs: bool = True) -> Any:
    old = contextlib.nullcontext() if typed else mock.patch.object(lowering, "has_typed_call", lambda platform: False)
    with old:
        options: dict[str, str | bool] | None = None if graphs else {"xla_gpu_enable_command_buffer": ""}
        return jax.jit(step_of(norm)).lower(*given).compile(options)


def error(got: Any, expected: Any) -> float:
    """The worst error of all arrays, as a part of the largest value of the array."""

    def one(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))

    return max(map(one, jax.tree.leaves(got), jax.tree.leaves(expected)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("tokens", 512), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=pathlib.Path, help="a folder, for small_step.json")
    asked = parser.parse_args()
    x = jax.random.normal(jax.random.key(1), (asked.tokens, asked.width), jnp.bfloat16)
    given = parameters(asked.layers, asked.width), x
    norm = functools.partial(jln.layer_norm, **kernels_asked_for())
    programs = {"jnp": compiled(jln.reference.layer_norm, given), "jln": compiled(norm, given)}
    if jax.devices()[0].platform == "gpu":
        programs["jln, a call that no graph holds"] = compiled(norm, given, typed=False)
        programs["jnp, no graphs"] = compiled(jln.reference.layer_norm, given, graphs=False)
        programs["jln, no graphs"] = compiled(norm, given, graphs=False)
    expected = programs["jnp"](*given)
    errors = {name: error(program(*given), expected) for name, program in programs.items()}
    seconds = {name: clocks.seconds(lambda p=program: p(*given)) for name, program in programs.items()}
    for name in programs:
        wrong = "" if errors[name] <= TOLERANCE else "  WRONG"
        ratio = seconds[name] / seconds["jnp"]
        print(f"{name:<32} {seconds[name] * 1e6:>10.1f} us  {ratio:>5.2f} of jnp's  off by {errors[name]:.1e}{wrong}")
    if asked.output is not None:
        size = {name: getattr(asked, name) for name in ("layers", "tokens", "width")}
        record = {"environment": machine.environment(), **size, "seconds": seconds, "errors": errors}
        (asked.output / "small_step.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(max(errors.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
