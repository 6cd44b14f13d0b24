"""Print what norms of short rows cost with a rotary embedding behind them, as in an attention's queries and keys.

    python benchmarks/qk_norm.py                  # needs jax[cuda13], no GPU; four minutes
    python benchmarks/qk_norm.py rms_norm 128     # only lines that have all of these words

Forward, and forward and backward, of `rope(norm(q))` of 8192 tokens and 4096 features, compiled for an H200, by jln's
norm and by plain jnp, which XLA fuses with the rotation. A line has the kernels, the bytes, and what all kernels issue,
the rotation's too: the time that the schedulers need for the instructions, as a part of the memory's for the bytes.
Some programs of each kernel are executed for it (tests/executed/whole.py). "Once" counts q, the result, and their
cotangents, q twice.

What was decided by it:

- `implementation=None` takes our kernels for short rows, as for others: a training step with plain jnp moves 1.2 to 1.6
  times the bytes and issues 1.2 to 2.5 times the instructions (at D = 128 in bfloat16 rms_norm takes 127 us of memory
  and 46 of the schedulers, plain jnp 171 and 104): what adds up a row for the backward reads it without the rotation.
- Forward alone is the other way round: XLA makes one kernel of the norm and the rotation, 135 MB where our norm and
  XLA's rotation move 269, though it issues for as long as memory takes. No lowering rule sees what stands behind a
  norm; who only infers says `implementation="xla"`. (In training XLA's forward before our backward, which would add up
  rstd again, would move 542 MB and not 609, and issue more: too near to choose without a clock.)
- The rotation stays outside of our kernels. One that did both would leave out 269 MB of a step's 609, 56 us, where the
  products of such a layer take 10 ms at an H200's peak; and it would have to know each model's halves or pairs, the
  part of a head that is rotated, positions, and the layout for what reads it.

tests/executed/test_traffic.py holds what our kernels issue at these sizes.
"""

import argparse
import itertools
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "executed"))
import whole  # pyright: ignore[reportMissingImports]

import traffic  # pyright: ignore[reportMissingImports]
from catalogue import OPERATORS
from jln.testing.operators import ALIASES
from jln.testing.report import unknown

BATCH, TOKENS, FEATURES = 4, 2048, 4096
LINE = {
    "norm": ("rms_norm", "layer_norm"),
    "D": (64, 128, 256),
    "dtype": ("bfloat16", "float32"),
    "pass": ("forward", "both"),
}
MB = 10**6


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [batch, tokens, heads, D] by cos, sin [1, tokens, 1, D / 2]: Su et al., "RoFormer" (2021)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def compiled(norm: Any, size: int, dtype: str = "bfloat16", *, backward: bool = True) -> tuple[Any, float]:
    """Return the compiled program, and the time of its instructions as a part of the memory's time."""
    q = jax.ShapeDtypeStruct((BATCH, TOKENS, FEATURES // size, size), dtype)
    scale = jax.ShapeDtypeStruct((size,), jnp.float32)
    angle = jax.ShapeDtypeStruct((1, TOKENS, 1, size // 2), jnp.float32)

    def forward(q, scale, cos, sin):
        return rope(norm(q, scale), cos, sin)

    def step(q, scale, cos, sin, cotangent):
        rotated, pullback = jax.vjp(lambda q, scale: forward(q, scale, cos, sin), q, scale)
        # As in a model: otherwise XLA could leave `rotated` to a backward kernel.
        rotated, cotangent = jax.lax.optimization_barrier((rotated, cotangent))
        return rotated, pullback(cotangent)

    arguments = (step, q, scale, angle, angle, q) if backward else (forward, q, scale, angle, angle)
    program, issued = whole.compiled(*arguments)
    return program, traffic.issue_share(sum(issued.values()), program.bytes_total)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print what norms of queries and keys cost beside their rotation.")
    words = [str(word) for values in LINE.values() for word in values]
    parser.add_argument("words", nargs="*", help=f"only lines that have all of these: {', '.join(words)}")
    wanted = {ALIASES.get(word, word) for word in map(str, parser.parse_args().words)}
    for word in wanted.difference(words):
        parser.error(unknown("word", word, words))
    print(f"| {' | '.join(LINE)} | once, MB | jln: kernels | MB | issue | jnp: kernels | MB | issue |")
    print("|" + "---|" * 11)
    for name, size, dtype, direction in itertools.product(*LINE.values()):
        what = [name, str(size), dtype, direction]
        if not wanted <= set(what):
            continue
        backward = direction == "both"
        once = (5 if backward else 2) * jnp.dtype(dtype).itemsize * BATCH * TOKENS * FEATURES / MB
        cells = [f"{once:.0f}"]
        for norm in (OPERATORS[name].function, OPERATORS[name].reference):
            found, share = compiled(norm, size, dtype, backward=backward)
            cells += [f"{found.launches}", f"{found.bytes_total / MB:.0f}", f"{share:.2f}"]
        print("| " + " | ".join(what + cells) + " |", flush=True)


if __name__ == "__main__":
    main()
