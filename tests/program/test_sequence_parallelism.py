"""Rung 4: data that eight H200s send each other under Megatron's sequence parallelism, beside plain jnp."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import program
from absent_gpu import struct

DATA, TENSOR = 2, 4
B, T, H = 4, 512, 256
LOCAL, GATHERED = 2 * B // DATA * T // TENSOR * H, 2 * B // DATA * T * H  # bytes in bfloat16: a device's rows, all
BY_ROWS, BY_FEATURES = P("data", "tensor"), P("data", None, "tensor")
COLUMNS, WHOLE_SEQUENCES = P(None, "tensor"), P("data")
FEATURES = {"many": ((1024,),), "few": ((128,),), "several": ((1024,), (256,), (256,)), "heads": ((8, 128), (4, 128))}


def on(spec):
    return NamedSharding(program.mesh("h200", (DATA, TENSOR), ("data", "tensor")), spec)


def array(*shape, spec=None, dtype="bfloat16"):
    return struct(*shape, dtype=dtype, sharding=on(spec or P()))


def parameters(features):
    scale = array(H, dtype="float32")
    return scale, scale, tuple(array(H, *f, spec=COLUMNS) for f in features)


def asked(a, spec):
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, on(spec)), a)


def gradient(f, arguments):
    """Return a step of the gradients of all arguments, each with its argument's sharding."""

    def step(*a):
        gradients = jax.grad(
            lambda *a: sum(jnp.sum(jnp.sin(r.astype("float32"))) for r in jax.tree.leaves(f(*a))), range(len(a))
        )(*a)
        return jax.tree.map(lambda g, like: jax.lax.with_sharding_constraint(g, like.sharding), gradients, arguments)

    return step


def communicated(f, arguments):
    """Return {kind: (number of collectives, bytes)}; a gather's bytes are its result's, a scatter's its operand's."""
    report = program.compile_for(f, *arguments, devices=DATA * TENSOR)
    kinds = {c.kind for c in report.collectives}
    of = {k: [(c.times, c.bytes) for c in report.collectives if c.kind == k] for k in kinds}
    return {k: (sum(n for n, _ in c), sum(n * size for n, size in c)) for k, c in of.items()}


@pytest.mark.parametrize("features", FEATURES)
def test_z_is_gathered_and_dz_scattered_in_16_bits(features):
    """The forward gathers z once, and the gradient, whose loss reads y, gathers twice and scatters dz once.

    That holds for few features and many, and for several Linears.
    """
    arguments = array(B, T, H, spec=BY_ROWS), *parameters(FEATURES[features])

    def layer(module):
        return lambda *a: asked(module.layer_norm_linear(*a), BY_FEATURES)

    assert communicated(layer(jln), arguments) == {"all-gather": (1, GATHERED)}
    ours, plain = (communicated(gradient(layer(m), arguments), arguments) for m in (jln, jln.reference))
    assert ours["all-gather"] == (2, 2 * GATHERED) and ours["reduce-scatter"] == (1, GATHERED)
    assert ours.keys() == plain.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    assert all(ours[kind][1] <= plain[kind][1] for kind in ours)


def holding_z(names):
    """A norm and products of its z, which has this name, under a checkpoint that holds these names alone."""

    def layer(x, scale, offset, kernels):
        z = checkpoint_name(asked(jln.layer_norm(x, scale, offset), WHOLE_SEQUENCES), "z")
        return asked(tuple(z @ kernel for kernel in kernels), BY_FEATURES)

    return jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))


def test_a_policy_chooses_whether_z_is_gathered_again():
    """A norm and Linears by themselves hold the gathered z: under a checkpoint where the policy names it."""
    arguments = array(B, T, H, spec=BY_ROWS), *parameters(FEATURES["several"])
    gathers = {names: communicated(gradient(holding_z(names), arguments), arguments) for names in ((), ("z",))}
    assert {names: kinds["all-gather"] for names, kinds in gathers.items()} == {
        (): (2, 2 * GATHERED),
        ("z",): (1, GATHERED),
    }


@pytest.mark.parametrize("features", [None, "many", "few"])
def test_a_scatter_feeds_local_rows(features):
    """One scatter adds up the shares of a product by rows, the norm is local, and only a product gathers z."""
    hidden, lead = array(B, T, 1024, spec=BY_FEATURES), array(1024, H, spec=P("tensor"))
    scale, _, kernels = parameters(FEATURES[features or "few"])
    arguments = hidden, lead, array(B, T, H, spec=BY_ROWS), scale, kernels

    def layer(hidden, lead, residual, scale, kernels):
        if features is None:
            y, total = jln.add_rms_norm(hidden @ lead, residual, scale)
            return asked(y, BY_ROWS), total
        y, total = jln.add_rms_norm_linear(hidden @ lead, residual, scale, kernels)
        return asked(y, BY_FEATURES), total

    found = communicated(layer, arguments)
    assert found.pop("reduce-scatter") == (1, GATHERED)
    assert found == ({} if features is None else {"all-gather": (1, GATHERED)})
