"""What norms of short rows move where a rotary embedding stands behind them, as in an attention's queries and keys.

    python benchmarks/qk_norm.py      # needs jax[cuda13], no GPU

Forward and backward of `rope(norm(q))` of 8192 tokens and 4096 features in bfloat16, compiled for an H200, by jln's
norm and by plain jnp, which XLA fuses with the rotation. Once are q, the result, and their cotangents, q twice.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jln import program
from jln._catalogue import OPERATORS

BATCH, TOKENS, FEATURES = 4, 2048, 4096
HEADS = (64, 128, 256)
MB = 10**6


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Su et al., "RoFormer" (2021): x [batch, tokens, heads, D]; cos, sin [tokens, 1, D / 2]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def compiled(norm: Any, size: int) -> program.CompiledProgram:
    q = jax.ShapeDtypeStruct((BATCH, TOKENS, FEATURES // size, size), jnp.bfloat16)
    scale = jax.ShapeDtypeStruct((size,), jnp.float32)
    angle = jax.ShapeDtypeStruct((TOKENS, 1, size // 2), jnp.float32)

    def step(q, scale, cos, sin, cotangent):
        rotated, pullback = jax.vjp(lambda q, scale: rope(norm(q, scale), cos, sin), q, scale)
        return rotated, pullback(cotangent)

    return program.compile_for(step, q, scale, angle, angle, q)


def main() -> None:
    once = 5 * 2 * BATCH * TOKENS * FEATURES / MB
    print(f"once {once:.0f} MB\n")
    print("| norm | D | jln: kernels | MB | jnp: kernels | MB |\n|---|---|---|---|---|---|")
    for name in ("rms_norm", "layer_norm"):
        for size in HEADS:
            found = [compiled(norm, size) for norm in (OPERATORS[name].function, OPERATORS[name].reference)]
            cells = " | ".join(f"{f.launches} | {f.bytes_total / MB:.0f}" for f in found)
            print(f"| `{name}` | {size} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
