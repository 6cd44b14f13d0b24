"""A whole pre-norm block, as each peer's norms make it: what a layer is worth is seen in the step it is a part of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jln._bench.workloads import Workload

_NAMES = (
    *("x", "scale_1", "offset_1", "kernel_qkv", "bias_qkv", "kernel_out", "bias_out"),
    *("scale_2", "offset_2", "kernel_up", "bias_up", "kernel_down", "bias_down"),
)


@dataclasses.dataclass(frozen=True)
class Block(Workload):
    """shape: of x, [batch, tokens, width]. `x += out(attention(qkv(norm(x)))); x += down(gelu(up(norm(x))))`, the first
    norm and the Linear behind it one operator, the second one's sum and it another; all the rest is the same program
    for every peer. Its training step is forward and backward: what an optimizer adds is the same for all.
    """

    heads: int = 0

    results = property(lambda self: ("y",))
    adds = property(lambda self: False)

    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        h = self.width
        shapes = [self.shape, (h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,)]
        shapes += [(h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,), self.shape]
        names = (*_NAMES, "y")
        dtypes = [self.parameter_dtype if n.startswith(("scale", "offset")) else self.dtype for n in names]
        return {n: jax.ShapeDtypeStruct(s, jnp.dtype(d)) for n, s, d in zip(names, shapes, dtypes, strict=True)}

    def arguments(self) -> list[jax.ShapeDtypeStruct]:
        return list(self.arrays().values())[:-1]

    def cotangents(self) -> list[jax.ShapeDtypeStruct]:
        return list(self.arrays().values())[-1:]

    def parts(self) -> tuple[Workload, Workload]:
        """The two operators that differ between peers."""
        norm = {"shape": self.shape, "dtype": self.dtype, "parameter_dtype": self.parameter_dtype, "why": self.why}
        return (
            Workload(name="qkv", operator="layer_norm_linear", features=3 * self.width, **norm),
            Workload(name="add", operator="add_layer_norm", **norm),
        )

    def of(self, norm_linear: Callable[..., Any], add_norm: Callable[..., Any]) -> Callable[..., Any]:
        """The block with these for its operators."""

        def block(*arguments: jax.Array) -> jax.Array:
            p = dict(zip(_NAMES, arguments, strict=True))
            qkv = norm_linear(p["x"], p["scale_1"], p["offset_1"], p["kernel_qkv"], p["bias_qkv"])
            q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in jnp.split(qkv, 3, -1))
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(self.shape)
            branch = attended @ p["kernel_out"] + p["bias_out"]
            z, x = add_norm(branch, p["x"], p["scale_2"], p["offset_2"])
            up = jax.nn.gelu(z @ p["kernel_up"] + p["bias_up"])
            return x + up @ p["kernel_down"] + p["bias_down"]

        return block

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        count = len(_NAMES)

        def both(*arrays):
            y, pullback = jax.vjp(function, *arrays[:count])
            dx, *others = pullback(arrays[count])
            return y, dx, others

        return both

    def bytes_once(self, direction: str | None = None) -> int:
        """Of arguments, results and gradients: a bound that no implementation reaches."""
        if direction is None:
            return sum(self.bytes_once(d) for d in self.directions)
        arguments = sum(a.size * a.dtype.itemsize for a in self.arguments())
        y = sum(a.size * a.dtype.itemsize for a in self.cotangents())
        return arguments + y if direction == "forward" else 2 * arguments + y

    def product_flops(self, direction: str | None = None) -> int:
        """Of the four Linears (12 H^2 parameters) and of attention, of which the causal half."""
        if direction is None:
            return sum(self.product_flops(d) for d in self.directions)
        h, tokens = self.width, self.shape[1]
        forward = 2 * self.rows * (12 * h * h + tokens * h)
        return forward if direction == "forward" else 2 * forward


BLOCKS = {
    b.name: b
    for b in (
        Block("block-1024", "block", (8, 1024, 1024), "GPT-2 medium's block, a training step", heads=16),
        Block("block-4096", "block", (2, 2048, 4096), "a wide model's block, a training step", heads=32),
    )
}
