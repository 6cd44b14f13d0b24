"""Compiled gradients on a mesh of eight CPU devices: what the devices send each other."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import program
import workbench
from catalogue import FORMS
from matrix import OPTIONAL, bind, communication, every, gradient, loss, mesh, operands
from placements import CLOSE, placed, put

# The numbers of all-reduces, all-gathers and reduce-scatters of a gradient. XLA makes one all-reduce of all that is
# added up over the same devices at the same time.
EXPECTED = {
    ("layer_norm", "rows"): (1, 0, 0),
    ("add_layer_norm", "rows"): (1, 0, 0),
    ("add_layer_norm, x_bias and gate", "rows"): (1, 0, 0),
    ("add_rms_norm, x_bias and gate", "rows over both axes"): (1, 0, 0),
    ("add_layer_norm, x_bias and gate", "H"): (4, 0, 0),  # as layer_norm, with dx_bias and dgate in the last
    ("layer_norm", "H"): (4, 0, 0),  # mean; variance; c1 with c2; dscale with doffset
    ("rms_norm", "H"): (3, 0, 0),
    ("layer_norm_linear", "rows"): (1, 0, 0),
    ("rms_norm_linear", "rows over both axes"): (3, 0, 0),  # dkernel, XLA's own product, over one axis after the other
    ("layer_norm_linear", "columns"): (1, 0, 0),  # dx with dscale and doffset
    ("layer_norm_linear", "rows and columns"): (2, 0, 0),  # as "columns", and the parameters' gradients over the rows
    ("layer_norm_linear", "rows and columns, kernel stored in parts"): (2, 2, 0),  # the kernel for each pass
    ("layer_norm_linear", "H"): (5, 0, 0),  # as layer_norm, and the product
    ("add_layer_norm_linear", "parameters stored in parts"): (1, 4, 0),
    ("add_rms_norm_linear, x_bias and gate", "features stored in parts"): (1, 2, 0),
}


@pytest.mark.parametrize(("name", "placement"), EXPECTED)
def test_communication(name, placement):
    function, _, given = placed(name, placement, mesh())
    count, size = communication(jax.jit(gradient(function, given)).lower(*given).compile())
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    assert tuple(count[k] for k in kinds) == EXPECTED[name, placement]
    assert count.total() == sum(EXPECTED[name, placement])
    if EXPECTED[name, placement] == (1, 0, 0) and placement != "columns":
        assert size["all-reduce"] == sum(operands(name)[a.name].nbytes for a in FORMS[name].parameters)


def test_vmap_over_a_sharded_axis_gathers_nothing():
    function, (x, *rest) = bind("layer_norm", "so")
    xs = jax.device_put(jnp.stack([x, 2 * x, x + 1, -x]), NamedSharding(mesh(), P("data")))
    step = jax.jit(jax.vmap(gradient(function, [x, *rest]), (0, None, None)))
    assert communication(step.lower(xs, *rest).compile())[0].total() == 0
    expected = jax.vmap(gradient(bind("layer_norm", "so", jln.reference)[0], [x, *rest]), (0, None, None))(xs, *rest)
    chex.assert_trees_all_close(step(xs, *rest), expected, **CLOSE)


@pytest.mark.parametrize(("name", "shape"), [("layer_norm", (2, 4, 2, 8)), ("layer_norm_linear", (4, 2, 2, 8))])
def test_a_part_of_a_mesh_axis(name, shape):
    """Gradients are right where a reshape, as into microbatches, splits the rows and the mesh axis that splits them.

    They communicate by all-reduces alone, of no more bytes than plain jnp's.
    """
    whole = Mesh(np.array(jax.devices()[:8]), ("data",))
    function, (x, *rest) = bind(name, OPTIONAL[name])
    x = jnp.concatenate([x, 2 * x]).reshape(16, *x.shape[2:])
    spread = jax.device_put(x, NamedSharding(whole, P("data")))

    def compiled(f):
        step = jax.jit(jax.grad(lambda x, *rest: loss(f)(x.reshape(shape), *rest), every((x, *rest))))
        return step.lower(spread, *rest).compile()

    ours, plain = compiled(function), compiled(bind(name, OPTIONAL[name], jln.reference)[0])
    chex.assert_trees_all_close(ours(spread, *rest), plain(spread, *rest), **CLOSE)
    (count, size), (plain_count, plain_size) = communication(ours), communication(plain)
    assert count.keys() == {"all-reduce"} == plain_count.keys()
    assert size["all-reduce"] <= plain_size["all-reduce"]
    # dkernel, XLA's own product, is added up over one part of the mesh axis after the other.
    assert count["all-reduce"] == (1 if name == "layer_norm" else 3)


@pytest.mark.usefixtures("promoted_ranks")
@pytest.mark.parametrize("linears", [False, True], ids=["norms", "linears"])
def test_a_result_that_is_split_is_gathered_once_by_a_fused_program(linears):
    """MaxText splits the features of a norm's result over "tensor", in front of several products, in a checkpoint."""
    stream = NamedSharding(mesh(), P("data", None, "tensor"))
    split = functools.partial(jax.lax.with_sharding_constraint, shardings=stream)

    def layer(p, x):
        x = split(x)
        y = split(x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * p["s"])
        q, k, v = (y @ p[name] for name in "qkv")
        return x + split((jnp.sin(q) * jnp.cos(k) * v) @ p["o"])

    def loss(p, x):
        return jnp.sum(jax.lax.scan(lambda x, p: (jax.checkpoint(layer)(p, x), None), x, p)[0] ** 2)

    sizes = {"s": (2, 32), "q": (2, 32, 64), "k": (2, 32, 64), "v": (2, 32, 64), "o": (2, 64, 32)}
    specs = dict.fromkeys("qkv", P(None, None, "tensor")) | {"s": P(None, "tensor"), "o": P(None, "tensor")}
    given = {n: workbench.normal(i, size, "float32") / 4 for i, (n, size) in enumerate(sizes.items())}
    given = put(given, specs, mesh())
    x = jax.device_put(workbench.normal(9, (4, 16, 32), "float32"), stream)
    counts, gradients = [], []
    for function in (loss, jln.fuse(loss, linears=linears)):
        compiled = jax.jit(jax.grad(function, (0, 1))).lower(given, x).compile()
        found = program.collectives(compiled.as_text())
        counts.append((sum(c.times for c in found), sum(c.times * c.bytes for c in found)))
        gradients.append(compiled(given, x))
    (times, size), (own_times, own_size) = counts
    assert own_times <= times and own_size <= size
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * jnp.abs(b).max()), *gradients)
