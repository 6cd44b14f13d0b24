"""Compiled kernels inside of scan, cond, checkpoint and vmap, executed, against the reference inside of the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import matrix
import workbench
from cases import lowering_for
from ptx import Program

INSIDE = (
    "scan",
    "scan(checkpoint)",
    "checkpoint, statistics saved",
    "cond",
    "map",
    "nested vmap",
    "hvp(scan(checkpoint))",
)
WITHIN = {name: matrix.REVERSE.get(name, matrix.nested_vmap) for name in INSIDE}


@pytest.mark.parametrize(
    ("name", "given", "transformation"),
    [
        pytest.param(*operator, inside, marks=() if inside in quick else pytest.mark.heavy)
        for operator, quick in ((("add_layer_norm", "so"), INSIDE[:1]), (("rms_norm_linear", "sb"), ("cond",)))
        for inside in INSIDE
    ],
)
def test_inside(name, given, transformation):
    transform = WITHIN[transformation]
    ours, operands = matrix.bind(name, given, implementation="triton")
    plain, _ = matrix.bind(name, given, module=jln.reference)
    with lowering_for("small-h200"):
        program = Program(lambda *a: transform(ours, a), *operands)
    assert program.calls
    got, true = program.run(*operands), jax.jit(lambda *a: transform(plain, a))(*operands)
    for a, t in zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True):
        np.testing.assert_allclose(a, t, rtol=1e-10, atol=1e-10 * float(jnp.max(jnp.abs(t))))


def test_a_stack_of_layers_runs_each_kernel_once_a_layer():
    """A checkpointed scan over stacked parameters runs each fused kernel, forward and backward, once a layer."""
    layers, rows, h = 3, 40, 64
    kernels = (workbench.normal(1, (layers, h, h), "float32") / 8).astype("bfloat16")
    scales, x = workbench.normal(2, (layers, h), "bfloat16", 1.0), workbench.normal(3, (rows, h), "bfloat16")

    def loss(module, scales, kernels, x):
        @jax.checkpoint
        def layer(x, parameters):
            scale, kernel = parameters
            return x + module.rms_norm_linear(x, scale, kernel), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, (scales, kernels))[0].astype("float32")))

    def gradients(module, dtype):
        return lambda *a: jax.grad(loss, (1, 2, 3))(module, *(v.astype(dtype) for v in a))

    arguments = scales, kernels, x
    with lowering_for("small-h200"):
        program = Program(gradients(jln, "bfloat16"), *arguments)
    got = program.run(*arguments)
    assert {stats.executions for stats in program.stats} == {layers}
    plain, true = (jax.jit(gradients(jln.reference, d))(*arguments) for d in ("bfloat16", "float64"))
    for a, p, t in zip(got, plain, true, strict=True):
        t = np.asarray(t)
        error, allowed = (np.linalg.norm(np.asarray(v, "float64") - t) for v in (a, p))
        assert error <= 2 * allowed + 2**-9 * np.linalg.norm(t)
