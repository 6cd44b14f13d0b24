"""Losses of a small transformer, trained on bytes of these pages, in bfloat16 and with its Linears in eight bits.

python examples/train_mxfp8.py --steps 300

All Linears stand behind a norm but those into the residual stream, which stay in bfloat16. All start the same.
"""

import argparse
import functools
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

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

    adam = optax.adam(optax.linear_schedule(0, 2e-3, 30), b2=0.99)

    @jax.jit
    def step(p, state, rows):
        value, gradient = jax.value_and_grad(functools.partial(loss, quantize))(p, rows)
        updates, state = adam.update(gradient, state)
        return optax.apply_updates(p, updates), state, value

    p = parameters(jax.random.key(0))
    state, losses, random = adam.init(p), [], np.random.default_rng(0)
    for _ in range(steps):
        first = random.integers(0, len(text) - LENGTH - 1, BATCH)
        p, state, value = step(p, state, text[first[:, None] + np.arange(LENGTH + 1)])
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
