"""Losses of a small transformer, trained on bytes of these pages, in bfloat16 and with its Linears in eight bits.

python benchmarks/train_in_eight_bits.py --steps 300

All Linears stand behind a norm but those into the residual stream, which stay in bfloat16. All start the same.
"""

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

import jln

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 128, 4, 2, 128, 16
ROOT = pathlib.Path(__file__).resolve().parents[1]
HOW = {"bfloat16": None, "MXFloat8": jln.MXFloat8(), "Float8": jln.Float8()}


def parameters(key):
    shapes = {"qkv": (LAYERS, WIDTH, 3, WIDTH), "out": (LAYERS, WIDTH, WIDTH)}
    shapes |= {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    shapes |= {"embedding": (256, WIDTH), "positions": (LENGTH, WIDTH), "head": (WIDTH, 256)}
    keys = jax.random.split(key, len(shapes))
    made = {n: 0.05 * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}
    return made | {"norms": jnp.ones((LAYERS, 2, WIDTH)), "last_norm": jnp.ones(WIDTH)}


def block(quantize, x, p):
    qkv = jln.rms_norm_linear(x, p["norms"][0], p["qkv"], quantize=quantize)
    q, k, v = (qkv[:, :, i].reshape(BATCH, LENGTH, HEADS, -1) for i in range(3))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    up, x = jln.add_rms_norm_linear(attended, x, p["norms"][1], p["up"], quantize=quantize)
    return x + jax.nn.gelu(up) @ p["down"], None


def loss(quantize, p, text):
    p = jax.tree.map(lambda a: a.astype("bfloat16"), p)
    x = p["embedding"][text[:, :-1]] + p["positions"]
    x, _ = jax.lax.scan(functools.partial(block, quantize), x, {n: p[n] for n in ("qkv", "out", "up", "down", "norms")})
    logits = jln.rms_norm_linear(x, p["last_norm"], p["head"], quantize=quantize).astype("float32")
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], -1))


def train(quantize, text, steps):
    """The losses of all steps of Adam."""

    @jax.jit
    def step(state, i, rows):
        p, m, v = state
        value, gradient = jax.value_and_grad(functools.partial(loss, quantize))(p, rows)
        m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, gradient)
        v = jax.tree.map(lambda a, g: 0.99 * a + 0.01 * g * g, v, gradient)
        rate = 2e-3 * jnp.minimum(1, i / 30) * jnp.sqrt(1 - 0.99**i) / (1 - 0.9**i)
        return (jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), p, m, v), m, v), value

    p = parameters(jax.random.key(0))
    state, losses, random = (p, *[jax.tree.map(jnp.zeros_like, p)] * 2), [], np.random.default_rng(0)
    for i in range(1, steps + 1):
        first = random.integers(0, len(text) - LENGTH - 1, BATCH)
        state, value = step(state, jnp.float32(i), text[first[:, None] + np.arange(LENGTH + 1)])
        losses.append(float(value))
    return losses


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    pages = [*sorted((ROOT / "examples").glob("*.md")), ROOT / "README.md"]
    text = np.frombuffer(b"".join(page.read_bytes() for page in pages), np.uint8).astype(np.int32)
    curves = {}
    for name, quantize in HOW.items():
        start = time.monotonic()
        curves[name] = train(quantize, text, arguments.steps)
        print(f"{name}: {arguments.steps} steps in {time.monotonic() - start:.0f} s")
    every = max(1, arguments.steps // 10)
    print("mean loss up to step " + " ".join(f"{name:>9}" for name in curves))
    for end in range(every, arguments.steps + 1, every):
        print(f"{end:20} " + " ".join(f"{np.mean(c[end - every : end]):9.3f}" for c in curves.values()))


if __name__ == "__main__":
    main()
