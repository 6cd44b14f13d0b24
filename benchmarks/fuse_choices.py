"""Print the bytes by which `jln.fuse` chooses which norms to leave to XLA, on an H200.

    python benchmarks/fuse_choices.py          # needs jax[cuda13], no GPU; five minutes
    python benchmarks/fuse_choices.py Llama    # only rows whose names have one of these words

The first table: a norm of x [8192, 4096] in bfloat16, which a product makes, alone or behind a sum, by what reads it;
what is moved outside of products, in plain jnp / by jln's operator. The second: four scanned blocks, x [8, 2048, 2048]
in bfloat16, parameters in float32; what all kernels move, and temporary memory, untouched / `jln.fuse` / with
`linears=True`. "everything" is without a checkpoint. All are forward and backward, compiled for an H200.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JLN_CHIP", "h200")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import checkpointed_blocks
import jln
import program
from checkpointed_blocks import HEAD
from checkpointed_blocks import plain_norm as rms_norm

LAYERS, BATCH, TOKENS, WIDTH, HIDDEN = 4, 8, 2048, 2048, 8192
POLICIES = {"everything": None} | checkpointed_blocks.POLICIES
SHAPE = (8192, 4096)


def layer_norm(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.var(wide, -1, keepdims=True) + 1e-6)
    return (centred * rstd * scale + offset).astype(x.dtype)


READERS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "a square": lambda y, kernel: y,
    "gelu": lambda y, kernel: jax.nn.gelu(y) @ kernel,
    "a product": lambda y, kernel: y @ kernel,
}


def by_reader(kind: str, reader: str, *, adds: bool) -> list[str]:
    """A row of the first table."""

    def loss(by_operator: bool, x: jax.Array, residual: jax.Array, parameters: Any, kernel: jax.Array) -> jax.Array:
        x = x @ kernel
        if by_operator:
            operator = getattr(jln, f"add_{kind}" if adds else kind)
            y, total = operator(x, residual, *parameters) if adds else (operator(x, *parameters), x)
        else:
            total = x + residual if adds else x
            y = (layer_norm if kind == "layer_norm" else rms_norm)(total, *parameters)
        read = READERS[reader](y, kernel)
        sums = [jnp.sum(jnp.square(read.astype(jnp.float32)))] + [jnp.sum(total.astype(jnp.float32))] * adds
        return sum(sums, jnp.zeros(()))

    rows, kernel = (jax.ShapeDtypeStruct(s, "bfloat16") for s in (SHAPE, (SHAPE[1], SHAPE[1])))
    parameters = (jax.ShapeDtypeStruct(SHAPE[1:], "float32"),) * (2 if kind == "layer_norm" else 1)
    programs = [
        program.compile_for(
            jax.value_and_grad(functools.partial(loss, by_operator), (0, 1, 2, 3)), rows, rows, parameters, kernel
        )
        for by_operator in (False, True)
    ]
    moved = " / ".join(f"{(p.bytes_total - p.product_bytes) / 1e6:.0f}" for p in programs)
    return [f"{kind}{' of a sum' if adds else ''}", reader, moved]


def attention(y: jax.Array, p: Any) -> jax.Array:
    q, k, v = ((y @ p[name].astype(y.dtype)).reshape(BATCH, TOKENS, -1, HEAD) for name in ("q", "k", "v"))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return attended.reshape(BATCH, TOKENS, -1) @ p["out"].astype(y.dtype)


def llama(x: jax.Array, p: Any) -> jax.Array:
    x = x + attention(rms_norm(x, p["scale_1"]), p)
    y = rms_norm(x, p["scale_2"])
    gate, up, down = (p[name].astype(x.dtype) for name in ("gate", "up", "down"))
    return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down


def gpt(x: jax.Array, p: Any) -> jax.Array:
    x = x + attention(layer_norm(x, p["scale_1"], p["offset_1"]), p) + p["out_bias"].astype(x.dtype)
    y = layer_norm(x, p["scale_2"], p["offset_2"])
    active = jax.nn.gelu(y @ p["up"].astype(x.dtype) + p["up_bias"].astype(x.dtype))
    return x + active @ p["down"].astype(x.dtype) + p["down_bias"].astype(x.dtype)


_SHAPES = {
    **dict.fromkeys(("scale_1", "scale_2", "offset_1", "offset_2", "out_bias", "down_bias"), (WIDTH,)),
    **{"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH // 2), "v": (WIDTH, WIDTH // 2), "out": (WIDTH, WIDTH)},
    **{"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "up_bias": (HIDDEN,), "down": (HIDDEN, WIDTH)},
}
BLOCKS: dict[str, tuple[Callable[..., jax.Array], tuple[str, ...]]] = {
    "Llama": (llama, ("scale_1", "scale_2", "q", "k", "v", "out", "gate", "up", "down")),
    "GPT": (gpt, tuple(name for name in _SHAPES if name != "gate")),
}


def row(name: str, policy: str) -> list[str]:
    block, parameters = BLOCKS[name]
    if POLICIES[policy] is not None:
        block = jax.checkpoint(block, policy=POLICIES[policy])

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, p: (block(x, p), None), x, parameters)[0].astype(jnp.float32) ** 2)

    given = {n: jax.ShapeDtypeStruct((LAYERS, *_SHAPES[n]), "float32") for n in parameters}
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), "bfloat16")
    programs = [
        program.compile_for(jax.value_and_grad(function, (0, 1)), given, x)
        for function in (loss, jln.fuse(loss), jln.fuse(loss, linears=True))
    ]
    sizes = ([p.bytes_total for p in programs], [p.temp_bytes for p in programs])
    return [name, policy, *(" / ".join(f"{a / 1e9:.2f}" for a in column) for column in sizes)]


def main() -> None:
    words = sys.argv[1:]
    kinds, names = (
        [name for name in known if not words or any(word in name for word in words)]
        for known in (("layer_norm", "rms_norm"), BLOCKS)
    )
    if not kinds and not names:
        sys.exit(f"no name has any of these words; known are layer_norm, rms_norm, {', '.join(BLOCKS)}")
    if kinds:
        print("| norm | read by | moved outside of products, MB |\n|---|---|---|")
    for kind, reader, adds in itertools.product(kinds, READERS, (False, True)):
        print("| " + " | ".join(by_reader(kind, reader, adds=adds)) + " |", flush=True)
    if not names:
        return
    print("\n| block | policy | moved, GB | temporary, GB |\n|---|---|---|---|")
    for name in names:
        for policy in POLICIES:
            print("| " + " | ".join(row(name, policy)) + " |", flush=True)


if __name__ == "__main__":
    main()
