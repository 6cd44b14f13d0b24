"""Norms whose results are in eight bits: the bytes that they move on an H200, beside plain XLA and a norm of ours.

    python benchmarks/eight_bits.py    # needs jax[cuda13], no GPU; a minute

Plain XLA, and the norm of ours that does not quantise, have their eight bits by JAX's own steps: those of
`jax.nn.scaled_dot_general` in blocks, or a division by the last step's scale beside a maximum for the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jln
import program

ROWS, H, LARGEST = 8192, 4096, 448.0


def struct(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def in_blocks(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eight bits as `jax.nn.scaled_dot_general` makes them of a product's operand."""
    blocks = y.reshape(*y.shape[:-1], -1, 32)
    exponent = jnp.ceil(jnp.log2(jnp.max(jnp.abs(blocks), -1).astype("float32") / LARGEST))
    scale = jnp.exp2(jnp.maximum(exponent, -127))
    values = jnp.clip(blocks / scale[..., None].astype(y.dtype), -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return values.reshape(y.shape), scale.astype(jnp.float8_e8m0fnu)


def by_one_scale(y: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eight bits by the last step's scale, and the largest number for the next."""
    values = jnp.clip(y / scale.astype(y.dtype), -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return values, jnp.max(jnp.abs(y)).astype("float32")


def behind(quantise: Callable[..., Any], norm: Callable[..., Any]) -> Callable[..., Any]:
    """The quantisation behind a norm, or behind the first result of one of a sum; a scale comes last."""

    def step(*operands: jax.Array) -> Any:
        *given, scale = operands if quantise is by_one_scale else (*operands, None)
        result = norm(*given)
        y, *total = result if isinstance(result, tuple) else (result,)
        return quantise(y, *([] if scale is None else [scale])), *total

    return step


def as_read(step: Callable[..., Any], *operands: jax.Array) -> Any:
    """The step's results without the carrier of gradients, which no product reads."""
    result = step(*operands)
    y, *total = (result,) if isinstance(result, jln.Quantized) else result
    return y._replace(carrier=None), *total


def main() -> None:
    x, scale, number = struct(ROWS, H), struct(H), struct(dtype="float32")
    norms = {"rms_norm": (x, scale), "add_rms_norm": (x, x, scale)}
    table = Table("norm", "eight bits", "plain XLA, MB", "norm of ours", "quantize=", "once", title="forward, H200")
    for name, operands in norms.items():
        plain, ours = getattr(jln.reference, name), getattr(jln, name)

        def delayed(*a: jax.Array, ours: Callable[..., Any] = ours) -> Any:
            return ours(*a[:-1], quantize=jln.Float8(a[-1]))

        kinds = {
            "blocks": (in_blocks, operands, functools.partial(ours, quantize=jln.MXFloat8())),
            "delayed scale": (by_one_scale, (*operands, number), delayed),
            "current scale": (None, operands, functools.partial(ours, quantize=jln.Float8())),
        }
        for kind, (quantise, given, quantised) in kinds.items():
            steps = [] if quantise is None else [behind(quantise, plain), behind(quantise, ours)]
            quantised = functools.partial(as_read, quantised)
            moved = [program.compile_for(step, *given).bytes_total for step in (*steps, quantised)]
            results = jax.eval_shape(quantised, *given)
            once = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((given, results)))
            cells = [*[""] * (2 - len(steps)), *(f"{n / 1e6:.1f}" for n in (*moved, once))]
            table.add_row(name, kind, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
