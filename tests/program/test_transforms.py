"""Rung 4: kernels launched when a step is transformed, on one H200."""

import jax
import pytest
from transformed import H, M, gradient, launches, layers, over_x, scale_and_offset

import jln
import program
from absent_gpu import struct

save_statistics = jax.checkpoint_policies.save_only_these_names(jln.STATISTICS)
TRANSFORMED = {
    "grad": lambda f: (gradient(f), struct(M, H), *scale_and_offset()),
    "vmap(grad)": lambda f: (jax.vmap(gradient(f), over_x), struct(4, M, H), *scale_and_offset()),
    "grad(vmap)": lambda f: (gradient(jax.vmap(f, over_x)), struct(4, M, H), *scale_and_offset()),
    "vmap(vmap(grad))": lambda f: (
        jax.vmap(jax.vmap(gradient(f), over_x), (0, 0, 0)),
        struct(2, 4, M, H),
        *scale_and_offset(2),
    ),
    "cond": lambda f: (
        lambda p, *a: jax.lax.cond(p, gradient(f), lambda *a: a, *a),
        struct(dtype="bool"),
        struct(M, H),
        *scale_and_offset(),
    ),
}


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_one_kernel_forward_and_one_backward(name, forward_mode):
    """A step has one kernel forward, one backward, and one that adds up shares of the parameters' gradients."""
    step, *arguments = TRANSFORMED[name](lambda *a: jln.layer_norm(*a, forward_mode=forward_mode))
    assert launches(program.compile_for(step, *arguments)) == [1, 1, 1]


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize(
    "policy", [None, save_statistics, "nothing"], ids=["plain", "statistics saved", "nothing saved"]
)
def test_three_layers_in_a_scan(policy, forward_mode):
    """Checkpointed layers in a scan run the forward kernel again only where not even the statistics are saved."""

    def body(*a):
        return jln.layer_norm(*a, forward_mode=forward_mode)

    wrapped = jax.checkpoint(body, policy=None if policy == "nothing" else policy) if policy else body
    report = program.compile_for(gradient(layers(wrapped)), struct(M, H), *scale_and_offset(3))
    assert launches(report) == [3] * (4 if policy == "nothing" else 3)


def test_forward_mode_keeps_no_more():
    """The arrays kept between forward and backward are the same with forward_mode as without."""

    def held(forward_mode):
        def step(x, scale, offset):
            y, pullback = jax.vjp(lambda *a: jln.layer_norm(*a, forward_mode=forward_mode), x, scale, offset)
            return y, jax.tree.leaves(pullback)

        return program.compile_for(step, struct(M, H), *scale_and_offset()).output_bytes

    # Without forward_mode there is an array without elements too, whose shape says what is wanted. Of it a program
    # returns the address, 8 bytes.
    assert held(True) == held(False) - 8
