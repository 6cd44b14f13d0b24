"""A whole pre-norm block, with the norms of each peer: a layer's worth shows in the step that it is a part of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jln._tools.catalogue import DIRECTIONS, Array, Signature
from jln._tools.workloads import Workload


def _norm(i: int) -> tuple[Array, Array]:
    return Array(f"scale_{i}", "scale", ("H",)), Array(f"offset_{i}", "offset", ("H",))


def _linear(name: str, h: str, n: str) -> tuple[Array, Array]:
    return Array(f"kernel_{name}", "kernel", (h, n)), Array(f"bias_{name}", "bias", (n,))


def _signature(*projections: tuple[Array, Array]) -> Signature:
    """The signature of a block, whose queries, keys and values are made by `projections`: pairs of kernel and bias."""
    arguments = (
        *(Array("x", "activation", ("x",)), *_norm(1), *(a for pair in projections for a in pair)),
        *(*_linear("out", "H", "H"), *_norm(2), *_linear("up", "H", "4H"), *_linear("down", "4H", "H")),
    )
    # Its bytes are of arguments, results and gradients: a bound that no implementation reaches.
    return Signature("block", arguments, (Array("y", "activation", ("x",)),), tuple(a.name for a in arguments))


_JOINT = _signature(_linear("qkv", "H", "3H"))
_APART = _signature(*(_linear(name, "H", "H") for name in "qkv"))


@dataclasses.dataclass(frozen=True)
class Block(Workload):
    """A block `x += out(attention(qkv(norm(x)))); x += down(gelu(up(norm(x))))` of `x [batch, tokens, width]`.

    Two operators differ between peers: the first norm with the Linear behind it, and the second norm with the sum in
    front. All the rest is the same program for every peer. The training step is forward and backward: an optimizer
    would add the same to each.

    shape: x's, `[batch, tokens, width]`.
    apart: queries, keys and values have a Linear each, and the second operator has its Linear, too.
    """

    heads: int = 0
    apart: bool = False

    @property
    def signature(self) -> Signature:
        return _APART if self.apart else _JOINT

    is_linear = property(lambda self: False)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {"x": self.shape, "H": (self.width,), "3H": (3 * self.width,), "4H": (4 * self.width,)}

    def parts(self) -> tuple[Workload, Workload]:
        """The two operators that differ between peers, as workloads."""
        norm = {"shape": self.shape, "dtype": self.dtype, "parameter_dtype": self.parameter_dtype, "why": self.why}
        features = 3 * (self.width,) if self.apart else 3 * self.width
        qkv = Workload(name="qkv", operator="layer_norm_linear", features=features, **norm)
        if self.apart:
            return qkv, Workload(name="up", operator="add_layer_norm_linear", features=4 * self.width, **norm)
        return qkv, Workload(name="add", operator="add_layer_norm", **norm)

    def of(self, norm_linear: Callable[..., Any], add_norm: Callable[..., Any]) -> Callable[..., Any]:
        """The block as a function of its arguments, made with a peer's functions of the two workloads of `parts`."""

        def block(*arguments: jax.Array) -> jax.Array:
            p = dict(zip(self.signature.names, arguments, strict=True))
            first, second = ((p[f"scale_{i}"], p[f"offset_{i}"]) for i in (1, 2))
            if self.apart:
                kernels, biases = (tuple(p[f"{kind}_{name}"] for name in "qkv") for kind in ("kernel", "bias"))
                projected = norm_linear(p["x"], *first, kernels, biases)
            else:
                projected = jnp.split(norm_linear(p["x"], *first, p["kernel_qkv"], p["bias_qkv"]), 3, -1)
            q, k, v = (a.reshape(*a.shape[:-1], self.heads, -1) for a in projected)
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(self.shape)
            branch = attended @ p["kernel_out"] + p["bias_out"]
            if self.apart:
                up, x = add_norm(branch, p["x"], *second, p["kernel_up"], p["bias_up"])
            else:
                z, x = add_norm(branch, p["x"], *second)
                up = z @ p["kernel_up"] + p["bias_up"]
            return x + jax.nn.gelu(up) @ p["kernel_down"] + p["bias_down"]

        return block

    def product_flops(self, direction: str | None = None) -> int:
        """The operations of the four Linears (12 H^2 parameters) and of the causal half of attention."""
        h, tokens = self.width, self.shape[1]
        forward = 2 * self.rows * (12 * h * h + tokens * h)
        return sum(forward * (1 + DIRECTIONS.index(d)) for d in self._directions(direction))


BLOCKS = {
    b.name: b
    for width, shape, what, heads in (
        (1024, (8, 1024, 1024), "GPT-2 medium's block, a training step", 16),
        (4096, (2, 2048, 4096), "a wide model's block, a training step", 32),
    )
    for b in (
        Block(f"block-{width}", "block", shape, what, heads=heads),
        Block(f"block-{width}-q-k-v", "block", shape, f"{what}; q, k, v apart", heads=heads, apart=True),
    )
}
