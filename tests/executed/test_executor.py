"""The executor itself: what it computes, and that it notices what it should."""

import jax
import jax.numpy as jnp
import numpy as np

import jln
from ptx import Program


def draw(*shape, dtype="float32"):
    return np.random.default_rng(0).standard_normal(shape).astype(jnp.dtype(dtype))


def structs(*arrays):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


def test_calls_in_a_scan_run_as_often_as_it_takes_steps():
    x, scale = draw(8, 128), draw(128)

    def f(x, scale):
        return jax.lax.scan(lambda x, _: (jln.rms_norm(x, scale) + x, None), x, length=3)[0]

    program = Program(f, *structs(x, scale))
    expected = x
    for _ in range(3):
        expected = jln.reference.rms_norm(expected, scale) + expected
    assert np.max(np.abs(program.run(x, scale) - expected)) < 1e-5
    assert [(s.name, s.executions) for s in program.stats] == [("jln_forward_kernel", 3)]
