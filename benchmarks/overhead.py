"""Print what an operator costs beside its arithmetic, as ratios to plain jnp in one run.

    python benchmarks/overhead.py

The costs are those of an eager call (the ratio is to a jitted jnp function of the same), and of tracing and lowering
the gradient of 24 layers.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jln

LAYERS = 24


def least(function: Callable[[], Any], repeats: int) -> float:
    """The seconds of the fastest of `repeats` calls."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def lowered(norm: Callable[..., jax.Array], x: jax.Array, parameters: list[tuple[jax.Array, jax.Array]]) -> Any:
    def loss(x, parameters):
        for scale, offset in parameters:
            x = x + jnp.sin(norm(x, scale, offset))
        return jnp.sum(x)

    return jax.jit(jax.grad(loss, (0, 1))).lower(x, parameters)  # a new function, of which JAX remembers nothing


def main() -> None:
    x, scale, offset = jnp.ones((8, 64)), jnp.ones(64), jnp.zeros(64)
    kernel = jnp.ones((64, 64))
    plain, plain_linear = (jax.jit(f) for f in (jln.reference.layer_norm, jln.reference.layer_norm_linear))
    ours = least(lambda: jln.layer_norm(x, scale, offset), 5000)
    print(f"eager layer_norm at 8x64: {ours / least(lambda: plain(x, scale, offset), 5000):.2f} times a jitted jnp one")
    for precision in (None, "highest"):
        ours = least(lambda p=precision: jln.layer_norm_linear(x, scale, offset, kernel, precision=p), 5000)
        theirs = least(lambda: plain_linear(x, scale, offset, kernel), 5000)
        print(f"eager layer_norm_linear, precision {precision}: {ours / theirs:.2f} times")
    parameters = [(scale, offset)] * LAYERS
    ours, theirs = (least(lambda n=n: lowered(n, x, parameters), 5) for n in (jln.layer_norm, jln.reference.layer_norm))
    print(f"tracing and lowering the gradient of {LAYERS} norms: {ours / theirs:.2f} times plain jnp")


if __name__ == "__main__":
    main()
