"""Compiled gradients on a mesh of eight CPU devices: what the devices send each other."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from catalogue import FORMS
from matrix import OPTIONAL, bind, communication, every, gradient, loss, mesh, operands
from placements import CLOSE, placed

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


# Placements in which XLA's own products communicate, too.
BESIDE_PLAIN = {
    "add_layer_norm_linear": ("rows over both axes", "parameters stored in parts", "H of x alone"),
    "add_rms_norm_linear, x_bias and gate": (
        "rows and columns, kernel stored in parts",
        "features stored in parts",
        "H",
    ),
}


@pytest.mark.parametrize(("name", "placement"), [(n, p) for n, placements in BESIDE_PLAIN.items() for p in placements])
def test_no_more_is_communicated_than_by_plain_jnp(name, placement):
    """A gradient communicates at most the bytes of plain jnp's plus those of the norm's and the sum's parameters.

    A device may have to send its parts of those parameters' gradients.
    """
    function, _, put = placed(name, placement, mesh())
    plain = bind(name, OPTIONAL[name], jln.reference)[0]
    ours, plains = (communication(jax.jit(gradient(f, put)).lower(*put).compile())[1] for f in (function, plain))
    of_norm = sum(operands(name)[n].nbytes for n in ("scale", "offset", "x_bias", "gate") if n in operands(name))
    assert ours.total() <= plains.total() + of_norm


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
    put = jax.device_put(x, NamedSharding(whole, P("data")))

    def compiled(f):
        step = jax.jit(jax.grad(lambda x, *rest: loss(f)(x.reshape(shape), *rest), every((x, *rest))))
        return step.lower(put, *rest).compile()

    ours, plain = compiled(function), compiled(bind(name, OPTIONAL[name], jln.reference)[0])
    chex.assert_trees_all_close(ours(put, *rest), plain(put, *rest), **CLOSE)
    (count, size), (plain_count, plain_size) = communication(ours), communication(plain)
    assert count.keys() == {"all-reduce"} == plain_count.keys()
    assert size["all-reduce"] <= plain_size["all-reduce"]
    # dkernel, XLA's own product, is added up over one part of the mesh axis after the other.
    assert count["all-reduce"] == (1 if name == "layer_norm" else 3)
