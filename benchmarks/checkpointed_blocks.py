"""Print the bytes that norms cost four scanned blocks of a Llama under `jax.checkpoint`, by the ways to write a block.

    python benchmarks/checkpointed_blocks.py            # needs jax[cuda13], no GPU; three minutes
    python benchmarks/checkpointed_blocks.py remat      # only forms whose names have one of these words

x is [8, 2048, 2048] in bfloat16, parameters are in float32. A step is forward and backward, compiled for an H200.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JLN_CHIP", "h200")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import jln
import program

POLICIES = {name: getattr(jax.checkpoint_policies, name) for name in (
    "dots_with_no_batch_dims_saveable", "nothing_saveable",
)}  # fmt: skip
HEAD, EPSILON = 128, 1e-5


class Size(NamedTuple):
    """The size of the blocks. keys: the width of keys and of values."""

    layers: int = 4
    batch: int = 8
    tokens: int = 2048
    width: int = 2048
    keys: int = 512
    hidden: int = 5632

    def parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        w, k, h = self.width, self.keys, self.hidden
        shapes: dict[str, tuple[int, ...]] = {"scale_1": (w,), "scale_2": (w,)}
        shapes |= {"q": (w, w), "k": (w, k), "v": (w, k), "out": (w, w), "gate": (w, h), "up": (w, h), "down": (h, w)}
        return {name: jax.ShapeDtypeStruct((self.layers, *shape), "float32") for name, shape in shapes.items()}


def rotated(x: jax.Array) -> jax.Array:
    """Rotate pairs of features of x [B, T, heads, HEAD] by their positions."""
    half, wide = HEAD // 2, x.astype(jnp.float32)
    angle = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = jnp.split(wide, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    q, k, v = (a.reshape(*a.shape[:2], -1, HEAD) for a in (q, k, v))
    heads = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True, implementation="cudnn")
    return heads.reshape(*heads.shape[:2], -1)


def plain_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPSILON) * scale).astype(x.dtype)


def no_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    del scale
    return x


# The two junctions of a block: from x to (products, x), and from the attention's branch and x to (products, x).
Kernels = tuple[jax.Array, ...]


def norms(norm: Callable[..., jax.Array]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def first(x: jax.Array, scale: jax.Array, kernels: Kernels) -> Any:
        y = norm(x, scale)
        return tuple(y @ kernel for kernel in kernels), x

    return first, lambda branch, x, scale, kernels: first(x + branch, scale, kernels)


def _sum(x: jax.Array, residual: jax.Array | None, scale: jax.Array, kernels: Kernels) -> Any:
    y, total = jln.add_rms_norm(x, residual, scale, epsilon=EPSILON)
    return tuple(y @ kernel for kernel in kernels), total


_rms_norm = functools.partial(jln.rms_norm, epsilon=EPSILON)
_linears = functools.partial(jln.add_rms_norm_linear, epsilon=EPSILON)
_again = functools.partial(_linears, remat=True)
FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "no norm": norms(no_norm),
    "plain jnp": norms(plain_norm),
    "`rms_norm`": norms(_rms_norm),
    "`add_rms_norm`": (norms(_rms_norm)[0], _sum),
    "`add_rms_norm_linear`": (
        lambda x, scale, kernels: (jln.rms_norm_linear(x, scale, kernels, epsilon=EPSILON), x),
        _linears,
    ),
    "`add_rms_norm`, x handed on": (lambda x, *more: _sum(x, None, *more), _sum),
    "`add_rms_norm_linear`, x handed on": (lambda x, *more: _linears(x, None, *more), _linears),
    "that with `remat=True`": (lambda x, *more: _again(x, None, *more), _again),
}


def step(form: str, policy: Callable[..., Any] | None) -> Callable[..., Any]:
    """Make the step of a form, "fuse" for plain jnp by `jln.fuse`: a function of the stacked parameters and x."""
    first, second = FORMS["plain jnp" if form == "fuse" else form]

    def block(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        kernels = {name: a.astype(x.dtype) for name, a in p.items() if a.ndim == 2}
        (q, k, v), x = first(x, p["scale_1"], tuple(kernels[name] for name in "qkv"))
        (gate, up), x = second(attended(q, k, v) @ kernels["out"], x, p["scale_2"], (kernels["gate"], kernels["up"]))
        return x + (jax.nn.silu(gate) * up) @ kernels["down"]

    body = block if policy is None else jax.checkpoint(block, policy=policy)

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), x, parameters)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return jax.value_and_grad(jln.fuse(loss) if form == "fuse" else loss, (0, 1))


WHOLE = Size()


def compiled(form: str, policy: str, size: Size = WHOLE) -> program.CompiledProgram:
    """Compile the step of a form under a policy of POLICIES."""
    x = jax.ShapeDtypeStruct((size.batch, size.tokens, size.width), "bfloat16")
    return program.compile_for(step(form, POLICIES[policy]), size.parameters(), x)


def main() -> None:
    words = sys.argv[1:]
    forms = [form for form in (*FORMS, "fuse") if not words or any(word in form for word in words)]
    if not forms:
        sys.exit(f"no form has any of these words; known are {'; '.join(FORMS)}; fuse")
    print(f"| moved, GB (temporary, GB) | {' | '.join(f'`{policy}`' for policy in POLICIES)} |\n|---|---|---|")
    for form in forms:
        found = [compiled(form, policy) for policy in POLICIES]
        cells = [f"{p.bytes_total / 1e9:.2f} ({p.temp_bytes / 1e9:.2f})" for p in found]
        print(f"| {'`jln.fuse` of plain jnp' if form == 'fuse' else form} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
