"""A small model under every transformation, in front of `jln.fuse` and behind: operators, values and gradients."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.interpreters import partial_eval
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from jln._fuse.bodies import CHECKPOINTS
from plain_norms import ALL, BLOCKS, EXAMPLES, PARAMETERS, R, S, X, block, head, layer, model, scanned
from proof import H, apart, equations, normal, operators

pytestmark = pytest.mark.usefixtures("promoted_ranks")
ARGUMENTS = PARAMETERS, EXAMPLES
IN_A_SCAN = {"layer_norm_linear": 1, "add_layer_norm_linear": 1, "layer_norm": 1}  # which keeps what its norms read
POLICIES = {
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
    "no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "statistics": jax.checkpoint_policies.save_only_these_names(jln.STATISTICS),
}


def mesh(*shape, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, ("data", "model")[: len(shape)], axis_types=(axis_type,) * len(shape))


def with_block(change, **options):
    """The small model whose block is changed."""
    return functools.partial(model, block=change(block, **options))


def checkpointed(name):
    named = lambda p, x: checkpoint_name(block(p, x), "kept")  # noqa: E731
    return functools.partial(model, block=jax.checkpoint(named, policy=POLICIES[name]))


def with_own_gradient(block):
    own = jax.custom_vjp(block)
    own.defvjp(lambda p, x: (block(p, x), (p, x)), lambda kept, dy: jax.vjp(block, *kept)[1](2 * dy))
    return own


def with_own_derivative(block):
    own = jax.custom_jvp(block)
    own.defjvp(lambda a, t: jax.jvp(block, a, jax.tree.map(lambda b: 2 * b, t)))
    return own


def three_branches(block):
    return lambda p, x: lax.switch(jnp.argmax(x[0, 0]) % 3, [block, lambda p, x: x, block], p, x)


def sharded(inner, outer):
    local = inner(lambda p, x: lax.pmean(model(p, x), "data"))
    return outer(jax.shard_map(local, mesh=mesh(4), in_specs=(P(), P("data")), out_specs=P()))


def constrained(block):
    sharding = NamedSharding(mesh(2, 2), P("data", None, "model"))
    return lambda p, x: lax.with_sharding_constraint(block(p, x), sharding)


def as_it_is(function):
    return function


# By name a function from `fuse` to a loss, and what is found in it.
WAYS = {
    "jitted blocks": (lambda fuse: fuse(with_block(jax.jit)), ALL),
    "tracers that it closes over": (
        lambda fuse: lambda p, x: jax.jit(lambda q: fuse(lambda x: model(q, x))(x))(p),
        ALL,
    ),
    "vmap outside": (lambda fuse: lambda p, x: jnp.sum(jax.vmap(fuse(model), (None, 0))(p, x)), ALL),
    "scan": (lambda fuse: fuse(scanned), IN_A_SCAN),
    # In a checkpoint a norm hands on the x that a sum reads, too.
    "scan with a checkpoint": (
        lambda fuse: jax.jit(fuse(functools.partial(scanned, block=jax.checkpoint(block)))),
        {"layer_norm": 1, "add_layer_norm": 2},
    ),
    "a scan's body": (
        lambda fuse: functools.partial(scanned, block=fuse(block)),
        {"layer_norm": 1, "add_layer_norm": 1},
    ),
    **{
        f"checkpoint_{name}": (
            lambda fuse, name=name: fuse(checkpointed(name)),
            {"layer_norm": 1, f"add_layer_norm{'_linear' if name == 'no_batch' else ''}": 2 * BLOCKS},
        )
        for name in ("names", "no_batch", "nothing", "everything", "statistics")
    },
    "three branches": (
        lambda fuse: fuse(with_block(three_branches)),
        {"layer_norm": 2 * BLOCKS + 1, "add_layer_norm": 2 * BLOCKS},
    ),
    "a gradient of its own": (lambda fuse: fuse(with_block(with_own_gradient)), {"layer_norm": 1}),
    "a derivative of its own": (lambda fuse: fuse(with_block(with_own_derivative)), {"layer_norm": 1}),
    "shard_map outside": (lambda fuse: sharded(fuse, as_it_is), ALL),
    "shard_map inside": (lambda fuse: sharded(as_it_is, fuse), ALL),
    "a mesh of automatic axes": (lambda fuse: jax.jit(fuse(with_block(constrained))), ALL),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_transformation_changes_nothing_and_loses_nothing(name):
    made, finds = WAYS[name]
    functions = made(as_it_is), made(jln.fuse)
    routes = jln.explain(functions[1], *ARGUMENTS)
    found = collections.Counter(r.layer.removeprefix("jln.") for r in routes if r.path != "plain")
    wanted, got = jax.jit(lambda *args: [jax.value_and_grad(f, (0, 1))(*args) for f in functions])(*ARGUMENTS)
    assert (dict(found), apart(got, wanted) <= 1e-11) == (finds, True)


def test_a_mesh_of_explicit_axes():
    on = mesh(2, 2, axis_type=AxisType.Explicit)
    with jax.set_mesh(on):
        x = jax.device_put(EXAMPLES, NamedSharding(on, P("data", None, None)))
        loss = with_block(lambda block: lambda p, x: jax.sharding.reshard(block(p, x), P("data", None, None)))
        functions = loss, jln.fuse(loss)
        wanted, got = jax.jit(lambda *args: [jax.value_and_grad(f)(*args) for f in functions])(PARAMETERS, x)
        assert apart(got, wanted) <= 1e-11
        assert operators(loss, PARAMETERS, x) == ALL


def test_the_sharding_of_a_product_stays():
    def product(x, kernel):
        return jnp.einsum("...h,hn->...n", layer(x), kernel, out_sharding=P(None, None, "model"))

    with jax.set_mesh(mesh(2, 2, axis_type=AxisType.Explicit)):
        arrays = jax.device_put(X, P("data", None, None)), jax.device_put(normal(H, 8), P(None, "model"))
        types = [jax.typeof(jax.jit(f)(*arrays)) for f in (product, jln.fuse(product, linears=True))]
    assert types[1] == types[0]


@pytest.mark.parametrize(("policy", "again"), [("dots", 0), ("everything", 0), ("nothing", 2 * BLOCKS)])
def test_what_a_checkpoint_makes_again_of_norms(policy, again):
    """A norm runs forward once where products alone are kept: its backward operation makes its statistics again."""
    loss = jln.fuse(with_block(jax.checkpoint, policy=POLICIES[policy]))
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*ARGUMENTS).jaxpr
    program, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    assert sum(e.primitive.name == "jln_norm_forward" for e in equations(program)) == 2 * BLOCKS + 1 + again


def test_layers_that_share_a_function_are_rewritten_once_for_each_policy():
    policies = [POLICIES[name] for name in ("nothing", "dots", "nothing")]
    layers = [functools.partial(jax.checkpoint(block, policy=policy), PARAMETERS["blocks"][0]) for policy in policies]
    fused = jln.fuse(lambda x: layers[2](layers[1](layers[0](x))))
    program = jax.make_jaxpr(fused)(EXAMPLES)
    checkpoints = [(e.params["policy"], id(e.params["jaxpr"])) for e in program.eqns if e.primitive.name in CHECKPOINTS]
    assert [policy for policy, _ in checkpoints] == policies and checkpoints[0] == checkpoints[2]
    assert len(jln.explain(fused, EXAMPLES)) == 6


def test_a_loop_that_ends_by_itself():
    def loss(p, x):
        turn = lambda a: (a[0] + 1, block(p["blocks"][0], a[1]))  # noqa: E731
        return head(p, lax.while_loop(lambda a: (a[0] < 3) & (jnp.sum(a[1] ** 2) < 1e9), turn, (0, x))[1])

    assert operators(loss, *ARGUMENTS) == {"layer_norm": 2, "add_layer_norm": 1}
    assert apart(jax.jit(jln.fuse(loss))(*ARGUMENTS), jax.jit(loss)(*ARGUMENTS)) <= 1e-11


def test_derivatives_of_derivatives_and_forward_mode():
    one_block = lambda x: head(PARAMETERS, block(PARAMETERS["blocks"][0], x))  # noqa: E731
    x, t = EXAMPLES[:1, :2], np.cos(EXAMPLES[:1, :2])

    def derivatives(reverse, forward):
        product = jax.grad(lambda x: jnp.vdot(jax.grad(reverse)(x), t))(x)
        each = jax.vmap(jax.grad(reverse))(EXAMPLES[:, None, :1])
        return product, each, jax.jvp(forward, (x,), (t,)), jax.hessian(forward)(x)

    fused = jln.fuse(one_block), jln.fuse(one_block, forward_mode=True)
    wanted, got = jax.jit(lambda: [derivatives(one_block, one_block), derivatives(*fused)])()
    assert apart(got, wanted) <= 1e-10


@pytest.mark.parametrize("transform", [jax.jit, as_it_is], ids=["jit", "eager"])
def test_effects_keep_their_order_and_number(transform):
    """An operator reads its scale where the sum is made, which is in front of the scale's own effect."""

    def loss(told, x, r, s):
        def ordered(what, a):
            tell = lambda a: np.asarray(a) + (told.append(what) or len(told))  # noqa: E731
            return io_callback(tell, jax.ShapeDtypeStruct(a.shape, a.dtype), a, ordered=True)

        total = r + x
        first = ordered("first", jnp.sum(total))
        jax.debug.callback(lambda a: told.append(round(float(a), 6)), first, ordered=True)
        return layer(total, ordered("scale", s)) * first + total

    results = []
    for fuse in (as_it_is, jln.fuse):
        told = []
        made = transform(fuse(functools.partial(loss, told)))(X, R, S)
        jax.effects_barrier()
        results.append((told, made))
    (wanted, a), (got, b) = results
    assert got == wanted and len(got) == 3
    assert apart(b, a) <= 1e-11


def test_references_are_read_and_written_in_order():
    def loss(x, r, s):
        scale, total = jax.new_ref(s), r + x
        scale[...] *= jnp.max(total)
        y = layer(total, scale[...])
        scale[...] = jnp.zeros_like(s)
        lax.fori_loop(0, 3, lambda i, _: scale.__setitem__(..., scale[...] + layer(total, s)[0, 0, 0]), None)
        return jnp.sum(jnp.sin(y * scale[...] + total))

    assert operators(loss, X, R, S) == {"layer_norm": 2}
    assert apart(jax.jit(jln.fuse(loss))(X, R, S), jax.jit(loss)(X, R, S)) <= 1e-11
