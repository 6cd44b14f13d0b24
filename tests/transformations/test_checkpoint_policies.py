"""Tests of what `jax.checkpoint` recomputes behind a norm of ours, counted in the traced gradient."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

import jln
import workbench
from jln._core.policies import keeps
from proof import equations

H, WIDE, FEW = 16, 300, 8
SHAPES = {
    "scale": (H,),
    **{name: (H, WIDE) for name in ("q", "k", "v", "gate", "up")},
    **{name: (WIDE, H) for name in ("out", "down")},
    **{"adapter": (H, FEW), "back": (FEW, H)},
}
# The forward pass has the products q, k, v, out, gate, up, adapter, down and back; the backward pass has two for each.
PRODUCTS = 9
ours, jaxs = jln.checkpoint_policies, jax.checkpoint_policies
POLICIES = {
    "JAX's dots": jaxs.dots_saveable,
    "JAX's dots with no batch": jaxs.dots_with_no_batch_dims_saveable,
    "dots": ours.dots_saveable,
    "dots with no batch": ours.dots_with_no_batch_dims_saveable,
    "dots and statistics": ours.dots_and_statistics_saveable,
    "dots with no batch and statistics": ours.dots_with_no_batch_dims_and_statistics_saveable,
}


def block(module, **options):
    def call(x, p):
        q, k, v = module.layer_norm_linear(x, p["scale"], p["scale"], (p["q"], p["k"], p["v"]), **options)
        branch = (jnp.sin(q) * k * jnp.cos(v)) @ p["out"]
        (gate, up), x = module.add_rms_norm_linear(branch, x, p["scale"], (p["gate"], p["up"]), **options)
        few = module.rms_norm_linear(x, p["scale"], p["adapter"], **options)  # in one kernel
        return x + (jax.nn.silu(gate) * up) @ p["down"] + jnp.sin(few) @ p["back"]

    return call


def arguments():
    parameters = {n: workbench.normal(i, s, "float32") * 0.1 for i, (n, s) in enumerate(SHAPES.items())}
    return workbench.normal(50, (4, 6, H), "float32"), parameters


def gradient(module, policy, **options):
    call = jax.checkpoint(block(module, **options), policy=policy)
    return jax.grad(lambda x, p: jnp.sum(jnp.sin(call(x, p))), (0, 1))


def made(module, policy, **options):
    """Return a `Counter` of what the traced gradient computes: forward, recomputed and backward together.

    Its keys are "products", and for each norm operation a tuple of its name and the results that are wanted of it.
    """
    jaxpr = jax.make_jaxpr(gradient(module, policy, **options))(*arguments()).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    count = Counter()
    for e in equations(jaxpr):
        count["products"] += e.primitive is jax.lax.dot_general_p
        if e.primitive.name.startswith("jln_norm"):
            dtypes = e.params["request"].dtypes
            wanted = [n for n, d in zip(dtypes._fields, dtypes, strict=True) if jax.tree.leaves(d)]
            count[e.primitive.name, *wanted] += 1
    return count


@pytest.mark.parametrize("forward_mode", [False, True])  # True: as the modules call them
@pytest.mark.parametrize("name", POLICIES)
def test_every_product_is_made_once(name, forward_mode):
    """No policy recomputes a product that is an operation of JAX: each has one forward and two backward.

    Of our products one is a single operation each way together with its norm. Policies of jln compute it forward once;
    JAX's compute it twice, as they do not know its name. Of norms only statistics are made again.
    """
    assert made(jln.reference, POLICIES[name])["products"] == 3 * PRODUCTS
    count = made(jln, POLICIES[name], forward_mode=forward_mode)
    assert count["products"] == 3 * (PRODUCTS - 1)
    again = [k for k in count if k[0] == "jln_norm_linear_forward" and "y" in k]
    assert sum(count[k] for k in again) == (2 if "JAX" in name else 1)
    norms = {k[1:]: n for k, n in count.items() if k[0] == "jln_norm_forward"}
    assert sum(n for k, n in norms.items() if "y" in k) == 2  # in front of q, k, v and of gate, up
    statistics = {("total",)} if "statistics" in name else {("mean", "rstd"), ("total", "rstd")}
    assert {k for k in norms if "y" not in k} == statistics


def test_products_of_batches():
    (equation,) = jax.make_jaxpr(jax.lax.batch_matmul)(jnp.ones((2, 3, 3)), jnp.ones((2, 3, 3))).eqns
    assert {name for name in POLICIES if not keeps(POLICIES[name], equation)} == {n for n in POLICIES if "batch" in n}


@pytest.mark.parametrize("name", ["JAX's dots", "dots", "dots and statistics"])
def test_with_remat_the_backward_operation_makes_all_of_a_norm(name):
    """No statistics are made again in front of products that XLA makes, and the sum for what else reads it: `few`."""
    count = made(jln, POLICIES[name], remat=True)
    norms = {k[1:]: n for k, n in count.items() if k[0] == "jln_norm_forward"}
    # y of the norm in front of q, k, v, and of the one in front of few features, which with remat are two operations.
    assert norms == {("y",): 2, ("y", "total"): 1, ("total",): 1}
