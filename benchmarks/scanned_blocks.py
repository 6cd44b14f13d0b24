"""Print what `jln.fuse` makes of scanned blocks in plain jnp, checkpointed or not: bytes and memory on an H200.

    python benchmarks/scanned_blocks.py          # needs jax[cuda13], no GPU; four minutes
    python benchmarks/scanned_blocks.py Llama    # only blocks whose names have one of these words

Four blocks, x [8, 2048, 2048] in bfloat16, parameters in float32, forward and backward, compiled for an H200: what all
kernels move, and the program's temporary memory, untouched / `jln.fuse` / with `linears=True`. "everything" is without
a checkpoint.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JLN_CHIP", "h200")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import jln

LAYERS, BATCH, TOKENS, WIDTH, HEAD, HIDDEN = 4, 8, 2048, 2048, 128, 8192
POLICIES = {
    "everything": None,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.var(wide, -1, keepdims=True) + 1e-6)
    return (centred * rstd * scale + offset).astype(x.dtype)


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
_OF_LLAMA = ("scale_1", "scale_2", "q", "k", "v", "out", "gate", "up", "down")
BLOCKS: dict[str, tuple[Callable[..., jax.Array], tuple[str, ...]]] = {
    "Llama": (llama, _OF_LLAMA),
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
        jln.program.compile_for(jax.value_and_grad(function, (0, 1)), given, x)
        for function in (loss, jln.fuse(loss), jln.fuse(loss, linears=True))
    ]
    sizes = ([p.bytes_total for p in programs], [p.temp_bytes for p in programs])
    return [name, policy, *(" / ".join(f"{a / 1e9:.2f}" for a in column) for column in sizes)]


def main() -> None:
    words = sys.argv[1:]
    names = [name for name in BLOCKS if not words or any(word in name for word in words)]
    if not names:
        sys.exit(f"no block's name has any of these words; known are {', '.join(BLOCKS)}")
    print("| block | policy | moved, GB | temporary, GB |")
    print("|---|---|---|---|")
    for name in names:
        for policy in POLICIES:
            print("| " + " | ".join(row(name, policy)) + " |", flush=True)


if __name__ == "__main__":
    main()
