"""Print what jln's programs move and hold on a TPU that need not be there, beside plain jnp's, with no times.

    pip install --no-deps --target for_tpus "libtpu==0.0.42.1"       # as "jax[tpu]==0.10.2" asks for it
    PYTHONPATH=for_tpus python benchmarks/tpu.py                     # small programs
    PYTHONPATH=for_tpus python benchmarks/tpu.py --model Llama       # a step of the zoo, as it is and fused: minutes

XLA compiles forward + backward for one chip, and counts bytes and temporary memory. It exits with 1 if a program of
jln's needs more than plain jnp's of either: a norm costs little there, for XLA makes it where products read it.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import jln
from rows import known

# Or libtpu asks a cloud's servers what it runs on, and lets one process run at a time.
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}  # the least of each
M, H, N = 256, 4096, 256  # long rows, of which XLA fuses less; few of them, for which it compiles in seconds
MORE = 1.001  # small buffers of XLA's own: in Llama's step temporary memory differs by 16 KB of 7.8 GB


class Plain:
    """Norms as they are written in plain jnp, with the dtypes of Flax's."""

    @staticmethod
    def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
        return (wide * rstd * scale).astype(x.dtype)

    @staticmethod
    def layer_norm(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        rstd = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-6)
        return (centred * rstd * scale + offset).astype(x.dtype)

    @staticmethod
    def add_rms_norm(x: jax.Array, residual: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = residual + x
        return Plain.rms_norm(total, scale), total

    @staticmethod
    def rms_norm_linear(x: jax.Array, scale: jax.Array, kernel: jax.Array) -> jax.Array:
        return Plain.rms_norm(x, scale) @ kernel


def mlp(norms: Any, x: jax.Array, scale: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A block of x [M, H] with up [H, N] and down [N, H]: norm, Linear, gelu, Linear, sum."""
    return x + jax.nn.gelu(norms.rms_norm(x, scale) @ up) @ down


def centring(norms: Any, x: jax.Array, scale: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The same block with LayerNorms, one of them behind it."""
    total = x + jax.nn.gelu(norms.layer_norm(x, scale, scale) @ up) @ down
    return norms.layer_norm(total, scale, scale)


def sums(norms: Any, x: jax.Array, scale: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The same block with a second norm behind, each sum made with the norm that reads it."""
    y, total = norms.add_rms_norm(jax.nn.gelu(norms.rms_norm(x, scale) @ up) @ down, x, scale)
    return norms.add_rms_norm(jax.nn.gelu(y @ up) @ down, total, scale)[0]


def checkpointed(norms: Any, *operands: jax.Array) -> jax.Array:
    """The block under a checkpoint that holds its products alone."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(functools.partial(mlp, norms), policy=policy)(*operands)


# By name the function of norms and operands, and the operands' names.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "rms_norm": (lambda norms, *operands: norms.rms_norm(*operands), ("x", "scale")),
    "layer_norm": (lambda norms, *operands: norms.layer_norm(*operands), ("x", "scale", "scale")),
    "add_rms_norm": (lambda norms, *operands: norms.add_rms_norm(*operands), ("x", "x", "scale")),
    "rms_norm_linear": (lambda norms, *operands: norms.rms_norm_linear(*operands), ("x", "scale", "up")),
    "a block": (mlp, ("x", "scale", "up", "down")),
    "a block, LayerNorms": (centring, ("x", "scale", "up", "down")),
    "a block with sums": (sums, ("x", "scale", "up", "down")),
    "a block, checkpointed": (checkpointed, ("x", "scale", "up", "down")),
}


def with_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function of `count` operands that returns a loss of the function's results, and its gradients."""

    def loss(*operands: Any) -> jax.Array:
        results = jax.tree.leaves(function(*operands))
        return functools.reduce(jnp.add, (jnp.mean(jnp.square(y.astype(jnp.float32))) for y in results))

    return jax.value_and_grad(loss, range(count))


def facts(function: Callable[..., Any], given: Any, chip: str) -> dict[str, float]:
    """The bytes that a function moves and the temporary memory that it needs, compiled for one chip."""
    place = SingleDeviceSharding(_topology(chip).devices[0])
    given = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), given)
    compiled = jax.jit(function).lower(*given).compile()
    counted, memory = compiled.cost_analysis(), compiled.memory_analysis()
    assert counted is not None and memory is not None
    return {"moved": counted["bytes accessed"], "temporary": memory.temp_size_in_bytes}


@functools.cache
def _topology(chip: str) -> Any:
    return topologies.get_topology_desc(TOPOLOGIES[chip], platform="tpu")


def small(chip: str, words: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """The facts of small programs, of plain jnp's and of jln's."""
    found = {}
    shapes = {"x": (M, H), "scale": (H,), "up": (H, N), "down": (N, H)}
    for name, (function, names) in PROGRAMS.items():
        if not words or any(word in name for word in words):
            dtypes = ["float32" if n == "scale" else "bfloat16" for n in names]
            operands = tuple(jax.ShapeDtypeStruct(shapes[n], d) for n, d in zip(names, dtypes, strict=True))
            found[name] = {}
            for by, norms in (("plain jnp", Plain), ("jln", jln)):
                step = with_gradients(functools.partial(function, norms), len(operands))
                found[name][by] = facts(step, operands, chip)
    return found


def model(chip: str, name: str) -> dict[str, dict[str, dict[str, float]]]:
    """The facts of a step of a zoo's model, as it is and fused."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))
    from steps import FUSED, step
    from zoo.models import MODELS, functional

    (name,) = known("model", [name], MODELS)
    zoos = functional(MODELS[name], attention="xla")
    names = {"as it is": "plain jnp", "fused": "jln", "with Linears": "jln, with Linears"}
    given = zoos.parameters, zoos.x
    return {name: {names[by]: facts(step(fuse(zoos.function)), given, chip) for by, fuse in FUSED.items()}}


def main(
    words: Annotated[
        list[str] | None, typer.Argument(help="Only small programs with one of these in the name.")
    ] = None,
    chip: Annotated[list[str] | None, typer.Option(help=f"{', '.join(TOPOLOGIES)}. [default: all]")] = None,
    zoo: Annotated[str | None, typer.Option("--model", help="A step of this model of the zoo instead.")] = None,
) -> None:
    """Print bytes and temporary memory of each program for each chip, and exit with 1 where jln needs more."""
    chips, worse = known("chip", chip or TOPOLOGIES, TOPOLOGIES), False
    print("| chip | program | | moved, MB | temporary, MB |\n|---|---|---|---|---|")
    for one in chips:
        for name, programs in (model(one, zoo) if zoo else small(one, words or [])).items():
            plain = programs["plain jnp"]
            for by, counts in programs.items():
                more = any(counts[n] > MORE * plain[n] + 4096 for n in plain)
                worse |= more and by == "jln"
                numbers = " | ".join(f"{counts[n] / 1e6:.2f}" for n in ("moved", "temporary"))
                print(f"| {one} | {name} | {by} | {numbers} |{' more' * more}", flush=True)
    raise typer.Exit(int(worse))


if __name__ == "__main__":
    typer.run(main)
