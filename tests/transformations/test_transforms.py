"""The operators under JAX's transformations, each against the reference under the same ones, in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
import workbench
from jln._triton import target
from workbench import OPERATORS

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


@pytest.mark.parametrize("disabled", [False, True], ids=["eager", "disable_jit"])
@pytest.mark.parametrize("name", ["add_layer_norm", "rms_norm_gated", "rms_norm_add_rms_norm", "layer_norm_linear"])
def test_numpy_arrays_outside_of_jit(name, disabled, implementation):
    operands = workbench.named(name, (4, 9), "float64", features=(6,))
    with jax.disable_jit(disabled):
        y = getattr(jln, name)(**jax.tree.map(np.asarray, operands), implementation=implementation)
    chex.assert_trees_all_close(y, getattr(jln.reference, name)(**operands), **CLOSE)


def loss(function):
    """Return a loss that uses every result and has a gradient that is nowhere zero."""

    def call(*operands):
        y, total = function(*operands)
        return jnp.sum(jnp.sin(y)) + jnp.sum(total**2)

    return call


def batched(in_axes, shape, examples=3):
    """Return the sum's operands, of some of which each example has its own."""
    operands = workbench.arguments(OPERATORS["add_layer_norm"], shape, "float64")
    return tuple(
        a if i is None else jnp.stack([a * (1 + k / 7) for k in range(examples)], axis=i)
        for a, i in zip(operands, in_axes, strict=True)
    )


def gradients_of_examples(in_axes, **how):
    f = functools.partial(OPERATORS["add_layer_norm"], **how)
    return jax.jit(jax.vmap(jax.grad(loss(f), argnums=(0, 1, 2, 3)), in_axes))


# Rows of several chunks (in float64 from 4097 elements on), with a kernel of their own for row sums; more rows than a
# tile has; one partial sum for each group.
@pytest.mark.parametrize("shape", [(3, 5000), (300, 9), (70, 40)])
@pytest.mark.parametrize("in_axes", [(None, None, 0, 0), (0, 0, None, 0), (None, 0, 0, None)], ids=str)
def test_vmap_of_grad_in_every_regime(shape, in_axes):
    operands = batched(in_axes, shape)
    ours = gradients_of_examples(in_axes, implementation="triton")(*operands)
    chex.assert_trees_all_close(ours, gradients_of_examples(in_axes, module=jln.reference)(*operands), **CLOSE)


def test_vmap_of_grad_with_several_programs_a_group():
    """Gradients are right where several programs share a group's rows.

    The test is in float32, as in float64 the interpreter's few SMs leave a group one program.
    """
    in_axes = (0, 0, None, 0)
    narrow = tuple(a.astype("float32") for a in batched(in_axes, (70, 40)))
    with target.recording() as made:
        gradients_of_examples(in_axes, implementation="triton").lower(*narrow)
    assert max(launch.programs for launch in made if launch.kernel.fn.__name__ == "backward_kernel") > 3
    wide = [a.astype("float64") for a in narrow]
    true = gradients_of_examples(in_axes, module=jln.reference)(*wide)
    ours = gradients_of_examples(in_axes, implementation="triton")(*narrow)
    for a, t in zip(ours, true, strict=True):  # a sum of 70 terms; each has its largest for a scale
        np.testing.assert_allclose(a, t, rtol=0, atol=4e-6 * np.max(np.abs(t)))


@pytest.mark.parametrize("width", [9, 5000])  # whole rows, and several chunks
@pytest.mark.parametrize("shared", ["dy", "dtotal", "neither"])
def test_vmap_over_cotangents(shared, width, implementation):
    operands = workbench.arguments(OPERATORS["add_layer_norm"], (5, width), "float64")
    cotangents = [
        workbench.normal(i, (5, width) if of == shared else (3, 5, width), "float64")
        for i, of in enumerate(("dy", "dtotal"))
    ]
    in_axes = [None if of == shared else 0 for of in ("dy", "dtotal")]

    def run(**how):
        _, pullback = jax.vjp(functools.partial(OPERATORS["add_layer_norm"], **how), *operands)
        return jax.jit(jax.vmap(lambda *c: pullback(c), in_axes))(*cotangents)

    chex.assert_trees_all_close(run(implementation=implementation), run(module=jln.reference), **CLOSE)


def test_export_with_symbolic_shapes():
    pytest.importorskip("flatbuffers")
    (batch,) = jax.export.symbolic_shape("batch")
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jln.layer_norm(x)))))
    exported = jax.export.export(gradient, platforms=("cpu", "cuda"))(jax.ShapeDtypeStruct((batch, 8), "float64"))
    x = workbench.normal(0, (5, 8), "float64")
    chex.assert_trees_all_close(exported.call(x), gradient(x), **CLOSE)
