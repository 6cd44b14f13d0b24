"""A whole pre-norm block, as each peer's norms make it: what a layer is worth is seen in the step it is a part of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jln._bench.workloads import Workload
from jln._catalogue import DIRECTIONS, Array, Signature


def _norm(i: int) -> tuple[Array, Array]:
    return Array(f"scale_{i}", "scale", ("H",)), Array(f"offset_{i}", "offset", ("H",))


def _linear(name: str, h: str, n: str) -> tuple[Array, Array]:
    return Array(f"kernel_{name}", "kernel", (h, n)), Array(f"bias_{name}", "bias", (n,))


_ARGUMENTS = (
    *(Array("x", "activation", ("x",)), *_norm(1), *_linear("qkv", "H", "3H"), *_linear("out", "H", "H")),
    *(*_norm(2), *_linear("up", "H", "4H"), *_linear("down", "4H", "H")),
)
# Its bytes are of arguments, results and gradients: a bound that no implementation reaches.
_RESULTS = (Array("y", "activation", ("x",)),)
_SIGNATURE = Signature("block", _ARGUMENTS, _RESULTS, tuple(a.name for a in _ARGUMENTS))


@dataclasses.dataclass(frozen=True)
class Block(Workload):
    """shape: of x, [batch, tokens, width]. `x += out(attention(qkv(norm(x)))); x += down(gelu(up(norm(x))))`, the first
    norm and the Linear behind it one operator, the second one's sum and it another; all the rest is the same program
    for every peer. Its training step is forward and backward: what an optimizer adds is the same for all.
    """

    heads: int = 0

    @property
    def signature(self) -> Signature:
        return _SIGNATURE

    is_linear = property(lambda self: False)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {"x": self.shape, "H": (self.width,), "3H": (3 * self.width,), "4H": (4 * self.width,)}

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
            p = dict(zip(_SIGNATURE.names, arguments, strict=True))
            qkv = norm_linear(p["x"], p["scale_1"], p["offset_1"], p["kernel_qkv"], p["bias_qkv"])
            q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in jnp.split(qkv, 3, -1))
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(self.shape)
            branch = attended @ p["kernel_out"] + p["bias_out"]
            z, x = add_norm(branch, p["x"], p["scale_2"], p["offset_2"])
            up = jax.nn.gelu(z @ p["kernel_up"] + p["bias_up"])
            return x + up @ p["kernel_down"] + p["bias_down"]

        return block

    def product_flops(self, direction: str | None = None) -> int:
        """Of the four Linears (12 H^2 parameters) and of attention, of which the causal half."""
        h, tokens = self.width, self.shape[1]
        forward = 2 * self.rows * (12 * h * h + tokens * h)
        return sum(forward * (1 + DIRECTIONS.index(d)) for d in self._directions(direction))


BLOCKS = {
    b.name: b
    for b in (
        Block("block-1024", "block", (8, 1024, 1024), "GPT-2 medium's block, a training step", heads=16),
        Block("block-4096", "block", (2, 2048, 4096), "a wide model's block, a training step", heads=32),
    )
}
