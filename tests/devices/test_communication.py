"""Compiled gradients on a mesh of eight CPU devices: what the devices send each other."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
import workbench
from catalogue import FORMS
from matrix import OPTIONAL, bind, communication, every, gradient, loss, mesh, operands
from placements import CLOSE, PLACEMENTS, placed

if len(jax.devices()) < 8:
    pytest.skip("needs eight devices", allow_module_level=True)


# The numbers of all-reduces, all-gathers and reduce-scatters of a gradient. XLA makes one all-reduce of all that is
# added up over the same devices at the same time.
EXPECTED = {
    ("layer_norm", "rows"): (1, 0, 0),
    ("rms_norm", "rows"): (1, 0, 0),
    ("add_layer_norm", "rows"): (1, 0, 0),
    ("add_rms_norm", "rows over both axes"): (1, 0, 0),
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
}


@pytest.mark.parametrize(("name", "placement"), EXPECTED)
def test_communication(name, placement):
    function, _, put = placed(name, placement, mesh())
    count, size = communication(jax.jit(gradient(function, put)).lower(*put).compile())
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    assert tuple(count[k] for k in kinds) == EXPECTED[name, placement]
    assert count.total() == sum(EXPECTED[name, placement])
    if EXPECTED[name, placement] == (1, 0, 0) and placement != "columns":
        assert size["all-reduce"] == sum(operands(name)[a.name].nbytes for a in FORMS[name].parameters)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["add_layer_norm_linear", "rms_norm_linear", "add_rms_norm_linear, x_bias and gate"])
def test_no_more_is_communicated_than_by_plain_jnp(name, placement):
    """A gradient communicates at most the bytes of plain jnp's plus those of the norm's and the sum's parameters.

    A device may have to send its parts of those parameters' gradients.
    """
    function, _, put = placed(name, placement, mesh())
    plain = bind(name, OPTIONAL[name], jln.reference)[0]
    ours, plains = (communication(jax.jit(gradient(f, put)).lower(*put).compile())[1] for f in (function, plain))
    of_norm = sum(operands(name)[n].nbytes for n in ("scale", "offset", "x_bias", "gate") if n in operands(name))
    assert ours.total() <= plains.total() + of_norm


def test_sequence_parallelism():
    """Megatron's sequence parallelism gathers only rows and no kernel, and sends nothing from all to all.

    The mesh axis that splits the features splits the sequence outside of them. The forward pass gathers z once for both
    products. The backward pass makes z again and gathers it once more, and gathers the last product's cotangent.
    """
    width, features = 64, 512  # more features than one kernel multiplies

    def on(*spec):
        return NamedSharding(mesh(), P(*spec))

    x = jax.device_put(workbench.normal(0, (4, 16, width), "float32"), on("data", "tensor"))
    scale = jax.device_put(jnp.ones(width, "float32"), on())
    kernels = tuple(workbench.normal(i, (width, features), "float32") / 8 for i in (1, 2))
    kernels = jax.device_put(kernels, on(None, "tensor"))
    last = jax.device_put(workbench.normal(3, (features, width), "float32") / 23, on("tensor", None))

    def layer(module):
        def call(x, scale, kernels, last):
            y, total = module.add_rms_norm_linear(x, x, scale, kernels)
            gate, up = (jax.lax.with_sharding_constraint(a, on("data", None, "tensor")) for a in y)
            branch = jax.lax.with_sharding_constraint((jnp.sin(gate) * up) @ last, on("data", "tensor"))
            return total + branch

        return call

    arguments = x, scale, kernels, last
    forward = jax.jit(layer(jln), out_shardings=on("data", "tensor")).lower(*arguments).compile()
    count, size = communication(forward)
    assert count["all-gather"] == 1 and size["all-gather"] == 4 * x.size // 4  # of one part of the data
    wanted = tuple(jax.tree.map(lambda a: a.sharding, arguments))
    step, plain = (
        jax.jit(jax.grad(lambda *a, m=m: jnp.sum(jnp.sin(layer(m)(*a))), every(arguments)), out_shardings=wanted)
        for m in (jln, jln.reference)
    )
    count, size = communication(step.lower(*arguments).compile())
    assert count.keys() == {"all-gather", "all-reduce"} and count["all-gather"] == 3
    assert size["all-gather"] == 3 * 4 * x.size // 4
    chex.assert_trees_all_close(step(*arguments), plain(*arguments), rtol=1e-4, atol=1e-4)


def test_vmap_over_a_sharded_axis_gathers_nothing():
    function, (x, *rest) = bind("layer_norm", "so")
    xs = jax.device_put(jnp.stack([x, 2 * x, x + 1, -x]), NamedSharding(mesh(), P("data")))
    step = jax.jit(jax.vmap(gradient(function, [x, *rest]), (0, None, None)))
    assert communication(step.lower(xs, *rest).compile())[0].total() == 0
    expected = jax.vmap(gradient(bind("layer_norm", "so", jln.reference)[0], [x, *rest]), (0, None, None))(xs, *rest)
    chex.assert_trees_all_close(step(xs, *rest), expected, **CLOSE)


@pytest.mark.parametrize("name", ["layer_norm", "layer_norm_linear"])
@pytest.mark.parametrize("shape", [(2, 4, 2, 8), (4, 2, 2, 8)], ids=str)
def test_a_part_of_a_mesh_axis(shape, name):
    """Gradients are right where a reshape, as into microbatches, splits the rows and the mesh axis that splits them.

    They communicate by all-reduces alone, of no more bytes than plain jnp's.
    """
    whole = Mesh(np.array(jax.devices()[:8]), ("data",))
    function, (x, *rest) = bind(name, OPTIONAL[name])
    x = jnp.concatenate([x, 2 * x]).reshape(16, *x.shape[2:])
    put = jax.device_put(x, NamedSharding(whole, P("data")))

    def step(f):
        return jax.jit(jax.grad(lambda x, *rest: loss(f)(x.reshape(shape), *rest), every((x, *rest))))

    exact = bind(name, OPTIONAL[name], jln.reference)[0]
    chex.assert_trees_all_close(step(lambda *a: function(*a))(put, *rest), step(exact)(x, *rest), **CLOSE)
    count, size = communication(step(lambda *a: function(*a)).lower(put, *rest).compile())
    plain, plain_size = communication(step(lambda *a: exact(*a)).lower(put, *rest).compile())
    assert count.keys() == {"all-reduce"} == plain.keys()
    assert size["all-reduce"] <= plain_size["all-reduce"]
    # dkernel, XLA's own product, is added up over one part of the mesh axis after the other.
    assert count["all-reduce"] == (1 if name == "layer_norm" else 3)
