"""A Linear that reads a norm's result and keeps what makes it again, compared with the reference in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jln
from jln._norm.arguments import Given
from jln._norm_linear import reading
from jln._norm_linear.operator import linear_of_normalised

ARGUMENTS = ("x", "scale", "offset", "kernel", "bias")
SHAPES = ((3, 5, 16), (16,), (16,), (16, 4, 75), (4, 75))  # more features than one kernel makes with the norm

# Two float64 programs of norms and products of 16 and 300 terms, differentiated twice.
close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)


def arrays(seed=0):
    r = np.random.default_rng(seed)
    return tuple(jnp.asarray(r.normal(size=shape)) for shape in SHAPES)


def ours(x, scale, offset, kernel, bias, of=jln.layer_norm):
    z = of(x, scale, offset, forward_mode=True)
    given = Given(x, scale=scale, offset=offset)
    return linear_of_normalised(z, given, kernel, bias, epsilon=1e-6, subtract_mean=True, precision=None)


def theirs(x, scale, offset, kernel, bias):
    y = jnp.tensordot(jln.reference.layer_norm(x, scale, offset), kernel, 1)
    return y if bias is None else y + jnp.expand_dims(bias, range(x.ndim - 1))


def loss(f):
    return lambda *a: jnp.sum(jnp.sin(f(*a)))


def both(transform, *args):
    jax.tree.map(close, *(jax.jit(transform(f))(*args) for f in (ours, theirs)))


SUBSETS = [names for n in (1, 2, 5) for names in itertools.combinations(range(5), n)]


@pytest.mark.parametrize("wanted", SUBSETS, ids=lambda wanted: "+".join(ARGUMENTS[i] for i in wanted))
def test_gradients_of_every_subset(wanted):
    both(lambda f: jax.grad(loss(f), wanted), *arrays())


@pytest.mark.parametrize("absent", [("scale",), ("offset",), ("bias",), ("scale", "offset", "bias")], ids="+".join)
def test_without_parameters(absent):
    args = [None if name in absent else a for name, a in zip(ARGUMENTS, arrays(), strict=True)]
    there = [i for i, a in enumerate(args) if a is not None]
    both(lambda f: f, *args)
    both(lambda f: jax.grad(loss(f), there), *args)


@pytest.mark.parametrize("moved", range(5), ids=ARGUMENTS)
def test_tangents_of_each_argument(moved):
    """The tangents of each argument, and its second derivatives by forward over reverse, are the reference's."""
    args = arrays()
    tangents = tuple(a if i == moved else jnp.zeros_like(a) for i, a in enumerate(arrays(1)))
    both(lambda f: lambda *a: jax.jvp(f, a, tangents), *args)

    def alone(f):
        def of(a):
            return f(*args[:moved], a, *args[moved + 1 :])

        return lambda a: (jax.jvp(of, (a,), (tangents[moved],)), jax.jvp(jax.grad(loss(of)), (a,), (tangents[moved],)))

    both(alone, args[moved])


@pytest.mark.parametrize(
    "mapped",
    [(0,), (3,), (4,), (0, 3), (1, 2), (0, 1, 2, 3, 4)],
    ids=lambda mapped: "+".join(ARGUMENTS[i] for i in mapped),
)
def test_vmap(mapped):
    axes = tuple(0 if i in mapped else None for i in range(5))
    args = tuple(jnp.stack([a, 2 * a, a + 1]) if i in mapped else a for i, a in enumerate(arrays()))
    tangents = arrays(1)
    both(lambda f: jax.vmap(jax.grad(loss(f), range(5)), axes), *args)
    both(lambda f: jax.grad(loss(jax.vmap(f, axes)), range(5)), *args)
    both(lambda f: jax.vmap(lambda *a: jax.jvp(f, a, tangents), axes), *args)


def test_scan_checkpoint_and_no_rows():
    args = arrays()

    def scanned(f):
        def step(x, _):
            return x + 0.01 * f(x, *args[1:]).reshape(3, 5, 300)[..., :16], None

        return jax.grad(lambda x: jnp.sum(jax.lax.scan(step, x, None, length=3)[0]))

    both(scanned, args[0])
    both(lambda f: jax.jit(jax.grad(jax.checkpoint(loss(f)), range(5))), *args)
    empty = (jnp.zeros((0, 16)), *args[1:])
    both(lambda f: jax.grad(loss(f), range(5)), *empty)


def equations(function, *args):
    def inner(jaxpr):
        for e in jaxpr.eqns:
            yield e
            for value in jax.tree.leaves(list(e.params.values()), is_leaf=lambda a: hasattr(a, "eqns")):
                if hasattr(value, "eqns"):
                    yield from inner(value)

    return list(inner(jax.make_jaxpr(function)(*args).jaxpr))


def test_few_features_do_not_read_the_result():
    x, scale, offset, kernel, bias = arrays()
    args = (a.astype("float32") for a in (x, scale, offset, kernel[:, 0, :7], bias[0, :7]))
    primitives = [e.primitive.name for e in equations(ours, *args)]
    assert "jln_norm_linear_forward" in primitives and "dot_general" not in primitives


@pytest.mark.parametrize(("wanted", "again"), [((0,), 0), ((4,), 0), ((3,), 1), ((0, 3), 1)])
def test_the_result_is_made_again_for_the_kernels_gradient_alone(wanted, again):
    args = arrays()
    forward = sum(e.primitive.name == "jln_norm_forward" for e in equations(ours, *args))
    gradient = sum(e.primitive.name == "jln_norm_forward" for e in equations(jax.grad(loss(ours), wanted), *args))
    assert forward == 1 and gradient == forward + again


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((4, 2), ("rows", "features"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    args = arrays()
    args = (jnp.concatenate([args[0], args[0][:1]]), *args[1:])
    of = jax.sharding.PartitionSpec
    specs = (of("rows"), of(), of(), of(None, "features"), of("features"))
    wanted, gradients = theirs(*args), jax.grad(loss(theirs), range(5))(*args)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]
        y = jax.jit(ours)(*placed)
        assert jax.typeof(y).sharding.spec == of("rows", None, "features", None)
        close(y, wanted)
        own = jax.jit(jax.grad(loss(ours), range(5)))(*placed)
    jax.tree.map(close, own, gradients)
    assert [jax.typeof(g).sharding.spec for g in own] == [jax.typeof(a).sharding.spec for a in placed]


def test_what_is_kept_is_no_more_than_what_is_read():
    """The rule keeps only what the wanted gradients read.

    Without the kernel's gradient it keeps nothing of the size of x.
    """
    x, scale, offset, kernel, bias = arrays()
    made_of = reading.norm.Operands(x, scale=scale[None, None], offset=offset[None, None])
    norm_linear = reading.NormLinear(reading.norm.Norm(-1, 1e-6, reading.norm.Switches(True)), None, (2,))
    settings = reading.Settings(norm_linear, "float64", "float64", None)
    operands = reading.Operands(x, kernel, bias, made_of)
    no_norm = reading.norm.Operands(None)
    for wanted, needed in (
        (reading.Operands("float64", None, None, no_norm), {"kernel"}),
        (reading.Operands(None, "float64", None, no_norm), {"x", "scale", "offset"}),
        (reading.Operands(None, None, "float64", no_norm), set()),
    ):
        _, saved = reading._saving(settings, operands, wanted)
        named = {"kernel": saved.kernel, **saved.made_of._asdict()}
        assert {n for n, a in named.items() if a is not None and not isinstance(a, reading.Unneeded)} == needed
