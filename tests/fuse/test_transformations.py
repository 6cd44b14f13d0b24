"""A small model under every transformation, in front of `jln.fuse` and behind: operators, values and gradients."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jln
from jln._fuse.bodies import CHECKPOINTS
from proof import equations, normal, operators
from small_model import (
    ALL,
    IN_A_SCAN,
    IN_BODIES,
    IN_ONE_BODY,
    PARAMETERS,
    H,
    X,
    apart,
    block,
    head,
    mesh,
    model,
    norm,
    scanned,
)

pytestmark = pytest.mark.usefixtures("promoted_ranks")


WAYS = {}


def way(finds):
    """Return a decorator for a function that makes a loss of a `fuse`, in which so much is found."""

    def add(function):
        WAYS[function.__name__] = function, finds
        return function

    return add


@way(ALL)
def a_plain_call(fuse):
    return fuse(model)


@way(ALL)
def jit_outside(fuse):
    return jax.jit(fuse(model))


@way(ALL)
def jit_inside(fuse):
    return fuse(jax.jit(model))


@way(ALL)
def jitted_blocks(fuse):
    return fuse(functools.partial(model, block=jax.jit(block)))


@way(ALL)
def closed_over_tracers(fuse):
    return lambda p, x: jax.jit(lambda q: fuse(lambda x: model(q, x))(x))(p)


@way(ALL)
def vmap_outside(fuse):
    return lambda p, x: jnp.sum(jax.vmap(fuse(model), (None, 0))(p, x))


@way(ALL)
def vmap_inside(fuse):
    return fuse(lambda p, x: jnp.sum(jax.vmap(model, (None, 0))(p, x)))


@way({"layer_norm": 1, "add_layer_norm": 6})
def vmap_over_parameters(fuse):
    def loss(p, x):
        ensemble = jax.tree.map(lambda a: jnp.stack([a, 0.9 * a]), p)
        return jnp.sum(jax.vmap(fuse(model), (0, None))(ensemble, x))

    return loss


@way(IN_A_SCAN)
def scan_over_layers(fuse):
    return fuse(scanned)


@way({"layer_norm": 1, "add_layer_norm": 2})  # in a checkpoint a norm hands on the x that a sum reads, too
def scan_under_jit_with_a_checkpoint(fuse):
    return jax.jit(fuse(functools.partial(scanned, block=jax.checkpoint(block))))


@way({"layer_norm": 1, "add_layer_norm": 1})
def fuse_as_a_scans_body(fuse):
    return functools.partial(scanned, block=fuse(block))


POLICIES = {
    "names": jax.checkpoint_policies.save_only_these_names("kept"),
    "no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "statistics": jax.checkpoint_policies.save_only_these_names(jln.STATISTICS),
}


def _named(p, x):
    return checkpoint_name(block(p, x), "kept")


for _name, _policy in POLICIES.items():

    def _checkpointed(fuse, policy=_policy):
        return fuse(functools.partial(model, block=jax.checkpoint(_named, policy=policy)))

    _how = "_linear" if _name in ("dots", "no_batch") else ""
    WAYS[f"checkpoint_{_name}"] = _checkpointed, {"layer_norm": 1, f"add_layer_norm{_how}": 6}


@way(ALL)
def a_checkpoint_around(fuse):
    return jax.checkpoint(fuse(model))


@way(IN_BODIES)
def branches(fuse):
    chosen = lambda p, x: lax.cond(jnp.sum(x) > 0, block, lambda p, x: x * 2, p, x)  # noqa: E731
    return fuse(functools.partial(model, block=chosen))


@way({"layer_norm": 7, "add_layer_norm": 6})
def three_branches(fuse):
    dynamic = lambda p, x: lax.switch(jnp.argmax(x[0, 0]) % 3, [block, lambda p, x: x, block], p, x)  # noqa: E731
    return fuse(functools.partial(model, block=dynamic))


@way(IN_A_SCAN)
def a_loop_of_known_length(fuse):
    return fuse(lambda p, x: head(p, lax.fori_loop(0, 3, lambda i, x: block(p["blocks"][0], x), x)))


@way({"layer_norm": 1})
def bodies_with_a_derivative_of_their_own(fuse):
    own = jax.custom_vjp(block)
    own.defvjp(lambda p, x: (block(p, x), (p, x)), lambda kept, dy: jax.vjp(block, *kept)[1](2 * dy))
    return fuse(functools.partial(model, block=own))


@way({"layer_norm": 1})
def bodies_with_a_forward_derivative_of_their_own(fuse):
    own = jax.custom_jvp(block)
    own.defjvp(lambda a, t: jax.jvp(block, a, jax.tree.map(lambda b: 2 * b, t)))
    return fuse(functools.partial(model, block=own))


@way(ALL)
def random_numbers(fuse):
    def dropped(p, x):
        key = jax.random.key(3)
        return model(p, jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0))

    return fuse(dropped)


@way(ALL)
def a_bound_method(fuse):
    class Model:
        def __init__(self, scale):
            self.scale = scale

        def loss(self, p, x):
            return self.scale * model(p, x)

    return fuse(Model(2.0).loss)


@way(ALL)
def a_decorated_method(fuse):
    class Model:
        scale = 2.0

        @fuse
        def loss(self, p, x):
            return self.scale * model(p, x)

    return Model().loss


@way(ALL)
def a_callable_object(fuse):
    class Model:
        def __call__(self, p, x):
            return model(p, x)

    return fuse(Model())


@way(ALL)
def a_partial_function(fuse):
    return fuse(functools.partial(lambda scale, p, x: scale * model(p, x), 3.0))


@way(ALL)
def fused_twice(fuse):
    return fuse(fuse(model))


def _sharded(check_vma, outside):
    def made(fuse):
        on = mesh(4)
        inner, outer = (lambda f: f, fuse) if outside else (fuse, lambda f: f)
        local = inner(lambda p, x: lax.pmean(model(p, x), "data"))
        specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
        return outer(jax.shard_map(local, mesh=on, **specs))

    return made


for _check, _how in ((False, ""), (True, "_checked")):
    WAYS[f"shard_map_outside{_how}"] = _sharded(_check, False), ALL
    WAYS[f"shard_map_inside{_how}"] = _sharded(_check, True), ALL


@way(ALL)
def a_mesh_of_automatic_axes(fuse):
    sharding = NamedSharding(mesh(2, 2), P("data", None, "model"))
    constrained = lambda p, x: lax.with_sharding_constraint(block(p, x), sharding)  # noqa: E731
    return jax.jit(fuse(functools.partial(model, block=constrained)))


@pytest.mark.parametrize("name", WAYS)
def test_a_transformation_changes_nothing_and_loses_nothing(name):
    made, finds = WAYS[name]
    fused, untouched = made(jln.fuse), made(lambda f: f)
    routes = jln.explain(fused, PARAMETERS, X)
    found = collections.Counter(r.layer.removeprefix("jln.") for r in routes if r.path != "plain")
    wanted = jax.jit(jax.value_and_grad(untouched, (0, 1)))(PARAMETERS, X)
    got = jax.jit(jax.value_and_grad(fused, (0, 1)))(PARAMETERS, X)
    assert (dict(found), apart(got, wanted) <= 1e-11) == (finds, True)


@pytest.mark.parametrize(("policy", "again"), [("dots", 0), ("everything", 0), ("nothing", 6)])
def test_what_a_checkpoint_makes_again_of_norms(policy, again):
    """A norm runs forward once where products alone are kept: its backward operation makes its statistics again."""
    loss = jln.fuse(functools.partial(model, block=jax.checkpoint(block, policy=POLICIES[policy])))
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(PARAMETERS, X).jaxpr
    program, _ = partial_eval.dce_jaxpr(program, [True] * len(program.outvars))
    assert sum(e.primitive.name == "jln_norm_forward" for e in equations(program)) == 7 + again


def test_layers_that_share_a_function_are_rewritten_once_for_each_policy():
    policies = [POLICIES[name] for name in ("nothing", "dots", "nothing")]
    layers = [functools.partial(jax.checkpoint(block, policy=policy), PARAMETERS["blocks"][0]) for policy in policies]
    fused = jln.fuse(lambda x: layers[2](layers[1](layers[0](x))))
    program = jax.make_jaxpr(fused)(X)
    checkpoints = [(e.params["policy"], id(e.params["jaxpr"])) for e in program.eqns if e.primitive.name in CHECKPOINTS]
    assert [policy for policy, _ in checkpoints] == policies and checkpoints[0] == checkpoints[2]
    assert len(jln.explain(fused, X)) == 6


def test_a_gradient_without_jit():
    wanted, got = (jax.grad(f, (0, 1))(PARAMETERS, X) for f in (model, jln.fuse(model)))
    assert apart(got, wanted) <= 1e-11


def test_the_gradient_of_each_example():
    wanted, got = (jax.vmap(jax.grad(f), (None, 0))(PARAMETERS, X) for f in (model, jln.fuse(model)))
    assert apart(got, wanted) <= 1e-11


def test_a_loop_that_ends_by_itself():
    def loss(p, x):
        turn = lambda a: (a[0] + 1, block(p["blocks"][0], a[1]))  # noqa: E731
        return head(p, lax.while_loop(lambda a: (a[0] < 3) & (jnp.sum(a[1] ** 2) < 1e9), turn, (0, x))[1])

    assert operators(loss, PARAMETERS, X) == IN_ONE_BODY
    assert apart(jax.jit(jln.fuse(loss))(PARAMETERS, X), jax.jit(loss)(PARAMETERS, X)) <= 1e-11


def test_a_hessian_vector_product():
    def product(f):
        inner = lambda x: jnp.vdot(jax.grad(f, 1)(PARAMETERS, x), jnp.cos(X))  # noqa: E731
        return jax.jit(jax.grad(inner))(X)

    assert apart(product(jln.fuse(model)), product(model)) <= 1e-10


def test_forward_mode():
    fused = jln.fuse(model, forward_mode=True)
    tangents = jax.tree.map(np.cos, (PARAMETERS, X))
    wanted, got = (jax.jit(lambda f=f: jax.jvp(f, (PARAMETERS, X), tangents))() for f in (model, fused))
    assert apart(got, wanted) <= 1e-11
    wanted, got = (jax.jit(jax.hessian(f, 1))(PARAMETERS, X[:1, :1]) for f in (model, fused))
    assert apart(got, wanted) <= 1e-10


def test_a_mesh_of_explicit_axes():
    on = mesh(2, 2, axis_type=AxisType.Explicit)
    with jax.set_mesh(on):
        x = jax.device_put(X, NamedSharding(on, P("data", None, None)))

        def constrained(p, x):
            return jax.sharding.reshard(block(p, x), P("data", None, None))

        loss = functools.partial(model, block=constrained)
        wanted, got = (jax.jit(jax.value_and_grad(f))(PARAMETERS, x) for f in (loss, jln.fuse(loss)))
        assert apart(got, wanted) <= 1e-11
        assert operators(loss, PARAMETERS, x) == ALL


def test_sharded_arguments_of_a_mesh_of_automatic_axes():
    on = mesh(2, 2)
    x = jax.device_put(X, NamedSharding(on, P("data")))
    p = jax.device_put(PARAMETERS, NamedSharding(on, P()))
    wanted, got = (jax.jit(jax.value_and_grad(f))(p, x) for f in (model, jln.fuse(model)))
    assert apart(got, wanted) <= 1e-11
    assert got[1]["out"].sharding.is_equivalent_to(wanted[1]["out"].sharding, 2)


def test_the_sharding_of_a_product_stays():
    def product(x, kernel):
        y = norm(x, 1.0, 0.0)
        return jnp.einsum("...h,hn->...n", y, kernel, out_sharding=P(None, None, "model"))

    on = mesh(2, 2, axis_type=AxisType.Explicit)
    with jax.set_mesh(on):
        x = jax.device_put(X, P("data", None, None))
        kernel = jax.device_put(normal(H, 8), P(None, "model"))
        types = [jax.typeof(jax.jit(f)(x, kernel)) for f in (product, jln.fuse(product, linears=True))]
    assert types[1] == types[0]


def test_export():
    from jax import export

    exported = export.export(jax.jit(jln.fuse(model)))(PARAMETERS, X)
    assert apart(export.deserialize(exported.serialize()).call(PARAMETERS, X), model(PARAMETERS, X)) <= 1e-11
