"""Models in bfloat16: their gradients are no further from float64's than the untouched models'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jln
from proof import normal, operators

pytestmark = pytest.mark.usefixtures("promoted_ranks")
# Wide enough for roundings to average, three blocks for them to add up.
H, ROWS, BLOCKS = 256, 64, 3


def _cast(p, like):
    return jax.tree.map(lambda a: a.astype(like.dtype), p)


def _wide(x):
    """The dtype in which norms are computed: float32 for 16 bits, as all do."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def layer_norm(x, s, b):
    wide = _wide(x)
    d = wide - jnp.mean(wide, -1, keepdims=True)
    return (d * lax.rsqrt(jnp.mean(d * d, -1, keepdims=True) + 1e-5) * s + b).astype(x.dtype)


def rms_norm(x, s):
    wide = _wide(x)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * (1 + s)).astype(x.dtype)


def attention(x, p):
    p = _cast(p, x)
    q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
    weights = jax.nn.softmax(_wide(q @ k.T) / np.sqrt(q.shape[-1])).astype(x.dtype)
    return weights @ v @ p["o"]


def mlp(x, p):
    p = _cast(p, x)
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def gpt(p, x):
    for of in p["blocks"]:
        x = x + (attention(layer_norm(x, of["s"], of["b"]), of) + of["bias"].astype(x.dtype))
        x = x + (mlp(layer_norm(x, of["t"], of["c"]), of) + of["bias"].astype(x.dtype))
    return _loss(layer_norm(x, p["s"], p["b"]), p)


def gemma(p, x):
    for of in p["blocks"]:
        x = x + rms_norm(attention(rms_norm(x, of["s"]), of), of["b"])
        x = x + rms_norm(mlp(rms_norm(x, of["t"]), of), of["c"])
    return _loss(rms_norm(x, p["s"]), p)


def _loss(y, p):
    logits = _wide(y @ p["out"].astype(y.dtype))
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])


def _parameters():
    rng = np.random.default_rng(0)
    matrices = {"q": (H, 64), "k": (H, 64), "v": (H, 64), "o": (64, H), "up": (H, 512), "down": (512, H)}
    vectors = {"s": 0.3, "t": 0.3, "b": 0.1, "c": 0.1, "bias": 0.1}

    def drawn(shape, size):
        return (rng.normal(0, 1, shape) * size).astype(np.float32)

    blocks = [
        {n: drawn(of, of[0] ** -0.5) for n, of in matrices.items()}
        | {n: 0.5 + drawn((H,), a) for n, a in vectors.items()}
        for _ in range(BLOCKS)
    ]
    return {"blocks": blocks, "s": 0.5 + drawn((H,), 0.1), "b": drawn((H,), 0.1), "out": drawn((H, 32), H**-0.5)}


@pytest.mark.parametrize(
    ("model", "finds"),
    [
        (gpt, {"layer_norm": 1, "add_layer_norm": 6}),
        (gemma, {"rms_norm": 1, "rms_norm_add_rms_norm": 6}),
    ],
)
def test_gradients_are_no_further_from_float64(model, finds):
    p, x = _parameters(), normal(ROWS, H)
    low = x.astype(jnp.bfloat16)
    assert operators(model, p, low) == finds
    double = jax.tree.map(lambda a: a.astype(np.float64), (p, low))
    exact = jax.jit(jax.grad(model))(*double)
    untouched, fused = (
        [_error(a, b) for a, b in zip(*map(jax.tree.leaves, (jax.jit(jax.grad(f))(p, low), exact)), strict=True)]
        for f in (model, jln.fuse(model))
    )
    # The median of the parameters' errors; no parameter by itself is off by more than roundings differ by chance.
    assert 0 < np.median(fused) <= 1.02 * np.median(untouched), (np.median(fused), np.median(untouched))
    assert all(a <= 1.5 * b + 1e-3 for a, b in zip(fused, untouched, strict=True)), list(
        zip(fused, untouched, strict=True)
    )


def _error(got, wanted):
    return float(np.linalg.norm(np.asarray(got, np.float64) - wanted) / max(np.linalg.norm(wanted), 1e-30))
